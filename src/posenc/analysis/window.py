"""How far attention reaches when content says nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from posenc.core.bias import ScoreBias, materialize
from posenc.core.checks import check_integers
from posenc.errors import ShapeError


@final
@dataclass(frozen=True)
class AttentionReach:
    """How far back each head looks when all content is alike.

    Args:
        share: of the weight that ``distance`` holds.
        mean: per head, the mean distance of what it reads, in tokens.
        distance: per head, the least distance within which ``share`` of the weight lies.
    """

    share: float
    mean: tuple[float, ...]
    distance: tuple[int, ...]


def attention_reach(bias: ScoreBias, length: int, *, share: float = 0.95) -> AttentionReach:
    """The weights that a bias alone gives the last of ``length`` tokens, as distances: its effective window.

    The thing people get wrong: "any length" is no long reach. A head of ALiBi with slope h has the mean distance
    ``1 / (e^h - 1)`` however long the text is: 1.5 tokens at ½, 255.5 at 1/256. Content can outvote a bias, but has to
    pay ``slope · distance`` for it.

    Args:
        bias: of one axis, as an encoding returns it; its keys are the tokens up to the query.
        length: how many tokens, 1 or more. A window that comes near it is cut off by it.
        share: of the weight, above 0 and below 1.

    Raises:
        TypeError: not a bias, a length that is no integer. ShapeError: a bias of several axes. ValueError: a length below
            1, a share out of range.

    Example:
        >>> reach = attention_reach(ALiBi(8)(), 8192)
        >>> [round(mean, 1) for mean in reach.mean]
        [1.5, 3.5, 7.5, 15.5, 31.5, 63.5, 127.5, 255.5]
        >>> reach.distance
        (5, 11, 23, 47, 95, 191, 383, 766)

    References:
        Press et al. 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        arXiv:2108.12409.
    """
    if not isinstance(bias, ScoreBias):
        raise TypeError(
            f"attention_reach: bias = {bias!r}. Expected a ScoreBias, which calling an encoding returns. Pass ALiBi(8)()."
        )
    if bias.axes > 1:
        raise ShapeError(
            f"attention_reach: a {type(bias).__name__} of {bias.axes} axes. Expected a bias of one: a query in a grid has no "
            "last token. Pass the bias of a sequence."
        )
    check_integers("attention_reach", 1, length=length)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
        raise ValueError(f"attention_reach: share = {share!r}. Expected a number above 0 and below 1. Pass 0.95 for 95 %.")
    scores = materialize(bias, torch.tensor([length - 1]), torch.arange(length), dtype=torch.float64)
    weights = scores.detach().reshape(-1, length).softmax(-1).flip(-1)  # by distance: 0, 1, …
    mean = weights @ torch.arange(length, dtype=torch.float64)
    nearest = (weights.cumsum(-1) < share).sum(-1).clamp(max=length - 1)
    return AttentionReach(float(share), tuple(mean.tolist()), tuple(nearest.tolist()))
