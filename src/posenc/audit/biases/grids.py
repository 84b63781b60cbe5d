"""Biases between the cells of a window: one value, or one row of a table, per offset of rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.audit.biases.rules import Expect, promised_bias
from posenc.audit.kinds import biases as kinds
from posenc.audit.tables.probe import Probe, Sheet, rounded_to, unit
from posenc.core.bias import materialize
from posenc.core.tokens import grid as cells
from posenc.errors import ShapeError


def check_window(probe: Probe, sheet: Sheet, heads: int, size: tuple[int, int], expect: Expect) -> None:
    """All that can be asked of a bias of ``height × width`` cells."""
    height, width = size
    count = height * width
    answer = probe(height, width)
    probe.check_repeats(height, width)
    bias = answer[0] if answer.ndim == 4 and answer.shape[0] == 1 else answer
    bias = bias[None] if bias.ndim == 2 else bias
    numbers = not answer.dtype.is_floating_point
    if bias.shape != (1 if numbers or heads == 1 else heads, count, count):
        raise ShapeError(
            f"check_bias: fn gave {tuple(answer.shape)} for a window of {height} × {width}. Expected ({heads}, {count}, {count}), "
            f"or table rows ({count}, {count}). Return the bias between all cells."
        )
    sheet.checked += ["finite", "equal offsets alike"]
    if not bias.isfinite().all():
        sheet.found(kinds.NOT_FINITE, "entries that are not finite", "finite numbers")
        return
    values = bias.to(torch.float64).flatten(1).T  # [count², heads]
    offsets = _offsets(size)
    if not values.any():
        sheet.described.append("the same for all offsets: a table of zeros")
        return
    close = 0.0 if numbers else (4 * max(unit(answer.dtype), 2.0**-24) * values.abs().max()).item()
    unique, index = offsets.unique(dim=0, return_inverse=True)
    first = torch.stack([values[index == i][0] for i in range(len(unique))])
    if (values - first[index]).abs().max() > close:
        sheet.described.append("not a function of the offset")
        sheet.found(
            kinds.NOT_RELATIVE,
            f"cells at one offset differ by up to {(values - first[index]).abs().max().item():.3g}",
            "one bias for each offset",
            "note" if expect is None and not numbers else "error",
        )
        return
    what = "table rows" if numbers else "biases"
    sheet.described.append(
        f"a function of the offset in rows and columns, {len(unique)} offsets, {len(first.unique(dim=0))} {what}"
    )
    if height == width:
        sheet.skipped["stride"] = (
            "a square window looks the same with height and width exchanged; give a grid that is not square"
        )
    if not numbers and len(bias) < 4 and rounded_to(first, answer.dtype) > 2.0**-24:
        sheet.skipped["different offsets apart"] = "of few numbers in half precision some are equal by chance"
    else:
        _check_collisions(sheet, unique, first)
    _compare(sheet, bias, size, heads, expect, numbers)


def _offsets(size: tuple[int, int]) -> Tensor:
    """Rows and columns from key to query, for each pair of cells: ``[count², 2]``."""
    at = cells(*size).positions
    return (at[:, None] - at[None]).flatten(0, 1)


def _check_collisions(sheet: Sheet, offsets: Tensor, values: Tensor) -> None:
    """Different offsets have values of their own, unless the bias is symmetric on purpose."""
    sheet.checked.append("different offsets apart")
    twins = (values[:, None] == values[None]).all(-1)
    for classes in (offsets, offsets.abs(), offsets.abs().sort(-1).values, offsets.square().sum(-1, keepdim=True)):
        if torch.equal(twins, (classes[:, None] == classes[None]).all(-1)):
            if classes is not offsets:
                sheet.described.append("symmetric: mirrored offsets share a bias")
            return
    if twins.all():
        return
    a, b = twins.triu(1).nonzero()[0].tolist()
    sheet.found(
        kinds.COLLISION,
        f"offsets {tuple(offsets[a].tolist())} and {tuple(offsets[b].tolist())} share a row; {len(values.unique(dim=0))} rows for "
        f"{len(offsets)} offsets",
        f"{len(offsets)} rows",
    )


def _compare(sheet: Sheet, bias: Tensor, size: tuple[int, int], heads: int, expect: Expect, numbers: bool) -> None:
    value = promised_bias(expect, heads, "bidirectional")
    if value is None or numbers or value.axes != 2:
        return
    sheet.checked.append("promise")
    with torch.no_grad():
        wanted = materialize(value, cells(*size).positions, dtype=torch.float64)
    off = (bias.to(torch.float64) - wanted).abs()
    if off.max() > 2 * max(2 * unit(bias.dtype), 2.0**-20) * wanted.abs().max():
        turned = (bias.to(torch.float64).mT - wanted).abs().max() <= 2.0**-18 * wanted.abs().max()
        sheet.found(
            kinds.BUCKET_SIDES if turned else kinds.FORMULA,
            "offsets are key - query" if turned else f"off by up to {off.max().item():.3g}",
            "query - key" if turned else "the promised bias of each offset",
        )
