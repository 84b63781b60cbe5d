"""YaRN."""

from __future__ import annotations

from itertools import pairwise
from math import log

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from posenc import Geometric, RoPE
from posenc.schedules.linear import Linear
from posenc.schedules.yarn import YaRN

from . import oracle

LLAMA_2 = YaRN(Geometric(1e4), 16.0, 4096)
DEEPSEEK_V3 = YaRN(Geometric(1e4), 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
DEEPSEEK_V2 = YaRN(Geometric(1e4), 40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
GPT_OSS = YaRN(Geometric(1.5e5), 32.0, 4096, rounding="none")
QWEN = YaRN(Geometric(1e6), 4.0, 32768)


@pytest.mark.parametrize(
    ("schedule", "dim", "samples"),
    [
        (
            LLAMA_2,
            128,
            {
                20: 0.056234132519,
                21: 0.046940859998,
                30: 0.00852684377297,
                32: 0.00567307692308,
                40: 0.000881788962932,
                45: 0.000151771604732,
                46: 8.33450895102e-5,
                63: 7.21738740431e-6,
            },
        ),
        (
            DEEPSEEK_V3,
            64,
            {8: 0.1, 16: 0.0055, 20: 0.000790569415042, 21: 0.000414990398491, 24: 2.5e-5, 31: 3.33380358041e-6},
        ),
        (
            GPT_OSS,
            64,
            {
                8: 0.0508132748155,
                10: 0.01933500112654,
                16: 0.000456483919223,
                20: 1.81883366817e-5,
                31: 3.02351142812e-7,
            },
        ),
        (QWEN, 128, {30: 0.00106436098125, 32: 0.000602941176471, 40: 4.445698525097307e-05, 63: 3.10234440188e-7}),
    ],
    ids=["Llama-2", "DeepSeek-V3", "gpt-oss", "Qwen2.5"],
)
def test_known_frequencies(schedule, dim, samples):
    inv_freq = schedule.frequencies(dim).inv_freq
    assert {i: inv_freq[i].item() for i in samples} == pytest.approx(samples, rel=1e-11)


def test_rounding_is_a_choice():
    # vllm-project/vllm#27722
    rounded = YaRN(Geometric(1.5e5), 32.0, 4096).frequencies(64).inv_freq
    assert rounded[[10, 17]].tolist() == pytest.approx([0.01945096754405793, 2.279478e-4], rel=1e-6)
    assert GPT_OSS.frequencies(64).inv_freq[17].item() == pytest.approx(1.293187e-4, rel=1e-6)


def test_the_given_factor_counts():
    # huggingface/transformers#38224: 40960 / 32768 instead of 4
    derived = YaRN(Geometric(1e6), 1.25, 32768)
    assert derived.frequencies(128).inv_freq[40].item() == pytest.approx(1.422623528e-4, rel=1e-9)
    assert derived.resolved_amplitude == pytest.approx(1.0223143551314209, rel=1e-15)
    assert QWEN.resolved_amplitude == pytest.approx(1.138629436111989, rel=1e-15)


@pytest.mark.parametrize(
    ("settings", "amplitude", "multiplier"),
    [
        ({"factor": 16.0}, 1.27725887222, 1),
        ({"factor": 32.0}, 1.34657359028, 1),
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.8738542070926),
        ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, 1.5896261651209),
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}, 1.36888794541 / 1.18444397271, 1.18444397271**2),
        ({"factor": 40.0, "mscale": 1.0}, 1.36888794541, 1),
        ({"factor": 40.0, "mscale_all_dim": 1.0}, 1.36888794541, 1.8738542070926),
        # an explicit amplitude wins: ml-explore/mlx-lm#1507
        ({"factor": 8.0, "amplitude": 1.0}, 1.0, 1),
        ({"factor": 8.0, "amplitude": 1}, 1.0, 1),
        ({"factor": 8.0, "amplitude": 1.2079441541679836}, 1.2079441541679836, 1),
        ({"factor": 8.0}, 1.2079441541679836, 1),
        ({"factor": 40.0, "amplitude": 1.5, "mscale": 1.0, "mscale_all_dim": 0.5}, 1.5, 1.18444397271**2),
        # 0.0 counts as absent: Devstral-2
        ({"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 0.0}, 1.4158883083359672, 1),
        ({"factor": 1.0}, 1.0, 1),
    ],
)
def test_amplitudes(settings, amplitude, multiplier):
    schedule = YaRN(Geometric(), original_length=4096, **settings)
    assert schedule.resolved_amplitude == pytest.approx(amplitude, rel=1e-11)
    assert schedule.frequencies(64).amplitude == schedule.resolved_amplitude
    assert schedule.scale_multiplier == pytest.approx(multiplier, rel=1e-11)


def test_the_whole_softmax_scale_of_deepseek_v3():
    assert DEEPSEEK_V3.scale_multiplier * 192**-0.5 == pytest.approx(0.13523377886088, rel=1e-13)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_both_pairings_carry_the_amplitude(pairing):
    # GaijinEntertainment/daScript#3479
    devstral = YaRN(Geometric(1e6), 64.0, 4096, beta_fast=4.0)
    x = torch.randn(1, 2, 5, 128, dtype=torch.float64)
    q, k = RoPE(128, devstral, pairing=pairing)(x, x, 1000)
    for turned in (q, k):
        # norms of 128 products, each of two roundings or three, in double precision
        torch.testing.assert_close(turned.norm(dim=-1), 1.4158883083359672 * x.norm(dim=-1), rtol=256 * oracle.EPS, atol=0.0)


@pytest.mark.parametrize(("fast", "low"), [(4.0, 23), (32.0, 13)])
def test_the_betas_count(fast, low):
    # antonellof/ferrox#226
    schedule = YaRN(Geometric(1e6), 64.0, 4096, beta_fast=fast)
    ratio = schedule.frequencies(128).inv_freq / Geometric(1e6).frequencies(128).inv_freq
    # the amounts before, at, after and at the end of the ramp
    assert ratio[low].item() == pytest.approx(1.0, abs=1e-13)
    assert ratio[low + 1].item() == pytest.approx(1 - (1 - 1 / 64) / (31 - low), abs=1e-13)
    assert ratio[30].item() == pytest.approx(1 - (1 - 1 / 64) * (30 - low) / (31 - low), abs=1e-13)
    assert ratio[31].item() == pytest.approx(1 / 64, abs=1e-13)


def settings():
    return st.tuples(
        st.integers(1, 64),
        st.floats(1.5, 1e7),
        st.floats(1, 64),
        st.integers(1, 10**6),
        st.floats(1, 64),
        st.floats(0.1, 1),
        st.sampled_from(["outward", "none"]),
    )


@given(settings())
def test_values(drawn):
    pairs, base, factor, original, fast, slow, rounding = drawn
    dim = 2 * pairs
    low, high = oracle.yarn_bounds(base, dim, original, fast, slow, rounding == "outward")
    schedule = YaRN(Geometric(base), factor, original, beta_fast=fast, beta_slow=slow, rounding=rounding)
    if low > high:
        with pytest.raises(ValueError, match=r"YaRN.frequencies: original_length = .* the ramp would fall"):
            schedule.frequencies(dim)
        return
    assume(high == low or high - low >= 1)
    inv_freq = schedule.frequencies(dim).inv_freq
    expected = oracle.yarn(base, dim, factor, original, fast, slow, rounding == "outward")
    assert inv_freq.tolist() == pytest.approx(expected, rel=oracle.allowed(base, blend=factor))
    ratio = (inv_freq / Geometric(base).frequencies(dim).inv_freq).tolist()
    assert all(1 / factor - 1e-12 <= r <= 1 + 1e-12 for r in ratio)
    assert all(b <= a + 1e-12 for a, b in pairwise(ratio))
    assert all(abs(r - 1) < 1e-12 for r in ratio[: int(low) + 1])
    assert all(abs(r * factor - 1) < 1e-12 for i, r in enumerate(ratio) if i >= high + 0.001)


def test_a_factor_of_one_changes_nothing():
    assert torch.equal(YaRN(Geometric(5e5), 1, 4096).frequencies(128).inv_freq, Geometric(5e5).frequencies(128).inv_freq)


def test_equal_betas_are_a_step():
    inv_freq = YaRN(Geometric(1e4), 4.0, 4096, beta_fast=8.0, beta_slow=8.0, rounding="none").frequencies(64).inv_freq
    edge = 64 * log(4096 / (16 * torch.pi)) / (2 * log(1e4))
    assert 0 < edge < 31
    expected = [w if i < edge else w / 4 for i, w in enumerate(oracle.ladder(1e4, 64))]
    assert inv_freq.tolist() == pytest.approx(expected, rel=oracle.allowed(1e4))


def test_it_composes_by_wrapping():
    frequencies = Linear(LLAMA_2, 2.0).frequencies(128)
    assert torch.equal(frequencies.inv_freq, LLAMA_2.frequencies(128).inv_freq / 2)
    assert frequencies.amplitude == LLAMA_2.resolved_amplitude


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"factor": 0.5}, ValueError, r"YaRN: factor = 0.5. Expected a finite number of 1 or more. .* pass its inverse"),
        ({"factor": "4"}, TypeError, r"YaRN: factor = '4'. Expected a finite number of 1 or more"),
        ({"original_length": 4096.5}, TypeError, r"YaRN: original_length = 4096.5. Expected an integer of 1 or more"),
        ({"original_length": 0}, ValueError, r"YaRN: original_length = 0. Expected an integer of 1 or more"),
        ({"original_length": "long"}, TypeError, r"YaRN: original_length = 'long'. Expected an integer of 1 or more"),
        ({"factor": float("nan")}, ValueError, r"YaRN: factor = nan. Expected a finite number of 1 or more"),
        ({"beta_fast": 0}, ValueError, r"YaRN: beta_fast = 0. Expected a finite number above 0"),
        ({"beta_slow": float("nan")}, ValueError, r"YaRN: beta_slow = nan. Expected a finite number above 0"),
        ({"beta_fast": 1.0, "beta_slow": 2.0}, ValueError, r"YaRN: beta_fast = 1.0, beta_slow = 2.0. .* Swap them"),
        ({"amplitude": 0.0}, ValueError, r"YaRN: amplitude = 0.0. Expected a finite number above 0"),
        ({"amplitude": True}, TypeError, r"YaRN: amplitude = True. Expected a finite number above 0"),
        ({"mscale": -1.0}, ValueError, r"YaRN: mscale = -1.0. Expected a finite number of 0 or more"),
        ({"mscale_all_dim": "1"}, TypeError, r"YaRN: mscale_all_dim = '1'. Expected a finite number of 0 or more"),
        ({"rounding": False}, ValueError, r"YaRN: rounding = False. Expected 'outward' or 'none'. .* truncate: false"),
        ({"schedule": Geometric(1.0)}, ValueError, r"YaRN: base = 1.0. Expected a base above 1"),
        ({"schedule": Linear(Geometric(), 2.0)}, TypeError, r"YaRN: schedule = Linear\(.* Expected a Geometric"),
    ],
)
def test_impossible_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        YaRN(**({"schedule": Geometric(), "factor": 4.0, "original_length": 4096} | settings))


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        (YaRN(Geometric(), 4.0, 2), "no pair turns even beta_slow times"),
        (YaRN(Geometric(2.0), 4.0, 4096), "all pairs turn more than beta_fast times"),
    ],
)
def test_a_ramp_that_would_fall_is_refused(schedule, why):
    with pytest.raises(ValueError, match=rf"YaRN.frequencies: original_length = .*: {why} in it, .* Expected it to rise"):
        RoPE(32, schedule)


def test_a_length_left_out_is_asked_for_when_frequencies_are():
    # NVIDIA-NeMo/Automodel#2652: a silent default would scale the wrong pairs
    assert YaRN(factor=4.0).original_length is None
    with pytest.raises(
        ValueError, match=r"YaRN: original_length is not given. Expected the length that the model was trained on"
    ):
        YaRN(factor=4.0).frequencies(8)
