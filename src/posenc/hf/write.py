"""A plan's rotary parameters back into a configuration, in the keys of transformers 4 or 5."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from posenc.errors import ConfigError

if TYPE_CHECKING:
    from posenc.hf.position_plan import PositionPlan

LEGACY = (
    "rope_scaling", "rope_theta", "partial_rotary_factor", "rope_local_base_freq", "global_rope_theta", "local_rope_theta",
    "rotary_pct", "rotary_emb_base",
)  # fmt: skip
OLD_NAMES = {  # model types whose version 4 keys for the base and the share were others
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "gpt_neox_japanese": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
}
LOCAL_BASE = {  # model types with a version 4 key for the base of sliding layers: its name, and that of the others
    **dict.fromkeys(("gemma3_text", "gemma3n_text"), ("rope_local_base_freq", "rope_theta")),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), ("local_rope_theta", "global_rope_theta")),
    "olmo3": ("rope_theta", "rope_theta"),
}


def write_config(plan: PositionPlan, version: int) -> dict[str, Any]:
    """The plan's configuration with its rotary keys in one version's form.

    Raises:
        ConfigError: a version other than 4 or 5, or a rule that version 4 has no keys for.
    """
    if version not in (4, 5) or isinstance(version, bool):
        raise ConfigError(
            f"to_config: version = {version!r}. Expected 4 or 5, the major version of transformers. Pass one of these."
        )
    config = copy.deepcopy(dict(plan.config))
    block = copy.deepcopy(plan.rope_parameters)
    if block is None:
        return config
    home = home_of(config)
    spoken_for = {key: home.pop(key) for key in LEGACY if key in home}
    home.pop("rope_parameters", None)
    if version == 5:
        home["rope_parameters"] = block
    else:
        model_type = home.get("model_type") or plan.model_type
        home.update(_version_4(dict(block), model_type, fixed=spoken_for))
    return config


def home_of(config: dict[str, Any]) -> dict[str, Any]:
    """The object that holds the text model's keys: the configuration, or the part that was read."""
    from posenc.hf.layers import DEPTH, WIDTH
    from posenc.hf.reader import TEXT_PARTS

    inside = next((name for name in TEXT_PARTS if isinstance(config.get(name), dict)), None)
    if inside is None or any(config.get(name) is not None for name in (*DEPTH, *WIDTH)):
        return config
    return home_of(config[inside])


def _version_4(block: dict[str, Any], model_type: str, fixed: dict[str, Any]) -> dict[str, Any]:
    nested = any(isinstance(value, dict) or value is None for value in block.values())
    if nested:
        return _version_4_nested(block, model_type)
    base, share = block.pop("rope_theta", None), block.pop("partial_rotary_factor", None)
    names = OLD_NAMES.get(model_type, {})
    written: dict[str, Any] = {}
    if base is not None:
        written[names.get("rope_theta", "rope_theta")] = base
    if block.get("rope_type") == "proportional":
        raise ConfigError("to_config: rope_type 'proportional' in version 4. Expected a type that it knows. Write version 5.")
    if share is not None:
        written[names.get("partial_rotary_factor", "partial_rotary_factor")] = share
    plain = block.get("rope_type", "default") in ("default", "axial") and len(block) == 1
    written["rope_scaling"] = None if plain else block
    return written


def _version_4_nested(block: dict[str, Any], model_type: str) -> dict[str, Any]:
    kinds = {"sliding_attention", "full_attention"}
    local_key, other_key = LOCAL_BASE.get(model_type, ("", ""))
    unsaid = not local_key or set(block) != kinds or None in block.values()
    if unsaid or (local_key == other_key and len({inner.get("rope_theta") for inner in block.values()}) > 1):
        raise ConfigError(
            f"to_config: rope_parameters with a block for each of {', '.join(block)} in version 4 of {model_type!r}. Expected one block for "
            "all layers, or a model with an old key for the base of sliding layers. Write version 5."
        )
    sliding, full = dict(block["sliding_attention"]), dict(block["full_attention"])
    written = {local_key: sliding.pop("rope_theta"), other_key: full.pop("rope_theta")}
    if sliding.get("rope_type", "default") != "default":
        raise ConfigError(
            "to_config: scaled sliding layers in version 4. Expected scaling of full-attention layers only. Write version 5."
        )
    written["rope_scaling"] = None if full == {"rope_type": "default"} else full
    return written
