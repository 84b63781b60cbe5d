"""Axial rotary positions: shares of channels, settings, released vision models and what is refused."""

from __future__ import annotations

from math import pi
from types import SimpleNamespace

import pytest
import torch
from several_axes import F64, OnALine, oracle_of, turn

from posenc import CAUSAL, Frequencies, Geometric, RoPE, ShapeError, grid, positional_attention, rotary_table
from posenc.core.multimodal import patch_centres
from posenc.encodings.axial import AxialRoPE
from posenc.testing import conform

SETTINGS = {
    "half": {},
    "interleaved, columns first": {"pairing": "interleaved", "axis_order": (1, 0)},
    "trailing": {"rotary_dim": 4, "start": -4, "schedule": Geometric(10.0)},
    "one axis of two": {"axis_order": (1,), "rotary_dim": 4, "start": 4},
    "heads last but one": {"head_axis": -2},
}


def frequency_of(encoding):
    """Heo et al. 2024, §3.2: every share has a ladder of its own width."""
    shares = len(encoding.axis_order)
    share = encoding.rotary_dim // 2 // shares

    def frequency(head, axis, pair, heads):
        own = encoding.axis_order[pair // share] == axis
        return float(encoding.schedule.base ** (-2 * (pair % share) / (encoding.rotary_dim / shares))) if own else 0.0

    return frequency


axial = oracle_of(frequency_of)


@pytest.mark.parametrize("name", SETTINGS)
def test_conforms(name):
    settings = SETTINGS[name]
    conform(
        lambda shape: OnALine(AxialRoPE(shape.head_dim, **settings), (1, -1)),
        axial,
        claims=AxialRoPE.spec.claims,
        other=lambda shape: OnALine(AxialRoPE(shape.head_dim, **(settings | {"schedule": Geometric(50.0)})), (1, -1)),
        skip=() if name == "half" else {"graph capture"},
    )


def test_three_axes_follow_the_oracle():
    rope, at = AxialRoPE(14, 3, rotary_dim=12, start=1), grid(3, 2, 4).positions
    q = torch.randn(2, 24, 14, dtype=F64)
    expected = turn(q, at, frequency_of(rope), pairs=6, pairing="half", first=1)
    # three products and sums of numbers up to |q|, each rounded once
    torch.testing.assert_close(rope(q, q, at)[0], expected, rtol=0.0, atol=16 * 2**-53 * q.abs().max().item())


def test_the_spec_builds_it_for_a_model():
    from posenc.testing import SHAPE

    (rope,) = AxialRoPE.spec.build(SHAPE)
    assert (rope.axes, rope.head_dim) == (2, 8)


def test_worked_frequencies():
    table = AxialRoPE(64).prepare(torch.tensor([[1, 0], [0, 1]]), dtype=F64)[0]
    ladder = torch.atan2(table.sin, table.cos)
    assert ladder[0, [0, 1, 15]].tolist() == pytest.approx([1, 0.7498942093, 0.01333521432], rel=1e-9)
    assert ladder[0, 16:].eq(0).all()
    assert torch.equal(ladder[0, :16], ladder[1, 16:])


def test_axes_move_on_their_own():
    # translation along either axis leaves scores as they were
    rope, at, q = AxialRoPE(16), grid(3, 4).positions, torch.randn(2, 12, 16, dtype=F64)
    scores = torch.matmul(*[x if i == 0 else x.mT for i, x in enumerate(rope(q, q, at))])
    for shift in ((1000, 0), (0, 1000), (-7, 3)):
        a, b = rope(q, q, at + torch.tensor(shift))
        # angles of up to 1000 radians carry 1000 · 2^-53 each, on sums of 16 products
        torch.testing.assert_close(a @ b.mT, scores, rtol=0.0, atol=4 * 1000 * 2**-53 * 16 * q.abs().max().item() ** 2)


def test_swapped_axes_are_swapped_shares():
    at = grid(3, 4).positions
    rows_first, columns_first = AxialRoPE(16), AxialRoPE(16, axis_order=(1, 0))
    a, b = rows_first.prepare(at)[0].cos, columns_first.prepare(at)[0].cos
    assert torch.equal(b, torch.cat([a[:, 4:], a[:, :4]], -1))
    assert torch.equal(b, rows_first.prepare(at.flip(-1))[0].cos)
    assert not torch.equal(a, b)


def test_columns_of_a_wide_picture_count_along_its_rows():
    # huggingface/transformers#41380: width 4, height 3
    at = grid(3, 4).positions
    assert at[:, 1].tolist() == [0, 1, 2, 3] * 3
    table = AxialRoPE(8, axis_order=(1,), rotary_dim=4).prepare(at)[0]
    assert torch.equal(table.cos, rotary_table(at[:, 1], Geometric(100.0).frequencies(4)).cos)


def test_one_axis_of_an_even_share_is_plain_rope():
    q, line = torch.randn(2, 5, 8), torch.arange(5)
    still = torch.stack([line, torch.zeros(5, dtype=torch.int64)], -1)
    rotated, _ = AxialRoPE(8, pairing="interleaved")(q, q, still)
    assert torch.equal(rotated, RoPE(8, Geometric(100.0), rotary_dim=4, pairing="interleaved")(q, q, line)[0])
    assert torch.equal(AxialRoPE(8, axes=1)(q, q, line[:, None])[0], RoPE(8, Geometric(100.0))(q, q, line)[0])


def test_class_tokens_at_the_origin_do_not_turn():
    q = torch.randn(1, 2, 8, 16)
    rotated, _ = AxialRoPE(16)(q, q, grid(2, 3, prefix=2).positions)
    assert torch.equal(rotated[:, :, :2], q[:, :, :2])
    assert not torch.equal(rotated[:, :, 3:], q[:, :, 3:])


def test_frequencies_may_come_per_sequence():
    rope, x, at = AxialRoPE(8), torch.randn(2, 2, 6, 8), grid(2, 3).positions
    ladders = torch.stack([Geometric(base).frequencies(4).inv_freq.repeat(2) for base in (100.0, 7.0)])
    together, _ = rope.transform(x, x, rope.prepare(at.expand(2, 6, 2), frequencies=Frequencies(ladders)))
    for row, base in enumerate((100.0, 7.0)):
        assert torch.equal(together[row], AxialRoPE(8, schedule=Geometric(base))(x[row], x[row], at)[0])
    with pytest.raises(ShapeError, match="AxialRoPE.prepare: frequencies of 2 pairs. Expected 4"):
        rope.prepare(at, frequencies=Frequencies(torch.ones(2, dtype=F64)))


def test_attention_takes_it_and_refuses_tokens_of_one_axis():
    q, rope = torch.randn(1, 2, 6, 8), AxialRoPE(8)
    a, b = rope(q, q, grid(2, 3).positions)
    expected = positional_attention(a, b, q, encodings=[], positions=0, mask=CAUSAL)
    actual = positional_attention(q, q, q, encodings=[rope], positions=grid(2, 3), mask=CAUSAL)
    assert torch.equal(actual, expected)
    with pytest.raises(TypeError, match="An integer start is for one axis"):
        positional_attention(q, q, q, encodings=[rope], positions=0, mask=CAUSAL)


def test_rotates_as_rope_vit_does():
    # the column first, pairs as complex numbers
    q, (height, width) = torch.randn(1, 2, 12, 16), (3, 4)
    ladder = 1.0 / (100.0 ** (torch.arange(0, 16, 4).float() / 16))
    cell = torch.arange(12)
    angles = torch.cat([torch.outer(axis.float(), ladder) for axis in (cell % width, cell // width)], -1)
    turned = torch.view_as_complex(q.reshape(1, 2, 12, 8, 2)) * torch.polar(torch.ones_like(angles), angles)
    rope = AxialRoPE(16, axis_order=(1, 0), pairing="interleaved", angle_dtype=torch.float32)
    rotated, _ = rope(q, q, grid(height, width).positions)
    # complex products may fuse their multiply-adds: two roundings of numbers up to 2 |q|
    torch.testing.assert_close(
        rotated, torch.view_as_real(turned).flatten(-2), rtol=0.0, atol=4 * 2**-24 * q.abs().max().item()
    )


def vision(module, name, **settings):
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    rope_parameters = {"rope_type": "axial", "rope_theta": 100.0}
    config = SimpleNamespace(rope_parameters=rope_parameters, head_dim=32, hidden_size=64, num_attention_heads=2, **settings)
    return modeling, getattr(modeling, name)(config)


def tables_equal(table, cos, sin):
    assert torch.equal(table.cos, cos)
    assert torch.equal(table.sin, sin)


def test_float32_angles_equal_dinov3():
    modeling, embed = vision("dinov3_vit", "DINOv3ViTRopePositionEmbedding", image_size=56, patch_size=8, rope_theta=100.0)
    q, k = torch.randn(1, 2, 5 * 7 + 3, 32), torch.randn(1, 2, 5 * 7 + 3, 32)
    cos, sin = embed.eval()(torch.zeros(1, 3, 5 * 8, 7 * 8))
    rope = AxialRoPE(32, angle_dtype=torch.float32)
    at = patch_centres(5, 7, extent=2 * pi, prefix=3, dtype=torch.float32).positions
    table, _ = rope.prepare(at)
    tables_equal(type(table)(table.cos[3:], table.sin[3:]), cos[:, :16], sin[:, :16])
    for actual, theirs in zip(rope(q, k, at), modeling.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert torch.equal(actual, theirs)
    # in float64 they are the same up to the rounding of a coordinate of 2π and of an angle as large
    exact = AxialRoPE(32).prepare(patch_centres(5, 7, extent=2 * pi).positions, dtype=F64)[0]
    torch.testing.assert_close(exact.cos, cos[:, :16].double(), rtol=0.0, atol=4 * 2**-24 * 2 * pi)


def test_float32_angles_equal_qwen2_vl_vision():
    _, embed = vision("qwen2_vl", "Qwen2VLVisionRotaryEmbedding")
    at = grid(5, 7).positions
    cos, sin = embed(torch.zeros(1), at)
    table, _ = AxialRoPE(32, angle_dtype=torch.float32).prepare(at)
    tables_equal(table, cos[:, :16], sin[:, :16])


def test_float32_blocks_equal_gemma4_vision():
    modeling, embed = vision("gemma4", "Gemma4VisionRotaryEmbedding")
    at, q = grid(5, 7).positions[None], torch.randn(1, 2, 35, 32)
    cos, sin = embed(q, at)
    theirs = modeling.apply_multidimensional_rope(q, cos, sin, at, unsqueeze_dim=1)
    rotated = q
    for rope in AxialRoPE.blocks(32, angle_dtype=torch.float32):
        rotated, _ = rope(rotated, rotated, at)
    assert torch.equal(rotated, theirs)
    assert not torch.equal(rotated, AxialRoPE(32, angle_dtype=torch.float32)(q, q, at)[0])


def test_interleaved_blocks_are_one_rotation():
    q, at = torch.randn(1, 2, 12, 16), grid(3, 4).positions
    rotated = q
    for rope in AxialRoPE.blocks(16, pairing="interleaved"):
        rotated, _ = rope(rotated, rotated, at)
    assert torch.equal(rotated, AxialRoPE(16, pairing="interleaved")(q, q, at)[0])


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        ((6,), {}, ValueError, "rotary_dim = 6 for 2 axes. Expected a multiple of 4"),
        ((8, 3), {}, ValueError, "rotary_dim = 8 for 3 axes. Expected a multiple of 6"),
        ((7,), {}, ValueError, "AxialRoPE: rotary_dim = 7. Expected an even integer"),
        ((0,), {}, ValueError, "AxialRoPE: head_dim = 0"),
        ((8, 0), {}, ValueError, "axes = 0"),
        ((8,), {"axis_order": (0, 2)}, ValueError, r"axis_order = \(0, 2\) for 2 axes. Expected axes from 0 to 1"),
        ((8,), {"axis_order": (0, 0)}, ValueError, "each at most once"),
        ((8,), {"axis_order": ()}, ValueError, r"axis_order = \(\)"),
        ((8,), {"rotary_dim": 12}, ValueError, "rotary_dim = 12 from start = 0 in head_dim = 8"),
        ((8,), {"start": -9}, ValueError, "start = -9"),
        ((8,), {"pairing": "neox"}, ValueError, "pairing = 'neox'"),
        ((8,), {"head_axis": 1}, ValueError, "head_axis = 1"),
        ((8,), {"angle_dtype": torch.bfloat16}, TypeError, "angle_dtype = torch.bfloat16"),
        ((8, 2, 100.0), {}, TypeError, "schedule = 100.0. Expected a schedule"),
    ],
)
def test_impossible_settings_are_refused(arguments, settings, error, message):
    with pytest.raises(error, match=message):
        AxialRoPE(*arguments, **settings)


def test_blocks_of_odd_width_are_refused():
    with pytest.raises(ValueError, match="AxialRoPE: head_dim = 10 for 2 axes. Expected a multiple of 4"):
        AxialRoPE.blocks(10)


@pytest.mark.parametrize(
    ("places", "error", "message"),
    [
        (torch.arange(4), ShapeError, r"AxialRoPE: positions have shape \(4,\). Expected \[\*batch, 4, 2\]"),
        (torch.zeros(4, 3), ShapeError, r"Expected \[\*batch, 4, 2\]"),
        (torch.zeros(4, 2).bfloat16(), TypeError, "half precision"),
        (0, TypeError, "An integer start is for one axis"),
    ],
)
def test_impossible_inputs_are_refused(places, error, message):
    with pytest.raises(error, match=message):
        AxialRoPE(8)(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), places)


def test_it_says_how_it_was_made():
    assert repr(AxialRoPE(8)) == "AxialRoPE(8, axes=2, Geometric(base=100.0), axis_order=(0, 1), pairing='half')"
