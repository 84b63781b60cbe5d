"""Reading a sinusoidal code off a table: layout, frequencies, where it starts and how large it is."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import exp, isclose, log, pi
from typing import Literal, final

import torch
from torch import Tensor

from posenc.core.conventions import Layout
from posenc.core.sinusoid import concatenate, interleave

First = Literal["sine", "cosine"]

# sine and cosine of one angle, rounded to bfloat16, keep a modulus of 1 within 2^-8; phases of half-precision angles are off by
# 2^-8 of a radian per position. A table that is no code misses by the order of 1.
_LIKE_A_CODE = 0.03
_PAPER = 10_000.0


@final
@dataclass(frozen=True)
class Ladder:
    """Frequencies in words.

    Args:
        frequencies: radians per unit of position, as a rule makes them or, without one, as measured.
        rule: whose; ``None`` for none that is known.
        base: of the rule.
        speed: the first frequency, 1 in every released rule.
    """

    frequencies: Tensor
    rule: str | None = None
    base: float = _PAPER
    speed: float = 1.0

    def __str__(self) -> str:
        if self.rule is None:
            low, high = self.frequencies.abs().min().item(), self.frequencies.abs().max().item()
            return f"{len(self.frequencies)} frequencies of no known rule, {high:.6g} to {low:.6g} radians per unit of position"
        speed = "" if isclose(self.speed, 1, rel_tol=1e-6) else f", positions times {self.speed:.6g}"
        return f"{RULES[self.rule]}, base {self.base:,.7g}{speed}"


RULES = {
    "paper": "paper frequencies, base^(-2i/width)",
    "tensor2tensor": "tensor2tensor frequencies, base^(-i/(width/2 - 1))",
    "full width": "frequencies base^(-i/width), the exponents halved",
    "doubled": "frequencies base^(-4i/width), the exponents doubled",
    "from one": "frequencies base^(-2i/width) with i from 1",
}
"""The rules that a ladder can follow; the last three are mistakes that people make with the first."""
MISTAKES = ("full width", "doubled", "from one")


@final
@dataclass(frozen=True)
class Code:
    """A sinusoidal code: ``amplitude · sin(frequency · (position + offset))`` and the cosine."""

    width: int
    layout: Layout
    first: First
    ladder: Ladder
    offset: float
    amplitude: float

    def rows(self, positions: Tensor) -> Tensor:
        """The code of positions from float64 angles: ``[seq, width]``."""
        return self._written((positions.to(torch.float64) + self.offset)[:, None] * self.ladder.frequencies)

    def _written(self, angle: Tensor) -> Tensor:
        sin, cos = angle.sin(), angle.cos()
        first, second = (sin, cos) if self.first == "sine" else (cos, sin)
        width = min(self.width, 2 * angle.shape[-1])
        arranged = interleave(first, second, width) if self.layout == "interleaved" else concatenate(first, second, width)
        return self.amplitude * torch.nn.functional.pad(arranged, (0, self.width - width))

    def rounded(self, positions: Tensor, what: str, dtype: torch.dtype) -> Tensor:
        """The same with ``what`` ("positions", "frequencies", "angles") rounded to a dtype."""
        at, speeds = positions.to(torch.float64) + self.offset, self.ladder.frequencies
        if what != "frequencies":
            at = at.to(dtype).to(torch.float64)
        if what != "positions":
            speeds = speeds.to(dtype).to(torch.float64)
        angle = at[:, None] * speeds
        return self._written(angle.to(dtype).to(torch.float64) if what == "angles" else angle)

    def described(self) -> tuple[str, ...]:
        """In words, one fact each."""
        order = f"{self.layout} layout" + ("" if self.first == "sine" else ", cosine first")
        words = ["sinusoidal", order, str(self.ladder)]
        if self.offset:
            words.append(f"the first row is that of position {self.offset:g}")
        if self.amplitude != 1:
            words.append(f"amplitude {self.amplitude:.6g}")
        return tuple(words)


def read_code(rows: Tensor, spacing: float = 1.0, *, resolution: float = 2.0**-24) -> Code | None:
    """The code that a table holds, or ``None`` if it is none.

    Args:
        rows: ``[seq, width]`` in float64, at positions ``0, spacing, 2 · spacing, …``.
        resolution: the unit roundoff of the dtype that the rows came in.
    """
    if len(rows) < 3:
        return None
    found = [item for layout in _LAYOUTS for item in _as_layout(rows, layout, spacing, resolution)]
    return min(found, key=lambda item: item[0])[1] if found else None


_LAYOUTS: tuple[Layout, ...] = ("interleaved", "concatenated")


def _as_layout(rows: Tensor, layout: Layout, spacing: float, resolution: float) -> list[tuple[float, Code]]:
    """The readings of a table in one layout, with how badly each fits."""
    width = rows.shape[-1]
    used = width - int(width % 2 == 1 and bool((rows[:, -1] == 0).all()))  # tensor2tensor fills an odd width with a zero
    pairs = used // 2
    if not pairs:
        return []
    step, second = (2, 1) if layout == "interleaved" else (1, (used + 1) // 2)
    a, b = (rows[:, at : at + (pairs - 1) * step + 1 : step] for at in (0, second))
    size = (a.square() + b.square()).sqrt()
    amplitude = size.mean().item()
    noise = (size - amplitude).abs().max().item()
    if not amplitude > 0 or noise > _LIKE_A_CODE * amplitude:
        return []
    if isclose(amplitude, 1, abs_tol=max(noise, 1e-6)):
        amplitude = 1.0
    read = []
    orders: tuple[tuple[First, Tensor], ...] = (("sine", torch.complex(b, a)), ("cosine", torch.complex(a, b)))
    for first, wave in orders:
        speeds, reached = _speeds(wave)
        offset, miss = _offset(wave[0].angle(), speeds / spacing)
        if miss > 4 * _LIKE_A_CODE:
            continue
        # both ends of the span that a speed was measured over are rounded; pairs that left the span early were formed roughly
        errors = 8 * max(resolution, noise / amplitude) / reached + (reached < len(rows) - 1) * 2.0**-7 * speeds.abs()
        odd = (_with_odd_one(values, used) for values in (speeds / spacing, errors / spacing))
        ladder = name_ladder(next(odd), used, next(odd))
        near = round(2 * offset / spacing) / 2 * spacing
        offset = near if abs(offset - near) <= 0.02 * spacing else offset
        backwards = float(speeds.sum() < 0)  # a single pair reads as both orders, one of them turning the other way
        read.append((miss + backwards, Code(width, layout, first, ladder, offset, amplitude)))
    return read


def _speeds(wave: Tensor) -> tuple[Tensor, Tensor]:
    """Radians per row of each column, from one row to the next, then over spans that double while they agree; and that span."""
    last, span = len(wave) - 1, 1
    speed = (wave[1] * wave[0].conj()).angle()
    reached = torch.ones_like(speed)
    going = torch.ones_like(speed, dtype=torch.bool)
    while span < last:
        span = min(2 * span, last)
        off = _wrapped((wave[span] * wave[0].conj()).angle() - speed * span)
        going &= off.abs() < 0.5
        speed = torch.where(going, speed + off / span, speed)
        reached = torch.where(going, float(span), reached)
    return speed, reached


def _offset(phase: Tensor, speeds: Tensor) -> tuple[float, float]:
    """The position whose phases these are, and how far the worst one is off.

    The slowest pair says roughly where, since it has not come round yet; each faster one says it more exactly.
    """
    place = 0.0
    for index in speeds.abs().argsort().tolist():
        if speeds[index].abs() > 1e-12:
            place += (_wrapped(phase[index] - place * speeds[index]) / speeds[index]).item()
    return place, _wrapped(phase - place * speeds).abs().max().item()


def _wrapped(angle: Tensor) -> Tensor:
    return (angle + pi).remainder(2 * pi) - pi


def _with_odd_one(speeds: Tensor, width: int) -> Tensor:
    """An odd width has one sine more, without a cosine to read its speed with: the next of the ladder."""
    if width % 2 == 0 or len(speeds) < 2:
        return speeds
    return torch.cat([speeds, speeds[-1:] * (speeds[-1] / speeds[0]).abs() ** (1 / (len(speeds) - 1))])


def name_ladder(speeds: Tensor, width: int, errors: Tensor) -> Ladder:
    """The rule that frequencies follow: the paper's before tensor2tensor's before mistakes with them before another base.

    Args:
        errors: how far each may be measured wrong.
    """

    def fits(expected: Tensor, rounding: float = 2.0**-20) -> bool:
        # float32 exponents and angles are off by less than 2^-20 of a frequency
        return bool(((speeds - expected).abs() <= errors + rounding * expected).all())

    if not (speeds > 0).all():
        return Ladder(speeds)
    steps = torch.arange(len(speeds), dtype=torch.float64)
    paper = -2 * log(_PAPER) / width
    slopes = {
        "paper": paper,
        "tensor2tensor": -log(_PAPER) / max(width // 2 - 1, 1),
        "from one": paper,
        "full width": paper / 2,
        "doubled": 2 * paper,
    }
    known = {rule: (slope * (steps + (rule == "from one"))).exp() for rule, slope in slopes.items()}
    for rule, expected in known.items():
        if fits(expected):
            return Ladder(expected, rule)
    if len(speeds) < 2:
        return Ladder(speeds)
    start, slope = _line(steps, speeds.log(), (errors / speeds + 2.0**-20).square())
    if slope >= 0 or not fits((start + slope * steps).exp()):
        for rule, expected in known.items():
            if fits(expected, 2.0**-8):  # a known ladder rounded to half precision
                return Ladder(expected, rule)
        return Ladder(speeds)
    for rule in ("paper", "tensor2tensor"):
        expected = (start + slopes[rule] * steps).exp()
        if fits(expected):  # positions rounded to half precision stretch the span by up to 2^-8
            return Ladder(expected, rule, speed=exp(start)) if abs(start) > 2.0**-8 else Ladder(known[rule], rule)
    base = exp(-slope * width / 2)
    for simple in (float(f"{base:.2g}"), base):
        expected = (-2 * log(simple) / width * steps).exp()
        if fits(expected):
            return Ladder(expected, "paper", simple)
    return Ladder((start + slope * steps).exp(), "paper", base, exp(start))


def _line(x: Tensor, y: Tensor, variance: Tensor) -> tuple[float, float]:
    """Start and slope of the line through points of given variance."""
    weight = 1 / variance
    middle = (weight * x).sum() / weight.sum()
    slope = (weight * (x - middle) * y).sum() / (weight * (x - middle).square()).sum()
    return ((weight * y).sum() / weight.sum() - slope * middle).item(), slope.item()


def apart(rows: Tensor, positions: Tensor) -> str | None:
    """How sine and cosine of a pair come to turn at different speeds, if they do by one of the mistakes that people make."""
    width = rows.shape[-1]
    channel = torch.arange(width, dtype=torch.float64)
    mistakes = {
        "the exponent counts channels one by one, c/width": channel / width,
        "the exponent of channel c is 2c/width": 2 * channel / width,
    }
    for (words, exponent), base in product(mistakes.items(), (_PAPER, 1000.0)):
        angle = positions.to(torch.float64)[:, None] * base**-exponent
        waves = torch.where(channel % 2 == 0, angle.sin(), angle.cos())
        # float32 angles of positions below 2^12 are off by 2^-11 at most; another formula is off by the order of 1
        if width > 2 and (rows - waves).abs().max() < 2**-8:
            return words + ("" if base == _PAPER else f"; base {base:,.0f}")
    return None
