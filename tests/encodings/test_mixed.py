"""Rotary positions with learned directions: the released formula, training, casts, heads and what is refused."""

from __future__ import annotations

from math import cos, pi, sin

import pytest
import torch
from several_axes import F64, OnALine, oracle_of, turn

from posenc import CAUSAL, ShapeError, grid, positional_attention
from posenc.encodings.mixed import MixedRoPE
from posenc.testing import SHAPE, conform


def frequency_of(encoding):
    """Heo et al. 2024, §3.3: a vector for every key head and pair; queries take that of their key."""
    freqs = encoding.freqs.detach().double()
    return lambda head, axis, pair, heads: freqs[axis, head * freqs.shape[1] // heads, pair].item()


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_conforms(pairing):
    conform(
        lambda shape: OnALine(MixedRoPE(shape.head_dim, shape.kv_heads, pairing=pairing), (1, -1)),
        oracle_of(frequency_of),
        claims=MixedRoPE.spec.claims,
        skip=() if pairing == "interleaved" else {"graph capture"},
    )


def test_the_spec_builds_it_for_a_model():
    (rope,) = MixedRoPE.spec.build(SHAPE)
    assert (rope.axes, rope.head_dim, rope.heads) == (2, SHAPE.head_dim, SHAPE.kv_heads)


def test_instances_keep_to_themselves():
    at = grid(2, 3).positions
    for made in (MixedRoPE(8, 3), MixedRoPE(16, 2, pairing="half"), MixedRoPE(8, 3)):
        q = torch.randn(made.heads, 6, made.head_dim, dtype=F64)
        expected = turn(q, at, frequency_of(made), pairs=made.head_dim // 2, pairing=made.pairing)
        # products and sums of numbers up to |q|, angles up to 5
        torch.testing.assert_close(made(q, q, at)[0], expected, rtol=0.0, atol=32 * 2**-53 * q.abs().max().item())


@pytest.mark.parametrize("groups", [1, 2])
def test_scores_of_a_head_depend_on_the_offset_alone(groups):
    rope, at = MixedRoPE(8, 3), grid(3, 4).positions
    q, k = torch.randn(3 * groups, 12, 8, dtype=F64), torch.randn(3, 12, 8, dtype=F64)

    def scores(at):
        a, b = rope(q, k, at)
        return a @ b.repeat_interleave(groups, 0).mT

    reach = q.abs().max().item() * k.abs().max().item()
    for shift in ((1000, 0), (0, 1000), (-7, 3)):
        # angles of up to 1400 radians carry 2^-53 of themselves each, on sums of 8 products
        torch.testing.assert_close(scores(at + torch.tensor(shift)), scores(at), rtol=0.0, atol=4 * 1400 * 2**-53 * 8 * reach)


def test_first_frequencies_are_those_of_the_paper():
    rope = MixedRoPE(64, 5)
    magnitude = rope.freqs.detach().double().norm(dim=0)
    # cosine and sine, product, and float32 storage: a few roundings of numbers up to 1
    for half in (magnitude[:, :16], magnitude[:, 16:]):
        for head in half.tolist():
            assert head[:2] + head[-1:] == pytest.approx([1, 0.8659643234, 0.1154781985], abs=8 * 2**-24)
    rows, columns = rope.freqs.detach().double()
    first, partner = (torch.stack([rows[:, i], columns[:, i]], -1) for i in (0, 16))
    assert (first * partner).sum(-1).abs().max() < 8 * 2**-24
    # a quarter turn to the left, never to the right
    assert (first[:, 0] * partner[:, 1] - first[:, 1] * partner[:, 0]).tolist() == pytest.approx([1] * 5, abs=8 * 2**-24)
    directions = torch.atan2(columns, rows)
    assert directions[:, :16].std(dim=-1).max() < 1e-6
    assert directions[:, 0].std() > 0.1


def test_parameters_can_be_drawn_again_and_repeatedly():
    rope = MixedRoPE(8, 4)
    before = rope.freqs.detach().clone()
    draws = []
    for _ in range(2):
        rope.reset_parameters(torch.Generator().manual_seed(3))
        draws.append(rope.freqs.detach().clone())
    assert torch.equal(*draws)
    assert not torch.equal(draws[0], before)


def test_released_weights_turn_as_in_rope_vit():
    # [2, layers, heads · pairs], the column first; complex products
    heads, layer, (height, width) = 2, 1, (3, 4)
    released = torch.randn(2, 3, heads * 4)
    rope = MixedRoPE(8, heads)
    rope.load_state_dict({"freqs": released[:, layer].unflatten(-1, (heads, -1)).flip(0)})
    cell, q = torch.arange(12), torch.randn(1, heads, 12, 8)
    fx, fy = released[:, layer].unflatten(-1, (heads, -1))
    angles = (cell % width)[:, None] * fx[:, None] + (cell // width)[:, None] * fy[:, None]
    turned = torch.view_as_complex(q.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angles), angles)
    # their angles are float32: three roundings of the largest
    allowed = (4 + 4 * angles.abs().max().item()) * 2**-24 * q.abs().max().item() * 2
    torch.testing.assert_close(
        rope(q, q, grid(height, width).positions)[0], torch.view_as_real(turned).flatten(-2), rtol=0.0, atol=allowed
    )


def test_gradients_reach_the_frequencies_in_every_step():
    # lucidrains/rotary-embedding-torch#18: the second backward failed on a cached graph
    rope, at = MixedRoPE(8, 2), grid(2, 3).positions
    optimizer = torch.optim.SGD(rope.parameters(), lr=0.1)
    q, k = torch.randn(2, 1, 2, 6, 8).unbind()
    for _ in range(2):
        before = rope.freqs.detach().clone()
        optimizer.zero_grad()
        a, b = rope(q, k, at)
        (a @ b.mT).square().sum().backward()
        assert rope.freqs.grad.abs().min() > 0
        optimizer.step()
        assert not torch.equal(rope.freqs, before)


def test_a_batch_may_have_grids_of_its_own():
    rope, q = MixedRoPE(8, 2), torch.randn(2, 2, 6, 8)
    at = torch.stack([grid(2, 3).positions, grid(3, 2).positions])
    together, _ = rope(q, q, at)
    for row in range(2):
        assert torch.equal(together[row], rope(q[row], q[row], at[row])[0])


def test_attention_takes_it():
    rope, q = MixedRoPE(8, 2), torch.randn(1, 2, 6, 8)
    a, b = rope(q, q, grid(2, 3).positions)
    expected = positional_attention(a, b, q, encodings=[], positions=0, mask=CAUSAL)
    assert torch.equal(positional_attention(q, q, q, encodings=[rope], positions=grid(2, 3), mask=CAUSAL), expected)


def test_class_tokens_at_the_origin_do_not_turn():
    rope, q = MixedRoPE(8, 2), torch.randn(1, 2, 7, 8)
    rotated, _ = rope(q, q, grid(2, 3, prefix=1).positions)
    assert torch.equal(rotated[:, :, :1], q[:, :, :1])


def test_half_precision_frequencies_are_refused_and_half_content_is_not():
    rope, at, q = MixedRoPE(8, 2), grid(2, 3).positions, torch.randn(1, 2, 6, 8)
    half, _ = rope(q.bfloat16(), q.bfloat16(), at)
    assert half.dtype == torch.bfloat16
    rope.to(torch.bfloat16)
    with pytest.raises(TypeError, match="MixedRoPE: freqs are torch.bfloat16. Expected float32 or float64"):
        rope(q.bfloat16(), q.bfloat16(), at)
    assert rope.float()(q, q, at)[0].dtype == torch.float32


def test_float32_frequencies_turn_by_float64_angles():
    rope = MixedRoPE(4, 1)
    with torch.no_grad():
        rope.freqs.copy_(torch.tensor([[[0.3, 0.7]], [[0.1, -0.2]]]))
    frequency, at = frequency_of(rope), (1_000_003, 999_999)
    angle = at[0] * frequency(0, 0, 0, 1) + at[1] * frequency(0, 1, 0, 1)
    q = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=F64).reshape(1, 1, 4)
    turned = rope(q, q, torch.tensor([at]))[0].flatten().tolist()
    assert turned[:2] == pytest.approx([cos(angle), sin(angle)], abs=4 * 2**-53 * 2 * 10**6 * pi)


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        ((6, 2), {}, ValueError, "head_dim = 6. Expected a multiple of 4"),
        ((8, 0), {}, ValueError, "heads = 0"),
        ((8, 2.0), {}, TypeError, "heads = 2.0"),
        ((8, 2), {"base": 0}, ValueError, "base = 0. Expected a finite number above 0"),
        ((8, 2), {"pairing": "neox"}, ValueError, "pairing = 'neox'"),
    ],
)
def test_impossible_settings_are_refused(arguments, settings, error, message):
    with pytest.raises(error, match=message):
        MixedRoPE(*arguments, **settings)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "places", "error", "message"),
    [
        ((1, 4, 6, 8), (1, 2, 6, 8), grid(2, 3).positions, ShapeError, r"k of shape \(1, 2, 6, 8\)\. Expected .* 4 key heads"),
        ((1, 6, 6, 8), (1, 4, 6, 8), grid(2, 3).positions, ShapeError, r"q of shape \(1, 6, 6, 8\)\. Expected .* a multiple"),
        ((1, 4, 6, 4), (1, 4, 6, 4), grid(2, 3).positions, ShapeError, r"Expected \[\*batch, heads, 6, 8\]"),
        ((6, 8), (6, 8), grid(2, 3).positions, ShapeError, r"q of shape \(6, 8\)"),
        ((1, 4, 6, 8), (1, 4, 6, 8), torch.zeros(6, 3), ShapeError, r"MixedRoPE: positions have shape \(6, 3\)"),
        ((1, 4, 6, 8), (1, 4, 6, 8), torch.zeros(6, 2).half(), TypeError, "half precision"),
        ((1, 4, 6, 8), (1, 4, 6, 8), 0, TypeError, "An integer start is for one axis"),
    ],
)  # fmt: skip
def test_impossible_inputs_are_refused(q_shape, k_shape, places, error, message):
    with pytest.raises(error, match=message):
        MixedRoPE(8, 4)(torch.zeros(q_shape), torch.zeros(k_shape), places)


def test_a_prepared_step_serves_only_its_own_tokens():
    rope, q = MixedRoPE(8, 4), torch.zeros(1, 4, 6, 8)
    with pytest.raises(ShapeError, match="positions of exactly these tokens"):
        rope.transform(q, q, rope.prepare(torch.tensor([[1, 2]])))
