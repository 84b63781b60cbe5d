"""Frequencies read back: the simplest rule that makes them, and what they leave open."""

from __future__ import annotations

import json
import re
from math import exp, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.audit.ladder_sweep import RESULTS, difference, formula, rank, sweep
from tests.schedules import oracle

from posenc import Explicit, Geometric
from posenc.audit.ladders.explaining import Reading, explain, makes
from posenc.core.rotary import Frequencies
from posenc.errors import ShapeError
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.hertz import Hertz
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.ntk import NTK
from posenc.schedules.proportional import Proportional
from posenc.schedules.yarn import YaRN

PHI3_SHORT = [1.05, 1.05, 1.05, 1.1, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.5, 2.0, 2.05, 2.1, 2.3, 2.75] + [2.9] * 32

# models as they are released, by the numbers of their configurations
MODELS = {
    "Llama 2": (Geometric(1e4), 128),
    "Llama 3": (Geometric(5e5), 128),
    "Llama 3.1": (Llama3(Geometric(5e5), 8.0, 8192), 128),
    "Llama 3.2": (Llama3(Geometric(5e5), 32.0, 8192), 64),
    "GLM 4": (Geometric(1e4), 64),
    "Pythia": (Geometric(1e4), 24),
    "Gemma 3, global": (Linear(Geometric(1e6), 8.0), 256),
    "Gemma 4, global": (Proportional(Geometric(1e6), 0.25), 512),
    "Qwen 3 long": (YaRN(Geometric(1e6), 4.0, 32_768), 128),
    "gpt-oss": (YaRN(Geometric(1.5e5), 32.0, 4096, rounding="none"), 64),
    "Devstral 2": (YaRN(Geometric(1e6), 64.0, 4096, beta_fast=4.0), 128),
}


numbers = st.sampled_from([2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 1.3, 6.789])
lengths = st.one_of(st.sampled_from([2048, 4096, 8192, 32_768, 131_072]), st.integers(1000, 200_000))
ladders = st.builds(Geometric, st.one_of(st.sampled_from([1e4, 5e5, 1e6, 1.5e5]), st.floats(100, 1e7)))
rules = st.one_of(
    ladders,
    st.builds(Linear, ladders, numbers),
    st.builds(NTK, ladders, numbers),
    st.builds(lambda ladder, factor, length: DynamicNTK(ladder, factor, 4096).at(length), ladders, numbers, lengths),
    st.builds(Proportional, ladders, st.floats(0, 1), numbers),
    st.builds(Llama3, ladders, numbers, lengths),
    st.builds(
        lambda ladder, factor, length, low, ratio: Llama3(
            ladder, factor, length, low_freq_factor=low, high_freq_factor=low * ratio
        ),
        ladders,
        numbers,
        lengths,
        st.sampled_from([1.0, 2.0]),
        st.sampled_from([1.0, 2.5, 8.0]),
    ),
    st.builds(
        YaRN, ladders, numbers, lengths, rounding=st.sampled_from(["outward", "none"]), amplitude=st.sampled_from([None, 1.0])
    ),
    st.builds(YaRN, ladders, numbers, lengths, beta_fast=st.sampled_from([4.0, 16.0]), beta_slow=st.sampled_from([1.0, 2.0])),
    st.builds(lambda ladder, factor, length: Linear(YaRN(ladder, factor, length), 2.0), ladders, numbers, lengths),
    st.builds(lambda ladder, factor, length: Linear(Llama3(ladder, factor, length), 2.0), ladders, numbers, lengths),
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("schedule", "width"), MODELS.values(), ids=MODELS)
def test_released_models_are_read_as_they_were_written(schedule, width, dtype):
    made = schedule.frequencies(width, dtype=dtype)
    assert explain(made.inv_freq, made.amplitude)[0].schedule == schedule


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("schedule", "width"), MODELS.values(), ids=MODELS)
def test_half_precision_is_read_within_its_rounding(schedule, width, dtype):
    made = schedule.frequencies(width)
    held = made.inv_freq.to(dtype)
    first = explain(held, made.amplitude)[0].schedule
    if schedule.frequencies(width).inv_freq[-1] == 0 or rank(schedule) <= 1:  # blends are told apart in float32 only
        assert rank(first) <= rank(schedule)
    unit, floor = {torch.bfloat16: (2.0**-8, 0.0), torch.float16: (2.0**-11, 2.0**-25)}[dtype]
    for value, right in zip(formula(first, width), held.tolist(), strict=True):
        assert abs(value - right) <= (unit + 1e-5) * abs(right) + floor


@settings(max_examples=6)
@given(rules, st.sampled_from([4, 8, 32]), st.sampled_from([1e-5, 1e-3, 1e-2]))
def test_any_tolerance_is_kept(schedule, width, rtol):
    try:
        made = schedule.frequencies(width)
    except ValueError:  # a ramp that would fall
        return
    noise = 1 + rtol * (2 * torch.rand(width // 2, generator=torch.Generator().manual_seed(width), dtype=torch.float64) - 1)
    live = made.inv_freq * noise
    for reading in explain(live, float(made.amplitude), rtol=rtol):
        assert difference(formula(reading.schedule, width), live.tolist()) <= 1.001 * rtol


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lists_of_factors_are_read_over_a_usual_base(dtype):
    rule = LongRoPE(Geometric(1e4), PHI3_SHORT, PHI3_SHORT, 4096, factor=32.0)
    made = rule.frequencies_at(96, 100, dtype=dtype)
    found = explain(made.inv_freq, made.amplitude)[0]
    assert found.schedule.rule.short_factor == tuple(PHI3_SHORT)
    assert float(found.schedule.frequencies(96).amplitude) == pytest.approx(
        sqrt(1 + torch.log(torch.tensor(32.0)) / torch.log(torch.tensor(4096.0))), rel=1e-6
    )


@given(rules, st.sampled_from([4, 8, 32, 64, 128, 256]), st.sampled_from([torch.float64, torch.float32]))
def test_the_first_reading_makes_the_frequencies_and_is_the_simplest(schedule, width, dtype):
    try:
        made = schedule.frequencies(width, dtype=dtype)
    except ValueError:  # a ramp that would fall
        return
    found = explain(made.inv_freq, float(made.amplitude))
    assert rank(found[0].schedule) <= rank(schedule)
    assert [rank(reading.schedule) for reading in found] == sorted({rank(reading.schedule) for reading in found})
    assert isinstance(found[-1].schedule, Explicit)
    if dtype == torch.float64:
        right = formula(schedule, width)
        assert all(difference(formula(reading.schedule, width), right) <= 1e-6 for reading in found)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_few_pairs(width):
    for schedule in (
        Geometric(1e4),
        Linear(Geometric(1e4), 4.0),
        YaRN(Geometric(1e4), 16.0, 4096),
        Llama3(Geometric(5e5), 8.0, 8192),
    ):
        made = schedule.frequencies(width)
        found = explain(made.inv_freq, made.amplitude)[0].schedule
        assert rank(found) <= rank(schedule)
        assert difference(formula(found, width), formula(schedule, width)) <= 1e-6


def test_a_single_pair_leaves_the_base_open():
    first = explain(torch.tensor([1.0]))[0]
    assert first == Reading(Geometric(1e4), ("any base",))
    assert str(first) == "base 10,000 (any base cannot be told apart)"


def test_ntk_is_a_geometric_ladder_of_another_base():
    made = NTK(Geometric(1e4), 4.0).frequencies(64)
    simplest, second, _ = explain(made.inv_freq)
    assert isinstance(simplest.schedule, Geometric)
    assert simplest.schedule.base == pytest.approx(1e4 * 4 ** (64 / 62), rel=1e-4)
    assert second.schedule == NTK(Geometric(1e4), 4.0)


def test_a_round_base_is_no_ntk():
    assert [type(reading.schedule) for reading in explain(Geometric(5e5).frequencies(64).inv_freq)] == [Geometric, Explicit]


@pytest.mark.parametrize(
    ("schedule", "width"), [(YaRN(Geometric(1e4), 16.0, 4096), 64), (YaRN(Geometric(1e6), 4.0, 32_768), 128)]
)
def test_the_stated_range_of_original_lengths_is_the_whole_of_it(schedule, width):
    made = schedule.frequencies(width)
    reading = explain(made.inv_freq, made.amplitude)[0]
    first, last = (
        int(number.replace(",", "")) for number in re.fullmatch(r"original length ([\d,]+)–([\d,]+)", reading.free[0]).groups()
    )
    assert first < schedule.original_length < last

    def ladder(length):
        return oracle.yarn(schedule.schedule.base, width, schedule.factor, length)

    right = ladder(schedule.original_length)
    assert ladder(first) == right == ladder(last)
    assert ladder(first - 1) != right != ladder(last + 1)


def test_llama3_without_a_pair_between_leaves_a_range():
    made = Llama3(Geometric(1e6), 8.0, 5000).frequencies(8)
    reading = explain(made.inv_freq)[0]
    first, last = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", reading.free[0]))
    right = oracle.llama3(1e6, 8, 8.0, 5000)
    assert oracle.llama3(1e6, 8, 8.0, first) == pytest.approx(right, rel=1e-12) == oracle.llama3(1e6, 8, 8.0, last)
    assert oracle.llama3(1e6, 8, 8.0, last + 1) != pytest.approx(right, rel=1e-12)


def test_a_sentence():
    made = YaRN(Geometric(1e6), 4.0, 32_768).frequencies(128, dtype=torch.float32)
    assert str(explain(made.inv_freq, made.amplitude)[0]) == (
        "base 1,000,000, YaRN ×4 from 32,768: pairs of more than 32 turns kept, of less than 1 divided; amplitude 1.13863 "
        "(original length 28,813–35,332 cannot be told apart)"
    )
    assert str(explain(torch.tensor([0.3, 0.9, 0.5]))[0]) == "3 frequencies that follow no known rule, from 0.9 to 0.3"
    assert (
        str(explain(Hertz(0.1, 10.0).frequencies(8).inv_freq)[0]) == "a ladder from 10 Hz down to 0.1 Hz, positions in seconds"
    )


def test_amplitudes():
    made = YaRN(Geometric(1e4), 40.0, 4096, mscale=0.707, mscale_all_dim=0.707).frequencies(64)
    assert explain(made.inv_freq, made.amplitude)[0].schedule == YaRN(Geometric(1e4), 40.0, 4096, amplitude=1.0)
    only = explain(Geometric(1e4).frequencies(64).inv_freq, 1.25)[0]
    assert only.schedule == YaRN(Geometric(1e4), 1.0, 4096, amplitude=1.25)
    assert only.free == ("any original length",)


@settings(max_examples=8)
@given(st.integers(0, 31), st.sampled_from([1e-4, -1e-4]))
def test_one_pair_that_is_off_is_no_rule(pair, share):
    inv_freq = Llama3(Geometric(5e5), 8.0, 8192).frequencies(64).inv_freq
    inv_freq[pair] *= 1 + share
    # of the blended pairs, 8 and more, one alone may still be told by other edges; no other rule of this width bends so
    first = explain(inv_freq)[0].schedule
    assert isinstance(first, Explicit) or first.original_length != 8192


def test_noise_is_no_rule():
    noise = torch.rand(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert [type(reading.schedule) for reading in explain(noise)] == [Explicit]
    assert [type(reading.schedule) for reading in explain(noise.sort(descending=True).values)] == [Explicit]


def test_negative_ladders_follow_no_rule():
    assert [type(reading.schedule) for reading in explain(-Geometric(1e4).frequencies(64).inv_freq)] == [Explicit]


def test_rising_ladders_have_a_base_below_1():
    first = explain(Geometric(1e4).frequencies(64).inv_freq.flip(0))[0].schedule
    assert isinstance(first, Linear)
    assert first.schedule == Geometric(1e-4)


def test_float32_powers_in_any_order_are_read():
    steps = torch.arange(0, 128, 2).float() / 128
    for base in (1e4, 5e5, 1e6, 1e7):
        for ladder in (
            1 / base**steps,
            base**-steps,
            torch.exp(-steps * torch.tensor(base).log()),
            torch.tensor(base) ** (-steps),
        ):
            assert explain(ladder)[0].schedule == Geometric(base)


def test_a_looser_tolerance_reads_rounder_numbers():
    inv_freq = torch.tensor([exp(-0.1 * pair) * (1 + 1e-3 * (-1) ** pair) for pair in range(1, 16)], dtype=torch.float64)
    assert isinstance(explain(inv_freq)[0].schedule, Explicit)
    assert not isinstance(explain(inv_freq, rtol=5e-3)[0].schedule, Explicit)


def test_whether_a_promise_is_among_them():
    live = Frequencies(YaRN(Geometric(1e4), 16.0, 4096).frequencies(64, dtype=torch.float32).inv_freq, 0.1 * 2.772588722 + 1)
    assert makes(YaRN(Geometric(1e4), 16.0, 4000), live, 64)
    assert not makes(YaRN(Geometric(1e4), 16.0, 3000), live, 64)
    assert not makes(YaRN(Geometric(1e4), 16.0, 4096, amplitude=1.0), live, 64)
    assert not makes(YaRN(Geometric(1e4), 16.0, 4096), live, 128)


@pytest.mark.parametrize(
    ("given_", "error", "says"),
    [
        ({"inv_freq": [1.0, 0.1]}, TypeError, "explain: inv_freq is list. Expected a tensor of floating point"),
        ({"inv_freq": torch.arange(3)}, TypeError, "explain: inv_freq is torch.int64. Expected"),
        ({"inv_freq": torch.ones(2, 3)}, ShapeError, r"explain: inv_freq has shape \(2, 3\). Expected \[pairs\]"),
        ({"inv_freq": torch.ones(0)}, ShapeError, r"explain: inv_freq has shape \(0,\)"),
        ({"inv_freq": torch.tensor([1.0, float("nan")])}, ValueError, "explain: inv_freq contains nan. Expected finite"),
        ({"inv_freq": torch.ones(2, device="meta")}, ValueError, "explain: inv_freq is on the meta device. Expected numbers"),
        ({"inv_freq": torch.ones(2), "amplitude": 0.0}, ValueError, "explain: amplitude = 0.0. Expected a finite number"),
        ({"inv_freq": torch.ones(2), "amplitude": True}, ValueError, "explain: amplitude = True"),
        ({"inv_freq": torch.ones(2), "rtol": 0.5}, ValueError, "explain: rtol = 0.5. Expected above 0, at most 0.01"),
    ],
)
def test_bad_input(given_, error, says):
    with pytest.raises(error, match=says):
        explain(**given_)


def test_the_committed_sweep_has_no_failure():
    rules = json.loads(RESULTS.read_text())["rules"]
    assert sum(row["ladders"] for row in rules.values()) > 4000
    for row in rules.values():
        assert row["simple"] == row["simple_float32"] == row["ladders"]
        assert row["largest_difference"] <= 1e-6


@pytest.mark.slow
def test_sweep():
    assert sweep() == json.loads(RESULTS.read_text())["rules"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_numbers_are_read_without_an_error(dtype):
    """Repeated, constant, reversed, negative, zero and single frequencies: what broken models hold."""
    ladder = 1e4 ** -(torch.arange(0, 32, 2).double() / 32)
    for values in (
        ladder.repeat_interleave(2),
        ladder.repeat_interleave(2)[:16],
        torch.cat([ladder, ladder]),
        torch.cat([ladder[:8], ladder[:8] / 8]),
        torch.cat([ladder[:8], ladder[8:] * 0 + ladder[8] / 4]),
        torch.ones(8),
        torch.zeros(8),
        ladder.flip(0),
        -ladder,
        torch.tensor([1.0]),
        torch.tensor([1.0, 1.0, 0.125, 0.125]),
        torch.tensor([1.0, 0.5, 0.5, 0.01]),
    ):
        readings = explain(values.to(dtype))
        assert isinstance(readings[-1].schedule, Explicit)
