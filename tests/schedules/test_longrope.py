"""LongRoPE."""

from __future__ import annotations

from math import log, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import Geometric, RoPE, ShapeError
from posenc.schedules.longrope import LongRoPE

from . import oracle

SHORT, LONG = (1.0, 1.1, 1.2, 1.3), (1.0, 4.0, 16.0, 33.5)
RULE = LongRoPE(Geometric(1e4), SHORT, LONG, 4096, factor=32.0)
PHI_MOE = LongRoPE(Geometric(1e4), SHORT, LONG, 4096, short_amplitude=1.1, long_amplitude=1.3)


@given(
    st.lists(st.tuples(st.floats(0.5, 64), st.floats(0.5, 64)), min_size=1, max_size=32),
    st.floats(1.5, 1e7),
    st.integers(2, 10**5),
)
def test_values(factors, base, original):
    short, long = zip(*factors, strict=True)
    rule = LongRoPE(Geometric(base), short, long, original, amplitude=1.0)
    inv_freq = rule.frequencies_at(2 * len(factors), torch.tensor([0, original, original + 1])).inv_freq.tolist()
    assert inv_freq[0] == inv_freq[1] == pytest.approx(oracle.longrope(base, 2 * len(factors), short), rel=oracle.allowed(base))
    assert inv_freq[2] == pytest.approx(oracle.longrope(base, 2 * len(factors), long), rel=oracle.allowed(base))


@pytest.mark.parametrize(("length", "factors"), [(1, SHORT), (4096, SHORT), (4097, LONG), (131072, LONG)])
def test_the_switch_is_after_the_original_length(length, factors):
    # unslothai/unsloth#10681
    expected = pytest.approx(oracle.longrope(1e4, 8, factors), rel=oracle.allowed(1e4))
    assert RULE.frequencies_at(8, length).inv_freq.tolist() == expected
    assert RULE.at(length).frequencies(8).inv_freq.tolist() == expected
    assert RULE.frequencies_at(8, torch.tensor(length)).inv_freq.tolist() == expected


@pytest.mark.parametrize(
    ("settings", "short", "long"),
    [
        ({"factor": 32.0}, 1.1902380714238083, 1.1902380714238083),
        ({"factor": 1.0}, 1.0, 1.0),
        ({"factor": 32.0, "amplitude": 1.0}, 1.0, 1.0),
        ({"short_amplitude": 1.1, "long_amplitude": 1.3}, 1.1, 1.3),
        ({"factor": 32.0, "long_amplitude": 1.3}, 1.1902380714238083, 1.3),
        ({"amplitude": 1.2, "short_amplitude": 1.1}, 1.1, 1.2),
    ],
)
def test_amplitudes(settings, short, long):
    rule = LongRoPE(Geometric(1e4), SHORT, LONG, 4096, **settings)
    assert rule.at(4096).frequencies(8).amplitude == pytest.approx(short, rel=1e-14)
    assert rule.at(4097).frequencies(8).amplitude == pytest.approx(long, rel=1e-14)
    both = rule.frequencies_at(8, torch.tensor([4096, 4097])).amplitude
    if short == long:
        assert both == rule.at(1).frequencies(8).amplitude
    else:
        assert both.dtype == torch.float64
        assert both.tolist() == pytest.approx([short, long], rel=1e-14)


def test_the_amplitude_follows_the_formula():
    assert RULE.at(1).frequencies(8).amplitude == pytest.approx(sqrt(1 + log(32) / log(4096)), rel=1e-15)


@pytest.mark.parametrize("rule", [RULE, PHI_MOE], ids=["one amplitude", "two amplitudes"])
def test_each_sequence_turns_by_its_own_frequencies(rule):
    rope, at, lengths = RoPE(8), torch.arange(6).expand(3, 6), torch.tensor([4096, 4097, 5])
    both, _ = rope.prepare(at, frequencies=rule.frequencies_at(8, lengths))
    for row, length in enumerate(lengths.tolist()):
        alone, _ = RoPE(8, rule.at(length)).prepare(at[row])
        assert torch.equal(both.cos[row], alone.cos)
        assert torch.equal(both.sin[row], alone.sin)


def test_factors_of_one_change_nothing():
    rule = LongRoPE(Geometric(5e5), [1] * 16, [1] * 16, 4096, factor=1)
    for length in (4096, 4097):
        assert torch.equal(rule.at(length).frequencies(32).inv_freq, Geometric(5e5).frequencies(32).inv_freq)
        assert rule.at(length).frequencies(32).amplitude == 1.0


def test_one_graph_serves_all_lengths():
    def run(lengths):
        return tuple(PHI_MOE.frequencies_at(8, lengths))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for lengths in (torch.tensor([100, 5000]), torch.tensor([4096, 4097])):
        for actual, right in zip(compiled(lengths), run(lengths), strict=True):
            assert torch.equal(actual, right)


@pytest.mark.parametrize(("key", "dim"), [("short_factor", 6), ("short_factor", 10)])
def test_lists_for_another_width_are_refused(key, dim):
    with pytest.raises(
        ShapeError, match=rf"LongRoPE.frequencies_at: {key} has 4 numbers for rotary_dim = {dim}. Expected one per pair"
    ):
        RULE.frequencies_at(dim, 100)
    with pytest.raises(ShapeError, match=r"LongRoPE.frequencies_at: long_factor has 3 numbers for rotary_dim = 8"):
        LongRoPE(Geometric(), SHORT, LONG[:3], 4096, factor=32.0).at(5).frequencies(8)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"short_factor": [1.0, 0.0]}, ValueError, r"LongRoPE: short_factor contains 0.0. Expected finite numbers above 0"),
        ({"long_factor": [1.0, float("nan")]}, ValueError, r"LongRoPE: long_factor contains nan"),
        ({"long_factor": "14"}, TypeError, r"LongRoPE: long_factor = '14'. Expected a list of numbers, one per channel pair"),
        ({"long_factor": 4.0}, TypeError, r"LongRoPE: long_factor = 4.0. Expected a list of numbers"),
        ({"short_factor": [True, 1.0]}, TypeError, r"LongRoPE: short_factor = \[True, 1.0\]. Expected a list of numbers"),
        ({"short_factor": torch.ones(4)}, TypeError, r"LongRoPE: short_factor = tensor.* of a tensor, its tolist"),
        ({"original_length": 1}, ValueError, r"LongRoPE: original_length = 1. Expected an integer of 2 or more"),
        ({"factor": 0.5}, ValueError, r"LongRoPE: factor = 0.5. Expected a finite number of 1 or more"),
        ({"amplitude": -1.0}, ValueError, r"LongRoPE: amplitude = -1.0. Expected a finite number above 0"),
        ({"factor": None}, ValueError, r"LongRoPE: neither factor nor amplitude. .* factor=max_length / original_length"),
        ({"factor": None, "long_amplitude": 1.1}, ValueError, r"LongRoPE: neither factor nor amplitude"),
        ({"schedule": 1e4}, TypeError, r"LongRoPE: schedule = 10000.0. Expected a Geometric"),
    ],
)
def test_impossible_settings_are_refused(settings, error, message):
    given = {"schedule": Geometric(), "short_factor": SHORT, "long_factor": LONG, "original_length": 4096, "factor": 32.0}
    with pytest.raises(error, match=message):
        LongRoPE(**(given | settings))
