"""What each reader makes of a configuration, where that is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from posenc.audit.configs.sheet import Sheet
from posenc.audit.findings import Finding
from posenc.audit.kinds.configs import READER
from posenc.errors import ConfigError
from posenc.hf.describe import words
from posenc.hf.position_plan import PositionPlan, plan
from posenc.schedules.longrope import LongRoPE

BASES = (
    "rope_theta",
    "rotary_emb_base",
    "rotary_embedding_base",
    "rope_local_base_freq",
    "global_rope_theta",
    "local_rope_theta",
)
KEYS = (
    *BASES,
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_dim",
    "original_max_position_embeddings",
)
USUAL_BASE = 10_000.0
"""What readers take for a base that they do not find."""

GGUF = "llama.cpp-style: not known beyond the keys of GGUF: rope.freq_base, rope.dimension_count, rope.scaling.*"

VLLM_KEYS = ("attn_factor", "extrapolation_factor")
"""Keys of a block that vLLM reads and transformers does not."""


def readers(sheet: Sheet) -> tuple[list[str], list[Finding]]:
    """A line per reader, and a finding where one of them silently gets other frequencies."""
    if sheet.plan is None or not sheet.rotations:
        return [], []
    old, findings = _version_4(sheet, sheet.plan)
    return [_version_5(sheet), old, *_vllm(sheet), GGUF], findings


def _version_5(sheet: Sheet) -> str:
    if not sheet.known:
        return f"transformers 5: does not have {sheet.model_type or 'a model without a type'}; its own code reads the file: not known"
    given = [sheet.path(name) for name in KEYS if sheet.keys.get(name)]
    return f"transformers 5: reads {', '.join(given)}, as above" if given else "transformers 5: its class's defaults, as above"


def _version_4(sheet: Sheet, here: PositionPlan) -> tuple[str, list[Finding]]:
    """Transformers 4 reads keys beside the block and ``rope_scaling``; it knows no ``rope_parameters``."""
    reader = "transformers 4, and readers of its keys"
    there = _plan_of(_as_version_4(sheet))
    if isinstance(there, str):
        return f"{reader}: not known ({there})", []
    if _turning(there) == _turning(here):
        given = [sheet.path(name) for name in KEYS if sheet.keys.get(name) and name != "rope_parameters"]
        return f"{reader}: {'read ' + ', '.join(given) if given else 'their defaults'}; the same frequencies", []
    lost = [
        f"{block.where}.{name}"
        for block in sheet.blocks
        for name in ("rope_theta", "partial_rotary_factor")
        if name in block.data
    ]
    blame = sheet.path("rope_parameters") if sheet.keys.get("rope_parameters") else ", ".join(lost) or sheet.path("rope_theta")
    gets, meant = _bases(there), _bases(here)
    line = f"{reader}: {gets}, because they do not read {blame}"
    finding = READER.at(
        blame,
        measured=f"{reader} get: {gets}",
        expected=f"{meant}, as transformers 5 reads it",
        severity="note" if sheet.loaded or sheet.own_code or _saved_by_5(sheet) else "warning",
        mend="Write the base and the scaling beside the block too: posenc plan CONFIG --to-config 4 prints those keys.",
    )
    return line, [finding]


def _saved_by_5(sheet: Sheet) -> bool:
    """Whether the file itself says that it is written for readers of these keys."""
    return str(sheet.keys.get("transformers_version") or "").startswith("5")


def _as_version_4(sheet: Sheet) -> dict[str, Any]:
    keys: dict[str, Any] = {name: value for name, value in sheet.keys.items() if name != "rope_parameters"}
    inner = keys.get("rope_scaling")
    if isinstance(inner, Mapping):
        keys["rope_scaling"] = {
            name: value for name, value in inner.items() if name not in ("rope_theta", "partial_rotary_factor")
        }
    if not sheet.known and not any(keys.get(name) for name in BASES):
        keys["rope_theta"] = USUAL_BASE
    keys["model_type"] = next(iter(sheet.types), None)
    return keys


def _plan_of(keys: dict[str, Any]) -> PositionPlan | str:
    try:
        return plan(keys)
    except ConfigError as error:
        return str(error).removeprefix("plan: ").partition(". Expected")[0]


def _turning(found: PositionPlan) -> list[object]:
    """What turns in every layer, without the lengths that are remembered beside it."""
    turns: list[object] = []
    for layer, count in found.runs:
        turning = layer.rotation
        what = None if turning is None else (turning.schedule, turning.rotary_dim, turning.start, turning.axes)
        turns += [what] * count
    return turns


def _bases(found: PositionPlan) -> str:
    rotations = dict.fromkeys(layer.rotation for layer, _ in found.runs if layer.rotation is not None)
    said = dict.fromkeys(f"{words(r.schedule)}, {r.rotary_dim} channels" for r in rotations)
    return " / ".join(said) or "nothing turns"


def _vllm(sheet: Sheet) -> Iterator[str]:
    read = [f"{block.where}.{name}" for block in sheet.blocks for name in VLLM_KEYS if block.data.get(name) is not None]
    if any(isinstance(rotation.schedule, LongRoPE) for rotation in sheet.rotations):
        yield "vLLM-style: takes the short or the long factors once, by the longest length it serves"
    elif read:
        yield f"vLLM-style: reads {', '.join(read)}, which transformers does not"
    else:
        yield "vLLM-style: not known"
