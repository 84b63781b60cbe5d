"""Where transformers itself makes another table than a configuration stands for; docs/hf-zoo.md shows each."""

from __future__ import annotations

from posenc.hf.families import FAMILIES
from posenc.hf.position_plan import PositionPlan
from posenc.hf.rotation import Rotation
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.geometric import Geometric
from posenc.schedules.longrope import LongRoPE


def deviation(plan: PositionPlan, rotation: Rotation) -> str | None:
    """Why the library's own table of this rotation differs from the plan's; ``None`` where it does not.

    Example:
        >>> from posenc.hf import plan
        >>> llama = plan({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1})
        >>> deviation(llama, llama.layers[0].rotation) is None
        True
    """
    plain = isinstance(rotation.schedule, Geometric)
    match plan.model_type:
        case "phimoe" if isinstance(rotation.schedule, LongRoPE):
            return "PhiMoE never takes its long factors; beyond the original length only the amplitude changes"
        case "deepseek_v4":
            return "a block without partial_rotary_factor turns the whole head; the share of a missing block is 1/8"
        case "mimo_v2_flash" if not plain:
            return "its share of 0.334 counts for plain blocks only; scaled ones turn the whole head"
    family = FAMILIES.get(plan.model_type)
    if family is not None and family.where == "separate":
        return "partial_rotary_factor changes the table's width and not that of the channels that turn, qk_rope_head_dim"
    return None


def remarks(plan: PositionPlan) -> list[str]:
    """What else the library does otherwise, in the plan's own words."""
    found = [note for note in plan.notes if "is not honoured by transformers" in note]
    if any(layer.rotation is not None and isinstance(layer.rotation.schedule, DynamicNTK) for layer, _ in plan.runs):
        found.append(
            "dynamic tables remember: after a long call a medium one keeps its base, until one within the original length"
        )
    return found
