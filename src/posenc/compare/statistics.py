"""Bands of length, the gate, and exact tests over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

BANDS = ((0.0, 1.0), (1.0, 1.25), (1.25, 1.5), (1.5, 2.0), (2.0, 4.0), (4.0, 8.0))
"""Half-open on the left, in trained lengths: (0, 1] is in range."""
PRIMARY = (1.0, 1.5)
"""The band of the primary number."""


def band_mean(points: Sequence[tuple[float, float | None]], band: tuple[float, float]) -> float | None:
    """The mean over a band of (ratio, value) points; ``None`` when it holds none or one is undefined.

    Example:
        >>> band_mean([(0.5, 1.0), (1.1, 0.5), (1.25, 0.0)], (1.0, 1.25))
        0.25
    """
    values = [value for ratio, value in points if band[0] < ratio <= band[1]]
    return None if not values or None in values else fmean(v for v in values if v is not None)


def holds_until(points: Sequence[tuple[float, float | None]], threshold: float) -> tuple[float, bool]:
    """The last ratio up to which every value reaches the threshold, and whether one falls below it after.

    Without a fall the largest ratio tested and ``False``: at least that. Undefined counts as below.
    """
    last = 0.0
    for ratio, value in sorted(points, key=lambda point: point[0]):
        if value is None or value < threshold:
            return last, True
        last = ratio
    return last, False


def rank_test(a: Sequence[float], b: Sequence[float]) -> float:
    """The exact two-sided p-value of Mann and Whitney's rank test, ties at their mean rank, by full enumeration.

    With n seeds a side it can never be below 2 / C(2n, n): 0.1 for three, 0.0079 for five.

    Example:
        >>> round(rank_test([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]), 4)
        0.0079
    """
    pooled = [*a, *b]
    ranks = [fmean(r for r, v in enumerate(sorted(pooled), start=1) if v == value) for value in pooled]
    centre = len(a) * (len(pooled) + 1) / 2
    observed = abs(sum(ranks[: len(a)]) - centre)
    sums = [sum(chosen) for chosen in combinations(ranks, len(a))]
    return sum(abs(total - centre) >= observed - 1e-9 for total in sums) / len(sums)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number by Holm's step-down rule.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = running
    return corrected
