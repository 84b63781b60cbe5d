"""The geometric ladder."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import Geometric


@pytest.mark.parametrize(("base", "second"), [(5e5, 0.81461723385654), (1e6, 0.80584218776148)])
def test_known_frequencies(base, second):
    assert Geometric(base).frequencies(128).inv_freq[1].item() == pytest.approx(second, rel=1e-12)


def test_partial_width_has_its_own_ladder():
    inv_freq = Geometric(1e6).frequencies(64).inv_freq
    assert inv_freq[[1, 31]].tolist() == pytest.approx([0.6493816316, 1.539926526e-6], rel=1e-9)


@given(st.integers(1, 64), st.floats(1.5, 1e7))
def test_ladder_is_geometric_from_one(pairs, base):
    frequencies = Geometric(base).frequencies(2 * pairs)
    assert frequencies.amplitude == 1.0
    assert frequencies.inv_freq.dtype == torch.float64
    expected = [base ** (-i / pairs) for i in range(pairs)]
    # the exponent's own rounding is magnified by ln(base) ≤ 17; the power and the quotient add a few roundings
    assert frequencies.inv_freq.tolist() == pytest.approx(expected, rel=64 * 2**-53)
    assert frequencies.inv_freq[0] == 1.0


def test_float32_follows_the_reference_order_of_operations():
    inv_freq = Geometric(5e5).frequencies(128, dtype=torch.float32).inv_freq
    exponent = torch.arange(0, 128, 2, dtype=torch.int64).float() / 128
    assert torch.equal(inv_freq, 1.0 / (5e5**exponent))


def test_schedules_are_values():
    assert Geometric(1e4) == Geometric()
    assert hash(Geometric(1e4)) == hash(Geometric())
    assert Geometric(5e5) != Geometric()
    assert eval(repr(Geometric(5e5)), {"Geometric": Geometric}) == Geometric(5e5)


@pytest.mark.parametrize("base", [0, -1.0, float("nan"), float("inf"), True, "10000"])
def test_impossible_bases_are_refused(base):
    with pytest.raises(ValueError, match=r"Geometric: base = .* Expected a finite number above 0"):
        Geometric(base)


@pytest.mark.parametrize("width", [0, -2, 7, 4.0, True])
def test_impossible_widths_are_refused(width):
    with pytest.raises(ValueError, match="Expected an even integer, 2 or more"):
        Geometric().frequencies(width)
