"""What a rotary function should do: its planes against a rotation or a schedule."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from posenc.audit.findings import Finding
from posenc.audit.kinds import rotary as kinds
from posenc.audit.ladders.faults import diagnose
from posenc.audit.rotary.call import NAME
from posenc.audit.rotary.planes import Planes
from posenc.audit.rotary.precision import FLOAT32
from posenc.core.rotary import Frequencies, Pairing, Schedule
from posenc.hf.rotation import Rotation
from posenc.schedules.base import LengthRule
from posenc.schedules.explicit import Explicit

Promise = Rotation | Schedule | LengthRule


def check_promise(expect: object, pairing: object, head_dim: int) -> None:
    """Refuse a promise that no function of this head can keep.

    Raises:
        TypeError: no rotation and no schedule. ValueError: another head, several axes, or an unknown pairing.
    """
    if pairing not in (None, "half", "interleaved"):
        raise ValueError(
            f"{NAME}: pairing = {pairing!r}. Expected 'half' or 'interleaved'. Name the one the weights were trained with."
        )
    if isinstance(expect, Rotation):
        if expect.head_dim != head_dim:
            raise ValueError(
                f"{NAME}: expect has head_dim = {expect.head_dim}, and head_dim = {head_dim}. Expected the same head. Pass that of the rotation."
            )
        if expect.axes is not None and not expect.axes.text:
            raise ValueError(
                f"{NAME}: expect reads the axes {', '.join(expect.axes.names)}. Expected a rotation of plain positions, or one that text takes "
                "with one number. Check one axis at a time."
            )
        if pairing is not None and pairing != expect.pairing:
            raise ValueError(
                f"{NAME}: pairing = {pairing!r} and expect pairs {expect.pairing!r}. Expected one promise. Leave pairing away."
            )
    elif expect is not None and (isinstance(expect, type) or not isinstance(expect, (Schedule, LengthRule))):
        raise TypeError(
            f"{NAME}: expect = {expect!r}. Expected a Rotation, such as a layer of posenc.hf.plan(config), or a schedule such as "
            "Geometric(10000.0). Leave it away to have the function described."
        )


def compare_channels(planes: Planes, expect: Promise | None, pairing: Pairing | None, where: str) -> list[Finding]:
    """Which channels turn, and how they pair up, against what was promised."""
    rotation = expect if isinstance(expect, Rotation) else None
    pairing = pairing if rotation is None else rotation.pairing
    found = []
    if pairing is not None and len(planes.pairs) > 1 and planes.pairing != pairing:
        found.append(
            kinds.PAIRING.at(
                where,
                measured=f"{planes.pairing}: channels {planes.pairs[0][0]} and {planes.pairs[0][1]} turn together",
                expected=pairing,
            )
        )
    if rotation is not None:
        promised = _channels(rotation, planes.pairing)
        if promised != planes.channels:
            found.append(
                kinds.SPAN.at(
                    where,
                    measured=f"{len(planes.channels)} channels turn: {_runs(planes.channels)}",
                    expected=f"{len(promised)}: {_runs(promised)}",
                )
            )
    return found


def compare_frequencies(planes: Planes, expect: Promise, length: int, where: str) -> list[Finding]:
    """How fast the pairs turn, and with which gain, against what was promised; the channels agree."""
    promised = promised_frequencies(planes, expect, length)
    if isinstance(promised, str):
        return [
            kinds.SPAN.at(where, measured=f"{planes.rotary_dim} channels turn", expected=f"as many as promised ({promised})")
        ]
    live = _live(planes, expect, len(promised.inv_freq))
    # integer positions tell frequencies up to whole turns: of those the one that was promised
    turns = ((promised.inv_freq - live) / (2 * pi)).round() * (promised.inv_freq.abs() > pi)
    live = live + 2 * pi * turns
    moving = (promised.inv_freq != 0) & (live != 0)
    found = []
    if moving.any() and (live[moving] / promised.inv_freq[moving] < 0).all():
        live = -live
        found.append(
            kinds.SIGN.at(
                where,
                measured="all pairs turn backwards: (a·cos + b·sin, b·cos − a·sin)",
                expected="(a·cos − b·sin, b·cos + a·sin)",
            )
        )
    if moving.any() and (live[moving] / promised.inv_freq[moving] - 2).abs().max() <= 1e-3:
        twice = f"the first pair turns by {float(live[moving][0]):.6g} radians per position, all pairs twice as fast"
        return [*found, kinds.TWICE.at(where, measured=twice, expected=f"{float(promised.inv_freq[moving][0]):.6g}")]
    schedule = expect.schedule if isinstance(expect, Rotation) else expect
    if isinstance(schedule, LengthRule):
        schedule = schedule.at(length)
    width = 2 * len(promised.inv_freq)
    if isinstance(expect, Rotation) and expect.axes is not None:  # of text: the ladder that its pairs share
        schedule = Explicit(tuple(promised.inv_freq.tolist()), float(promised.amplitude))
    amplitude = float(planes.gains[0].median())
    if abs(amplitude / float(promised.amplitude) - 1) <= 16 * FLOAT32:  # cosine and sine in float32, squared and added
        amplitude = float(promised.amplitude)
    return found + diagnose(Frequencies(live.float(), amplitude), schedule, width, where=where, length=length)


def promised_frequencies(planes: Planes, expect: Promise, length: int) -> Frequencies | str:
    """Of the channels that should turn; or why a schedule has none for as many as do."""
    if isinstance(expect, Rotation):
        ladder = expect.frequencies(length=length)
        return ladder if expect.axes is None else Frequencies(ladder.inv_freq.sum(-2), ladder.amplitude)
    try:
        if isinstance(expect, LengthRule):
            return expect.frequencies_at(planes.rotary_dim, length)
        return expect.frequencies(planes.rotary_dim)
    except ValueError as error:  # a list of frequencies is of one width
        return str(error)


def _live(planes: Planes, expect: Promise, count: int) -> Tensor:
    """The frequencies in the promised slice, where pairs at its ends may stand still."""
    if not isinstance(expect, Rotation):
        return planes.frequencies
    step = 2 if planes.pairing == "interleaved" else 1
    live = torch.zeros(count, dtype=torch.float64)
    live[[(i - expect.start) // step for i, _ in planes.pairs]] = planes.turning
    return live


def _channels(rotation: Rotation, pairing: Pairing) -> tuple[int, ...]:
    """The channels that turn, however slowly."""
    ladder = rotation.frequencies().inv_freq
    moving = (ladder if rotation.axes is None else ladder.sum(-2)) != 0
    slots = moving.nonzero()[:, 0].tolist()
    pairs = [(2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + len(moving)) for i in slots]
    return tuple(sorted(rotation.start + channel for pair in pairs for channel in pair))


def _runs(channels: tuple[int, ...]) -> str:
    """Channels as ranges: 0–15, 32–47."""
    starts = [c for c in channels if c - 1 not in channels]
    ends = [c for c in channels if c + 1 not in channels]
    return ", ".join(f"{a}–{b}" for a, b in zip(starts, ends, strict=True))
