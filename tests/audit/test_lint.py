"""`lint`: nothing on public configurations, the right finding on each mistake, and what readers make of a file."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from tests.audit.bugs.configs import ALTERNATE, BUGS, DEEPSEEK, GEMMA2, LLAMA, LLAMA3, LONG, PHI3, QWEN3, QWEN3_VL, SHORT, YARN
from tests.hf.test_fuzz import RANDOM, mutated
from tests.hf.tiny_models import LEFT, MODELS, Tiny

from posenc.audit.configs import lint
from posenc.audit.findings import Finding, Report
from posenc.audit.kinds import configs as kinds
from posenc.cli.main import main
from posenc.errors import ConfigError
from posenc.hf import extend, plan

CONFIGS = sorted((Path(__file__).parents[1] / "hf" / "configs").glob("*.json"))
LENGTH = "original_max_position_embeddings"
INCONSISTENT = {
    **dict.fromkeys(
        ("apertus", "ministral3", "cwm", "gpt_oss", "mistral4", "mistral_large4_text"),
        ("config-lengths", "its class was trained on thousands of tokens, the tiny model promises 64"),
    ),
    **dict.fromkeys(
        ("qwen3_vl_text", "qwen3_vl_moe_text", "cosmos3_edge_text"),
        ("config-sections", "four pairs cannot give height one and width two when every third pair is theirs"),
    ),
}
"""Tiny models whose configurations contradict themselves, with the finding and the reason."""


def grave(report: Report) -> list[str]:
    return [str(finding) for finding in report.at_least("warning")]


def only(report: Report, kind: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.id == kind]
    return finding


# healthy configurations


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_public_configurations_are_clean(path: Path) -> None:
    report = lint(path)
    assert grave(report) == []
    assert report.subject == str(path)
    assert report.described
    assert report.skipped == {}


def test_tiny_models_are_clean_where_they_are_consistent() -> None:
    found = {}
    for tiny in (*MODELS, *(entry for entry, _ in LEFT)):
        report = lint(tiny.config())
        if report.at_least("warning"):
            found[tiny.model_type] = report.ids[0]
    assert found == {name: kind for name, (kind, _) in INCONSISTENT.items()}


def test_an_object_of_transformers_has_been_read_already() -> None:
    config = Tiny("llama").config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert only(lint(config), "config-reader").severity == "note"
    saved = config.to_dict()
    assert saved["transformers_version"].startswith("5")
    assert only(lint(saved), "config-reader").severity == "note"  # the file says for whom it is written
    del saved["transformers_version"]
    assert only(lint(saved), "config-reader").severity == "warning"


@pytest.mark.parametrize("rule", ["linear", "dynamic", "yarn", "llama3"])
def test_what_extend_writes_is_clean(rule: str) -> None:
    before = {**LLAMA, "max_position_embeddings": 8192, "rope_scaling": None}
    after = extend(before, rule, factor=4.0)
    assert after["max_position_embeddings"] == (8192 if rule == "dynamic" else 32768)
    assert grave(lint(after)) == []


def test_the_lists_of_a_bug_are_not_changed() -> None:
    config = {**PHI3, "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}}
    before = copy.deepcopy(config)
    lint(config)
    assert config == before


# mistakes beside those of the gallery

NESTED = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
GEMMA3: dict[str, Any] = {**GEMMA2, "model_type": "gemma3_text", "layer_types": ALTERNATE, "rope_theta": 1e6}
FALCON = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 2, "alibi": True}
GPTJ = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "rotary_dim": 64}
BARE = {key: value for key, value in LLAMA.items() if key != "rope_theta"}

CASES: list[tuple[str, dict[str, Any], str, str, str, str]] = [
    # name, configuration, finding, severity, where, measured
    ("slip of the pen", {**BARE, "rope_thetta": 5e5}, "config-unread", "warning", "rope_thetta", "500000.0, read by nothing"),
    ("position word", {**LLAMA, "position_offset": 2}, "config-unread", "note", "position_offset", "2, read by nothing"),
    ("switched off", {**LLAMA, "use_my_rope": False}, "config-unread", "note", "use_my_rope", "False, read by nothing"),
    ("vLLM's amplitude", {**QWEN3, "rope_scaling": {**YARN, "attn_factor": 2.0}}, "config-unread", "warning", "rope_scaling.attn_factor",
     "2.0, read by nothing"),
    ("another rule's key", {**QWEN3, "rope_scaling": {**YARN, "low_freq_factor": 1.0}}, "config-unread", "note",
     "rope_scaling.low_freq_factor", "1.0, .*rope_type has no use for it"),
    ("query scaling elsewhere", {**QWEN3, "rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, "config-unread", "warning",
     "rope_scaling.llama_4_scaling_beta", "0.1 for 'qwen3', which does not read it"),
    ("nested truncate", {**GEMMA3, "rope_parameters": {**NESTED, "full_attention": {**YARN, "rope_theta": 1e6, "truncate": False}}},
     "config-unread", "warning", "rope_parameters.full_attention.truncate", "false is not honoured"),
    ("PhiMoE's amplitudes", {**PHI3, "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG, "short_mscale": 1.2}},
     "config-scaling-dropped", "warning", "rope_scaling.short_mscale", "1.2 for 'phi3', which does not read it"),
    ("Hunyuan's alpha", {**LLAMA, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 2.0}}, "config-scaling-dropped", "warning",
     "rope_scaling.alpha", "1000 for 'llama', which does not read it"),
    ("old name", {**LLAMA, "rope_scaling": {"type": "linear", "factor": 8.0}}, "config-legacy", "note", "rope_scaling.type",
     "'linear', an old name of the key"),
    ("alias", {**PHI3, "rope_scaling": {"rope_type": "su", "short_factor": SHORT, "long_factor": LONG}}, "config-legacy", "note",
     "rope_scaling.rope_type", "'su', an old word: read as 'longrope'"),
    ("Megatron's base", {**BARE, "rotary_base": 500000}, "config-legacy", "warning", "rotary_base", "500000, a key of Megatron"),
    ("Megatron's base again", {**LLAMA, "rotary_base": 500000}, "config-legacy", "note", "rotary_base", "500000, a key of Megatron"),
    ("code of its own", {**LLAMA, "model_type": "chatglm", "auto_map": {"AutoConfig": "x"}, "rope_ratio": 500}, "config-legacy", "note",
     "rope_ratio", "500, a key of code of ChatGLM"),
    ("base beside blocks", {**GEMMA3, "rope_theta": 5e5, "rope_parameters": NESTED}, "config-conflict", "warning", "rope_theta",
     r"500000 beside blocks that say 10000, 1e\+06"),
    ("original length twice", {**PHI3, "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG, LENGTH: 8192}},
     "config-conflict", "warning", LENGTH, "4096 beside the block counts, not 8192"),
    ("two names", {**LLAMA, "num_layers": 7}, "config-conflict", "error", "num_hidden_layers", "32 but num_layers = 7"),
    ("two blocks", {**LLAMA, "rope_scaling": LLAMA3, "rope_parameters": YARN}, "config-conflict", "error", "rope_parameters", "disagree"),
    ("no base", BARE, "config-defaulted", "note", "rope_theta", "not given: 10000, the default of 'llama'"),
    ("no base beside another's name", {**BARE, "rope_base": 5e5}, "config-defaulted", "warning", "rope_theta", "though rope_base names a base"),
    ("no base in the new block", {**BARE, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "config-defaulted", "warning",
     "rope_theta", "though rope_parameters is where the base stands"),
    ("no share", {"model_type": "glm", "head_dim": 128, "num_hidden_layers": 2, "rope_theta": 1e4}, "config-defaulted", "note",
     "partial_rotary_factor", "not given: 0.5, the default of 'glm'"),
    ("factor from the lengths", {**PHI3, "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}},
     "config-defaulted", "note", "rope_scaling.factor", "not given: 32, the ratio"),
    ("factor of one", {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 1.0}}, "config-factor", "note", "rope_scaling.factor",
     "1: linear scaling by one"),
    ("lengths swapped", {**LLAMA, "max_position_embeddings": 8192, "rope_scaling": {**LLAMA3, LENGTH: 131072}}, "config-lengths", "warning",
     f"rope_scaling.{LENGTH}", "trained on 131072 tokens, max_position_embeddings = 8192"),
    ("linear of another length", {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0, LENGTH: 8192}}, "config-lengths",
     "warning", "max_position_embeddings", r"131072, 16 × 8192; factor = 4"),
    ("width that is no quotient", {**QWEN3, "hidden_size": 1024, "num_attention_heads": 16}, "config-head-dim", "note", "head_dim",
     "128; 16 heads of it are 2048 channels, hidden_size is 1024"),
    ("default width", {**{k: v for k, v in QWEN3.items() if k != "head_dim"}, "hidden_size": 1024, "num_attention_heads": 16},
     "config-head-dim", "note", "head_dim", "not given: 128, the default of 'qwen3'"),
    ("odd width", {**LLAMA, "head_dim": 7}, "config-head-dim", "error", "partial_rotary_factor", "leaves 7 rotating channels of head_dim = 7"),
    ("scaling of a class without rules", {**GPTJ, "rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
     "config-scaling-dropped", "warning", "rope_scaling", "rope_type 'linear' for 'gptj', whose class"),
    ("scaling where nothing turns", {**FALCON, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "config-scaling-dropped", "warning",
     "rope_scaling", "but no layer of 'falcon' turns"),
    ("a rule that Phi-3 refuses", {**PHI3, "rope_scaling": {"rope_type": "linear", "factor": 32.0}}, "config-scaling-dropped", "warning",
     "rope_scaling", "accepts longrope alone"),
    ("alpha and factor", {**LLAMA, "model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 2.0}},
     "config-scaling-twice", "warning", "rope_scaling.factor", "2 beside alpha = 1000"),
    ("the factor as amplitude", {**QWEN3, "rope_scaling": {**YARN, "attention_factor": 4.0}}, "config-temperature", "warning",
     "rope_scaling.attention_factor", "4, the factor itself: scores scale by 16"),
    ("one mscale", {**QWEN3, "rope_scaling": {**YARN, "mscale": 0.5}}, "config-temperature", "warning", "rope_scaling.mscale",
     "0.5 without mscale_all_dim: it is not used, the amplitude is 1.13863"),
    ("softmax and amplitude", {**DEEPSEEK, "rope_scaling": {"rope_type": "yarn", "factor": 40.0, LENGTH: 4096, "mscale_all_dim": 1.0}},
     "config-temperature", "warning", "rope_scaling.mscale_all_dim", f"scores of turned channels × {(0.1 * math.log(40) + 1) ** 4:.6g}"),
    ("sections of a model with one axis", {**LLAMA, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "config-sections",
     "warning", "rope_scaling.mrope_section", r"\[16, 24, 24\] for 'llama', which has one axis"),
    ("several axes without sections", {**LLAMA, "rope_scaling": {"type": "mrope"}}, "config-sections", "warning",
     "rope_scaling.mrope_section", "not given, though the type is 'mrope'"),
    ("interleaved where the model has blocks",
     {**QWEN3_VL, "model_type": "qwen2_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24], "mrope_interleaved": True}},
     "config-sections", "warning", "rope_scaling.mrope_interleaved", "but 'qwen2_vl_text' is chunked whatever the key says"),
    ("mixed lists", {**PHI3, "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": [1, "2", 3, 4]}}, "config-lists",
     "error", "rope_scaling.long_factor", "'2'"),
    ("a number for a block", {**LLAMA, "rope_scaling": 1}, "config-type", "error", "rope_scaling", "rope_scaling = 1"),
    ("a text for a number", {**LLAMA, "rope_theta": "500000"}, "config-type", "error", "rope_theta", "rope_theta = '500000'"),
    ("too few kinds", {**GEMMA2, "layer_types": ALTERNATE[:3]}, "config-layers", "error", "layer_types", "3 entries"),
    ("misspelt kind", {**GEMMA2, "layer_types": ["sliding_atention", "full_attention"] * 2}, "config-layers", "warning", "layer_types",
     "2 layers of kind 'sliding_atention'"),
    ("numbers for flags", {**LLAMA, "model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layers": [3, 7, 11, 15]}, "config-layers",
     "warning", "no_rope_layers", r"\[3, 7, 11, 15\]: numbers of layers"),
    ("a window switched on and absent", {**LLAMA, "model_type": "qwen2", "use_sliding_window": True}, "config-layers", "warning",
     "sliding_window", "not given, though use_sliding_window is true"),
    ("a window switched off", {**GEMMA2, "layer_types": ALTERNATE, "use_sliding_window": False}, "config-layers", "warning",
     "use_sliding_window", "false, with 2 layers of kind sliding_attention"),
    ("an architecture that nobody has", {**LLAMA, "model_type": "lama"}, "config-architecture", "note", "model_type", "'lama' is not one"),
    ("base of one kind", {**GEMMA2, "model_type": "gemma3_text", "layer_types": ALTERNATE}, "config-defaulted", "note",
     "rope_parameters.sliding_attention.rope_theta", "not given: 10000, the default"),
    ("number of layers", {**{k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}, "model_type": "lama"}, "config-defaulted", "note",
     "num_hidden_layers", "not given: one layer stands for all"),
    ("base in the code", GPTJ, "config-defaulted", "note", "rope_theta", "the base is 10000, written in the code of 'gptj'"),
    ("block of the class", {"model_type": "gpt_oss", "rope_theta": 150000}, "config-defaulted", "note", "rope_parameters",
     "no rotary block is given: yarn as 'gpt_oss' assumes"),
    ("cached keys", {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "config-length-rule", "note", "rope_scaling",
     "rope_type dynamic"),
    ("base beside the text model", {"model_type": "llava", "rope_theta": 1e4, "text_config": LLAMA}, "config-conflict", "warning",
     "rope_theta", "10000.0 beside text_config"),
    ("tower", {"model_type": "qwen2_5_vl", **{k: v for k, v in QWEN3.items() if k != "model_type"}, "vision_config": {"rope_thetta": 1e5}},
     "config-unread", "warning", "vision_config.rope_thetta", "100000.0, read by nothing"),
    ("inside the text model", {"model_type": "llava", "text_config": {**LLAMA, "rope_scaling": {"rope_type": "default", "factor": 8.0}}},
     "config-scaling-dropped", "warning", "text_config.rope_scaling.factor", "8, with rope_type default: not applied"),
    ("a part of a scaled model", {**LLAMA, "partial_rotary_factor": 0.001, "rope_scaling": YARN}, "config-head-dim", "error",
     "partial_rotary_factor", "leaves 0 rotating channels"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kind", "severity", "where", "measured"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_mistakes(config: dict[str, Any], kind: str, severity: str, where: str, measured: str) -> None:
    report = lint(config)
    found = [finding for finding in report.findings if finding.id == kind and finding.where == where]
    assert len(found) == 1, str(report)
    assert found[0].severity == severity, str(report)
    assert re.search(measured, found[0].measured), str(report)
    assert found[0].expected


def test_every_kind_has_a_case() -> None:
    tried = {case[2] for case in CASES} | {bug.finding for bug in BUGS}
    ids = {kind.id for kind in vars(kinds).values() if isinstance(kind, kinds.Kind)}
    assert ids - tried == {"config-refused"}


def test_what_is_refused_for_no_better_reason() -> None:
    lengths = {"rope_type": "yarn", "factor": 4.0, LENGTH: 2}
    report = lint({**LLAMA, "rope_scaling": lengths})
    (finding,) = report.at_least("error")
    assert finding.id == "config-refused"
    assert "rope_scaling cannot be used. YaRN" in finding.measured
    assert set(report.skipped) == {"plan", "readers"}


def test_an_architecture_beyond_plan_is_no_mistake_of_the_file() -> None:
    sections = {"rope_type": "default", "rope_theta": 1e4, "xdrope_section": [16, 16, 16, 16]}
    report = lint({**LLAMA, "model_type": "hunyuan_vl_text", "rope_parameters": {**sections, "rope_theta": 500000.0}})
    assert only(report, "config-refused").severity == "note"
    assert grave(report) == []


def test_layers_that_predict_ahead_may_be_listed() -> None:
    kinds_of = {**GEMMA2, "layer_types": [*ALTERNATE, "full_attention"]}
    assert "config-layers" in lint(kinds_of).ids
    assert "config-layers" not in lint({**kinds_of, "num_nextn_predict_layers": 1}).ids


def test_the_specific_finding_stands_alone() -> None:
    """A factor that a plain block drops is not reported a second time as unread."""
    report = lint({**LLAMA, "rope_scaling": {"rope_type": "default", "factor": 8.0}})
    assert [finding.id for finding in report.findings] == ["config-scaling-dropped"]


# readers

OLD = "transformers 4, and readers of its keys"


@pytest.mark.parametrize(
    ("changes", "line", "warned"),
    [
        ({"rope_theta": 5e5}, "read rope_theta; the same frequencies", False),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, "read rope_theta, rope_scaling; the same frequencies", False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "base 10,000, 128 channels, because they do not read rope_parameters",
         True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "their defaults; the same frequencies", False),
        ({"rope_theta": 5e5, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, "base 500,000, 128 channels, because they do not read", True),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
         "read rope_theta, rope_scaling; the same frequencies", False),
        ({"rope_scaling": {**LLAMA3, "rope_theta": 5e5}}, "base 10,000, Llama 3 ×8", True),
        ({"rope_theta": 1e4, "head_dim": 256, "model_type": "glm", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
         "base 10,000, 128 channels, because they do not read rope_parameters", True),
    ],
)  # fmt: skip
def test_what_readers_of_the_older_keys_get(changes: dict[str, Any], line: str, warned: bool) -> None:
    report = lint({**BARE, **changes})
    (said,) = [said for said in report.described if said.startswith(OLD)]
    assert line in said
    assert any(finding.id == "config-reader" for finding in report.at_least("warning")) is warned


def test_a_model_without_a_type_gets_the_usual_base() -> None:
    """`getattr(config, "rope_theta", 10000)` never fails."""
    report = lint(
        {"head_dim": 128, "num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    )
    finding = only(report, "config-reader")
    assert finding.severity == "warning"
    assert "base 10,000" in finding.measured
    assert finding.expected.startswith("base 500,000")


@pytest.mark.parametrize(
    "config",
    [
        {**BARE, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {**BARE, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_theta": 2e4}, "full_attention": {"rope_theta": 1e6}}},
    ],
)
def test_the_mend_that_the_finding_names_mends(config: dict[str, Any]) -> None:
    assert "config-reader" in lint(config).ids
    both = plan(config).to_config(4)
    assert "config-reader" not in lint(both).ids
    assert plan(both).runs == plan(config).runs


def test_other_readers() -> None:
    yarn = lint({**QWEN3, "rope_scaling": {**YARN, "attn_factor": 2.0}})
    assert "vLLM-style: reads rope_scaling.attn_factor, which transformers does not" in yarn.described
    long = lint({**PHI3, "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}})
    assert "vLLM-style: takes the short or the long factors once, by the longest length it serves" in long.described
    assert "vLLM-style: not known" in lint(LLAMA).described
    assert any(line.startswith("llama.cpp-style: not known beyond") for line in lint(LLAMA).described)
    assert not any("transformers" in line for line in lint({"model_type": "gpt2"}).described)
    assert any(
        line.startswith("transformers 5: does not have lama") for line in lint({**LLAMA, "model_type": "lama"}).described
    )


def test_what_the_model_does_in_words() -> None:
    said = lint({**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4}).described
    assert said[0] == "2 layers: base 10,000; 128 channels turn, half pairing"
    assert said[1] == "2 layers: base 1,000,000, all divided by 8 (linear); 128 channels turn, half pairing"
    assert lint({"model_type": "bloom", "n_layer": 2, "num_attention_heads": 4}).described == (
        "all layers: nothing turns",
        "all layers: ALiBi bias (4 heads)",
    )


# files, and whatever else there is


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", r"lint: .* is not JSON"),
        ("config.json", b"[1]", r"lint: the configuration is \[1\]\. Expected an object"),
        ("config.json", b'{"a": 1, "a": 2}', r"lint: the key 'a' stands twice"),
        ("config.json", b"\xff\xfe", r"lint: .* cannot be read"),
        ("config.json", b'{"a":' * 40 + b"1" + b"}" * 40, r"lint: .* nested deeper than 32 levels"),
        ("config.json", pickle.dumps({"model_type": "llama"}), r"lint: .* (cannot be read|is not JSON)"),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}      ", r"lint: .* holds weights by its name\. Expected config\.json"),
        ("pytorch_model.bin", pickle.dumps({}), r"nothing is unpickled\. Pass the config\.json beside it"),
    ],
)  # fmt: skip
def test_files_that_are_no_configuration(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        lint(path)


def test_what_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json", str(tmp_path / "absent")):
        with pytest.raises(ConfigError, match=r"lint: .* is not a file\. Expected config\.json or a folder"):
            lint(path)
    with pytest.raises(ConfigError, match=r"lint: a configuration of type list\. Expected a path"):
        lint([LLAMA])


def test_a_path_a_folder_and_the_content_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BARE), encoding="utf-8")
    assert lint(path).findings == lint(str(tmp_path)).findings == lint(BARE).findings


def test_names_of_any_length_make_short_findings() -> None:
    report = lint({**LLAMA, "rope_" + "x" * 100_000: 8, "rope_scaling": {"rope_type": "y" * 150, "factor": "z" * 100_000}})
    assert len(str(report)) < 5000
    long = lint({**LLAMA, "rope_" + "x" * 100_000: 8})
    assert all(len(part) <= 400 for finding in long.findings for part in (finding.where, finding.measured, finding.expected))


quick = settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def agrees_with_plan(config: dict[str, Any]) -> None:
    """An error where `plan` refuses, with its reason; a report in any case."""
    try:
        refusal = None
        plan(config)
    except ConfigError as error:
        refusal = str(error).removeprefix("plan: ")
    report: Report | str
    try:
        report = lint(config)
    except ConfigError as error:  # what is no configuration at all
        report = str(error)
    if isinstance(report, str):
        assert report == f"lint: {refusal}"
        return
    assert ("plan" in report.skipped) is (refusal is not None)
    if refusal is not None and "two channels of a pair" not in refusal:
        assert any(refusal.startswith(finding.measured.removesuffix("…")) for finding in report.at_least("error"))
    json.loads(report.to_json().encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass"))


@quick
@given(mutated())
def test_mutated_configurations(config: dict[str, Any]) -> None:
    agrees_with_plan(config)


@quick
@given(RANDOM)
def test_random_configurations(config: dict[str, Any]) -> None:
    agrees_with_plan(config)


# the documentation

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(kind.page for kind in vars(kinds).values() if isinstance(kind, kinds.Kind))
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: Path(page).stem)
def test_a_page_shows_what_happens(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS.parent / page).read_text(encoding="utf-8")
    assert re.findall(r"^#+ .*", re.sub(BLOCK, "", text), re.MULTILINE)[1:] == [
        "## The wrong thing", "## How it looks", "## The mend", "## Seen in",
    ]  # fmt: skip
    blocks = BLOCK.findall(text)
    exec("".join(code for language, code in blocks if language == "python"), {})
    shown = next(code for language, code in blocks if language == "text")
    assert " ".join(shown.split()) in " ".join(capsys.readouterr().out.split())


def test_the_page_of_the_command_shows_what_it_prints(tmp_path: Path) -> None:
    blocks = dict(BLOCK.findall((DOCS / "lint.md").read_text(encoding="utf-8")))
    (tmp_path / "config.json").write_text(blocks["json"], encoding="utf-8")
    printed = CliRunner().invoke(main, ["lint", str(tmp_path)], env={"COLUMNS": "100"}).stdout
    assert printed.splitlines()[1:] == blocks["text"].splitlines()[1:]
