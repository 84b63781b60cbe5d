"""`check_behaviour`: what a whole model does with padding, packing, caches, call order and lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from posenc.audit.behaviour.decoding import chunks, decoding
from posenc.audit.behaviour.known import settle
from posenc.audit.behaviour.lengths import call_order, ends, length_rules
from posenc.audit.behaviour.padding import batch, left_padding, packing, right_padding
from posenc.audit.behaviour.positions import causality, distances, positions
from posenc.audit.behaviour.probe import TOKENS, Outcome, Probe, apart
from posenc.audit.behaviour.runner import Runner, Undrivable
from posenc.audit.behaviour.runners import runner_of
from posenc.audit.findings import Finding, Report
from posenc.audit.kinds.behaviour import CHUNKED_PREFILL, LEFT_PADDING, RIGHT_PADDING
from posenc.errors import ConfigError
from posenc.hf.position_plan import PositionPlan
from posenc.hf.position_plan import plan as read_plan

CHECKS: dict[str, Callable[[Probe], Outcome]] = {
    "call order": call_order,
    "causality": causality,
    "positions": positions,
    "distances": distances,
    "batch": batch,
    "right padding": right_padding,
    "left padding": left_padding,
    "packing": packing,
    "decoding": decoding,
    "chunked prefill": chunks,
    "length rules": length_rules,
    "ends of tables": ends,
}
"""In this order: the first needs a model that has seen no length, the last two may leave it changed."""

_OF_ONE_LENGTH = {"batch", "right padding", "left padding", "packing", "decoding", "chunked prefill"}
_OF_STATES = {kind.id for kind in (LEFT_PADDING, RIGHT_PADDING, CHUNKED_PREFILL)}


def check_behaviour(
    model: nn.Module, *, plan: PositionPlan | None = None, seed: int = 0, progress: Callable[[str], None] | None = None
) -> Report:
    """Run a model on a few tiny inputs and report where its answers depend on what they should not.

    The thing people get wrong: positions come from the caller as often as from the model. Padding in front, documents
    packed into one row, a cache, a prompt in chunks: each needs positions that count real tokens, and a model that gets
    others answers fluently and wrong. Here the same tokens are asked for in all these ways, and the answers compared.

    A copy of the model is run, in evaluation mode and at least float32, without gradients; the model itself, its
    buffers and the random state stay as they are. What a forward takes is read from its argument names: ids,
    ``attention_mask``, ``position_ids`` (``positions``), ``segment_ids`` (``document_ids``), ``past_key_values``
    (``cache``), ``use_cache``. Two answers are the same if they differ by rounding alone: 32 · (layers + 1) · √width unit
    roundoffs of float32, relative to their norm. What differs is asked for again with other ids before it is reported.

    Args:
        model: takes ids ``[batch, seq]`` and answers logits or hidden states ``[batch, seq, width]``.
        plan: what its configuration promises; read from ``model.config`` by default.
        seed: of the random ids.
        progress: called with the name of each check before it runs.

    Returns:
        A `Report`. A model that cannot be called this way has its reason under ``skipped``.

    Raises:
        TypeError: not a module.

    Example:
        >>> from posenc import RoPE, Transformer
        >>> report = check_behaviour(Transformer(32, dim=16, layers=2, heads=2, encodings=[RoPE(8)]))
        >>> report.findings
        ()
        >>> "relative: a shift of all positions changes nothing" in report.described
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"check_behaviour: a {type(model).__name__}. Expected an nn.Module that takes ids. Load the model first."
        )
    name = type(model).__name__
    config = getattr(model, "config", None)
    plan = _plan(config) if plan is None else plan
    devices = sorted({tensor.device.index or 0 for tensor in model.parameters() if tensor.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        try:
            probe = _probe(runner_of(model), plan, name, seed)
        except Undrivable as reason:
            return Report.of(name, skipped={"behaviour": str(reason)})
        report = examine(probe, lambda: _probe(runner_of(model), plan, name, seed + 1), progress)
    return Report.of(
        name,
        [_weighed(finding, probe) for finding in settle(list(report.findings), getattr(config, "model_type", None))],
        described=(_takes(probe.runner), *report.described) if report.checked else (),
        checked=report.checked,
        skipped=report.skipped,
    )


def examine(probe: Probe, another: Callable[[], Probe], progress: Callable[[str], None] | None) -> Report:
    """All checks; what one finds must be found again on a fresh copy with other ids."""
    findings: list[Finding] = []
    described: list[str] = []
    checked: list[str] = []
    skipped: dict[str, str] = {}
    for name, check in CHECKS.items():
        if progress is not None:
            progress(name)
        if name in _OF_ONE_LENGTH and any(length < probe.n for _, length in probe.rules):
            skipped[name] = "its length rule switches within so few tokens"
            continue
        try:
            found, words = _outcome(check, probe)
            if found:
                again = {finding.id for finding in _outcome(check, another())[0]}
                found = [finding for finding in found if finding.id in again]
        except Undrivable as undrivable:
            skipped[name] = str(undrivable)
            found, words = [], []
        if name == "call order" and (reason := _unfit(probe)):
            return Report.of("", skipped={"behaviour": reason})
        if name in skipped:
            continue
        findings += found
        described += words
        checked.append(name)
    return Report.of("", findings, described=described, checked=checked, skipped=skipped)


def _weighed(finding: Finding, probe: Probe) -> Finding:
    """Of models with a state: padding and pieces change the state, which is no matter of positions."""
    if not probe.recurrent or finding.id not in _OF_STATES or finding.severity == "note":
        return finding
    measured = f"{finding.measured}; some layers carry a state from token to token"
    return replace(finding, severity="note", measured=measured)


def _outcome(check: Callable[[Probe], Outcome], probe: Probe) -> tuple[list[Finding], list[str]]:
    yielded = list(check(probe))
    return [one for one in yielded if isinstance(one, Finding)], [one for one in yielded if isinstance(one, str)]


def _unfit(probe: Probe) -> str | None:
    """Why answers cannot be compared: not finite, zero, not the same twice bit by bit, or of another axis."""
    try:
        if not torch.equal(probe.answer, probe.runner(probe.ids[:1]).scores):
            return "two equal calls differ: it draws random numbers, or keeps a state"
        if max(probe.sees) <= probe.tolerance < apart(probe.runner(probe.ids).scores[0], probe.answer[0]):
            return "rows meet and the tokens of a row do not: it takes [seq, batch]; wrap it to take [batch, seq]"
    except Undrivable as reason:
        return str(reason)
    return None


def _probe(runner: Runner, plan: PositionPlan | None, name: str, seed: int) -> Probe:
    dice = torch.Generator().manual_seed(seed)
    some = torch.randint(1, max(runner.vocabulary, 2), (4096,), generator=dice).unique()
    usable = some[~torch.isin(some, torch.tensor(sorted(runner.reserved), dtype=torch.int64))]
    if len(usable) < 4:
        raise Undrivable(f"a vocabulary of {runner.vocabulary} ids is too small to tell tokens apart")
    device = next((tensor.device for tensor in runner.model.parameters()), torch.device("cpu"))

    def draw(n: int) -> tuple[Tensor, Tensor]:
        at = torch.randint(len(usable), (3, n), generator=dice)
        return usable[at].to(device), usable[(at + 1) % len(usable)].to(device)

    reason: Undrivable | None = None
    for n in (TOKENS, 8, 6):
        ids, others = draw(n)
        probe = Probe(name, runner, plan, ids, others)
        try:
            if probe.rows is None or probe.rows >= n:
                runner(ids[:1, :2])  # shorter than any check, so that no length is remembered
                return probe
        except Undrivable as error:
            reason = error
    raise reason or Undrivable(f"its table holds {probe.rows} positions: too few to ask about")


def _plan(config: Any) -> PositionPlan | None:
    if not hasattr(config, "to_dict"):
        return None
    try:
        return read_plan(config)
    except (ConfigError, ValueError, TypeError):
        return None


def _takes(runner: Runner) -> str:
    names = {"mask": "a mask of padding", "positions": "positions", "segments": "documents", "cache": "a cache"}
    return "takes " + ", ".join(["ids", *(words for what, words in names.items() if what in runner.takes)])
