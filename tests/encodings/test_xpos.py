"""Rotary positions with decay: kernel, constant centre, span, and what is refused."""

from __future__ import annotations

from math import cos, log, sin

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import CAUSAL, Explicit, Geometric, GrowingCache, RoPE, ShapeError, inverse, positional_attention, window
from posenc.core.apply import apply_rotary_pair
from posenc.encodings.xpos import XPos
from posenc.testing import conform

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ZETA = (0.2857142857, 0.4642857143, 0.6428571429, 0.8214285714)
KERNEL = {0: 8.0, 1: 7.0623979347067, 10: 3.3920919927803, 64: 5.9402511670924, 512: 1.9240110765745}
SAME_GRAPH = {"graph capture"}  # as that of other settings, which is tested


def oracle(encoding, q, k, positions, k_positions):
    """Sun et al. 2022, §3.1 with the magnitudes of its algorithm: rotate, then multiply by ζ to the power of ±position."""
    return _decayed(encoding, q, positions, 1), _decayed(encoding, k, k_positions, -1)


def _decayed(encoding, x, positions, sign):
    width, out = encoding.rotary_dim, x.double().clone()
    first = encoding.start % encoding.head_dim
    for token, position in enumerate(positions.tolist()):
        for pair in range(width // 2):
            a, b = (pair, pair + width // 2) if encoding.pairing == "half" else (2 * pair, 2 * pair + 1)
            a, b = a + first, b + first
            angle = position * encoding.schedule.base ** (-2 * pair / width)
            zeta = (2 * pair / width + encoding.gamma) / (1 + encoding.gamma)
            size = zeta ** (sign * (position - encoding.centre) / encoding.decay_base)
            out[:, token, a] = size * (x[:, token, a] * cos(angle) - x[:, token, b] * sin(angle))
            out[:, token, b] = size * (x[:, token, b] * cos(angle) + x[:, token, a] * sin(angle))
    return out


SETTINGS = {
    "as published": {},
    "half": {"pairing": "half", "centre": 20.5},
    "partial": {"rotary_dim": 4, "start": -4, "gamma": 1.5, "decay_base": 64},
    "heads last but one": {"head_axis": -2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_conforms(name):
    settings = SETTINGS[name]
    conform(
        lambda shape: XPos(shape.head_dim, **settings),
        oracle,
        claims=XPos.spec.claims,
        other=lambda shape: XPos(shape.head_dim, **(settings | {"gamma": 0.9})),
        skip=SAME_GRAPH if name != "as published" else (),
    )


def test_conforms_as_a_relative_position_with_a_wide_span():
    # what these claims are asked of, positions up to a million, needs slow decay
    claims = XPos.spec.claims | {"shift-invariant", "composes", "invertible", "any-length"}
    conform(lambda shape: XPos(shape.head_dim, decay_base=1e8), oracle, claims=claims, skip=SAME_GRAPH)


def test_norms_are_not_preserved():
    with pytest.raises(AssertionError, match="fails 'norm-preserving': XPos changes norms"):
        conform(
            lambda shape: XPos(shape.head_dim, decay_base=1e8),
            oracle,
            claims=("norm-preserving", "any-length"),
            skip=SAME_GRAPH,
        )


def score(xpos, m, n, q=None, k=None):
    one = torch.ones(1, 1, xpos.head_dim, dtype=F64)
    q, k = xpos(one if q is None else q, one if k is None else k, torch.tensor([m]), torch.tensor([n]))
    return (q * k).sum().item()


@pytest.mark.parametrize("distance", KERNEL)
@pytest.mark.parametrize("n", [0, 3, 1000])
@pytest.mark.parametrize("settings", [{}, {"centre": 512}, {"pairing": "half"}])
def test_worked_kernel(distance, n, settings):
    assert score(XPos(8, **settings), n + distance, n) == pytest.approx(KERNEL[distance], rel=1e-11)


def test_worked_magnitudes():
    still = XPos(8, Explicit((0.0,) * 4), pairing="interleaved")
    one = torch.ones(1, 1, 8, dtype=F64)
    q, k = still(one, one, torch.tensor([512]))
    assert q[0, 0, ::2].tolist() == pytest.approx(ZETA, rel=1e-9)
    assert q[0, 0, 1::2].tolist() == pytest.approx(ZETA, rel=1e-9)
    assert k[0, 0, ::2].tolist() == pytest.approx([1 / zeta for zeta in ZETA], rel=1e-9)


@given(st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 12_000), st.floats(-500, 500))
def test_the_decay_knows_distance_only(m, n, shift, centre):
    # lucidrains/rotary-embedding-torch#27: a decay that forgets the offset; kyegomez/zeta#106: keys not inverted
    still = XPos(2, Explicit((0.0,)), centre=centre)  # one pair, so the score is 2ζ₀ to the power of distance/512
    expected = 2 * (0.4 / 1.4) ** ((m - n) / 512)
    assert score(still, m, n) == pytest.approx(expected, rel=1e-12)
    assert score(still, m + shift, n + shift) == pytest.approx(expected, rel=1e-12)


@given(st.integers(0, 8000), st.integers(0, 8000), st.integers(0, 8000))
def test_scores_depend_on_distance_in_float32(m, n, shift):
    xpos = XPos(64)
    m, n = max(m, n), min(m, n)
    q, k = torch.randn(2, 1, 1, 64).unbind()
    # 64 products of float32 numbers: 4 + 64 roundings of |q||k|; towards the past no pair grows
    allowed = 68 * 2**-24 * q.norm().item() * k.norm().item()
    assert score(xpos, m + shift, n + shift, q, k) == pytest.approx(score(xpos, m, n, q, k), abs=allowed)


def test_no_decay_is_rope():
    q, k, at = *torch.randn(2, 1, 2, 5, 8, dtype=F64).unbind(), torch.tensor([0, 1, 77, 4096, 16_000])
    rotated = RoPE(8, pairing="interleaved")(q, k, at)
    for mine, expected in zip(XPos(8, gamma=1e12)(q, k, at), rotated, strict=True):
        # 1 - ζ₀ = 1e-12, to the power of 16000/512
        torch.testing.assert_close(mine, expected, rtol=0.0, atol=32e-12 * 4)
    assert (XPos(8)(q, k, at)[0] - rotated[0]).abs().max() > 0.1
    assert XPos(8, gamma=1e300).span(F32) == 2**62


def test_the_inverse_tables_undo_it():
    q, k, at = *torch.randn(2, 1, 2, 4, 8, dtype=F64).unbind(), torch.tensor([0, 3, 500, 5000])
    xpos = XPos(8)
    q_table, k_table, _, _ = xpos.prepare(at, dtype=F64)
    back = apply_rotary_pair(*xpos(q, k, at), inverse(q_table), inverse(k_table), pairing="interleaved")
    for mine, given_ in zip(back, (q, k), strict=True):
        torch.testing.assert_close(mine, given_, rtol=0.0, atol=16 * 2**-53 * 4)


def attend(xpos, q, k, v, start=0, **rest):
    return positional_attention(q, k, v, encodings=[xpos], positions=start, mask=CAUSAL, **rest)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_decoding_with_a_cache_equals_the_whole(heads):
    q, (k, v) = torch.randn(1, heads[0], 9, 8, dtype=F64), torch.randn(2, 1, heads[1], 9, 8, dtype=F64).unbind()
    xpos, cache, parts = XPos(8, decay_base=4.0), GrowingCache(), []
    whole = attend(xpos, q, k, v)
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 9)):
        step = (x[:, :, start:end] for x in (q, k, v))
        parts.append(attend(xpos, *step, start, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=1e-12, atol=1e-13)


def test_a_centre_that_moves_between_calls_would_be_wrong():
    # what centring on the middle of the call does: keys cached at length 8 meet a query at length 9
    one = torch.ones(1, 1, 1, 8, dtype=F64)
    _, cached = XPos(8, centre=4.0)(one, one, 0)
    query, _ = XPos(8, centre=4.5)(one, one, 8)
    right = score(XPos(8), 8, 0)
    moved = sum(2 * ((i / 4 + 0.4) / 1.4) ** (7.5 / 512) * cos(8 * 10**-i) for i in range(4))
    assert (query * cached).sum().item() == pytest.approx(moved, rel=1e-12)
    assert abs(moved - right) > 1e-3


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("width", [8, 64])
def test_the_span_follows_from_the_dtype(dtype, width):
    wide, tiny = torch.finfo(F64 if dtype == F64 else F32).max, torch.finfo(dtype).tiny
    span = XPos(width).span(dtype)
    steep = log(3.5) / 512  # ln(1/ζ₀), ζ₀ = 2/7
    keeps = [steep * r <= log(1 / 16 / tiny) and 2 * steep * r <= log(wide / 256 / width) for r in (span, span + 1)]
    assert keeps == [True, False]
    assert XPos(width, decay_base=1024).span(dtype) in (2 * span, 2 * span + 1)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("entry", [16.0, 1 / 16])
def test_entries_are_as_precise_at_the_end_of_the_span_as_at_the_centre(dtype, entry):
    still = XPos(64, Explicit((0.0,) * 32))
    span = still.span(dtype)
    x, at = torch.full((1, 1, 2, 64), entry, dtype=dtype), torch.tensor([-span, span])
    q, k = still(x, x, at)
    sizes = torch.tensor([[((i // 2) / 32 + 0.4) / 1.4 for i in range(64)]], dtype=F64) ** (at[:, None] / 512)
    for mine, truth in ((q, entry * sizes), (k, entry / sizes)):
        # the table's rounding, the product's and the result's; the exponent, up to 350, amplifies float64's own by 350
        allowed = torch.finfo(dtype).eps / 2 + (400 * 2**-52 if dtype == F64 else 3 * 2**-24)
        assert ((mine[0, 0].double() - truth).abs() <= allowed * truth).all()


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_attention_over_the_whole_span_is_finite_whatever_the_mask(dtype):
    # masked scores towards the future are astronomical; infinity - infinity would be NaN
    xpos = XPos(64)
    at = torch.linspace(-xpos.span(dtype), xpos.span(dtype), 33).round().to(torch.int64)
    at[0], at[-1] = -xpos.span(dtype), xpos.span(dtype)
    q, k, v = torch.full((3, 1, 1, 33, 64), 16.0).to(dtype).unbind()
    for mask in (CAUSAL, window(8) & CAUSAL):
        for backend in ("sdpa", "reference"):
            out = positional_attention(q, k, v, encodings=[xpos], positions=at, mask=mask, scale=1e-3, backend=backend)
            torch.testing.assert_close(out.double(), v.double(), rtol=2 * torch.finfo(dtype).eps, atol=0.0)


def refusal(xpos, dtype, at, keys=None):
    x = torch.ones(1, 1, len(at), 8, dtype=dtype)
    k = x if keys is None else torch.ones(1, 1, len(keys), 8, dtype=dtype)
    with pytest.raises(ValueError, match="XPos: position ") as caught:
        xpos(x, k, torch.tensor(at), None if keys is None else torch.tensor(keys))
    return str(caught.value)


def test_positions_outside_of_the_span_are_refused():
    xpos = XPos(8, centre=100)
    for dtype in (F16, BF16, F32, F64):
        span, x = xpos.span(dtype), torch.ones(1, 1, 2, 8, dtype=dtype)
        xpos(x, x, torch.tensor([100 - span, 100 + span]))
        for sign in (-1, 1):
            assert refusal(xpos, dtype, [100, 100 + sign * (span + 1)]) == (
                f"XPos: position {100 + sign * (span + 1)} with centre = 100. Expected positions within {span} of the centre, "
                f"the span of {F32 if dtype == BF16 else dtype} with decay_base = 512; magnitudes leave the dtype beyond. Raise decay_base, or put the "
                "centre in the middle of the positions."
            )
    assert "position 5000 " in refusal(xpos, F16, [1], [2, 5000])
    assert "position 50000 " in refusal(xpos, F32, [1], [2, 50_000])


def test_positions_outside_of_the_span_are_refused_in_attention():
    q = torch.ones(1, 1, 1, 8, dtype=F16)
    with pytest.raises(ValueError, match=r"position 3000 with centre = 0. Expected positions within 2832"):
        positional_attention(q, q, q, encodings=[XPos(8)], positions=3000)


def test_magnitudes_of_queries_and_keys_are_reciprocal():
    at = torch.arange(5) * 100
    table, _ = RoPE(8).prepare(at, dtype=F64)
    q_table, k_table, q_offset, k_offset = XPos(8, centre=7).prepare(at, dtype=F64)
    torch.testing.assert_close(q_table.cos * k_table.cos, table.cos**2, rtol=1e-14, atol=0.0)
    assert torch.equal(q_offset, at.double() - 7)
    assert k_offset is q_offset


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        ((7,), {}, ValueError, "XPos: rotary_dim = 7. Expected an even integer"),
        ((0,), {}, ValueError, "XPos: head_dim = 0"),
        ((8,), {"rotary_dim": 4, "start": 6}, ValueError, r"rotary_dim = 4 from start = 6 in head_dim = 8"),
        ((8,), {"gamma": 0.0}, ValueError, "XPos: gamma = 0.0. Expected a finite number above 0"),
        ((8,), {"gamma": float("inf")}, ValueError, "gamma = inf"),
        ((8,), {"gamma": True}, ValueError, "gamma = True"),
        ((8,), {"decay_base": -512}, ValueError, "decay_base = -512. Expected a finite number above 0"),
        ((8,), {"centre": float("nan")}, ValueError, "centre = nan. Expected a finite number, the same in every call"),
        ((8,), {"centre": torch.tensor(1.0)}, ValueError, "centre = tensor"),
        ((8,), {"pairing": "neox"}, ValueError, "XPos: pairing = 'neox'"),
        ((8,), {"head_axis": 1}, ValueError, "XPos: head_axis = 1"),
        ((8,), {"angle_dtype": BF16}, TypeError, "XPos: angle_dtype = torch.bfloat16"),
        ((8, 1e4), {}, TypeError, "XPos: schedule = 10000.0. Expected a schedule"),
        ((8, Explicit((1.0,))), {}, ShapeError, "1 frequencies for rotary_dim = 8"),
    ],
)
def test_impossible_settings_are_refused(arguments, settings, error, message):
    with pytest.raises(error, match=message):
        XPos(*arguments, **settings)


def test_impossible_inputs_are_refused():
    xpos, x = XPos(8), torch.zeros(1, 2, 4, 8)
    with pytest.raises(ShapeError, match="q of width 6 and k of width 6. Expected 8"):
        xpos(x[..., :6], x[..., :6], 0)
    with pytest.raises(ShapeError, match="1 queries and 4 keys without k_positions"):
        xpos(x[:, :, :1], x, 0)
    with pytest.raises(TypeError, match="half precision"):
        xpos(x, x, torch.arange(4).half())
    with pytest.raises(TypeError, match=r"XPos.span: dtype = torch.int64. Expected a floating dtype"):
        xpos.span(torch.int64)


def test_schedules_of_other_bases_turn_at_their_own_rate():
    xpos = XPos(8, Geometric(100.0))
    expected = sum(2 * ((i / 4 + 0.4) / 1.4) ** (3 / 512) * cos(3 * 100 ** (-i / 4)) for i in range(4))
    assert score(xpos, 10, 7) == pytest.approx(expected, rel=1e-12)
    assert repr(xpos) == ("XPos(8, Geometric(base=100.0), gamma=0.4, decay_base=512, centre=0, pairing='interleaved')")
