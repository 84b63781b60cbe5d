"""What turns: shift matrices, clock hands, wavelengths, rings of seen angles, scores by distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import cos, degrees, log10, pi, sin
from typing import TYPE_CHECKING, Any

import torch

from posenc.analysis.decay import Content, random_scores, rotary_kernel
from posenc.analysis.shift import shift_matrix
from posenc.analysis.waves import AngleCoverage
from posenc.encodings.sinusoidal import Sinusoidal
from posenc.plots.style import BLUE, GREEN, ORANGE, PURPLE, SIGNED, VERMILION, colour_bar, in_style, new_figure
from posenc.schedules.base import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

_LADDERS = ((BLUE, "o"), (VERMILION, "s"), (GREEN, "^"), (PURPLE, "D"), (ORANGE, "v"))


@in_style
def shift(encoding: Sinusoidal, position: int, by: int) -> Figure:
    """One matrix moves every code: M, the code it starts from, and the code it lands on.

    Example:
        >>> len(shift(Sinusoidal(8), 2, 3).axes)
        3
    """
    matrix = shift_matrix(by, encoding.inv_freq(), layout=encoding.layout)
    before, after = encoding.table(torch.tensor([position, position + by]), dtype=torch.float64)
    moved = matrix @ before
    figure = new_figure(3.1)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    image = left.imshow(matrix.tolist(), cmap=SIGNED, vmin=-1, vmax=1, aspect="auto")
    left.spines[:].set_visible(False)
    colour_bar(figure, image, left, "entry of M")
    left.set(title=f"M of {by:+d} tokens, {encoding.layout}", xlabel="channel read", ylabel="channel written")
    right.axhline(0, color="0.8", linewidth=0.8)
    right.plot(before.tolist(), "s", color="0.7", markersize=3.5, label=f"code of {position}")
    right.plot(after.tolist(), "o", color=BLUE, markersize=6.5, markerfacecolor="none", label=f"code of {position + by}")
    right.plot(moved.tolist(), "o", color=VERMILION, markersize=3, label=f"M · code of {position}")
    right.set(xlabel="channel", ylabel="value", ylim=(-1.12, 1.12))
    right.set_title(f"M moves any code (off by {float((moved - after).abs().max()):.0e})")
    figure.legend(loc="outside lower right", ncols=3)
    return figure


@in_style
def clock_hands(
    inv_freq: Tensor, positions: Sequence[int], pairs: Sequence[int], *, title: str = "Rotary clock hands"
) -> Figure:
    """One dial per position and channel pair; the hand shows the angle that the pair has turned by.

    Shape:
        inv_freq: ``[pairs]``.

    Example:
        >>> figure = clock_hands(Geometric().frequencies(64).inv_freq, range(6), (0, 8, 31))
        >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
        ['0', '1', '2', '3', '4', '5']
    """
    from matplotlib.patches import Circle, Wedge

    radius = 0.42
    figure = new_figure(0.8 + 5.4 * len(pairs) / len(positions))
    axes = figure.subplots()
    for row, pair in enumerate(pairs):
        omega = float(inv_freq[pair])
        for column, position in enumerate(positions):
            angle, centre = position * omega, (column, -row)
            before = "#DCE9F4" if abs(angle) >= 2 * pi else "white"
            axes.add_patch(Circle(centre, radius, facecolor=before, edgecolor="0.75", linewidth=0.8))
            axes.add_patch(Wedge(centre, radius, 0, degrees(angle % (2 * pi)), facecolor=BLUE, alpha=0.25, linewidth=0))
            tip = column + radius * cos(angle), -row + radius * sin(angle)
            axes.plot((column, tip[0]), (-row, tip[1]), color=BLUE, linewidth=1.8, solid_capstyle="round")
    axes.set_aspect("equal")
    axes.set(xlim=(-0.6, len(positions) - 0.4), ylim=(-len(pairs) + 0.4, 0.6), xlabel="position (tokens)")
    axes.set_xticks(range(len(positions)), [str(position) for position in positions])
    axes.set_yticks([-row for row in range(len(pairs))], [_turn(pair, float(inv_freq[pair])) for pair in pairs])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{title}: from the right, anticlockwise; tinted after a full turn")
    return figure


@in_style
def wavelength_chart(
    ladders: Mapping[str, Tensor], length: int, *, title: str = "Wavelengths; hollow: no full turn within the trained length"
) -> Figure:
    """How many tokens each pair takes to turn once, against a trained length; hollow where it never does.

    Args:
        ladders: frequencies in radians per position, ``[pairs]``, by the name to show; five at most.

    Example:
        >>> wavelength_chart({"base 10,000": Geometric().frequencies(64).inv_freq}, 2048).axes[0].get_yscale()
        'log'
    """
    figure = new_figure(3.3)
    axes = figure.subplots()
    for (name, inv_freq), (colour, marker) in zip(ladders.items(), _LADDERS, strict=False):
        waves = 2 * pi / inv_freq.abs().to(torch.float64)
        turning = waves.isfinite().nonzero().flatten()
        waves = waves[turning]
        for fits, face in ((waves <= length, colour), (waves > length, "white")):
            axes.plot(
                turning[fits].tolist(),
                waves[fits].tolist(),
                marker,
                color=colour,
                markerfacecolor=face,
                markersize=4,
                linestyle="none",
            )
        missing = len(inv_freq) - int((waves <= length).sum())
        label = f"{name}: {missing} of {len(inv_freq)} never complete a turn"
        axes.plot([], [], marker, color=colour, markersize=4, linestyle="none", label=label)
    axes.axhline(length, color="0.3", linewidth=0.9, linestyle=":")
    axes.annotate(
        f"trained length {length:,}", (0, length), xycoords=("axes fraction", "data"), xytext=(4, 3),
        textcoords="offset points", fontsize=8, color="0.3",
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set(title=title, xlabel="channel pair", ylabel="wavelength (tokens per turn)")
    axes.legend(loc="lower right")
    return figure


@in_style
def coverage_rings(coverage: AngleCoverage, *, title: str = "Angles seen in training") -> Figure:
    """A ring per pair, the slowest outside: the arc it has turned through within the trained length.

    Example:
        >>> coverage_rings(AngleCoverage(64, (10.0, 0.1))).axes[0].name
        'polar'
    """
    from matplotlib.patches import Patch

    turns = coverage.turns
    pairs, missing = len(turns), len(coverage.incomplete)
    figure = new_figure(3.9)
    grid = figure.add_gridspec(1, 2, width_ratios=(1.25, 1))
    axes: Any = figure.add_subplot(grid[0], projection="polar")
    right = figure.add_subplot(grid[1])
    core = pairs * 0.2
    radii = [core + pair for pair in range(pairs)]
    height, seam = (0.82, 0.0) if pairs <= 24 else (1.0, 0.4)  # more rings have no room for gaps
    axes.bar(
        [0] * pairs, [height] * pairs, width=2 * pi, bottom=radii, align="edge", color="0.93", edgecolor="0.93", linewidth=seam
    )
    arcs = [2 * pi * min(1.0, t) for t in turns]
    colours = [BLUE if t >= 1 else VERMILION for t in turns]
    axes.bar(
        [0] * pairs, [height] * pairs, width=arcs, bottom=radii, align="edge", color=colours, edgecolor=colours, linewidth=seam
    )
    axes.set(ylim=(0, core + pairs), yticks=[], xticks=[0, pi / 2, pi, 3 * pi / 2], xticklabels=["0", "90°", "180°", "270°"])
    axes.grid(visible=False)
    axes.spines["polar"].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=9.5)
    right.axis("off")
    handles = [Patch(color=BLUE, label="seen at every angle"), Patch(color=VERMILION, label="angles seen of a slow pair"),
               Patch(color="0.9", label="never seen")]  # fmt: skip
    right.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 0.62))
    first = coverage.incomplete[0] if missing else None
    lines = [f"{missing} of {pairs} pairs never complete", f"a turn within {coverage.length:,} tokens", ""]
    lines += [f"innermost, pair 0: {_count(turns[0])}"]
    if first:
        lines += [
            f"last full, pair {first - 1}: {_count(turns[first - 1])}",
            f"first short, pair {first}: {_count(turns[first])}",
        ]
    lines += [f"outermost, pair {pairs - 1}: {_count(turns[-1])}"]
    right.text(0, 0.55, "\n".join(lines), transform=right.transAxes, fontsize=8.5, va="top", linespacing=1.5)
    return figure


@in_style
def decay_curve(schedule: Schedule, rotary_dim: int, limit: int, *, title: str = "Rotary scores by distance") -> Figure:
    """Scaled scores by distance: equal content follows the mean of cosines, independent content stays where it was.

    Example:
        >>> decay_curve(Geometric(), 32, 100).axes[0].get_xscale()
        'log'
    """
    distances = decay_distances(limit)
    at = distances.tolist()
    figure = new_figure(3.3)
    axes = figure.subplots()
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=1)
    looks: tuple[tuple[Content, str, str], ...] = (
        ("equal", BLUE, "key equal to query: √dim · mean of cosines, ± deviation"),
        ("independent", ORANGE, "key independent of query: mean ± deviation"),
    )
    for content, colour, label in looks:
        mean, spread = random_scores(schedule, rotary_dim, distances, content=content)
        if content == "equal":
            mean = rotary_kernel(schedule, rotary_dim, distances) * rotary_dim**0.5  # exactly
        axes.fill_between(at, (mean - spread).tolist(), (mean + spread).tolist(), color=colour, alpha=0.2, linewidth=0)
        axes.plot(at, mean.tolist(), color=colour, linewidth=1.4, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(title=title, xlabel="distance (tokens)", ylabel="scaled score (logits)", xlim=(1, limit))
    axes.legend(loc="upper right")
    return figure


def decay_distances(limit: int) -> Tensor:
    """Whole distances from 1 to the limit, spaced evenly on a logarithmic axis."""
    spaced: Tensor = torch.logspace(0, log10(limit), 400, dtype=torch.float64).round().unique()
    return spaced.to(torch.int64)


def _turn(pair: int, omega: float) -> str:
    return f"pair {pair}\n" + (f"{2 * pi / abs(omega):,.4g} tokens a turn" if omega else "does not turn")


def _count(turns: float) -> str:
    return f"{turns:,.0f} turns" if turns >= 10 else f"{turns:.2f} turns"
