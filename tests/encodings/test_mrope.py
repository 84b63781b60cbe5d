"""Multimodal rotary positions: which pair reads which axis, released language models, plain RoPE on text, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from several_axes import F64, OnALine, oracle_of

from posenc import Explicit, Frequencies, Geometric, RoPE, ShapeError, grid
from posenc.core.multimodal import multimodal
from posenc.encodings.mrope import MRoPE, axis_of_pair
from posenc.testing import SHAPE, conform

SECTIONS = (2, 1, 1)
SETTINGS = {
    "chunked": {},
    "interleaved": {"layout": "interleaved"},
    "time last, adjacent pairs": {"layout": "time_last", "pairing": "interleaved"},
    "partial": {"layout": "interleaved", "sections": (1, 1, 0), "rotary_dim": 4, "start": -4},
    "heads last but one": {"head_axis": -2},
}


def axis_by_rule(sections, layout, pair):
    """Each layout as its paper or its release says it, for one pair."""
    time, axes = sections[0], len(sections)
    if layout == "interleaved":
        axis = pair % axes
        return axis if pair < axes * sections[axis] else 0
    if layout == "time_last":
        return 1 + pair % (axes - 1) if pair < sum(sections) - time else 0
    return next(axis for axis in range(axes) if pair < sum(sections[: axis + 1]))


def frequency_of(encoding):
    def frequency(head, axis, pair, heads):
        own = axis_by_rule(encoding.sections, encoding.layout, pair) == axis
        return float(encoding.schedule.base ** (-2 * pair / encoding.rotary_dim)) if own else 0.0

    return frequency


def make(settings, base=1e6):
    sections = settings.get("sections", SECTIONS)
    rest = {key: value for key, value in settings.items() if key != "sections"}

    def for_shape(shape):
        times = 1 if "rotary_dim" in rest else shape.head_dim // 8  # two_instances asks for wider heads too
        return OnALine(MRoPE(shape.head_dim, tuple(times * s for s in sections), Geometric(base), **rest), (1, -1, 0))

    return for_shape


@pytest.mark.parametrize("name", SETTINGS)
def test_conforms(name):
    conform(
        make(SETTINGS[name]),
        oracle_of(frequency_of),
        claims=MRoPE.spec.claims,
        other=make(SETTINGS[name], base=100.0),
        skip=() if name == "interleaved" else {"graph capture"},
    )


def test_the_spec_builds_it_for_a_model():
    (rope,) = MRoPE.spec.build(SHAPE)
    assert rope.sections == SECTIONS
    assert rope.axes == 3


def test_worked_axes_of_pairs():
    chunked = axis_of_pair((16, 24, 24), "chunked")
    assert [chunked[pair] for pair in (15, 16, 39, 40, 63)] == [0, 1, 1, 2, 2]
    interleaved = axis_of_pair((24, 20, 20), "interleaved")
    assert interleaved == (0, 1, 2) * 20 + (0,) * 4
    # alibaba/MNN#4133, ollama/ollama#12807: the blocked order of the same sections puts 43 of 64 pairs elsewhere
    assert sum(a != b for a, b in zip(interleaved, axis_of_pair((24, 20, 20), "chunked"), strict=True)) == 43
    assert axis_of_pair((11, 11, 10), "interleaved") == (0, 1, 2) * 10 + (0, 1)
    assert axis_of_pair((12, 10, 10), "interleaved") == (0, 1, 2) * 10 + (0, 0)
    assert axis_of_pair((20, 22, 22), "time_last") == (1, 2) * 22 + (0,) * 20
    assert axis_of_pair((4, 4), "interleaved") == (0, 1) * 4
    assert MRoPE(128, (24, 20, 20), layout="interleaved").axis_of_pair == interleaved


def realisable(sections, layout):
    if layout == "time_last" and len(set(sections[1:])) != 1:
        return False
    given_out = [axis_by_rule(sections, layout, pair) for pair in range(sum(sections))]
    return bool(given_out) and [given_out.count(axis) for axis in range(len(sections))] == sections


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.sampled_from(["chunked", "interleaved", "time_last"]))
def test_any_sections_come_out_exactly_or_are_refused(sections, layout):
    if realisable(sections, layout):
        assert axis_of_pair(sections, layout) == tuple(axis_by_rule(sections, layout, pair) for pair in range(sum(sections)))
    else:
        with pytest.raises(ValueError, match=r"axis_of_pair: sections = .*Expected"):
            axis_of_pair(sections, layout)


@pytest.mark.parametrize("layout", ["chunked", "interleaved", "time_last"])
@pytest.mark.parametrize("angle_dtype", [torch.float32, F64])
def test_equal_axes_are_plain_rope(layout, angle_dtype):
    q, at = torch.randn(1, 2, 40, 16), torch.arange(40) * 997
    rope = MRoPE(16, (4, 2, 2), layout=layout, angle_dtype=angle_dtype)
    plain = RoPE(16, Geometric(1e6), angle_dtype=angle_dtype)
    assert torch.equal(rope(q, q, at[:, None].expand(40, 3))[0], plain(q, q, at)[0])


def test_layouts_differ_where_axes_do():
    at = grid(1, 3, 4).positions
    tables = {
        layout: MRoPE(16, (4, 2, 2), layout=layout).prepare(at)[0].sin for layout in ("chunked", "interleaved", "time_last")
    }
    assert not torch.equal(tables["chunked"], tables["interleaved"])
    assert not torch.equal(tables["chunked"], tables["time_last"])
    assert not torch.equal(tables["interleaved"], tables["time_last"])


def text_config(sections, **settings):
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections), **settings}
    return SimpleNamespace(
        rope_parameters=rope, max_position_embeddings=1000, head_dim=32, hidden_size=64, num_attention_heads=2
    )


AT = multimodal(torch.tensor([[3, 0, 0], [2, 3, 4], [900, 0, 0], [1, 5, 2], [3, 0, 0]]), 940).positions.expand(2, 940, 3)
RELEASED = {
    # module, class of its rotary, sections in the order of the axes, as configured, settings
    "qwen2_vl": ("Qwen2VLRotaryEmbedding", (4, 6, 6), None, {"layout": "chunked"}),
    "qwen2_5_vl": ("Qwen2_5_VLRotaryEmbedding", (4, 6, 6), None, {"layout": "chunked"}),
    "paddleocr_vl": ("PaddleOCRRotaryEmbedding", (4, 6, 6), None, {"layout": "chunked"}),
    "glm4v": ("Glm4vTextRotaryEmbedding", (4, 6, 6), None, {"layout": "chunked", "pairing": "interleaved"}),
    "glm4v_moe": ("Glm4vMoeTextRotaryEmbedding", (4, 6, 6), None, {"layout": "chunked"}),
    "qwen3_vl": ("Qwen3VLTextRotaryEmbedding", (6, 5, 5), None, {"layout": "interleaved"}),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeTextRotaryEmbedding", (4, 6, 6), (6, 6, 4), {"layout": "time_last", "pairing": "interleaved"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_float32_angles_rotate_as_transformers_does(name):
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    cls, sections, configured, settings = RELEASED[name]
    q, k = torch.randn(2, 2, 940, 32), torch.randn(2, 1, 940, 32)
    cos, sin = getattr(modeling, cls)(text_config(configured or sections))(q, AT.movedim(-1, 0))
    expected = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    rope = MRoPE(32, sections, angle_dtype=torch.float32, **settings)
    for actual, theirs in zip(rope(q, k, AT), expected, strict=True):
        assert torch.equal(actual, theirs)


def test_a_quarter_of_a_head_rotates_as_qwen3_5_does():
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    config = text_config((11, 11, 10), partial_rotary_factor=0.25)
    config.head_dim = 256
    q, k = torch.randn(2, 1, 940, 256), torch.randn(2, 1, 940, 256)
    cos, sin = modeling.Qwen3_5TextRotaryEmbedding(config)(q, AT.movedim(-1, 0))
    rope = MRoPE(256, (11, 11, 10), layout="interleaved", rotary_dim=64, angle_dtype=torch.float32)
    for actual, theirs in zip(rope(q, k, AT), modeling.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert torch.equal(actual, theirs)


def test_rows_and_columns_alternate_as_in_neomme():
    modeling = pytest.importorskip("transformers.models.neomme.modeling_neomme")
    config = text_config(())
    config.rope_parameters = {"full_attention": config.rope_parameters}
    config.layer_types = ["full_attention"]
    q, at = torch.randn(2, 2, 940, 32), AT[..., 1:]
    cos, sin = modeling.NeoMMERotaryEmbedding(config)(q, at.movedim(-1, 0), "full_attention")
    rope = MRoPE(32, (8, 8), layout="interleaved", angle_dtype=torch.float32)
    for actual, theirs in zip(rope(q, q, at), modeling.apply_rotary_pos_emb(q, q, cos, sin), strict=True):
        assert torch.equal(actual, theirs)


def test_pixtral_is_two_sections_of_a_dealt_out_ladder():
    modeling = pytest.importorskip("transformers.models.pixtral.modeling_pixtral")
    config = text_config(())
    config.rope_parameters["rope_type"] = "axial"
    at = grid(5, 7).positions
    cos, sin = modeling.PixtralVisionRotaryEmbedding(config)(torch.zeros(1), at)
    ladder = Geometric(1e6).frequencies(32, dtype=torch.float32).inv_freq
    dealt = Explicit(tuple(torch.cat([ladder[0::2], ladder[1::2]]).tolist()))
    table, _ = MRoPE(32, (8, 8), dealt, angle_dtype=torch.float32).prepare(at)
    assert torch.equal(table.cos, cos[:, :16])
    assert torch.equal(table.sin, sin[:, :16])


def test_a_schedule_brings_its_gain_and_may_be_replaced():
    at, x = torch.randint(0, 50, (2, 6, 3)), torch.randn(2, 2, 6, 16)
    ladder = Geometric(1e6).frequencies(16).inv_freq
    louder = MRoPE(16, (4, 2, 2), Explicit(tuple(ladder.tolist()), amplitude=2.0))
    plain = MRoPE(16, (4, 2, 2))
    assert torch.equal(louder(x, x, at)[0], 2.0 * plain(x, x, at)[0])
    own = torch.stack([Geometric(base).frequencies(16).inv_freq for base in (1e4, 1e6)])
    together, _ = plain.transform(x, x, plain.prepare(at, frequencies=Frequencies(own)))
    assert torch.equal(together[1], plain(x[1], x[1], at[1])[0])
    assert torch.equal(together[0], MRoPE(16, (4, 2, 2), Geometric(1e4))(x[0], x[0], at[0])[0])
    with pytest.raises(ShapeError, match="MRoPE.prepare: frequencies of 3 pairs. Expected 8"):
        plain.prepare(at, frequencies=Frequencies(torch.ones(3, dtype=F64)))


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        # ml-explore/mlx-lm#1768: sections are the only sign of several axes, so they have to fit
        ((128, (16, 24, 23)), {}, ValueError, r"sections = \(16, 24, 23\) sum to 63 with rotary_dim = 128. Expected 64"),
        ((128, (11, 11, 10)), {"layout": "interleaved"}, ValueError, "sum to 32 with rotary_dim = 128. Expected 64"),
        ((64, (8, 12, 12)), {"layout": "interleaved"}, ValueError, r"come out as \(11, 11, 10\)"),
        ((64, (22, 22, 20)), {"layout": "time_last", "rotary_dim": 128}, ValueError, "time, height, width"),
        ((8, (4,)), {"layout": "time_last"}, ValueError, "one number for all axes but the first"),
        ((8, (0, 0, 0)), {}, ValueError, "Expected one pair or more"),
        ((8, ()), {}, ValueError, "Expected one pair or more"),
        ((8, (5, -1, 0)), {}, ValueError, "section 1 = -1"),
        ((8, (2.0, 1, 1)), {}, TypeError, "section 0 = 2.0"),
        ((8, 4), {}, TypeError, "sections = 4. Expected pairs per axis"),
        ((8, (2, 1, 1)), {"layout": "blocked"}, ValueError, "layout = 'blocked'. Expected 'chunked', 'interleaved' or"),
        ((8, (2, 1, 1)), {"pairing": "neox"}, ValueError, "MRoPE: pairing = 'neox'"),
        ((8, (2, 1, 1), Explicit((1.0,))), {}, ShapeError, "1 frequencies for rotary_dim = 8"),
    ],
)
def test_impossible_settings_are_refused(arguments, settings, error, message):
    with pytest.raises(error, match=message):
        MRoPE(*arguments, **settings)


def test_the_function_names_itself():
    with pytest.raises(ValueError, match="axis_of_pair: layout = 'thw'"):
        axis_of_pair((2, 1, 1), "thw")


def test_positions_of_other_axes_are_refused():
    with pytest.raises(ShapeError, match=r"MRoPE: positions have shape \(4, 2\). Expected \[\*batch, 4, 3\]"):
        MRoPE(8, (2, 1, 1))(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), torch.zeros(4, 2))


def test_it_says_how_it_was_made():
    rope = MRoPE(16, (2, 1, 1), layout="interleaved", rotary_dim=8, start=-8)
    expected = "MRoPE(16, (2, 1, 1), Geometric(base=1000000.0), layout='interleaved', rotary_dim=8, start=-8, pairing='half')"
    assert repr(rope) == expected
