"""What each encoding should compute, written again from its paper with plain loops in double precision.

An oracle shares no code with what it judges: it reads the settings of an encoding and nothing else. It takes one
sequence, without batch:

    a position transform   (encoding, positions) -> positions
    an input encoding      (encoding, x [seq, dim], positions) -> [seq, dim]
    queries and keys       (encoding, q [heads, seq, head_dim], k, positions, k_positions) -> (q, k)
    the score              (encoding, positions, k_positions) -> [heads, q, k]
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, cos, floor, log, log2, sin
from typing import Any

import torch
from torch import Tensor


def nope(encoding: Any, q: Tensor, k: Tensor, positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
    """Nothing happens."""
    return q.clone(), k.clone()


def randomized(encoding: Any, positions: Tensor) -> Tensor:
    """In evaluation, nothing happens."""
    return positions.clone()


def sinusoidal(encoding: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Vaswani et al. 2017, §3.5, channel by channel, and tensor2tensor's variant of the frequencies."""
    out = x.double().clone()
    for row, position in enumerate(positions.tolist()):
        for channel in range(encoding.dim):
            out[row, channel] += _sinusoid_channel(encoding, position, channel)
    return out


def _sinusoid_channel(encoding: Any, position: float, channel: int) -> float:
    dim, paper = encoding.dim, encoding.frequency_rule == "paper"
    if not paper and channel == dim - 1 and dim % 2:
        return 0.0
    sines = ceil(dim / 2) if paper else dim // 2
    if encoding.layout == "interleaved":
        pair, wave = channel // 2, (sin, cos)[channel % 2]
    else:
        pair, wave = (channel, sin) if channel < sines else (channel - sines, cos)
    exponent = 2 * pair / dim if paper else pair / (dim // 2 - 1)
    return wave(position * encoding.base**-exponent)


def learned(encoding: Any, x: Tensor, positions: Tensor) -> Tensor:
    """The table's row for each position, with the policy past its end."""
    table = encoding.weight.detach().double()
    out = x.double().clone()
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            out[row] += table[encoding.padding_idx]
            continue
        place = position
        if encoding.past_end == "interpolate":
            place = position * (encoding.num_positions - 1) / max(encoding.length - 1, 1)
        elif encoding.past_end == "clamp":
            place = min(position, encoding.num_positions - 1)
        low = floor(place)
        share = place - low
        out[row] += (1 - share) * table[encoding.offset + low]
        if share:
            out[row] += share * table[encoding.offset + low + 1]
    return out


def rope(encoding: Any, q: Tensor, k: Tensor, positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
    """Su et al. 2021, eq. 34: a rotation matrix per channel pair; any schedule that gives a base or its frequencies."""
    return _turn(encoding, q, positions), _turn(encoding, k, k_positions)


def _turn(encoding: Any, x: Tensor, positions: Tensor) -> Tensor:
    pairs = encoding.rotary_dim // 2
    first = encoding.start % encoding.head_dim
    out = x.double().clone()
    for token, position in enumerate(positions.tolist()):
        for pair in range(pairs):
            a, b = (pair, pair + pairs) if encoding.pairing == "half" else (2 * pair, 2 * pair + 1)
            a, b = a + first, b + first
            angle, gain = position * _frequency(encoding, pair), getattr(encoding.schedule, "amplitude", 1.0)
            turn = torch.tensor([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]], dtype=torch.float64)
            out[:, token, [a, b]] = gain * x[:, token, [a, b]].double() @ turn.T
    return out


def _frequency(encoding: Any, pair: int) -> float:
    given = getattr(encoding.schedule, "inv_freq", None)
    if given is not None:
        return float(given[pair])
    return float(encoding.schedule.base ** (-2 * pair / encoding.rotary_dim))


def alibi(encoding: Any, positions: Tensor, k_positions: Tensor) -> Tensor:
    """Press et al. 2022, §3, with the slopes of its released code."""
    biased = sum(slope != 0 for slope in encoding.slopes)
    slopes = _released_slopes(biased) + [0.0] * (encoding.heads - biased)
    bias = torch.zeros(encoding.heads, len(positions), len(k_positions), dtype=torch.float64)
    for i, query in enumerate(positions.tolist()):
        for j, key in enumerate(k_positions.tolist()):
            distance = query - key if encoding.form == "causal" else abs(query - key)
            for head, slope in enumerate(slopes):
                bias[head, i, j] = -slope * distance
    return bias


def _released_slopes(heads: int) -> list[float]:
    exponent = log2(heads)
    if exponent == int(exponent):
        start = 2.0 ** -(2.0 ** -(exponent - 3))
        return [start ** (j + 1) for j in range(heads)]
    lower = 2 ** int(exponent)
    return _released_slopes(lower) + _released_slopes(2 * lower)[0::2][: heads - lower]


def t5(encoding: Any, positions: Tensor, k_positions: Tensor) -> Tensor:
    """Raffel et al. 2020, §2.1, in T5's own terms: buckets of ``key - query``."""
    weight = encoding.relative_attention_bias.weight.detach().double()
    bias = torch.zeros(encoding.heads, len(positions), len(k_positions), dtype=torch.float64)
    for i, query in enumerate(positions.tolist()):
        for j, key in enumerate(k_positions.tolist()):
            bias[:, i, j] = weight[_bucket(key - query, encoding)]
    return bias


def _bucket(relative: int, encoding: Any) -> int:
    buckets, first = int(encoding.buckets), 0
    if encoding.direction == "bidirectional":
        buckets //= 2
        first = buckets if relative > 0 else 0
        lag = abs(relative)
    else:
        lag = max(-relative, 0)
    exact = buckets // 2
    if lag < exact:
        return first + lag
    # At an edge the logarithm is an integer up to rounding; 1e-9 keeps it on the right side.
    further = floor(log(lag / exact) / log(encoding.max_distance / exact) * (buckets - exact) + 1e-9)
    return first + min(exact + further, buckets - 1)


ORACLES: dict[str, Callable[..., Any]] = {
    "nope": nope,
    "randomized": randomized,
    "sinusoidal": sinusoidal,
    "learned": learned,
    "rope": rope,
    "alibi": alibi,
    "t5": t5,
}
"""The oracle of each encoding, by the name in its spec."""
