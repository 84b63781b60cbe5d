"""What acts on scores: bias by distance, T5's buckets, attention over shuffled tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from posenc.analysis.equivariance import shuffle
from posenc.analysis.window import attention_reach
from posenc.core.bias import ScoreBias, SlopeBias, materialize
from posenc.core.distance import t5_bucket
from posenc.core.sites import Encoding
from posenc.plots.style import BLUE, GREY, MAGNITUDE, SIGNED, VERMILION, colour_bar, in_style, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DEEPEST = -12.0  # e^-12 of the weight is nothing to see


@in_style
def bias_fan(bias: ScoreBias, length: int, *, title: str = "Score bias by distance") -> Figure:
    """A bias by distance into the past, a line per head, and the weight that it leaves when all content is alike.

    Example:
        >>> [axes.get_ylabel() for axes in bias_fan(ALiBi(4)(), 32).axes[:2]]
        ['bias on the score (logits)', 'attention weight']
    """
    from matplotlib import colormaps

    row = materialize(bias, torch.tensor([length - 1]), torch.arange(length), dtype=torch.float64).detach()
    values = row.reshape(-1, length).flip(-1)
    weights, reach = values.softmax(-1), attention_reach(bias, length)
    heads = len(values)
    colours = [colormaps[MAGNITUDE](0.9 * head / max(heads - 1, 1)) for head in range(heads)]
    figure = new_figure(3.3)
    left, right = figure.subplots(1, 2)
    for head in range(heads):
        mean = f"head {head}{_slope(bias, head)}: {reach.mean[head]:,.1f}"
        left.plot(values[head].tolist(), color=colours[head], linewidth=1.5)
        right.plot(weights[head].tolist(), color=colours[head], linewidth=1.5, label=mean)
    lowest, highest = float(values.min()), float(values.max())
    room = 0.05 * (min(highest - lowest, -_DEEPEST) or 1.0)
    left.set(title=title, xlabel="distance to the key (tokens)", ylabel="bias on the score (logits)")
    left.set(ylim=(max(lowest, highest + _DEEPEST) - room, highest + room), xlim=(0, length - 1))
    right.set(title="Weight when all content is alike", xlabel="distance to the key (tokens)", ylabel="attention weight")
    right.set(xlim=(0, length - 1), ylim=(0, None))
    if heads <= 12:
        right.legend(title=f"mean distance within {length:,} tokens", title_fontsize=8, handlelength=1.2)
    return figure


@in_style
def bucket_staircase(buckets: int, max_distance: int) -> Figure:
    """Which T5 bucket each distance falls into: decoders look back only, encoders split the buckets by direction.

    Example:
        >>> [axes.get_title(loc="left") for axes in bucket_staircase(32, 128).axes]
        ['causal (decoder)', 'bidirectional (encoder)']
    """
    far = max_distance + max(max_distance // 4, 2)
    figure = new_figure(3.1)
    left, right = figure.subplots(1, 2, sharey=True)
    panels = ((left, "causal", torch.arange(far + 1)), (right, "bidirectional", torch.arange(-far, far + 1)))
    for axes, direction, distances in panels:
        of = t5_bucket(distances, buckets=buckets, max_distance=max_distance, direction=direction)  # type: ignore[arg-type]
        exact = buckets // (2 if direction == "causal" else 4)
        past = distances >= 0
        axes.axvspan(-exact if direction == "bidirectional" else 0, exact, color="0.92", linewidth=0)
        axes.step(distances[past].tolist(), of[past].tolist(), where="mid", color=BLUE, linewidth=1.5)
        if direction == "bidirectional":
            axes.step(distances[~past].tolist(), of[~past].tolist(), where="mid", color=VERMILION, linewidth=1.5)
        for edge in (max_distance, -max_distance):
            axes.axvline(edge, color="0.4", linewidth=0.9, linestyle=":")
        axes.set(xlabel="distance, query − key (tokens)", xlim=(float(distances[0]), far), ylim=(-1, buckets))
    left.set_ylabel("bucket")
    left.set_title("causal (decoder)")
    right.set_title("bidirectional (encoder)")
    right.text(0.45 * far, 0.53 * buckets, "past", color=BLUE, fontsize=9)
    right.text(-0.62 * far, 0.72 * buckets, "future", color=VERMILION, fontsize=9)
    left.text(
        0.98, 0.04, f"grey: one distance each\ndotted: all from {max_distance} share one", transform=left.transAxes,
        ha="right", fontsize=8, color=GREY, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip
    return figure


@in_style
def shuffled_attention(rows: Mapping[str, Sequence[Encoding]], *, length: int = 12, dim: int = 32, heads: int = 4) -> Figure:
    """Attention over tokens, over the same tokens shuffled and put back in order, and the difference; a row per encoding.

    Args:
        rows: encodings by the name to show, for this width and these heads.

    Example:
        >>> figure = shuffled_attention({"none": [], "RoPE": [RoPE(8)]})
        >>> len(figure.axes)  # two rows of three panels, two colour bars
        8
    """
    found = {name: shuffle(encodings, length=length, dim=dim, heads=heads) for name, encodings in rows.items()}
    figure = new_figure(1.0 + 2.15 * len(found))
    figure.set_layout_engine("compressed")
    panels = figure.subplots(len(found), 3, squeeze=False, sharex=True, sharey=True)
    most = max(float(torch.maximum(s.weights, s.shuffled_weights).max()) for s in found.values())
    gaps = {name: s.shuffled_weights - s.weights for name, s in found.items()}
    widest = max(float(gap.abs().max()) for gap in gaps.values()) or 1.0
    weight: Any = None
    change: Any = None
    for line, (name, shuffled) in zip(panels, found.items(), strict=True):
        weight = line[0].imshow(shuffled.weights.tolist(), cmap=MAGNITUDE, vmin=0, vmax=most)
        line[1].imshow(shuffled.shuffled_weights.tolist(), cmap=MAGNITUDE, vmin=0, vmax=most)
        change = line[2].imshow(gaps[name].tolist(), cmap=SIGNED, vmin=-widest, vmax=widest)
        gap = float(gaps[name].abs().max())
        line[2].set_title("difference: none" if gap < 1e-12 else f"difference: up to {gap:.2f}")
        line[0].set_title(f"{name}: in order")
        line[1].set_title("shuffled, put back")
        line[0].set_ylabel("query (token)")
        for axes in line:
            axes.spines[:].set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("key (token)")
        axes.set_xticks(range(0, length, max(length // 4, 1)))
    for image, columns, label in ((weight, panels[:, :2], "attention weight"), (change, panels[:, 2:], "difference in weight")):
        colour_bar(figure, image, columns, label, location="bottom")
    return figure


def _slope(bias: ScoreBias, head: int) -> str:
    if not isinstance(bias, SlopeBias):
        return ""
    slope = Fraction(float(bias.past[head]))
    return f", slope {slope}" if slope.denominator <= 1024 else f", slope {float(slope):.3g}"
