"""Configurations that cannot be right: each is one `ConfigError` that names the key, the value and the rule."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from posenc.errors import ConfigError
from posenc.hf import plan

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "max_position_embeddings": 4096,
}  # fmt: skip
QWEN_VL = {**LLAMA, "model_type": "qwen2_5_vl", "head_dim": 128}


def scaled(**block: Any) -> dict[str, Any]:
    return {**LLAMA, "rope_parameters": {"rope_theta": 1e4, **block}}


def refused(config: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan(config)
    assert re.match(r"plan: .+ Expected .+\. .+\.$", str(caught.value), re.DOTALL), str(caught.value)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"rope_type": "magic"}, r"rope_parameters\.rope_type = 'magic'\. Expected one of default, axial, linear"),
        ({"rope_type": ["yarn"]}, r"rope_parameters\.rope_type = \['yarn'\]\. Expected a short text"),
        ({"rope_type": {"factor": 2}}, r"rope_parameters\.rope_type = .* Expected a short text"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2}, r"rope_type = 'linear' but rope_parameters\.type = 'yarn'"),
        ({"rope_type": "linear"}, r"rope_parameters\.factor is missing\. Expected it for rope_type 'linear'"),
        ({"rope_type": "dynamic"}, r"rope_parameters\.factor is missing\. Expected it for rope_type 'dynamic'"),
        ({"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 64, "high_freq_factor": 4},
         r"rope_parameters\.low_freq_factor is missing"),
        ({"rope_type": "linear", "factor": 0.25}, r"rope_parameters\.factor = 0\.25\. Expected a number of 1\.0 or more"),
        ({"rope_type": "yarn", "factor": -2}, r"rope_parameters\.factor = -2\. Expected a number of 1\.0 or more"),
        ({"rope_type": "linear", "factor": True}, r"rope_parameters\.factor = True\. Expected a number"),
        ({"rope_type": "linear", "factor": "8"}, r"rope_parameters\.factor = '8'\. Expected a number"),
        ({"rope_type": "linear", "factor": float("nan")}, r"rope_parameters\.factor = nan\. Expected a number"),
        ({"rope_type": "linear", "factor": float("inf")}, r"rope_parameters\.factor = inf\. Expected a number"),
        ({"rope_type": "linear", "factor": 10**5000}, r"rope_parameters\.factor = a number of thousands of digits"),
        ({"rope_theta": 0}, r"rope_parameters\.rope_theta = 0\. Expected a number above 0"),
        ({"rope_theta": {"full": 1e4}}, r"rope_parameters\.rope_theta = .* Expected a number above 0"),
        ({"rope_theta": [1e4, 1e4]}, r"rope_parameters\.rope_theta = .* Expected a number above 0"),
        ({"partial_rotary_factor": {}}, r"partial_rotary_factor = \{\}\. Expected a number"),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0}, r"original_max_position_embeddings = 0\. Expected a whole"),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 512, "beta_fast": 1, "beta_slow": 32}, "beta"),
        ({"rope_type": "longrope", "factor": 4, "short_factor": [1.0] * 7, "long_factor": [1.0] * 8},
         r"short_factor = \[1\.0.*Expected one factor per pair, 8\. It has 7"),
        ({"rope_type": "longrope", "factor": 4, "short_factor": [1.0] * 8}, r"long_factor is missing"),
        ({"rope_type": "longrope", "factor": 4, "short_factor": [1.0] * 8, "long_factor": [1, 1, 1, 1, 1, 1, 1, "x"]},
         r"long_factor = .* Expected a list of int or float"),
        ({"rope_type": "longrope", "factor": 4, "short_factor": [1.0] * 8, "long_factor": [float("nan")] * 8},
         r"long_factor = .* Expected finite numbers"),
        ({"rope_type": "longrope", "factor": 4, "short_factor": [1.0] * 8, "long_factor": [0.0] * 8}, "long_factor"),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1},
         r"rope_parameters cannot be used\. YaRN.*original_length = 1"),
        ({"rope_type": "yarn", "factor": 4, "truncate": "no"}, r"truncate = 'no'\. Expected true or false"),
    ],
)  # fmt: skip
def test_blocks(block: dict[str, Any], message: str) -> None:
    refused(scaled(**block), message)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", ['{"type":"linear"}', 1, 2.5, True, [1, 2]])
def test_where_an_object_belongs(name: str, value: object) -> None:
    """Values that command lines and environment variables pass on as they are."""
    refused({**LLAMA, name: value}, rf"{name} = {re.escape(repr(value))}\. Expected an object with keys")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, r"rope_theta = 10000\.0 but rope_theta = 500000\.0"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4}},
         r"rope_parameters and rope_scaling disagree"),
        ({**LLAMA, "num_layers": 7}, r"num_hidden_layers = 4 but num_layers = 7\. Expected the same value under both names"),
        ({**LLAMA, "num_hidden_layers": 10**9}, r"num_hidden_layers = 1000000000\. Expected a whole number from 0 to 100000"),
        ({**LLAMA, "num_hidden_layers": 2.5}, r"num_hidden_layers = 2\.5\. Expected a whole number"),
        ({**LLAMA, "num_hidden_layers": True}, r"num_hidden_layers = True\. Expected a whole number"),
        ({**LLAMA, "num_hidden_layers": "4"}, r"num_hidden_layers = '4'\. Expected a whole number"),
        ({**LLAMA, "num_attention_heads": None}, r"head_dim cannot be derived: hidden_size = 64, num_attention_heads = None"),
        ({**LLAMA, "num_attention_heads": 128}, r"hidden_size = 64 for num_attention_heads = 128\. Expected at least one channel"),
        ({**LLAMA, "head_dim": 7}, r"leaves 7 rotating channels of head_dim = 7\. Expected an even number"),
        ({**LLAMA, "model_type": "phi", "partial_rotary_factor": 1.5}, r"leaves 24 rotating channels of head_dim = 16"),
        ({**LLAMA, "model_type": "phi", "partial_rotary_factor": 0.01}, r"leaves 0 rotating channels of head_dim = 16"),
        ({**LLAMA, "layer_types": ["full_attention"] * 3}, r"layer_types = '3 entries'\. Expected one per layer, 4"),
        ({**LLAMA, "layer_types": "full_attention"}, r"layer_types = 'full_attention'\. Expected a list of str"),
        ({**LLAMA, "layer_types": [1, 2, 3, 4]}, r"layer_types = \[1, 2, 3, 4\]\. Expected a list of str"),
        ({**LLAMA, "layer_types": ["a", "b"] * 2, "rope_parameters": {"a": {"rope_theta": 1e4}, "c": {"rope_theta": 1e4}}},
         r"layers of kind 'b' have no block in rope_parameters, which holds a, c"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": 3}}, None),
        ({**LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 0]}, r"no_rope_layers = '2 entries'\. Expected one per layer"),
        ({**LLAMA, "model_type": "granite_swa", "layer_rope_theta": [1e4]}, r"layer_rope_theta = '1 entries'\. Expected one per layer"),
        ({**LLAMA, "per_layer_config": {"first": {"head_dim": 8}}}, r"per_layer_config\.first = .* Expected an object under the number"),
        ({**LLAMA, "per_layer_config": {"0": {"head_dim": "wide"}}}, r"per_layer_config\.0\.head_dim = 'wide'\. Expected a whole number"),
        ({**LLAMA, "per_layer_config": [1]}, r"per_layer_config = \[1\]\. Expected an object with keys"),
        ({**QWEN_VL, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 23]}}, r"mrope_section = \[16, 24, 23\], which sums to 63\. Expected 64"),
        ({**QWEN_VL, "rope_scaling": {"type": "mrope", "mrope_section": [64.0, 0, 0]}}, r"mrope_section = .* Expected a list of int"),
        ({**LLAMA, "model_type": 3}, r"model_type = 3\. Expected a short text"),
        ({**LLAMA, "model_type": "deepseek_v3", "qk_rope_head_dim": 0}, r"qk_rope_head_dim = 0\. Expected a whole number from 1"),
        ({**LLAMA, "model_type": "t5", "relative_attention_num_buckets": -1}, r"relative_attention_num_buckets = -1"),
        ([LLAMA], r"a configuration of type list\. Expected a path to config\.json, a dictionary"),
        (None, r"a configuration of type NoneType"),
        ({1.5: 2}, r"a key of type float in the configuration"),
    ],
)  # fmt: skip
def test_configurations(config: object, message: str | None) -> None:
    if message is None:  # a scalar beside blocks is no block: it is named and left alone
        assert any("sliding_attention = 3" in note for note in plan(config).notes)
    else:
        refused(config, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", r"the configuration is \[1, 2\]\. Expected an object with keys"),
        ("3", r"the configuration is 3\. Expected an object"),
        ('{"a": 1,}', r"is not JSON \(line 1"),
        ("", r"is not JSON \(line 1"),
        ('{"a": 1, "a": 2}', r"the key 'a' stands twice in one object"),
        ('{"rope_theta": NaN}', r"the file holds NaN\. Expected finite numbers"),
        ('{"rope_theta": -Infinity}', r"the file holds -Infinity"),
        ('{"a": ' + "9" * 5000 + "}", r"an integer of 5000 digits\. Expected at most 20"),
        ('{"a":' * 100 + "1" + "}" * 100, r"is nested deeper than 32 levels"),
        ("[" * 100_000, r"is nested too deeply|is not JSON"),
    ],
)
def test_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    refused(path, message)
    refused(str(tmp_path), message)


def test_what_is_no_text_file(tmp_path: Path) -> None:
    refused(tmp_path, r"is not a file\. Expected config\.json or a folder that holds it")
    refused(tmp_path / "absent.json", "is not a file")
    refused("a\0b", "cannot be read|is not a file")
    for content in (b"\xff\xfe\x00\x01", "{}".encode("utf-16"), b"\x89PNG\r\n"):
        path = tmp_path / "config.json"
        path.write_bytes(content)
        refused(path, "cannot be read|is not JSON")
    with path.open("wb") as file:
        file.truncate(17 * 2**20)
    refused(path, r"has 17825792 bytes\. Expected at most 16777216")


def test_cycles_end() -> None:
    endless: dict[str, Any] = {}
    endless["text_config"] = endless
    refused(endless, "is nested deeper than 32 levels")


def test_empty_is_a_model_of_which_nothing_is_known() -> None:
    found = plan({})
    assert [layer.rotation for layer in found.layers] == [None]
    assert any("nothing here says how positions enter the model" in note for note in found.notes)
    assert any("number of layers is not given" in note for note in found.notes)


@pytest.mark.parametrize(
    "key",
    [
        "use_dynamic_ntk", "use_logn_attn_ntk", "rope_ratio", "ntk_alpha", "dual_chunk_rope", "yarn_extra", "position_offset",
        "learned_nope", "sliding_pattern", "context_length_extra", "my_theta", "relative_attention_extra", "attn_temperature_x",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [True, 1, "on", {"factor": 8}, [1]])
def test_what_nothing_reads_is_named(key: str, value: object) -> None:
    """A flag of an older convention is never taken for a factor of 1."""
    found = plan({**LLAMA, key: value})
    assert [note for note in found.notes if note.startswith(f"{key} = ")]
    assert found.runs == plan(LLAMA).runs


def test_what_nothing_reads_inside_a_block_is_named() -> None:
    found = plan(scaled(rope_type="linear", factor=2, finetuned=True, attn_factor=3, extrapolation_factor=1))
    assert any(note.startswith("rope_parameters.attn_factor = 3") for note in found.notes)
    assert any(note.startswith("rope_parameters.extrapolation_factor = 1") for note in found.notes)
    nested = {**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e4, "scale": 2}, "rope_theta": 7e4}}
    notes = plan(nested).notes
    assert any(note.startswith("rope_parameters.full_attention.scale = 2") for note in notes)
    assert any(note.startswith("rope_parameters.rope_theta = 70000.0 beside the blocks") for note in notes)


def test_what_stands_beside_a_text_model_is_named() -> None:
    config = {
        "model_type": "llava",
        "text_config": LLAMA,
        "rope_scaling": {"type": "linear", "factor": 2},
        "image_seq_length": 576,
    }
    found = plan(config)
    assert found.runs == plan(LLAMA).runs
    (note,) = [note for note in found.notes if "beside" in note]
    assert note == "rope_scaling = {'type': 'linear', 'factor': 2} beside text_config is read by nothing here"


def test_a_block_that_no_layer_uses_is_named() -> None:
    found = plan(
        {
            **LLAMA,
            "model_type": "nemotron_h",
            "layer_types": ["linear_attention"] * 4,
            "rope_scaling": {"type": "linear", "factor": 2},
        }
    )
    assert [layer.rotation for layer, _ in found.runs] == [None]
    assert "rope_scaling is used by no layer" in found.notes


def test_many_layers_cost_nothing(tmp_path: Path) -> None:
    deep = plan({**LLAMA, "num_hidden_layers": 100_000})
    assert len(deep.runs) == 1
    assert len(deep.layers) == 100_000
    gemma = plan({**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 100_000})
    assert gemma.layers[99_995].kind == "full_attention"
    assert len(str(gemma)) < 2000
    bases = [float(1000 + i) for i in range(5000)]
    refused(
        {**LLAMA, "num_hidden_layers": 5000, "layer_rope_theta": bases}, "more than 1000 layers that differ from all others"
    )


def test_a_path_and_its_content_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert plan(path) == plan(tmp_path) == plan(str(path)) == plan(LLAMA)
