"""Live frequencies of rotary modules against the schedules that are promised."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from posenc.audit.findings import Finding
from posenc.audit.kinds.parts import LAYER_BASE, TABLE_OUT_OF_STEP
from posenc.audit.ladders.faults import diagnose
from posenc.audit.live.parts import Ladder, ladders
from posenc.audit.live.promises import Promise
from posenc.core.rotary import Frequencies, Schedule
from posenc.hf.describe import words
from posenc.hf.rotation import Rotation
from posenc.schedules.base import LengthRule


def ladder_findings(
    name: str, module: nn.Module, promise: Promise, rotations: list[Rotation], label: str | None = None
) -> list[Finding]:
    """The first rotation that the live frequencies fit decides; else those against the first of all."""
    for ladder in ladders(name, module):
        if ladder.label != label:
            continue
        per_rotation = [_against(ladder, rotation, promise) for rotation in rotations]
        found = min(per_rotation, key=len)
        if found and label is not None:
            found = list(_of_another_block(ladder, promise)) or found
        return found
    return []


def _against(ladder: Ladder, rotation: Rotation, promise: Promise) -> list[Finding]:
    width = rotation.rotary_dim if rotation.axes is None else rotation.axes.ladder_dim
    if ladder.inv_freq.is_meta:
        return []
    live = ladder.inv_freq.detach().cpu()
    if rotation.axes is not None and not rotation.axes.text:  # pictures keep the ladder by axis; the table shows the order
        live = live.sort(descending=True).values
    length = promise.plan.max_length
    found: list[Finding] = []
    for schedule in _schedules(rotation, ladder.longest):
        frequencies = Frequencies(live, _gain(ladder, schedule, width))
        faults = diagnose(frequencies, schedule, width, where=ladder.where, length=length)
        if not faults:
            return list(_copy_findings(ladder, rotation, width))
        found = found or faults
    return found


def _copy_findings(ladder: Ladder, rotation: Rotation, width: int) -> Iterator[Finding]:
    """``original_inv_freq``, where rules of the length put it back."""
    copied = ladder.original
    if copied is None or not rotation.depends_on_length or copied.is_meta or copied.dtype != ladder.inv_freq.dtype:
        return
    schedule, where = _schedules(rotation, None)[0], ladder.where.replace("inv_freq", "original_inv_freq")
    for fault in diagnose(Frequencies(copied.detach(), _gain(ladder, schedule, width)), schedule, width, where=where):
        yield TABLE_OUT_OF_STEP.at(where, measured=fault.measured, expected=fault.expected)


def _schedules(rotation: Rotation, longest: int | None) -> list[Schedule]:
    """What the frequencies may be: of a rule of the length, those of a short text and of the longest one yet."""
    if not isinstance(rotation.schedule, LengthRule):
        return [rotation.schedule]
    original = rotation.original_length or 1
    lengths = dict.fromkeys((original, longest or original, original + 1))
    return [rotation.schedule.at(max(length, 1)) for length in lengths]


def _gain(ladder: Ladder, schedule: Schedule, width: int) -> float | Tensor:
    """The module's own; where it keeps none, the table that it returns tells."""
    return schedule.frequencies(width).amplitude if ladder.amplitude is None else ladder.amplitude


def _of_another_block(ladder: Ladder, promise: Promise) -> Iterator[Finding]:
    for entry in dict.fromkeys(layer.entry for layer, _ in promise.plan.runs if layer.entry not in (None, ladder.label)):
        for rotation in promise.rotations(entry):
            if not _against(ladder, rotation, promise):
                own = promise.rotations(ladder.label)[0]
                yield LAYER_BASE.at(
                    ladder.where,
                    measured=f"{words(rotation.schedule)}, which is the block of {entry!r}",
                    expected=words(own.schedule),
                )
                return
