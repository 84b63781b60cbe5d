"""Slopes and buckets by rule: which rule a measured one follows, and what a promise stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from posenc.core.bias import ScoreBias, SlopeBias
from posenc.core.distance import Direction, bucket_starts
from posenc.core.sites import ScoreEncoding
from posenc.encodings.alibi import alibi_slopes
from posenc.encodings.t5 import T5Bias
from posenc.hf.rules import BiasRule

Expect = ScoreEncoding | ScoreBias | BiasRule | Literal["relative", "alibi", "t5"] | None

RELEASED = "the released rule"
SHIPPED = {
    RELEASED: "slopes of the released rule",
    "pure": "slopes 2^(-8j/heads), one ratio for all",
}
"""The rules that ship, in words; the first is ALiBi's own code, which BLOOM, MPT, Falcon and Baichuan follow."""
FROM_ZERO = "from zero"


def slopes_by_rule(heads: int) -> dict[str, Tensor]:
    """The slopes of a number of heads under each rule that ships, and the mistake of starting at exponent 0."""
    rules = {
        RELEASED: alibi_slopes(heads),
        "pure": [2.0 ** (-8 * j / heads) for j in range(1, heads + 1)],
        FROM_ZERO: [2.0 ** (-8 * j / heads) for j in range(heads)],
    }
    return {name: torch.tensor(slopes, dtype=torch.float64) for name, slopes in rules.items()}


def rule_of(slopes: Tensor, close: float) -> str | None:
    """The rule that slopes follow; heads without a slope come last and do not count.

    Args:
        close: the relative error of the measurement.
    """
    biased = int((slopes != 0).sum())
    if not biased or not (slopes[:biased] != 0).all():
        return None
    for name, expected in slopes_by_rule(biased).items():
        if alike(slopes[:biased], expected, close):
            return name
    return None


def alike(a: Tensor, b: Tensor, close: float) -> bool:
    """Whether numbers are equal but for a relative error."""
    return a.shape == b.shape and bool(((a - b).abs() <= close * b.abs()).all())


@final
@dataclass(frozen=True)
class Buckets:
    """A rule for T5's buckets.

    Args:
        count: of all directions.
        max_distance: from which on all distances share the last bucket.
    """

    count: int
    max_distance: int
    direction: Direction

    @property
    def sides(self) -> int:
        return 1 if self.direction == "causal" else 2

    @property
    def starts(self) -> tuple[int, ...]:
        """The first distance of each bucket of one side."""
        return bucket_starts(self.count // self.sides, self.max_distance)


def max_distances(starts: tuple[int, ...]) -> list[int]:
    """Every ``max_distance`` whose buckets start at these distances."""
    exact = len(starts) // 2
    above = len(starts) - exact
    if exact < 1 or starts[:exact] != tuple(range(exact)) or above < 2:
        return []
    # the last bucket starts at the least integer from exact · (max_distance/exact)^((above - 1)/above) on
    power = above / (above - 1)
    low, high = (exact * (max(edge, exact) / exact) ** power for edge in (starts[-1] - 1, starts[-1]))
    candidates = range(max(int(low) - 1, exact + 1), int(high) + 2)
    return [farthest for farthest in candidates if bucket_starts(len(starts), farthest) == starts]


def promised_bias(expect: Expect, heads: int, direction: Direction) -> ScoreBias | None:
    """The bias that a promise stands for, where it says enough."""
    if isinstance(expect, ScoreEncoding):
        with torch.no_grad():
            return expect()
    if isinstance(expect, ScoreBias):
        return expect
    if isinstance(expect, BiasRule) and expect.kind == "alibi":
        exponent = dict(expect.details).get("largest_exponent", 8)
        assert isinstance(exponent, (int, float))
        slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float64) ** (exponent / 8)
        return SlopeBias(slopes, None if direction == "causal" else slopes)
    return None


def promised_buckets(expect: Expect, direction: Direction) -> Buckets | None:
    """The buckets that a promise stands for, where it says so."""
    if isinstance(expect, T5Bias):
        return Buckets(expect.buckets, expect.max_distance, expect.direction)
    if isinstance(expect, BiasRule) and expect.kind == "t5":
        details = dict(expect.details)
        count, farthest = details.get("buckets", 32), details.get("farthest", 128)
        if isinstance(count, int) and isinstance(farthest, int):
            return Buckets(count, farthest, direction)
    return None
