"""A learned bias per offset inside a window of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from posenc.core.bias import ScoreBias, TableBias
from posenc.core.checks import check_integers
from posenc.core.resize import Mode, resize_table
from posenc.core.sites import ScoreEncoding
from posenc.core.spec import EncodingSpec, Reference


@final
class SwinBias(ScoreEncoding):
    """Adds a learned scalar per head and offset (rows, columns) between two cells of a window to each score.

    The thing people get wrong: the stride of a flat table. The row of offset (r, c) is
    ``(r + height - 1) · (2 · width - 1) + c + width - 1``, with the *width* in the stride; with the height, offsets of
    windows that are not square share rows. Offsets are query - key, as everywhere in posenc.

    Positions are cells, as ``grid(height, width)`` makes them, row after row. Which cells see each other is no matter of
    the bias: give it windows as rows of a batch, or one picture with `same_segment` over window numbers, which is also how
    shifted windows are told. Offsets past the window read the row at its border.

    Args:
        heads: 1 or more.
        window: ``(height, width)`` in cells.

    Shape:
        relative_position_bias_table: ``[(2 · height - 1) · (2 · width - 1), heads]``, named as in the released code and in
        transformers, whose index table a checkpoint may hold beside it; it is fixed, and passed over.

    Returns:
        A `TableBias`; positions must be integers, ``[*batch, seq, 2]``.

    Raises:
        TypeError: sizes that are no integers.
        ValueError: a size below 1, a window that is no pair.

    Example:
        >>> materialize(SwinBias(3, (2, 3))(), grid(2, 3).positions).shape
        torch.Size([3, 6, 6])

    Differs from:
        transformers: the same numbers; the index of every pair of cells is a buffer there.

    References:
        Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", arXiv:2103.14030.
    """

    spec = EncodingSpec(
        name="swin",
        summary="adds a learned scalar per offset of rows and columns to the scores",
        build=lambda shape: [SwinBias(shape.heads, (7, 7))],
        claims=frozenset({"shift-invariant", "any-length"}),
        references=(Reference("Liu et al. 2021", "Swin Transformer: Hierarchical Vision Transformer", "2103.14030"),),
    )
    axes = 2

    def __init__(
        self,
        heads: int,
        window: tuple[int, int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("SwinBias", 1, heads=heads)
        if not isinstance(window, Sequence) or len(window) != 2:
            raise ValueError(f"SwinBias: window = {window!r}. Expected (height, width). Pass both, in cells.")
        check_integers("SwinBias", 1, **{"window height": window[0], "window width": window[1]})
        self.heads, self.window = heads, (window[0], window[1])
        rows, columns = self.spans
        self.relative_position_bias_table = nn.Parameter(torch.empty(rows * columns, heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scalars from N(0, 0.02²), cut at ±2."""
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def extra_repr(self) -> str:
        return f"{self.heads}, window={self.window}"

    @property
    def spans(self) -> tuple[int, int]:
        """How many offsets there are along rows and columns."""
        return 2 * self.window[0] - 1, 2 * self.window[1] - 1

    def resized(self, window: tuple[int, int], *, mode: Mode = "bicubic", antialias: bool | None = None) -> SwinBias:
        """A new encoding with this table stretched or shrunk to another window; offset (0, 0) stays in the middle.

        Args:
            window: the new ``(height, width)``; the same one gives the same bits.
            mode, antialias: as in `posenc.convert.resize_table`.

        Returns:
            A `SwinBias` with a table of its own, on the same device, in the same dtype and mode.
        """
        table = self.relative_position_bias_table
        made = SwinBias(self.heads, window, device=table.device, dtype=table.dtype)
        with torch.no_grad():
            made.relative_position_bias_table.copy_(
                resize_table(table.detach(), made.spans, grid=self.spans, mode=mode, antialias=antialias)
            )
        made.relative_position_bias_table.requires_grad_(table.requires_grad)
        return made.train(self.training)

    def forward(self) -> ScoreBias:
        height, width = self.window
        return TableBias(self.relative_position_bias_table.T.unflatten(-1, self.spans), (height - 1, width - 1))

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
        """torch's own refusal of another size says neither which window was expected nor what to do."""
        name = f"{prefix}relative_position_bias_table"
        rest = {key: value for key, value in state_dict.items() if key != f"{prefix}relative_position_index"}
        given = rest.get(name)
        if isinstance(given, Tensor) and given.shape != self.relative_position_bias_table.shape:
            expected = tuple(self.relative_position_bias_table.shape)
            error_msgs.append(
                f"SwinBias: {name} of shape {tuple(given.shape)} in the state dict. Expected {expected}: a window of "
                f"{self.window[0]} × {self.window[1]} and {self.heads} heads. Build it with the checkpoint's window, load, and take "
                f".resized({self.window})."
            )
            return
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
