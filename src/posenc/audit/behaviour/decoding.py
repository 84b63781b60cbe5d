"""Decoding and prefill in chunks give the answers of one full pass."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.audit.behaviour.probe import Outcome, Probe, apart, percent
from posenc.audit.behaviour.runner import Undrivable
from posenc.audit.findings import Finding, Kind
from posenc.audit.kinds.attention import CAUSAL_ALIGNMENT
from posenc.audit.kinds.behaviour import CHUNKED_PREFILL, DECODE_OFFSET


def decoding(probe: Probe) -> Outcome:
    """A prompt, then one token at a time."""
    _caches(probe)
    prompt = probe.n - 3
    lengths = (prompt, 1, 1, 1)
    off = apart(_in_pieces(probe, probe.ids[:1], lengths)[0], probe.answer[0])
    if off <= probe.tolerance:
        yield "decoding with a cache equals one full pass"
        return
    where = f"{probe.name}, {prompt} tokens cached, then one at a time"
    if _helped(probe, lengths):
        yield _unnumbered(DECODE_OFFSET, where, probe, off, _stands(probe, prompt))
    elif missed := _missed(probe, prompt):
        yield _blind(where, prompt, missed, off)
    else:
        yield DECODE_OFFSET.at(where, measured=f"the answers differ: {percent(off)}", expected=_same(probe))


def chunks(probe: Probe) -> Outcome:
    """A prompt in three pieces."""
    _caches(probe)
    third = probe.n // 3
    lengths = (third, third, probe.n - 2 * third)
    off = apart(_in_pieces(probe, probe.ids[:1], lengths)[0], probe.answer[0])
    if off <= probe.tolerance:
        yield "a prompt in chunks equals one full pass"
        return
    where = f"{probe.name}, chunks of {', '.join(map(str, lengths))} tokens"
    leak = _leak(probe, third)
    if _helped(probe, lengths):
        yield _unnumbered(CHUNKED_PREFILL, where, probe, off)
    elif leak > probe.tolerance:
        yield CAUSAL_ALIGNMENT.at(
            where,
            measured=f"inside a chunk behind cached tokens, a later token changes earlier answers: {percent(leak)}",
            expected="queries aligned with the last key",
        )
    elif missed := _missed(probe, third):
        yield _blind(where, third, missed, off)
    else:
        yield CHUNKED_PREFILL.at(where, measured=f"the answers differ: {percent(off)}", expected=_same(probe))


def _same(probe: Probe) -> str:
    return f"the answers of one full pass, to {percent(probe.tolerance)}"


def _helped(probe: Probe, lengths: tuple[int, ...]) -> bool:
    """Whether the answers are right once positions are given."""
    if "positions" not in probe.runner.takes:
        return False
    return apart(_in_pieces(probe, probe.ids[:1], lengths, give=True)[0], probe.answer[0]) <= probe.tolerance


def _stands(probe: Probe, prompt: int) -> str:
    """Where the first new token stands, if it is a position that explains its answer."""
    ids = probe.ids[:1, : prompt + 1]
    found = _in_pieces(probe, ids, (prompt, 1))[0, -1:]
    for position in (0, 1, prompt - 1, prompt + 1):
        at = probe.counted(0, length=prompt + 1)
        at[:, -1] = position + probe.first
        if apart(found, probe.runner(ids, positions=at).scores[0, -1:]) <= probe.tolerance:
            return f"; token {prompt} stands at {position}"
    return ""


def _unnumbered(kind: Kind, where: str, probe: Probe, off: float, stands: str = "") -> Finding:
    return kind.at(
        where,
        measured=f"the answers differ: {percent(off)}; with positions given they do not{stands}",
        expected=_same(probe),
        severity="warning",
        mend="Count the model's own positions from the length of the cache on, or give positions with every call.",
    )


def _caches(probe: Probe) -> None:
    probe.takes("cache")
    if not probe.causal:
        raise Undrivable("tokens see later ones, so nothing can be cached")
    if probe.runner(probe.ids[:1, :1], keep=True).cache is None:
        raise Undrivable("it answers without a cache")


def _in_pieces(probe: Probe, ids: Tensor, lengths: tuple[int, ...], *, give: bool = False, first: int = 0) -> Tensor:
    """The answers to a sequence in pieces; positions are given from ``first`` on, or left to the model."""
    cache, start, answers = None, 0, []
    for length in lengths:
        at = probe.counted(first + start, len(ids), length) if give else None
        answer = probe.runner(ids[:, start : start + length], positions=at, cache=cache, start=start, keep=True)
        cache, start = answer.cache, start + length
        answers.append(answer.scores)
    return torch.cat(answers, 1)


def in_pieces_from(probe: Probe, lengths: tuple[int, ...], first: int) -> Tensor:
    """The answers to the first row in pieces, at positions ``first, first + 1, …``."""
    return _in_pieces(probe, probe.ids[:1], lengths, give=True, first=first)[0]


def _missed(probe: Probe, prompt: int) -> list[int]:
    """Cached tokens that the next one does not see, though in a full pass it does."""
    return sorted(_seen(probe, (prompt + 1,)) - _seen(probe, (prompt, 1)))


def _seen(probe: Probe, lengths: tuple[int, ...]) -> set[int]:
    """Which earlier tokens the last one sees."""
    ids, last = probe.ids[:1, : sum(lengths)], sum(lengths) - 1
    seen, reference = set(), _in_pieces(probe, ids, lengths)[:, -1]
    for at in range(0, last, 3):
        places = range(at, min(at + 3, last))
        rows = ids.repeat(len(places), 1)
        for row, place in enumerate(places):
            rows[row, place] = probe.others[0, place]
        moved = _in_pieces(probe, rows, lengths)[:, -1]
        seen |= {place for row, place in enumerate(places) if apart(moved[row : row + 1], reference) > probe.tolerance}
    return seen


def _blind(where: str, prompt: int, missed: list[int], off: float) -> Finding:
    return CAUSAL_ALIGNMENT.at(
        where,
        measured=f"the first new token does not see tokens {', '.join(map(str, missed))} of {prompt} cached; "
        f"the answers differ: {percent(off)}",
        expected="every cached token seen, as in one full pass",
    )


def _leak(probe: Probe, third: int) -> float:
    rows = probe.ids[:1].repeat(2, 1)
    rows[1, -1] = probe.others[0, -1]
    out = _in_pieces(probe, rows, (third, probe.n - third))
    return apart(out[1, third:-1], out[0, third:-1])
