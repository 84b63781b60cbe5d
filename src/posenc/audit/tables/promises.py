"""A code against the one that is promised: what sets them apart, by name."""

from __future__ import annotations

from posenc.audit.kinds import tables as kinds
from posenc.audit.tables.codes import MISTAKES, Code
from posenc.audit.tables.probe import Sheet
from posenc.hf.rules import InputTable


def compare_codes(sheet: Sheet, code: Code, other: Code, spacing: float = 1.0) -> None:
    """What sets a code apart from the promised one."""
    if (code.layout, code.first) != (other.layout, other.first):
        sheet.found(kinds.LAYOUT, f"{code.layout}, {code.first} first", f"{other.layout}, {other.first} first")
    if code.ladder.rule != other.ladder.rule:
        sheet.found(kinds.DIVISOR, str(code.ladder), str(other.ladder))
    elif code.ladder.base != other.ladder.base:
        sheet.found(kinds.BASE, str(code.ladder), str(other.ladder))
    if abs(code.offset - other.offset) > 0.01 * spacing:
        sheet.found(kinds.OFFSET, f"the first row is that of position {code.offset:g}", f"that of position {other.offset:g}")
    if abs(code.amplitude / other.amplitude - 1) > 1e-3:
        sheet.found(kinds.SCALE, f"amplitude {code.amplitude:.6g}", f"amplitude {other.amplitude:.6g}")


def check_released(sheet: Sheet, code: Code | None, table: InputTable | None = None) -> None:
    """Against what "sinusoidal" stands for in the field: base 10000, the paper's or tensor2tensor's rule, amplitude 1."""
    if code is None:
        if not sheet.has(kinds.FORMULA):
            sheet.found(kinds.FORMULA, sheet.described[-1], "sines and cosines, sin(p·ω) and cos(p·ω), in pairs")
        return
    ladder = code.ladder
    known = "base^(-2i/width) or base^(-i/(width/2 - 1)), base 10,000"
    if ladder.rule is None or (ladder.speed != 1 and ladder.rule not in MISTAKES):
        sheet.found(kinds.FORMULA, str(ladder), known)
    elif ladder.rule in MISTAKES:
        sheet.found(kinds.DIVISOR, f"{ladder}; the last frequency is {ladder.frequencies[-1].item():.6g}", known)
    elif ladder.base != 10_000:
        sheet.found(kinds.BASE, f"base {ladder.base:,.7g} (if the exponents are those of the paper)", known)
    if code.amplitude != 1:
        sheet.found(kinds.SCALE, f"amplitude {code.amplitude:.6g}", "amplitude 1")
    if table is None:
        return
    if table.layout is not None and code.layout != table.layout:
        sheet.found(kinds.LAYOUT, f"{code.layout} layout", f"{table.layout} layout")
    if code.offset != table.offset:
        sheet.found(kinds.OFFSET, f"the first row is that of position {code.offset:g}", f"position {table.offset}")
