"""`extend`: the keys that transformers reads by itself, written once, for models, configurations, mappings and files."""

from __future__ import annotations

import copy
import json
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from tests.hf.tiny_models import MODELS, Tiny, tiny
from torch import nn

from posenc.errors import ConfigError
from posenc.hf import extend, patch, plan
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.explicit import Explicit
from posenc.schedules.geometric import Geometric
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.ntk import NTK
from posenc.schedules.yarn import YaRN

LLAMA = tiny("llama")
LLAMA4096 = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64,
    "max_position_embeddings": 4096,
}  # fmt: skip
NEW = {**LLAMA4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
OLD = {**LLAMA4096, "rope_theta": 1e6, "rope_scaling": None}

# name, the value, the block as transformers' own documentation has it, how far the model reaches
RULES = {
    "linear": (Linear(factor=4), {"rope_type": "linear", "factor": 4.0}, 16384),
    "dynamic": (DynamicNTK(factor=4), {"rope_type": "dynamic", "factor": 4.0}, 4096),
    "yarn": (YaRN(factor=4), {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": True}, 16384),
    "llama3": (Llama3(factor=4), {
        "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 4096, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0}, 16384),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Any:
    """transformers' remarks on tiny configurations are not of interest."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.mark.parametrize("name", RULES)
def test_the_new_keys_are_those_that_transformers_documents(name: str):
    value, block, length = RULES[name]
    for longer in (extend(NEW, value), extend(NEW, name, factor=4), extend(MappingProxyType(NEW), name, factor=4.0)):
        assert longer.pop("original_max_position_embeddings", None) == (4096 if name == "linear" else None)
        assert longer == {**NEW, "max_position_embeddings": length, "rope_parameters": {**block, "rope_theta": 1e6}}


@pytest.mark.parametrize("name", RULES)
def test_files_of_version_4_keep_its_keys(name: str):
    _, block, length = RULES[name]
    longer = extend(OLD, name, factor=4)
    longer.pop("original_max_position_embeddings", None)
    assert longer == {**OLD, "max_position_embeddings": length, "rope_scaling": block}
    neox = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
            "max_position_embeddings": 2048, "rotary_pct": 0.25, "rotary_emb_base": 10000}  # fmt: skip
    longer = extend(neox, name, factor=2)
    assert (longer["rotary_pct"], longer["rotary_emb_base"], longer["rope_scaling"]["rope_type"]) == (0.25, 10000, name)
    assert "rope_parameters" not in longer
    assert "rope_theta" not in longer


@pytest.mark.parametrize("target", [NEW, OLD], ids=["version 5", "version 4"])
@pytest.mark.parametrize("name", RULES)
def test_a_mapping_a_file_and_a_configuration_give_the_same_model(name: str, target: dict[str, Any], tmp_path: Any):
    kept, value = copy.deepcopy(target), RULES[name][0]
    (tmp_path / "config.json").write_text(json.dumps(target))
    mapping = extend(target, value)
    assert target == kept
    assert extend(tmp_path, value) == extend(str(tmp_path / "config.json"), value) == mapping
    config = transformers.LlamaConfig(**copy.deepcopy(target))
    before = config.to_dict()
    longer = extend(config, value)
    assert config.to_dict() == before
    assert type(longer) is type(config)
    assert longer is not config
    (tmp_path / "saved").mkdir()
    longer.save_pretrained(tmp_path / "saved")
    assert plan(longer).layers[0] == plan(mapping).layers[0] == plan(tmp_path / "saved").layers[0]
    for other in (
        transformers.LlamaConfig(**copy.deepcopy(mapping)),
        transformers.AutoConfig.from_pretrained(tmp_path / "saved"),
    ):
        assert other.rope_parameters == longer.rope_parameters
        assert other.max_position_embeddings == longer.max_position_embeddings == RULES[name][2]


def extends_alike(model: Tiny, rule: Any, tmp_path: Any, **factor: Any) -> None:
    """A live model, what is saved from it and loaded without posenc, and one built from its configuration: equal bits."""
    net = model.build()
    call = model.inputs(80)  # past max_position_embeddings, where dynamic NTK begins to act
    before, own = model.answer(net, **call), dict(net.named_parameters())
    assert extend(net, rule, **factor) is net
    assert {name: id(p) for name, p in net.named_parameters()} == {name: id(p) for name, p in own.items()}
    after = model.answer(net, **call)
    assert not torch.equal(before, after)
    net.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded, report = type(net).from_pretrained(tmp_path, output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(report.values())
    assert torch.equal(model.answer(loaded.eval(), **call), after)
    built = model.build(extend(model.config(), rule, **factor))
    built.load_state_dict(net.state_dict())
    assert torch.equal(model.answer(built, **call), after)
    with patch(net, angle_dtype=torch.float32):
        assert torch.equal(model.answer(net, **call), after)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3_text",
        "granite_swa",
        "qwen3_next",
        "deepseek_v3",
        "llama4_text",
        "gpt_oss",
        "qwen2_vl_text",
        "ministral3",
    ],
)
def test_a_live_model_equals_the_one_that_transformers_loads(name: str, tmp_path: Any):
    extends_alike(tiny(name), YaRN(factor=4), tmp_path)


@pytest.mark.parametrize(
    "rule", [Linear(factor=4), DynamicNTK(factor=4), Llama3(factor=4)], ids=lambda rule: type(rule).__name__
)
def test_every_rule_acts_on_a_live_model(rule: Any, tmp_path: Any):
    extends_alike(LLAMA, rule, tmp_path)


REFUSED = {"beam", "codegen", "gptj", "recurrent_gemma", "esm", "phi3", "phimoe", "cosmos3_edge_text", "mistral4"}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model", [m for m in MODELS if m.kind != "picture"], ids=lambda model: model.model_type)
def test_every_architecture_is_extended_or_refused(model: Tiny, rule: str, tmp_path: Any):
    if model.model_type in REFUSED or (model.model_type == "gemma4_text" and rule != "linear"):
        with pytest.raises(ConfigError, match="extend: "):
            extend(model.build(), rule, factor=4)
    else:
        extends_alike(model, rule, tmp_path, factor=4)


def test_a_model_of_several_bases_keeps_each(tmp_path: Any):
    model = tiny("granite_swa")
    net = model.build(model.config(layer_rope_theta=[1e4, 5e5]))
    extend(net, YaRN(factor=4))
    call = model.inputs(20)
    after = model.answer(net, **call)
    net.save_pretrained(tmp_path)
    loaded = type(net).from_pretrained(tmp_path).eval()
    assert torch.equal(model.answer(loaded, **call), after)
    assert [layer.rotation.schedule.schedule.base for layer, _ in plan(loaded.config).runs] == [1e4, 5e5]


def test_extending_twice_replaces_the_rule_and_keeps_the_original_length():
    for first in RULES:
        for second in RULES:
            for source in (NEW, OLD):
                once = extend(source, first, factor=2)
                twice = extend(once, second, factor=4)
                straight = extend(source, second, factor=4)
                twice.pop("original_max_position_embeddings", None)
                straight.pop("original_max_position_embeddings", None)
                assert twice == straight
    config = extend(extend(transformers.LlamaConfig(**NEW), "linear", factor=2), "yarn", factor=8)
    assert config.max_position_embeddings == 8 * 4096
    net = extend(extend(LLAMA.build(), "linear", factor=2), "linear", factor=4)
    assert net.config.max_position_embeddings == 4 * 64


@pytest.mark.parametrize(("factor", "length"), [(1.5, 6144), (1.3, 5325), (2.5, 10240), (1, 4096)])
def test_a_factor_may_be_any_number_from_one(factor: float, length: int):
    longer = extend(NEW, YaRN(factor=factor))
    assert longer["max_position_embeddings"] == length
    assert longer["rope_parameters"]["factor"] == factor
    assert plan(longer).layers[0].rotation.schedule == YaRN(Geometric(1e6), factor, 4096)


def test_an_original_length_in_the_rule_counts():
    longer = extend(NEW, YaRN(factor=8, original_length=2048))
    assert longer["max_position_embeddings"] == 16384
    assert longer["rope_parameters"]["original_max_position_embeddings"] == 2048


def test_the_settings_of_a_rule_in_force_stay_by_name_and_go_by_value():
    """gpt-oss was trained with unrounded bounds."""
    oss = {"model_type": "gpt_oss", "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
    assert extend(oss, "yarn", factor=64)["rope_parameters"]["truncate"] is False
    assert extend(oss, "yarn", factor=64)["max_position_embeddings"] == 64 * 4096
    assert extend(oss, YaRN(factor=64))["rope_parameters"]["truncate"] is True
    old = {**NEW, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "attention_factor": 1.5,
                                      "original_max_position_embeddings": 2048, "beta_fast": 16}}  # fmt: skip
    block = extend(old, "yarn", factor=4)["rope_parameters"]
    assert block["beta_fast"] == 16
    assert "attention_factor" not in block  # it belonged to the old factor
    assert block["original_max_position_embeddings"] == 2048


# several blocks, parts of heads, several axes


def test_only_full_attention_layers_are_extended():
    model = tiny("gemma3_text")
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    nested = {"sliding_attention": sliding, "full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    config = extend(model.config(rope_parameters=nested), "linear", factor=8)
    assert config.rope_parameters == {
        "sliding_attention": sliding, "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }  # fmt: skip
    assert config.max_position_embeddings == 8 * 64
    old = {"model_type": "gemma3_text", "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 2,
           "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 1e6, "rope_local_base_freq": 1e4,
           "max_position_embeddings": 32768}  # fmt: skip
    longer = extend(old, "linear", factor=8)
    assert (longer["rope_scaling"], longer["rope_local_base_freq"]) == ({"rope_type": "linear", "factor": 8.0}, 1e4)
    assert extend(longer, YaRN(factor=4))["max_position_embeddings"] == 4 * 32768
    before, after = plan(old), plan(longer)
    assert after.layers[0].rotation.schedule == before.layers[0].rotation.schedule
    assert after.layers[1].rotation.schedule == Linear(before.layers[1].rotation.schedule, 8.0)


def test_gemma_4_is_divided_by_its_own_factor(tmp_path: Any):
    model = tiny("gemma4_text")
    before = model.config().rope_parameters
    config = extend(model.config(), Linear(factor=4))
    assert config.rope_parameters == {**before, "full_attention": {**before["full_attention"], "factor": 4.0}}
    assert config.max_position_embeddings == 256
    assert extend(config, "linear", factor=8).max_position_embeddings == 512
    extends_alike(model, "linear", tmp_path, factor=4)
    with pytest.raises(
        ConfigError,
        match=r"extend: 'gemma4_text' turns by Proportional\(.*\), which transformers has no way to extend by YaRN\.",
    ):
        extend(model.config(), YaRN(factor=4))


def test_a_part_of_each_head_and_the_sections_of_axes_stay():
    phi = {"model_type": "phi", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
           "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}  # fmt: skip
    longer = extend(phi, YaRN(factor=4))
    assert longer["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert plan(longer).layers[0].rotation.rotary_dim == 8
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    qwen = {"model_type": "qwen2_vl_text", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
            "max_position_embeddings": 4096, "rope_parameters": sections}  # fmt: skip
    longer = extend(qwen, YaRN(factor=4))
    assert longer["rope_parameters"]["mrope_section"] == [2, 3, 3]
    assert plan(longer).layers[0].rotation.axes == plan(qwen).layers[0].rotation.axes != None  # noqa: E711


def test_a_share_that_only_scaled_blocks_read_is_not_brought_to_life():
    """Llama's class reads ``partial_rotary_factor`` in scaled blocks only: the whole head turned, and must go on to."""
    whole = {**NEW, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}
    assert plan(whole).layers[0].rotation.rotary_dim == 16
    longer = extend(whole, YaRN(factor=4))
    assert plan(longer).layers[0].rotation.rotary_dim == 16
    assert transformers.LlamaModel(transformers.LlamaConfig(**longer, intermediate_size=8)).rotary_emb.inv_freq.shape == (8,)


def test_a_text_model_inside_another_is_extended():
    config = {"model_type": "llava", "text_config": NEW, "vision_config": {"model_type": "clip_vision_model"}}
    longer = extend(config, YaRN(factor=4))
    assert longer == {**config, "text_config": extend(NEW, YaRN(factor=4))}
    live = transformers.LlavaConfig(text_config=copy.deepcopy(NEW))
    assert extend(live, YaRN(factor=4)).text_config.max_position_embeddings == 16384
    assert live.text_config.max_position_embeddings == 4096


def test_only_the_text_tower_of_a_model_that_sees_is_rebuilt():
    config = transformers.Qwen2_5_VLConfig(
        text_config=tiny("qwen2_5_vl_text").config().to_dict(), vision_config=tiny("qwen2_5_vl_vision").config().to_dict()
    )
    net = transformers.Qwen2_5_VLForConditionalGeneration(config)
    pictures, text = net.model.visual.rotary_pos_emb, net.model.language_model.rotary_emb
    extend(net, YaRN(factor=4))
    assert net.model.visual.rotary_pos_emb is pictures
    assert net.model.language_model.rotary_emb is not text
    assert net.config.text_config.max_position_embeddings == 256


# LongRoPE, DeepSeek, Ministral

LISTS: dict[str, Any] = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 4.0, 8.0], "original_length": 64}


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_long_rope_is_written_with_its_lists(name: str, tmp_path: Any):
    model = tiny(name)
    rule = LongRoPE(Geometric(), **{**LISTS, "original_length": 16 if name == "phi3" else 64}, factor=8.0)
    config = extend(model.config(), rule)
    assert config.rope_parameters["long_factor"] == LISTS["long_factor"]
    assert config.max_position_embeddings == 8 * rule.original_length
    extends_alike(model, rule, tmp_path)


def test_what_long_rope_needs_is_asked_for():
    model = LLAMA.config()
    with pytest.raises(
        ConfigError, match=r"extend: LongRoPE without a factor\. Expected factor=…, how many times the original length\."
    ):
        extend(model, LongRoPE(Geometric(), **LISTS, amplitude=1.0))
    with pytest.raises(ConfigError, match=r"plan: .*long_factor = .*\. Expected one factor per pair, 4\. It has 3\."):
        extend(model, LongRoPE(Geometric(), **{**LISTS, "long_factor": [1.0, 2.0, 4.0]}, factor=8.0))
    with pytest.raises(ConfigError, match="extend: the new keys would be read as .*Expected .*short_amplitude=1.5"):
        extend(model, LongRoPE(Geometric(), **LISTS, factor=8.0, short_amplitude=1.5, long_amplitude=2.0))
    with pytest.raises(
        ConfigError, match=r"extend: YaRN\(.*\) for 'phi3', whose class accepts one rule\. Expected a LongRoPE\."
    ):
        extend(tiny("phi3").config(), YaRN(factor=4))


DEEPSEEK = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0,
            "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip


def test_a_softmax_scale_that_layers_hold_is_not_changed_under_them(tmp_path: Any):
    model = tiny("deepseek_v3")
    config = model.config(max_position_embeddings=64 * 40, rope_parameters=dict(DEEPSEEK))
    net = model.build(copy.deepcopy(config))
    kept = net.config.to_dict()
    with pytest.raises(
        ConfigError,
        match=r"extend: the softmax scale of 'deepseek_v3' depends on the factor, .* Extend model\.config, save it and load the model",
    ):
        extend(net, YaRN(factor=80))
    assert net.config.to_dict() == kept
    longer = extend(config, YaRN(factor=80))  # a configuration can be: the layers are built after
    assert (longer.rope_parameters["mscale"], longer.rope_parameters["mscale_all_dim"]) == (1.0, 1.0)
    assert longer.max_position_embeddings == 64 * 80
    assert plan(longer).layers[0].score_factor > plan(config).layers[0].score_factor > 1
    built = model.build(longer)
    scale = built.model.layers[0].self_attn.scaling
    assert scale == pytest.approx(16**-0.5 * plan(longer).layers[0].score_factor, rel=1e-12)


def test_a_temperature_keeps_the_length_that_it_counts_in():
    """Ministral 3 reads ``original_max_position_embeddings`` from the block in every forward, whatever the rule."""
    model = tiny("ministral3")
    net = model.build()
    assert plan(net.config).layers[0].temperature is not None
    extend(net, "linear", factor=4)
    assert plan(net.config).layers[0].temperature == plan(model.config()).layers[0].temperature
    assert model.answer(net).isfinite().all()


# live models


def test_a_live_model_is_untouched_by_a_refusal():
    net = LLAMA.build()
    own, kept = net.model.rotary_emb, net.config.to_dict()
    for rule in (
        "yarn",
        "ntk",
        NTK(Geometric(), 4.0),
        YaRN(Geometric(5e5), 4.0),
        LongRoPE(Geometric(), [1.0], [2.0], 64, factor=4.0),
    ):
        with pytest.raises(ConfigError):
            extend(net, rule)
    assert net.model.rotary_emb is own
    assert net.config.to_dict() == kept


def test_a_live_model_keeps_device_mode_and_dtype():
    net = LLAMA.build().to(torch.bfloat16).train()
    extend(net, YaRN(factor=4))
    assert net.model.rotary_emb.training
    assert net.lm_head.weight.dtype == torch.bfloat16
    with torch.device("meta"):
        bare = type(net)(LLAMA.config())
    extend(bare, YaRN(factor=4))
    assert bare.model.rotary_emb.inv_freq.device.type == "meta"


def test_a_patched_model_is_refused():
    net = LLAMA.build()
    with (
        patch(net),
        pytest.raises(ConfigError, match=r"extend: the model is patched\. .* Call unpatch\(model\), extend, patch again\."),
    ):
        extend(net, YaRN(factor=4))
    extend(net, YaRN(factor=4))


def test_modules_without_a_configuration_are_refused():
    with pytest.raises(ConfigError, match=r"extend: Linear keeps no transformers configuration\. Expected model\.config\."):
        extend(nn.Linear(2, 2), YaRN(factor=4))
    holder = nn.Module()
    holder.config = LLAMA.config()  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match=r"extend: none of the modules of Module makes a rotary table from its configuration\."
    ):
        extend(holder, YaRN(factor=4))


# refusals


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2"}, {"model_type": "bert"}, {"model_type": "t5"}, {"model_type": "bloom"},
        {"model_type": "nemotron_h"}, {"model_type": "falcon", "alibi": True},
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_models_in_which_nothing_turns_are_refused(config: dict[str, Any]):
    with pytest.raises(ConfigError, match=rf"extend: nothing turns in '{config['model_type']}'\. Expected a rotary model\."):
        extend(config, YaRN(factor=4))


@pytest.mark.parametrize("model_type", ["gptj", "codegen", "esm", "recurrent_gemma", "cosmos3_edge_text"])
def test_models_whose_classes_read_no_rule_are_refused(model_type: str):
    model = tiny(model_type)
    with pytest.raises(ConfigError, match=rf"extend: transformers reads no rope_type for '{model_type}'\."):
        extend(model.config(), YaRN(factor=4))
    with pytest.raises(ConfigError, match=f"for '{model_type}'"):
        extend(model.build(), YaRN(factor=4))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("ntk", r"extend: rule = 'ntk'\. Expected one of linear, dynamic, yarn, llama3, or a schedule\."),
        ("yarn", r"extend: 'yarn' without a factor\. Expected factor=…"),
        (Geometric(1e6), r"extend: rule = Geometric\(base=1000000.0\)\. Expected Linear, DynamicNTK, YaRN, Llama3 or LongRoPE"),
        (NTK(Geometric(), 4.0), r"extend: rule = NTK\(.*\)\. Expected Linear"),
        (Explicit((1.0, 0.1)), r"extend: rule = Explicit\("),
        (DynamicNTK(Geometric(), 2.0, 4096).at(8192), r"extend: rule = AtLength\("),
        (Linear(YaRN(Geometric(), 4.0, 4096), 2.0), r"extend: rule = Linear\(.*over a Geometric ladder"),
        (
            YaRN(Geometric(5e5), 4.0),
            r"extend: base = 500000 in the rule, but the model's is 1e\+06\. Expected the model's own\.",
        ),
        (YaRN(factor=4, original_length=1), r"extend: YaRN\(.*\) does not fit this model\. YaRN\.frequencies"),
    ],
    ids=lambda value: str(value)[:24],
)
@pytest.mark.parametrize("target", [NEW, transformers.LlamaConfig(**NEW)], ids=["mapping", "configuration"])
def test_rules_that_cannot_be_written_are_refused(rule: Any, message: str, target: Any):
    kept = copy.deepcopy(target)
    with pytest.raises(ConfigError, match=message):
        extend(target, rule)
    assert target == kept if isinstance(target, dict) else target.to_dict() == kept.to_dict()


@pytest.mark.parametrize("rule", [4, None, ("yarn", 4)])
def test_what_is_no_rule_is_a_type_error(rule: Any):
    with pytest.raises(TypeError, match=r"extend: rule = .*\. Expected Linear, DynamicNTK, YaRN, Llama3 or LongRoPE"):
        extend(NEW, rule)


@pytest.mark.parametrize("factor", [0.25, 0, -4, float("nan"), float("inf")])
def test_a_factor_below_one_is_refused(factor: float):
    for name in RULES:
        with pytest.raises(ValueError, match=r": factor = .*\. Expected a finite number of 1 or more\."):
            extend(NEW, name, factor=factor)


def test_a_factor_that_is_no_number_is_a_type_error():
    for factor in (True, "4"):
        with pytest.raises(TypeError, match=r"YaRN: factor = .*\. Expected a finite number of 1 or more\."):
            extend(NEW, "yarn", factor=factor)  # type: ignore[arg-type]


def test_a_factor_beside_a_schedule_is_refused():
    with pytest.raises(ConfigError, match=r"extend: factor = 4 beside YaRN\(.*\)\. Expected it in the schedule\."):
        extend(NEW, YaRN(factor=2), factor=4)


@pytest.mark.parametrize("target", [None, 7, [NEW]])
def test_other_targets_are_refused(target: Any):
    with pytest.raises(ConfigError, match=r"extend: a .*\. Expected a model, a configuration, a mapping or a path\."):
        extend(target, YaRN(factor=4))


def test_an_unknown_original_length_is_asked_for():
    unknown = {key: value for key, value in NEW.items() if key not in ("max_position_embeddings", "model_type")}
    with pytest.raises(
        ConfigError, match=r"extend: max_position_embeddings is missing\. Expected the length that the model was trained on\."
    ):
        extend(unknown, YaRN(factor=4))
    assert extend(unknown, YaRN(factor=4, original_length=4096))["max_position_embeddings"] == 16384
    divided = {**NEW, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}
    for rule in (YaRN(factor=4), Linear(factor=4)):
        with pytest.raises(
            ConfigError,
            match=r"extend: the original length is unknown; the model turns by Linear\(.* Expected original_max_position_embeddings",
        ):
            extend(divided, rule)
    assert extend({**divided, "original_max_position_embeddings": 512}, YaRN(factor=4))["max_position_embeddings"] == 2048
    assert extend(divided, YaRN(factor=4, original_length=512))["max_position_embeddings"] == 2048


def test_blocks_without_one_of_full_attention_are_refused():
    beam = tiny("beam").config()
    with pytest.raises(
        ConfigError, match=r"extend: rope_parameters has blocks for sliding_attention, full_attention\. Expected one for full"
    ):
        extend(beam, YaRN(factor=4))
    sliding = {"model_type": "gemma3_text", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    with pytest.raises(ConfigError, match=r"extend: no layer of 'gemma3_text' reads the block of full_attention\."):
        extend(sliding, YaRN(factor=4))


def test_too_narrow_a_rotation_is_refused():
    narrow = {**NEW, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "partial_rotary_factor": 0.125,
                                         "original_max_position_embeddings": 4096}}  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"extend: DynamicNTK\(.*\) does not fit this model\. .*rotary_dim = 2\. Expected 4 or more"
    ):
        extend(narrow, "dynamic", factor=4)
