"""Which schedules make a ladder of frequencies, the simplest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf, isfinite, log, pi
from typing import final

from torch import Tensor

from posenc.audit.ladders import llama3, yarn
from posenc.audit.ladders.llama3 import Candidate
from posenc.audit.ladders.numbers import BASES, FACTORS, digits_of, roundest, snapped
from posenc.audit.ladders.runs import Ladder, bases, ratios
from posenc.core.rotary import Frequencies, Schedule
from posenc.errors import ShapeError
from posenc.hf.describe import words
from posenc.schedules.base import AtLength
from posenc.schedules.explicit import Explicit
from posenc.schedules.geometric import Geometric
from posenc.schedules.hertz import Hertz
from posenc.schedules.linear import Linear
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.ntk import NTK
from posenc.schedules.proportional import Proportional


@final
@dataclass(frozen=True)
class Reading:
    """A schedule that makes the frequencies that were looked at. Its ``str`` is a sentence.

    Args:
        schedule: with the roundest numbers that make them.
        free: what of it the frequencies leave open, in words: ``"original length 4,081–4,128"``.
    """

    schedule: Schedule
    free: tuple[str, ...] = ()

    def __str__(self) -> str:
        match self.schedule:
            case Explicit(inv_freq=values, amplitude=amplitude):
                gain = "" if amplitude == 1 else f", amplitude {amplitude:.6g}"
                return f"{len(values)} frequencies that follow no known rule, from {max(values):.6g} to {min(values):.6g}{gain}"
            case Hertz(slowest=slowest, fastest=fastest):
                text = f"a ladder from {fastest:.6g} Hz down to {slowest:.6g} Hz, positions in seconds"
            case _:
                text = words(self.schedule)
        return f"{text} ({'; '.join(self.free)} cannot be told apart)" if self.free else text


def explain(inv_freq: Tensor, amplitude: float = 1.0, *, rtol: float = 1e-6) -> tuple[Reading, ...]:
    """The schedules that make these frequencies, the simplest first.

    The thing people get wrong: frequencies do not say which rule made them. NTK ×4 *is* a geometric ladder of another
    base, and a few hundred original lengths give the same rounded YaRN. The first reading is the simplest, not the
    true one; with a configuration at hand ask whether its promise is one of those that make them, `makes`.

    In order: `Geometric`, `Linear`, `NTK`, `Hertz`, `Proportional`, `Llama3` with factors 1 and 4, `YaRN` with betas 32
    and 1, `Llama3` and `YaRN` with others, `Linear` around these four, `LongRoPE` at a length (only with factors of two
    decimals over a usual base, because any ladder is some base divided by some factors), `Explicit`. Each is there once at
    most, and a less simple kind only if it is a likely one. `DynamicNTK` at a length is a `Geometric` of another base and
    read as one.

    Args:
        inv_freq: radians per unit of position. In float32, readings may be off by the roundings of a float32
            computation as well, about 3e-6 at slow pairs, and in half precision by its rounding; pass such numbers as
            they are, not widened.
        amplitude: the gain on rotated channels.
        rtol: how far, relatively, a reading's frequencies may be from the given ones.

    Shape:
        inv_freq: ``[pairs]``, one axis.

    Returns:
        Readings; the last is always `Explicit`.

    Raises:
        TypeError: no tensor of floating point.
        ShapeError: not ``[pairs]``. ValueError: numbers that are not finite, an amplitude of 0, an rtol outside (0, 1e-2].

    Example:
        >>> from posenc.audit.ladders.explaining import explain
        >>> from posenc.schedules.llama3 import Llama3
        >>> made = Llama3(Geometric(5e5), 8.0, 8192).frequencies(128, dtype=torch.float32)
        >>> print(explain(made.inv_freq)[0])
        base 500,000, Llama 3 ×8 from 8,192: wavelengths under 2,048 kept, over 8,192 divided
        >>> print(explain(NTK(Geometric(1e4), 4.0).frequencies(64).inv_freq)[0])
        base 41,829.4
    """
    ladder = _checked("explain", inv_freq, amplitude, rtol)
    found: list[Reading] = []
    if all(value == 0 or 1e-100 < value < 1e100 for value in ladder.frequencies):  # else memory, and ratios that overflow
        found = list(_geometric(ladder)) or list(_parts(ladder)) or list(_longrope(ladder))
    return (*found, Reading(Explicit(ladder.frequencies, ladder.amplitude)))


def makes(schedule: Schedule, live: Frequencies, rotary_dim: int, *, rtol: float = 1e-6) -> bool:
    """Whether a schedule makes these frequencies and this amplitude, float32 roundings of a float32 tensor allowed.

    Args:
        schedule: of a length rule, ``rule.at(length)``.

    Raises:
        As `explain`.

    Example:
        >>> makes(Geometric(41829.4), NTK(Geometric(1e4), 4.0).frequencies(64), 64)
        True
    """
    ladder = _checked("makes", live.inv_freq, float(live.amplitude), rtol)
    return ladder.width == rotary_dim and ladder.made_by(schedule)


def _checked(name: str, inv_freq: Tensor, amplitude: float, rtol: float) -> Ladder:
    if not isinstance(inv_freq, Tensor) or not inv_freq.is_floating_point():
        what = inv_freq.dtype if isinstance(inv_freq, Tensor) else type(inv_freq).__name__
        raise TypeError(f"{name}: inv_freq is {what}. Expected a tensor of floating point. Pass radians per position.")
    if inv_freq.ndim != 1 or not inv_freq.numel():
        raise ShapeError(
            f"{name}: inv_freq has shape {tuple(inv_freq.shape)}. Expected [pairs], one axis. Pass one sequence's, one axis's."
        )
    if inv_freq.is_meta:
        raise ValueError(
            f"{name}: inv_freq is on the meta device. Expected numbers. Move the module with to_empty and fill it."
        )
    values = inv_freq.detach().double().tolist()
    bad = [value for value in values if not isfinite(value)]
    if bad:
        raise ValueError(f"{name}: inv_freq contains {bad[0]}. Expected finite numbers. No rule makes it; look at the memory.")
    if isinstance(amplitude, bool) or not isinstance(amplitude, (int, float)) or not isfinite(amplitude) or amplitude == 0:
        raise ValueError(f"{name}: amplitude = {amplitude!r}. Expected a finite number other than 0. Pass 1.0 for none.")
    if not 0 < rtol <= 1e-2:
        raise ValueError(f"{name}: rtol = {rtol!r}. Expected above 0, at most 0.01. Measure the frequencies more closely.")
    return Ladder(tuple(values), float(amplitude), rtol, inv_freq.dtype)


def _first(ladder: Ladder, candidates: Iterator[Candidate]) -> Iterator[Reading]:
    for schedule, free in candidates:
        if ladder.made_by(schedule):
            yield Reading(schedule, free)
            return


def _outer(ladder: Ladder) -> list[float]:
    """Factors by which all frequencies may be divided, from the fastest."""
    fastest = ladder.frequencies[0]
    if abs(fastest - 1) <= ladder.tolerance(0):
        return [1.0]
    return [factor for factor in snapped(1 / fastest, ladder.tolerance(0)) if factor >= 1]


def _geometric(ladder: Ladder) -> Iterator[Reading]:
    """Ladders with one ratio of neighbours, and those that are cut off."""
    turning = next((pair for pair, value in enumerate(ladder.frequencies) if value == 0), len(ladder.frequencies))
    if any(ladder.frequencies[turning:]):
        return
    if turning < len(ladder.frequencies):
        yield from _first(ladder, _cut(ladder, turning))
        return
    fastest = ladder.frequencies[0]
    free = ("any base",) if turning == 1 else ()
    for factor in _outer(ladder):
        ladders = [Geometric(base) for base in bases(ladder.scaled(1 / fastest))]
        rules: list[Schedule] = list(ladders) if factor == 1 else [Linear(inner, factor) for inner in ladders]
        simplest = next(_first(ladder, ((rule, free) for rule in rules)), None)
        if simplest is not None:
            yield simplest
            if factor == 1 and isinstance(simplest.schedule, Geometric):
                yield from _first(ladder, _ntk(ladder, simplest.schedule.base))
                return
            yield from (reading for reading in _first(ladder, _hertz(ladder)) if _is_round(reading))
            return
    if not ladder.plain:
        yield from _first(ladder, _amplitude_only(ladder))
    yield from _first(ladder, _hertz(ladder))


def _amplitude_only(ladder: Ladder) -> Iterator[Candidate]:
    """YaRN ×1, perhaps all of it divided: the one rule that has an amplitude of its own."""
    inner = ladder.scaled(1 / ladder.frequencies[0])
    for factor in _outer(ladder):
        for base in bases(inner):
            for schedule, free in yarn.amplitude_only(inner, base):
                yield schedule if factor == 1 else Linear(schedule, factor), free


def _cut(ladder: Ladder, turning: int) -> Iterator[Candidate]:
    pairs = len(ladder.frequencies)
    proportion = roundest(turning / pairs, (turning + 0.999) / pairs, (0.25, 0.5, 0.75))
    free = () if turning > 1 else ("any base",)
    if turning == 0:
        yield Proportional(Geometric(), 0.0), ("any base and factor",)
        return
    for factor in _outer(ladder):
        for base in bases(ladder.scaled(1 / ladder.frequencies[0]), turning):
            yield Proportional(Geometric(base), proportion, factor), free


def _ntk(ladder: Ladder, base: float) -> Iterator[Candidate]:
    """The same ladder as a usual base that was raised by a round factor."""
    width = ladder.width
    if width < 4 or digits_of(base) <= 4:
        return
    for usual in BASES:
        if usual < base and 0 < (log(base) - log(usual)) * (width - 2) / width < 14:
            factor = (base / usual) ** ((width - 2) / width)
            slack = 4 * ladder.tolerance(ladder.last)
            rounded = roundest(factor * (1 - slack), factor * (1 + slack), FACTORS)
            if digits_of(rounded) <= 3:
                yield NTK(Geometric(usual), rounded), ()


def _hertz(ladder: Ladder) -> Iterator[Candidate]:
    fastest, slowest = ladder.frequencies[0] / (2 * pi), ladder.frequencies[-1] / (2 * pi)
    if 0 < slowest < fastest:
        for top in snapped(fastest, ladder.tolerance(0)):
            for bottom in snapped(slowest, ladder.tolerance(ladder.last)):
                if bottom < top:
                    yield Hertz(bottom, top), ()


def _is_round(reading: Reading) -> bool:
    return (
        isinstance(reading.schedule, Hertz) and max(map(digits_of, (reading.schedule.slowest, reading.schedule.fastest))) <= 4
    )


ENOUGH = 1000
"""So many tries for a rule: far more than an exact ladder needs, and a limit for noise, which is nearly read by all of them."""

_Reader = Callable[[Ladder, float, list[float]], Iterator[Candidate]]
# in the order of simplicity: rules with their usual settings, then with any
_USUAL: tuple[_Reader, ...] = (llama3.usual, yarn.usual)
_OTHERS: tuple[_Reader, ...] = (llama3.others, yarn.others)


def _parts(ladder: Ladder) -> Iterator[Reading]:
    """Ladders whose fast end is kept and whose slow end is divided, perhaps all of it divided once more."""
    fastest = ladder.frequencies[0]
    if min(ladder.frequencies) <= 0 or fastest > 1 + ladder.tolerance(0) or len(ladder.frequencies) < 3:
        return
    for outer in _outer(ladder):
        inner = ladder.scaled(1 / fastest)
        looked_at = [(base, found) for base in bases(inner) if (found := ratios(inner, base)) is not None]
        for settings in (_USUAL, _OTHERS):
            readings = []
            for read in settings:
                candidates = (candidate for base, found in looked_at for candidate in read(inner, base, found))
                around = ((schedule if outer == 1 else Linear(schedule, outer), free) for schedule, free in candidates)
                readings += list(_first(ladder, islice(around, ENOUGH)))
            if readings:
                yield from readings
                return


def _longrope(ladder: Ladder) -> Iterator[Reading]:
    """Usual bases divided by factors of two decimals."""
    if min(ladder.frequencies) <= 0:
        return
    for base in BASES:
        whole = Geometric(base).frequencies(ladder.width).inv_freq.tolist()
        factors = tuple(round(a / b, 2) if a / b < inf else inf for a, b in zip(whole, ladder.frequencies, strict=True))
        # decimals say something only where the tolerance is far below one
        telling = all(0 < factor < inf and ladder.tolerance(pair) * factor < 1e-3 for pair, factor in enumerate(factors))
        if telling and ladder.amplitude > 0:
            amplitude = roundest(ladder.amplitude, ladder.amplitude)
            rule = LongRoPE(Geometric(base), factors, factors, 4096, amplitude=amplitude)
            reading = next(_first(ladder, iter([(rule.at(4096), ("any original length",))])), None)
            if reading is not None:
                assert isinstance(reading.schedule, AtLength)
                yield reading
                return
