"""Whether positions reach the outputs, which way tokens see, and whether distances alone count."""

from __future__ import annotations

import torch

from posenc.audit.behaviour.probe import Outcome, Probe, apart, percent, tables
from posenc.audit.behaviour.runner import Undrivable
from posenc.audit.findings import Severity
from posenc.audit.kinds.behaviour import FUTURE_LEAK, POSITIONS_IGNORED, SHIFT_DEPENDENCE

_NOTHING = 2.0**-14
"""In float64, of the tolerance of float32: rounding is 2⁻²⁹ of it, and parts kept in float32 seldom round otherwise."""


def causality(probe: Probe) -> Outcome:
    """A later token is changed; earlier answers stay."""
    leak, reach = probe.sees
    if leak <= probe.tolerance:
        yield "causal" if reach > probe.tolerance else "tokens do not change each other's answers"
        return
    promised = probe.runner.promises_causal
    if promised is None and "cache" in probe.runner.takes:
        promised = probe.runner(probe.ids[:1], keep=True).cache is not None
    if promised:
        yield FUTURE_LEAK.at(
            probe.name,
            measured=f"changing a later token moves earlier answers by {percent(leak)}",
            expected=f"no change, to {percent(probe.tolerance)}",
        )
    else:
        yield "bidirectional"


def positions(probe: Probe) -> Outcome:
    """Other positions, or tokens in another order, change the answers."""
    if probe.sees[1] <= probe.tolerance:
        raise Undrivable("tokens do not change each other's answers")
    by_plan = _by_plan(probe)
    if "positions" in probe.runner.takes and not (by_plan is not None and by_plan <= {"bias"}):
        if probe.effect > probe.tolerance:
            yield f"shuffled positions move the answers by {percent(probe.effect)}"
        elif probe.effect == 0.0 and (by_plan or by_plan is None):
            yield POSITIONS_IGNORED.at(
                probe.name,
                measured=f"shuffled positions give the same answers bit by bit ({probe.n} tokens)",
                expected="other answers" if by_plan is None else f"other answers: the model has {', '.join(sorted(by_plan))}",
                severity=_grave(probe, by_plan),
            )
        else:
            yield f"shuffled positions move the answers by {percent(probe.effect)}: padding and packing say little at these weights"
        return
    if by_plan == set():
        yield "no positions: what order there is comes from causality or recurrence"
        return
    yield from _order(probe, by_plan)


def _grave(probe: Probe, by_plan: set[str] | None) -> Severity | None:
    """An error against a plan; without one a warning, but a note where a library's forward takes what it does not use."""
    if by_plan:
        return None
    return "note" if hasattr(getattr(probe.runner.model, "config", None), "to_dict") else "warning"


def _order(probe: Probe, by_plan: set[str] | None) -> Outcome:
    """For models that take no positions: tokens in another order, and one token repeated."""
    n = probe.n
    turned = probe.ids[:1].clone()
    turned[:, :-1] = probe.ids[:1, :-1].roll(1, 1)
    if apart(probe.runner(turned).scores[:, -1], probe.answer[:, -1]) <= probe.tolerance:
        exact = probe.exact(probe.ids[:1]).scores[:, -1]
        if apart(probe.exact(turned).scores[:, -1], exact) > _NOTHING * probe.tolerance:
            yield "the order of tokens hardly changes the answers"
        elif by_plan is None or by_plan:
            yield POSITIONS_IGNORED.at(
                probe.name,
                measured=f"{n - 1} tokens in another order leave the last answer as it is",
                expected="another answer",
                severity=None if by_plan else "warning",  # some mean it: sets have no order
            )
        return
    if _reads_table(probe) if by_plan is None else "an input table" in by_plan:
        same = probe.exact(probe.ids[:1, :1].repeat(1, n)).scores[0]
        if apart(same, same[:1].expand_as(same)) <= _NOTHING * probe.tolerance:
            yield POSITIONS_IGNORED.at(
                probe.name,
                measured=f"one token repeated {n} times is answered the same at every place",
                expected="other answers: the model has a table of positions",
            )
            return
    yield "the order of tokens changes the answers"


@torch.no_grad()
def _reads_table(probe: Probe) -> bool:
    """Whether the answers move when what looks like a table of positions is changed, in the copy."""
    for table in tables(probe.runner.model):
        kept = table.clone()
        table.add_(torch.linspace(-1, 1, table.numel(), dtype=table.dtype, device=table.device).reshape(table.shape).sin())
        moved = apart(probe.runner(probe.ids[:1]).scores, probe.answer)
        table.copy_(kept)
        if moved > probe.tolerance:
            return True
    return False


def _by_plan(probe: Probe) -> set[str] | None:
    """What acts on positions by the plan, in words."""
    if probe.plan is None:
        return None
    found = {"an input table"} if probe.plan.input is not None else set()
    for layer, _ in probe.plan.runs:
        found |= {"a rotation"} if layer.rotation is not None else set()
        found |= {"bias"} if layer.bias is not None else set()
    return found


def distances(probe: Probe) -> Outcome:
    """All positions are shifted by the same number."""
    probe.takes("positions")
    if probe.effect <= probe.tolerance:
        raise Undrivable("its answers do not move with positions")
    if probe.shift <= probe.tolerance:
        yield "relative: a shift of all positions changes nothing"
        return
    yield f"absolute: a shift of all positions moves the answers by {percent(probe.shift)}"
    if probe.plan is None or probe.plan.input is not None or probe.rules or "a rotation" not in (_by_plan(probe) or ()):
        return
    if any(layer.temperature is not None or layer.chunk is not None for layer, _ in probe.plan.runs):
        return
    yield SHIFT_DEPENDENCE.at(
        probe.name,
        measured=f"all positions shifted by 5 move the answers by {percent(probe.shift)}",
        expected=f"no change, to {percent(probe.tolerance)}: rotary positions enter by their distance",
    )
