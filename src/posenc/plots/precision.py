"""What each rounding costs, by position."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from posenc.analysis.precision import CHAINS, precision_loss
from posenc.plots.style import BLUE, GREEN, ORANGE, PURPLE, VERMILION, in_style, new_figure
from posenc.schedules.base import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SAMPLES = 64
_LOOKS = ((BLUE, "o", "-"), (GREEN, "s", "-"), (PURPLE, "^", "--"), (ORANGE, "D", "-."), (VERMILION, "v", ":"))


class WorstErrors(NamedTuple):
    """The largest error of a table between each position and half of it, per chain of `CHAINS`."""

    positions: list[int]
    errors: dict[str, list[float]]


def worst_errors(schedule: Schedule, rotary_dim: int, limit: int) -> WorstErrors:
    """The largest error over all pairs and 64 positions of each octave up to a limit.

    Example:
        >>> found = worst_errors(Geometric(), 64, 1024)
        >>> found.positions[-1], found.errors["float32 angles"][-1] < 1024 * 2**-23
        (1024, True)
    """
    tops = [limit >> shift for shift in range(limit.bit_length() - 2, -1, -1)]
    errors: dict[str, list[float]] = {name: [] for name in CHAINS}
    for top in tops:
        at: Tensor = torch.linspace(top // 2 + 1, top, _SAMPLES, dtype=torch.float64).round()
        for name, chain in CHAINS.items():
            errors[name].append(float(precision_loss(schedule, rotary_dim, at, chain).table.max()))
    return WorstErrors(tops, errors)


@in_style
def precision_curves(schedule: Schedule, rotary_dim: int, limit: int, *, title: str = "What rounding costs") -> Figure:
    """The largest error of a rotary table by position, for each way to lose precision.

    Example:
        >>> precision_curves(Geometric(), 32, 256).axes[0].get_xlabel()
        'position (tokens)'
    """
    positions, errors = worst_errors(schedule, rotary_dim, limit)
    figure = new_figure(3.5)
    axes = figure.subplots()
    axes.axhspan(1, 3, color="0.93", linewidth=0)
    axes.text(positions[0], 1.15, "as wrong as a random angle", fontsize=8, color="0.4", va="bottom")
    for (name, values), (colour, marker, line) in zip(errors.items(), _LOOKS, strict=True):
        seen = [value or float("nan") for value in values]  # an error of 0 has no place on a logarithmic axis
        axes.plot(positions, seen, color=colour, marker=marker, linestyle=line, markersize=3.5, linewidth=1.4, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_yscale("log")
    axes.set(title=title, xlabel="position (tokens)", ylabel="largest error of cos and sin", ylim=(None, 3))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title="computed with", title_fontsize=8)
    return figure
