"""NTK-aware scaling."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import Geometric
from posenc.schedules.linear import Linear
from posenc.schedules.ntk import NTK

from . import oracle


def test_known_values():
    inv_freq = NTK(Geometric(1e4), 4.0).frequencies(128).inv_freq
    assert inv_freq[[1, 32]].tolist() == pytest.approx([0.8471171852, 0.004945289841], rel=1e-9)
    assert inv_freq[63] / Geometric(1e4).frequencies(128).inv_freq[63] == pytest.approx(0.25, rel=1e-14)
    assert torch.equal(inv_freq, Geometric(1e4 * 4.0 ** (128 / 126)).frequencies(128).inv_freq)


@given(st.integers(2, 64), st.floats(1.5, 1e7), st.floats(1, 1e3))
def test_values(pairs, base, factor):
    inv_freq = NTK(Geometric(base), factor).frequencies(2 * pairs).inv_freq
    # the grown base is at most base · factor², and its own roundings count once more
    allowed = oracle.allowed(base * factor**2)
    assert inv_freq.tolist() == pytest.approx(oracle.ntk(base, 2 * pairs, factor), rel=allowed)
    ratio = (inv_freq / Geometric(base).frequencies(2 * pairs).inv_freq).tolist()
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(1 / factor, rel=1e-12)
    assert all(b <= a * (1 + allowed) for a, b in pairwise(ratio))


def test_a_factor_of_one_changes_nothing():
    ladder = Geometric(5e5).frequencies(128).inv_freq
    assert torch.equal(NTK(Geometric(5e5), 1).frequencies(128).inv_freq, ladder)


def test_a_single_pair_is_refused():
    with pytest.raises(ValueError, match=r"NTK.frequencies: rotary_dim = 2. Expected 4 or more: .* Use Linear"):
        NTK(Geometric(), 2.0).frequencies(2)
    with pytest.raises(ValueError, match=r"NTK.frequencies: rotary_dim = 5. Expected an even integer"):
        NTK(Geometric(), 2.0).frequencies(5)


@pytest.mark.parametrize("schedule", [10000.0, Geometric, Linear(Geometric(), 2.0)])
def test_only_a_ladder_with_a_base_can_grow(schedule):
    with pytest.raises(TypeError, match=r"NTK: schedule = .* Expected a Geometric, whose base the rule reads"):
        NTK(schedule, 2.0)


def test_impossible_factors_are_refused():
    with pytest.raises(ValueError, match=r"NTK: factor = 0.5. Expected a finite number of 1 or more. .* pass its inverse"):
        NTK(Geometric(), 0.5)
