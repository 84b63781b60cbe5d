"""What a short configuration leaves out: `plan` fills in what transformers would, and says so."""

from __future__ import annotations

import importlib.util
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", minversion="5.24.0")

from posenc.errors import ConfigError  # noqa: E402
from posenc.hf import PositionPlan, plan  # noqa: E402
from posenc.hf.defaults import model_defaults  # noqa: E402
from posenc.hf.families import FAMILIES  # noqa: E402

KNOWN = [name for name in model_defaults() if name in FAMILIES or "rope_parameters" in model_defaults()[name]]
OTHERWISE = {
    "blt": "its depth is that of a part",
    "hrm_text": "its layers repeat in cycles, and its configuration counts them all",
    "longcat_flash": "it has two attention layers in each layer, and its configuration counts both",
    "musicflamingo": "its own rotary keys are of the audio, and its text model stands in a part without a type",
    "neomme": "its windows alternate between two sizes, which its files list",
    "nemotron_h": "its layers stand in a list",
}
"""Model types that a depth alone does not describe, and why."""


def answer(config: object) -> PositionPlan | str:
    try:
        return plan(config)
    except ConfigError as error:
        return str(error)


def same(a: PositionPlan | str, b: PositionPlan | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return (a.runs, a.input, a.trained_length, a.max_length) == (b.runs, b.input, b.trained_length, b.max_length)


@pytest.mark.parametrize("depth", [None, pytest.param(13, marks=pytest.mark.slow)])
def test_a_model_type_alone_is_its_default_configuration(depth: int | None) -> None:
    """A file with nothing but the type, and one with a depth that no rule was fitted to."""
    wrong = []
    for model_type in KNOWN:
        if model_type in OTHERWISE:
            continue
        cls = transformers.CONFIG_MAPPING[model_type]
        changes = {} if depth is None else {(cls.attribute_map or {}).get("num_hidden_layers", "num_hidden_layers"): depth}
        try:
            whole = cls(**changes)
        except Exception:  # a class that wants more than a depth, or none
            continue
        if depth is not None and not hasattr(whole, "num_hidden_layers"):
            continue
        if not same(answer(whole), answer({"model_type": model_type, **changes})):
            wrong.append(model_type)
    assert not wrong


def test_the_exceptions_are_exceptions() -> None:
    for model_type in OTHERWISE:
        cls = transformers.CONFIG_MAPPING[model_type]
        bare: list[dict[str, Any]] = [{}, {"num_hidden_layers": 13}]
        assert not all(same(answer(cls(**changes)), answer({"model_type": model_type, **changes})) for changes in bare)


def test_null_is_an_answer() -> None:
    """Mistral's class has a window, and files of models without one say ``null``."""
    assert plan({"model_type": "mistral"}).layers[0].window == 4096
    assert plan({"model_type": "mistral", "sliding_window": None}).layers[0].window is None


def test_each_default_that_changes_the_result_is_named() -> None:
    glm = plan({"model_type": "glm", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2})
    for words in ("rope_theta is not given: 10000", "partial_rotary_factor is not given: 0.5", "head_dim is not given: 128",
                  "max_position_embeddings is not given: 131072"):  # fmt: skip
        assert any(note.startswith(words) and note.endswith("the default of 'glm'") for note in glm.notes), words
    smol = plan({"model_type": "gemma3_text"})
    assert "layer_types is not given: the rule of 'gemma3_text' is taken" in smol.notes
    apertus = plan({"model_type": "apertus"})
    assert "no rotary block is given: llama3 as 'apertus' assumes" in apertus.notes


@pytest.mark.skipif(transformers.__version__ != "5.24.0", reason="the file is of 5.24.0")
@pytest.mark.slow
def test_the_file_is_what_the_tool_writes() -> None:
    path = Path(__file__).parents[2] / "tools" / "hf_defaults.py"
    spec = importlib.util.spec_from_file_location("hf_defaults", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    kept = json.loads((files("posenc.hf") / "defaults.json").read_text(encoding="utf-8"))
    assert kept["transformers"] == "5.24.0"
    made = {
        name: entry
        for name in sorted(transformers.CONFIG_MAPPING)
        if (entry := tool.describe(transformers.CONFIG_MAPPING[name]))
    }
    assert json.loads(json.dumps(made)) == kept["models"]
