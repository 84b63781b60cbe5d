"""`ValueTable`: learned vectors that attention adds to the values, one per clamped distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from posenc.core.distance import pairwise_distance


@final
@dataclass(frozen=True, eq=False)
class ValueTable:
    """``Σⱼ weightᵢⱼ · rows[distanceᵢⱼ]``, added to what attention returns.

    Every key adds the vector of its distance to its value. The vectors do not depend on the key itself, so the weights of
    keys with equal distances are summed first: one number per query and distance, never a vector per query and key.

    Args:
        zero: the row of distance 0; distance is query - key, as everywhere. Farther distances read the first and last.

    Shape:
        rows: ``[span, v_dim]``, shared by all heads.
    """

    rows: Tensor
    zero: int

    def weighted(self, weights: Tensor, positions: Tensor, k_positions: Tensor) -> Tensor:
        """What is added, ``[batch, heads, q, v_dim]`` in the weights' dtype, from weights ``[batch, heads, q, k]``."""
        span = self.rows.shape[0]
        index = pairwise_distance(positions, k_positions).add(self.zero).clamp(0, span - 1)
        index = index.unsqueeze(-3) if index.ndim > 2 else index
        by_distance = weights.new_zeros(*weights.shape[:-1], span)
        by_distance = by_distance.scatter_add(-1, index.expand(weights.shape), weights)
        return by_distance @ self.rows.to(weights.dtype)
