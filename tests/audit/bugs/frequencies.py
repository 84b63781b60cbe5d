"""Frequencies and amplitudes as people have got them wrong."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, log, pi

import torch
from tests.audit.bugs.bug import Bug
from torch import Tensor, nn

from posenc.audit import Report
from posenc.audit.ladders.faults import diagnose
from posenc.core.rotary import Frequencies, Schedule
from posenc.schedules.geometric import Geometric
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.ntk import NTK
from posenc.schedules.proportional import Proportional
from posenc.schedules.yarn import YaRN


def _looked_at(inv_freq: Tensor, promised: Schedule, rotary_dim: int, gain: float = 1.0, length: int = 4096) -> Report:
    findings = diagnose(Frequencies(inv_freq, gain), promised, rotary_dim, where="rotary.inv_freq", length=length)
    return Report.of("frequencies", findings, checked=["frequencies"])


# the exponent


def _pairs_over_the_width(divisor: int) -> Report:
    return _looked_at(1.0 / 10_000 ** (torch.arange(0, 32).float() / divisor), Geometric(1e4), 64)


def _partial(dim: int) -> Report:
    # GLM turns 64 of 128 channels
    return _looked_at(1.0 / 10_000 ** (torch.arange(0, dim, 2).float() / dim), Geometric(1e4), 64)


def _cut_off(divisor: int) -> Report:
    # 24 of 96 channels turn
    return _looked_at(1.0 / 10_000 ** (torch.arange(0, 24, 2).float() / divisor), Geometric(1e4), 24)


def _proportional(divisor: int) -> Report:
    turning = 1.0 / 1e6 ** (torch.arange(0, 64, 2).float() / divisor)
    return _looked_at(torch.cat((turning, torch.zeros(96))), Proportional(Geometric(1e6), 0.25), 256)


def _slowest_first(reverse: bool) -> Report:
    inv_freq = 1.0 / 10_000 ** (torch.arange(0, 64, 2).float() / 64)
    return _looked_at(inv_freq.flip(0) if reverse else inv_freq, Geometric(1e4), 64)


# the base


class _Config:
    def __init__(self) -> None:
        self.rope_parameters = {"rope_type": "default", "rope_theta": 500_000.0}


def _base(read: Callable[[_Config], float]) -> Report:
    base = read(_Config())
    return _looked_at(1.0 / base ** (torch.arange(0, 128, 2).float() / 128), Geometric(5e5), 128)


def _cached(key: Callable[[int, float], object]) -> Report:
    tables: dict[object, Tensor] = {}

    def table(dim: int, base: float) -> Tensor:
        if key(dim, base) not in tables:
            tables[key(dim, base)] = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        return tables[key(dim, base)]

    table(128, 1e4)  # the local layers'
    return _looked_at(table(128, 1e6), Geometric(1e6), 128)


# rounding and memory


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", self.made(), persistent=False)

    def made(self) -> Tensor:
        return 1.0 / 10_000 ** (torch.arange(0, 128, 2).float() / 128)


class _Widened(_Rotary):
    """Its buffer is made anew after a cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.inv_freq = self.made()
        return self


def _cast(module: nn.Module, dtype: torch.dtype) -> Report:
    return _looked_at(module.to(dtype).inv_freq, Geometric(1e4), 128)


def _narrowed_and_back(keep: bool) -> Report:
    inv_freq = _Rotary().made()
    return _looked_at(inv_freq if keep else inv_freq.bfloat16().float(), Geometric(1e4), 128)


def _emptied(left_in_memory: Tensor, fill: bool) -> Report:
    """Built without memory, then given some: what it holds is what the allocator's block held before."""
    with torch.device("meta"):
        module = _Rotary()
    module = module.to_empty(device="cpu")
    module.inv_freq.copy_(left_in_memory)
    if fill:
        module.inv_freq.copy_(1.0 / 10_000 ** (torch.arange(0, 128, 2, device="cpu").float() / 128))
    return _looked_at(module.inv_freq, Geometric(1e4), 128)


def _leftovers() -> Tensor:
    dice = torch.Generator().manual_seed(0)
    return torch.randn(64, generator=dice) * 0.02  # weights of a layer


# scaling


def _linear(scaled: Callable[[Tensor], Tensor]) -> Report:
    return _looked_at(scaled(1.0 / 10_000 ** (torch.arange(0, 128, 2).float() / 128)), Linear(Geometric(1e4), 4.0), 128)


def _ntk(exponent: float) -> Report:
    base = 10_000 * 8.0**exponent
    return _looked_at(1.0 / base ** (torch.arange(0, 128, 2).float() / 128), NTK(Geometric(1e4), 8.0), 128)


def _llama(factor: float | None, low: float = 1.0, high: float = 4.0) -> Report:
    """Llama 3.1 8B, by the code that was released with it."""
    inv_freq = 1.0 / 500_000 ** (torch.arange(0, 128, 2).float() / 128)
    if factor is not None:
        wavelength = 2 * pi / inv_freq
        smooth = (8192 / wavelength - low) / (high - low)
        blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
        scaled = torch.where(wavelength > 8192 / low, inv_freq / factor, inv_freq)
        between = ~(wavelength < 8192 / high) & ~(wavelength > 8192 / low)
        inv_freq = torch.where(between, blended, scaled)
    return _looked_at(inv_freq, Llama3(Geometric(5e5), 8.0, 8192), 128, length=131_072)


def _yarn_ladder(base: float, dim: int, factor: float, original: int, fast: float, slow: float, rounds: bool = True) -> Tensor:
    low, high = (dim * log(original / (turns * 2 * pi)) / (2 * log(base)) for turns in (fast, slow))
    if rounds:
        low, high = floor(low), ceil(high)
    ramp = ((torch.arange(dim // 2).float() - max(low, 0)) / (min(high, dim - 1) - max(low, 0))).clamp(0, 1)
    inv_freq = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp)


def _gpt_oss(rounds: bool) -> Report:
    promised = YaRN(Geometric(1.5e5), 32.0, 4096, rounding="none")
    return _looked_at(_yarn_ladder(1.5e5, 64, 32.0, 4096, 32.0, 1.0, rounds), promised, 64, 0.1 * log(32) + 1)


def _qwen(factor: float) -> Report:
    promised = YaRN(Geometric(1e6), 4.0, 32_768)
    return _looked_at(_yarn_ladder(1e6, 128, factor, 32_768, 32.0, 1.0), promised, 128, 0.1 * log(factor) + 1)


def _devstral(fast: float = 4.0, slow: float = 1.0, gain: float = 0.1 * log(64) + 1, original: int = 4096) -> Report:
    promised = YaRN(Geometric(1e6), 64.0, 4096, beta_fast=4.0)
    return _looked_at(_yarn_ladder(1e6, 128, 64.0, original, fast, slow), promised, 128, gain)


def _deepseek(gain: float) -> Report:
    promised = YaRN(Geometric(1e4), 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    return _looked_at(_yarn_ladder(1e4, 64, 40.0, 4096, 32.0, 1.0), promised, 64, gain)


def _phi(at_the_boundary_is_long: bool) -> Report:
    short, long = [1.05 + 0.01 * pair for pair in range(48)], [1.0 + 1.25 * pair for pair in range(48)]
    rule = LongRoPE(Geometric(1e4), short, long, 4096, factor=32.0)
    factors = torch.tensor(long if at_the_boundary_is_long else short)
    inv_freq = 1.0 / (factors * 10_000 ** (torch.arange(0, 96, 2).float() / 96))
    return _looked_at(inv_freq, rule.at(4096), 96, float(rule.frequencies_at(96, 4096).amplitude))


BUGS = [
    Bug(
        "pair index over the channel count in the exponent",
        "frequency-divisor",
        "rasbt/LLMs-from-scratch#410",
        lambda: _pairs_over_the_width(64),
        lambda: _pairs_over_the_width(32),
    ),
    Bug(
        "whole head turns though half should",
        "frequency-width",
        "ml-explore/mlx-lm#1698",
        lambda: _partial(128),
        lambda: _partial(64),
    ),
    Bug(
        "exponents over the whole head though a quarter turns",
        "frequency-divisor",
        "ml-explore/mlx-lm#1698",
        lambda: _cut_off(96),
        lambda: _cut_off(24),
    ),
    Bug(
        "proportional ladder squeezed into the turning pairs",
        "frequency-divisor",
        "posenc: Proportional, the thing people get wrong",
        lambda: _proportional(64),
        lambda: _proportional(256),
    ),
    Bug(
        "slowest pair first",
        "frequency-order",
        "posenc: Geometric, exponents that fall",
        lambda: _slowest_first(True),
        lambda: _slowest_first(False),
    ),
    Bug(
        "base from a default because its key has moved",
        "frequency-base",
        "deepspeedai/DeepSpeed#8345, InternLM/lmdeploy#4303, sgl-project/sglang#14745",
        lambda: _base(lambda config: getattr(config, "rope_theta", 10_000.0)),
        lambda: _base(lambda config: config.rope_parameters["rope_theta"]),
    ),
    Bug(
        "frequencies cached by width alone",
        "frequency-base",
        "patrick-kidger/equinox#568",
        lambda: _cached(lambda dim, base: dim),
        lambda: _cached(lambda dim, base: (dim, base)),
    ),
    Bug(
        "frequency buffer follows the model to bfloat16",
        "frequency-rounded",
        "huggingface/transformers#29496, #25681; InternLM/InternLM#237",
        lambda: _cast(_Rotary(), torch.bfloat16),
        lambda: _cast(_Widened(), torch.bfloat16),
    ),
    Bug(
        "frequency buffer follows the model to float16",
        "frequency-rounded",
        "NVIDIA/Megatron-LM#744, okoge-kaz/llm-recipes#6",
        lambda: _cast(_Rotary(), torch.float16),
        lambda: _cast(_Widened(), torch.float16),
    ),
    Bug(
        "frequencies rounded to bfloat16 and widened again",
        "frequency-rounded",
        "sgl-project/sglang-jax#1472",
        lambda: _narrowed_and_back(False),
        lambda: _narrowed_and_back(True),
    ),
    Bug(
        "frequencies never filled after to_empty",
        "frequency-garbage",
        "huggingface/transformers#48892",
        lambda: _emptied(torch.full((64,), float("nan")), False),
        lambda: _emptied(torch.full((64,), float("nan")), True),
    ),
    Bug(
        "finite leftovers in place of frequencies",
        "frequency-garbage",
        "huggingface/transformers#45902, Synthyra/FastPLMs#47",
        lambda: _emptied(_leftovers(), False),
        lambda: _emptied(_leftovers(), True),
    ),
    Bug(
        "zeros in place of frequencies",
        "frequency-garbage",
        "huggingface/transformers#48892",
        lambda: _emptied(torch.zeros(64), False),
        lambda: _emptied(torch.zeros(64), True),
    ),
    Bug(
        "linear factor multiplies",
        "frequency-scaling-inverted",
        "ml-explore/mlx#261",
        lambda: _linear(lambda inv_freq: inv_freq * 4),
        lambda: _linear(lambda inv_freq: inv_freq / 4),
    ),
    Bug(
        "linear factor on frequencies that are divided already",
        "frequency-scaling-twice",
        "related to lablup/mlxcel#1324",
        lambda: _linear(lambda inv_freq: inv_freq / 4 / 4),
        lambda: _linear(lambda inv_freq: inv_freq / 4),
    ),
    Bug(
        "NTK without its exponent",
        "frequency-scaling",
        "posenc: NTK, base' = base · factor^(d / (d - 2))",
        lambda: _ntk(1.0),
        lambda: _ntk(128 / 126),
    ),
    Bug(
        "Llama 3 block parsed and not applied",
        "frequency-scaling-dropped",
        "unslothai/unsloth#6197, lablup/mlxcel#1355, felafax/felafax#59, jmaczan/tiny-vllm#1",
        lambda: _llama(None),
        lambda: _llama(8.0),
    ),
    Bug(
        "Llama 3 factors swapped",
        "frequency-scaling",
        "posenc: Llama3, low_freq_factor above high_freq_factor",
        lambda: _llama(8.0, low=4.0, high=1.0),
        lambda: _llama(8.0),
    ),
    Bug(
        "YaRN bounds rounded though truncate is false",
        "frequency-scaling",
        "vllm-project/vllm#27722, #28244; sgl-project/sglang#14270",
        lambda: _gpt_oss(True),
        lambda: _gpt_oss(False),
    ),
    Bug(
        "YaRN factor worked out anew from the lengths",
        "frequency-scaling",
        "huggingface/transformers#38224",
        lambda: _qwen(40_960 / 32_768),
        lambda: _qwen(4.0),
    ),
    Bug(
        "YaRN betas 32 and 1 for a model with 4 and 1",
        "frequency-scaling",
        "GaijinEntertainment/daScript#3479",
        lambda: _devstral(fast=32.0),
        _devstral,
    ),
    Bug(
        "YaRN betas swapped",
        "frequency-scaling",
        "posenc: YaRN, beta_fast below beta_slow",
        lambda: _devstral(fast=1.0, slow=4.0),
        _devstral,
    ),
    Bug(
        "YaRN counts from the extended length",
        "frequency-scaling",
        "posenc: YaRN, original_length is the trained length",
        lambda: _devstral(original=262_144),
        _devstral,
    ),
    Bug(
        "YaRN amplitude forgotten on one path",
        "amplitude-missing",
        "antonellof/ferrox#226",
        lambda: _devstral(gain=1.0),
        _devstral,
    ),
    Bug(
        "YaRN amplitude on queries, keys and again in the table",
        "amplitude",
        "posenc: YaRN, the amplitude acts on queries and keys, so that scores have its square",
        lambda: _devstral(gain=(0.1 * log(64) + 1) ** 2),
        _devstral,
    ),
    Bug(
        "amplitude computed though mscale cancels it",
        "amplitude",
        "ml-explore/mlx-lm#1507",
        lambda: _deepseek(0.1 * log(40) + 1),
        lambda: _deepseek(1.0),
    ),
    Bug(
        "LongRoPE switches one token early",
        "frequency-scaling",
        "unslothai/unsloth#10681",
        lambda: _phi(True),
        lambda: _phi(False),
    ),
]
