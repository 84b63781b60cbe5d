"""Answers do not depend on earlier calls, on neighbours' lengths, or on rows that a table does not have."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.audit.behaviour.decoding import in_pieces_from
from posenc.audit.behaviour.probe import Outcome, Probe, apart, percent
from posenc.audit.behaviour.runner import Undrivable
from posenc.audit.kinds.behaviour import BATCH_DEPENDENCE, CALL_ORDER, LENGTH_RULE_CACHE, PAST_THE_END

LONG = 24
"""Tokens of the long call."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_length", "block_size", "context_length", "n_ctx")


def call_order(probe: Probe) -> Outcome:
    """Short, long, short; this is the first check, so the model has seen no length before."""
    short, runner = probe.short, probe.runner
    before = runner(probe.ids[:1, :short]).scores
    size = LONG if probe.rows is None else min(LONG, probe.rows)
    try:
        runner(probe.ids[:2].reshape(1, -1)[:, :size])
    except Undrivable:  # fewer tokens fit
        size = probe.n
        runner(probe.ids[:1])
    off = apart(runner(probe.ids[:1, :short]).scores, before)
    if off > probe.tolerance:
        yield CALL_ORDER.at(
            f"{probe.name}, {short} tokens before and after a call with {size}",
            measured=f"the second answer differs from the first: {percent(off)}",
            expected="the same answer: nothing is given that the first call did not have",
        )


def length_rules(probe: Probe) -> Outcome:
    """On both sides of the length at which frequencies switch: cached, beside a longer row, after a longer call."""
    if not probe.rules:
        raise Undrivable("its plan has no rule that depends on the length" if probe.plan is not None else "no plan is known")
    probe.takes("positions")
    runner, ids, n = probe.runner, probe.ids[:1], probe.n
    for rule, length in probe.rules:
        first = max(length - n // 2, 0)
        where = f"{probe.name}, {rule} from {length} tokens on"
        fresh = runner(ids, positions=probe.counted(first)).scores
        within = runner(ids, positions=probe.counted(0)).scores
        if "cache" in runner.takes and probe.causal:
            _across(probe, first)  # once, so that rules which remember the longest call start from the same state
            off = apart(_across(probe, first), fresh[0])
            if off > probe.tolerance:
                yield f"keys cached below {length} tokens do not follow {rule}"
                yield LENGTH_RULE_CACHE.at(
                    where,
                    measured=f"decoding across the switch differs from one full pass: {percent(off)}",
                    expected="the answers of one full pass, or one length for the whole sequence",
                    severity="note",
                )
        both = torch.cat([probe.counted(0), probe.counted(4 * length)])
        off = apart(runner(probe.ids[:2], positions=both).scores[0], within[0])
        if off > probe.tolerance:
            yield BATCH_DEPENDENCE.at(
                where,
                measured=f"a short row beside one at positions past {4 * length} differs from the row alone: {percent(off)}",
                expected="lengths taken per row; this rule of the model's library takes one over the batch",
                severity="note",
            )
        runner(ids, positions=probe.counted(4 * length))
        off = apart(runner(ids, positions=probe.counted(first)).scores, fresh)
        if off > probe.tolerance:
            yield CALL_ORDER.at(
                where,
                measured=f"after a call at positions past {4 * length} the same input differs: {percent(off)}",
                expected="the same answer; this rule of the model's library remembers the longest call",
                severity="note",
            )


def _across(probe: Probe, first: int) -> Tensor:
    prompt = probe.n // 2
    probe.runner(probe.ids[:1], positions=probe.counted(0))
    return in_pieces_from(probe, (prompt, *(1 for _ in range(probe.n - prompt))), first)


def ends(probe: Probe) -> Outcome:
    """The last promised length is taken; positions before the first and past the last row are not answered in silence."""
    if probe.device.type != "cpu":
        raise Undrivable("an index outside a table would stop the device")
    advertised = _advertised(probe)
    if advertised is not None and probe.n <= advertised <= 128:
        try:
            probe.runner(probe.ids.reshape(1, -1).repeat(1, 128)[:, :advertised])
        except Undrivable as error:
            fits = _fits(probe, advertised)
            behind = probe.first > 0
            yield f"{fits} tokens fit, of {advertised} that its configuration names"
            yield PAST_THE_END.at(
                f"{probe.name}, {advertised} tokens",
                measured=f"{fits} tokens are answered; with {advertised}, {error}",
                expected=f"{advertised} tokens, as the model says"
                + (f"; its positions start at {probe.first}, behind the padding" if behind else ""),
                severity="note" if behind and probe.plan is not None else None,  # a family's old convention
            )
    if "positions" not in probe.runner.takes or probe.rows is None or probe.effect <= probe.tolerance:
        return
    if probe.shift <= probe.tolerance:
        return
    yield from _outside(probe, probe.rows + probe.first)


def _outside(probe: Probe, rows: int) -> Outcome:
    def at(position: int) -> Tensor | None:
        where = probe.counted(0)
        where[:, -1] = position
        try:
            return probe.runner(probe.ids[:1], positions=where).scores[0, -1:]
        except Undrivable:
            return None

    for position, twin, how in ((rows, rows - 1, "clamped"), (rows, 0, "wrapped"), (-1, rows - 1, "wrapped")):
        answer, other = at(position), at(twin)
        if answer is not None and other is not None and apart(answer, other) <= probe.tolerance:
            yield PAST_THE_END.at(
                f"{probe.name}, position {position} of a table with {rows} rows",
                measured=f"answered like position {twin}: the index is {how}",
                expected="an error that names the position and the rows",
            )
            return


def _advertised(probe: Probe) -> int | None:
    model = probe.runner.model
    for owner in (getattr(model, "config", None), model):
        for name in _LENGTHS:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _fits(probe: Probe, advertised: int) -> int:
    """The largest number of tokens that is answered, by bisection."""
    low, high = probe.n, advertised
    while high - low > 1:
        middle = (low + high) // 2
        try:
            probe.runner(probe.ids.reshape(1, -1).repeat(1, 128)[:, :middle])
            low = middle
        except Undrivable:
            high = middle
    return low
