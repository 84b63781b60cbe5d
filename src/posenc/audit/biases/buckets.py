"""Functions that give bucket numbers: T5's rule, entry by entry."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from posenc.audit.biases.profile import edges
from posenc.audit.biases.rules import Buckets, max_distances
from posenc.audit.kinds import biases as kinds
from posenc.audit.tables.probe import Sheet
from posenc.core.distance import Direction, t5_bucket


class Asked(Protocol):
    """Bucket numbers between given positions, ``[1, q, k]``."""

    def __call__(self, q: Tensor, k: Tensor) -> Tensor: ...

    def maybe(self, q: Tensor, k: Tensor) -> Tensor | None: ...


def check_buckets(asked: Asked, sheet: Sheet, promised: Buckets | None, direction: Direction, length: int) -> None:
    """Which rule the numbers follow, and whether each distance has the right one."""
    sheet.checked += ["equal distances alike", "bucket of each distance", "past and future"]
    length = min(length, 1024)  # bidirectional rules for speech reach 800
    span = torch.arange(length + 1)
    square = asked(span, span)[0].to(torch.int64)
    past, future = square[-1].flip(-1), square[0]
    toeplitz = bool((square[1:, 1:] == square[:-1, :-1]).all())
    if not toeplitz:
        sheet.found(kinds.NOT_RELATIVE, "keys at one distance fall into several buckets", "one bucket for each distance")
        return
    one = asked.maybe(span[-1:], span)
    if one is None or not torch.equal(one[0, 0].to(torch.int64), square[-1]):
        sheet.found(
            kinds.ALIGNMENT, f"one query with {length + 1} keys does not get the buckets of the last token", "those of the last"
        )
        return
    rule = promised or _guess(past, future, direction)
    if rule is None:
        sheet.described.append(f"{len(square.unique())} buckets of the distance, of no rule that is known")
        return
    distances = torch.arange(-length, length + 1)
    expected = t5_bucket(distances, buckets=rule.count, max_distance=rule.max_distance, direction=rule.direction)
    got = torch.cat([future[1:].flip(-1), past])
    if direction == "causal" and not torch.equal(got, expected):  # what a causal mask hides does not matter
        distances, expected, got = distances[length:], expected[length:], past
    if torch.equal(got, expected):
        sheet.described.append(f"T5 buckets: {rule.count}, {rule.direction}, max distance {_farthest(rule)}")
        return
    turned = t5_bucket(-distances, buckets=rule.count, max_distance=rule.max_distance, direction=rule.direction)
    sheet.described.append(f"buckets like T5's {rule.count}, {rule.direction}, up to {rule.max_distance}")
    if torch.equal(got, turned) or (rule.direction == "causal" and not past.any()):
        back, ahead = 1, 0 if rule.direction == "causal" else rule.count // 2 + 1
        sheet.found(
            kinds.BUCKET_SIDES,
            f"a key 1 token back falls into bucket {int(past[1])}, one ahead into {int(future[1])}",
            f"back into {back}, ahead into {ahead}",
        )
        return
    wrong = (got != expected).nonzero().flatten()
    first = wrong[distances[wrong].abs().argmin()]
    sheet.found(
        kinds.BUCKETS,
        f"key - query = {-int(distances[first])} falls into bucket {int(got[first])}; {len(wrong)} of {len(got)} distances differ",
        f"bucket {int(expected[first])}, of {rule.count} up to {rule.max_distance}",
    )


def _guess(past: Tensor, future: Tensor, direction: Direction) -> Buckets | None:
    """The rule that the edges follow, or the shipped one with as many buckets."""
    sides = 1 if direction == "causal" else 2
    for side in (past, future):  # a wrong sign puts the edges on the other side
        starts = edges(side[None].to(torch.float64))
        found = max_distances(starts)
        if found:
            return Buckets(len(starts) * sides, found[0] if 128 not in found else 128, direction)
    count = int(torch.cat([past, future]).max()) + 1
    if count < 2 * sides or count % sides or count // sides // 2 >= 128:
        return None
    return Buckets(count, 128, direction)


def _farthest(rule: Buckets) -> str:
    found = max_distances(rule.starts) or [rule.max_distance]
    return f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]} (cannot be told apart)"
