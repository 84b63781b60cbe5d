"""Ladders read as Llama 3's: shares that fall linearly in how often a pair turns."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, pi

from posenc.audit.ladders.numbers import FACTORS, LENGTHS, digits_of, length_range, round_length, roundest, snapped
from posenc.audit.ladders.runs import Ladder, Shares, shares
from posenc.core.rotary import Schedule
from posenc.schedules.geometric import Geometric
from posenc.schedules.llama3 import Llama3

Candidate = tuple[Schedule, tuple[str, ...]]
"""A schedule to be checked, and what of it cannot be told apart."""


def usual(ladder: Ladder, base: float, ratios: list[float]) -> Iterator[Candidate]:
    """With ``low_freq_factor = 1`` and ``high_freq_factor = 4``."""
    if not ladder.plain or base <= 1:  # then no pair is slower than another
        return
    turns = [value / (2 * pi) for value in Geometric(base).frequencies(ladder.width).inv_freq.tolist()]
    found = []
    for factor, open_factor in _factors(ladder, ratios, turns):
        low, high = _lengths(turns, shares(ladder, ratios, factor))
        length = round_length(low, high)
        if length is not None:
            free = length_range(low, high)
            schedule = Llama3(Geometric(base), factor, length)
            found.append((schedule, free if not open_factor else ("factor and original length together", *free)))
    yield from sorted(found, key=lambda candidate: candidate[0].original_length not in LENGTHS)


def _factors(ladder: Ladder, ratios: list[float], turns: list[float]) -> Iterator[tuple[float, bool]]:
    """Factors, and whether the ladder leaves them open: the slow end is divided, or blended like the pairs before it."""
    for factor in snapped(1 / ratios[-1], 4 * ladder.tolerance(ladder.last), FACTORS):
        if factor > 1:
            yield factor, False
    falling = next(pair for pair, ratio in enumerate(ratios) if ratio < 1 - 8 * ladder.tolerance(pair))
    if falling < ladder.last and ratios[falling] > ratios[-1]:
        slope = (ratios[falling] - ratios[-1]) / (turns[falling] - turns[-1])
        share = 0.75 * (1 - (ratios[-1] - slope * turns[-1]))  # 1 - 1/factor, by the value at no turns
        if 0 < share < 1:
            slack = 64 * ladder.tolerance(ladder.last) / (1 - share)
            for factor in snapped(1 / (1 - share), slack, FACTORS):
                if factor > 1:
                    yield factor, False
    yield from ((factor, True) for factor in FACTORS)


def _lengths(turns: list[float], kept: Shares) -> tuple[float, float]:
    """Original lengths for which every pair's share lies within its bounds."""
    low, high = 1.0, inf
    for turn, least, most in zip(turns, kept.low, kept.high, strict=True):
        if least > 0:
            low = max(low, (1 + 3 * min(least, 1.0)) / turn)
        if most < 1:
            high = min(high, (1 + 3 * max(most, 0.0)) / turn)
    return low, high


def others(ladder: Ladder, base: float, ratios: list[float]) -> Iterator[Candidate]:
    """With any two factors; the slowest pair is taken as divided."""
    if not ladder.plain or base <= 1:  # then no pair is slower than another
        return
    turns = [value / (2 * pi) for value in Geometric(base).frequencies(ladder.width).inv_freq.tolist()]
    for factor in snapped(1 / ratios[-1], 4 * ladder.tolerance(ladder.last), FACTORS):
        if factor <= 1:
            continue
        kept = shares(ladder, ratios, factor)
        blended = kept.blended
        if not blended:
            yield from _step(base, factor, turns, kept)
        elif len(blended) == 1 or len(ratios) == 2:
            yield from _single(base, factor, turns, kept, blended[0])
        else:
            yield from _line(ladder, base, factor, turns, kept, blended)


def _step(base: float, factor: float, turns: list[float], kept: Shares) -> Iterator[Candidate]:
    """Nothing between kept and divided."""
    if not 0 <= kept.kept < len(turns) - 1:
        return
    low, high = 1 / turns[kept.kept], 1 / turns[kept.kept + 1]
    length = round_length(low, high)
    if length is not None:
        schedule = Llama3(Geometric(base), factor, length, low_freq_factor=1.0, high_freq_factor=1.0)
        yield schedule, length_range(low, high)


def _single(base: float, factor: float, turns: list[float], kept: Shares, pair: int) -> Iterator[Candidate]:
    """One pair between: the edges may lie anywhere up to its neighbours, as long as its share is right."""
    share = kept.middle(pair)
    if not 0 < pair < len(turns) - 1:
        return
    edge = max(turns[pair + 1], (turns[pair] - share * turns[pair - 1]) / (1 - share))
    length = round_length(1 / turns[pair], 1 / edge)
    if length is not None and length * turns[pair] > 1:
        high = length * (1 / length + (turns[pair] - 1 / length) / share)
        schedule = Llama3(Geometric(base), factor, length, low_freq_factor=1.0, high_freq_factor=high)
        free = length_range(1 / turns[pair], 1 / edge)
        yield schedule, tuple(f"{text}, each with its own high_freq_factor" for text in free)


def _line(
    ladder: Ladder, base: float, factor: float, turns: list[float], kept: Shares, blended: list[int]
) -> Iterator[Candidate]:
    first, last = blended[0], blended[-1]
    slope = (kept.middle(first) - kept.middle(last)) / (turns[first] - turns[last])
    if slope <= 0:
        return
    slow = turns[last] - kept.middle(last) / slope  # where the share is 0, and where it is 1
    fast = slow + 1 / slope
    if slow <= 0:
        return
    slack = 64 * max(high - low for low, high in zip(kept.low, kept.high, strict=True))
    if any(abs((turns[pair] - slow) * slope - kept.middle(pair)) > slack for pair in blended):
        return
    scale = ("original length and both factors, all multiplied by one number",)
    settings = [(length, 1.0) for length in {round_length((1 - slack) / slow, (1 + slack) / slow)} if length is not None]
    for length in LENGTHS:
        low = roundest(length * slow * (1 - slack), length * slow * (1 + slack))
        if digits_of(low) <= 3:
            settings.append((length, low))
    settings.append((LENGTHS[1], LENGTHS[1] * slow))
    for length, low in settings:
        for high in snapped(length * fast, slack):
            if high >= low:
                yield Llama3(Geometric(base), factor, length, low_freq_factor=low, high_freq_factor=high), scale
