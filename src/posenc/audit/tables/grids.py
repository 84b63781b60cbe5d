"""Tables of pictures: how the grid is flattened, which channels read which axis, and what comes before it."""

from __future__ import annotations

from torch import Tensor

from posenc.audit.kinds import tables as kinds
from posenc.audit.tables.codes import Code, read_code
from posenc.audit.tables.probe import Probe, Sheet, unit
from posenc.audit.tables.promises import check_released, compare_codes
from posenc.audit.tables.rows import Promise, Rows, promised_rows, same
from posenc.core.sites import InputEncoding
from posenc.core.tokens import grid as cells
from posenc.errors import ShapeError


def check_grid(probe: Probe, sheet: Sheet, width: int, size: tuple[int, int], expect: Promise) -> None:
    """All that can be asked of a table of ``height × width`` patches."""
    height, across = size
    answer = probe(height, across)
    probe.check_repeats(height, across)
    if answer.ndim == 3 and answer.shape[0] == 1:
        answer = answer[0]
    prefix = answer.shape[0] - height * across if answer.ndim == 2 else -1
    if answer.ndim != 2 or answer.shape[-1] != width or prefix < 0:
        raise ShapeError(
            f"check_table: fn gave {tuple(answer.shape)} for a picture of {height} × {across} patches. Expected ({height * across}, "
            f"{width}), class and register rows before. For a table of one size only give that size as grid."
        )
    table = Rows(answer[prefix:], one="patch")
    if not table.check_numbers(sheet):
        return
    if prefix:
        zero = "zero" if not answer[:prefix].any() else "not zero"
        sheet.described.append(f"{prefix} row{'s' * (prefix > 1)} before the grid, {zero}")
    table.check_distinct(sheet)
    axes = _axes(table.rows, size)
    sheet.checked.append("order of the flattening")
    if axes is None and height != across and _axes(table.rows, (across, height)) is not None:
        sheet.found(
            kinds.GRID_TRANSPOSED,
            f"the second row is that of the patch below the first, for a picture of {height} × {across}",
            "that of the patch beside it: rows one after another",
        )
        return
    if height == across:
        sheet.skipped["transposed flattening"] = "a square picture looks the same either way; give a grid that is not square"
    halves = _halves(table, axes, size)
    if halves is None:
        sheet.described.append("no formula in rows and columns (learned or drawn)")
    else:
        _describe(sheet, halves)
    if isinstance(expect, InputEncoding):
        _compare(sheet, table, expect, size, prefix, width, halves)
    elif expect is not None and halves is None:
        sheet.found(kinds.FORMULA, sheet.described[-1], "sines and cosines of rows in one half, of columns in the other")
    elif expect is not None and halves is not None:
        for _, code in halves:
            check_released(sheet, code)


def _axes(rows: Tensor, size: tuple[int, int]) -> list[str] | None:
    """Which axis each channel reads in a flattening of rows one after another: "row", "column"; ``None`` if some read both."""
    picture = rows.unflatten(0, size)
    by_row = (picture == picture[:, :1]).all(0).all(0)
    by_column = (picture == picture[:1]).all(0).all(0)
    if not (by_row | by_column).all() or (by_row & by_column).all():
        return None
    # a channel that is the same everywhere belongs to its neighbours' axis
    names: list[str] = []
    for row, column in zip(by_row.tolist(), by_column.tolist(), strict=True):
        names.append("both" if row and column else "row" if row else "column")
    for index, name in enumerate(names):
        if name == "both":
            names[index] = names[index - 1] if index else next(other for other in names if other != "both")
    return names


Halves = list[tuple[str, Code | None]]


def _halves(table: Rows, axes: list[str] | None, size: tuple[int, int]) -> Halves | None:
    """The axis and the code of each block of channels, in the order of the channels."""
    if axes is None:
        return None
    picture = table.rows.unflatten(0, size)
    blocks: Halves = []
    start = 0
    for end in range(1, len(axes) + 1):
        if end == len(axes) or axes[end] != axes[start]:
            line = picture[:, 0] if axes[start] == "row" else picture[0]
            blocks.append((axes[start], read_code(line[:, start:end], resolution=unit(table.dtype))))
            start = end
    return blocks if len(blocks) == 2 else None


def _describe(sheet: Sheet, halves: Halves) -> None:
    first = halves[0][0]
    order = "height first: the first half reads the row" if first == "row" else "width first: the first half reads the column"
    sheet.described.append(order)
    for axis, code in halves:
        words = ", ".join(code.described()) if code is not None else "no formula"
        sheet.described.append(f"{axis}s: {words}")


def _compare(
    sheet: Sheet,
    table: Rows,
    expect: InputEncoding,
    size: tuple[int, int],
    prefix: int,
    width: int,
    halves: Halves | None,
) -> None:
    sheet.checked.append("promise")
    promised = Rows(promised_rows(expect, cells(*size, prefix=prefix).positions, width)[prefix:])
    # float32 angles of positions below the grid's size, four roundings each, and the storing
    close = 4 * 2.0**-24 * max(size) + 4 * max(unit(table.dtype), 2.0**-24)
    if same(table.rows, promised.rows) or (table.rows - promised.rows).abs().max() <= close:
        return
    other = _halves(promised, _axes(promised.rows, size), size)
    if halves is not None and other is not None:
        if halves[0][0] != other[0][0]:
            sheet.found(kinds.GRID_ORDER, f"the first half reads the {halves[0][0]}", f"the first half reads the {other[0][0]}")
            return
        before = len(sheet.findings)
        for (_, mine), (_, theirs) in zip(halves, other, strict=True):
            if mine is not None and theirs is not None:
                compare_codes(sheet, mine, theirs)
        if len(sheet.findings) > before:
            return
    off = (table.rows - promised.rows).abs().amax(-1)
    sheet.found(
        kinds.FORMULA,
        f"patch {int(off.argmax())} is off by {off.max().item():.3g}",
        f"the code of {type(expect).__name__}, within {close:.2g}",
    )
