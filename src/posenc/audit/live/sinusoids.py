"""Sinusoidal tables in memory: which convention makes them, and what is wrong where none does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from posenc.audit.findings import Finding
from posenc.audit.kinds.parts import TABLE_GARBAGE
from posenc.audit.live.learned import called, is_absolute, tower
from posenc.audit.live.parts import RELATIVE, Part
from posenc.audit.live.promises import Promises
from posenc.audit.tables.checking import check_table
from posenc.core.conventions import FrequencyRule, Layout, code, ladder, least_width
from posenc.core.rotary import Frequencies
from posenc.hf.rules import InputTable

_BASE = 10_000.0
_ROUNDINGS = 8  # of an angle: the exponent, the power (2), the quotient, a second quotient or logarithm (3), the product


def check_sinusoids(parts: list[Part], promises: Promises) -> tuple[list[str], list[Finding]]:
    """Tables that are not learned: named where a convention makes them, looked into where none does."""
    described: list[str] = []
    findings: list[Finding] = []
    for part in parts:
        promised = _promised(part, promises)
        rows = _rows(part)
        if rows is None or not (promised is not None or _looks_sinusoidal(rows)):
            continue
        found = _convention(rows, promised)
        if found is not None:
            described.append(f"{part.name}: {len(rows):,} rows, sinusoidal, {found[0]}, {found[1]} frequencies, base 10,000")
        else:
            findings += _faults(part, rows, promised)
    return described, findings


def _promised(part: Part, promises: Promises) -> InputTable | None:
    promise = promises.of(part.name)
    if promise is None or not is_absolute(part):
        return None
    table = tower(part, promise.plan).input
    return table if table is not None and table.kind == "sinusoidal" else None


def _rows(part: Part) -> Tensor | None:
    """A fixed table as ``[rows, width]``; a batch axis in front or in the middle is one of size 1."""
    tensor = part.tensor.detach()
    learned = part.held == "parameter" and part.tensor.requires_grad
    if learned or tensor.is_meta or tensor.is_complex() or RELATIVE.search(called(part)):
        return None
    if tensor.ndim == 3 and 1 in tensor.shape[:2]:
        tensor = tensor.flatten(0, 1)
    fits = tensor.ndim == 2 and tensor.shape[0] >= 8 and tensor.shape[1] >= 4
    return tensor.cpu().double() if fits and bool(tensor.isfinite().all()) else None


def _looks_sinusoidal(rows: Tensor) -> bool:
    """Sines and cosines of zero in the first row, and a sine and a cosine of one angle for every two channels."""
    start = rows[0]
    ends = bool(((start.abs() < 1e-2) | ((start - 1).abs() < 1e-2)).all())
    squares = rows[rows.any(-1)].square().sum(-1)
    if not len(squares):
        return False
    # half precision rounds squares by 2^-7 each; an odd channel has no partner
    return ends and bool(((squares - rows.shape[1] / 2).abs() <= rows.shape[1] * 2.0**-7 + 0.5).all())


def _convention(rows: Tensor, promised: InputTable | None) -> tuple[Layout, FrequencyRule] | None:
    """The released convention that makes these rows; rows of zeros belong to padding."""
    count, width = rows.shape
    positions = torch.arange(count)
    held = rows.any(-1)
    # an angle that is formed in float32, and a table that may be kept in half precision
    allowed = positions.double() * _ROUNDINGS * 2.0**-24 + 2.0**-8
    if not bool(held[1:].any()):
        return None
    layouts = get_args(Layout) if promised is None or promised.layout is None else (promised.layout,)
    for layout, rule in product(layouts, get_args(FrequencyRule)):
        if width < least_width(rule):
            continue
        made = code(positions, Frequencies(ladder(width, rule, _BASE)), width, layout=layout, dtype=torch.float64)
        if bool(((rows - made).abs().amax(-1) <= allowed)[held].all()):
            return layout, rule
    return None


def _faults(part: Part, rows: Tensor, promised: InputTable | None) -> Iterator[Finding]:
    """What `check_table` says of it; that it holds no code at all, where a code is promised and nothing else is said."""

    def table(positions: Tensor) -> Tensor:
        return rows.float()[positions]

    report = check_table(table, width=rows.shape[1], expect=None if promised is None else "sinusoidal")
    faults = [fault for fault in report.at_least("warning") if fault.id != "table-past-end"]
    for fault in faults:
        yield fault.kind.at(part.name, measured=fault.measured, expected=fault.expected, severity=fault.severity)
    if promised is not None and not faults:
        yield TABLE_GARBAGE.at(part.name, measured="rows that no sinusoidal convention makes", expected=str(promised))
