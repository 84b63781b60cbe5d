"""`audit`: the positions of a live model, against what its configuration promises and against what they should do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from posenc.audit.behaviour.checking import check_behaviour
from posenc.audit.findings import Report
from posenc.audit.kinds.parts import LAYER_PLAN, UPSTREAM_DEVIATION
from posenc.audit.live.cached import check_cached
from posenc.audit.live.deviations import remarks
from posenc.audit.live.layers import check_layers, check_masks
from posenc.audit.live.learned import check_bias_tables, check_learned, is_learned
from posenc.audit.live.parts import Part, encodings, named_like_positions, patched, position_tensors
from posenc.audit.live.plain import check_kept, check_numbers, read_ladders
from posenc.audit.live.promises import Promises
from posenc.audit.live.sinusoids import check_sinusoids
from posenc.audit.live.slopes import check_slopes
from posenc.audit.live.tables import compare_rotary
from posenc.audit.live.turning import check_turning

NONE = "no positions: no rotary module, table or bias was found"


def audit(
    model: nn.Module,
    *,
    behaviour: Literal["run", "skip"] = "run",
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Find what is wrong with the positions of a live model: transformers models, posenc's, and plain PyTorch.

    The thing people get wrong: looking at the configuration. What turns queries and keys is a table in memory, which a
    cast rounds, ``to_empty`` loses, a rebuilt module replaces; the text stays fluent and gets worse. Here every live
    table is held against what the configuration promises, and then the model is asked whether padding, packing and the
    cache change what it says.

    The model is left as it was: what runs is a copy. Of a model too large to copy, or with weights on the meta device, only
    the position parts are read.

    Args:
        behaviour: ``"run"`` also runs the model on a few short inputs; ``"skip"`` reads tables only.
        progress: called with what is done next, in a few words.

    Returns:
        A `Report`. One without any position parts says so.

    Raises:
        TypeError: not a module.
        ValueError: an unknown ``behaviour``.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaModel
        >>> model = LlamaModel(LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                                num_attention_heads=2))
        >>> audit(model, behaviour="skip").findings
        ()
        >>> audit(model.to(torch.bfloat16), behaviour="skip").ids
        ('frequency-rounded',)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit: a {type(model).__name__}. Expected a torch.nn.Module. Load the model first.")
    if behaviour not in ("run", "skip"):
        raise ValueError(f"audit: behaviour = {behaviour!r}. Expected 'run' or 'skip'. Pass 'skip' to read tables only.")
    tell = progress or (lambda step: None)
    promises = Promises(model)
    report = _static(model, promises, tell)
    if behaviour == "skip":
        return report + Report.of(report.subject, skipped={"behaviour": "asked to read tables only"})
    if report.described == (NONE,) and promises.made:
        return report + Report.of(report.subject, skipped={"behaviour": "a model without positions"})
    tell("asking which layers turn")
    report += check_turning(model, promises, told=LAYER_PLAN.id in report.ids)
    return report + check_behaviour(model, plan=promises.main, progress=progress)


def _static(model: nn.Module, promises: Promises, tell: Callable[[str], None]) -> Report:
    """What tables, layers and interfaces say without a forward."""
    described, findings, checked = [], [], []
    skipped = {f"the promise of {name or 'the model'}": reason for name, reason in promises.refused.items()}
    for promise in promises.distinct:
        described += promise.lines
        findings += [
            UPSTREAM_DEVIATION.at(promise.owner or type(model).__name__, measured=note, expected="what the configuration says")
            for note in remarks(promise.plan)
        ]
    described += [f"{name}: posenc's tables, float64 angles" for name in patched(model)]
    described += [f"{name or 'the model'}: posenc.{module!r}".replace("\n", " ") for name, module in encodings(model)]

    tell("comparing rotary tables")
    with torch.random.fork_rng(devices=[]):  # classes that are built anew may draw
        rotary = compare_rotary(model, promises)
    findings += rotary.findings
    described += rotary.described
    skipped |= rotary.skipped
    checked += ["rotary frequencies", "rotary tables"] if rotary.compared else []

    tell("reading position tables")
    parts = list(position_tensors(model))
    free = [part for part in parts if part.owner not in rotary.compared]
    unread = [part for part in parts if part.owner not in rotary.compared or not part.attribute.endswith("inv_freq")]
    read, rounded = read_ladders(free)
    findings += [*check_kept(parts), *check_numbers(unread, loaded=rotary.loaded), *rounded, *check_learned(parts, promises)]
    for words, faults in (check_sinusoids(free, promises), check_slopes(free, promises), check_cached(free)):
        read += words
        findings += faults
    described += read
    described += [f"{part.name}: {' × '.join(map(str, part.tensor.shape))}, learned" for part in parts if is_learned(part)]
    checked += ["how tables are kept", "position tables"] if parts else []

    tell("comparing layers")
    findings += [*check_bias_tables(model, promises), *check_layers(model, promises), *check_masks(model)]
    checked += ["layers", "masks"] if promises.made else []
    described += _undescribed(model, parts, described)
    described = described or [NONE]
    return Report.of(type(model).__name__, findings, described=described, checked=checked, skipped=skipped)


def _undescribed(model: nn.Module, parts: list[Part], described: list[str]) -> list[str]:
    """What is named like positions and no check had a word for."""
    tables = [(part.name, " × ".join(map(str, part.tensor.shape))) for part in parts if not part.attribute.endswith("inv_freq")]
    classes = [(name or "the model", type(module).__name__) for name, module in named_like_positions(model)]
    lines = list(described)
    for name, text in (*tables, *classes):
        if not any(line.startswith((f"{name}.", f"{name}:", f"{name} (")) for line in lines):
            lines.append(f"{name}: {text}")
    return lines[len(described) :]
