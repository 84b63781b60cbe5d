"""The number that a person would have written, among those that cannot be told apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil, floor, inf

BASES = (10_000.0, 500_000.0, 1_000_000.0, 100_000.0, 150_000.0, 10_000_000.0, 5_000_000.0, 50_000.0, 1_000.0, 100.0)
LENGTHS = (4096, 8192, 32_768, 2048, 131_072, 16_384, 65_536, 1024, 262_144)
FACTORS = (8.0, 4.0, 2.0, 16.0, 32.0, 40.0, 64.0, 10.0, 128.0)
"""Usual ones, the most usual first."""


def roundest(low: float, high: float, usual: Iterable[float] = ()) -> float:
    """The first usual number from ``low`` to ``high``, else one with the fewest digits."""
    for value in usual:
        if low <= value <= high:
            return value
    middle = low + (high - low) / 2
    for digits in range(17):
        value = float(f"{middle:.{digits}e}")
        if low <= value <= high:
            return value
    return middle


def snapped(value: float, slack: float, usual: Iterable[float] = ()) -> Iterator[float]:
    """Round numbers within a relative ``slack``, ever closer, and at last the value itself."""
    seen = set()
    usual = tuple(usual)
    for narrowing in (1.0, 2.0**-4, 2.0**-8, 2.0**-16):
        reach = slack * narrowing * abs(value)
        candidate = roundest(value - reach, value + reach, usual)
        if candidate not in seen:
            seen.add(candidate)
            yield candidate
    if value not in seen:
        yield value


def digits_of(value: float) -> int:
    """How many significant digits it takes to write a number."""
    return next((digits + 1 for digits in range(17) if float(f"{value:.{digits}e}") == value), 17)


def round_length(low: float, high: float) -> int | None:
    """The usual length from ``low`` to ``high``, else the multiple of the largest power of two; ``None`` without an integer."""
    first, last = max(ceil(low), 1), floor(high) if high < inf else max(ceil(2 * low), 2 * LENGTHS[0])
    if first > last:
        return None
    for length in LENGTHS:
        if first <= length <= last:
            return length
    step = 1 << last.bit_length()
    while first + -first % step > last:
        step //= 2
    return first + -first % step


def length_range(low: float, high: float) -> tuple[str, ...]:
    """Original lengths that make the same frequencies, in words; nothing to say about a single one."""
    first = max(ceil(low), 1)
    if high == inf:
        return (f"original length {first:,} or more",)
    return (f"original length {first:,}–{floor(high):,}",) if floor(high) > first else ()
