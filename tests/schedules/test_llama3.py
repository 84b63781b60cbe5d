"""Llama 3.1's rule."""

from __future__ import annotations

from itertools import pairwise
from math import pi

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import Explicit, Geometric
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.proportional import Proportional
from posenc.schedules.yarn import YaRN

from . import oracle


def test_llama_3_1():
    # unslothai/unsloth#6197
    ladder, inv_freq = Geometric(5e5).frequencies(128).inv_freq, Llama3(Geometric(5e5), 8.0, 8192).frequencies(128).inv_freq
    assert torch.equal(inv_freq[:29], ladder[:29])
    assert torch.equal(inv_freq[35:], ladder[35:] / 8)
    blended = [0.0021665707635, 0.00137189356776, 0.00085675141292, 0.000524846160993, 0.000312693750384, 0.000178507812768]
    assert inv_freq[29:35].tolist() == pytest.approx(blended, rel=1e-11)
    some = [0.00321144599475, 9.55621235396e-5, 3.428102195952591e-05, 3.06892598891e-7]
    assert inv_freq[[28, 35, 40, 63]].tolist() == pytest.approx(some, rel=1e-11)


def test_llama_3_2():
    inv_freq = Llama3(Geometric(5e5), 32.0, 8192).frequencies(64).inv_freq
    some = [0.00129054792821, 0.000429556796559, 9.70828780263e-5, 9.41830672543e-8]
    assert inv_freq[[15, 16, 17, 31]].tolist() == pytest.approx(some, rel=1e-11)


@given(st.integers(1, 64), st.floats(1.5, 1e7), st.floats(1, 64), st.integers(1, 10**6), st.floats(0.1, 4), st.floats(1, 8))
def test_values(pairs, base, factor, original, low, ratio):
    inv_freq = (
        Llama3(Geometric(base), factor, original, low_freq_factor=low, high_freq_factor=low * ratio)
        .frequencies(2 * pairs)
        .inv_freq
    )
    ladder = oracle.ladder(base, 2 * pairs)
    expected = oracle.llama3(base, 2 * pairs, factor, original, low, low * ratio)
    for got, right, w in zip(inv_freq.tolist(), expected, ladder, strict=True):
        # shares are of a difference of the two factors, and next to an edge either side of it is right
        width, turns = low * (ratio - 1), original * w / (2 * pi)
        if width < 0.01 and abs(turns - low) < 0.02:
            assert w / factor * (1 - 1e-12) <= got <= w * (1 + 1e-12)
        else:
            assert got == pytest.approx(right, rel=oracle.allowed(base, blend=factor * 8 / max(width, 0.01)))
        assert 1 / factor - 1e-12 <= got / w <= 1 + 1e-12 or width < 0.01
    shares = [got / w for got, w in zip(inv_freq.tolist(), ladder, strict=True)]
    assert all(b <= a + 1e-11 for a, b in pairwise(shares))


def test_a_factor_of_one_changes_nothing():
    assert torch.equal(Llama3(Geometric(5e5), 1, 8192).frequencies(128).inv_freq, Geometric(5e5).frequencies(128).inv_freq)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_factors_are_a_step_whose_edge_is_kept(dtype):
    # wavelengths of exactly 64, 32 and 128 tokens: the first would give 0 / 0
    edge = torch.tensor(2 * pi, dtype=dtype).item() / 64
    schedule = Llama3(Explicit((edge, 2 * edge, edge / 2)), 4.0, 64, low_freq_factor=1.0, high_freq_factor=1.0)
    assert schedule.frequencies(6, dtype=dtype).inv_freq.tolist() == [edge, 2 * edge, edge / 8]


def test_still_and_backward_pairs():
    frequencies = Llama3(Explicit((1.0, -1.0, 1e-6, -1e-6, 0.0), amplitude=1.5), 8.0, 8192).frequencies(10)
    assert frequencies.inv_freq.tolist() == [1.0, -1.0, 1e-6 / 8, -1e-6 / 8, 0.0]
    assert frequencies.amplitude == 1.5
    still = Llama3(Proportional(Geometric(5e5), 0.5), 8.0, 8192).frequencies(128).inv_freq
    assert torch.equal(still[32:], torch.zeros(32, dtype=torch.float64))
    assert torch.equal(still[:32], Llama3(Geometric(5e5), 8.0, 8192).frequencies(128).inv_freq[:32])


@pytest.mark.parametrize("inside", [YaRN(Geometric(), 4.0, 4096), Linear(YaRN(Geometric(), 4.0, 4096), 2.0)])
def test_the_amplitude_inside_is_kept(inside):
    assert Llama3(inside, 8.0, 8192).frequencies(64).amplitude == pytest.approx(1.138629436111989, rel=1e-15)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"factor": 0.125}, ValueError, r"Llama3: factor = 0.125. Expected a finite number of 1 or more. .* pass its inverse"),
        ({"original_length": True}, TypeError, r"Llama3: original_length = True. Expected an integer of 1 or more"),
        ({"low_freq_factor": 0.0}, ValueError, r"Llama3: low_freq_factor = 0.0. Expected a finite number above 0"),
        ({"high_freq_factor": "4"}, TypeError, r"Llama3: high_freq_factor = '4'. Expected a finite number above 0"),
        ({"low_freq_factor": 5.0}, ValueError, r"Llama3: low_freq_factor = 5.0, high_freq_factor = 4.0. .* Swap them"),
        ({"schedule": 5e5}, TypeError, r"Llama3: schedule = 500000.0. Expected a schedule such as Geometric"),
    ],
)
def test_impossible_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        Llama3(**({"schedule": Geometric(5e5), "factor": 8.0, "original_length": 8192} | settings))
