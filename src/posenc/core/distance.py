"""Signed distance between tokens, and buckets of it.

One convention everywhere: ``distance = query position - key position``; positive looks back.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

import torch
from torch import Tensor

Direction = Literal["causal", "bidirectional"]


def pairwise_distance(positions: Tensor, k_positions: Tensor) -> Tensor:
    """``positions - k_positions`` for every pair: ``[*batch, q, k]``; integers become int64.

    Example:
        >>> pairwise_distance(torch.tensor([5]), torch.tensor([2, 5, 6]))
        tensor([[ 3,  0, -1]])
    """
    q, k = (p if p.is_floating_point() else p.to(torch.int64) for p in (positions, k_positions))
    return q[..., :, None] - k[..., None, :]


def check_buckets(buckets: int, max_distance: int, direction: str, *, name: str) -> None:
    """Refuse a bucket rule that leaves a direction without buckets, or the logarithmic part without distances."""
    if direction not in ("causal", "bidirectional"):
        raise ValueError(f"{name}: direction = {direction!r}. Expected 'causal' or 'bidirectional'. Name one.")
    sides = 1 if direction == "causal" else 2
    exact = buckets // sides // 2
    if buckets < 2 * sides or buckets % sides or max_distance <= exact:
        raise ValueError(
            f"{name}: buckets = {buckets}, max_distance = {max_distance}. Expected at least {2 * sides} buckets "
            f"({'even, ' if sides == 2 else ''}{direction}), and max_distance above the {exact} exactly held distances. "
            "T5 has 32 and 128."
        )


def bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The first distance of each one-sided T5 bucket, in exact integer arithmetic.

    The first half of the buckets hold one distance each; bucket ``E + j`` of the rest starts at the least x with
    ``E + ⌊log(x/E) / log(max_distance/E) · (buckets - E)⌋ ≥ E + j``, that is ``x^n · E^j ≥ max_distance^j · E^n`` with
    ``n = buckets - E``: no logarithm, so no rounding at the edges.

    Example:
        >>> bucket_starts(16, 128)[8:]
        (8, 12, 16, 23, 32, 46, 64, 91)
    """
    exact = buckets // 2
    n = buckets - exact
    candidates = range(exact, max_distance + 1)

    def reached(j: int) -> int:
        return candidates[bisect_left(candidates, True, key=lambda x: x**n * exact**j >= max_distance**j * exact**n)]

    return (*range(exact), *(reached(j) for j in range(n)))


def t5_bucket(distance: Tensor, *, buckets: int = 32, max_distance: int = 128, direction: Direction) -> Tensor:
    """The T5 bucket of each signed distance (query - key).

    T5's own code is written in ``key - query``; the sign is turned here, once. In the causal direction a future key
    falls into bucket 0; in the bidirectional one future keys use the upper half of the buckets.

    Args:
        distance: integers of any shape.

    Returns:
        int64 of the same shape and device.

    Raises:
        TypeError: distances that are not integers.
        ValueError: an unknown direction, too few buckets or too small a max_distance.

    References:
        Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
        arXiv:1910.10683.

    Example:
        >>> t5_bucket(torch.tensor([0, 1, 8, 128, -1, -8]), direction="bidirectional")
        tensor([ 0,  1,  8, 15, 17, 24])
    """
    check_buckets(buckets, max_distance, direction, name="t5_bucket")
    if distance.is_floating_point():
        raise TypeError(
            f"t5_bucket: distances are {distance.dtype}. Expected integers: buckets hold whole distances. "
            "Make them from integer positions."
        )
    distance = distance.to(torch.int64).clamp(-max_distance, max_distance)  # widened first: |-128| is no int8
    if direction == "bidirectional":
        one_sided = buckets // 2
        future = (distance < 0).to(torch.int64) * one_sided
        magnitude = distance.abs()
    else:
        one_sided = buckets
        future, magnitude = torch.zeros_like(distance), distance.clamp(min=0)
    starts = torch.tensor(bucket_starts(one_sided, max_distance), dtype=torch.int64, device=distance.device)
    return torch.searchsorted(starts, magnitude.to(torch.int64).contiguous(), right=True) - 1 + future
