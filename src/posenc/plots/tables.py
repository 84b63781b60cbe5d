"""Tables of codes as colours: fixed and learned ones, and how alike their rows are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posenc.analysis.similarity import check_codes, similarity_kernel, similarity_matrix
from posenc.errors import ShapeError
from posenc.plots.style import BLUE, SIGNED, VERMILION, colour_bar, in_style, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@in_style
def heatmap(codes: Tensor, *, title: str = "Position codes") -> Figure:
    """A table of codes: a column per position, a row per channel, white where the code is 0.

    Shape:
        codes: ``[positions, dim]``.

    Example:
        >>> heatmap(Sinusoidal(16).table(torch.arange(20))).axes[0].get_xlabel()
        'position (tokens)'
    """
    _check_one(codes, "heatmap")
    figure = new_figure(3.3)
    axes = figure.subplots()
    _colours(figure, axes, codes.T, label="value of the code")
    axes.set(title=title, xlabel="position (tokens)", ylabel="channel")
    return figure


@in_style
def similarity(inv_freq: Tensor, length: int, *, title: str = "How alike sinusoidal codes are") -> Figure:
    """The dot product of every two sinusoidal codes, and the same by lag, as shares of a code with itself.

    Example:
        >>> len(similarity(Sinusoidal(16).inv_freq(), 8).axes)
        3
    """
    pairs = len(inv_freq)
    lags = torch.arange(length)
    kernel = similarity_kernel(lags, inv_freq) / pairs
    matrix = similarity_kernel(lags[:, None] - lags, inv_freq) / pairs
    figure = new_figure(3.1)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _colours(figure, left, matrix, label="dot product ÷ largest", origin="upper")
    left.set(title=title, xlabel="position (tokens)", ylabel="position (tokens)")
    right.axhline(0, color="0.8", linewidth=0.8, zorder=1)
    right.plot(kernel.tolist(), color=BLUE, linewidth=1.6)
    rises = (kernel.diff() > 0).nonzero().flatten() + 1
    if len(rises):
        first = int(rises[0])
        right.plot(first - 1, float(kernel[first - 1]), "o", color=VERMILION, markersize=5)
        right.annotate(
            f"rises again\nfrom lag {first - 1}", (first - 1, float(kernel[first - 1])), xytext=(12, 26),
            textcoords="offset points", color=VERMILION, fontsize=8, arrowprops={"arrowstyle": "-", "color": VERMILION},
        )  # fmt: skip
    right.set(
        title="By lag, which is all it depends on", xlabel="lag (tokens)", ylabel="dot product ÷ largest", ylim=(None, 1.04)
    )
    return figure


@in_style
def learned_table(weight: Tensor, *, title: str = "A learned table") -> Figure:
    """A trained table of rows, and the cosine of every two rows; the diagonal says whether neighbours came out alike.

    Shape:
        weight: ``[positions, dim]``, without rows that no position reads.

    Example:
        >>> [axes.get_ylabel() for axes in learned_table(torch.eye(4)).axes[:2]]
        ['channel', 'position (tokens)']
    """
    _check_one(weight, "learned_table")
    figure = new_figure(3.1)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _colours(figure, left, weight.detach().T, label="value")
    left.set(title=title, xlabel="position (tokens)", ylabel="channel")
    _colours(figure, right, similarity_matrix(weight, measure="cosine"), label="cosine of two rows", origin="upper", most=1.0)
    right.set(title="How alike its rows are", xlabel="position (tokens)", ylabel="position (tokens)")
    return figure


def _colours(figure: Any, axes: Any, values: Tensor, *, label: str, origin: str = "lower", most: float | None = None) -> None:
    """A signed table: 0 is white, equal magnitudes are equally strong."""
    values = values.detach().to(torch.float64)
    most = most or float(values.abs().max()) or 1.0
    image = axes.imshow(values.tolist(), cmap=SIGNED, vmin=-most, vmax=most, aspect="auto", origin=origin)
    axes.spines[:].set_visible(False)
    colour_bar(figure, image, axes, label)


def _check_one(codes: Tensor, name: str) -> None:
    check_codes(name, codes)
    if codes.ndim != 2:
        raise ShapeError(
            f"{name}: codes of shape {tuple(codes.shape)}. Expected [positions, dim]. Pass the table of one sequence."
        )
