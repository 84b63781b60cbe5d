"""``posenc plot``: pictures from the command line, mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from posenc.cli.main import main
from posenc.cli.plot import plot

pytest.importorskip("matplotlib")

CONFIGS = Path(__file__).parent.parent / "hf" / "configs"
PICTURES = Path(__file__).parent.parent.parent / "docs" / "images"
PAGE = PICTURES.parent / "pictures.md"
SMALL = {
    "heatmap": ["--dim", "8", "--length", "9"],
    "similarity": ["--dim", "8", "--length", "9"],
    "shift": ["--dim", "8", "--layout", "concatenated"],
    "rotation": ["--positions", "3", "--pairs", "0,1"],
    "wavelengths": ["--rotary-dim", "8"],
    "coverage": ["--rotary-dim", "8", "--length", "50"],
    "decay": ["--limit", "50", "--rotary-dim", "8"],
    "precision": ["--limit", "64", "--rotary-dim", "8"],
    "bias": ["--heads", "2", "--length", "9"],
    "buckets": ["--buckets", "8", "--max-distance", "20"],
    "shuffle": ["--length", "4"],
}


def run(*arguments: object):
    return CliRunner().invoke(main, ["plot", *map(str, arguments)], env={"COLUMNS": "80"})


def test_every_kind_is_tried_here():
    assert set(SMALL) | {"table"} == set(plot.commands)


@pytest.mark.parametrize("kind", SMALL)
def test_draws(tmp_path, kind):
    out = tmp_path / "picture.svg"
    result = run(kind, *SMALL[kind], "--out", out)
    assert (result.exit_code, result.stderr, result.stdout) == (0, "", f"wrote {out}\n"), result.output
    assert b"</svg>" in out.read_bytes()


@pytest.mark.parametrize("kind", ["heatmap", "similarity", "wavelengths", "decay", "precision"])
def test_draws_in_the_terminal(kind):
    result = run(kind, *SMALL[kind], "--terminal")
    assert result.exit_code == 0, result.output
    assert 5 < len(result.stdout.splitlines()) < 26
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("kind", ["decay", "precision"])
def test_takes_a_models_frequencies(kind):
    result = run(kind, "--limit", "64", "--config", CONFIGS / "llama-3.1-8b.json", "--terminal")
    assert result.exit_code == 0, result.output
    assert result.stdout != run(kind, "--limit", "64", "--terminal").stdout


def test_the_trained_length_is_the_models(tmp_path):
    out = tmp_path / "a.svg"
    assert run("coverage", "--config", CONFIGS / "llama-3.1-8b.json", "--out", out).exit_code == 0
    model = out.read_bytes()
    assert run("coverage", "--config", CONFIGS / "llama-3.1-8b.json", "--length", 8192, "--out", out).exit_code == 0
    assert out.read_bytes() == model


def test_a_scaled_model_stands_beside_its_ladder():
    result = run("wavelengths", "--config", CONFIGS / "llama-3.1-8b.json", "--terminal")
    assert "o before scaling   x llama, 64 pairs" in result.stdout


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b-instruct", "phi-4-multimodal", "llama-4-scout-text", "gemma-3-27b-it"])
def test_several_axes_length_rules_and_layers_without_rotation(name):
    result = run("wavelengths", "--config", CONFIGS / f"{name}.json", "--terminal")
    assert result.exit_code == 0, result.output


def test_a_learned_table(tmp_path):
    file = tmp_path / "weights.pt"
    torch.save({"wpe.weight": torch.eye(6), "wte.weight": torch.eye(4), "bias": torch.ones(3)}, file)
    result = run("table", file, "--key", "wpe.weight", "--terminal", "--out", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    assert "scale: " in result.stdout
    assert (tmp_path / "a.svg").exists()
    torch.save(torch.eye(3), file)
    assert run("table", file, "--terminal").exit_code == 0


def save(path, value):
    torch.save(value, path)
    return path


MISTAKES = {
    "unknown kind": (lambda tmp: ["heatmpa"], "there is no kind 'heatmpa'. Expected one of bias, buckets, "),
    "nothing near": (lambda tmp: ["qqq"], "table, wavelengths. Choose one."),
    "no place": (lambda tmp: ["heatmap"], "nowhere to draw. Expected --out FILE or --terminal."),
    "format": (lambda tmp: ["heatmap", "--out", tmp / "a.gif"], "Expected a name ending in .png, .svg, .pdf."),
    "folder": (lambda tmp: ["heatmap", "--out", tmp / "no" / "a.png"], "there is no folder"),
    "is a folder": (lambda tmp: ["heatmap", "--out", tmp.with_suffix(".png")], "is a folder. Expected a place for a file."),
    "size": (lambda tmp: ["heatmap", "--dim", "0", "--terminal"], "plot heatmap: --dim 0. Expected 2 to 2,048."),
    "huge": (lambda tmp: ["heatmap", "--length", "10000000000", "--terminal"], "--length 10000000000. Expected 2 to 4,096."),
    "layout": (lambda tmp: ["heatmap", "--layout", "half", "--terminal"], "layout = 'half'"),
    "odd": (lambda tmp: ["shift", "--dim", "7", "--out", tmp / "a.png"], "plot shift: --dim 7. Expected an even number"),
    "odd width": (lambda tmp: ["decay", "--rotary-dim", "7", "--terminal"], "rotary_dim = 7. Expected an even integer"),
    "base": (lambda tmp: ["decay", "--base", "-1", "--terminal"], "Geometric: base = -1.0. Expected a finite number above 0."),
    "trained": (lambda tmp: ["decay", "--length", "0", "--terminal"], "plot: --length 0. Expected 1 to"),
    "pairs": (
        lambda tmp: ["rotation", "--pairs", "1,99", "--out", tmp / "a.png"],
        "pair '99' in --pairs '1,99'. Expected 1 to 8 of",
    ),
    "no pairs": (lambda tmp: ["rotation", "--pairs", ",", "--out", tmp / "a.png"], "0 pairs in --pairs ','"),
    "base of a model": (
        lambda tmp: ["decay", "--base", "1e4", "--config", CONFIGS / "gpt-j.json", "--terminal"],
        "--base 10000 with --config, which says it already.",
    ),
    "layer of nothing": (lambda tmp: ["decay", "--layer", "1", "--terminal"], "--layer 1 without --config."),
    "layer": (
        lambda tmp: ["decay", "--layer", "99", "--config", CONFIGS / "llama-3.1-8b.json", "--terminal"],
        "--layer 99 of a model with 32. Expected 0 to 31.",
    ),
    "a layer that does not turn": (
        lambda tmp: ["decay", "--layer", "3", "--config", CONFIGS / "smollm3-3b.json", "--terminal"],
        "--layer 3 of",
    ),
    "nothing turns": (
        lambda tmp: ["coverage", "--config", CONFIGS / "bert-base-uncased.json", "--out", tmp / "a.png"],
        "nothing turns in a 'bert'.",
    ),
    "no such encoding": (lambda tmp: ["shuffle", "--encoding", "rpoe", "--out", tmp / "a.png"], "Did you mean "),
    "no bias": (lambda tmp: ["bias", "--encoding", "rope", "--out", tmp / "a.png"], "rope acts on queries and keys. Expected"),
    "axes": (lambda tmp: ["shuffle", "--encoding", "axial", "--out", tmp / "a.png"], "axial reads several axes."),
    "no weights": (lambda tmp: ["table", CONFIGS / "gpt-j.json", "--terminal"], "is no file of weights."),
    "no file": (lambda tmp: ["table", tmp / "none.pt", "--terminal"], "No such file or directory"),
    "which table": (
        lambda tmp: ["table", save(tmp / "w.pt", {"a": torch.eye(2), "b": torch.eye(2)}), "--terminal"],
        "holds 2 tables. Expected one of two axes. Pass --key; there are: a, b.",
    ),
    "no such table": (
        lambda tmp: ["table", save(tmp / "w.pt", {"a": torch.eye(2)}), "--key", "z", "--terminal"],
        "holds no table 'z'.",
    ),
    "not finite": (lambda tmp: ["table", save(tmp / "w.pt", torch.eye(2) / 0), "--terminal"], "numbers that are not finite."),
    "a list": (lambda tmp: ["table", save(tmp / "w.pt", [1, 2]), "--terminal"], "holds a list. Expected a tensor"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_and_exit_2(tmp_path, name):
    arguments, message = MISTAKES[name]
    tmp_path.with_suffix(".png").mkdir(exist_ok=True)
    result = run(*arguments(tmp_path))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_kind_spelled_alike_is_suggested():
    assert "Did you mean heatmap?" in run("heatmpa").stderr


def test_a_missing_matplotlib_is_a_pip_line(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = run("heatmap", "--out", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "Run: pip install 'posenc[plot]'." in result.stderr
    assert run("heatmap", *SMALL["heatmap"], "--terminal").exit_code == 0


def test_the_page_shows_every_kind_and_every_picture_is_there():
    page = PAGE.read_text(encoding="utf-8")
    for kind in plot.commands:
        assert f"images/{kind}.png" in page
        assert f"posenc plot {kind} " in page
        assert 5_000 < (PICTURES / f"{kind}.png").stat().st_size < 150_000


def test_config_files_named_on_the_page_exist():
    page = PAGE.read_text(encoding="utf-8")
    named = [word for word in page.split() if word.endswith(".json") and "/" in word]
    assert named
    for name in named:
        assert json.loads((PAGE.parent.parent / name).read_text(encoding="utf-8"))
