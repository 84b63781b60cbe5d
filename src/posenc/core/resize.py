"""Learned position tables at another size."""

from __future__ import annotations

from math import isqrt
from typing import Literal

import torch
from torch import Tensor

from posenc.errors import ShapeError

Mode = Literal["linear", "bicubic"]


def resize_table(
    weight: Tensor,
    to: int | tuple[int, int],
    *,
    grid: tuple[int, int] | None = None,
    prefix: int = 0,
    mode: Mode = "bicubic",
    align_corners: bool = False,
    antialias: bool | None = None,
    offset: float = 0.0,
) -> Tensor:
    """A learned table stretched or shrunk to another number of positions, along a line or over a grid.

    The thing people get wrong: the rows that are no positions. Class and register tokens come first and must not be
    mixed with the picture; ``prefix`` says how many there are. A target given as a scale instead of a size loses a row
    or a column to rounding for many sizes; here the target is always the size.

    Args:
        weight: rows are positions.
        to: the new number of rows beside the prefix; for a grid ``(height, width)``.
        grid: the old ``(height, width)``, row after row; for ``to`` of two numbers a square by default.
        prefix: rows at the start that are kept as they are.
        mode: ``"linear"`` (bilinear over a grid) or ``"bicubic"``.
        align_corners: whether the first and last positions keep their places; by default each position is the middle of
            its cell, as vision models have it.
        antialias: whether to smooth before sampling. ``None``: where an axis shrinks. Not with ``align_corners``.
        offset: added to the target size where the sampling step is computed; 0.1 reproduces DINO and DINOv2 checkpoints
            of before 2024, which did so against rounding. Other uses have no reason for it.

    Shape:
        weight: ``[*batch, prefix + rows, dim]``; the result ``[*batch, prefix + new rows, dim]``.

    Returns:
        A new tensor in weight's dtype, computed in float32 or wider. The same size gives the same bits.

    Raises:
        ShapeError: rows that are not the prefix and the grid, or no square where a grid is needed.
        ValueError: a target below 1, an unknown mode, an antialias that the mode does not have.

    Example:
        >>> resize_table(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), 7, mode="linear", align_corners=True).flatten()
        tensor([0.0000, 0.5000, 1.0000, 1.5000, 2.0000, 2.5000, 3.0000])

    Differs from:
        timm: ``resample_abs_pos_embed`` always smooths; equal with ``antialias=True``.
        DINOv2: passes a scale and an offset of 0.1 by default.

    References:
        Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words", arXiv:2010.11929, §3.2.
    """
    target = (1, to) if isinstance(to, int) else to
    _check(weight, target, prefix, mode, align_corners, antialias, offset)
    rows = weight.shape[-2] - prefix
    source = (1, rows) if isinstance(to, int) else _grid_of(rows, grid, prefix)
    if isinstance(to, int) and grid is not None:
        raise ValueError(
            f"resize_table: grid = {grid} with to = {to}. Expected to = (height, width) for a grid. Pass both numbers."
        )
    if source == target:
        return weight.clone()
    smooth = any(new < old for new, old in zip(target, source, strict=True)) if antialias is None else antialias
    smooth = smooth and not align_corners
    kept, table = weight[..., :prefix, :], weight[..., prefix:, :]
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    batch, dim = weight.shape[:-2], weight.shape[-1]
    picture = table.reshape(-1, *source, dim).permute(0, 3, 1, 2).to(wide)
    steps = [(new + offset) / old if offset and old > 1 else None for new, old in zip(target, source, strict=True)]
    resized: Tensor = _resample(mode, smooth)(picture, list(target), align_corners, *steps)
    flat = resized.permute(0, 2, 3, 1).reshape(*batch, target[0] * target[1], dim).to(weight.dtype)
    return torch.cat([kept, flat], dim=-2)


def _resample(mode: Mode, smooth: bool) -> torch._ops.OpOverload:
    """torch's own resampling by size *and* step; `torch.nn.functional.interpolate` takes one of the two."""
    operators = torch.ops.aten
    if mode == "linear":
        return operators._upsample_bilinear2d_aa.default if smooth else operators.upsample_bilinear2d.default
    return operators._upsample_bicubic2d_aa.default if smooth else operators.upsample_bicubic2d.default


def _grid_of(rows: int, grid: tuple[int, int] | None, prefix: int) -> tuple[int, int]:
    if grid is None:
        side = isqrt(rows)
        if side * side != rows:
            raise ShapeError(
                f"resize_table: {rows} rows after prefix = {prefix}, which is no square. Expected prefix + height · width rows. Pass "
                "grid=(height, width), or another prefix."
            )
        return side, side
    if len(grid) != 2 or grid[0] * grid[1] != rows:
        raise ShapeError(
            f"resize_table: {rows} rows after prefix = {prefix} for grid = {grid}. Expected height · width rows. Look at the model's "
            "patch grid and how many class and register tokens it has."
        )
    return grid[0], grid[1]


def _check(
    weight: Tensor, target: tuple[int, int], prefix: int, mode: Mode, align_corners: bool, antialias: bool | None, offset: float
) -> None:
    if weight.ndim < 2 or not weight.is_floating_point():
        raise ShapeError(
            f"resize_table: a weight of {weight.dtype} and shape {tuple(weight.shape)}. Expected floating [*batch, rows, dim]. Pass the "
            "table's weight."
        )
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in target)
    if len(target) != 2 or not whole or min(target) < 1:
        raise ValueError(
            f"resize_table: to = {target}. Expected a number of rows or (height, width), 1 or more. Pass the new size."
        )
    if not isinstance(prefix, int) or isinstance(prefix, bool) or not 0 <= prefix < weight.shape[-2]:
        raise ValueError(
            f"resize_table: prefix = {prefix} of {weight.shape[-2]} rows. Expected 0 or more, and rows left after it. Pass how many class "
            "and register tokens the table starts with."
        )
    if mode not in ("linear", "bicubic"):
        raise ValueError(f"resize_table: mode = {mode!r}. Expected 'linear' or 'bicubic'. Name one.")
    if antialias and align_corners:
        raise ValueError(
            "resize_table: antialias with align_corners. Expected one of them, since smoothing works on cells. Leave one out."
        )
    if not 0 <= offset < 1:
        raise ValueError(
            f"resize_table: offset = {offset}. Expected 0, or 0.1 for old DINO checkpoints. Leave it out otherwise."
        )
