"""Position tensors of any PyTorch module, without a promise: how they are kept, and whether they can be what they are called."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from posenc.audit.findings import Finding
from posenc.audit.kinds.frequencies import FREQUENCY_ROUNDED
from posenc.audit.kinds.parts import TABLE_GARBAGE, TABLE_NOT_BUFFER, TABLE_ON_META
from posenc.audit.ladders.explaining import explain
from posenc.audit.ladders.faults import HALVES, diagnose
from posenc.audit.live.parts import FREQUENCIES, RELATIVE, Part
from posenc.core.rotary import Frequencies
from posenc.schedules.explicit import Explicit


def check_kept(parts: list[Part]) -> Iterator[Finding]:
    """Tables that ``.to()`` does not reach. A cache is made anew where it is needed; transformers moves its own in forward."""
    for part in parts:
        if part.held == "attribute" and "cache" not in part.attribute:
            moved = type(part.module).__module__.startswith("transformers.")
            yield TABLE_NOT_BUFFER.at(
                part.name,
                measured=f"a tensor attribute {tuple(part.tensor.shape)}, {_dtype(part.tensor)} on {part.tensor.device}",
                expected="a buffer, which follows .to()",
                severity="note" if moved else None,
            )


def check_numbers(parts: list[Part], *, loaded: bool) -> Iterator[Finding]:
    """Tables without values in a model that has some, and numbers that are none."""
    for part in parts:
        if not part.tensor.is_meta:
            yield from _numbers(part)
        elif loaded and part.held != "parameter":
            yield TABLE_ON_META.at(part.name, measured="a table without values", expected="a table on a device")


def _numbers(part: Part) -> Iterator[Finding]:
    values = torch.view_as_real(part.tensor.detach()) if part.tensor.is_complex() else part.tensor.detach()
    fine = values.isfinite()
    if RELATIVE.search(part.name):  # a bias masks with −∞
        fine = fine | values.isneginf()
    if not bool(fine.all()):
        yield TABLE_GARBAGE.at(
            part.name, measured=f"{int((~fine).sum())} of {fine.numel()} entries are not finite", expected="finite numbers"
        )
    elif FREQUENCIES.search(part.attribute) and not part.tensor.is_complex():
        reason = _impossible(values.double().flatten())
        if reason is not None:
            yield TABLE_GARBAGE.at(part.name, measured=reason, expected="frequencies: above zero, the fastest near 1")


def _impossible(values: Tensor) -> str | None:
    """Why no rule makes these frequencies, however unusual; memory that was never written often shows so."""
    if values.numel() < 2:
        return None
    if not bool(values.any()):
        return "zeros only"
    if bool((values < 0).any()):
        return f"{int((values < 0).sum())} of {values.numel()} are below zero, the least {float(values.min()):.3g}"
    least = float(values[values > 0].min())
    if least < 1e-30:  # below any wavelength that a context could hold
        return f"frequencies down to {least:.3g}"
    if float(values.max()) > 1e6:  # audio in seconds reaches 10⁵
        return f"frequencies up to {float(values.max()):.3g}"
    return None


def read_ladders(parts: list[Part]) -> tuple[list[str], list[Finding]]:
    """What frequencies without a promise stand for, and whether half precision has rounded them."""
    described: list[str] = []
    findings: list[Finding] = []
    for part in parts:
        ladder = _ladder(part)
        if ladder is None:
            continue
        half = ladder.dtype in HALVES
        reading = explain(ladder.double() if half else ladder, rtol=HALVES.get(ladder.dtype, 1e-6))[0]
        described.append(f"{part.name}: {reading}")
        if not half:
            continue
        if isinstance(reading.schedule, Explicit):
            findings.append(
                FREQUENCY_ROUNDED.at(part.name, measured=f"{_dtype(ladder)} frequencies", expected="float32 or wider")
            )
        else:  # the error of its rounding, far out
            findings += diagnose(Frequencies(ladder), reading.schedule, 2 * ladder.numel(), where=part.name, length=4096)
    return described, findings


def _ladder(part: Part) -> Tensor | None:
    """Frequencies, where the part is a list of them, fastest first."""
    if not FREQUENCIES.search(part.attribute) or part.tensor.is_complex() or part.tensor.is_meta:
        return None
    ladder = part.tensor.detach().cpu().flatten()
    if ladder.numel() != max(part.tensor.shape) or ladder.numel() < 4 or not bool(ladder.isfinite().all()):
        return None
    wide = ladder.double()
    return ladder if bool((wide > 0).all()) and bool((wide.diff() <= 0).all()) else None


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
