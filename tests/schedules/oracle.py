"""The rules again, from their papers and released code, one number at a time in double precision."""

from __future__ import annotations

from math import ceil, floor, log, pi

EPS = 2.0**-53


def ladder(base, dim):
    return [base ** (-2 * i / dim) for i in range(dim // 2)]


def linear(base, dim, factor):
    return [w / factor for w in ladder(base, dim)]


def ntk(base, dim, factor):
    return ladder(base * factor ** (dim / (dim - 2)), dim)


def dynamic(base, dim, factor, original, length):
    stretch = factor * max(length, original) / original - (factor - 1)
    return ladder(base * stretch ** (dim / (dim - 2)), dim) if length > original else ladder(base, dim)


def yarn_bounds(base, dim, original, fast=32.0, slow=1.0, rounded=True):
    low, high = (dim * log(original / (2 * pi * turns)) / (2 * log(base)) for turns in (fast, slow))
    if rounded:
        low, high = floor(low), ceil(high)
    return max(low, 0), min(high, dim - 1)


def yarn(base, dim, factor, original, fast=32.0, slow=1.0, rounded=True):
    low, high = yarn_bounds(base, dim, original, fast, slow, rounded)
    if low == high:
        high += 0.001
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2)]
    return [(1 - r) * w + r * w / factor for r, w in zip(ramp, ladder(base, dim), strict=True)]


def llama3(base, dim, factor, original, low=1.0, high=4.0):
    result = []
    for w in ladder(base, dim):
        wavelength = 2 * pi / w
        if wavelength < original / high:
            result.append(w)
        elif wavelength > original / low:
            result.append(w / factor)
        else:
            share = (original / wavelength - low) / (high - low)
            result.append((1 - share) * w / factor + share * w)
    return result


def longrope(base, dim, factors):
    return [w / f for w, f in zip(ladder(base, dim), factors, strict=True)]


def proportional(base, dim, proportion, factor=1.0):
    turning = int(proportion * dim / 2)
    return [w / factor if i < turning else 0.0 for i, w in enumerate(ladder(base, dim))]


def allowed(base, blend=1.0):
    """How far two computations of a frequency in double precision may be apart, relatively.

    Each rounds the exponent, which ln(base) magnifies, and then about eight times more: power, quotients, the blend.
    Shares of a blend carry errors that count relative to the undivided term, up to ``blend``, the factor, times the
    result; their own roundings are those of the bounds, numbers below 2⁷ over ramps no shorter than 1.
    """
    per_side = log(base) + 8 + (0 if blend == 1 else 128 * blend)
    return 2 * per_side * EPS
