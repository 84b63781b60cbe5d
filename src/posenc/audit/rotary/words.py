"""What a rotary function does, in words."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from posenc.audit.ladders.explaining import Reading, explain
from posenc.audit.rotary.planes import Planes
from posenc.audit.rotary.precision import FLOAT32
from posenc.schedules.explicit import Explicit


def reading(planes: Planes, *, wide: bool) -> Reading:
    """The simplest schedule that makes the frequencies; ``wide`` says that the table has more digits than float32."""
    ladder, amplitude = planes.frequencies.abs(), float(planes.gains[0].median())
    if abs(amplitude - 1) <= 16 * FLOAT32:
        amplitude = 1.0
    if wide:
        found = explain(ladder, amplitude)[0]
        if not isinstance(found.schedule, Explicit):
            return found
    return explain(ladder.float(), amplitude)[0]


def channels(planes: Planes, head_dim: int) -> Iterator[str]:
    """Pairing, and which channels turn."""
    if planes.order is not None:
        yield f"{planes.pairing} pairing, written in another order of channels (harmless if queries and keys agree)"
    elif len(planes.pairs) == 1 and planes.rotary_dim == 2:
        yield "one pair of channels"
    else:
        yield f"{planes.pairing} pairing"
    still = (planes.rotary_dim - len(planes.channels)) // 2
    if planes.rotary_dim == head_dim:
        text = f"all {head_dim} channels"
    elif planes.start == 0:
        text = f"{planes.rotary_dim} of {head_dim} channels, leading"
    elif planes.start + planes.rotary_dim == head_dim:
        text = f"{planes.rotary_dim} of {head_dim} channels, trailing"
    else:
        text = f"channels {planes.start}–{planes.start + planes.rotary_dim - 1} of {head_dim}"
    yield text + (f"; {still} of the pairs stand still" if still else "")
    if (planes.turning < 0).all():
        yield "turns backwards"


def exactness(error: float, up_to: int, turning: Tensor) -> str:
    """How exact the angles are."""
    reach = f"up to position {up_to - 1:,}"
    if error <= 8 * FLOAT32:  # what float32 cosines and sines can show
        return f"angles as exact as float64 {reach}"
    if error <= 4 * FLOAT32 * up_to * max(1.0, float(turning.abs().max())) + 8 * FLOAT32:
        return f"angles as exact as float32: off by at most {error:.1e} rad {reach}"
    return f"angles off by {error:.1e} rad {reach}"


def truth(found: Reading, planes: Planes) -> Tensor | None:
    """The exact frequencies of the turning pairs, if a rule makes them."""
    if isinstance(found.schedule, Explicit):
        return None
    exact = found.schedule.frequencies(planes.rotary_dim).inv_freq[planes.slots]
    return torch.copysign(exact, planes.turning)
