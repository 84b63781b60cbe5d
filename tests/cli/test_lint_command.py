"""``posenc lint``: what it prints, and the exit code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from posenc.cli.main import main

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}  # fmt: skip
NOTED = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
WARNED = {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
REFUSED = {**LLAMA, "rope_scaling": {"rope_type": "linear"}}


def run_lint(tmp_path: Path, config: object, *options: str, **settings: Any) -> Result:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return CliRunner().invoke(main, ["lint", str(path), *options], **settings)


@pytest.mark.parametrize(
    ("config", "fail_on", "code"),
    [
        (LLAMA, "note", 0), (NOTED, "note", 1), (NOTED, "warning", 0), (NOTED, None, 0), (WARNED, None, 1), (WARNED, "warning", 1),
        (WARNED, "error", 0), (WARNED, "never", 0), (REFUSED, "error", 1), (REFUSED, None, 1), (REFUSED, "never", 0),
    ],
)  # fmt: skip
def test_the_exit_code_says_how_grave(tmp_path: Path, config: object, fail_on: str | None, code: int) -> None:
    result = run_lint(tmp_path, config, *(["--fail-on", fail_on] if fail_on else []))
    assert result.exit_code == code, result.output
    assert result.stderr == ""


def test_what_it_prints(tmp_path: Path) -> None:
    lines = run_lint(tmp_path, WARNED, "--fail-on", "never").stdout.splitlines()
    assert lines[0].endswith("config.json")
    assert "  1 warning; 10 checks" in lines
    assert "warning: A required key is absent [config-missing]" in lines
    for line in (
        "  where     rope_scaling.original_max_position_embeddings",
        "  measured  not given: max_position_embeddings = 131072 is taken, as transformers does",
        "  see       docs/findings/config-missing.md",
    ):
        assert line in lines
    assert max(map(len, lines)) <= 100


def test_nothing_found_is_said(tmp_path: Path) -> None:
    assert "nothing found; 10 checks" in run_lint(tmp_path, LLAMA).stdout


def test_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run_lint(tmp_path, WARNED).stdout.splitlines()
    named = str(tmp_path)
    assert max(len(line) for line in lines if named not in line) <= 80


def test_a_refusal_is_a_finding_with_the_reason(tmp_path: Path) -> None:
    result = run_lint(tmp_path, REFUSED)
    assert "error: A required key is absent [config-missing]" in result.stdout
    assert "rope_scaling.factor is missing" in result.stdout
    assert "skipped plan: the configuration is refused" in result.stdout


def test_json(tmp_path: Path) -> None:
    result = run_lint(tmp_path, WARNED, "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert [finding["id"] for finding in data["findings"]] == ["config-missing"]
    assert data["findings"][0]["severity"] == "warning"
    assert {"subject", "described", "checked", "skipped"} <= data.keys()


def test_colours_on_a_terminal_only(tmp_path: Path) -> None:
    assert "\x1b[33m" in run_lint(tmp_path, WARNED, color=True).stdout
    assert "\x1b" not in run_lint(tmp_path, WARNED).stdout
    assert "\x1b" not in run_lint(tmp_path, WARNED, "--json", color=True).stdout


HOSTILE = {**LLAMA, "rope_\x1b[31m\x9b\u202e\ud800\U000e0001": "\x07" * 5, "model_type": "\x1b]0;x\x07"}


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_names_from_a_file_cannot_steer_the_terminal(tmp_path: Path, option: tuple[str, ...]) -> None:
    result = run_lint(tmp_path, HOSTILE, *option)
    assert result.exit_code in (0, 1), result.output
    assert all(c.isprintable() or c == "\n" for c in result.stdout)
    if option:
        named = [finding["where"] for finding in json.loads(result.stdout)["findings"]]
        assert any(where.startswith("rope_\x1b[31m\x9b\u202e") for where in named)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "Expected an object with keys"),
        ('{"a":' * 40 + "1" + "}" * 40, "nested deeper than 32 levels"),
        ('{"rope_theta": NaN}', "the file holds NaN"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_2(tmp_path: Path, content: str, message: str) -> None:
    result = run_lint(tmp_path, content)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: lint: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_folder(tmp_path: Path) -> None:
    assert run_lint(tmp_path, LLAMA).exit_code == 0
    assert CliRunner().invoke(main, ["lint", str(tmp_path)]).exit_code == 0
    (tmp_path / "empty").mkdir()
    for missing in (tmp_path / "empty", tmp_path / "absent.json"):
        result = CliRunner().invoke(main, ["lint", str(missing)])
        assert result.exit_code == 2
        assert "is not a file. Expected config.json or a folder that holds it" in result.stderr


@pytest.mark.parametrize("name", ["model.pt", "model.pkl", "config.json"])
def test_nothing_is_unpickled(tmp_path: Path, name: str) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    path = tmp_path / name
    path.write_bytes(pickle.dumps(Trap()))
    result = CliRunner().invoke(main, ["lint", str(path)])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert not (tmp_path / "sprung").exists()


def test_an_unknown_severity_is_a_usage_error(tmp_path: Path) -> None:
    result = run_lint(tmp_path, LLAMA, "--fail-on", "fatal")
    assert result.exit_code == 2
    assert "'fatal' is not one of 'note', 'warning', 'error', 'never'" in result.stderr
