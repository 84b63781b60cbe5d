"""A row answers the same alone, padded, packed and beside others."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.audit.behaviour.probe import Outcome, Probe, apart, percent
from posenc.audit.behaviour.runner import Undrivable
from posenc.audit.kinds.behaviour import BATCH_DEPENDENCE, LEFT_PADDING, PACKING, RIGHT_PADDING


def batch(probe: Probe) -> Outcome:
    """Three rows of the same length together, and each alone."""
    together = probe.runner(probe.ids).scores
    off = max(apart(together[row], probe.runner(probe.ids[row : row + 1]).scores[0]) for row in range(3))
    if off <= probe.tolerance:
        return
    yield BATCH_DEPENDENCE.at(
        probe.name,
        measured=f"rows of {probe.n} tokens answer otherwise together than alone: {percent(off)}",
        expected=f"the answer of each row alone, to {percent(probe.tolerance)}",
    )


def right_padding(probe: Probe) -> Outcome:
    """A shorter row padded behind, alone and beside a longer one."""
    if "mask" not in probe.runner.takes and not probe.causal:
        raise Undrivable("its forward takes no mask of padding, and every token sees the padding")
    n, short = probe.n, probe.short
    ids, mask = probe.ids[:2].clone(), torch.ones(2, n, dtype=torch.int64, device=probe.device)
    ids[1, short:], mask[1, short:] = probe.runner.pad, 0
    given = mask if "mask" in probe.runner.takes else None
    alone = probe.runner(probe.ids[1:2, :short]).scores[0]
    beside = probe.runner(ids, mask=given).scores
    off = max(apart(beside[1, :short], alone), apart(beside[0], probe.answer[0]))
    if off <= probe.tolerance:
        return
    padded = probe.runner(ids[1:], mask=None if given is None else given[1:]).scores[0, :short]
    if apart(padded, alone) <= probe.tolerance:
        yield BATCH_DEPENDENCE.at(
            f"{probe.name}, rows of {n} and {short} tokens",
            measured=f"the shorter row answers otherwise beside the longer one: {percent(off)}",
            expected=f"the answer of the row alone, to {percent(probe.tolerance)}",
        )
    else:
        yield RIGHT_PADDING.at(
            f"{probe.name}, {short} tokens and {n - short} of padding behind",
            measured=f"the answers of real tokens differ from those without padding: {percent(off)}; {_cause(probe, ids, mask, None)}",
            expected=f"the same answers, to {percent(probe.tolerance)}",
        )


def left_padding(probe: Probe) -> Outcome:
    """A shorter row padded in front, with positions counted from the mask and with the model's own; then decoded on."""
    probe.takes("mask")
    n, short = probe.n, probe.short
    pads = n - short
    ids, mask = probe.ids[:2].clone(), torch.ones(2, n, dtype=torch.int64, device=probe.device)
    ids[1, :pads], mask[1, :pads] = probe.runner.pad, 0
    ids[1, pads:] = probe.ids[1, :short]
    alone = probe.runner(probe.ids[1:2, :short]).scores[0]
    counted = probe.counted_in(mask) if "positions" in probe.runner.takes else None
    where = f"{probe.name}, {short} tokens and {pads} of padding in front"
    same = f"the answers without padding, to {percent(probe.tolerance)}"

    def off(out: Tensor) -> float:
        return max(apart(out[1, pads:], alone), apart(out[0], probe.answer[0]))

    own = off(probe.runner(ids, mask=mask).scores)
    if counted is not None:
        given = off(probe.runner(ids, mask=mask, positions=counted).scores)
        if given > probe.tolerance:
            measured = f"with positions counted from the mask the answers differ: {percent(given)}; {_cause(probe, ids, mask, counted)}"
            yield LEFT_PADDING.at(where, measured=measured, expected=same)
            return
        if own > probe.tolerance:
            yield "left padding needs positions: those it counts itself run through the padding"
            yield LEFT_PADDING.at(
                where,
                measured=f"without given positions the answers differ: {percent(own)}; with positions counted from the mask not",
                expected=same,
                severity="note",
                mend="Give positions counted from the mask with every padded batch, as generate() does.",
            )
    elif own > probe.tolerance:
        measured = f"the answers differ: {percent(own)}; {_cause(probe, ids, mask, None)}"
        yield LEFT_PADDING.at(where, measured=measured, expected=same)
        return
    if "cache" in probe.runner.takes and probe.causal:
        late = _decoded(probe, ids, mask, counted)
        if late is None:
            return
        worst = max(apart(late[1], alone[-1]), apart(late[0], probe.answer[0, -1]))
        if worst > probe.tolerance and not _unpadded_fails(probe):
            measured = f"the token decoded after the padded prompt differs: {percent(worst)}"
            yield LEFT_PADDING.at(f"{where}, with a cache", measured=measured, expected=same)


def _cause(probe: Probe, ids: Tensor, mask: Tensor, positions: Tensor | None) -> str:
    """Whether what the padding holds changes the answers of real tokens."""
    other = torch.where(mask.bool(), ids, probe.others[:2])
    given = mask if "mask" in probe.runner.takes else None
    real = mask[1].bool()
    before, after = (probe.runner(x, mask=given, positions=positions).scores[1, real] for x in (ids, other))
    return (
        "the padding is seen"
        if apart(after, before) > probe.tolerance
        else "the padding is hidden, positions or lengths are off"
    )


def _decoded(probe: Probe, ids: Tensor, mask: Tensor, counted: Tensor | None) -> Tensor | None:
    last = probe.n - 1
    before = probe.runner(
        ids[:, :last], mask=mask[:, :last], positions=None if counted is None else counted[:, :last], keep=True
    )
    if before.cache is None:
        return None
    after = probe.runner(
        ids[:, last:],
        mask=mask,
        positions=None if counted is None else counted[:, last:],
        cache=before.cache,
        start=last,
        keep=True,
    )
    return after.scores[:, 0]


def _unpadded_fails(probe: Probe) -> bool:
    """Whether decoding differs without padding too, which is another finding."""
    ones = torch.ones(1, probe.n, dtype=torch.int64, device=probe.device)
    counted = probe.counted(0) if "positions" in probe.runner.takes else None
    plain = _decoded(probe, probe.ids[:1], ones, counted)
    return plain is not None and apart(plain[0], probe.answer[0, -1]) > probe.tolerance


def packing(probe: Probe) -> Outcome:
    """Two documents in one row, positions started again, against each alone."""
    probe.takes("segments")
    if probe.recurrent:
        raise Undrivable("some layers carry a state from token to token, which no mask cuts")
    first, second = probe.short, probe.n - probe.short
    if probe.narrowest is not None and probe.narrowest < first:
        raise Undrivable(f"a mask of documents would replace its window of {probe.narrowest}")
    ids = torch.cat([probe.ids[:1, :first], probe.ids[1:2, :second]], 1)
    at = torch.cat([probe.counted(0, length=first), probe.counted(0, length=second)], 1)
    segments = 1 + (torch.arange(probe.n, device=probe.device) >= first).long()[None]  # some keep 0 for padding
    apart_each = [probe.runner(probe.ids[row : row + 1, :length]).scores[0] for row, length in ((0, first), (1, second))]
    reference = torch.cat(apart_each)
    positions = at if "positions" in probe.runner.takes else None
    probe.runner.causal = probe.causal
    off = apart(probe.runner(ids, positions=positions, segments=segments).scores[0], reference)
    if off > probe.tolerance:
        given = "positions that start again and documents" if positions is not None else "documents"
        yield PACKING.at(
            f"{probe.name}, documents of {first} and {second} tokens",
            measured=f"given {given}, the answers differ: {percent(off)}",
            expected=f"the answers of each document alone, to {percent(probe.tolerance)}",
        )
    else:
        yield "packed documents stay apart, given documents"
