"""A ladder to be read: its numbers, how closely they count, and the geometric runs at its two ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log
from typing import final

import torch
from torch import Tensor

from posenc.audit.ladders.numbers import BASES, snapped
from posenc.core.rotary import Schedule
from posenc.schedules.geometric import Geometric
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.yarn import YaRN

UNIT = 2.0**-24
"""The unit roundoff of float32."""
HALVES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The unit roundoffs of half precision."""
FLOORS = {torch.float16: 2.0**-25}
"""Half the spacing of numbers too small to be normal: an absolute error. bfloat16 has none that matters."""


def rounding(schedule: Schedule, rotary_dim: int) -> Tensor:
    """How far a float32 computation of each frequency may be from the exact one, relatively.

    The exponent, the logarithm of the base and their product are rounded once each, which ``ln(base^exponent)``
    magnifies; power, quotients, products and sums are about eight roundings more. In a blend, the error of the share
    counts relative to the undivided frequency, and a narrow ramp magnifies it.
    """
    made = schedule.frequencies(rotary_dim).inv_freq.double().abs()
    inside = schedule
    while isinstance(inside, Linear):
        inside = inside.schedule
    steep = 0.0
    if isinstance(inside, Llama3):
        spread = inside.high_freq_factor - inside.low_freq_factor
        steep = inside.high_freq_factor / spread if spread > 0 else 0.0
    elif isinstance(inside, YaRN):
        turns = log(inside.beta_fast / inside.beta_slow)
        steep = 1 + (log(inside.schedule.base) / turns if inside.rounding == "none" and turns > 0 else 0.0)
    depth = torch.where(made > 0, made, 1.0).log().abs()
    per_pair = (3 * depth + 8) * UNIT
    if steep and isinstance(inside, (Llama3, YaRN)) and inside.factor > 1:
        whole = inside.schedule.frequencies(rotary_dim).inv_freq.double().abs()
        here = inside.frequencies(rotary_dim).inv_freq.double().abs()
        blended = (here < whole * (1 - UNIT)) & (here > whole / inside.factor * (1 + UNIT))
        per_pair = torch.where(blended, per_pair * (1 + steep * whole / here.clamp_min(1e-300)), per_pair)
    return per_pair


@final
@dataclass(frozen=True)
class Ladder:
    """Frequencies to be read.

    Args:
        frequencies: radians per unit of position, one per pair.
        amplitude: the gain on rotated channels.
        rtol: how far, relatively, a reading may be from them.
        dtype: that they were held in. Not float64: they were computed in float32, and may be off by its roundings as well.
    """

    frequencies: tuple[float, ...]
    amplitude: float
    rtol: float
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return 2 * len(self.frequencies)

    @property
    def last(self) -> int:
        return len(self.frequencies) - 1

    @property
    def single(self) -> bool:
        return self.dtype != torch.float64

    def tolerance(self, pair: int) -> float:
        """How far a frequency may be off, relatively, before a rule for it is known."""
        value = abs(self.frequencies[pair])
        if not self.single or value == 0:
            return self.rtol
        computed = max(self.rtol, (3 * abs(log(value)) + 8) * UNIT)
        return computed + HALVES.get(self.dtype, 0.0) + FLOORS.get(self.dtype, 0.0) / value

    @property
    def amplitude_tolerance(self) -> float:
        return max(self.rtol, 8 * UNIT) if self.single else self.rtol

    @property
    def plain(self) -> bool:
        """Whether there is no amplitude."""
        return abs(self.amplitude - 1) <= self.amplitude_tolerance

    def scaled(self, factor: float) -> Ladder:
        """All frequencies multiplied."""
        return Ladder(tuple(value * factor for value in self.frequencies), self.amplitude, self.rtol, self.dtype)

    def made_by(self, schedule: Schedule) -> bool:
        """Whether a schedule makes these frequencies and this amplitude."""
        try:
            made = schedule.frequencies(self.width)
        except ValueError:
            return False
        if abs(float(made.amplitude) - self.amplitude) > self.amplitude_tolerance * abs(self.amplitude):
            return False
        given = torch.tensor(self.frequencies, dtype=torch.float64)
        off = (made.inv_freq.double() - given).abs() - FLOORS.get(self.dtype, 0.0)
        unit = HALVES.get(self.dtype, 0.0)
        if bool((off <= (self.rtol + unit) * given.abs()).all()):
            return True
        if not self.single or bool((off > (0.01 + unit) * given.abs()).any()):  # no rounding, which takes longer to work out
            return False
        return bool((off <= (rounding(schedule, self.width).clamp_min(self.rtol) + unit) * given.abs()).all())


def bases(ladder: Ladder, turning: int | None = None) -> Iterator[float]:
    """Bases that the ends of a ladder suggest, whose first frequency is 1; round ones first, then usual ones.

    Args:
        turning: look at so many pairs only.
    """
    count = len(ladder.frequencies) if turning is None else turning
    logs = [log(value) for value in ladder.frequencies[:count]]
    seen = set()
    for slope, slack in _slopes(ladder, logs):
        if abs(slope) * ladder.width / 2 < 690:  # beyond that it is no number
            for base in snapped(exp(-slope * ladder.width / 2), slack * ladder.width / 2, BASES):
                if base not in seen:
                    seen.add(base)
                    yield base
    yield from (base for base in BASES if base not in seen)


def _slopes(ladder: Ladder, logs: list[float]) -> Iterator[tuple[float, float]]:
    """Logarithms of the ratio of neighbours, at both ends together, at the fast one and at the slow one, with their errors."""
    last = len(logs) - 1
    if last < 1:
        return
    errors = [ladder.tolerance(pair) for pair in range(len(logs))]
    fast = _run([(pair, logs[pair] - logs[0], errors[0] + errors[pair]) for pair in range(1, last + 1)])
    slow = _run([(last - pair, logs[last] - logs[pair], errors[last] + errors[pair]) for pair in range(last - 1, -1, -1)])
    if fast < last and fast > 1 and slow > 1:
        groups = (range(fast + 1), range(last - slow, last + 1))
        top = bottom = 0.0
        for group in groups:
            centre = sum(group) / len(group)
            top += sum((pair - centre) * logs[pair] for pair in group)
            bottom += sum((pair - centre) ** 2 for pair in group)
        yield top / bottom, 2 * max(errors) / max(fast, slow)
    yield (logs[fast] - logs[0]) / fast, 2 * errors[fast] / fast
    yield (logs[last] - logs[last - slow]) / slow, 2 * errors[last] / slow
    factor_log = 10 * (ladder.amplitude - 1)  # of YaRN's usual amplitude
    if 0 < factor_log < -logs[last]:
        yield (logs[last] + factor_log) / last, (2 * errors[last] + 10 * ladder.amplitude * ladder.amplitude_tolerance) / last
    if fast > 1:  # the run may have swallowed a pair that is hardly blended
        yield logs[1] - logs[0], 2 * errors[1]


def _run(steps: list[tuple[int, float, float]]) -> int:
    """How many steps from one end share one ratio of neighbours."""
    low, high, count = -inf, inf, 1
    for distance, rise, error in steps:
        low, high = max(low, (rise - error) / distance), min(high, (rise + error) / distance)
        if low > high:
            break
        count = distance
    return count


def ratios(ladder: Ladder, base: float) -> list[float] | None:
    """Each frequency over the unscaled ladder's; ``None`` if they do not fall from 1, as a stretched context's do."""
    whole = Geometric(base).frequencies(ladder.width).inv_freq.tolist()
    found = [value / unscaled for value, unscaled in zip(ladder.frequencies, whole, strict=True)]
    slack = [8 * ladder.tolerance(pair) for pair in range(len(found))]
    rises = any(after > before * (1 + slack[pair] + slack[pair + 1]) for pair, (before, after) in enumerate(pairwise(found)))
    return None if rises or found[-1] >= 1 - slack[-1] or found[0] < 1 - slack[0] else found


@final
@dataclass(frozen=True)
class Shares:
    """How much of each pair's frequency is kept: 1 for kept, 0 for divided, with bounds from the tolerance."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def blended(self) -> list[int]:
        return [pair for pair, (low, high) in enumerate(zip(self.low, self.high, strict=True)) if low > 0 and high < 1]

    @property
    def kept(self) -> int:
        """The last pair that is kept."""
        return max((pair for pair, high in enumerate(self.high) if high >= 1), default=-1)

    def middle(self, pair: int) -> float:
        return (self.low[pair] + self.high[pair]) / 2


def shares(ladder: Ladder, ratios: list[float], factor: float) -> Shares:
    """The shares that a factor leaves."""
    lows, highs = [], []
    for pair, ratio in enumerate(ratios):
        error = ladder.tolerance(pair) * (1.0 if ladder.single else ratio)
        lows.append((ratio - error - 1 / factor) / (1 - 1 / factor))
        highs.append((ratio + error - 1 / factor) / (1 - 1 / factor))
    return Shares(tuple(lows), tuple(highs))
