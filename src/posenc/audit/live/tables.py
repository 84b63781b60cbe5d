"""Live rotary modules against what the configuration promises: their frequencies, and the tables that they return."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor, nn

from posenc.audit.findings import Finding
from posenc.audit.kinds.frequencies import FREQUENCY_WIDTH
from posenc.audit.kinds.parts import LAYER_BASE, TABLE_ON_META, UPSTREAM_DEVIATION
from posenc.audit.live.deviations import deviation
from posenc.audit.live.ladders import ladder_findings
from posenc.audit.live.parts import ladders, layer_of, rotary_parts
from posenc.audit.live.promises import Promise, Promises
from posenc.audit.live.returned import fresh_module, table_findings
from posenc.hf.describe import words
from posenc.hf.rotation import Rotation


@final
@dataclass
class Seen:
    """What a comparison found, on the way to a report.

    Args:
        loaded: whether any weight of the model has values.
        compared: names of the modules that were.
    """

    loaded: bool = True
    compared: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    described: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def compare_rotary(model: nn.Module, promises: Promises) -> Seen:
    """Every rotary module of a model against its promise.

    A module that stands in a layer makes that layer's table, one with several blocks those of their layers. Modules that
    layers share make a table each: then every rotation that the configuration promises has to be made by one of them.
    """
    seen = Seen(loaded=any(not parameter.is_meta for parameter in model.parameters()))
    shared: dict[str, list[tuple[str, nn.Module]]] = {}
    modules = list(rotary_parts(model))
    for name, module in modules:
        promise = promises.of(name)
        if promise is None:
            continue
        if any(True for _ in module.parameters(recurse=False)):
            seen.skipped[f"tables of {name}"] = "its frequencies are learned: a configuration does not hold them"
        elif not promise.rotations():
            seen.skipped[f"tables of {name}"] = f"no layer of {promise.plan.model_type!r} uses it"
        elif (index := layer_of(name)) is not None and index < len(promise.plan.layers):
            rotation = promise.plan.layers[index].rotation
            if rotation is not None:
                _compare(name, module, promise, {None: [rotation]}, seen)
        else:
            shared.setdefault(promise.owner, []).append((name, module))
    for owner, group in shared.items():
        _compare_shared(group, promises.made[owner], seen)
    return seen


def _compare_shared(group: list[tuple[str, nn.Module]], promise: Promise, seen: Seen) -> None:
    """Modules that several layers share: those that fit no promise are wrong if a promise is left that none fits."""
    left = list(promise.rotations())
    wrong = []
    for name, module in group:
        labels = {ladder.label for ladder in ladders(name, module)} or {None}
        if labels != {None}:
            _compare(name, module, promise, {label: promise.rotations(label) for label in labels}, seen)
            continue
        made = [rotation for rotation in promise.rotations() if not ladder_findings(name, module, promise, [rotation])]
        left = [rotation for rotation in left if rotation not in made]
        if made:
            _compare(name, module, promise, {None: made}, seen)
        else:
            wrong.append((name, module))
    if not left:
        return
    for name, module in wrong:
        _compare(name, module, promise, {None: left}, seen)
    if not wrong and len(group) > 1:
        names = ", ".join(name for name, _ in group)
        seen.findings += [
            LAYER_BASE.at(names, measured=f"none of them makes {words(r.schedule)}", expected="one that does") for r in left
        ]


def _compare(name: str, module: nn.Module, promise: Promise, wanted: dict[str | None, list[Rotation]], seen: Seen) -> None:
    seen.compared.add(name)
    for label, rotations in wanted.items():
        if not rotations:  # a block that no layer reads
            continue
        tensors = [*module.buffers(recurse=False), *(t for t in vars(module).values() if isinstance(t, Tensor))]
        if any(tensor.is_meta for tensor in tensors):
            if seen.loaded:
                seen.findings.append(TABLE_ON_META.at(name, measured="tables without values", expected="tables on a device"))
            else:
                seen.skipped[f"tables of {name}"] = "on the meta device: they have no values yet"
            return
        found = ladder_findings(name, module, promise, rotations, label)
        if not found:
            finding, described, reason = table_findings(name, module, promise, rotations, label)
            found = [] if finding is None else [finding]
            seen.described += described
            if reason is not None:
                seen.skipped[f"table of {name}" if label is None else f"table of {name} ({label})"] = reason
        known = deviation(promise.plan, rotations[0])
        if found and known is not None and _is_as_built(module, promise):
            found = [UPSTREAM_DEVIATION.at(f.where, measured=f.measured, expected=f"{f.expected}: {known}") for f in found]
        if promise.guessed:  # a share of the head may stand under a key of its own
            found = [replace(f, severity="note") if f.id == FREQUENCY_WIDTH.id else f for f in found]
        seen.findings += found


def _is_as_built(module: nn.Module, promise: Promise) -> bool:
    """Whether a class of transformers itself makes this table of this configuration."""
    if not type(module).__module__.startswith("transformers."):
        return False
    fresh = fresh_module(module, promise)
    if fresh is None:
        return False
    pairs = zip(ladders("", module), ladders("", fresh), strict=False)
    return all(torch.equal(a.inv_freq.cpu(), b.inv_freq) and a.amplitude == b.amplitude for a, b in pairs)
