"""Who sees whom: the pattern, its alignment, masks that are given, and whether order or positions decide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from posenc.audit.attention.weights import KEY_MASKS, KEY_POSITIONS, PAIR_MASKS, QUERY_POSITIONS, Attention, sees
from posenc.audit.behaviour.probe import apart, percent
from posenc.audit.behaviour.runner import Undrivable
from posenc.audit.findings import Finding
from posenc.audit.kinds.attention import (
    ATTENTION_FUTURE,
    ATTENTION_LEAK,
    ATTENTION_WINDOW,
    CAUSAL_ALIGNMENT,
    CAUSAL_ON_POSITIONS,
    MASK_DROPPED,
)
from posenc.audit.kinds.behaviour import DECODE_OFFSET
from posenc.core.mask import Mask

Outcome = Iterator[Finding | str]
_NOTHING = 1e-6
_HIGH = 60.0
"""A score that hidden keys are given: a finite penalty below it does not hide them."""


def pattern(subject: Attention, name: str, mask: Mask | None) -> Outcome:
    """As many queries as keys, and no mask given."""
    n, seen = subject.keys, subject.seen
    yield words(seen)
    if mask is None:
        return
    allowed = mask.allowed(n, n, device="cpu")
    if torch.equal(seen, allowed.expand_as(seen)):
        return
    later = seen & ~allowed & torch.ones(n, n, dtype=torch.bool).triu(1)
    if later.any():
        query, key = _first(later)
        weight = float(subject.square[:, query, key].max())
        yield ATTENTION_FUTURE.at(name, measured=f"query {query} gives key {key} weight {weight:.2g}", expected=words(allowed))
        return
    query, key = _first(seen != allowed)
    which = "sees" if seen[query, key] else "does not see"
    yield ATTENTION_WINDOW.at(name, measured=f"{words(seen)}: query {query} {which} key {key}", expected=words(allowed))


def alignment(subject: Attention, name: str) -> Outcome:
    """Three queries, and one, against all keys: those of the full call's last rows."""
    n, square = subject.keys, subject.seen
    for m in (3, 1):
        expected, found = square[n - m :], sees(subject.level(m))
        if torch.equal(found, expected):
            continue
        query, key = _first(found != expected)
        which = "sees" if found[query, key] else "does not see"
        aligned = "; queries are aligned with the first key" if torch.equal(found, square[:m]) else ""
        yield CAUSAL_ALIGNMENT.at(
            f"{name}, {m} quer{'y' if m == 1 else 'ies'} and {n} keys",
            measured=f"query {query} {which} key {key}{aligned}",
            expected="what the last queries of the full call see",
            severity="warning",  # an error once there is a cache
        )
        return
    if not square.all():
        yield "queries aligned with the last key"
    if any(key in subject.takes for key in QUERY_POSITIONS) and not any(key in subject.takes for key in KEY_POSITIONS):
        return  # positions of whom is not said
    q, k, v = (subject.draw(heads, n, turn) for turn, heads in enumerate((subject.heads, subject.kv_heads, subject.kv_heads)))
    off = apart(
        subject.rows(q[:, :, -3:], k, v)[0], subject.rows(q, k, v)[0].unflatten(0, (subject.heads, n))[:, -3:].flatten(0, 1)
    )
    if off > 1e-4:
        yield DECODE_OFFSET.at(
            f"{name}, 3 queries and {n} keys",
            measured=f"the last queries alone answer otherwise than in the full call: {percent(off)}",
            expected="the same answers",
            severity="warning",
        )


def order(subject: Attention, name: str) -> Outcome:
    """Positions repeat and step back; who sees whom stays."""
    queries = next((key for key in QUERY_POSITIONS if key in subject.takes), None)
    if queries is None:
        raise Undrivable("it takes no positions")
    n = subject.keys
    at = torch.arange(n).clamp(max=n // 2)
    at[-2:] = 1
    given: dict[str, Any] = {queries: at[None], **{key: at[None] for key in KEY_POSITIONS if key in subject.takes}}
    later = sees(subject.level(**given)) & ~subject.seen & torch.ones(n, n, dtype=torch.bool).triu(1)
    if later.any():
        query, key = _first(later)
        yield CAUSAL_ON_POSITIONS.at(
            name,
            measured=f"query {query} at position {at[query]} sees key {key}, which comes later, at position {at[key]}",
            expected="no later key seen, wherever it stands",
        )


def masks(subject: Attention, name: str) -> Outcome:
    """A mask is given in each form that is in use: in one of them what it hides must get no weight."""
    taken = [key for key in (*PAIR_MASKS, *KEY_MASKS) if key in subject.takes]
    if not taken:
        raise Undrivable("it takes no mask by name")
    for key in taken:
        tried: dict[str, tuple[float, float]] = {}
        for form, value, shown in _forms(subject, key):
            try:
                tried[form] = _kept(subject, shown, **{key: value})
            except Undrivable:  # a form that it does not take
                continue
        if not tried:
            raise Undrivable(f"it takes {key} in no form that is known here")
        form, (kept, leaked) = min(tried.items(), key=lambda item: item[1])
        if max(kept, leaked) <= _NOTHING:
            yield f"{key}: {form}"
        elif kept >= 0.5:
            measured = f"hidden keys keep {100 * kept:.3g} % of their weight, whatever the form of the mask"
            yield MASK_DROPPED.at(f"{name}, {key}", measured=measured, expected="no weight")
        else:
            measured = f"{form}: hidden keys keep {kept:.2g} of their weight, and with a score of {_HIGH:g} get {leaked:.2g}"
            yield ATTENTION_LEAK.at(f"{name}, {key}", measured=measured, expected="no weight, whatever its score")


def _forms(subject: Attention, key: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Words, the mask and what it shows; odd distances are hidden, or every third key."""
    n = subject.keys
    lag = torch.arange(n)[:, None] - torch.arange(n)
    pairs, keys = lag % 2 == 0, torch.arange(n) % 3 != 1
    grids = [("", pairs[None, None], pairs)] if key in PAIR_MASKS else []
    grids += [(" of keys", keys[None], keys.expand(n, n))] if key in KEY_MASKS else []
    for of, mask, shown in grids:
        yield f"booleans{of}, true where seen", mask, shown
        yield f"booleans{of}, true where hidden", ~mask, shown
        yield f"added to the scores{of}", torch.zeros(mask.shape, dtype=subject.dtype).masked_fill(~mask, -torch.inf), shown
    if key == "attention_mask":
        yield "numbers of keys, 1 where seen", keys[None].long(), keys.expand(n, n)


def _kept(subject: Attention, shown: Tensor, **given: Tensor) -> tuple[float, float]:
    """The share of its weight that a hidden key keeps, and the weight it gets with a high score; infinite if not a number."""
    n = subject.keys
    rows = (subject.seen & shown).any(-1) & (subject.seen & ~shown).any(-1)
    hidden = subject.seen & ~shown & rows[:, None]
    late = ~shown[-1] & subject.seen[-1]
    if not hidden.any() or not late.any():
        raise Undrivable("its own pattern leaves nothing to hide")
    kept = (subject.level(None, **given) / subject.square.clamp(min=1e-300))[:, hidden].max()
    q, k = subject.zeros(subject.heads, n), subject.zeros(subject.kv_heads, n)
    q[..., -1] = _HIGH**0.5 * subject.head_dim**0.25
    k[..., -1] = torch.where(shown[-1], torch.zeros((), dtype=k.dtype), q[0, 0, 0, -1])
    leaked = subject.weights(q, k, **given)[:, -1, late].max()
    return tuple(float(x.nan_to_num(nan=torch.inf)) for x in (kept, leaked))  # type: ignore[return-value]


def words(seen: Tensor) -> str:
    """A square pattern in words."""
    n = seen.shape[-1]
    lag = torch.arange(n)[:, None] - torch.arange(n)
    before, after = int(lag[seen].max()) + 1 if seen.any() else 0, int((-lag)[seen].max()) if seen.any() else 0
    if not torch.equal(seen, (lag < before) & (lag >= -after)):
        return "a pattern of its own"
    if before == n and after == n - 1:
        return "every key is seen"
    side = {0: "causal", -1: "causal, own token not seen"}.get(after, f"{after} later keys seen")
    own = ", own token included" if after >= 0 else ""
    return side if before == n else f"{side}, window {before}{own}"


def _first(where: Tensor) -> tuple[int, int]:
    query, key = (int(index) for index in where.nonzero()[0])
    return query, key
