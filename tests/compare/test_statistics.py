"""Bands, exact rank test, Holm; resampling against full enumeration."""

from __future__ import annotations

from itertools import pairwise, permutations, product
from math import comb, erf, log, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posenc.compare.statistics import (
    BANDS,
    DRAWS,
    Measured,
    band_mean,
    beats,
    bootstrap,
    holds_until,
    holm,
    interquartile_mean,
    interval,
    rank_test,
    tiers,
)
from posenc.compare.tasks.registry import TASKS, find_task


def test_bands_are_open_below_and_closed_above():
    points = [(1.0, 1.0), (1.0625, 0.5), (1.25, 0.0), (1.3, 9.0)]
    assert band_mean(points, BANDS[0]) == 1.0
    assert band_mean(points, BANDS[1]) == 0.25
    assert band_mean(points, BANDS[3]) is None
    assert band_mean([*points, (1.2, None)], BANDS[1]) is None, "undefined somewhere is undefined"


def test_bands_reach_as_far_as_the_tasks_test():
    every = [*TASKS.values(), find_task("text")]
    assert max(probe.ratio for task in every for probe in task.probes()) <= BANDS[-1][1]
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


CLOSE = sqrt(log(2 / 1e-9) / (2 * DRAWS))
"""Dvoretzky, Kiefer and Wolfowitz: what the empirical distribution of so many draws is off by, but once in 10⁹."""


def resampled(seeds: list[list[tuple[int, int]]]) -> dict[float, float]:
    """The distribution of the hierarchical bootstrap's mean by full enumeration, of seeds that are lists of (k of n)."""
    found: dict[float, float] = {}
    for picked in product(seeds, repeat=len(seeds)):
        cells = [cell for seed in picked for cell in seed]
        for counts in product(*(range(n + 1) for _, n in cells)):
            weight = len(seeds) ** -len(seeds)
            for (k, n), count in zip(cells, counts, strict=True):
                weight *= comb(n, count) * (k / n) ** count * (1 - k / n) ** (n - count)
            mean = sum(count / n for (_, n), count in zip(cells, counts, strict=True)) / len(cells)
            found[round(mean, 9)] = found.get(round(mean, 9), 0.0) + weight
    return found


@pytest.mark.parametrize(
    "seeds",
    [
        [[(1, 2)], [(2, 3)]],
        [[(0, 2)], [(3, 4)], [(1, 1)]],
        [[(1, 2), (2, 4)], [(0, 2), (4, 4)]],
        [[(3, 5)]],
    ],
)
def test_the_bootstrap_draws_from_the_enumerated_distribution(seeds):
    exact = resampled(seeds)
    drawn = bootstrap([[Measured(k / n, n) for k, n in seed] for seed in seeds])
    assert drawn.shape == (DRAWS,)
    for mean in exact:
        expected = sum(weight for value, weight in exact.items() if value <= mean)
        assert abs(float((drawn <= mean + 1e-6).double().mean()) - expected) <= CLOSE


def test_the_bootstrap_of_a_mean_is_a_mixture_of_normals():
    """Two seeds of two probes each, whose probes move together; the mixture over the four pairs of seeds, by hand."""
    seeds = [[Measured(1.0, 4, 0.2), Measured(2.0, 4, 0.6)], [Measured(3.0, 4, 0.0), Measured(5.0, 4, 0.4)]]
    drawn = bootstrap(seeds)
    centre = [1.5, 4.0]
    error = [(0.2 + 0.6) / 2 / 2, (0.0 + 0.4) / 2 / 2]  # 2 = √4 items
    for at in (1.2, 1.5, 2.4, 2.75, 3.0, 4.0, 4.1):
        expected = 0.0
        for a, b in product(range(2), repeat=2):
            mean, width = (centre[a] + centre[b]) / 2, sqrt(error[a] ** 2 + error[b] ** 2) / 2
            expected += 0.25 * 0.5 * (1 + erf((at - mean) / width / sqrt(2)))
        assert abs(float((drawn <= at).double().mean()) - expected) <= CLOSE


def test_intervals_repeat_and_shrink_with_seeds_and_items():
    wide, narrow = (interval([[Measured(v, items)] for v in (0.4, 0.5, 0.6)]) for items in (16, 256))
    assert wide == interval([[Measured(v, 16)] for v in (0.4, 0.5, 0.6)])
    assert wide[0] < narrow[0] < 0.5 < narrow[1] < wide[1]
    assert interval([[Measured(1.0, 16)]] * 3) == (1.0, 1.0), "nothing varies, nothing is drawn"
    before = torch.random.get_rng_state()
    interval([[Measured(0.5, 16)]])
    assert torch.equal(before, torch.random.get_rng_state())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_beats_is_the_share_of_pairs(a, b):
    wins = [1.0 if x > y else 0.5 if x == y else 0.0 for x in a for y in b]
    assert beats(a, b) == pytest.approx(sum(wins) / len(wins))
    assert beats(a, b) + beats(b, a) == pytest.approx(1.0)


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert interquartile_mean([9.0, 1.0, 2.0, 3.0, -50.0, 2.0, 1.0, 70.0]) == pytest.approx((1 + 2 + 2 + 3) / 4)
    assert interquartile_mean([1.0, 2.0, 6.0]) == 3.0, "fewer than four: nothing is left out"


def test_tiers_part_only_what_is_told_apart():
    assert tiers([], set()) == []
    assert tiers(["a", "b", "c"], set()) == [["a", "b", "c"]]
    assert tiers(["a", "b", "c"], {("a", "b"), ("a", "c")}) == [["a"], ["b", "c"]]
    assert tiers(["a", "b", "c"], {("a", "c")}) == [["a", "b", "c"]], "b is not told apart from c"
    assert tiers(["a", "b", "c"], {("b", "a"), ("c", "b")}) == [["a"], ["b"], ["c"]]
