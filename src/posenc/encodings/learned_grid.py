"""A trainable row per cell of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.core.checks import check_integers, check_values
from posenc.core.resize import Mode, resize_table
from posenc.core.sites import InputEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.tokens import Positions, check_integer_positions, resolve_positions
from posenc.errors import ShapeError


@final
class LearnedGrid(InputEncoding):
    """Adds a learned vector per cell of a picture's grid, and one per class or register token before it: ViT, DeiT, DINO.

    The thing people get wrong: another picture size. A table of a 14 × 14 grid read for 16 × 16 patches gives every row of
    the picture after the first the codes of other columns, and fits where shapes allow. Here positions outside the grid are
    refused; `resized` stretches a trained table, its prefix kept aside.

    Cell (row, column) reads row ``prefix + row · width + column``. The first ``prefix`` tokens of the sequence read the rows
    before, in order, whatever their positions say: ``grid(14, 14, prefix=1)`` puts them at the origin, where a patch is too.

    Args:
        dim: the model width.
        grid: ``(height, width)`` in patches.
        prefix: class and register tokens, which come first; 1 in ViT.

    Shape:
        x: ``[*batch, seq, dim]``; positions: ``[*batch, seq, 2]`` integers, (row, column).
        weight: ``[prefix + height · width, dim]``; a ViT's table is ``[1, rows, dim]``, so load its ``[0]``.

    Returns:
        ``x`` plus the rows, rounded once to ``x``'s dtype.

    Raises:
        ValueError: a grid without cells; a position outside the grid.
        TypeError: real positions, or an ``int``.
        ShapeError: ``x`` of another width, positions of another number of axes, fewer tokens than the prefix.
        RuntimeError: loading a table of another size; the message names both sizes and the way out.

    Example:
        >>> table = LearnedGrid(8, (2, 3), prefix=1)
        >>> table(torch.zeros(1, 7, 8), grid(2, 3, prefix=1).positions).shape
        torch.Size([1, 7, 8])
        >>> table.resized((4, 6)).weight.shape
        torch.Size([25, 8])

    Differs from:
        transformers (ViT): ``interpolate_pos_encoding=True`` stretches the table on every call; here once, explicitly. DeiT and
            ViT-like models count distillation and register tokens to the prefix.

    References:
        Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words", arXiv:2010.11929.
    """

    spec = EncodingSpec(
        name="learned-grid",
        summary="a trained vector per cell of a grid added to the embeddings",
        build=lambda shape: [LearnedGrid(shape.dim, (shape.max_length, shape.max_length))],
        claims=frozenset(),
        references=(Reference("Dosovitskiy et al. 2020", "An Image is Worth 16x16 Words", "2010.11929"),),
    )
    axes = 2

    def __init__(
        self,
        dim: int,
        grid: tuple[int, int],
        prefix: int = 0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("LearnedGrid", 1, dim=dim)
        check_integers("LearnedGrid", 0, prefix=prefix)
        if not isinstance(grid, Sequence) or len(grid) != 2:
            raise ValueError(f"LearnedGrid: grid = {grid!r}. Expected (height, width). Pass both, in patches.")
        check_integers("LearnedGrid", 1, **{"grid height": grid[0], "grid width": grid[1]})
        self.dim, self.grid, self.prefix = dim, (grid[0], grid[1]), prefix
        self.weight = nn.Parameter(torch.empty(prefix + grid[0] * grid[1], dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rows from N(0, 0.02²)."""
        nn.init.normal_(self.weight, std=0.02)

    def extra_repr(self) -> str:
        return f"{self.dim}, grid={self.grid}, prefix={self.prefix}"

    def resized(self, grid: tuple[int, int], *, mode: Mode = "bicubic", antialias: bool | None = None) -> LearnedGrid:
        """A new encoding with this table stretched or shrunk to another grid; the prefix rows are copied.

        Args:
            grid: the new ``(height, width)``; the same one gives the same bits.
            mode, antialias: as in `posenc.convert.resize_table`.

        Returns:
            A `LearnedGrid` with a weight of its own, on the same device, in the same dtype and mode.
        """
        weight = self.weight.detach()
        made = LearnedGrid(self.dim, grid, self.prefix, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            made.weight.copy_(
                resize_table(weight, made.grid, grid=self.grid, prefix=self.prefix, mode=mode, antialias=antialias)
            )
        made.weight.requires_grad_(self.weight.requires_grad)
        return made.train(self.training)

    def rows(self, positions: Tensor) -> Tensor:
        """The row that each token reads, checked: ``[*batch, seq]``."""
        check_integer_positions(positions, name="LearnedGrid", why="each reads a row of the table")
        cells = positions[..., self.prefix :, :].to(torch.int64)  # a uint8 would wrap
        row, column = cells.unbind(-1)
        height, width = self.grid
        valid = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        check_values(
            valid,
            lambda: (
                f"LearnedGrid: position {tuple(cells[~valid][0].tolist())} of a grid of {self.grid}. Expected rows from 0 to "
                f"{height - 1} and columns from 0 to {width - 1}. Take .resized((height, width)) for pictures of another size."
            ),
        )
        before = torch.arange(self.prefix, dtype=torch.int64, device=positions.device)
        return torch.cat([before.expand(*row.shape[:-1], self.prefix), self.prefix + row * width + column], dim=-1)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ShapeError(f"LearnedGrid: x has width {x.shape[-1]}. Expected {self.dim}. Build it with the model's width.")
        at = resolve_positions(positions, x.shape[-2], name="LearnedGrid", device=x.device, axes=2)
        if self.prefix and x.shape[-2] < self.prefix:
            raise ShapeError(
                f"LearnedGrid: {x.shape[-2]} tokens with prefix = {self.prefix}. Expected at least the prefix. Put class and register "
                "tokens first."
            )
        return (x + F.embedding(self.rows(at), self.weight)).to(x.dtype)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """torch's own refusal of another size says neither which grid was expected nor what to do."""
        given = state_dict.get(prefix + "weight")
        if isinstance(given, Tensor) and given.shape != self.weight.shape:
            height, width = self.grid
            error_msgs.append(
                f"LearnedGrid: {prefix}weight of shape {tuple(given.shape)} in the state dict. Expected {tuple(self.weight.shape)}: "
                f"prefix = {self.prefix} and a grid of {height} × {width}. Build it with the checkpoint's grid, load, and take "
                f".resized({self.grid}); or load posenc.convert.resize_table(weight, {self.grid}, prefix={self.prefix})."
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
