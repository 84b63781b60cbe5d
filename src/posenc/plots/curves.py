"""Measured curves of a comparison: value by length, a band over seeds."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from posenc.errors import require

FORMATS = ("png", "svg", "pdf")

# Okabe and Ito's palette, made to be told apart with any colour vision; markers double the distinction.
_STYLES = (
    ("#000000", "o"), ("#E69F00", "s"), ("#56B4E9", "D"), ("#999999", "X"),
    ("#009E73", "^"), ("#0072B2", "v"), ("#D55E00", "P"), ("#CC79A7", "*"),
)  # fmt: skip


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
    """One panel per task (and one for recall by lag), one line per encoding.

    Args:
        report: a ``posenc.compare/1`` report.
        kind: ``"png"``, ``"svg"`` or ``"pdf"``.
    """
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    panels = [(task, task["measure"]) for task in report["protocol"]["tasks"]]
    panels += [(task, "recall") for task in report["protocol"]["tasks"] if task["measure"] == "suffix loss"]
    figure = Figure(figsize=(5.6 * len(panels) + 1.8, 4.4), dpi=150, layout="constrained")
    styles = dict(zip(report["protocol"]["rows"], _STYLES * 4, strict=False))
    for axes, (task, measure) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _panel(axes, [cell for cell in report["cells"] if cell["task"] == task["name"]], task, measure, styles)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    seeds = len(report["protocol"]["seeds"])
    spread = "one seed" if seeds == 1 else f"mean and range of {seeds} seeds"
    figure.supxlabel(
        f"{spread}; hollow: did not fit in range.  posenc {report['environment']['posenc']}, "
        f"torch {report['environment']['torch']}",
        fontsize=8, color="0.4",
    )  # fmt: skip
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def _panel(
    axes: Any, cells: list[dict[str, Any]], task: dict[str, Any], measure: str, styles: dict[str, tuple[str, str]]
) -> None:
    for cell in cells:
        points = [c for c in cell["curves"] if c["measure"] == measure and None not in c["values"]]
        sizes = [point["size"] for point in points]
        means = [sum(point["values"]) / len(point["values"]) for point in points]
        colour, marker = styles[cell["row"]]
        every = max(1, len(points) // 8)
        label = cell["label"] if cell["fit"] else f"{cell['label']} (did not fit)"
        axes.plot(
            sizes, means, color=colour, marker=marker, markevery=every, markersize=6, linewidth=1.8, alpha=0.95,
            linestyle="-" if cell["fit"] else ":", markerfacecolor=colour if cell["fit"] else "white", label=label,
        )  # fmt: skip
        if cell["seeds"][1:]:
            low, high = ([f(point["values"]) for point in points] for f in (min, max))
            axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.axvline(task["trained_size"], color="0.5", linewidth=1, linestyle="--")
    axes.annotate(
        "trained to here", (task["trained_size"], 1.0), xycoords=("data", "axes fraction"), xytext=(4, -10),
        textcoords="offset points", fontsize=8, color="0.4",
    )  # fmt: skip
    axes.set_title(f"{task['name']}{': recall by lag' if measure == 'recall' else ''}", fontsize=11, loc="left")
    axes.set_xlabel(
        {"exact match": "length n in tokens", "suffix loss": "context in tokens", "recall": "lag in tokens"}[measure]
    )
    axes.set_ylabel(
        {"exact match": "exact match", "suffix loss": "loss of the last tokens in nats", "recall": "recalled"}[measure]
    )
    if measure != "exact match":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if measure != "suffix loss":
        axes.set_ylim(-0.04, 1.06)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
