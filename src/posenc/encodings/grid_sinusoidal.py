"""The fixed sine and cosine code of a grid."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor

from posenc.core.checks import check_integers
from posenc.core.conventions import Layout, check_convention, code, ladder
from posenc.core.rotary import Frequencies
from posenc.core.sites import InputEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.tokens import Positions, resolve_positions
from posenc.errors import ShapeError

AxisOrder = Literal["width-first", "height-first"]
"""Which axis the first channels read: the last axis of `grid`, or its first."""


@final
class GridSinusoidal(InputEncoding):
    """Adds sines and cosines of each coordinate, in an equal share of the channels per axis: MAE, and ViT without training.

    The thing people get wrong: the order of the axes. MAE's released code calls its first half height and fills it with the
    *column*, and all that descend from it read it so: that is ``"width-first"``. On square pictures the other order is
    merely a mirror image that the weights never saw. The second thing: flattening. Tokens of `grid` come row after row, and
    so do flattened patches.

    Each share is a code of its own width, ``base^(-2i / (dim/axes))``.

    Args:
        dim: the model width, a multiple of twice the axes.
        axes: how many numbers a position has; 2 for pictures, 3 for video (time, height, width).
        axis_order: ``"width-first"``: shares read the axes from last to first; ``"height-first"``: as they come, which with
            three axes puts time first.
        layout: of each share, as in `Sinusoidal`.
        base: above 0.
        prefix: how many tokens at the start of the sequence get no code: class and register tokens, as in MAE. They are
            told by their place in the sequence, since ``grid(…, prefix=1)`` puts them at the origin, where a patch is.

    Shape:
        x: ``[*batch, seq, dim]``; positions: ``[*batch, seq, axes]``, any real numbers.

    Returns:
        ``x`` plus the code, rounded once to ``x``'s dtype.

    Raises:
        ValueError: a width that the axes do not divide, an unknown order or layout.
        ShapeError: ``x`` of another width, positions of another number of axes, fewer tokens than the prefix.
        TypeError: half-precision positions, or an ``int``.

    Example:
        >>> patches = grid(2, 3, prefix=1)
        >>> GridSinusoidal(4, prefix=1)(torch.zeros(7, 4), patches.positions)[[0, 1, 6]]
        tensor([[ 0.0000,  0.0000,  0.0000,  0.0000],
                [ 0.0000,  1.0000,  0.0000,  1.0000],
                [ 0.9093, -0.4161,  0.8415,  0.5403]])

    Differs from:
        MAE: the same table, ``get_2d_sincos_pos_embed``; there for square grids.
        diffusers: its video tables give a quarter of the channels to time and the rest to space, no equal shares.

    References:
        He et al. 2021, "Masked Autoencoders Are Scalable Vision Learners", arXiv:2111.06377; Chen et al. 2021, "An Empirical
        Study of Training Self-Supervised Vision Transformers", arXiv:2104.02057.
    """

    spec = EncodingSpec(
        name="grid-sinusoidal",
        summary="fixed sines and cosines of each coordinate added to the embeddings",
        build=lambda shape: [GridSinusoidal(shape.dim)],
        claims=frozenset({"parameter-free", "any-length", "real-positions"}),
        references=(
            Reference("He et al. 2021", "Masked Autoencoders Are Scalable Vision Learners", "2111.06377"),
            Reference("Chen et al. 2021", "An Empirical Study of Training Self-Supervised ViTs", "2104.02057"),
        ),
    )
    axes: int

    def __init__(
        self,
        dim: int,
        axes: int = 2,
        *,
        axis_order: AxisOrder = "width-first",
        layout: Layout = "concatenated",
        base: float = 10_000.0,
        prefix: int = 0,
    ) -> None:
        super().__init__()
        check_integers("GridSinusoidal", 1, dim=dim, axes=axes)
        check_integers("GridSinusoidal", 0, prefix=prefix)
        check_convention("GridSinusoidal", layout, "paper", base)
        if dim % (2 * axes):
            raise ValueError(
                f"GridSinusoidal: dim = {dim} for {axes} axes. Expected a multiple of {2 * axes}, a sine and a cosine for each "
                "axis. Choose another width."
            )
        if axis_order not in ("width-first", "height-first"):
            raise ValueError(
                f"GridSinusoidal: axis_order = {axis_order!r}. Expected 'width-first' or 'height-first'. MAE is 'width-first'."
            )
        self.dim, self.axes, self.axis_order, self.prefix = dim, axes, axis_order, prefix
        self.layout, self.base = layout, float(base)

    def extra_repr(self) -> str:
        settings = f"layout={self.layout!r}, base={self.base:g}, prefix={self.prefix}"
        return f"{self.dim}, axes={self.axes}, axis_order={self.axis_order!r}, {settings}"

    def table(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The code of each position, ``[*batch, seq, dim]``, prefix or not."""
        share = self.dim // self.axes
        frequencies = Frequencies(ladder(share, "paper", self.base, device=positions.device))
        axes = range(self.axes)[:: -1 if self.axis_order == "width-first" else 1]
        shares = [code(positions[..., axis], frequencies, share, layout=self.layout, dtype=dtype) for axis in axes]
        return torch.cat(shares, dim=-1)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ShapeError(
                f"GridSinusoidal: x has width {x.shape[-1]}. Expected {self.dim}. Build it with the model's width."
            )
        at = resolve_positions(positions, x.shape[-2], name="GridSinusoidal", device=x.device, axes=self.axes)
        if self.prefix and x.shape[-2] < self.prefix:
            raise ShapeError(
                f"GridSinusoidal: {x.shape[-2]} tokens with prefix = {self.prefix}. Expected at least the prefix. Put class and "
                "register tokens first."
            )
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        table = self.table(at[..., self.prefix :, :], dtype=wide)
        return (x + torch.nn.functional.pad(table, (0, 0, self.prefix, 0))).to(x.dtype)
