"""What `print(plan)` says, in the words that an engineer looks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posenc.hf import plan

CONFIGS = Path(__file__).parent / "configs"
QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text", "head_dim": 128, "hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 36,
        "max_position_embeddings": 262144, "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "vision_config": {"model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "num_heads": 16, "num_position_embeddings": 2304},
}  # fmt: skip
PHI_4_MINI: dict[str, Any] = {
    "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 24, "num_hidden_layers": 32, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "sliding_window": 262144, "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + i for i in range(48)]},
}  # fmt: skip
SAID = {
    "llama-3.1-8b": [
        "llama: 32 layers, trained on 8,192, promises 131,072 tokens",
        "layers 0–31 (32, full attention)",
        "all 128 channels of queries and keys, channel i with i + half",
        "base 500,000, Llama 3 ×8 from 8,192: wavelengths under 2,048 kept, over 8,192 divided",
    ],
    "gemma-3-27b-it": [
        "layers 0–4, 6–10, 12–16, 18–22, …, 60–61 (52, sliding attention)",
        "window 1,024 tokens, the query's own included",
        "layers 5, 11, 17, 23, …, 59 (10, full attention)",
        "base 1,000,000, all divided by 8 (linear)",
    ],
    "gpt-oss-20b": [
        "base 150,000, YaRN ×32 from 4,096",
        "bounds not rounded; amplitude 1.34657",
        "window 128 tokens",
        "layers 1, 3, 5, 7, …, 23 (12, full attention)",
    ],
    "deepseek-v3": [
        "channels 128–191 of 192 of queries and keys, neighbouring channels",
        "YaRN ×40 from 4,096: pairs of more than 32 turns kept, of less than 1 divided",
        "softmax scale × 1.87385, beside 1/√head_dim",
    ],
    "llama-4-scout-text": [
        "chunks of 8,192 tokens; attention stays inside one",
        "turns nothing",
        "temperature queries × (1 + 0.1·ln(1 + ⌊(position + 1)/8192⌋))",
    ],
    "whisper-large-v2": [
        "input learned table of 448 rows",
        "encoder whisper: 32 layers",
        "sinusoidal table of 1500 rows, concatenated",
    ],
    "mpt-7b": ["scores ALiBi bias (32 heads)"],
    "t5-small": ["scores T5 buckets bias (8 heads, buckets 32, farthest 128)", "all layers share one bias table"],
    "llama-2-7b-chat": ["notes - rope_theta is not given: 10000, the default of 'llama'"],
}


def shown(config: object) -> str:
    text = str(plan(config))
    assert all(len(line) <= 100 and line == line.rstrip() for line in text.splitlines()), text
    for mark in ("LayerPlan(", "Geometric(", "Rotation(", "None", "{", "e+0", "float", "tensor"):
        assert mark not in text, (mark, text)
    return " ".join(text.split())


@pytest.mark.parametrize("name", SAID)
def test_public_models(name: str) -> None:
    text = shown(CONFIGS / f"{name}.json")
    for words in SAID[name]:
        assert words in text, text


def test_several_towers() -> None:
    text = shown(QWEN3_VL)
    for words in (
        "qwen3_vl: 36 layers", "axes t, h, w: interleaved 24/20/20", "vision_config qwen3_vl_vision: 24 layers", "all 64 channels",
        "axes row, column: rows in the first half of the pairs", "num_position_embeddings = 2304 is read by nothing here",
    ):  # fmt: skip
        assert words in text, text


def test_long_factors() -> None:
    text = shown(PHI_4_MINI)
    for words in (
        "channels 0–95 of 128", "LongRoPE: short factors up to 4,096 tokens, long ones after (cached keys do not follow)",
        "amplitude 1.19024", "window 262,144 tokens", "rope_scaling.factor is not given: 32, the ratio of the lengths",
    ):  # fmt: skip
        assert words in text, text
    apart = {
        **PHI_4_MINI,
        "model_type": "phimoe",
        "rope_scaling": {**PHI_4_MINI["rope_scaling"], "short_mscale": 1.25, "long_mscale": 1.5},
    }
    apart["partial_rotary_factor"] = 0.75
    apart["head_dim"] = 128
    assert "amplitude 1.25, then 1.5" in shown(apart)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_all_are_fit_to_print(path: Path) -> None:
    shown(path)


def test_every_model_type_is_fit_to_print() -> None:
    from posenc.errors import ConfigError
    from posenc.hf.defaults import model_defaults

    printed = 0
    for model_type in model_defaults():
        try:
            text = str(plan({"model_type": model_type}))
        except ConfigError:
            continue
        printed += 1
        wide = [line for line in text.splitlines() if len(line) > 100]
        assert not wide, wide
        assert not [mark for mark in ("LayerPlan(", "e+0") if mark in text], text
    assert printed > 600


def test_a_short_plan_of_a_short_file() -> None:
    assert str(plan({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024})) == (
        "gpt2: 12 layers, trained on 1,024 tokens\n  input   learned table of 1024 rows\n  layers 0–11 (12, full attention)\n"
        "    turns       nothing"
    )
    assert json.dumps(str(plan({}))).startswith('"a model without a type: 1 layer')
