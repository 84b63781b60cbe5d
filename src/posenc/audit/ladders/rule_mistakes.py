"""Mistakes that only one rule invites, applied to the schedule that was promised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, floor, log, pi

import torch
from torch import Tensor

from posenc.audit.kinds import frequencies as kinds
from posenc.audit.ladders.mistakes import Mistake
from posenc.audit.ladders.numbers import snapped
from posenc.audit.ladders.runs import Ladder
from posenc.core.rotary import Frequencies, Schedule
from posenc.schedules.base import AtLength
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.geometric import Geometric
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.ntk import NTK
from posenc.schedules.proportional import Proportional
from posenc.schedules.yarn import YaRN

LENGTHS = tuple(2**power for power in range(8, 22))


def rule_mistakes(promised: Schedule, rotary_dim: int, live: Ladder) -> Iterator[Mistake]:
    """The likeliest first; numbers that a mistake leaves open are fitted to ``live``."""
    match promised:
        case Linear():
            yield from _of_linear(promised, rotary_dim)
        case NTK():
            yield from _of_ntk(promised, rotary_dim, live)
        case Proportional():
            yield from _of_proportional(promised, rotary_dim)
        case Llama3() if promised.factor > 1:
            yield from _by_parts(promised, rotary_dim)
            yield from _of_llama3(promised)
            yield from _other_numbers(promised, rotary_dim, live)
        case YaRN() if promised.factor > 1:
            yield from _by_parts(promised, rotary_dim)
            yield from _of_yarn(promised, rotary_dim)
            yield from _other_numbers(promised, rotary_dim, live)
        case AtLength(rule=LongRoPE() as rule):
            yield from _of_longrope(promised, rule, rotary_dim)
        case AtLength(rule=DynamicNTK() as rule):
            yield from _of_dynamic(promised, rule, rotary_dim, live)


def _times(made: Frequencies, factor: float) -> Frequencies:
    return Frequencies(made.inv_freq * factor, made.amplitude)


def _of_linear(promised: Linear, rotary_dim: int) -> Iterator[Mistake]:
    made, factor = promised.frequencies(rotary_dim), promised.factor
    yield Mistake(kinds.SCALING_INVERTED, f"multiplied by {factor:g}", _times(made, factor**2))
    yield Mistake(kinds.SCALING_TWICE, f"divided by {factor:g} twice", _times(made, 1 / factor))
    if isinstance(promised.schedule, Geometric):
        says = f"the base is raised for ×{factor:g} (NTK) and nothing divided"
        yield Mistake(kinds.SCALING, says, NTK(promised.schedule, factor))


def _of_ntk(promised: NTK, rotary_dim: int, live: Ladder) -> Iterator[Mistake]:
    ladder, factor = promised.schedule, promised.factor
    says = f"the base is multiplied by {factor:g}, without the exponent rotary_dim / (rotary_dim - 2)"
    yield Mistake(kinds.SCALING, says, Geometric(ladder.base * factor))
    yield Mistake(kinds.SCALING, f"all divided by {factor:g} (linear)", Linear(ladder, factor))
    yield Mistake(kinds.SCALING_TWICE, f"the base is raised for ×{factor:g} twice", NTK(ladder, factor**2))
    lowered = Geometric(ladder.base / factor ** (rotary_dim / (rotary_dim - 2)))
    yield Mistake(kinds.SCALING_INVERTED, f"the base is lowered for ×{factor:g}", lowered)
    for number in snapped(_stretch(ladder, rotary_dim, live), 4 * live.tolerance(live.last)):
        if number >= 1:
            yield Mistake(kinds.SCALING, f"factor {number:.6g} instead of {factor:g}", NTK(ladder, number))


def _of_dynamic(promised: AtLength, rule: DynamicNTK, rotary_dim: int, live: Ladder) -> Iterator[Mistake]:
    ladder, factor = rule.schedule, rule.factor
    yield Mistake(kinds.SCALING, f"the base is raised for ×{factor:g} (NTK), whatever the length", NTK(ladder, factor))
    yield Mistake(kinds.SCALING, f"all divided by {factor:g} (linear)", Linear(ladder, factor))
    original = rule.original_length or 1
    length = round((_stretch(ladder, rotary_dim, live) + factor - 1) * original / factor)
    if original < length != promised.length:
        yield Mistake(kinds.SCALING, f"the base of length {length:,} at length {promised.length:,}", rule.at(length))


def _stretch(ladder: Geometric, rotary_dim: int, live: Ladder) -> float:
    """The factor of the NTK rule that would make the live slow end."""
    if rotary_dim == 2 or live.frequencies[-1] <= 0:
        return 0.0
    slowest = ladder.frequencies(rotary_dim).inv_freq[-1]
    return float(slowest) * live.frequencies[0] / live.frequencies[-1]


def _of_longrope(promised: AtLength, rule: LongRoPE, rotary_dim: int) -> Iterator[Mistake]:
    long = promised.length > rule.original_length
    other = rule.at(rule.original_length + (0 if long else 1))
    which = "short" if long else "long"
    yield Mistake(kinds.SCALING, f"the {which} factors at a length of {promised.length:,}", other)
    whole, made = rule.schedule.frequencies(rotary_dim).inv_freq, promised.frequencies(rotary_dim)
    multiplied = Frequencies(whole * whole / made.inv_freq, made.amplitude)
    yield Mistake(kinds.SCALING_INVERTED, "multiplied by the factors", multiplied)


def _of_proportional(promised: Proportional, rotary_dim: int) -> Iterator[Mistake]:
    turning, factor = int(promised.proportion * rotary_dim // 2), promised.factor
    if 0 < turning < rotary_dim // 2:
        says = f"exponents over the turning {2 * turning} channels instead of all {rotary_dim}"
        steeper = Geometric(promised.schedule.base ** (rotary_dim / (2 * turning)))
        yield Mistake(kinds.FREQUENCY_DIVISOR, says, replace(promised, schedule=steeper))
    if factor > 1:
        made = promised.frequencies(rotary_dim)
        yield Mistake(kinds.SCALING_DROPPED, f"not divided by {factor:g}", _times(made, factor))
        yield Mistake(kinds.SCALING_INVERTED, f"multiplied by {factor:g}", _times(made, factor**2))
        yield Mistake(kinds.SCALING_TWICE, f"divided by {factor:g} twice", _times(made, 1 / factor))


def _rescaled(promised: Llama3 | YaRN, factor: float, rotary_dim: int) -> Frequencies:
    """The same pairs kept, blended and divided, by any factor, below 1 as well."""
    whole, made = promised.schedule.frequencies(rotary_dim).inv_freq, promised.frequencies(rotary_dim)
    share = (made.inv_freq / whole - 1 / promised.factor) / (1 - 1 / promised.factor)
    amplitude = made.amplitude
    if isinstance(promised, YaRN) and promised.amplitude is None:
        amplitude = replace(promised, factor=factor).resolved_amplitude if factor >= 1 else 1.0
    return Frequencies(whole * (1 / factor + share * (1 - 1 / factor)), amplitude)


def _by_parts(promised: Llama3 | YaRN, rotary_dim: int) -> Iterator[Mistake]:
    """Mistakes of the two rules that keep fast pairs and divide slow ones."""
    factor, made = promised.factor, promised.frequencies(rotary_dim)
    whole = promised.schedule.frequencies(rotary_dim)
    name = type(promised).__name__
    inverted = _rescaled(promised, 1 / factor, rotary_dim)
    yield Mistake(kinds.SCALING_INVERTED, f"slow pairs multiplied by {factor:g}", inverted)
    again = Frequencies(made.inv_freq.square() / whole.inv_freq, made.amplitude)
    yield Mistake(kinds.SCALING_TWICE, f"{name} applied to frequencies that it has scaled already", again)
    squared = Frequencies(_rescaled(promised, factor**2, rotary_dim).inv_freq, made.amplitude)
    yield Mistake(kinds.SCALING_TWICE, f"slow pairs divided by {factor:g} twice", squared)
    yield Mistake(kinds.SCALING_TWICE, f"{name}, and all divided by {factor:g} besides", _times(made, 1 / factor))
    yield Mistake(kinds.SCALING, f"all divided by {factor:g} (linear)", _times(whole, 1 / factor))
    if isinstance(promised.schedule, Geometric):
        yield Mistake(kinds.SCALING, f"the base is raised for ×{factor:g} (NTK)", NTK(promised.schedule, factor))
    original = promised.original_length or 1
    extended = round(original * factor)
    says = f"the extended length {extended:,} in place of the original {original:,}"
    yield Mistake(kinds.SCALING, says, replace(promised, original_length=extended))


def _of_llama3(promised: Llama3) -> Iterator[Mistake]:
    low, high = promised.low_freq_factor, promised.high_freq_factor
    twice = replace(promised, schedule=promised)
    yield Mistake(kinds.SCALING_TWICE, "Llama3 applied to wavelengths that it has scaled already", twice)
    for edge in (high, low):  # nothing lies between, and which edge decides depends on what is asked first
        step = replace(promised, low_freq_factor=edge, high_freq_factor=edge)
        yield Mistake(kinds.SCALING, "low_freq_factor and high_freq_factor are swapped", step)
    usual = replace(promised, low_freq_factor=1.0, high_freq_factor=4.0)
    yield Mistake(kinds.SCALING, f"factors 1 and 4 at the edges instead of {low:g} and {high:g}", usual)


def _of_yarn(promised: YaRN, rotary_dim: int) -> Iterator[Mistake]:
    fast, slow = promised.beta_fast, promised.beta_slow
    if promised.rounding == "outward":
        says = "the bounds of the ramp are not rounded"
        yield Mistake(kinds.SCALING, says, replace(promised, rounding="none"))
    else:
        says = "the bounds of the ramp are rounded (truncate: false is ignored)"
        yield Mistake(kinds.SCALING, says, replace(promised, rounding="outward"))
    usual = replace(promised, beta_fast=32.0, beta_slow=1.0)
    yield Mistake(kinds.SCALING, f"betas 32 and 1 instead of {fast:g} and {slow:g}", usual)
    whole = promised.schedule.frequencies(rotary_dim).inv_freq

    def ramped(divided: Tensor) -> Frequencies:
        return Frequencies(whole * (1 - divided) + whole / promised.factor * divided, promised.resolved_amplitude)

    yield Mistake(kinds.SCALING, "beta_fast and beta_slow are swapped", ramped(_swapped(promised, rotary_dim)))
    if fast > slow:
        turns = whole * (promised.original_length or 1) / (2 * pi)
        says = "the ramp runs over the number of turns, as in the paper, not over the pair's index"
        yield Mistake(kinds.SCALING, says, ramped(1 - ((turns - slow) / (fast - slow)).clamp(0, 1)))


def _swapped(promised: YaRN, rotary_dim: int) -> Tensor:
    """A ramp from the slow bound to the fast one, which falls: fast pairs are divided and slow ones kept."""
    low, high = (
        rotary_dim * log((promised.original_length or 1) / (turns * 2 * pi)) / (2 * log(promised.schedule.base))
        for turns in (promised.beta_slow, promised.beta_fast)
    )
    if promised.rounding == "outward":
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64)
    return ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)


def _other_numbers(promised: Llama3 | YaRN, rotary_dim: int, live: Ladder) -> Iterator[Mistake]:
    """Another factor or original length than promised."""
    slowest = float(promised.schedule.frequencies(rotary_dim).inv_freq[-1])
    if live.frequencies[-1] > 0:
        for factor in snapped(slowest / live.frequencies[-1], 4 * live.tolerance(live.last)):
            if abs(factor / promised.factor - 1) > 1e-4:
                made = _rescaled(promised, factor, rotary_dim)
                yield Mistake(kinds.SCALING, f"factor {factor:.6g} instead of {promised.factor:g}", made)
    for length in LENGTHS:
        says = f"original length {length:,} instead of {promised.original_length or 0:,}"
        yield Mistake(kinds.SCALING, says, replace(promised, original_length=length))
