"""Linear interpolation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import Explicit, Geometric, RoPE
from posenc.schedules.linear import Linear

from . import oracle


def test_known_values():
    inv_freq = Linear(Geometric(1e4), 4.0).frequencies(128).inv_freq
    assert inv_freq[[0, 1, 63]].tolist() == pytest.approx([0.25, 0.2164910808, 2.886954962e-5], rel=1e-9)


def test_the_factor_divides():
    # ml-explore/mlx#261
    (cos, sin), _ = RoPE(2, Linear(Geometric(), 4.0)).prepare(torch.tensor([8]), dtype=torch.float64)
    assert torch.atan2(sin, cos).item() == pytest.approx(2.0, rel=1e-15)


@given(st.integers(1, 64), st.floats(1.5, 1e7), st.floats(1, 1e3))
def test_values(pairs, base, factor):
    inv_freq = Linear(Geometric(base), factor).frequencies(2 * pairs).inv_freq
    assert inv_freq.tolist() == pytest.approx(oracle.linear(base, 2 * pairs, factor), rel=oracle.allowed(base))
    ratio = inv_freq / Geometric(base).frequencies(2 * pairs).inv_freq
    assert ratio.tolist() == pytest.approx([1 / factor] * pairs, rel=1e-15)


def test_a_factor_of_one_changes_nothing():
    ladder = Geometric(5e5).frequencies(128).inv_freq
    assert torch.equal(Linear(Geometric(5e5), 1).frequencies(128).inv_freq, ladder)


def test_an_amplitude_inside_is_kept():
    frequencies = Linear(Explicit((1.0, 0.5), amplitude=1.2), 2.0).frequencies(4)
    assert frequencies.inv_freq.tolist() == [0.5, 0.25]
    assert frequencies.amplitude == 1.2


@pytest.mark.parametrize("factor", [0.25, 0, -1.0, float("nan"), float("inf")])
def test_impossible_factors_are_refused(factor):
    advice = "pass its inverse" if factor == 0.25 else "Look at the configuration"
    with pytest.raises(ValueError, match=rf"Linear: factor = .* Expected a finite number of 1 or more\..*{advice}"):
        Linear(Geometric(), factor)


@pytest.mark.parametrize("factor", [True, "8", None, [8.0]])
def test_factors_that_are_no_numbers_are_refused(factor):
    with pytest.raises(
        TypeError, match=r"Linear: factor = .* Expected a finite number of 1 or more. Pass a plain int or float"
    ):
        Linear(Geometric(), factor)


@pytest.mark.parametrize("schedule", [10000.0, None, Geometric])
def test_what_is_no_schedule_is_refused(schedule):
    with pytest.raises(TypeError, match=r"Linear: schedule = .* Expected a schedule such as Geometric"):
        Linear(schedule, 8.0)
