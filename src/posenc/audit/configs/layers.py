"""What is said of layers, one by one, against how many there are."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from posenc.audit.configs.sheet import Sheet, number
from posenc.audit.findings import Finding
from posenc.audit.kinds.configs import LAYERS
from posenc.hf.layers import DEPTH, WINDOW
from posenc.hf.source import short

LISTS = ("layer_types", "no_rope_layers", "layer_rope_theta")
AHEAD = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Layers that predict further tokens: files count them in their lists and not among the layers."""

KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


def layer_lists(sheet: Sheet) -> Iterator[Finding]:
    """Lists of the wrong length, windows that are not there, kinds of layers that are a slip of the pen."""
    depth = number(sheet.keys, *DEPTH)
    ahead = number(sheet.keys, *AHEAD) or 0
    for name in LISTS:
        listed = sheet.keys.get(name)
        if isinstance(listed, list) and depth is not None and len(listed) > depth and len(listed) != depth + ahead:
            if sheet.model_type == "dory" and len(listed) == 2 * depth:  # which count attention and MLP as a layer each
                continue
            yield LAYERS.at(
                sheet.path(name),
                measured=f"{len(listed)} entries for {depth:.0f} layers: the last {len(listed) - depth:.0f} are not used",
                expected=f"one per layer, {depth:.0f}",
            )
    flags = sheet.keys.get("no_rope_layers")
    if isinstance(flags, list) and any(value not in (0, 1) for value in flags):
        yield LAYERS.at(
            sheet.path("no_rope_layers"),
            measured=f"{short(flags)}: numbers of layers, it seems",
            expected="one flag per layer, 1 where it turns and 0 where it does not",
        )
    yield from _kinds(sheet)


def _kinds(sheet: Sheet) -> Iterator[Finding]:
    listed = sheet.keys.get("layer_types")
    named = [kind for kind in listed if isinstance(kind, str)] if isinstance(listed, list) else []
    for kind in dict.fromkeys(named):
        close = [] if kind in KINDS else get_close_matches(kind[:100], KINDS, cutoff=0.9)
        if close:
            yield LAYERS.at(
                sheet.path("layer_types"),
                measured=f"{named.count(kind)} layers of kind {kind[:60]!r}, which is nobody's",
                expected=close[0],
                mend=f"Write {close[0]}.",
            )
    if "sliding_attention" in named and sheet.plan is not None:
        without = sum(count for layer, count in sheet.plan.runs if layer.kind == "sliding_attention" and layer.window is None)
        if without and not sheet.keys.get("per_layer_config"):
            off = sheet.keys.get("use_sliding_window") is False
            yield LAYERS.at(
                sheet.path("use_sliding_window" if off else WINDOW[0]),
                measured=f"{'false' if off else 'no window'}, with {without} layers of kind sliding_attention: they see everything",
                expected="a window in tokens for the layers that slide",
            )
    elif sheet.keys.get("use_sliding_window") is True and not number(sheet.keys, *WINDOW):
        yield LAYERS.at(
            sheet.path(WINDOW[0]),
            measured="not given, though use_sliding_window is true: no layer slides",
            expected="a window in tokens",
        )
