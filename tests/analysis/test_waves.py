"""Wavelengths and coverage against 2π · base^(2i/d), pair by pair."""

from __future__ import annotations

from math import inf, pi

import pytest
import torch

from posenc import DynamicNTK, Explicit, Geometric, Llama3
from posenc.analysis import angle_coverage, wavelengths

ROUNDING = 2**-52  # one unit in the last place of float64, relative


@pytest.mark.parametrize(("base", "dim"), [(1e4, 512), (5e5, 128), (100.0, 8)])
def test_wavelengths_count_pairs(base, dim):
    expected = [2 * pi * base ** (2 * i / dim) for i in range(dim // 2)]
    # a power on each side, within 4 units of its last place for exponents up to ln(5e5); one division, one product
    torch.testing.assert_close(wavelengths(Geometric(base), dim).tolist(), expected, rtol=16 * ROUNDING, atol=0)


def test_wavelengths_of_the_original_transformer():
    found = wavelengths(Geometric(1e4), 512)
    expected = [6.28318530718, 6.5133567849, 60611.4771663]
    torch.testing.assert_close(found[[0, 1, 255]].tolist(), expected, rtol=1e-11, atol=0)  # digits of the check values
    assert found[-1] < 2 * pi * 1e4  # the limit of ever wider heads, not a wavelength that there is


def test_a_pair_that_does_not_turn_has_no_end():
    assert wavelengths(Explicit((1.0, 0.0, -1.0)), 6).tolist() == [2 * pi, inf, 2 * pi]


@pytest.mark.parametrize(
    ("dim", "base", "length", "incomplete"),
    [(128, 1e4, 2048, 23), (128, 1e4, 4096, 18), (128, 5e5, 8192, 29), (32, 1e4, 64, 11), (16, 1e4, 32, 6)],
)
def test_pairs_that_never_complete_a_turn(dim, base, length, incomplete):
    coverage = angle_coverage(Geometric(base), dim, length)
    assert coverage.incomplete == tuple(range(dim // 2 - incomplete, dim // 2))
    assert coverage.incomplete == tuple(i for i in range(dim // 2) if 2 * pi * base ** (2 * i / dim) > length)


def test_turns_are_length_over_wavelength():
    coverage = angle_coverage(Geometric(100.0), 8, 50)
    expected = [50 / (2 * pi * 100.0 ** (i / 4)) for i in range(4)]
    torch.testing.assert_close(coverage.turns, expected, rtol=16 * ROUNDING, atol=0, check_dtype=False)


def test_a_rule_for_longer_contexts_slows_the_slow_pairs():
    plain, scaled = (angle_coverage(rule, 128, 8192).turns for rule in (Geometric(5e5), Llama3(Geometric(5e5), 8.0, 8192)))
    assert plain[0] == scaled[0]
    assert scaled[-1] == plain[-1] / 8


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: wavelengths(1e4, 8), TypeError, "wavelengths: schedule = 10000.0. Expected a schedule"),
        (lambda: wavelengths(Geometric(), 7), ValueError, "rotary_dim = 7. Expected an even integer"),
        (lambda: wavelengths(DynamicNTK(Geometric(), 2.0, 8), 8), TypeError, "Fix the length, rule.at(length)"),
        (lambda: angle_coverage(Geometric(), 8, 0), ValueError, "angle_coverage: length = 0. Expected an integer of 1 or more"),
        (lambda: angle_coverage(Geometric(), 8, 2.5), TypeError, "angle_coverage: length = 2.5. Expected an integer"),
        (lambda: angle_coverage(Geometric, 8, 2), TypeError, "angle_coverage: schedule = "),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
