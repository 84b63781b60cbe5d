"""Known mistakes, each applied to the schedule that was promised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log, pi
from typing import Any, final

from posenc.audit.findings import Kind
from posenc.audit.kinds import frequencies as kinds
from posenc.audit.ladders.numbers import BASES, digits_of, snapped
from posenc.audit.ladders.runs import Ladder, bases
from posenc.core.rotary import Frequencies, Schedule
from posenc.schedules.base import AtLength, LengthRule
from posenc.schedules.geometric import Geometric
from posenc.schedules.linear import Linear


@final
@dataclass(frozen=True)
class Mistake:
    """What somebody may have computed instead.

    Args:
        says: what was done, in words.
        made: the result, or the schedule that has it.
    """

    kind: Kind
    says: str
    made: Schedule | Frequencies

    def frequencies(self, rotary_dim: int) -> Frequencies | None:
        """What comes of it; ``None`` where the schedule has no frequencies of this width."""
        if isinstance(self.made, Frequencies):
            return self.made
        try:
            return self.made.frequencies(rotary_dim)
        except (ValueError, OverflowError):
            return None


def plain_mistakes(promised: Schedule, rotary_dim: int) -> Iterator[Mistake]:
    """Those that any rule invites."""
    inner = _inside(promised)
    if inner is not None:
        says = f"the unscaled ladder: {_rule_name(promised)} is left out"
        yield Mistake(kinds.SCALING_DROPPED, says, inner)
    ladder = ladder_of(promised)
    if ladder is not None and 1 < ladder.base < 1e150:
        for divisor, how in ((2 * rotary_dim, "halved"), (rotary_dim // 2, "doubled")):
            says = f"exponents over {divisor} instead of {rotary_dim}: every exponent is {how}"
            other = with_ladder(promised, Geometric(ladder.base ** (rotary_dim / divisor)))
            yield Mistake(kinds.FREQUENCY_DIVISOR, says, other)


def fitted_mistakes(promised: Schedule, rotary_dim: int, live: Ladder) -> Iterator[Mistake]:
    """Those that leave a number open, which is fitted to ``live``; and the order, which is the least likely."""
    yield from _multiples(promised, rotary_dim, live)
    ladder = ladder_of(promised)
    if ladder is not None:
        yield from _other_bases(promised, ladder, rotary_dim, live)
    made = promised.frequencies(rotary_dim)
    yield Mistake(kinds.FREQUENCY_ORDER, "the slowest pair first", Frequencies(made.inv_freq.flip(-1), made.amplitude))


def ladder_of(schedule: Schedule | LengthRule) -> Geometric | None:
    """The geometric ladder inside."""
    inside: Any = schedule
    while not isinstance(inside, Geometric):
        inside = getattr(inside, "rule", None) or getattr(inside, "schedule", None)
        if inside is None:
            return None
    return inside


def with_ladder(schedule: Any, ladder: Geometric) -> Any:
    """The same rule over another ladder."""
    if isinstance(schedule, Geometric):
        return ladder
    key = "rule" if isinstance(schedule, AtLength) else "schedule"
    return replace(schedule, **{key: with_ladder(getattr(schedule, key), ladder)})


def _inside(schedule: Schedule) -> Schedule | None:
    """What is scaled, unscaled."""
    rule: Any = schedule.rule if isinstance(schedule, AtLength) else schedule
    found: Schedule | None = getattr(rule, "schedule", None)
    return found


def _rule_name(schedule: Schedule) -> str:
    return type(schedule.rule if isinstance(schedule, AtLength) else schedule).__name__


def _multiples(promised: Schedule, rotary_dim: int, live: Ladder) -> Iterator[Mistake]:
    """All frequencies times one number."""
    made = promised.frequencies(rotary_dim)
    right = float(made.inv_freq[0])
    if right <= 0 or live.frequencies[0] <= 0:
        return
    ratio = live.frequencies[0] / right
    if abs(ratio - 1) <= 16 * live.tolerance(0):
        return
    if abs(ratio * 2 * pi - 1) < 1e-5:
        says = "divided by 2π, as if they were turns"
    elif abs(ratio / (2 * pi) - 1) < 1e-5:
        says = "multiplied by 2π, as if they had been turns"
    else:
        number = next(snapped(max(ratio, 1 / ratio), 4 * live.tolerance(0)))
        says = f"all {'multiplied' if ratio > 1 else 'divided'} by {number:.6g}, which is not promised"
        ratio = number if ratio > 1 else 1 / number
        if isinstance(promised, Linear):
            says = f"divided by {promised.factor / ratio:.6g} instead of {promised.factor:g}"
    yield Mistake(kinds.SCALING, says, Frequencies(made.inv_freq * ratio, made.amplitude))


def _other_bases(promised: Schedule, ladder: Geometric, rotary_dim: int, live: Ladder) -> Iterator[Mistake]:
    """The bases that the live ladder suggests in place of the promised one, and what divisor would have made one."""
    turning = next((pair for pair, value in enumerate(live.frequencies) if value <= 0), len(live.frequencies))
    if turning < 2:
        return
    for base in bases(live.scaled(1 / live.frequencies[0]), turning):
        if base == ladder.base:
            continue
        try:
            other = with_ladder(promised, Geometric(base))
        except ValueError:  # YaRN over a base of 1 or less
            continue
        divisor = rotary_dim * log(ladder.base) / log(base) if base != 1 else 0.0
        whole = round(divisor / 2) * 2
        # a base that nobody writes, and an even divisor to four decimals: no coincidence
        unlikely = base < 1000 or (base not in BASES and digits_of(base) > 3)
        if unlikely and whole >= 2 and abs(divisor - whole) < 1e-4:
            yield Mistake(kinds.FREQUENCY_DIVISOR, f"exponents over {whole} instead of {rotary_dim}", other)
        says = f"base {base:,.10g} instead of {ladder.base:,.10g}"
        reciprocal = abs(base * ladder.base - 1) < 1e-4
        yield Mistake(kinds.FREQUENCY_BASE, says + (": the exponent has the wrong sign" if reciprocal else ""), other)
