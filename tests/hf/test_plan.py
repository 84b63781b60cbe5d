"""Plans of public models against facts about them, and of public bug reports against their right values."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from posenc import DynamicNTK, Geometric, Linear, Llama3, LongRoPE, YaRN, contiguous
from posenc.errors import ConfigError
from posenc.hf import BiasRule, InputTable, LayerPlan, LogTemperature, PositionPlan, Rotation, plan

CONFIGS = Path(__file__).parent / "configs"
SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 4, "max_position_embeddings": 2048,
}  # fmt: skip


def of(name: str) -> PositionPlan:
    return plan(CONFIGS / f"{name}.json")


def llama(**changes: Any) -> PositionPlan:
    return plan({**SMALL, **changes})


def rotation(found: PositionPlan, layer: int = 0) -> Rotation:
    turning = found.layers[layer].rotation
    assert turning is not None
    return turning


def pair(found: PositionPlan, index: int, layer: int = 0, length: int | None = None) -> float:
    return float(rotation(found, layer).frequencies(length=length).inv_freq[index])


def close(value: float, digits: int = 12) -> Any:
    return pytest.approx(value, rel=10.0**-digits)  # the facts are written with this many digits


# facts about public models


def test_llama_2() -> None:
    found = of("llama-2-7b-chat")
    assert found.runs == ((LayerPlan("full_attention", Rotation(Geometric(1e4), 128, 128, original_length=4096)), 32),)
    assert found.trained_length == found.max_length == 4096
    assert found.notes == ("rope_theta is not given: 10000, the default of 'llama'",)


def test_llama_3_1() -> None:
    found = of("llama-3.1-8b")
    assert rotation(found, 31).schedule == Llama3(Geometric(5e5), 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert pair(found, 40) == close(3.428102195952591e-05)
    plain = [1 / 5e5 ** (2 * i / 128) for i in range(64)]
    assert [pair(found, i) for i in (0, 28, 35, 63)] == close([plain[0], plain[28], plain[35] / 8, plain[63] / 8], 14)
    assert plain[29] / 8 < pair(found, 29) < plain[29]
    assert plain[34] / 8 < pair(found, 34) < plain[34]
    assert (found.trained_length, found.max_length, found.notes) == (8192, 131072, ())


def test_gpt_oss() -> None:
    found = of("gpt-oss-20b")
    rule = rotation(found).schedule
    assert isinstance(rule, YaRN)
    assert rule.rounding == "none"
    assert rule.original_length == 4096
    assert rule.factor == 32
    assert [pair(found, i) for i in (10, 17)] == [close(0.01933500112654036), pytest.approx(1.293187e-04, rel=1e-6)]
    assert [found.layers[i].window for i in range(4)] == [128, None, 128, None]
    assert rotation(found).head_dim == 64  # not 2880 / 64


def test_gemma_3() -> None:
    found = of("gemma-3-27b-it")
    assert [i for i, kind in enumerate(found.layers[i].kind for i in range(62)) if kind == "full_attention"] == list(
        range(5, 62, 6)
    )
    assert (rotation(found, 0).schedule, found.layers[0].window, found.layers[0].entry) == (
        Geometric(1e4),
        1024,
        "sliding_attention",
    )
    assert (rotation(found, 5).schedule, found.layers[5].window) == (Linear(Geometric(1e6), 8.0), None)


def test_modernbert() -> None:
    found = of("modernbert-base")
    assert [rotation(found, i).schedule for i in range(4)] == [Geometric(16e4), Geometric(1e4), Geometric(1e4), Geometric(16e4)]
    assert [found.layers[i].window for i in range(4)] == [None, 129, 129, None]  # 64 on each side
    old = {
        "model_type": "modernbert", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 22,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3, "local_attention": 128,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    assert plan(old).runs == found.runs


def test_deepseek_v3() -> None:
    found = of("deepseek-v3")
    turning = rotation(found, 60)
    assert (turning.head_dim, turning.rotary_dim, turning.start, turning.pairing) == (192, 64, 128, "interleaved")
    assert isinstance(turning.schedule, YaRN)
    assert turning.schedule.resolved_amplitude == 1.0
    assert found.layers[60].score_factor == close((0.1 * math.log(40) + 1) ** 2, 14)
    assert found.trained_length == 4096


def test_olmo_3() -> None:
    """Its windowed layers keep the plain ladder; an explicit attention_factor is the amplitude."""
    found = of("olmo-3.1-32b-instruct")
    assert (rotation(found, 0).schedule, found.layers[0].window) == (Geometric(5e5), 4096)
    scaled = rotation(found, 3).schedule
    assert isinstance(scaled, YaRN)
    assert scaled.resolved_amplitude == 1.2079441541679836 == close(0.1 * math.log(8) + 1, 15)


def test_qwen_2_5_vl() -> None:
    found = of("qwen2.5-vl-7b-instruct")
    axes = rotation(found).axes
    assert axes is not None
    assert axes.names == ("t", "h", "w")
    assert axes.of_pair == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert rotation(found).schedule == Geometric(1e6)
    assert found.layers[0].window is None  # use_sliding_window is false
    tower = found.parts["vision_config"]
    picture = rotation(tower)
    assert (len(tower.layers), picture.head_dim, picture.schedule) == (32, 80, Geometric(1e4))
    assert picture.axes is not None
    assert picture.axes.of_pair == (0,) * 20 + (1,) * 20


def test_phi_4() -> None:
    """The original length stands beside the block; the share of 0.75 leaves 48 pairs for 48 factors."""
    found = of("phi-4-multimodal")
    rule = rotation(found).schedule
    assert isinstance(rule, LongRoPE)
    assert rotation(found).rotary_dim == 96
    assert rule.original_length == 4096
    frequencies = rotation(found).frequencies
    assert frequencies(length=4096).amplitude == close(1.1902380714238083) == frequencies(length=4097).amplitude
    plain = [1 / 1e4 ** (2 * i / 96) for i in range(48)]
    assert pair(found, 47, length=4096) == close(plain[47], 14)  # at the original length: still the short factors
    assert pair(found, 47, length=4097) == close(plain[47] / 47.77, 14)
    assert any(note.startswith("rope_scaling.factor is not given: 32") for note in found.notes)


def test_partial_rotary() -> None:
    neox, gptj, glm = rotation(of("gpt-neox-20b")), rotation(of("gpt-j")), rotation(of("glm-4-9b-chat"))
    assert (neox.rotary_dim, neox.head_dim, neox.pairing) == (24, 96, "half")
    assert (gptj.rotary_dim, gptj.head_dim, gptj.pairing) == (64, 256, "interleaved")
    assert (glm.rotary_dim, glm.head_dim, glm.pairing) == (64, 128, "interleaved")


def test_smollm_3_has_layers_that_do_not_turn() -> None:
    found = of("smollm3-3b")
    assert [i for i in range(36) if found.layers[i].rotation is None] == list(range(3, 36, 4))
    with pytest.raises(
        ConfigError, match=r"rotary_table: layer 3 of 'smollm3' does not rotate\. .*Layer 0 is the first that does"
    ):
        found.rotary_table(torch.arange(3), layer=3)


def test_llama_4() -> None:
    """Layers that do not turn have the temperature, the others keep to chunks."""
    found = of("llama-4-scout-text")
    assert [i for i in range(48) if found.layers[i].rotation is None] == list(range(3, 48, 4))
    assert (found.layers[0].chunk, found.layers[3].chunk) == (8192, None)
    assert found.layers[0].temperature is None
    assert found.layers[3].temperature == LogTemperature(0.1, 8192, shift=1)
    assert rotation(found).pairing == "interleaved"


def test_input_tables() -> None:
    assert of("bert-base-uncased").input == InputTable("learned", 512)
    assert of("gpt2-large").input == InputTable("learned", 1024)
    assert of("deberta-v3-base").input is None  # position_biased_input is false
    whisper = of("whisper-large-v2")
    assert whisper.input == InputTable("learned", 448)
    assert whisper.trained_length == 448
    assert whisper.parts["encoder"].input == InputTable("sinusoidal", 1500, layout="concatenated")
    for name in ("bert-base-uncased", "gpt2-large", "whisper-large-v2"):
        assert all(layer.rotation is None for layer, _ in of(name).runs)


def test_score_biases() -> None:
    assert of("mpt-7b").layers[0].bias == BiasRule("alibi", 32)
    assert of("t5-small").layers[0].bias == BiasRule("t5", 8, (("buckets", 32), ("farthest", 128)))
    deberta = of("deberta-v3-base").layers[0].bias
    assert deberta == BiasRule("deberta", 12, (("farthest", 512), ("buckets", 256), ("terms", "p2c|c2p")))
    assert of("swin-tiny-p4-w7-224").layers[0].bias == BiasRule("swin", None, (("window", 7),))
    falcon = of("falcon-7b")
    assert falcon.layers[0].bias is None
    assert rotation(falcon).head_dim == 64
    asked = plan({**json.loads((CONFIGS / "falcon-7b.json").read_text()), "alibi": True})
    assert asked.layers[0].bias == BiasRule("alibi", 71)
    assert asked.layers[0].rotation is None


def test_tables_of_rows() -> None:
    """RoBERTa starts at the row after padding: 514 rows hold 512 tokens, and with padding at 3 only 510."""
    sizes = {"model_type": "roberta", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}
    for pad, tokens in ((1, 512), (3, 510)):
        found = plan({**sizes, "max_position_embeddings": 514, "pad_token_id": pad})
        assert found.input == InputTable("learned", 514, offset=pad + 1)
        assert found.input.length == tokens == found.trained_length
    opt = plan(
        {
            "model_type": "opt",
            "hidden_size": 768,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "max_position_embeddings": 2048,
        }
    )
    assert opt.input == InputTable("learned", 2050, offset=2)
    assert opt.trained_length == 2048


# public bug reports


def test_a_share_that_only_the_class_knows() -> None:
    """GLM turned every channel: the share of one half stands in no file."""
    found = plan({"model_type": "glm", "head_dim": 128})
    assert rotation(found).rotary_dim == 64
    assert len(rotation(found).frequencies().inv_freq) == 32
    assert pair(found, 31) == close(1.333521432163324e-04)
    assert any(note.startswith("partial_rotary_factor is not given: 0.5") for note in found.notes)


def test_linear_divides() -> None:
    found = llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    assert 8 * pair(found, 0) == 2.0


def test_dynamic_counts_from_the_configured_length() -> None:
    found = llama(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert rotation(found).schedule == DynamicNTK(Geometric(1e4), 2.0, 2048)
    assert 1 / pair(found, 1, length=4096) == close(30527.7367488067 ** (2 / 128))
    assert pair(found, 40, length=2048) == pair(found, 40) == close(1e4 ** (-80 / 128), 14)


def test_an_explicit_factor_wins() -> None:
    """Qwen3 with YaRN: its lengths imply 1.25, its user asks for 4."""
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    found = llama(model_type="qwen3", head_dim=128, max_position_embeddings=40960, rope_theta=1e6, rope_scaling=block)
    assert rotation(found).frequencies().amplitude == close(1.138629436111989)
    assert pair(found, 40) == close(4.445698525097307e-05)
    assert any("rope_scaling.factor = 4" in note and "imply 1.25: the explicit factor counts" in note for note in found.notes)


def test_yarn_without_an_original_length() -> None:
    found = llama(rope_scaling={"rope_type": "yarn", "factor": 2.0})
    rule = rotation(found).schedule
    assert isinstance(rule, YaRN)
    assert rule.original_length == 2048
    assert any(
        note.startswith("rope_scaling.original_max_position_embeddings is not given: max_position_embeddings = 2048")
        for note in found.notes
    )


def test_an_explicit_amplitude_wins() -> None:
    block = {"rope_type": "yarn", "factor": 8, "attention_factor": 1.0, "original_max_position_embeddings": 512}
    assert rotation(llama(rope_scaling=block)).frequencies().amplitude == 1.0


@pytest.mark.parametrize("model_type", ["ministral3", "cohere"])
def test_betas_and_amplitude_in_both_pairings(model_type: str) -> None:
    """Devstral 2: betas of 4 and 1, and a zero for mscale_all_dim, which says nothing."""
    block = {
        "rope_type": "yarn", "factor": 64.0, "beta_fast": 4.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096,
        "mscale": 1.0, "mscale_all_dim": 0.0, "rope_theta": 1e6,
    }  # fmt: skip
    found = llama(model_type=model_type, head_dim=128, max_position_embeddings=262144, rope_parameters=block)
    assert rotation(found).frequencies().amplitude == close(1.4158883083359672)
    plain = [1e6 ** (-2 * i / 128) for i in range(64)]
    assert [pair(found, i) for i in (23, 31)] == close([plain[23], plain[31] / 64], 13)
    assert plain[24] / 64 < pair(found, 24) < plain[24]


def test_an_old_name_of_the_type() -> None:
    found = llama(rope_scaling={"type": "linear", "factor": 8.0})
    assert rotation(found).schedule == Linear(Geometric(1e4), 8.0)
    both = llama(rope_scaling={"type": "linear", "rope_type": "linear", "factor": 8.0})
    assert both.runs == found.runs


def test_a_base_inside_the_block() -> None:
    found = llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert pair(found, 32) == close(1.414213562373095e-03, 14)
    assert not any("rope_theta" in note for note in found.notes)


def test_sections_make_several_axes() -> None:
    """The type says ``mrope`` or ``default``; only the sections tell."""
    old = plan(
        {
            **SMALL,
            "model_type": "",
            "head_dim": 128,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "rope_theta": 1e6,
        }
    )
    block = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }
    new = plan(
        {
            **SMALL,
            "model_type": "qwen3_5_text",
            "head_dim": 256,
            "rope_parameters": block,
            "layer_types": ["full_attention"] * 4,
        }
    )
    for found, base in ((old, 1e6), (new, 1e7)):
        turning = rotation(found)
        assert turning.axes is not None
        assert turning.axes.names == ("t", "h", "w")
        assert turning.schedule == Geometric(base)


@pytest.mark.parametrize(
    ("model_type", "sections", "head_dim", "expected"),
    [
        ("qwen3_vl_text", [24, 20, 20], 128, "thw" * 20 + "tttt"),
        ("qwen3_5_text", [11, 11, 10], 64, "thw" * 10 + "th"),
    ],
)
def test_axes_that_take_turns(model_type: str, sections: list[int], head_dim: int, expected: str) -> None:
    block = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": sections,
        "mrope_interleaved": True,
        "partial_rotary_factor": 1.0,
    }
    found = plan(
        {
            **SMALL,
            "model_type": model_type,
            "head_dim": head_dim,
            "rope_parameters": block,
            "layer_types": ["full_attention"] * 4,
        }
    )
    axes = rotation(found).axes
    assert axes is not None
    assert "".join("thw"[axis] for axis in axes.of_pair) == expected
    at = torch.arange(5)
    plain = plan({**SMALL, "head_dim": head_dim, "rope_theta": 1e6})
    for text in (at, at[None], contiguous(5), at[None, :, None].expand(1, 5, 3)):  # equal axes are one
        ours = found.rotary_table(text)
        assert torch.equal(ours.cos.reshape(5, -1), plain.rotary_table(at).cos)


def test_other_orders_of_sections() -> None:
    ernie = plan({**SMALL, "model_type": "ernie4_5_vl_moe_text", "head_dim": 128})
    axes = rotation(ernie).axes
    assert axes is not None
    assert "".join("thw"[axis] for axis in axes.of_pair) == "hw" * 22 + "t" * 20
    glm = plan({**SMALL, "model_type": "glm_ocr_text", "head_dim": 64})
    axes = rotation(glm).axes
    assert axes is not None
    assert "".join("thw"[axis] for axis in axes.of_pair) == "t" * 8 + "h" * 12 + "w" * 12
    assert rotation(ernie).pairing == rotation(glm).pairing == "interleaved"


# the keys


@pytest.mark.parametrize(
    ("model_type", "old"),
    [
        ("gpt_neox", {"rotary_emb_base": 25000, "rotary_pct": 0.5}),
        ("gpt_neox", {"rope_theta": 25000, "partial_rotary_factor": 0.5}),
        ("gpt_neox", {"rope_parameters": {"rope_theta": 25000, "partial_rotary_factor": 0.5}}),
        (
            "gpt_neox",
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 25000, "partial_rotary_factor": 0.5},
                "rope_theta": 25000,
            },
        ),
        ("gpt_neox", {"rope_theta": 25000, "rotary_emb_base": 25000, "rotary_pct": 0.5, "rope_scaling": None}),
    ],
)
def test_names_old_and_new(model_type: str, old: dict[str, Any]) -> None:
    turning = rotation(llama(model_type=model_type, **old))
    assert turning.schedule == Geometric(25000)
    assert turning.rotary_dim == 64


def test_gemma_3_in_both_forms() -> None:
    old = {
        "model_type": "gemma3_text",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = {
        "model_type": "gemma3_text",
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    assert plan(old).runs == plan(new).runs
    assert plan(old).rope_parameters == plan(new).rope_parameters


def test_a_null_block_turns_nothing() -> None:
    """Beam and Cohere Compass leave out a block for layers without rotation."""
    kinds = ["sliding_attention", "full_attention"] * 2
    found = llama(
        model_type="beam", layer_types=kinds, rope_parameters={"sliding_attention": {"rope_theta": 1e4}, "full_attention": None}
    )
    assert [found.layers[i].rotation is None for i in range(4)] == [False, True, False, True]


def test_aliases() -> None:
    lists = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 512}
    for name in ("su", "longrope"):
        found = llama(model_type="phi3", rope_scaling={"type": name, **lists})
        assert isinstance(rotation(found).schedule, LongRoPE)
    yarn = llama(model_type="phi3", rope_scaling={"type": "yarn", **lists})  # Phi-3 means LongRoPE by it
    assert isinstance(rotation(yarn).schedule, LongRoPE)
    hunyuan = llama(
        model_type="hunyuan_v1_dense", head_dim=128, rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 1000.0}
    )
    assert 1 / pair(hunyuan, 1) == close((1e4 * 1000.0 ** (128 / 126)) ** (2 / 128))


def test_proportional_keeps_the_divisor() -> None:
    """Gemma 4: a quarter of the pairs turn, by the ladder of the whole head; the rest have frequency 0."""
    found = plan({"model_type": "gemma4_text"})
    full = next(i for i in range(30) if found.layers[i].kind == "full_attention")
    turning = rotation(found, full)
    base, head_dim = 1e6, turning.head_dim
    ladder = turning.frequencies().inv_freq.tolist()
    assert head_dim == 512
    assert turning.rotary_dim == 512
    assert len(ladder) == 256
    assert ladder == close([base ** (-2 * i / head_dim) if i < 64 else 0.0 for i in range(256)], 13)
    assert rotation(found).head_dim == 256
    assert rotation(found).rotary_dim == 256


def test_trailing_channels() -> None:
    found = plan({"model_type": "deepseek_v4"})
    for layer in (0, 3):
        turning = rotation(found, layer)
        assert (turning.start, turning.rotary_dim, turning.head_dim, turning.pairing) == (448, 64, 512, "interleaved")
    kinds = {found.layers[i].kind: found.layers[i].entry for i in range(len(found.layers))}
    assert kinds["heavily_compressed_attention"] == "compress"


def test_temperatures_of_mistral() -> None:
    for model_type in ("ministral3", "mistral4"):
        found = plan({"model_type": model_type})
        block = dict(found.rope_parameters or {})
        expected = LogTemperature(block["llama_4_scaling_beta"], block["original_max_position_embeddings"])
        assert {layer.temperature for layer, _ in found.runs} == {expected}
        assert expected(torch.tensor([expected.floor - 1, expected.floor])).tolist() == close(
            [1.0, 1 + expected.strength * math.log(2)], 14
        )


# forms


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_written_configurations_plan_the_same(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    before = copy.deepcopy(config)
    found = plan(config)
    for version in (5, 4):
        written = found.to_config(version)
        again = plan(written)
        assert (again.runs, again.input, again.trained_length, again.max_length, again.parts) == (
            found.runs, found.input, found.trained_length, found.max_length, found.parts
        )  # fmt: skip
        rotary = {
            "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rope_local_base_freq", "global_rope_theta",
            "local_rope_theta", "rotary_pct", "rotary_emb_base",
        }  # fmt: skip
        assert {k: v for k, v in written.items() if k not in rotary} == {k: v for k, v in before.items() if k not in rotary}
        if found.rope_parameters is not None:
            assert ("rope_parameters" in written) == (version == 5)
    assert config == before


def test_version_4_has_no_words_for_all() -> None:
    with pytest.raises(ConfigError, match=r"to_config: rope_parameters with a block for each of .* in version 4 of 'olmo3'"):
        plan({**SMALL, "model_type": "olmo3", "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
              "layer_types": ["sliding_attention", "full_attention"] * 2}).to_config(4)  # fmt: skip
    with pytest.raises(ConfigError, match=r"rope_type 'proportional' in version 4|rope_parameters with a block for each"):
        plan({"model_type": "gemma4_text"}).to_config(4)
    with pytest.raises(ConfigError, match=r"version = 3\. Expected 4 or 5"):
        llama().to_config(3)


@pytest.mark.slow
def test_written_defaults_load_in_transformers() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24.0")
    for model_type, cls in transformers.CONFIG_MAPPING.items():
        try:
            config = cls()
        except Exception:
            continue
        if not getattr(config, "rope_parameters", None):
            continue
        try:
            found = plan(config)
        except ConfigError:
            continue
        forms = [found.to_config(5)]
        with contextlib.suppress(ConfigError):
            forms.append(found.to_config(4))
        for form in forms:
            assert plan(form).runs == found.runs, model_type
            loaded = cls(**copy.deepcopy(form)).rope_parameters
            expected = {key: value for key, value in config.rope_parameters.items() if key != "type"}
            assert {key: value for key, value in loaded.items() if key != "type"} == expected, model_type


# the plan as a value


def test_towers_bear_the_name_of_the_whole() -> None:
    """Qwen3-VL's files call the vision tower by the model's own type."""
    found = plan(
        {
            "model_type": "qwen3_vl",
            "text_config": {"model_type": "qwen3_vl_text", "num_hidden_layers": 2},
            "vision_config": {"model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "num_heads": 16},
        }
    )
    tower = found.parts["vision_config"]
    assert tower.model_type == "qwen3_vl_vision"
    assert rotation(tower).head_dim == 64
    assert len(tower.layers) == 24
    axes = rotation(tower).axes
    assert axes is not None
    assert axes.names == ("row", "column")


def test_an_encoder_and_its_decoder_have_depths_of_their_own() -> None:
    found = plan({"model_type": "bart", "d_model": 16, "encoder_layers": 12, "decoder_layers": 6, "num_hidden_layers": 12,
                  "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 1024})  # fmt: skip
    assert (len(found.layers), len(found.parts["encoder"].layers)) == (6, 12)
    assert found.input == found.parts["encoder"].input == InputTable("learned", 1026, offset=2)


def test_layers_are_a_sequence() -> None:
    layers = of("gemma-3-27b-it").layers
    assert len(layers) == 62
    assert layers[-1] == layers[61]
    assert repr(layers) == "Layers(62)"
    assert [layer.kind for layer in layers].count("full_attention") == 10
    with pytest.raises(IndexError, match=r"plan\.layers\[62\] of a model with 62 layers\. Expected an index from 0 to 61"):
        layers[62]


def test_plans_are_equal_by_what_they_say() -> None:
    assert of("llama-2-7b-chat") == of("llama-2-7b-chat") != of("llama-3.1-8b")


def test_tables() -> None:
    found = of("llama-3.1-8b")
    table = found.rotary_table(torch.arange(5), layer=-1)
    angle = torch.arange(5, dtype=torch.float64)[:, None] * rotation(found).frequencies().inv_freq
    assert torch.equal(table.cos, angle.cos().float())
    assert torch.equal(table.sin, angle.sin().float())
