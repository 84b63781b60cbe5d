"""Bands, exact rank test, Holm."""

from __future__ import annotations

from itertools import pairwise, permutations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posenc.compare.statistics import BANDS, band_mean, holds_until, holm, rank_test
from posenc.compare.tasks.registry import TASKS


def test_bands_are_open_below_and_closed_above():
    points = [(1.0, 1.0), (1.0625, 0.5), (1.25, 0.0), (1.3, 9.0)]
    assert band_mean(points, BANDS[0]) == 1.0
    assert band_mean(points, BANDS[1]) == 0.25
    assert band_mean(points, BANDS[3]) is None
    assert band_mean([*points, (1.2, None)], BANDS[1]) is None, "undefined somewhere is undefined"


def test_bands_reach_as_far_as_the_tasks_test():
    assert max(probe.ratio for task in TASKS.values() for probe in task.probes()) <= BANDS[-1][1]
    assert all(below[1] == above[0] for below, above in pairwise(BANDS))


def test_holds_until():
    assert holds_until([(0.5, 1.0), (1.0, 0.95), (1.5, 0.2), (2.0, 0.99)], 0.9) == (1.0, True)
    assert holds_until([(0.5, 1.0), (1.0, 0.95)], 0.9) == (1.0, False)
    assert holds_until([(0.5, 1.0), (1.0, None)], 0.9) == (0.5, True)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_the_least_p_of_n_seeds(n):
    a, b = list(range(n)), list(range(100, 100 + n))
    assert rank_test(a, b) == pytest.approx(2 / comb(2 * n, n) if n > 1 else 1.0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=5, max_size=6), st.integers(1, 3))
def test_rank_test_is_the_permutation_test(values, split):
    """Against all orderings of the labels, by the U statistic counted pair by pair."""

    def u(order):
        a, b = order[:split], order[split:]
        return sum((x > y) + 0.5 * (x == y) for x in a for y in b)

    centre = split * (len(values) - split) / 2
    spread = [abs(u(order) - centre) for order in permutations(values)]
    expected = sum(s >= abs(u(values) - centre) - 1e-9 for s in spread) / len(spread)
    assert rank_test(values[:split], values[split:]) == pytest.approx(expected)


def test_holm():
    assert holm([]) == []
    assert holm([0.01]) == [0.01]
    assert holm([0.02, 0.01, 0.9]) == pytest.approx([0.04, 0.03, 0.9])
    assert holm([0.4, 0.5, 0.6]) == pytest.approx([1.0, 1.0, 1.0])
