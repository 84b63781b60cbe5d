"""In float32, every rule gives the frequencies of transformers bit for bit."""

from __future__ import annotations

import pytest
import torch

from posenc import Geometric
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.ntk import NTK
from posenc.schedules.proportional import Proportional
from posenc.schedules.yarn import YaRN

pytest.importorskip("transformers")

from transformers import HunYuanDenseV1Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

WIDTHS = [8, 64, 96, 128, 80, 216, 256, 512]  # of 216, a quarter of the ladder rounds otherwise than the whole


def config_of(rope_type, dim, base, longest, **parameters):
    given = {"rope_type": rope_type, "rope_theta": base} | parameters
    return LlamaConfig(head_dim=dim, num_attention_heads=2, max_position_embeddings=longest, rope_parameters=given)


CASES = {
    "Gemma 3": (Linear(Geometric(1e6), 8.0), ("linear", 1e6, 131072, {"factor": 8.0})),
    "Llama 3.1": (
        Llama3(Geometric(5e5), 8.0, 8192),
        (
            "llama3",
            5e5,
            131072,
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        ),
    ),
    "Llama 3.2": (
        Llama3(Geometric(5e5), 32, 8192),
        (
            "llama3",
            5e5,
            131072,
            {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        ),
    ),
    "Llama 3, factor 1": (
        Llama3(Geometric(5e5), 1.0, 8192),
        (
            "llama3",
            5e5,
            131072,
            {"factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        ),
    ),
    "Llama 3, equal factors": (
        Llama3(Geometric(5e5), 8.0, 8192, low_freq_factor=2.0, high_freq_factor=2.0),
        (
            "llama3",
            5e5,
            131072,
            {"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 8192},
        ),
    ),
    "Qwen2.5": (
        YaRN(Geometric(1e6), 4.0, 32768),
        ("yarn", 1e6, 131072, {"factor": 4.0, "original_max_position_embeddings": 32768}),
    ),
    "gpt-oss": (
        YaRN(Geometric(150000), 32.0, 4096, rounding="none"),
        ("yarn", 150000, 131072, {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}),
    ),
    "DeepSeek-V2": (
        YaRN(Geometric(1e4), 40, 4096, mscale=0.707, mscale_all_dim=0.707),
        (
            "yarn",
            10000,
            163840,
            {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
        ),
    ),
    "DeepSeek, unequal mscale": (
        YaRN(Geometric(1e4), 40.0, 4096, mscale=1.0, mscale_all_dim=0.8),
        (
            "yarn",
            1e4,
            163840,
            {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "original_max_position_embeddings": 4096},
        ),
    ),
    "DeepSeek-V3": (
        YaRN(Geometric(1e4), 40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
        (
            "yarn",
            1e4,
            163840,
            {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
        ),
    ),
    "Devstral-2": (
        YaRN(Geometric(1e6), 64.0, 4096, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.0),
        (
            "yarn",
            1e6,
            262144,
            {
                "factor": 64.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
                "original_max_position_embeddings": 4096,
            },
        ),
    ),
    "Olmo 3": (
        YaRN(Geometric(5e5), 8.0, 8192, amplitude=1.2079441541679836),
        ("yarn", 5e5, 65536, {"factor": 8.0, "attention_factor": 1.2079441541679836, "original_max_position_embeddings": 8192}),
    ),
    "YaRN, factor 1": (
        YaRN(Geometric(1e4), 1.0, 4096),
        ("yarn", 1e4, 4096, {"factor": 1.0, "original_max_position_embeddings": 4096}),
    ),
    "YaRN, equal betas": (
        YaRN(Geometric(1e4), 4.0, 4096, beta_fast=8.0, beta_slow=8.0, rounding="none"),
        (
            "yarn",
            1e4,
            16384,
            {
                "factor": 4.0,
                "beta_fast": 8.0,
                "beta_slow": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
    ),
    "Gemma 4": (Proportional(Geometric(1e6), 0.25), ("proportional", 1e6, 131072, {"partial_rotary_factor": 0.25})),
    "proportional with a factor": (
        Proportional(Geometric(1e4), 0.7, 3.0),
        ("proportional", 1e4, 131072, {"partial_rotary_factor": 0.7, "factor": 3.0}),
    ),
}


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_schedules(name, dim):
    schedule, (rope_type, base, longest, parameters) = CASES[name]
    inv_freq, amplitude = ROPE_INIT_FUNCTIONS[rope_type](config_of(rope_type, dim, base, longest, **parameters))
    result = schedule.frequencies(dim, dtype=torch.float32)
    assert torch.equal(result.inv_freq, inv_freq)
    assert result.amplitude == amplitude


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("alpha", [1000.0, 3])
def test_hunyuan_s_alpha(dim, alpha):
    given = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": alpha, "factor": 1.0}
    config = HunYuanDenseV1Config(head_dim=dim, num_attention_heads=2, rope_parameters=given)
    inv_freq = HunYuanDenseV1RotaryEmbedding(config).inv_freq
    assert torch.equal(NTK(Geometric(1e4), alpha).frequencies(dim, dtype=torch.float32).inv_freq, inv_freq)


def fresh(config, length):
    """A new module of transformers that has seen one sequence of this length."""
    module = LlamaRotaryEmbedding(config)
    module(torch.zeros(1), torch.tensor([[0, length - 1]]))
    return module


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize(("base", "factor", "original"), [(1e4, 2.0, 2048), (5e5, 8, 3000), (1e6, 1.0, 4096), (1e4, 1.3, 1000)])
def test_dynamic_ntk_of_a_fresh_module(dim, base, factor, original):
    rule = DynamicNTK(Geometric(base), factor, original)
    lengths = [1, original - 1, original, original + 1, 2 * original, 10 * original + 7]
    together = rule.frequencies_at(dim, torch.tensor(lengths), dtype=torch.float32).inv_freq
    for row, length in zip(together, lengths, strict=True):
        theirs = fresh(config_of("dynamic", dim, base, original, factor=factor), length).inv_freq
        assert torch.equal(row, theirs)
        assert torch.equal(rule.at(length).frequencies(dim, dtype=torch.float32).inv_freq, theirs)


@pytest.mark.parametrize(("head_dim", "share"), [(128, 0.75), (96, 1.0), (64, 0.5)])
@pytest.mark.parametrize("explicit", [{"factor": 32.0}, {"factor": 32.0, "attention_factor": 1.25}, {}])
def test_longrope_of_a_fresh_module(head_dim, share, explicit):
    dim = int(head_dim * share)
    short, long = [1.0 + 0.01 * i for i in range(dim // 2)], [1.118320672 ** min(i, 31) for i in range(dim // 2)]
    config = config_of(
        "longrope", head_dim, 1e4, 131072, short_factor=short, long_factor=long, partial_rotary_factor=share,
        original_max_position_embeddings=4096, **explicit,
    )  # fmt: skip
    rule = LongRoPE(Geometric(1e4), short, long, 4096, factor=32.0, amplitude=explicit.get("attention_factor"))
    lengths = [1, 4096, 4097, 131072]
    together = rule.frequencies_at(dim, torch.tensor(lengths), dtype=torch.float32)
    for row, length in zip(together.inv_freq, lengths, strict=True):
        theirs = fresh(config, length)
        assert torch.equal(row, theirs.inv_freq)
        assert together.amplitude == theirs.attention_scaling
