"""Which mistake made a ladder of frequencies that is not the promised one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import isfinite, log, sqrt

import torch
from torch import Tensor

from posenc.audit.findings import Finding, Kind
from posenc.audit.kinds import frequencies as kinds
from posenc.audit.ladders.explaining import Reading, explain
from posenc.audit.ladders.mistakes import Mistake, fitted_mistakes, plain_mistakes
from posenc.audit.ladders.numbers import digits_of
from posenc.audit.ladders.rule_mistakes import rule_mistakes
from posenc.audit.ladders.runs import FLOORS, UNIT, Ladder, rounding
from posenc.audit.ladders.runs import HALVES as HALVES
from posenc.core.rotary import Frequencies, Schedule, check_rotary_dim
from posenc.errors import ShapeError
from posenc.schedules.base import check_schedule
from posenc.schedules.explicit import Explicit
from posenc.schedules.geometric import Geometric
from posenc.schedules.yarn import YaRN


def diagnose(live: Frequencies, promised: Schedule, rotary_dim: int, *, where: str, length: int | None = None) -> list[Finding]:
    """What is wrong with frequencies and amplitude that should be a schedule's; nothing if they are.

    The thing people get wrong: a table that is finite, falls from 1 and runs fluent text may still be another model's.
    Values are compared, not shapes; differences of float32 arithmetic are allowed, about 3e-6 of a frequency, and where
    one is larger the known mistakes are applied to the promise until one of them makes the live numbers.

    Args:
        live: what a model holds, in any floating dtype.
        promised: what its configuration says; of a length rule, ``rule.at(length)``.
        rotary_dim: how many channels turn.
        where: the module, for the findings.
        length: in tokens; angle errors are given at its last position.

    Shape:
        live.inv_freq: ``[pairs]``.

    Returns:
        Findings, one for the frequencies and one for the amplitude at most, and one for half precision.

    Raises:
        ShapeError: frequencies of several axes or sequences. TypeError: no schedule, or frequencies that are no floats.

    Example:
        >>> from posenc.schedules.linear import Linear
        >>> live = Geometric(1e4).frequencies(64, dtype=torch.float32)
        >>> [finding.id for finding in diagnose(live, Linear(Geometric(1e4), 4.0), 64, where="rotary")]
        ['frequency-scaling-dropped']
        >>> diagnose(live, Geometric(1e4), 64, where="rotary")
        []
    """
    check_schedule("diagnose", promised)
    check_rotary_dim(rotary_dim, name="diagnose")
    inv_freq = live.inv_freq.detach()
    if inv_freq.ndim != 1:
        raise ShapeError(
            f"diagnose: inv_freq has shape {tuple(inv_freq.shape)}. Expected [pairs]. Pass one sequence's, one axis's."
        )
    if not inv_freq.is_floating_point():
        raise TypeError(f"diagnose: inv_freq is {inv_freq.dtype}. Expected floating point. Pass radians per position.")
    expected = promised.frequencies(rotary_dim)
    told = _Told(where, promised, expected.inv_freq.double(), length)
    if inv_freq.is_meta:
        return [told.finding(kinds.FREQUENCY_GARBAGE, "they are on the meta device: nothing was ever filled in")]
    given = inv_freq.cpu().double()
    bad = [value for value in given.tolist() if not isfinite(value)]
    if bad:
        how_many = f"{len(bad)} of {given.numel()} frequencies are not finite, the first {bad[0]}"
        return [told.finding(kinds.FREQUENCY_GARBAGE, how_many), *_amplitude(told, live, expected)]
    if given.numel() != rotary_dim // 2:
        says = f"{given.numel()} frequencies: {_read(given, inv_freq.dtype, 1.0)}" if given.numel() else "no frequencies"
        return [told.finding(kinds.FREQUENCY_WIDTH, says), *_amplitude(told, live, expected)]
    half = inv_freq.dtype in HALVES
    found: list[Finding] = []
    if half or _was_halved(given, told.expected):
        if not half:
            return [_rounded(told, given, inv_freq.dtype), *_amplitude(told, live, expected)]
        found.append(_rounded(told, given, inv_freq.dtype))
    if _close(given, told.expected, rounding(promised, rotary_dim), inv_freq.dtype):
        return [*found, *_amplitude(told, live, expected)]
    return [*found, *_named(told, given, inv_freq.dtype, live, expected, rotary_dim)]


class _Told:
    """How findings about one table are worded."""

    def __init__(self, where: str, promised: Schedule, expected: Tensor, length: int | None) -> None:
        self.where, self.promised, self.expected, self.length = where, promised, expected, length

    def finding(self, kind: Kind, measured: str) -> Finding:
        fast, slow = float(self.expected[0]), float(self.expected[-1])
        expected = f"{Reading(self.promised)}: {len(self.expected)} frequencies from {fast:.6g} to {slow:.6g}"
        return kind.at(self.where, measured=measured, expected=expected)

    def error(self, given: Tensor) -> str:
        """The largest angle error, in words."""
        off = (given - self.expected).abs()
        pair = int(off.argmax())
        worst = float(off[pair])
        numbers = f"pair {pair} has {float(given[pair]):.6g}, not {float(self.expected[pair]):.6g}"
        if self.length is None:
            return f"{numbers}, {worst * 1000:.3g} rad off after 1,000 positions"
        return f"{numbers}, {worst * (self.length - 1):.6g} rad off at position {self.length - 1:,}"


def _close(given: Tensor, made: Tensor, allowed: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    return bool(((given - made).abs() <= (allowed + HALVES.get(dtype, 0.0)) * made.abs() + FLOORS.get(dtype, 0.0)).all())


def _was_halved(given: Tensor, expected: Tensor) -> bool:
    """Whether these are the promised numbers, rounded to half precision and widened again."""
    for dtype in HALVES:
        exact, twice = expected.to(dtype).double(), expected.float().to(dtype).double()
        if bool(((given == exact) | (given == twice)).all()) and not bool((exact == expected).all()):
            return not _close(given, expected, 8 * UNIT * torch.ones_like(expected))
    return False


def _rounded(told: _Told, given: Tensor, dtype: torch.dtype) -> Finding:
    held = f"{str(dtype).removeprefix('torch.')} frequencies"
    says = held if dtype in HALVES else f"{held} that were rounded to half precision before"
    return told.finding(kinds.FREQUENCY_ROUNDED, f"{says}: {told.error(given)}")


def _named(
    told: _Told, given: Tensor, dtype: torch.dtype, live: Frequencies, expected: Frequencies, rotary_dim: int
) -> Iterator[Finding]:
    """The mistake that makes the live frequencies; the amplitude's own, unless that mistake makes both."""
    ladder = Ladder(tuple(given.tolist()), 1.0, 1e-6, dtype if dtype in HALVES else torch.float32)
    promise = rounding(told.promised, rotary_dim)
    gain = _gain(live, expected)
    best: Mistake | None = None
    made_both = False
    known = chain(
        plain_mistakes(told.promised, rotary_dim),
        rule_mistakes(told.promised, rotary_dim, ladder),
        fitted_mistakes(told.promised, rotary_dim, ladder),
    )
    for mistake in known if bool(given.any()) else ():
        made = mistake.frequencies(rotary_dim)
        if made is None:
            continue
        depth = made.inv_freq.double().abs().clamp_min(1e-300).log().abs()
        if _close(given, made.inv_freq.double(), torch.maximum(promise, (3 * depth + 8) * UNIT), dtype):
            made_both = _same_gain(gain, float(made.amplitude)) or _same_gain(gain, float(expected.amplitude))
            best = mistake if best is None or made_both else best
            if made_both:
                break
    if best is not None:
        yield told.finding(best.kind, f"{best.says}; {told.error(given)}")
    elif not bool(given.any()):
        yield told.finding(kinds.FREQUENCY_GARBAGE, "all zeros: no pair turns")
    else:
        reading = _read(given, dtype, 1.0)
        if gain > 1 and isfinite(gain):  # YaRN's own amplitude comes with its frequencies
            natural = _read(given, dtype, gain)
            made_both = isinstance(natural.schedule, YaRN) and natural.schedule.amplitude is None
            reading = natural if made_both else reading
        yield told.finding(_kind_of(reading, told.promised), f"{reading}; {told.error(given)}")
    if not made_both:
        yield from _amplitude(told, live, expected)


def _read(given: Tensor, dtype: torch.dtype, gain: float) -> Reading:
    """The simplest schedule that makes them; float64 may be float32 that was widened."""
    narrow = given.to(dtype if dtype in HALVES else torch.float32)
    return explain(narrow if narrow.isfinite().all() else given, gain)[0]


def _kind_of(reading: Reading, promised: Schedule) -> Kind:
    match reading.schedule:
        case Explicit():
            return kinds.FREQUENCY_GARBAGE
        case Geometric(base=base) if digits_of(base) <= 4 and not isinstance(promised, Geometric):
            return kinds.SCALING_DROPPED
    return kinds.SCALING


def _gain(live: Frequencies, expected: Frequencies) -> float:
    """The live amplitude; of several sequences, the one farthest from the promise."""
    gains = torch.as_tensor(live.amplitude).detach().double().flatten().tolist()
    return float(max(gains, key=lambda gain: abs(gain - float(expected.amplitude)) if isfinite(gain) else float("inf")))


def _same_gain(live: float, promised: float) -> bool:
    # a logarithm, a product and a sum in float32, where an amplitude may be kept
    return abs(live - promised) <= 8 * UNIT * abs(promised)


def _amplitude(told: _Told, live: Frequencies, expected: Frequencies) -> Iterator[Finding]:
    gain, right = _gain(live, expected), float(expected.amplitude)
    if _same_gain(gain, right):
        return
    wanted = f"{right:.6g}, of {Reading(told.promised)}"
    if gain == 1:
        yield kinds.AMPLITUDE_MISSING.at(told.where, measured="amplitude 1: cos and sin are not multiplied", expected=wanted)
        return
    says = next((how for how, value in _amplitudes(told.promised, right) if _same_gain(gain, value)), None)
    measured = f"amplitude {gain:.6g}" + (f": {says}" if says else "")
    yield kinds.AMPLITUDE.at(
        told.where, measured=f"{measured}; scores are {(gain / right) ** 2:.4g} times the right ones", expected=wanted
    )


def _amplitudes(promised: Schedule, right: float) -> Iterator[tuple[str, float]]:
    """Known ways to get it wrong."""
    yield "applied twice", right**2
    yield "divided by instead of multiplied", 1 / right
    yield "its square root", sqrt(abs(right))
    if isinstance(promised, YaRN):
        natural = 0.1 * log(promised.factor) + 1
        yield "0.1 · ln(factor) + 1, whatever else the configuration says", natural
        yield "0.1 · ln(factor) + 1, squared", natural**2
        for key in ("mscale", "mscale_all_dim"):
            weight = getattr(promised, key)
            if weight:
                yield f"{key} alone", 0.1 * weight * log(promised.factor) + 1
        yield "the softmax scale's multiplier", promised.scale_multiplier
