"""Ladders read as YaRN's: shares that fall linearly in the pair's index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, exp, inf, log, pi
from typing import Literal, final

from posenc.audit.ladders.llama3 import Candidate
from posenc.audit.ladders.numbers import FACTORS, LENGTHS, digits_of, length_range, round_length, roundest, snapped
from posenc.audit.ladders.runs import Ladder, shares
from posenc.schedules.geometric import Geometric
from posenc.schedules.yarn import YaRN


@final
@dataclass(frozen=True)
class _Ramp:
    """From the last pair that is kept to the first that is divided."""

    factor: float
    low: float
    high: float
    rounding: Literal["outward", "none"]


def amplitude_only(ladder: Ladder, base: float) -> Iterator[Candidate]:
    """An unscaled ladder with an amplitude: ×1."""
    for length in LENGTHS if base > 1 and ladder.amplitude > 0 else ():
        amplitude = next(_amplitudes(ladder, 1.0))
        yield YaRN(Geometric(base), 1.0, length, amplitude=amplitude), ("any original length",)


def usual(ladder: Ladder, base: float, ratios: list[float]) -> Iterator[Candidate]:
    """With ``beta_fast = 32`` and ``beta_slow = 1``."""
    for ramp in _ramps(ladder, base, ratios):
        low, high = _lengths(ladder, base, ramp)
        exact = () if high == inf else (round((low + high) / 2),)  # bounds that are not rounded leave one length
        for length in dict.fromkeys((round_length(low, high), *exact)):
            if length is not None and low <= length <= high:
                rule = YaRN(Geometric(base), ramp.factor, length, rounding=ramp.rounding)
                free = length_range(low, high) if ramp.rounding == "outward" else ()
                yield from ((replace(rule, amplitude=gain), free) for gain in _amplitudes(ladder, ramp.factor))


def others(ladder: Ladder, base: float, ratios: list[float]) -> Iterator[Candidate]:
    """With any betas."""
    for ramp in _ramps(ladder, base, ratios):
        for length, fast, slow, free in _betas(ladder, base, ramp):
            if fast >= slow > 0:
                rule = YaRN(Geometric(base), ramp.factor, length, beta_fast=fast, beta_slow=slow, rounding=ramp.rounding)
                yield from ((replace(rule, amplitude=gain), free) for gain in _amplitudes(ladder, ramp.factor))


def _amplitudes(ladder: Ladder, factor: float) -> Iterator[float | None]:
    """``None`` where the amplitude follows from the factor."""
    slack = ladder.amplitude_tolerance
    if abs(0.1 * log(factor) + 1 - ladder.amplitude) <= slack * abs(ladder.amplitude):
        yield None
    elif ladder.amplitude > 0:
        yield from snapped(ladder.amplitude, slack)


def _wavelength(base: float, width: int, pair: float) -> float:
    exponent = 2 * pair / width * log(base)
    return 2 * pi * exp(exponent) if exponent < 700 else inf


def _lengths(ladder: Ladder, base: float, ramp: _Ramp) -> tuple[float, float]:
    """Original lengths that give these bounds with betas 32 and 1."""
    width = ladder.width
    if ramp.rounding == "none":
        slack = max(
            1e-5, 8 * ladder.tolerance(0)
        )  # wider than bounds read from blends of float32; which length it is, the check of the schedule decides
        fast = 32 * _wavelength(base, width, ramp.low)
        slow = _wavelength(base, width, ramp.high)
        low = 1.0 if ramp.low <= 0 else fast * (1 - slack)
        return max(low, slow * (1 - slack)), min(fast, slow) * (1 + slack)
    low = 1.0 if ramp.low == 0 else 32 * _wavelength(base, width, ramp.low)
    high = 32 * _wavelength(base, width, ramp.low + 1)
    return (
        max(low, _wavelength(base, width, ramp.high - 1)),
        min(high, inf if ramp.high == width - 1 else _wavelength(base, width, ramp.high)),
    )


def _betas(ladder: Ladder, base: float, ramp: _Ramp) -> Iterator[tuple[int, float, float, tuple[str, ...]]]:
    """Original lengths and betas that give these bounds."""
    width = ladder.width
    if ramp.rounding == "none":
        slow, fast = _wavelength(base, width, ramp.high), _wavelength(base, width, ramp.low)
        free = ("original length and both betas, all multiplied by one number",)
        for length in dict.fromkeys((round(slow), *LENGTHS)):
            both = [roundest(length / edge * (1 - 1e-6), length / edge * (1 + 1e-6)) for edge in (fast, slow)]
            if length >= 1 and all(digits_of(beta) <= 3 for beta in both):
                yield length, both[0], both[1], free
        yield LENGTHS[0], LENGTHS[0] / fast, LENGTHS[0] / slow, free
        return
    least, most = _wavelength(base, width, ramp.high - 1), _wavelength(base, width, ramp.high)
    found = round_length(least, most)
    length, slow_beta = (found, 1.0) if found is not None else (LENGTHS[0], roundest(LENGTHS[0] / most, LENGTHS[0] / least))
    fast_low = length / _wavelength(base, width, ramp.low + 1) * (1 + 1e-9)  # that one itself rounds to the next pair
    fast_low, fast_high = max(fast_low, slow_beta), length / _wavelength(base, width, ramp.low)
    if fast_low <= fast_high:
        fast_beta = roundest(fast_low, fast_high, (32.0, 16.0, 4.0, 64.0, 8.0))
        betas = f"beta_fast {fast_low:.4g}–{fast_high:.4g}"
        yield length, fast_beta, slow_beta, (*length_range(least, most), betas)


def _ramps(ladder: Ladder, base: float, ratios: list[float]) -> Iterator[_Ramp]:
    """Ramps through the shares, within the bounds that YaRN keeps to."""
    for ramp in chain(_divided(ladder, base, ratios), _undivided(ladder, base, ratios)):
        if ramp.low > -1e-3 and ramp.low < ramp.high <= ladder.width - 1:
            yield ramp if ramp.low >= 0 else replace(ramp, low=0.0)


def _divided(ladder: Ladder, base: float, ratios: list[float]) -> Iterator[_Ramp]:
    usual_span = ladder.width * log(32) / (2 * log(base)) if base > 1 else inf
    for factor in snapped(1 / ratios[-1], 4 * ladder.tolerance(ladder.last), FACTORS):
        if factor <= 1:
            continue
        kept = shares(ladder, ratios, factor)
        blended = kept.blended
        if not blended:
            if 0 <= kept.kept < ladder.last:
                yield _Ramp(factor, kept.kept, kept.kept + 1, "outward")
        elif len(blended) == 1:
            pair, fallen = blended[0], 1 - kept.middle(blended[0])
            if abs(fallen - 0.5) < 1e-3:
                yield _Ramp(factor, pair - 1, pair + 1, "outward")
            yield _Ramp(factor, pair - fallen * usual_span, pair + (1 - fallen) * usual_span, "none")
            low = max(pair - 1.0, (pair - fallen * (pair + 1)) / (1 - fallen))
            yield _Ramp(factor, low, low + (pair - low) / fallen, "none")
        else:
            first, last = blended[0], blended[-1]
            slope = (kept.middle(first) - kept.middle(last)) / (last - first)
            if slope <= 0:
                continue
            low = first - (1 - kept.middle(first)) / slope
            slack = 64 * max(high - low for low, high in zip(kept.low, kept.high, strict=True))
            if any(abs((pair - low) * slope - 1 + kept.middle(pair)) > slack for pair in blended):
                continue
            yield from _both(factor, low, low + 1 / slope)


def _undivided(ladder: Ladder, base: float, ratios: list[float]) -> Iterator[_Ramp]:
    """No pair is divided by the whole factor: the ramp ends beyond the slowest pair, and only its slope is known."""
    last = ladder.last
    fallen = [1 - ratio for ratio in ratios]
    noise = ladder.tolerance(last) * (1.0 if ladder.single else ratios[last])
    if base <= 1 or fallen[last] - fallen[last - 1] <= 4 * noise:
        return
    first = next(pair for pair, ratio in enumerate(ratios) if ratio < 1 - 8 * ladder.tolerance(pair))
    start = last - 1.0  # where the slowest pair is the only one on the ramp: the one before it is kept
    if first < last:
        start = last - fallen[last] * (last - first) / (fallen[last] - fallen[first])
    steepness = fallen[last] / (last - start)
    ends: list[tuple[float, float, Literal["outward", "none"]]] = []
    whole = round(start)
    if abs(start - whole) < 1e-3 and whole >= 0:
        ends = [(whole, end, "outward") for end in range(last + 1, ladder.width)]
    ends.append((start, start + ladder.width * log(32) / (2 * log(base)), "none"))
    found = []
    for low, high, how in ends:
        share = steepness * (high - low)
        if 0 < share < 1:
            slack = 16 * ladder.tolerance(last) / (1 - share)
            found += [_Ramp(factor, low, high, how) for factor in snapped(1 / (1 - share), slack, FACTORS)]
    natural = exp(10 * (ladder.amplitude - 1)) if 0 <= ladder.amplitude - 1 < 50 else 0.0
    found.sort(key=lambda ramp: (abs(ramp.factor - natural) > 1e-4 * ramp.factor, digits_of(ramp.factor)))
    yield from found


def _both(factor: float, low: float, high: float) -> Iterator[_Ramp]:
    """With rounded bounds where they are integers, and as they are."""
    near = round(low), round(high)
    if abs(low - near[0]) < 1e-3 and abs(high - near[1]) < 1e-3 and ceil(low - 1e-3) >= 0:
        yield _Ramp(factor, *near, "outward")
    yield _Ramp(factor, low, high, "none")
