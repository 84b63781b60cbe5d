"""Whether positions can be told apart by their codes, and by their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import final

import torch
from torch import Tensor

from posenc.analysis.similarity import check_codes
from posenc.core.checks import check_integers, check_values
from posenc.errors import ShapeError

_BLOCK = 256


@final
@dataclass(frozen=True)
class CodeDistances:
    """How far apart the codes of a table are.

    Args:
        positions: how many rows there are.
        distinct: how many different ones.
        largest: the largest magnitude of any entry.
        adjacent: the least and the greatest distance between neighbouring rows.
        closest: the least distance between any two rows.
        closest_pair: the first two rows that are so close.
    """

    positions: int
    distinct: int
    largest: float
    adjacent: tuple[float, float]
    closest: float
    closest_pair: tuple[int, int]


def code_distances(codes: Tensor, *, dtype: torch.dtype | None = None) -> CodeDistances:
    """Whether every position has a code of its own, how large codes get, and which two are closest.

    The thing people get wrong: the neighbour is usually the closest, but rounding moves codes together; ``dtype`` shows
    what a cast does to them. Distances are formed exactly, without the matrix product that loses them.

    Args:
        codes: one row per position, two rows or more.
        dtype: the rows are rounded to it first.

    Shape:
        codes: ``[positions, dim]``.

    Raises:
        ShapeError: another shape, or fewer than two rows. ValueError: entries that are not finite.

    Example:
        >>> found = code_distances(Sinusoidal(64).table(torch.arange(300)))
        >>> found.distinct, found.closest_pair[1] - found.closest_pair[0]
        (300, 1)
        >>> f"{found.adjacent[0]:.4f} to {found.adjacent[1]:.4f}, entries up to {found.largest:.1f}"
        '1.4718 to 1.4718, entries up to 1.0'
    """
    check_codes("code_distances", codes)
    if codes.ndim != 2 or len(codes) < 2:
        raise ShapeError(
            f"code_distances: codes of shape {tuple(codes.shape)}. Expected [positions, dim] with two positions or more. "
            "Pass the table of one sequence."
        )
    check_values(
        codes.isfinite(),
        lambda: (
            f"code_distances: codes hold {codes[~codes.isfinite()][0].item()}. Expected finite numbers. Look at their origin."
        ),
    )
    rows = (codes if dtype is None else codes.to(dtype)).detach().to(torch.float64)
    adjacent = (rows[1:] - rows[:-1]).norm(dim=-1)
    closest, pair = _closest(rows)
    return CodeDistances(
        positions=len(rows),
        distinct=len(rows.unique(dim=0)),
        largest=rows.abs().max().item(),
        adjacent=(adjacent.min().item(), adjacent.max().item()),
        closest=closest,
        closest_pair=pair,
    )


def _closest(rows: Tensor) -> tuple[float, tuple[int, int]]:
    """Block by block, since all pairs at once need positions² entries."""
    least, pair = inf, (0, 1)
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK]
        distance = torch.cdist(block, rows[start:], compute_mode="donot_use_mm_for_euclid_dist")
        later = torch.ones_like(distance, dtype=torch.bool).triu(1)
        distance = distance.where(later, inf)
        at = int(distance.argmin())
        row, column = divmod(at, distance.shape[1])
        if distance[row, column] < least:
            least, pair = distance[row, column].item(), (start + row, start + column)
    return least, pair


def distinct_positions(start: int, count: int, dtype: torch.dtype) -> int:
    """How many of ``count`` consecutive positions from ``start`` are still different in a dtype.

    The thing people get wrong: casting a model casts its positions too, if they are floating point. bfloat16 holds the
    integers up to 256, float16 up to 2048, and neighbours share a number above.

    Args:
        start: 0 or more.
        count: 1 or more.
        dtype: floating point.

    Raises:
        TypeError: not integers, or a dtype that is not floating point. ValueError: out of range.

    Example:
        >>> distinct_positions(0, 256, torch.bfloat16), distinct_positions(8192, 256, torch.bfloat16)
        (256, 5)
    """
    check_integers("distinct_positions", 0, start=start)
    check_integers("distinct_positions", 1, count=count)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"distinct_positions: dtype = {dtype}. Expected a floating-point dtype. Integers stay apart.")
    return len(torch.arange(start, start + count, dtype=torch.float64).to(dtype).to(torch.float64).unique())
