"""Proportional RoPE."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import Geometric, RoPE
from posenc.schedules.linear import Linear
from posenc.schedules.proportional import Proportional

from . import oracle


@pytest.mark.parametrize(
    ("dim", "turning", "second", "last"), [(256, 32, 0.8976871324, 0.03522694651), (512, 64, 0.9474635257, 0.03337624694)]
)
def test_known_values(dim, turning, second, last):
    inv_freq = Proportional(Geometric(1e6), 0.25).frequencies(dim).inv_freq
    assert inv_freq[[1, turning - 1]].tolist() == pytest.approx([second, last], rel=1e-9)
    assert inv_freq[turning:].tolist() == [0.0] * (dim // 2 - turning)


def test_it_is_not_a_narrower_rotary_width():
    partial = Geometric(1e6).frequencies(64).inv_freq
    assert partial[[1, 31]].tolist() == pytest.approx([0.6493816316, 1.539926526e-6], rel=1e-9)
    assert not torch.equal(partial, Proportional(Geometric(1e6), 0.25).frequencies(256).inv_freq[:32])


@given(st.integers(1, 64), st.floats(1.5, 1e7), st.floats(0, 1), st.floats(1, 64))
def test_values(pairs, base, proportion, factor):
    inv_freq = Proportional(Geometric(base), proportion, factor).frequencies(2 * pairs).inv_freq
    expected = oracle.proportional(base, 2 * pairs, proportion, factor)
    assert inv_freq.tolist() == pytest.approx(expected, rel=oracle.allowed(base), abs=0.0)


def test_all_pairs_are_rope_and_none_is_no_rotation():
    assert torch.equal(Proportional(Geometric(5e5), 1.0).frequencies(64).inv_freq, Geometric(5e5).frequencies(64).inv_freq)
    x = torch.randn(1, 2, 5, 64)
    assert torch.equal(RoPE(64, Proportional(Geometric(), 0))(x, x, 1000)[0], x)


def test_the_factor_is_linear_interpolation():
    inside = Proportional(Geometric(1e6), 0.25)
    assert torch.equal(
        Proportional(Geometric(1e6), 0.25, 8.0).frequencies(256).inv_freq, Linear(inside, 8.0).frequencies(256).inv_freq
    )


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"proportion": 1.5}, ValueError, r"Proportional: proportion = 1.5. Expected a number from 0 to 1"),
        ({"proportion": -0.25}, ValueError, r"Proportional: proportion = -0.25. Expected a finite number of 0 or more"),
        ({"proportion": float("nan")}, ValueError, r"Proportional: proportion = nan. Expected a finite number of 0 or more"),
        ({"proportion": True}, TypeError, r"Proportional: proportion = True. Expected a finite number of 0 or more"),
        ({"factor": 0.5}, ValueError, r"Proportional: factor = 0.5. Expected a finite number of 1 or more"),
        ({"schedule": 1e6}, TypeError, r"Proportional: schedule = 1000000.0. Expected a Geometric"),
    ],
)
def test_impossible_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        Proportional(**({"schedule": Geometric(), "proportion": 0.25} | settings))
