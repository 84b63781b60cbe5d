"""`load_model`: folders and names, without ever unpickling or running code from a folder."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tests.hf.tiny_models import tiny
from torch import nn

from posenc.audit import audit, loading
from posenc.audit.loading import load_model


class _Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    model = tiny("llama").build()
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["", "config.json", "model.safetensors"])
def test_a_folder_or_a_file_of_it(llama: Path, name: str) -> None:
    loaded = load_model(str(llama / name))
    assert type(loaded.model) is transformers.LlamaForCausalLM
    assert torch.equal(loaded.model.lm_head.weight, tiny("llama").build().lm_head.weight)
    assert loaded.runs
    assert loaded.subject == str(llama)


def test_without_weights_it_is_built_from_the_configuration(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    state = torch.random.get_rng_state()
    loaded = load_model(str(tmp_path))
    assert torch.equal(state, torch.random.get_rng_state())
    assert type(loaded.model) is transformers.LlamaForCausalLM
    assert "random weights" in loaded.notes[0]


def _opt() -> nn.Module:
    keys = {"vocab_size": 64, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**keys, max_position_embeddings=32, word_embed_proj_dim=16))


def _t5() -> nn.Module:
    keys = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**keys))


@pytest.mark.parametrize("build", [lambda: tiny("llama").build(), _opt, _t5], ids=["llama", "opt", "t5"])
def test_of_a_large_model_only_positions_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module]
) -> None:
    whole = build()
    whole.save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "MOST_READ", 10)
    loaded = load_model(str(tmp_path))
    assert not loaded.runs
    assert "only the parts that hold positions were read" in loaded.notes[0]
    read = {key for key, tensor in loaded.model.named_parameters() if not tensor.is_meta}
    of_positions = {key for key, _ in whole.named_parameters() if "position" in key or "relative_attention" in key}
    assert read == of_positions
    report = audit(loaded.model, behaviour="skip")
    assert report.at_least("warning") == (), str(report)
    assert report.described


def test_a_pickle_is_never_opened(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    trap = tmp_path / "opened"
    weights = tmp_path / "pytorch_model.bin"
    weights.write_bytes(pickle.dumps(_Trap(trap)))
    for target in (tmp_path, weights):
        with pytest.raises(ValueError, match=r"'pytorch_model.bin' is a pickle. Expected safetensors files"):
            load_model(str(target))
    assert not trap.exists()


def test_code_in_a_folder_is_not_run(llama: Path, tmp_path: Path) -> None:
    keys = json.loads((llama / "config.json").read_text())
    keys |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    (tmp_path / "code.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()")
    with pytest.raises(ValueError, match=r"cannot be loaded .* without code of its own"):
        load_model(str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no config.json"),
        ({"config.json": "{"}, "cannot be loaded"),
        ({"config.json": "[]"}, "cannot be loaded"),
        ({"config.json": '{"model_type": "llama"}', "model.safetensors": "not one"}, "cannot be loaded"),
    ],
)
def test_what_cannot_be_loaded_says_so(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path))


def test_transformers_is_as_talkative_as_before(llama: Path) -> None:
    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    load_model(str(llama))
    assert before == (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled())
