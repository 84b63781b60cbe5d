"""Measured curves of a comparison: one small panel per encoding, with the others behind it in grey."""

from __future__ import annotations

import io
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from posenc.errors import require

FORMATS = ("png", "svg", "pdf")
_WIDEST = 4
_COLOUR, _SHORT, _OTHERS = "#0072B2", "#D55E00", "0.85"
_AXES = {
    "exact match": ("length n in tokens", "exact match"),
    "suffix loss": ("context in tokens", "loss in nats"),
    "recall": ("lag in tokens", "recalled"),
}


class _Line(NamedTuple):
    sizes: list[int]
    means: list[float]
    low: list[float]
    high: list[float]
    seeds: list[list[float]]


def check_picture_path(path: Path) -> None:
    """Refuse, before any work, a picture that could not be written later."""
    require("matplotlib", "plot")
    if path.suffix[1:] not in FORMATS:
        raise ValueError(
            f"compare: --plot {path}. Expected a name ending in {', '.join('.' + f for f in FORMATS)}. Choose one."
        )
    if not path.parent.is_dir():
        raise ValueError(f"compare: --plot {path}: there is no folder {str(path.parent)!r}. Expected one. Make it first.")


def curves_picture(report: dict[str, Any], kind: str) -> bytes:
    """A block of panels per task (and one for recall by lag), a panel per encoding, a band over seeds.

    Args:
        report: a ``posenc.compare/1`` report.
        kind: ``"png"``, ``"svg"`` or ``"pdf"``.
    """
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    blocks = [(task, task["measure"]) for task in report["protocol"]["tasks"]]
    recalling = {cell["task"] for cell in report["cells"] if any(c["measure"] == "recall" for c in cell["curves"])}
    blocks += [(task, "recall") for task in report["protocol"]["tasks"] if task["name"] in recalling]
    columns = min(_WIDEST, len(report["protocol"]["rows"]))
    rows = ceil(len(report["protocol"]["rows"]) / columns)
    height = 1.75 * rows + 0.75
    figure = Figure(figsize=(2.35 * columns + 0.6, height * len(blocks) + 0.25), dpi=150, layout="constrained")
    heights = [*[height] * len(blocks), 0.25]
    *parts, foot = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    foot.text(0.5, 0.5, _small_print(report), fontsize=6.5, color="0.45", ha="center", va="center")
    for part, (task, measure) in zip(parts, blocks, strict=True):
        cells = [cell for cell in report["cells"] if cell["task"] == task["name"]]
        part.suptitle(_title(task, measure), fontsize=11, x=0.01, ha="left")
        part.supxlabel(_AXES[measure][0], fontsize=9)
        part.supylabel(_AXES[measure][1], fontsize=9)
        panels = part.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        lines = [_line(cell, measure) for cell in cells]
        for index, axes in enumerate(panels.flat):
            if index < len(cells):
                _panel(axes, cells[index], lines, index, task, measure)
            else:
                axes.set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def _title(task: dict[str, Any], measure: str) -> str:
    if measure == "recall":
        return f"{task['name']}: recall by lag (dash-dotted: guessing among the values shown)"
    return f"{task['name']}: {task['summary']}"


def _line(cell: dict[str, Any], measure: str) -> _Line:
    points = [c for c in cell["curves"] if c["measure"] == measure and None not in c["values"]]
    values = [point["values"] for point in points]
    return _Line(
        [p["size"] for p in points], [sum(v) / len(v) for v in values], [min(v) for v in values], [max(v) for v in values],
        [list(seed) for seed in zip(*values, strict=True)],
    )  # fmt: skip


def _panel(axes: Any, cell: dict[str, Any], lines: Sequence[_Line], index: int, task: dict[str, Any], measure: str) -> None:
    for other in lines:
        axes.plot(other.sizes, other.means, color=_OTHERS, linewidth=1, zorder=1)
    own, colour = lines[index], _COLOUR if cell["fit"] else _SHORT
    axes.axvline(task["trained_size"], color="0.4", linewidth=0.9, linestyle=":", zorder=2)
    if guesses := [(c["size"], c["guess"]) for c in cell["curves"] if c["measure"] == measure and c.get("guess") is not None]:
        axes.plot(*zip(*guesses, strict=True), color="0.25", linewidth=0.9, linestyle="-.", zorder=2)
    axes.plot(own.sizes, own.means, color=colour, linewidth=2, linestyle="-" if cell["fit"] else "--", zorder=4)
    if cell["seeds"][1:]:
        axes.fill_between(own.sizes, own.low, own.high, color=colour, alpha=0.2, linewidth=0, zorder=3)
        for seed in own.seeds:
            axes.plot(own.sizes, seed, color=colour, linestyle="", marker=".", markersize=2.5, alpha=0.6, zorder=3)
    axes.set_title(cell["label"] if cell["fit"] else f"{cell['label']} (no fit)", fontsize=9, color=colour)
    if cell["undefined"] and own.sizes:
        axes.annotate(
            "undefined", (own.sizes[-1], 0.5), xycoords=("data", "axes fraction"), xytext=(6, 0), textcoords="offset points",
            fontsize=8, color="0.4", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    if measure != "exact match":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if measure != "suffix loss":
        axes.set_ylim(-0.06, 1.06)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _small_print(report: dict[str, Any]) -> str:
    seeds = len(report["protocol"]["seeds"])
    spread = "one seed" if seeds == 1 else f"mean and range of {seeds} seeds, a dot each"
    environment = report["environment"]
    return f"{spread}; dotted: trained to here; grey: the other rows.  posenc {environment['posenc']}, torch {environment['torch']}"
