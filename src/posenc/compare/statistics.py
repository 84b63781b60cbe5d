"""Bands of length, exact tests over seeds, intervals by resampling, and what follows from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

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


DRAWS = 10_000


class Measured(NamedTuple):
    """The value of one probe, and what its sampling error over items follows from.

    Args:
        value: a share of items, or a mean.
        spread: the standard deviation among items; ``None`` for a share, where the value says it.
    """

    value: float
    items: int
    spread: float | None = None


def bootstrap(seeds: Sequence[Sequence[Measured]], draws: int = DRAWS) -> Tensor:
    """The means of ``draws`` samples that are drawn hierarchically: seeds with replacement, then each seed's items.

    A share of k among n items is drawn from the binomial distribution of n and k/n, which is exactly n of these items with
    replacement. A mean is drawn from the normal distribution with its standard error, one deviate for all probes of a seed,
    since they score the same items.

    Args:
        seeds: per seed, the probes of the band; as many for each.

    Returns:
        ``[draws]`` float64; the same for the same numbers.
    """
    generator = torch.Generator().manual_seed(20_231)
    picked = torch.randint(0, len(seeds), (draws, len(seeds)), generator=generator)
    values = torch.tensor([[probe.value for probe in seed] for seed in seeds], dtype=torch.float64)[picked]
    items = torch.tensor([[float(probe.items) for probe in seed] for seed in seeds], dtype=torch.float64)[picked]
    if any(probe.spread is None for seed in seeds for probe in seed):
        return (torch.binomial(items, values.clamp(0, 1), generator=generator) / items).mean((1, 2))
    spread = torch.tensor([[probe.spread for probe in seed] for seed in seeds], dtype=torch.float64)[picked]
    deviate = torch.randn(draws, len(seeds), 1, dtype=torch.float64, generator=generator)
    return (values + deviate * spread / items.sqrt()).mean((1, 2))


def interval(seeds: Sequence[Sequence[Measured]], draws: int = DRAWS) -> tuple[float, float]:
    """The 95 % interval of the mean over seeds and probes, by `bootstrap`."""
    low, high = torch.quantile(bootstrap(seeds, draws), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def beats(a: Sequence[float], b: Sequence[float]) -> float:
    """The probability that a random value of ``a`` is above a random one of ``b``; a tie counts half.

    Example:
        >>> beats([1.0, 0.0], [0.0, 0.0])
        0.75
    """
    return fmean((x > y) + 0.5 * (x == y) for x in a for y in b)


def interquartile_mean(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter, rounded down in number.

    Example:
        >>> interquartile_mean([0.0, 0.5, 0.7, 9.0])
        0.6
    """
    cut = len(values) // 4
    return fmean(sorted(values)[cut : len(values) - cut])


def tiers(ordered: Sequence[str], edges: Collection[tuple[str, str]]) -> list[list[str]]:
    """Rows from best to worst in groups: a row opens a new one only when every row of the group is separated from it.

    Args:
        edges: the pairs that a test tells apart, in either order.

    Example:
        >>> tiers(["a", "b", "c"], {("c", "a"), ("b", "c")})
        [['a', 'b'], ['c']]
    """
    groups: list[list[str]] = []
    for row in ordered:
        if groups and not all({(row, other), (other, row)} & set(edges) for other in groups[-1]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
