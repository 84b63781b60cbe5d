"""Mistakes in frequencies, named by comparing with the promise."""

from __future__ import annotations

import struct
from dataclasses import replace
from math import log, pi

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.audit.ladder_sweep import formula
from tests.audit.test_ladders import rules
from tests.schedules import oracle

from posenc import Explicit, Geometric
from posenc.audit.ladders.explaining import explain
from posenc.audit.ladders.faults import diagnose
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

LLAMA = Llama3(Geometric(5e5), 8.0, 8192)
QWEN = YaRN(Geometric(1e6), 4.0, 32_768)
GPT_OSS = YaRN(Geometric(1.5e5), 32.0, 4096, rounding="none")
PHI = LongRoPE(Geometric(1e4), [1.05 + 0.01 * i for i in range(48)], [1.0 + 1.25 * i for i in range(48)], 4096, factor=32.0)
PROMISES = {
    "geometric": (Geometric(1e4), 128),
    "two pairs": (Geometric(1e4), 4),
    "one pair": (Geometric(1e4), 2),
    "linear": (Linear(Geometric(1e6), 8.0), 256),
    "NTK": (NTK(Geometric(1e4), 8.0), 128),
    "dynamic": (DynamicNTK(Geometric(1e4), 2.0, 2048).at(6000), 128),
    "proportional": (Proportional(Geometric(1e6), 0.25), 512),
    "Llama 3": (LLAMA, 128),
    "YaRN": (QWEN, 128),
    "gpt-oss": (GPT_OSS, 64),
    "DeepSeek": (YaRN(Geometric(1e4), 40.0, 4096, mscale=1.0, mscale_all_dim=1.0), 64),
    "LongRoPE, short": (PHI.at(4096), 96),
    "LongRoPE, long": (PHI.at(4097), 96),
    "hertz": (Hertz(0.1, 50.0), 64),
    "explicit": (Explicit((0.9, 0.1, 0.5)), 6),
}


def found(inv_freq, promised, width, gain=None, **rest):
    inv_freq = torch.as_tensor(inv_freq) if not isinstance(inv_freq, list) else torch.tensor(inv_freq)
    gain = float(promised.frequencies(width).amplitude) if gain is None else gain
    return diagnose(Frequencies(inv_freq, gain), promised, width, where="rotary", **rest)


@pytest.mark.parametrize(("promised", "width"), PROMISES.values(), ids=PROMISES)
def test_nothing_is_wrong_with_the_promise_in_any_wide_dtype(promised, width):
    exact = formula(promised, width)
    for dtype in (torch.float64, torch.float32):
        assert found(promised.frequencies(width, dtype=dtype).inv_freq, promised, width) == []
        assert found(torch.tensor(exact, dtype=dtype), promised, width) == []


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6, 1e7])
@pytest.mark.parametrize("width", [24, 64, 96, 128, 256])
def test_float32_powers_in_any_order_are_the_promise(base, width):
    steps = torch.arange(0, width, 2).float() / width
    ladders = (base**-steps, torch.exp(-steps * log(base)), torch.exp(torch.arange(0, width, 2) * -(log(base) / width)))
    for ladder in (*ladders, torch.logspace(0, -(width - 2) / width, width // 2, base=base)):
        assert found(ladder, Geometric(base), width) == []
        wavelength = 2 * pi / ladder
        smooth = (8192 / wavelength - 1) / 3
        scaled = torch.where(
            wavelength > 8192, ladder / 32, torch.where(wavelength < 2048, ladder, (1 - smooth) * ladder / 32 + smooth * ladder)
        )
        assert found(scaled, Llama3(Geometric(base), 32.0, 8192), width) == []


@given(rules, st.sampled_from([4, 8, 24, 64, 96, 128, 256]))
def test_float32_of_a_rule_is_the_rule(schedule, width):
    try:
        made = schedule.frequencies(width, dtype=torch.float32)
    except ValueError:  # a ramp that would fall
        return
    assert diagnose(made, schedule, width, where="rotary") == []


def yarn_float32(base, width, factor, original, rounded):
    """In float32, the blend written with one product instead of two, powers as exponentials."""
    low, high = oracle.yarn_bounds(base, width, original, rounded=rounded)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    ladder = torch.exp(-torch.arange(0, width, 2, dtype=torch.float32) * (log(base) / width))
    return ladder * (1 - ramp * (1 - 1 / factor))


@given(
    st.sampled_from([1e4, 1.5e5, 1e6]),
    st.sampled_from([64, 96, 128]),
    st.sampled_from([4.0, 32.0, 64.0]),
    st.integers(1024, 262_144),
    st.booleans(),
)
def test_float32_yarn_in_another_order_is_yarn(base, width, factor, original, rounded):
    promised = YaRN(Geometric(base), factor, original, rounding="outward" if rounded else "none")
    assert found(yarn_float32(base, width, factor, original, rounded), promised, width) == []


def scaled(factor):
    return [value * factor for value in oracle.ladder(1e4, 128)]


def longer(original):
    return oracle.llama3(5e5, 128, 8.0, original)


MISTAKES = {
    "half the exponent": ([1e4 ** (-i / 64) for i in range(32)], Geometric(1e4), 64, "frequency-divisor", "exponents over 128 instead of 64: every exponent is halved"),
    "twice the exponent": ([1e4 ** (-4 * i / 64) for i in range(32)], Geometric(1e4), 64, "frequency-divisor", "exponents over 32 instead of 64: every exponent is doubled"),
    "the head's width": ([1e4 ** (-2 * i / 96) for i in range(12)], Geometric(1e4), 24, "frequency-divisor", "exponents over 96 instead of 24"),
    "evenly down to 1/base": ([1e4 ** (-i / 31) for i in range(32)], Geometric(1e4), 64, "frequency-divisor", "exponents over 62 instead of 64"),
    "wavelengths": ([1e4 ** (2 * i / 64) for i in range(32)], Geometric(1e4), 64, "frequency-base", "base 0.0001 instead of 10,000: the exponent has the wrong sign"),
    "in YaRN too": (oracle.yarn(1e3, 128, 4.0, 32_768), QWEN, 128, "frequency-divisor", "exponents over 256 instead of 128"),
    "another base": (oracle.ladder(5e5, 128), Geometric(1e4), 128, "frequency-base", "base 500,000 instead of 10,000"),
    "an odd base": (oracle.ladder(31_415.0, 128), Geometric(1e4), 128, "frequency-base", "base 31,415 instead of 10,000"),
    "another base under Llama 3": (oracle.llama3(1e4, 128, 8.0, 8192), LLAMA, 128, "frequency-base", "base 10,000 instead of 500,000"),
    "another base under YaRN": (oracle.yarn(1e4, 128, 4.0, 32_768), QWEN, 128, "frequency-base", "base 10,000 instead of 1,000,000"),
    "another base, cut": (oracle.proportional(1e4, 64, 0.5), Proportional(Geometric(1e6), 0.5), 64, "frequency-base", "base 10,000"),
    "linear dropped": (oracle.ladder(1e4, 128), Linear(Geometric(1e4), 4.0), 128, "frequency-scaling-dropped", "Linear is left out"),
    "Llama 3 dropped": (oracle.ladder(5e5, 128), LLAMA, 128, "frequency-scaling-dropped", "Llama3 is left out"),
    "NTK dropped": (oracle.ladder(1e4, 128), NTK(Geometric(1e4), 8.0), 128, "frequency-scaling-dropped", "NTK is left out"),
    "dynamic dropped": (oracle.ladder(1e4, 128), DynamicNTK(Geometric(1e4), 2.0, 2048).at(6000), 128, "frequency-scaling-dropped", "DynamicNTK is left out"),
    "LongRoPE dropped": (oracle.ladder(1e4, 96), PHI.at(5000), 96, "frequency-scaling-dropped", "LongRoPE is left out"),
    "cut not made": (oracle.ladder(1e6, 64), Proportional(Geometric(1e6), 0.5), 64, "frequency-scaling-dropped", "Proportional is left out"),
    "dropped, and another base": (oracle.ladder(1e4, 128), LLAMA, 128, "frequency-scaling-dropped", "base 10,000; pair"),
    "inverted": (scaled(4.0), Linear(Geometric(1e4), 4.0), 128, "frequency-scaling-inverted", "multiplied by 4"),
    "Llama 3 inverted": (oracle.llama3(5e5, 128, 1 / 8, 8192), LLAMA, 128, "frequency-scaling-inverted", "slow pairs multiplied by 8"),
    "NTK inverted": (oracle.ntk(1e4, 128, 1 / 8), NTK(Geometric(1e4), 8.0), 128, "frequency-scaling-inverted", "the base is lowered"),
    "LongRoPE inverted": (oracle.longrope(1e4, 96, [1 / f for f in PHI.long_factor]), PHI.at(5000), 96, "frequency-scaling-inverted", "multiplied by the factors"),
    "twice": (scaled(1 / 16), Linear(Geometric(1e4), 4.0), 128, "frequency-scaling-twice", "divided by 4 twice"),
    "NTK twice": (oracle.ntk(1e4, 128, 64.0), NTK(Geometric(1e4), 8.0), 128, "frequency-scaling-twice", "twice"),
    "Llama 3, and linear": ([value / 8 for value in longer(8192)], LLAMA, 128, "frequency-scaling-twice", "all divided by 8 besides"),
    "YaRN by the factor squared": (oracle.yarn(1e6, 128, 16.0, 32_768), QWEN, 128, "frequency-scaling-twice", "divided by 4 twice"),
    "another linear factor": (scaled(1 / 2), Linear(Geometric(1e4), 4.0), 128, "frequency-scaling", "divided by 2 instead of 4"),
    "another Llama 3 factor": (oracle.llama3(5e5, 128, 32.0, 8192), LLAMA, 128, "frequency-scaling", "factor 32 instead of 8"),
    "another NTK factor": (oracle.ntk(1e4, 128, 4.0), NTK(Geometric(1e4), 8.0), 128, "frequency-scaling", "factor 4 instead of 8"),
    "NTK for linear": (oracle.ntk(1e4, 128, 4.0), Linear(Geometric(1e4), 4.0), 128, "frequency-scaling", "(NTK)"),
    "linear for NTK": (scaled(1 / 4), NTK(Geometric(1e4), 4.0), 128, "frequency-scaling", "all divided by 4 (linear)"),
    "linear for Llama 3": (oracle.linear(5e5, 128, 8.0), LLAMA, 128, "frequency-scaling", "all divided by 8 (linear)"),
    "no exponent": (oracle.ladder(8e4, 128), NTK(Geometric(1e4), 8.0), 128, "frequency-scaling", "without the exponent"),
    "not promised": (scaled(1 / 4), Geometric(1e4), 128, "frequency-scaling", "all divided by 4, which is not promised"),
    "turns": (scaled(1 / (2 * pi)), Geometric(1e4), 128, "frequency-scaling", "divided by 2π"),
    "Llama 3 not promised": (longer(8192), Geometric(5e5), 128, "frequency-scaling", "Llama 3 ×8 from 8,192"),
    "extended length": (longer(65_536), LLAMA, 128, "frequency-scaling", "the extended length 65,536"),
    "another length": (longer(4096), LLAMA, 128, "frequency-scaling", "original length 4,096 instead of 8,192"),
    "an odd length": (longer(9000), LLAMA, 128, "frequency-scaling", "Llama 3 ×8 from 9,000"),
    "edges swapped": (oracle.llama3(5e5, 128, 8.0, 8192, 4.0, 4.0), LLAMA, 128, "frequency-scaling", "low_freq_factor and high_freq_factor are swapped"),
    "usual edges": (longer(8192), replace(LLAMA, low_freq_factor=2.0), 128, "frequency-scaling", "factors 1 and 4 at the edges instead of 2 and 4"),
    "rounded": (oracle.yarn(1.5e5, 64, 32.0, 4096), GPT_OSS, 64, "frequency-scaling", "the bounds of the ramp are rounded"),
    "not rounded": (oracle.yarn(1e6, 128, 4.0, 32_768, rounded=False), QWEN, 128, "frequency-scaling", "the bounds of the ramp are not rounded"),
    "usual betas": (oracle.yarn(1e6, 128, 64.0, 4096), YaRN(Geometric(1e6), 64.0, 4096, beta_fast=4.0), 128, "frequency-scaling", "betas 32 and 1 instead of 4 and 1"),
    "odd betas": (oracle.yarn(1e6, 128, 4.0, 32_768, 20.0, 2.0), QWEN, 128, "frequency-scaling", "YaRN ×4"),
    "short for long": (oracle.longrope(1e4, 96, PHI.short_factor), PHI.at(4097), 96, "frequency-scaling", "the short factors at a length of 4,097"),
    "of another length": (oracle.dynamic(1e4, 128, 2.0, 2048, 4096), DynamicNTK(Geometric(1e4), 2.0, 2048).at(6000), 128, "frequency-scaling", "the base of length 4,096 at length 6,000"),
    "slowest first": (oracle.ladder(1e4, 128)[::-1], Geometric(1e4), 128, "frequency-order", "the slowest pair first"),
    "full width": (oracle.ladder(1e4, 128), Geometric(1e4), 64, "frequency-width", "64 frequencies: base 10,000"),
    "zeros": ([0.0] * 64, Geometric(1e4), 128, "frequency-garbage", "all zeros"),
    "infinite": ([1.0, float("inf")] * 32, Geometric(1e4), 128, "frequency-garbage", "32 of 64 frequencies are not finite"),
}  # fmt: skip


@pytest.mark.parametrize(("inv_freq", "promised", "width", "kind", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(inv_freq, promised, width, kind, says):
    for dtype in (torch.float32, torch.float64):
        (finding,) = found(torch.tensor(inv_freq, dtype=dtype), promised, width)
        assert finding.id == kind
        assert says in finding.measured
        assert finding.where == "rotary"


def swapped_ramp(base, width, factor, original, fast, slow):
    """transformers' arithmetic with the betas in each other's place."""
    low, high = oracle.yarn_bounds(base, width, original, slow, fast)
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(width // 2)]
    return [(1 - r) * w + r * w / factor for r, w in zip(ramp, oracle.ladder(base, width), strict=True)]


def test_swapped_betas():
    (finding,) = found(swapped_ramp(1e6, 128, 4.0, 32_768, 32.0, 1.0), QWEN, 128)
    assert (finding.id, finding.measured.split(";")[0]) == ("frequency-scaling", "beta_fast and beta_slow are swapped")


def test_a_ramp_over_turns():
    ladder = oracle.ladder(1e6, 128)
    kept = [min(max((w * 32_768 / (2 * pi) - 1) / 31, 0), 1) for w in ladder]
    (finding,) = found([w * k + w / 4 * (1 - k) for w, k in zip(ladder, kept, strict=True)], QWEN, 128)
    assert (finding.id, finding.measured[:41]) == ("frequency-scaling", "the ramp runs over the number of turns, a")


def test_one_fault_that_changes_the_amplitude_too_is_one_finding():
    derived = 0.1 * log(1.25) + 1
    (finding,) = found(oracle.yarn(1e6, 128, 1.25, 32_768), QWEN, 128, derived)
    assert "factor 1.25 instead of 4" in finding.measured
    assert [finding.id for finding in found(oracle.ladder(1e6, 128), QWEN, 128, 1.0)] == ["frequency-scaling-dropped"]


def test_two_faults_are_two_findings():
    both = found(oracle.yarn(1e4, 128, 4.0, 32_768), QWEN, 128, 1.0)
    assert [finding.id for finding in both] == ["frequency-base", "amplitude-missing"]
    dropped = found(oracle.ladder(1e3, 128), QWEN, 128, 2.0)
    assert [finding.id for finding in dropped] == ["frequency-scaling-dropped", "amplitude"]


def test_a_whole_rule_that_is_not_promised_is_one_finding():
    (finding,) = found(formula(QWEN, 128), Geometric(1e6), 128, 0.1 * log(4) + 1)
    assert (finding.id, finding.measured[:38]) == ("frequency-scaling", "base 1,000,000, YaRN ×4 from 32,768: p")


def test_an_amplitude_that_is_right_is_no_fault():
    assert [finding.id for finding in found(oracle.ladder(1e6, 128), QWEN, 128)] == ["frequency-scaling-dropped"]


@pytest.mark.parametrize(
    ("gain", "kind", "says"),
    [
        (1.0, "amplitude-missing", "amplitude 1: cos and sin are not multiplied"),
        (1.1386294361119891**2, "amplitude", "applied twice; scores are 1.296 times"),
        (1 / 1.1386294361119891, "amplitude", "divided by instead of multiplied"),
        (1.1386294361119891**0.5, "amplitude", "its square root"),
        (2.5, "amplitude", "amplitude 2.5; scores are 4.821 times"),
        (float("nan"), "amplitude", "amplitude nan"),
        (torch.tensor([1.1386294361119891, 1.0]), "amplitude-missing", "amplitude 1"),
    ],
)
def test_amplitudes(gain, kind, says):
    (finding,) = found(formula(QWEN, 128), QWEN, 128, gain)
    assert finding.id == kind
    assert says in finding.measured
    assert finding.expected.startswith("1.13863, of base 1,000,000, YaRN ×4")


def test_an_explicit_amplitude_that_is_worked_out_anew():
    promised = replace(QWEN, amplitude=1.0)
    (finding,) = found(formula(QWEN, 128), promised, 128, 0.1 * log(4) + 1)
    assert finding.id == "amplitude"
    assert "0.1 · ln(factor) + 1, whatever else" in finding.measured
    assert found(formula(QWEN, 128), promised, 128, torch.tensor(1.0)) == []


@pytest.mark.parametrize(("length", "error"), [(512, "0.625"), (2048, "2.503"), (4096, "5.008")])
def test_bfloat16_frequencies(length, error):
    # huggingface/transformers#29496
    exact = torch.tensor(oracle.ladder(1e4, 128))
    for inv_freq in (exact.bfloat16(), exact.bfloat16().float(), exact.bfloat16().double()):
        (finding,) = found(inv_freq, Geometric(1e4), 128, length=length)
        assert finding.id == "frequency-rounded"
        assert f"pair 1 has 0.867188, not 0.865964, {error}" in finding.measured
        assert f"at position {length - 1:,}" in finding.measured


def test_half_precision_hides_no_second_fault():
    ids = [finding.id for finding in found(torch.tensor(oracle.ladder(5e5, 128)).half(), Geometric(1e4), 128)]
    assert ids == ["frequency-rounded", "frequency-base"]
    ids = [finding.id for finding in found(torch.tensor(oracle.ladder(5e5, 128)).bfloat16(), LLAMA, 128)]
    assert ids == ["frequency-rounded", "frequency-scaling-dropped"]
    ids = [finding.id for finding in found(torch.tensor(formula(LLAMA, 128)).half(), LLAMA, 128)]
    assert ids == ["frequency-rounded"]


def test_memory_that_looks_right():
    # huggingface/transformers#45902: a base of 10⁷ over a quarter of 256 channels
    right = torch.tensor(oracle.ladder(1e7, 64))
    assert right[6].item() == pytest.approx(0.04869675251658631)
    assert found(right, Geometric(1e7), 64) == []
    for wrong in (
        torch.rand(32, generator=torch.Generator().manual_seed(0)),
        right.roll(1),
        torch.arange(32.0),
        right * 1e30,
        right * 1e-41,
    ):
        (finding,) = found(wrong, Geometric(1e7), 64)
        assert finding.severity == "error"
    one = right.clone()
    one[6] = 0.0487
    (finding,) = found(one, Geometric(1e7), 64)
    assert (finding.id, "pair 6 has 0.0487, not 0.0486968" in finding.measured) == ("frequency-garbage", True)


def test_never_filled():
    (finding,) = found(torch.empty(64, device="meta"), Geometric(1e4), 128)
    assert (finding.id, finding.measured) == ("frequency-garbage", "they are on the meta device: nothing was ever filled in")


def bits(count):
    words = st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count)
    return words.map(lambda raw: torch.tensor([struct.unpack("<f", struct.pack("<I", word))[0] for word in raw]))


@settings(max_examples=8)
@given(bits(8), st.sampled_from([Geometric(1e4), QWEN, LLAMA, NTK(Geometric(1e4), 2.0), Linear(Geometric(1e4), 4.0)]))
def test_any_memory_is_reported_without_an_accident(inv_freq, promised):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert found(inv_freq.to(dtype), promised, 16)[0].severity == "error"
    for wide in (inv_freq.nan_to_num(), inv_freq.double().nan_to_num() ** 7):
        if wide.isfinite().all():
            assert explain(wide)[-1].schedule == Explicit(tuple(wide.tolist()))


def test_the_words():
    live = [value * 4 for value in oracle.ladder(1e4, 64)]
    (finding,) = found(live, Linear(Geometric(1e4), 4.0), 64, length=8)
    assert finding.measured == "multiplied by 4; pair 0 has 4, not 0.25, 26.25 rad off at position 7"
    assert finding.expected == "base 10,000, all divided by 4 (linear): 32 frequencies from 0.25 to 3.3338e-05"
    (finding,) = found(live, Linear(Geometric(1e4), 4.0), 64)
    assert finding.measured.endswith("3.75e+03 rad off after 1,000 positions")


def test_bad_input():
    good = Frequencies(torch.ones(4))
    with pytest.raises(ShapeError, match=r"diagnose: inv_freq has shape \(2, 4\). Expected \[pairs\]"):
        diagnose(Frequencies(torch.ones(2, 4)), Geometric(), 8, where="x")
    with pytest.raises(TypeError, match=r"diagnose: inv_freq is torch.int64. Expected floating point"):
        diagnose(Frequencies(torch.arange(4)), Geometric(), 8, where="x")
    with pytest.raises(TypeError, match="diagnose: schedule = DynamicNTK.*Fix the length"):
        diagnose(good, DynamicNTK(Geometric(), 2.0, 64), 8, where="x")
    with pytest.raises(ValueError, match="diagnose: rotary_dim = 7. Expected an even integer"):
        diagnose(good, Geometric(), 7, where="x")
