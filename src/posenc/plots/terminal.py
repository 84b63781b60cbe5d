"""Heatmaps and curves in a terminal: what does not fit is left out by a rule that stands below the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite, log10
from textwrap import wrap

import torch
from rich.style import Style
from rich.text import Text
from torch import Tensor

RAMP = " .:-=+*#%@"
MARKS = "oxv+*"
_ROWS = 20


def terminal_heatmap(values: Tensor, *, across: str, down: str, width: int, colour: bool) -> Text:
    """A signed table as characters, 0 in the middle of the scale; a row of the table per line.

    Args:
        values: ``[rows, columns]``.
        across, down: what columns and rows count.
        width: of the terminal, in characters.
        colour: blue to red behind blanks; else a ramp of ten characters.

    Example:
        >>> print(terminal_heatmap(torch.tensor([[-1.0, 0.0, 1.0]]), across="position", down="channel", width=40, colour=False))
        0 | +@
        position across, channel down
        scale: ' ' is -1, '@' is 1
    """
    values = values.detach().to(torch.float64)
    most = float(values.abs().max()) or 1.0
    labels = len(str(values.shape[0] - 1))
    every_row, every_column = ceil(values.shape[0] / _ROWS), ceil(values.shape[1] / max(width - labels - 3, 1))
    shown = values[::every_row, ::every_column]
    picture = Text()
    for index, row in enumerate(shown.tolist()):
        picture.append(f"{index * every_row:>{labels}} |")
        for value in row:
            if colour:
                picture.append(" ", _tint(value / most))
            else:
                picture.append(RAMP[min(int((value / most + 1) / 2 * len(RAMP)), len(RAMP) - 1)])
        picture.append("\n")
    steps = (every_column, f"{across} across"), (every_row, f"{down} down")
    left_out = ", ".join(f"every {_nth(n)} {what}" for n, what in steps if n > 1)
    picture.append("\n".join(wrap(f"shown: {left_out}" if left_out else f"{across} across, {down} down", width)))
    picture.append("\nscale: ")
    if colour:
        picture.append("  ", _tint(-1.0))
        picture.append(f" is {-most:.3g}, ")
        picture.append("  ", _tint(1.0))
        picture.append(f" is {most:.3g}, 0 is white")
    else:
        picture.append(f"'{RAMP[0]}' is {-most:.3g}, '{RAMP[-1]}' is {most:.3g}")
    return picture


def terminal_curves(
    at: Sequence[float], curves: Mapping[str, Sequence[float]], *, across: str, up: str, width: int, logarithmic: str = "xy"
) -> Text:
    """Curves as characters: each value known is one mark, at most half a character from its place; nothing is joined.

    Args:
        at: where the curves are known.
        curves: values by name; five at most.
        logarithmic: which axes are: ``""``, ``"x"``, ``"y"`` or ``"xy"``. Values of 0 or less are then left out.
        width: of the terminal, in characters.

    Example:
        >>> picture = terminal_curves([1, 10, 100], {"a": [1, 2, 3]}, across="n", up="m", width=40, logarithmic="x")
        >>> print(picture.plain.splitlines()[-2])
        across: n, logarithmic; up: m
    """
    margin = 10
    columns = max(min(width, 100) - margin - 1, 8)
    points = [
        (_scaled(x, "x" in logarithmic), _scaled(y, "y" in logarithmic), mark)
        for mark, values in zip(MARKS, curves.values(), strict=False)
        for x, y in zip(at, values, strict=True)
    ]
    inside = [point for point in points if isfinite(point[0]) and isfinite(point[1])]
    xs, ys = [x for x, _, _ in inside] or [0.0], [y for _, y, _ in inside] or [0.0]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    grid = [[" "] * columns for _ in range(_ROWS)]
    for x, y, mark in inside:
        column = round((x - left) / ((right - left) or 1.0) * (columns - 1))
        row = round((high - y) / ((high - low) or 1.0) * (_ROWS - 1))
        grid[row][column] = mark if grid[row][column] in (" ", mark) else "&"
    top, bottom = (10**value if "y" in logarithmic else value for value in (high, low))
    first, last = (10**value if "x" in logarithmic else value for value in (left, right))
    picture = Text()
    for index, line in enumerate(grid):
        label = f"{top:.3g}" if index == 0 else f"{bottom:.3g}" if index == _ROWS - 1 else ""
        picture.append(f"{label:>{margin - 2}} |{''.join(line)}\n")
    ends = f"{first:,.4g}", f"{last:,.4g}"
    picture.append(" " * (margin - 1) + ends[0] + ends[1].rjust(columns + 1 - len(ends[0])) + "\n")
    scales = [", logarithmic" if axis in logarithmic else "" for axis in "xy"]
    picture.append("\n".join(wrap(f"across: {across}{scales[0]}; up: {up}{scales[1]}", width)) + "\n")
    names = [f"{mark} {name}" for mark, name in zip(MARKS, curves, strict=False)] + ["& several"] * (len(curves) > 1)
    legend = ""
    for name in names:  # as many as fit on a line
        joined = f"{legend}   {name}" if legend else name
        if legend and len(joined) > width:
            picture.append(legend + "\n")
            joined = name
        legend = joined
    picture.append(legend)
    return picture


def _scaled(value: float, logarithmic: bool) -> float:
    if not logarithmic:
        return float(value)
    return log10(value) if value > 0 else float("nan")


def _tint(value: float) -> Style:
    """White at 0, towards blue below and red above, in equal steps for equal magnitudes."""
    end = (33, 102, 172) if value < 0 else (178, 24, 43)
    red, green, blue = (round(247 + (channel - 247) * abs(value)) for channel in end)
    return Style(bgcolor=f"rgb({red},{green},{blue})")


def _nth(n: int) -> str:
    return f"{n}{'th' if 10 <= n % 100 <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"
