"""Every rotary class that reads the shared registry, crossed with every rope type and parameters of real models.

``python -m tests.hf.crossed`` runs all of it and writes ``docs/results/hf-zoo.json``, the counts that ``docs/hf-zoo.md``
quotes. Each comparison starts from a fresh module, because transformers' dynamic tables depend on the calls before.
"""

from __future__ import annotations

import copy
import json
import math
import platform
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posenc.core.multimodal import patch_centres
from posenc.errors import ConfigError
from posenc.hf import PositionPlan, plan
from tests.hf.zoo import Case, Table, cases

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "hf-zoo.json"
COMMAND = "python -m tests.hf.crossed"

Status = Literal["matched", "one ulp", "differs", "refused", "skipped", "mismatched"]
"""``matched``: bit for bit. ``one ulp``: no entry further than that, in a class that computes in another order.
``differs``: transformers deviates from its own documentation, see `FINDINGS`. ``refused``: posenc says why it does not
plan it; transformers computes something. ``skipped``: transformers raises. ``mismatched``: anything else, a defect here."""

STATUSES: tuple[Status, ...] = ("matched", "one ulp", "differs", "refused", "skipped", "mismatched")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True)
class Outcome:
    """What came of one comparison."""

    status: Status
    reason: str = ""


@dataclass(frozen=True)
class Parameters:
    """One block of ``rope_parameters``, as a model's configuration holds it.

    Args:
        name: whose, or what is special.
        rope_type: the registry's name.
        block: the other keys.
        max_length: ``max_position_embeddings``.
        original_length: the length that the positions are chosen around.
    """

    name: str
    rope_type: str
    block: Mapping[str, Any] = field(hash=False)
    max_length: int
    original_length: int

    @property
    def id(self) -> str:
        return f"{self.rope_type}: {self.name}"

    def calls(self) -> tuple[tuple[int, ...], ...]:
        """Positions of each call. Length rules see a call that is just short, one just long and one very long."""
        length = self.original_length
        short = tuple(sorted({0, 1, 7, min(1023, length - 1), length - 1}))
        everywhere = tuple(sorted({*short, 1023, length, length + 1, 131_071}))
        if self.rope_type not in ("dynamic", "longrope"):
            return (everywhere,)
        return short, (*short, length), everywhere


def _set(name: str, rope_type: str, max_length: int, original: int | None = None, /, **block: Any) -> Parameters:
    if rope_type in ("yarn", "longrope", "llama3"):
        block["original_max_position_embeddings"] = original or max_length
    return Parameters(name, rope_type, block, max_length, original or max_length)


PARAMETERS: tuple[Parameters, ...] = (
    _set("Llama 2", "default", 4096, rope_theta=10_000.0),
    _set("Llama 3", "default", 8192, rope_theta=500_000.0),
    _set("Phi 2, half a head", "default", 2048, rope_theta=10_000.0, partial_rotary_factor=0.5),
    _set("Pythia, a quarter of a head", "default", 2048, rope_theta=10_000.0, partial_rotary_factor=0.25),
    _set("LongChat", "linear", 16_384, 2048, rope_theta=10_000.0, factor=8.0),
    _set("Gemma 3", "linear", 131_072, 16_384, rope_theta=1e6, factor=8.0),
    _set("factor 1", "linear", 4096, rope_theta=10_000.0, factor=1.0),
    _set("half a head, factor 2.5", "linear", 5120, 2048, rope_theta=10_000.0, factor=2.5, partial_rotary_factor=0.5),
    _set("factor 0.5", "linear", 4096, rope_theta=10_000.0, factor=0.5),
    _set("Llama 2 stretched", "dynamic", 4096, rope_theta=10_000.0, factor=2.0),
    _set("InternLM 2", "dynamic", 32_768, rope_theta=1e6, factor=2.0),
    _set("factor 1", "dynamic", 2048, rope_theta=10_000.0, factor=1.0),
    _set("a quarter of a head", "dynamic", 2048, rope_theta=10_000.0, factor=4.0, partial_rotary_factor=0.25),
    _set("Hunyuan, alpha 1000", "dynamic", 32_768, rope_theta=10_000.0, factor=1.0, alpha=1000.0),
    _set("Hunyuan, alpha 50", "dynamic", 4096, rope_theta=10_000.0, factor=1.0, alpha=50),
    _set("Qwen 2.5", "yarn", 131_072, 32_768, rope_theta=1e6, factor=4.0),
    _set("gpt-oss, not truncated", "yarn", 131_072, 4096, rope_theta=150_000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0,
         truncate=False),
    _set("gpt-oss, truncated", "yarn", 131_072, 4096, rope_theta=150_000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0,
         truncate=True),
    _set("DeepSeek V3, mscale 1 and 1", "yarn", 163_840, 4096, rope_theta=10_000.0, factor=40.0, beta_fast=32, beta_slow=1,
         mscale=1.0, mscale_all_dim=1.0),
    _set("mscale 1 and 0.707", "yarn", 163_840, 4096, rope_theta=10_000.0, factor=40.0, mscale=1.0, mscale_all_dim=0.707),
    _set("Olmo 3, attention factor", "yarn", 65_536, 8192, rope_theta=500_000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
         attention_factor=1.2079441541679836),
    _set("beta_fast = beta_slow", "yarn", 16_384, 4096, rope_theta=10_000.0, factor=4.0, beta_fast=8.0, beta_slow=8.0),
    _set("factor 1", "yarn", 4096, rope_theta=10_000.0, factor=1.0),
    _set("half a head", "yarn", 16_384, 4096, rope_theta=500_000.0, factor=4.0, partial_rotary_factor=0.5),
    _set("a quarter of a head", "yarn", 16_384, 4096, rope_theta=500_000.0, factor=4.0, partial_rotary_factor=0.25),
    _set("Phi 3 mini 128k, no factor", "longrope", 131_072, 4096, rope_theta=10_000.0),
    _set("factor beside the lengths", "longrope", 131_072, 4096, rope_theta=10_000.0, factor=32.0),
    _set("attention factor", "longrope", 131_072, 8192, rope_theta=10_000.0, attention_factor=1.19),
    _set("Phi 3.5 MoE, a factor per list", "longrope", 131_072, 4096, rope_theta=10_000.0, short_mscale=1.243163121016122,
         long_mscale=1.243163121016122),
    _set("two factors per list", "longrope", 131_072, 4096, rope_theta=10_000.0, short_mscale=1.1, long_mscale=1.25),
    _set("half a head", "longrope", 131_072, 4096, rope_theta=10_000.0, partial_rotary_factor=0.5),
    _set("factor 1", "longrope", 4096, rope_theta=10_000.0, factor=1.0),
    _set("Llama 3.1", "llama3", 131_072, 8192, rope_theta=500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    _set("Llama 3.2", "llama3", 131_072, 8192, rope_theta=500_000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0),
    _set("equal band factors", "llama3", 131_072, 8192, rope_theta=500_000.0, factor=8.0, low_freq_factor=2.0,
         high_freq_factor=2.0),
    _set("factor 1", "llama3", 16_384, 8192, rope_theta=500_000.0, factor=1.0, low_freq_factor=1.0, high_freq_factor=4.0),
    _set("half a head", "llama3", 131_072, 8192, rope_theta=500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
         partial_rotary_factor=0.5),
    _set("Gemma 4, a quarter", "proportional", 131_072, rope_theta=1e6, partial_rotary_factor=0.25),
    _set("half, factor 8", "proportional", 131_072, rope_theta=1e6, partial_rotary_factor=0.5, factor=8.0),
    _set("everything turns", "proportional", 8192, rope_theta=10_000.0, partial_rotary_factor=1.0),
)  # fmt: skip


def crossed_cases() -> tuple[Case, ...]:
    """The cases whose class takes its rule from the registry."""
    return tuple(case for case in cases() if case.builds and case.reads_registry)


def changes_for(case: Case, parameters: Parameters) -> dict[str, Any]:
    """What the case's configuration is made with."""
    default = case.config()
    changes = copy.deepcopy(dict(case.changes))
    given = default.rope_parameters
    labels = [label for label, value in given.items() if isinstance(value, dict)] if case.layer_type else []
    if labels:
        changes["rope_parameters"] = {label: _block(case, parameters, label) for label in labels}
    else:
        changes["rope_parameters"] = _block(case, parameters, None)
    if hasattr(default, "max_position_embeddings"):
        changes["max_position_embeddings"] = parameters.max_length
    if hasattr(default, "original_max_position_embeddings"):  # it counts before the block's own
        changes["original_max_position_embeddings"] = parameters.original_length
    return changes


def _block(case: Case, parameters: Parameters, label: str | None) -> dict[str, Any]:
    block = {"rope_type": parameters.rope_type, **parameters.block}
    head_dim = _head_dim(case, label)
    share = 1.0 if parameters.rope_type == "proportional" else _share(case, parameters, label)
    pairs = int(head_dim * share) // 2
    if parameters.rope_type == "longrope":  # from 1 for the fastest pair to some sixty for the slowest, as Phi 3's
        block["short_factor"] = [1.0 + 0.02 * i for i in range(pairs)]
        block["long_factor"] = [round(1.0 + 63.0 * (i / pairs) ** 2, 3) for i in range(pairs)]
    sections = _sections(case)
    if sections:
        side = pairs * 3 // 8
        block["mrope_section"] = list(sections) if sum(sections) == pairs else [pairs - 2 * side, side, side]
    return block


def _share(case: Case, parameters: Parameters, label: str | None) -> float:
    """The part of a head that turns: as given, or as the configuration's own default fills in."""
    if "partial_rotary_factor" in parameters.block:
        return float(parameters.block["partial_rotary_factor"])
    filled = _filled(case)
    block = filled[label] if label else filled
    return float(block.get("partial_rotary_factor") or 1.0)


@cache
def _filled(case: Case) -> Any:
    """A block without a share, as the configuration completes it."""
    default = case.config()
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if _sections(case):
        plain["mrope_section"] = list(_sections(case))
    labels = [label for label, value in default.rope_parameters.items() if isinstance(value, dict)] if case.layer_type else []
    changes = dict(case.changes) | {"rope_parameters": {label: plain for label in labels} if labels else plain}
    return case.config_class(**copy.deepcopy(changes)).rope_parameters


@cache
def _head_dim(case: Case, label: str | None) -> int:
    config = case.config()
    try:  # as the registry's functions read it
        config = config.per_layer_config[label] if label else config
    except ValueError:
        pass
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@cache
def _sections(case: Case) -> tuple[int, ...]:
    found = getattr(case.module(), "mrope_section", None)
    if isinstance(found, dict):
        found = found[case.layer_type]
    return tuple(found or ())


def positions_of(case: Case, numbers: tuple[int, ...]) -> Tensor:
    """``[1, seq]``, or ``[1, seq, axes]`` with every axis in another order; what the class counts where it counts itself."""
    if case.layout not in ("positions", "axes first", "axes last", "tokens"):
        return case.positions()
    row = torch.tensor(numbers)
    if case.axes == 1:
        return row[None]
    return torch.stack([row.roll(axis) for axis in range(case.axes)], dim=-1)[None]


def layer_of(case: Case, planned: PositionPlan) -> int | None:
    """The first layer that turns by the case's block."""
    before = 0
    for layer, count in planned.runs:
        if layer.rotation is not None and case.layer_type in (None, layer.entry):
            return before
        before += count
    return None


def compare(case: Case, parameters: Parameters) -> Outcome:
    """One case with one block: transformers' tables against posenc's, at every call."""
    assert case.config_class is not None
    changes = changes_for(case, parameters)
    theirs, failure = [], None
    numbers = parameters.calls() if case.layout in ("positions", "axes first", "axes last", "tokens") else ((),)
    try:
        for call in numbers:
            module = case.module(case.config_class(**copy.deepcopy(changes)))
            theirs.append(case.table(module, positions_of(case, call)))
    except Exception as error:
        return Outcome("skipped", f"transformers: {type(error).__name__}: {_general(str(error))}")
    try:
        planned = plan(case.config_class(**copy.deepcopy(changes)))
        layer = layer_of(case, planned)
        if layer is None:
            return Outcome("mismatched", "no layer reads this block")
        outcomes = []
        for call, table in zip(numbers, theirs, strict=True):
            at = positions_of(case, call)
            ours = planned.rotary_table(at, layer=layer, length=int(at.max()) + 1, angle_dtype=torch.float32)
            outcomes.append(verdict(table, Table(*ours)))
    except ConfigError as error:
        return Outcome("refused", _general(str(error)))
    except Exception as error:
        return Outcome("mismatched", f"posenc: {type(error).__name__}: {_general(str(error))}")
    return max(outcomes, key=lambda outcome: STATUSES.index(outcome.status))


def verdict(theirs: Table, ours: Table) -> Outcome:
    """Whether two tables are the same, bit for bit, or one unit in the last place apart."""
    if theirs.cos.shape != ours.cos.shape:
        return Outcome("mismatched", f"{theirs.cos.shape[-1]} pairs there, {ours.cos.shape[-1]} here")
    if all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)):
        return Outcome("matched")
    if all(_apart(a, b) <= 1 for a, b in zip(theirs, ours, strict=True)):
        return Outcome("one ulp")
    worst = max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))
    return Outcome("mismatched", f"up to {worst:.1e} apart ({max(_apart(a,b) for a,b in zip(theirs,ours))})")


def _apart(a: Tensor, b: Tensor) -> int:
    """The largest distance, counted in float32 numbers between."""
    ordered = [torch.where(bits < 0, -(bits & 0x7FFF_FFFF), bits) for bits in (t.view(torch.int32).long() for t in (a, b))]
    return int((ordered[0] - ordered[1]).abs().max())


def _general(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return re.sub(r"\d+(\.\d+)?", "…", lines[-1] if lines else "")[:300]

