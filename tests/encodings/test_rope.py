"""Rotary positions as a module: settings, scores, caches and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import Explicit, Frequencies, Geometric, RoPE, ShapeError
from posenc.testing import conform, oracles

F64 = torch.float64
SETTINGS = {
    "half": {},
    "interleaved": {"pairing": "interleaved"},
    "partial": {"rotary_dim": 4, "start": 2},
    "trailing": {"rotary_dim": 4, "start": -4, "pairing": "interleaved"},
    "base": {"schedule": Geometric(500_000.0)},
    "heads last but one": {"head_axis": -2},
}
Q = torch.arange(1.0, 9.0, dtype=F64).reshape(1, 1, 8)
K = 1 / Q


SAME_GRAPH = {"graph capture"}  # as that of other settings, which is tested


@pytest.mark.parametrize("name", SETTINGS)
def test_conforms(name):
    settings = SETTINGS[name]
    conform(
        lambda shape: RoPE(shape.head_dim, **settings),
        oracles.rope,
        other=lambda shape: RoPE(shape.head_dim, **(settings | {"schedule": Geometric(100.0)})),
        skip=SAME_GRAPH if name in ("base", "trailing") else (),
    )


def test_float32_angles_conform_to_what_float32_owes():
    def make(shape):
        return RoPE(shape.head_dim, angle_dtype=torch.float32)

    conform(make, oracles.rope, angle_dtype=torch.float32, skip=SAME_GRAPH)
    with pytest.raises(AssertionError, match="fails 'far positions': differs from the oracle"):
        conform(make, oracles.rope, skip=SAME_GRAPH)


def test_an_amplitude_conforms_except_for_norms():
    ladder = Explicit((1.0, 0.3, 0.02, 0.0), amplitude=1.25)
    conform(
        lambda shape: RoPE(shape.head_dim, ladder, rotary_dim=8),
        oracles.rope,
        claims=("shift-invariant", "parameter-free", "any-length", "real-positions"),
        skip=SAME_GRAPH,
    )
    with pytest.raises(AssertionError, match="fails 'norm-preserving': RoPE changes norms"):
        conform(
            lambda shape: RoPE(shape.head_dim, ladder, rotary_dim=8), oracles.rope, claims=("norm-preserving",), skip=SAME_GRAPH
        )


def score(rope, m, n, q=Q, k=K):
    q, k = rope(q, k, m, n)
    return (q * k).sum().item()


@pytest.mark.parametrize("places", [(5, 2), (105, 102), (3, 0)])
def test_worked_scores(places):
    assert score(RoPE(8, pairing="interleaved"), *places) == pytest.approx(3.5339103329486673, rel=1e-12)
    assert score(RoPE(8), *places) == pytest.approx(2.4027148500874498, rel=1e-12)


def test_the_sense_of_rotation_is_shared():
    rope = RoPE(8, pairing="interleaved")
    assert score(rope, 2, 5) == pytest.approx(4.32564777216, rel=1e-11)
    # what keys turned the other way would give: the scores then depend on the sum of positions
    assert score(rope, 5, -2) == pytest.approx(5.64374763962, rel=1e-11)
    assert score(rope, 105, -102) == pytest.approx(1.89970316564, rel=1e-10)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(-(10**6), 10**6), st.sampled_from(["half", "interleaved"]))
def test_scores_depend_on_distance_in_float32(m, n, shift, pairing):
    q, k = torch.randn(2, 1, 1, 64).unbind()
    rope = RoPE(64, pairing=pairing)
    # sums of 64 products of float32 numbers, each rotated and rounded: 4 + 64 roundings of |q||k|
    allowed = 68 * 2**-24 * q.norm().item() * k.norm().item()
    assert score(rope, m + shift, n + shift, q, k) == pytest.approx(score(rope, m, n, q, k), abs=allowed)


def test_zeroed_frequencies_do_not_turn():
    rope = RoPE(8, Explicit((1.0, 0.0, 0.5, 0.0)))
    q, _ = rope(Q, K, 1000)
    assert torch.equal(q[..., [1, 5, 3, 7]], Q[..., [1, 5, 3, 7]])


def test_offsets_are_not_forgotten():
    # lucidrains/rotary-embedding-torch#11
    rope, x = RoPE(8), torch.randn(1, 2, 5, 8)
    at_0, at_7 = rope(x, x, 0)[0], rope(x, x, 7)[0]
    assert torch.equal(at_7, rope(x, x, torch.arange(7, 12))[0])
    assert torch.equal(at_0, RoPE(8)(x, x, torch.arange(5))[0])
    assert not torch.equal(at_0, at_7)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_any_split_of_the_sequence_gives_the_whole(steps):
    # keras-team/keras-hub#1544
    rope, length = RoPE(8, pairing="interleaved"), sum(steps)
    x = torch.randn(1, 2, length, 8)
    whole, parts, start = rope(x, x, 0)[0], [], 0
    for n in steps:
        parts.append(rope(x[:, :, start : start + n], x[:, :, start : start + n], start)[0])
        start += n
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=0.0, atol=4 * 2**-24 * x.abs().max().item())


def test_negative_positions_are_positions():
    # turboderp-org/exllamav2#606
    rope, x = RoPE(8), torch.randn(1, 1, 4, 8, dtype=F64)
    q, k = rope(x, x, torch.tensor([-2, -1, 0, 1]))
    shifted_q, shifted_k = rope(x, x, torch.tensor([0, 1, 2, 3]))
    torch.testing.assert_close(q @ k.mT, shifted_q @ shifted_k.mT, rtol=0.0, atol=1e-14)


def test_one_table_serves_queries_and_keys_of_the_same_tokens():
    rope, at = RoPE(8), torch.arange(3)
    q_table, k_table = rope.prepare(at)
    assert q_table is k_table
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    for actual, expected in zip(rope.transform(q, k, (q_table, k_table)), rope(q, k, 0), strict=True):
        assert torch.equal(actual, expected)


def test_a_prepared_step_serves_only_its_own_tokens():
    rope, x = RoPE(8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ShapeError, match="positions of exactly these tokens"):
        rope.transform(x, x, rope.prepare(torch.tensor([7])))


def test_frequencies_may_come_per_sequence():
    rope, x = RoPE(8), torch.randn(2, 2, 4, 8)
    bases = [1e4, 1e6]
    inv_freq = torch.stack([Geometric(base).frequencies(8).inv_freq for base in bases])
    prepared = rope.prepare(torch.arange(4).expand(2, 4), frequencies=Frequencies(inv_freq))
    together, _ = rope.transform(x, x, prepared)
    for row, base in enumerate(bases):
        assert torch.equal(together[row], RoPE(8, Geometric(base))(x[row], x[row], 0)[0])
    with pytest.raises(ShapeError, match=r"frequencies of 3 pairs. Expected 4"):
        rope.prepare(torch.arange(4), frequencies=Frequencies(torch.ones(3, dtype=F64)))


def test_without_heads():
    rope, x = RoPE(8, head_axis=None), torch.randn(2, 5, 8)
    at = torch.stack([torch.arange(5), torch.arange(5) + 9])
    assert torch.equal(rope(x, x, at)[0], RoPE(8)(x[:, None], x[:, None], at)[0][:, 0])


def test_float32_angles_rotate_as_transformers_does():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = pytest.importorskip("transformers").LlamaConfig(hidden_size=128, num_attention_heads=2)
    q, k, at = torch.randn(1, 2, 300, 64), torch.randn(1, 1, 300, 64), torch.arange(300)[None]
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, at)
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin)
    for actual, theirs in zip(RoPE(64, angle_dtype=torch.float32)(q, k, at), expected, strict=True):
        assert torch.equal(actual, theirs)


def test_decode_steps_do_not_recompile():
    # lucidrains/rotary-embedding-torch#38
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    rope, x = RoPE(8), torch.randn(1, 2, 1, 8)
    step = torch.compile(rope, fullgraph=True, backend=counter)
    for start in (3, 4, 5, 6, 7):
        assert torch.equal(step(x, x, start)[0], rope(x, x, start)[0])
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((7,), ValueError, "rotary_dim = 7. Expected an even integer"),
        ((0,), ValueError, "head_dim = 0"),
        ((8, Geometric(), {"rotary_dim": 10}), ValueError, "rotary_dim = 10 from start = 0 in head_dim = 8"),
        ((8, Geometric(), {"rotary_dim": 4, "start": 6}), ValueError, r"start \+ rotary_dim ≤ head_dim"),
        ((8, Geometric(), {"start": -9}), ValueError, "start = -9"),
        ((8, Geometric(), {"pairing": "neox"}), ValueError, "pairing = 'neox'"),
        ((8, Geometric(), {"head_axis": 1}), ValueError, "head_axis = 1"),
        ((8, Geometric(), {"angle_dtype": torch.bfloat16}), TypeError, "angle_dtype = torch.bfloat16"),
        ((8, Explicit((1.0,))), ShapeError, "1 frequencies for rotary_dim = 8"),
    ],
)
def test_impossible_settings_are_refused(arguments, error, message):
    *arguments, last = arguments
    rest = last if isinstance(last, dict) else {}
    with pytest.raises(error, match=message):
        RoPE(*arguments, *([] if rest else [last]), **rest)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "places", "error", "message"),
    [
        ((1, 2, 1, 8), (1, 2, 4, 8), (3,), ShapeError, "1 queries and 4 keys without k_positions"),
        ((1, 2, 4, 6), (1, 2, 4, 6), (0,), ShapeError, "Expected 8, the head width"),
        ((1, 2, 4, 8), (1, 2, 4, 8), (torch.arange(3),), ShapeError, "RoPE: positions have shape"),
        ((1, 2, 4, 8), (1, 2, 4, 8), (0, torch.arange(3)), ShapeError, r"RoPE \(keys\): positions have shape"),
        ((1, 2, 4, 8), (1, 2, 4, 8), (torch.arange(4).bfloat16(),), TypeError, "half precision"),
        ((1, 2, 4, 8), (1, 2, 4, 8), (torch.full((4,), torch.nan),), ValueError, "positions hold nan"),
    ],
)
def test_impossible_inputs_are_refused(q_shape, k_shape, places, error, message):
    with pytest.raises(error, match=message):
        RoPE(8)(torch.zeros(q_shape), torch.zeros(k_shape), *places)
