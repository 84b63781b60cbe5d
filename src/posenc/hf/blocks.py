"""The rotary parameters of a configuration by label, with old keys and defaults folded in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.errors import ConfigError
from posenc.hf.families import WHOLE_DEFAULTS, Family
from posenc.hf.source import Keys, short

FLAT_KEYS = ("rope_theta", "rotary_emb_base", "rotary_embedding_base")

BLOCK_KEYS = frozenset({
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim",
    "truncate", "mrope_section", "mrope_interleaved", "xdrope_section", "interleaved", "alpha", "llama_4_scaling_beta",
    "short_mscale", "long_mscale", "max_position_embeddings",
})  # fmt: skip
"""Keys of one block, and so never the label of a block."""

Blocks = dict[str | None, Keys | None]


def read_blocks(keys: Keys, family: Family, defaults: Mapping[str, Any], kinds: list[str]) -> Blocks:
    """The rotary parameters by label, old keys folded in; one block without a label where all layers share it."""
    new, old = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    if new is not None and old is not None and not _same_block(new.data, old.data):
        raise ConfigError(
            f"plan: {keys.path('rope_parameters')} and {keys.path('rope_scaling')} disagree. Expected one of them, or both alike. "
            "Remove rope_scaling, the older name."
        )
    given = next((block for block in (new, old) if block is not None and block.data), None)
    fallback = defaults.get("rope_parameters")
    base = keys.number(*FLAT_KEYS) if fallback is None or any(name in keys for name in FLAT_KEYS) else None
    labels = _labels(given, kinds, fallback)
    if labels and given is not None:
        blocks: Blocks = {}
        for key, value in given.data.items():
            if key not in labels and value is not None:
                keys.note(f"{given.path(key)} = {short(value)} beside the blocks is read by nothing here")
        for label in labels:
            inner = given.data.get(label)
            if inner is not None and not isinstance(inner, dict):
                given.fail(label, inner, "an object with keys, or null for layers that do not turn")
            given.read.add(label)
            assumed = fallback.get(label) if isinstance(fallback, dict) else None
            blocks[label] = None if inner is None else _filled(keys, inner, given.path(label), base, assumed, alone=False)
        return blocks
    if isinstance(fallback, dict) and _nested(fallback):
        return _old_nested(keys, family, fallback, given, base)
    if given is None and base is None and fallback is None:
        if family.base is None or family.turns == "none":
            return {}
        keys.note(f"the base is {family.base:g}, written in the code of {keys.model_type!r}")
        return {None: Keys({"rope_theta": family.base}, notes=keys.notes)}
    where = "" if given is None else given.where
    return {None: _filled(keys, {} if given is None else given.data, where, base, fallback, alone=True)}


def _same_block(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    def core(block: Mapping[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in block.items() if v is not None and k not in ("type", "rope_type", "rope_theta")}
        return {**kept, "kind": block.get("rope_type", block.get("type", "default"))}

    return core(a) == core(b)


def _nested(block: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in block.values())


def _labels(given: Keys | None, kinds: list[str], fallback: Mapping[str, Any] | None) -> list[str]:
    if given is None:
        return []
    expected = set(kinds) | (set(fallback) if isinstance(fallback, dict) and _nested(fallback) else set())
    return [
        key
        for key, value in given.data.items()
        if key not in BLOCK_KEYS and (isinstance(value, dict) or (key in expected and value is None))
    ]


def _filled(
    keys: Keys, block: Mapping[str, Any], where: str, base: float | None, fallback: Mapping[str, Any] | None, *, alone: bool
) -> Keys:
    """A block with what stands beside it, and what its class assumes, written in. ``alone``: no other block shares those."""
    data = dict(block)
    inner = data.get("rope_theta")
    if inner is None and base is not None:
        data["rope_theta"] = base
    elif alone and base is not None and inner != base and "rope_theta" in keys and base != keys.defaults.get("rope_theta"):
        raise ConfigError(
            f"plan: {where or 'rope_parameters'}.rope_theta = {short(inner)} but rope_theta = {base!r}. Expected the same base in both "
            "places. Remove the wrong one."
        )
    fallback = fallback or {}
    if data.get("rope_theta") is None and fallback.get("rope_theta") is not None:
        data["rope_theta"] = fallback["rope_theta"]
        keys.note(f"rope_theta is not given: {fallback['rope_theta']:.10g}, the default of {keys.model_type!r}")
    if not block and fallback.get("rope_type", "default") not in ("default", "axial"):
        data = {**fallback, **data}
        keys.note(f"no rotary block is given: {fallback['rope_type']} as {keys.model_type!r} assumes")
    share = keys.number("partial_rotary_factor", "rotary_pct", least=0.0)
    if data.get("partial_rotary_factor") is None:
        if share is not None:
            data["partial_rotary_factor"] = share
        elif fallback.get("partial_rotary_factor") is not None and not (block and keys.model_type in WHOLE_DEFAULTS):
            data["partial_rotary_factor"] = fallback["partial_rotary_factor"]
            if fallback["partial_rotary_factor"] != 1:
                keys.note(
                    f"partial_rotary_factor is not given: {fallback['partial_rotary_factor']:g}, the default of {keys.model_type!r}"
                )
    elif (
        alone
        and share is not None
        and share != data["partial_rotary_factor"]
        and ("partial_rotary_factor" in keys or "rotary_pct" in keys)
    ):
        raise ConfigError(
            f"plan: {where or 'rope_parameters'}.partial_rotary_factor = {short(data['partial_rotary_factor'])} but {share!r} beside it. "
            "Expected the same share in both places. Remove the wrong one."
        )
    if data.get("rope_type") is None and data.get("type") is None and fallback.get("rope_type") == "axial":
        data["rope_type"] = "axial"
    return Keys(data, where, notes=keys.notes)


def _old_nested(keys: Keys, family: Family, fallback: Mapping[str, Any], given: Keys | None, base: float | None) -> Blocks:
    """One base per kind of layer, from the keys of before ``rope_parameters``."""
    blocks: Blocks = {}
    scaling = {} if given is None else {k: v for k, v in given.data.items() if v is not None}
    local = keys.number(family.local) if family.local and family.local != "rope_theta" else base
    outside = keys.number("global_rope_theta") if family.everywhere else base
    for label, assumed in fallback.items():
        if assumed is None:
            blocks[label] = None
            continue
        mine = local if label == "sliding_attention" else outside
        own = {**scaling} if family.everywhere or label not in ("sliding_attention", "main") else {}
        if label == "compress":  # DeepSeek-V4: its scaled layers have a base of their own, and no amplitude
            mine = keys.number("compress_rope_theta")
            if "yarn" in (own.get("rope_type"), own.get("type")):
                own.setdefault("attention_factor", 1.0)
        kind = {k: v for k, v in assumed.items() if k != "rope_type" or not {"type", "rope_type"} & own.keys()}
        data = {**kind, **({"rope_theta": mine} if mine is not None else {}), **own}
        if mine is None and "rope_theta" not in own:
            keys.note(f"the base of {label} is not given: {assumed['rope_theta']:.10g}, the default of {keys.model_type!r}")
        blocks[label] = Keys(data, "" if given is None or not own else given.where, notes=keys.notes)
    return blocks


def canonical(blocks: Blocks) -> dict[str, Any] | None:
    if not blocks:
        return None
    plain = {
        label: None if block is None else {k: v for k, v in block.data.items() if v is not None}
        for label, block in blocks.items()
    }
    for block in plain.values():
        if block is not None:
            block.setdefault("rope_type", block.pop("type", "default"))
            block.pop("type", None)
    return plain[None] if None in plain else {str(label): block for label, block in plain.items()}
