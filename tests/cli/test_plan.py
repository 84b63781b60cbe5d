"""``posenc plan``: a configuration in words, mistakes in one line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from posenc.cli.main import main

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def run_plan(tmp_path, config, *options):
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return CliRunner().invoke(main, ["plan", str(path), *options])


def test_says_what_the_model_does(tmp_path):
    result = run_plan(tmp_path, LLAMA)
    assert result.exit_code == 0, result.output
    assert "llama: 32 layers, trained on 8,192, promises 131,072 tokens" in result.stdout
    assert "Llama 3 ×8 from 8,192" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_a_folder_will_do(tmp_path):
    run_plan(tmp_path, LLAMA)
    assert CliRunner().invoke(main, ["plan", str(tmp_path)]).exit_code == 0


@pytest.mark.parametrize("version", ["4", "5"])
def test_rewrites_the_keys_for_a_version(tmp_path, version):
    result = run_plan(tmp_path, LLAMA, "--to-config", version)
    written = json.loads(result.stdout)
    assert ("rope_scaling" in written) == (version == "4")
    assert ("rope_parameters" in written) == (version == "5")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "Expected an object with keys"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yearn"}}, "rope_scaling.rope_type = 'yearn'. Expected one of default"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 0.25}}, "factor = 0.25. Expected a number of 1.0 or more"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(tmp_path, config, message):
    result = run_plan(tmp_path, config)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_names_from_a_file_cannot_steer_the_terminal(tmp_path):
    result = run_plan(tmp_path, {**LLAMA, "model_type": "\x1b[31mred"})
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
