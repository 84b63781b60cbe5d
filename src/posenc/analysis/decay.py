"""What distance alone does to rotary scores."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from posenc.core.checks import check_integers
from posenc.core.sinusoid import sinusoid
from posenc.schedules.base import Schedule, check_schedule

Content = Literal["independent", "equal"]


class ScoreSpread(NamedTuple):
    """Mean and standard deviation of scores at each distance: float64 ``[*batch, n]``, the shape of the distances."""

    mean: Tensor
    spread: Tensor


def rotary_kernel(schedule: Schedule, rotary_dim: int, distances: Tensor) -> Tensor:
    """The rotary score of a query and a key of ones, as a share of their score without rotation.

    The thing people get wrong: "scores decay with distance". This is ``amplitude² · mean over pairs of cos(distance ·
    inv_freq)``: it falls, then wanders, and a key can be built that peaks at any distance. `random_scores` says what
    becomes of content that knows nothing of it.

    Args:
        schedule: the frequencies.
        rotary_dim: how many channels turn, even.
        distances: query minus key, any real numbers.

    Shape:
        distances and the result: ``[*batch, n]``.

    Returns:
        float64.

    Raises:
        TypeError: not a schedule, distances in half precision.

    Example:
        >>> rotary_kernel(Geometric(1e4), 128, torch.tensor([1, 10, 100, 1000, 10000]))
        tensor([ 0.9702,  0.6691,  0.4772,  0.1590, -0.0279], dtype=torch.float64)

    References:
        Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
    """
    check_schedule("rotary_kernel", schedule)
    inv_freq, amplitude = schedule.frequencies(rotary_dim)
    _, cos = sinusoid(distances, inv_freq, dtype=torch.float64)
    return cos.mean(-1) * amplitude**2


def random_scores(
    schedule: Schedule,
    rotary_dim: int,
    distances: Tensor,
    *,
    content: Content = "independent",
    samples: int = 1024,
    generator: torch.Generator | None = None,
) -> ScoreSpread:
    """Rotary scores of random queries and keys at each distance, sampled: ``q · R k / √rotary_dim``.

    For independent q and k the mean is 0 and the deviation 1 at *every* distance: rotation makes nothing smaller. Where q
    is k the mean follows `rotary_kernel` times √rotary_dim.

    Args:
        schedule: the frequencies; rotary_dim: how many channels turn, even.
        distances: query minus key, any real numbers.
        content: ``"independent"`` draws q and k from N(0, 1); ``"equal"`` draws q and takes it as k.
        samples: how many, 2 or more; the error of the mean is about ``spread / √samples``.
        generator: on the CPU; one with seed 0 when ``None``, so that the same call gives the same numbers.

    Shape:
        distances: ``[*batch, n]``.

    Raises:
        TypeError: not a schedule, samples that are no integer. ValueError: unknown content, fewer than 2 samples.

    Example:
        >>> scores = random_scores(Geometric(1e4), 64, torch.tensor([1, 1000]))
        >>> bool((scores.mean.abs() < 0.15).all()), bool(((scores.spread - 1).abs() < 0.15).all())
        (True, True)
    """
    check_schedule("random_scores", schedule)
    check_integers("random_scores", 2, samples=samples)
    if content not in ("independent", "equal"):
        raise ValueError(f"random_scores: content = {content!r}. Expected 'independent' or 'equal'. Name one.")
    inv_freq, amplitude = schedule.frequencies(rotary_dim)
    sin, cos = sinusoid(distances, inv_freq, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    q = torch.randn(samples, 2, rotary_dim // 2, generator=generator, dtype=torch.float64)
    k = q if content == "equal" else torch.randn(q.shape, generator=generator, dtype=torch.float64)
    along, across = (q * k).sum(1), q[:, 0] * k[:, 1] - q[:, 1] * k[:, 0]
    scores = (cos @ along.T + sin @ across.T) * (amplitude**2 / rotary_dim**0.5)
    return ScoreSpread(scores.mean(-1), scores.std(-1))
