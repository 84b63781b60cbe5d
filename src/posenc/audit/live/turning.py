"""Which layers turn: each attention is asked again with other tables, in a run of a copy."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from posenc.audit.behaviour.runners import Undrivable, runner_of
from posenc.audit.findings import Report
from posenc.audit.kinds.parts import LAYER_PLAN
from posenc.audit.live.layers import layer_modules
from posenc.audit.live.promises import Promises

CHECK = "which layers turn"
TOKENS = 6
TABLE = "position_embeddings"
CACHES = ("cache", "past_key_values", "past_key_value")


def check_turning(model: nn.Module, promises: Promises, *, told: bool) -> Report:
    """Layers whose output changes with the rotary table, against those that the plan says turn.

    A layer that was handed a table need not use it. So each attention is called twice on the same input, the second time
    with the tables of the tokens in reverse: a layer that turns answers something else, one that does not the same bits.

    Args:
        told: whether the layers' own switches have shown the same mistake already.
    """
    subject = type(model).__name__
    if not any(promise.rotations() for promise in promises.made.values()):
        return Report.of(subject)
    turns: dict[str, bool] = {}
    try:
        runner = runner_of(model)
    except Undrivable:  # check_behaviour says why
        return Report.of(subject)
    try:
        hooks = [
            module.register_forward_hook(_asked_again(name, turns), with_kwargs=True)
            for name, module, _, _ in layer_modules(runner.model, promises)
        ]
        ids = torch.tensor([[i for i in range(runner.vocabulary) if i not in runner.reserved][:TOKENS]])
        device = next((parameter.device for parameter in runner.model.parameters()), torch.device("cpu"))
        if hooks and ids.shape[1] == TOKENS:
            runner(ids.to(device))
    except Undrivable as error:
        return Report.of(subject, skipped={CHECK: str(error)})
    if not turns:
        return Report.of(subject, skipped={CHECK: "no attention is called with a rotary table"})
    if not any(turns.values()):  # weights of zero hide what a table does
        return Report.of(subject, skipped={CHECK: "no answer changes with the table"})
    planned = {name: layer.rotation is not None for name, _, _, layer in layer_modules(model, promises) if name in turns}
    wrong = [name for name in planned if planned[name] != turns[name]]
    described = f"{sum(turns.values())} of {len(turns)} layers turn"
    findings = []
    if wrong and not told:
        verb = "turns" if turns[wrong[0]] else "does not turn"
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        findings.append(
            LAYER_PLAN.at(
                wrong[0] + more,
                measured=f"it {verb} when run; {described}",
                expected=f"{sum(planned.values())} of {len(planned)} layers",
            )
        )
    return Report.of(subject, findings, described=[described], checked=[CHECK])


def _asked_again(name: str, turns: dict[str, bool]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given = _named(module, args, kwargs)
        if name in turns or TABLE not in given:
            return
        given |= {cache: None for cache in CACHES if cache in given}
        turned, first = _reversed(given[TABLE]), _first(out)
        if turned is None:
            turns[name] = False
        elif torch.equal(_first(module.forward(**given)), first):  # else it draws, or its numbers are none
            turns[name] = not torch.equal(_first(module.forward(**{**given, TABLE: turned})), first)

    return hook


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a module was called with, by name."""
    names = list(inspect.signature(module.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _reversed(table: Any) -> Any:
    """The tables of the tokens in reverse, in the form in which they came."""
    if isinstance(table, Tensor):
        return table.flip(-2) if table.ndim >= 2 else None
    if isinstance(table, (tuple, list)) and table and all(isinstance(t, Tensor) and t.ndim >= 2 for t in table):
        return tuple(t.flip(-2) for t in table)
    return None


def _first(out: Any) -> Tensor:
    first = out if isinstance(out, Tensor) else out[0]
    assert isinstance(first, Tensor)
    return first
