"""`posenc audit` as people call it: what it prints, its exit codes, and what it never does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from tests.hf.tiny_models import tiny

from posenc.cli.main import main

MODULE = '''
import torch
from torch import nn
from posenc import RoPE, Transformer


def good():
    torch.manual_seed(0)
    return Transformer(32, dim=16, layers=2, heads=2, encodings=[RoPE(8)])


class Rounded(nn.Module):
    """Frequencies in a buffer, which a cast rounds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, 16, 2) / 16))


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(32, 8)
        self.position_embedding = nn.Embedding(32, 8)

    def forward(self, input_ids):
        raise ValueError("boom\\x1b[2J")


class Plain(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


def rounded():
    return Rounded().bfloat16()


def fails():
    raise RuntimeError("no weights")


number = 3
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "audited_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["audit", *arguments])


def test_a_good_model(here: Path) -> None:
    result = run("audited_models:good")
    assert result.exit_code == 0, result.output
    assert "nothing found" in result.stdout
    assert result.stderr == "importing and running your code: audited_models:good\n"


def test_a_bug_fails_unless_told_otherwise(here: Path) -> None:
    result = run("audited_models:rounded")
    assert result.exit_code == 1, result.output
    assert "[frequency-rounded]" in result.stdout
    assert "docs/findings/frequency-rounded.md" in result.stdout
    assert run("audited_models:rounded", "--fail-on", "never").exit_code == 0


def test_json_is_the_report(here: Path) -> None:
    result = run("audited_models:rounded", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    (finding,) = [one for one in report["findings"] if one["id"] == "frequency-rounded"]
    assert {"severity", "where", "measured", "expected", "why", "mend", "page"} <= set(finding)


def test_a_model_without_positions_says_so(here: Path) -> None:
    result = run("audited_models:Plain")
    assert result.exit_code == 0
    assert "no positions: no rotary module, table or bias was found" in result.stdout


def test_a_model_that_raises_is_read_and_then_refused(here: Path) -> None:
    result = run("audited_models:Raises")
    assert result.exit_code == 2
    assert "position_embedding" in result.stdout
    assert "the model raises ValueError: boom" in result.stderr
    assert "\x1b" not in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("audited_models:fails", "raised RuntimeError: no weights"),
        ("audited_models:number", "gave a int. Expected a torch.nn.Module"),
        ("audited_models:absent", "cannot be imported"),
        ("no_such_module:build", "cannot be imported"),
        ("a b:c", "names no model"),
        ("missing", "'missing' does not exist"),
        ("weights.bin", "'weights.bin' is a pickle"),
        (".", "holds no config.json"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_with_2(here: Path, target: str, message: str) -> None:
    (here / "weights.bin").write_bytes(b"")
    result = run(target)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    tiny("llama").build().save_pretrained(tmp_path)
    result = run(str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "base 10,000" in result.stdout
    assert result.stderr == ""


def test_the_model_of_a_test_is_left_alone(here: Path) -> None:
    state = torch.random.get_rng_state()
    run("audited_models:rounded")
    assert torch.equal(state, torch.random.get_rng_state())
