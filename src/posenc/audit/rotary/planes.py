"""From the matrices of a rotary function to its planes: which channels pair up, how fast they turn, with which gain."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import final

import torch
from torch import Tensor

from posenc.audit.findings import Finding
from posenc.audit.kinds import rotary as kinds
from posenc.core.rotary import Pairing

_NOTHING = 1e-10  # what one-hot inputs leave elsewhere is exactly 0; the slowest pair in use turns by more than 1e-5


@final
@dataclass(frozen=True)
class Planes:
    """How a head turns.

    Args:
        pairs: the channels of each plane that turns, ``(i, j)`` with i < j.
        pairing: how they pair up.
        start: the first channel of the slice that turns.
        rotary_dim: its width; pairs of it that stand still have frequency 0.
        order: puts the channels that come out into the order in which they went in; ``None`` when they kept it.
        frequencies: radians per position of each pair of the slice, float64; negative when it turns backwards.
        phase: the angle of each pair at position 0.
        gains: of each pair at each position, ``[positions, pairs]``.
        angles: from position 0, ``[positions, pairs]``, wrapped to (−π, π].
    """

    pairs: tuple[tuple[int, int], ...]
    pairing: Pairing
    start: int
    rotary_dim: int
    order: Tensor | None
    frequencies: Tensor
    phase: Tensor
    gains: Tensor
    angles: Tensor

    @property
    def turning(self) -> Tensor:
        """The frequencies of `pairs` alone."""
        return self.frequencies[self.slots]

    @property
    def channels(self) -> tuple[int, ...]:
        return tuple(sorted(channel for pair in self.pairs for channel in pair))

    @property
    def slots(self) -> list[int]:
        """The place of each of `pairs` in the ladder."""
        step = 2 if self.pairing == "interleaved" else 1
        return [(i - self.start) // step for i, _ in self.pairs]


def read_planes(matrices: Tensor, positions: list[int], where: str, rounding: float) -> Planes | Finding:
    """The planes of one head, or what is wrong with them.

    Args:
        matrices: one per position, ``[positions, out, in]``, float64; the first is that of position 0.
        rounding: unit roundoff of the function's arithmetic.
    """
    order, matrices = _in_input_order(matrices, rounding)
    off = matrices.clone()
    off.diagonal(dim1=-2, dim2=-1).zero_()
    linked = off.abs().amax(0) > _NOTHING
    own = matrices.diagonal(dim1=-2, dim2=-1)
    scaled = (own - own[0]).abs().amax(0) > 8 * rounding * own.abs().amax()
    partners = linked | linked.T
    if (partners.sum(0) > 1).any():
        channel = int((partners.sum(0) > 1).nonzero()[0, 0])
        others = partners[channel].nonzero()[:, 0].tolist()
        return kinds.LAYOUT.at(
            where,
            measured=f"channel {channel} is mixed with {len(others)} channels: {_few(others)}",
            expected="each channel turns with one other",
        )
    alone = (scaled & ~partners.any(0)).nonzero()[:, 0].tolist()
    if alone:
        return kinds.NORM.at(
            where,
            measured=f"channels {_few(alone)} are multiplied by a cosine and mixed with no other channel",
            expected="each channel turns with one other: (a·cos − b·sin, b·cos + a·sin)",
        )
    pairs = tuple((int(i), int(j)) for i, j in partners.triu().nonzero().tolist())
    if not pairs:
        return kinds.POSITIONS_IGNORED.at(
            where, measured="nothing turns, at any position", expected="channel pairs turn by position · frequency"
        )
    wrong = _not_turning(matrices, pairs, positions, where, rounding)
    if wrong is not None:
        return wrong
    low, high = [i for i, _ in pairs], [j for _, j in pairs]
    same, cross = matrices[:, low, low], matrices[:, high, low]
    wrapped = torch.atan2(cross, same)
    angles = wrap(wrapped - wrapped[0])
    gains = torch.hypot(same, cross)
    shape = _shape(pairs)
    if shape is None:
        return kinds.LAYOUT.at(
            where,
            measured=f"channels pair as {', '.join(map(str, pairs[:4]))}{' …' * (len(pairs) > 4)}",
            expected="halves (i, i + rotary_dim/2), or neighbours (2i, 2i + 1)",
        )
    pairing, start, rotary_dim, slots = shape
    frequencies = torch.zeros(rotary_dim // 2, dtype=torch.float64)
    frequencies[slots] = _unwrapped(angles, positions)
    return Planes(pairs, pairing, start, rotary_dim, order, frequencies, wrapped[0], gains, angles)


def wrap(angle: Tensor) -> Tensor:
    """The same angle in (−π, π]."""
    return pi - torch.remainder(pi - angle, 2 * pi)


def _in_input_order(matrices: Tensor, rounding: float) -> tuple[Tensor | None, Tensor]:
    """Undo a reordering of the channels, as of functions that read neighbours and write halves."""
    still = matrices[0]
    source = still.abs().argmax(1)
    width = still.shape[0]
    if (source == torch.arange(width)).all() or (source.sort().values != torch.arange(width)).any():
        return None, matrices
    rest = still.clone()
    rest[torch.arange(width), source] = 0
    if rest.abs().max() > 8 * rounding * still.abs().max():
        return None, matrices  # turned already at position 0, not reordered
    order = source.argsort()
    return order, matrices[:, order]


def _shape(pairs: tuple[tuple[int, int], ...]) -> tuple[Pairing, int, int, list[int]] | None:
    """Pairing, start, width and the slot of each pair in the ladder."""
    distances = {j - i for i, j in pairs}
    low = [i for i, _ in pairs]
    first = low[0]
    if len(distances) > 1:
        return None
    distance = distances.pop()
    if distance == 1 and len(pairs) > 1:
        if any((i - first) % 2 for i in low):
            return None
        return "interleaved", first, low[-1] + 2 - first, [(i - first) // 2 for i in low]
    if low[-1] - first >= distance:
        return None
    return "half", first, 2 * distance, [i - first for i in low]


def _unwrapped(angles: Tensor, positions: list[int]) -> Tensor:
    """Frequencies from positions 1, 2, 4, 8 …: each doubling halves the error, so slow pairs get as many digits as fast ones.

    Powers of two survive every rounding of positions and of their products with frequencies. A pair stops where its
    angle no longer doubles (a table that ends); half-precision cosines stray by 3 · 2⁻⁹ there, far below 2⁻⁵.
    """
    found = angles[positions.index(1)].clone()
    going = torch.ones_like(found, dtype=torch.bool)
    power = 2
    while power in positions:
        strays = wrap(angles[positions.index(power)] - power * found)
        going &= strays.abs() < 2.0**-5
        found = torch.where(going, found + strays / power, found)
        power *= 2
    return found


def _not_turning(
    matrices: Tensor, pairs: tuple[tuple[int, int], ...], positions: list[int], where: str, rounding: float
) -> Finding | None:
    """What is wrong with the 2 × 2 blocks, which should be rotations with a gain."""
    low, high = [i for i, _ in pairs], [j for _, j in pairs]
    a, b = matrices[:, low, low], matrices[:, low, high]
    c, d = matrices[:, high, low], matrices[:, high, high]
    bound = 16 * rounding * matrices.abs().amax()  # cosine and sine, each rounded into a table and once more after the product
    if (a - d).abs().max() <= bound and (b + c).abs().max() <= bound:
        return None
    if (a - d).abs().max() <= bound and (b - c).abs().max() <= bound:
        return kinds.SIGN.at(
            where, measured="(a·cos + b·sin, b·cos + a·sin)", expected="(a·cos − b·sin, b·cos + a·sin): one sine is subtracted"
        )
    one = positions.index(1)
    upper, lower = torch.atan2(-b[one], a[one]), torch.atan2(c[one], d[one])
    # a sine without its cosine, or a gain on one of them, is no mistake of layout: compare each row's own length
    rows = torch.stack((torch.hypot(a, b), torch.hypot(c, d)))
    if (rows - rows[:, :1]).abs().max() > bound:
        return kinds.NORM.at(
            where,
            measured=f"the norm of a turned pair goes from {rows.min():.6g} to {rows.max():.6g}",
            expected="one amplitude at all positions",
        )
    apart = int((upper - lower).abs().argmax())
    i, j = pairs[apart]
    return kinds.LAYOUT.at(
        where,
        measured=f"channels {i} and {j} are a pair, but turn by {upper[apart]:.6g} and {lower[apart]:.6g} radians per position"
        + _table_order(pairs, upper, lower),
        expected="one angle per pair",
    )


def _table_order(pairs: tuple[tuple[int, int], ...], upper: Tensor, lower: Tensor) -> str:
    channels = sorted(
        (channel, float(angle))
        for pair, two in zip(pairs, zip(upper, lower, strict=True), strict=True)
        for channel, angle in zip(pair, two, strict=True)
    )
    angle = torch.tensor([value for _, value in channels])
    half = len(angle) // 2
    if torch.allclose(angle[:half], angle[half:], rtol=1e-4, atol=1e-7):
        return ": the table repeats in halves, the arithmetic pairs neighbours"
    if torch.allclose(angle[::2], angle[1::2], rtol=1e-4, atol=1e-7):
        return ": the table has each column twice, the arithmetic pairs halves"
    return ""


def _few(channels: list[int]) -> str:
    return ", ".join(map(str, channels[:6])) + " …" * (len(channels) > 6)
