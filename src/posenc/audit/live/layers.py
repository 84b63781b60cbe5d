"""What layers say of themselves against the plan: whether they turn, how far they see; and their attention's mask."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from posenc.audit.findings import Finding
from posenc.audit.kinds.parts import LAYER_PLAN, LAYER_WINDOW, MASK_NOT_REGISTERED
from posenc.audit.live.parts import layer_of, walk
from posenc.audit.live.promises import Promise, Promises
from posenc.hf.position_plan import LayerPlan

ATTENTION = re.compile(r"^(?!.*Cross).*(Attention|Attn|MLA)")
"""What classes that attend to their own sequence are called."""

SWITCHES = ("use_rope", "use_rotary", "apply_rope", "has_rope")
"""What attention modules call the switch of their rotation."""


def layer_modules(model: nn.Module, promises: Promises) -> Iterator[tuple[str, nn.Module, Promise, LayerPlan]]:
    """The attention modules of layers, the innermost of each, with their layer's plan."""
    named = {name: module for name, module in walk(model) if ATTENTION.search(type(module).__name__)}
    outer = {name for name in named for other in named if other.startswith(f"{name}.")}
    for name, module in named.items():
        promise, index = promises.of(name), layer_of(name)
        if index is None:
            index = getattr(module, "layer_idx", None)
        if promise is None or not isinstance(index, int) or name in outer:
            continue
        if 0 <= index < len(promise.plan.layers):
            yield name, module, promise, promise.plan.layers[index]


def check_layers(model: nn.Module, promises: Promises) -> Iterator[Finding]:
    """Switches and windows of the layers against the plan."""
    per_owner: dict[str, list[tuple[str, nn.Module, LayerPlan]]] = {}
    for name, module, promise, layer in layer_modules(model, promises):
        per_owner.setdefault(promise.owner, []).append((name, module, layer))
    for layers in per_owner.values():
        yield from _turning(layers)
        yield from _windows(layers)


def _turning(layers: list[tuple[str, nn.Module, LayerPlan]]) -> Iterator[Finding]:
    wrong = [
        (name, bool(switch))
        for name, module, layer in layers
        if (switch := _switch(module)) is not None and bool(switch) != (layer.rotation is not None)
    ]
    if wrong:
        planned = sum(layer.rotation is not None for _, _, layer in layers)
        live = sum(bool(switch) for _, module, _ in layers if (switch := _switch(module)) is not None)
        verb = "turns" if wrong[0][1] else "does not turn"
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        yield LAYER_PLAN.at(
            wrong[0][0] + more,
            measured=f"it {verb}; {live} of {len(layers)} layers turn",
            expected=f"{planned} of {len(layers)} layers",
        )


def _switch(module: nn.Module) -> Any:
    return next((value for key in SWITCHES if isinstance(value := getattr(module, key, None), (bool, int))), None)


def _windows(layers: list[tuple[str, nn.Module, LayerPlan]]) -> Iterator[Finding]:
    """Windows that modules keep themselves. Where no layer keeps ``None``, the mask decides and the number says nothing."""
    tells = any(getattr(module, "sliding_window", 0) is None for _, module, _ in layers)
    kinds = {layer.kind for _, _, layer in layers}
    for name, module, layer in layers:
        own = getattr(module, "layer_type", getattr(module, "attention_type", None))
        if own in kinds and own != layer.kind:
            yield LAYER_WINDOW.at(name, measured=f"a layer of kind {own!r}", expected=repr(layer.kind))
            continue
        window = getattr(module, "sliding_window", 0)  # 0: it keeps none
        if window == 0 or not isinstance(window, (int, type(None))):
            continue
        lost = window is None and layer.window is not None
        gained = window is not None and layer.window is None and tells and layer.chunk is None
        other = window is not None and layer.window is not None and layer.window not in _readings(window)
        if lost or gained or other:
            yield LAYER_WINDOW.at(name, measured=_tokens(window), expected=_tokens(layer.window))


def _readings(window: int) -> set[int]:
    """What a module's number can mean: all that a query sees, one more, or the tokens on each side."""
    return {window, window - 1, window + 1, 2 * window - 1, 2 * window + 1}


def _tokens(window: int | None) -> str:
    return "no window" if window is None else f"a window of {window:,} tokens"


def check_masks(model: nn.Module) -> Iterator[Finding]:
    """Attention functions that transformers makes no mask for; looked up in what is imported already."""
    modeling, masking = (sys.modules.get(f"transformers.{name}") for name in ("modeling_utils", "masking_utils"))
    attentions = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None)
    masks = getattr(masking, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    if attentions is None or masks is None:
        return
    told = set()
    for name, module in model.named_modules():
        chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if not isinstance(chosen, str) or chosen in told or chosen.startswith("paged|"):
            continue
        told.add(chosen)
        if chosen in attentions and chosen not in masks:
            yield MASK_NOT_REGISTERED.at(
                name or type(module).__name__,
                measured=f"attention {chosen!r} in the attention interface, and nothing in the mask interface",
                expected=f"a mask function registered as {chosen!r}",
            )
