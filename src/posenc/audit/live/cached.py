"""Whole rotary tables of plain PyTorch, cosine and sine or complex: which frequencies made them, and how exactly."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from posenc.audit.findings import Finding
from posenc.audit.kinds.parts import TABLE_HALF_ANGLES
from posenc.audit.ladders.explaining import Reading, explain
from posenc.audit.ladders.faults import HALVES
from posenc.audit.live.parts import Part
from posenc.schedules.explicit import Explicit
from posenc.schedules.geometric import Geometric

_ROUNDINGS = 8  # of a float32 angle: the exponent, the power (2), the quotient, a rescaling rule (3), the product


def check_cached(parts: list[Part]) -> tuple[list[str], list[Finding]]:
    """Tables of cosines and sines, a row per position from 0.

    The second row tells the frequencies, the other rows whether angles were formed in float32 or wider.
    """
    described: list[str] = []
    findings: list[Finding] = []
    for name, dtype, table in _tables(parts):
        ladder, form = _ladder(table[1].angle())
        reading = _reading(ladder)
        if reading is None:
            continue
        described.append(f"{name}: {len(table):,} positions, {form}, {reading}")
        finding = _precision(name, table, ladder, reading, dtype)
        if finding is not None:
            findings.append(finding)
    return described, findings


def _tables(parts: list[Part]) -> Iterator[tuple[str, torch.dtype, Tensor]]:
    """Complex tables ``[positions, columns]`` in complex128."""
    named = {part.name: part for part in parts if not part.tensor.is_meta and part.held != "parameter"}
    for name, part in named.items():
        tensor = part.tensor.detach().cpu()
        if tensor.is_complex():
            whole = _flat(tensor)
            dtype = torch.float64 if tensor.dtype == torch.complex128 else torch.float32
            if whole is not None:
                yield name, dtype, whole.to(torch.complex128)
        elif "cos" in part.attribute:
            sine = named.get(f"{part.owner}.{part.attribute.replace('cos', 'sin')}".lstrip("."))
            cos, sin = _flat(tensor), None if sine is None else _flat(sine.tensor.detach().cpu())
            if cos is not None and sin is not None and cos.shape == sin.shape:
                yield name, tensor.dtype, torch.complex(cos.double(), sin.double())


def _flat(table: Tensor) -> Tensor | None:
    """``[positions, columns]``, the axes of size 1 left out."""
    flat = table.squeeze()
    fits = flat.ndim == 2 and flat.shape[0] >= 16 and flat.shape[1] >= 4
    return (
        flat
        if fits and bool(torch.view_as_real(flat).isfinite().all() if flat.is_complex() else flat.isfinite().all())
        else None
    )


def _ladder(angles: Tensor) -> tuple[Tensor, str]:
    """One frequency per pair, from the angles of position 1."""
    half = len(angles) // 2
    if len(angles) % 2 == 0:
        if torch.equal(angles[:half], angles[half:]):
            return angles[:half], "halves alike"
        if torch.equal(angles[::2], angles[1::2]):
            return angles[::2], "neighbours alike"
    return angles, "a column per pair"


def _reading(ladder: Tensor) -> Reading | None:
    """The simplest rule; of a ladder that half precision has rounded, a plain one of a round base only."""
    if len(ladder) < 4 or not bool((ladder > 0).all()) or not bool((ladder.diff() < 0).all()):
        return None
    reading = explain(ladder.float())[0]
    return _rounded(ladder) if isinstance(reading.schedule, Explicit) else reading


def _rounded(ladder: Tensor) -> Reading | None:
    """A plain ladder of a round base that half precision has rounded."""
    count = len(ladder)
    base = float(f"{float(ladder[-1]) ** (-count / (count - 1)):.1g}")
    if not 1000 <= base < float("inf"):
        return None
    exact = Geometric(base).frequencies(2 * count).inv_freq
    # frequencies rounded to bfloat16, and cosine and sine again
    return Reading(Geometric(base)) if bool(((ladder - exact).abs() <= 2 * HALVES[torch.bfloat16] * exact).all()) else None


def _precision(name: str, table: Tensor, ladder: Tensor, reading: Reading, dtype: torch.dtype) -> Finding | None:
    """Rows against float64 angles of the frequencies that the second row tells."""
    exact = reading.schedule.frequencies(2 * len(ladder)).inv_freq
    columns = len(table[0]) // len(ladder)
    live = (
        table[:, : len(ladder)]
        if columns == 1 or torch.equal(table[1, : len(ladder)], table[1, len(ladder) :])
        else table[:, ::2]
    )
    positions = torch.arange(len(table), dtype=torch.float64)
    angle = positions[:, None] * exact
    apart = (live - torch.complex(angle.cos(), angle.sin())).abs().amax(-1)
    # rows tell nothing finer than the table's own dtype, and readings are good to 3e-6 of a frequency
    allowed = positions * (_ROUNDINGS * 2.0**-24 + 3e-6) + 2 * torch.finfo(dtype).eps
    if bool((apart <= allowed).all()):
        return None
    worst = int(apart.argmax())
    return TABLE_HALF_ANGLES.at(
        name,
        measured=f"off by {float(apart[worst]):.3g} at position {worst:,}",
        expected=f"at most {float(allowed[worst]):.2g}: {reading}",
    )
