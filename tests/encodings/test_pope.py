"""Polar positions: scores, phases, width and scale end to end, and what is refused."""

from __future__ import annotations

from math import cos, exp, log1p, pi, sin, sqrt

import pytest
import torch
from torch import Tensor

from posenc import CAUSAL, Explicit, Geometric, GrowingCache, ShapeError, StaticCache, causal, contiguous, positional_attention
from posenc.encodings.pope import PoPE
from posenc.testing import conform

F64, F32 = torch.float64, torch.float32
WIDTH = {"no tokens"}  # asks for results of the content's width, which here is doubled; tested below
SAME_GRAPH = {"graph capture"}  # as that of other settings, which is tested


def softplus(x: float) -> float:
    return x + log1p(exp(-x)) if x > 0 else log1p(exp(x))


def oracle(encoding, q, k, positions, k_positions):
    """Gopalakrishnan et al. 2025, §3: magnitudes softplus(x), phases position · base^(-c/d), and δ on keys."""
    shifts = encoding.learned_bias.detach().double().reshape(encoding.kv_heads, encoding.head_dim)
    none = torch.zeros(q.shape[0], encoding.head_dim, dtype=F64)
    return _polar(encoding, q, positions, none), _polar(encoding, k, k_positions, shifts)


def _polar(encoding, x: Tensor, positions: Tensor, shifts: Tensor) -> Tensor:
    heads, length, width = x.shape
    out = torch.zeros(heads, length, 2 * width, dtype=F64)
    for head in range(heads):
        for token, position in enumerate(positions.tolist()):
            for channel in range(width):
                phase = position * encoding.schedule.base ** (-channel / width)
                phase += min(max(shifts[head, channel].item(), -2 * pi), 0.0)
                size = softplus(x[head, token, channel].item())
                out[head, token, channel] = size * cos(phase)
                out[head, token, width + channel] = size * sin(phase)
    return out


def phased(shape, **settings):
    return PoPE(shape.head_dim, shape.kv_heads, init="uniform", **settings)


def test_conforms():
    conform(PoPE, oracle, skip=WIDTH | {"gradients"})  # phases of 0 are at the end of their clamp, where there is a kink


def test_conforms_with_phases():
    conform(phased, oracle, other=lambda shape: phased(shape, schedule=Geometric(100.0)), skip=WIDTH | SAME_GRAPH)


def score(pope, q, k, distance, at=5):
    q, k = (torch.tensor(x, dtype=F64).reshape(1, 1, -1) for x in (q, k))
    q, k = pope(q, k, torch.tensor([at + distance]), torch.tensor([at]))
    return (q * k).sum().item()


@pytest.mark.parametrize("at", [0, 5, 10_000])
def test_worked_score(at):
    # two channels, frequencies 1 and 0.01: one per channel, and the score before the softmax scale
    pope = PoPE(2, 1)
    assert score(pope, (0.0, 1.0), (1.0, 0.0), 3, at) == pytest.approx(0.0087000696671685, abs=1e-11 if at else 1e-15)
    assert score(pope, (0.0, 1.0), (1.0, 0.0), -3, at) == pytest.approx(0.0087000696671685, abs=1e-11 if at else 1e-15)


def test_the_phase_is_on_keys_only_and_tells_past_from_future():
    pope = PoPE(1, 1, Explicit((0.5,)))
    with torch.no_grad():
        pope.learned_bias.fill_(-0.75)
    size = softplus(0.3) * softplus(-2.0)
    # (m - n)·w - δ: what comes n after the query is turned by its distance and its phase, once
    for distance, phase in ((3, 1.5 + 0.75), (-3, -1.5 + 0.75), (0, 0.75)):
        # the parameter is float32, and -0.75 is one
        assert score(pope, (0.3,), (-2.0,), distance) == pytest.approx(size * cos(phase), rel=1e-12)


def test_phases_are_clamped_as_in_x_transformers():
    # numbers of x_transformers 2.31.10: PolarEmbedding(4, 2) with this learned_bias, keys at position 7
    pope = PoPE(4, 2)
    pope.load_state_dict({"learned_bias": torch.tensor([[[0.0, -1, -2, -3]], [[-4.0, -5, -7, 1]]])})
    x = torch.tensor([0.5, -1, 2, 0]).expand(1, 2, 1, 4)
    q, k = pope(x, x, 7)
    assert torch.allclose(q[0, :, 0], torch.tensor(QUERY), rtol=0.0, atol=1e-6)
    assert torch.allclose(k[0, :, 0], torch.tensor(KEYS), rtol=0.0, atol=1e-6)
    turned = torch.tensor(QUERY)[1]
    assert torch.allclose(k[0, 1, 0, [2, 6]], turned[[2, 6]], atol=1e-6)  # -7 is clamped to a whole turn
    assert torch.allclose(k[0, 1, 0, [3, 7]], turned[[3, 7]], atol=1e-6)  # 1 is clamped to no turn


QUERY = [[0.7343588471412659, 0.23959575593471527, 2.1217193603515625, 0.6931301951408386, 0.6399555206298828, 0.20180872082710266, 0.14876340329647064, 0.004851990845054388]] * 2  # fmt: skip
KEYS = [
    [0.7343588471412659, 0.2992703318595886, -0.7476764917373657, -0.6855089664459229, 0.6399555206298828, -0.09257516264915466, -1.9911813735961914, -0.10261794924736023],
    [-0.9643288850784302, -0.12555497884750366, 2.1217193603515625, 0.6931301951408386, 0.13746175169944763, 0.2869997024536133, 0.14876340329647064, 0.004851990845054388],
]  # fmt: skip


def test_a_step_out_of_the_clamp_has_no_gradient_and_a_start_at_its_end_has():
    pope, x = PoPE(2, 1, init="zero"), torch.ones(1, 1, 3, 2)

    def gradient():
        pope.zero_grad()
        pope(x, x, 0)[1].sum().backward()
        return pope.learned_bias.grad

    assert bool((gradient() != 0).all())
    with torch.no_grad():
        pope.learned_bias.copy_(torch.tensor([[[0.5, -1.0]]]))
    assert (gradient() != 0).tolist() == [[[False, True]]]


def test_magnitudes_never_change_sign():
    # a channel that turns by nothing has a real part above 0, whatever its content
    pope = PoPE(4, 1, Explicit((0.0,) * 4))
    x = torch.tensor([-50.0, -1e-3, 0.0, 90.0]).reshape(1, 1, 4)
    q, _ = pope(x, x, 1000)
    assert q[0, 0].tolist() == pytest.approx([softplus(v) for v in x.flatten().tolist()] + [0.0] * 4, rel=1e-6)


@pytest.mark.parametrize("value", [19.9, 20.1, 21.0, 36.0, 39.9, 40.1, 700.0, -19.9, -40.1, -700.0])
def test_softplus_is_exact_in_float64(value):
    # torch's softplus is linear from 20 on, which is wrong by 2e-9 there
    pope, x = PoPE(1, 1, Explicit((0.0,))), torch.full((1, 1, 1), value, dtype=F64)
    assert pope(x, x, 0)[0][0, 0, 0].item() == pytest.approx(softplus(value), rel=4 * 2**-53)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    pope, at = PoPE(8, 2, init="uniform"), torch.tensor([0, 4095, 10_000_000])
    x = torch.randn(2, 3, 8).to(dtype)
    for rounded, wide in zip(pope(x, x, at), pope(x.float(), x.float(), at), strict=True):
        assert torch.equal(rounded, wide.to(dtype))


def attend(pope, q, k, v, start, **rest):
    return positional_attention(q, k, v, encodings=[pope], positions=start, mask=rest.pop("mask", CAUSAL), **rest)


def by_hand(pope, q, k, v):
    """Causal attention in float64 loops, with 1/√head_dim of the width before doubling: [heads, seq, v_dim]."""
    heads, length, width = q.shape
    out = torch.zeros(heads, length, v.shape[-1], dtype=F64)
    at, group = torch.arange(length), heads // k.shape[0]
    turned_q, turned_k = oracle(pope, q, k, at, at)
    for head in range(heads):
        for i in range(length):
            scores = [sum((turned_q[head, i] * turned_k[head // group, j]).tolist()) / sqrt(width) for j in range(i + 1)]
            top = max(scores)
            weights = [exp(s - top) for s in scores]
            for j, weight in enumerate(weights):
                out[head, i] += weight / sum(weights) * v[head // group, j]
    return out


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
def test_attention_scales_by_the_width_on_entry(heads):
    q, (k, v) = 3 * torch.randn(1, heads[0], 6, 4, dtype=F64), torch.randn(2, 1, heads[1], 6, 4, dtype=F64).unbind()
    pope = PoPE(4, heads[1], init="uniform", dtype=F64)
    whole = attend(pope, q, k, v, 0)
    torch.testing.assert_close(whole[0], by_hand(pope, q[0], k[0], v[0]), rtol=1e-12, atol=1e-13)
    assert not torch.allclose(whole, attend(pope, q, k, v, 0, scale=1 / sqrt(8)), atol=1e-3)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("kind", ["growing", "static"])
def test_decoding_with_a_cache_equals_the_whole(heads, kind):
    q, (k, v) = torch.randn(1, heads[0], 9, 4, dtype=F64), torch.randn(2, 1, heads[1], 9, 4, dtype=F64).unbind()
    pope, cache, parts = PoPE(4, heads[1], init="uniform", dtype=F64), GrowingCache(), []
    if kind == "static":
        cache = StaticCache(1, heads[1], 9, 8, v_dim=4, dtype=F64)
    whole = attend(pope, q, k, v, 0)
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 9)):
        mask = CAUSAL if kind == "growing" else causal(*cache.place(contiguous(end - start, start)))
        parts.append(attend(pope, *(x[:, :, start:end] for x in (q, k, v)), start, cache=cache, mask=mask))
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=1e-12, atol=1e-13)


def test_an_empty_sequence_gives_an_empty_result_of_doubled_width():
    q, k = PoPE(4, 2)(torch.ones(3, 6, 0, 4), torch.ones(3, 2, 0, 4), 0)
    assert q.shape == (3, 6, 0, 8)
    assert k.shape == (3, 2, 0, 8)


def test_an_amplitude_multiplies_both_sides():
    pope, loud = PoPE(2, 1, Explicit((1.0, 0.1))), PoPE(2, 1, Explicit((1.0, 0.1), amplitude=1.5))
    assert score(loud, (0.0, 1.0), (1.0, 0.0), 3) == pytest.approx(2.25 * score(pope, (0.0, 1.0), (1.0, 0.0), 3), rel=1e-12)


def test_phases_start_where_asked():
    assert bool((PoPE(4, 2).learned_bias == 0).all())
    phases = PoPE(64, 8, init="uniform").learned_bias
    assert phases.shape == (8, 1, 64)
    assert -2 * pi <= phases.min() < -6 < -0.3 < phases.max() <= 0
    assert PoPE(4, 2, device="meta", dtype=F64).learned_bias.dtype == F64


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        ((0, 2), {}, ValueError, "PoPE: head_dim = 0"),
        ((8, 0), {}, ValueError, "PoPE: kv_heads = 0"),
        ((8, 2.0), {}, TypeError, "PoPE: kv_heads = 2.0"),
        ((8, 2, 1e4), {}, TypeError, "PoPE: schedule = 10000.0. Expected a schedule"),
        ((8, 2, Explicit((1.0,) * 4)), {}, ShapeError, "4 frequencies for rotary_dim = 16"),
        ((8, 2), {"init": "normal"}, ValueError, "PoPE: init = 'normal'. Expected 'zero' or 'uniform'"),
    ],
)
def test_impossible_settings_are_refused(arguments, settings, error, message):
    with pytest.raises(error, match=message):
        PoPE(*arguments, **settings)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "places", "error", "message"),
    [
        ((1, 2, 4, 6), (1, 2, 4, 6), (0,), ShapeError, r"PoPE: q \(1, 2, 4, 6\) and k \(1, 2, 4, 6\). Expected \[\*batch, heads, seq, 8\]"),
        ((1, 2, 4, 8), (1, 3, 4, 8), (0,), ShapeError, r"and \[\*batch, 2, seq, 8\]. Build it with the model's head_dim and kv_heads"),
        ((4, 8), (4, 8), (0,), ShapeError, r"PoPE: q \(4, 8\)"),
        ((1, 2, 1, 8), (1, 2, 4, 8), (3,), ShapeError, "1 queries and 4 keys without k_positions"),
        ((1, 2, 4, 8), (1, 2, 4, 8), (torch.arange(3),), ShapeError, "PoPE: positions have shape"),
        ((1, 2, 4, 8), (1, 2, 4, 8), (torch.zeros(3, 4),), ShapeError, r"PoPE: a table of shape \(3, 1, 4, 8\) for q of shape \(1, 2, 4, 8\)"),
        ((1, 2, 4, 8), (1, 2, 4, 8), (0, torch.zeros(3, 4)), ShapeError, r"a table of shape \(3, 2, 4, 8\) for k"),
        ((1, 2, 4, 8), (1, 2, 4, 8), (torch.arange(4).half(),), TypeError, "half precision"),
        ((1, 2, 4, 8), (1, 2, 4, 8), (torch.full((4,), torch.nan),), ValueError, "positions hold nan"),
    ],
)  # fmt: skip
def test_impossible_inputs_are_refused(q_shape, k_shape, places, error, message):
    with pytest.raises(error, match=message):
        PoPE(8, 2)(torch.zeros(q_shape), torch.zeros(k_shape), *places)


def test_a_prepared_step_serves_only_its_own_tokens():
    pope, x = PoPE(8, 2), torch.randn(1, 2, 5, 8)
    with pytest.raises(ShapeError, match="Prepare the positions of exactly these tokens"):
        pope.transform(x, x, pope.prepare(torch.tensor([7])))
