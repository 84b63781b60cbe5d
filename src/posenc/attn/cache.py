"""Key-value caches of one layer: keys, values, where and when their tokens are, and encodings' own state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor

from posenc.core.checks import check_values
from posenc.core.mask import UNFILLED, All, Mask, Visible
from posenc.core.tokens import PADDING, Tokens, follow, segments_of
from posenc.errors import ShapeError


class Cache(ABC):
    """What attention appends to and reads back, one per layer."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}
        """State of encodings that keep one, by their index in the layer's list."""

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Whether nothing has been appended yet."""

    @abstractmethod
    def place(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        """The new tokens as they will stand in the cache, and all tokens once they are appended. Changes nothing."""

    @abstractmethod
    def append(self, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tokens]:
        """Append; return all keys, values and tokens."""

    @abstractmethod
    def check_mask(self, mask: Mask) -> None:
        """Refuse a mask that would show what the cache must hide."""


@final
class GrowingCache(Cache):
    """Grows by concatenation. Static facts stay static: `CAUSAL` is right with it.

    Example:
        >>> cache = GrowingCache()
        >>> k = torch.ones(1, 2, 3, 4)
        >>> keys, values, tokens = cache.append(k, k, contiguous(3))
        >>> cache.length
        3
    """

    def __init__(self) -> None:
        super().__init__()
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.tokens: Tokens | None = None

    @property
    def length(self) -> int:
        """How many tokens are cached; the next one's position in an unpadded sequence."""
        return 0 if self.k is None else self.k.shape[-2]

    @property
    def empty(self) -> bool:
        return self.k is None

    def place(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        return tokens, tokens if self.tokens is None else follow(self.tokens, tokens)

    def append(self, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tokens]:
        _, self.tokens = self.place(tokens)
        self.k = k if self.k is None else torch.cat([self.k, k], dim=-2)
        self.v = v if self.v is None else torch.cat([self.v, v], dim=-2)
        return self.k, self.v, self.tokens

    def check_mask(self, mask: Mask) -> None:
        return None


@final
class StaticCache(Cache):
    """A fixed number of slots, filled from the front: shapes never change, so compiled decoding never recompiles.

    Unfilled slots hold zeros and come last in order; masks on it are by order (`visible`, or ``causal(*cache.place(tokens))``), never
    `CAUSAL`, which would align the queries with the unfilled end.

    Args:
        batch, kv_heads, length, head_dim: of the keys; v_dim of the values, head_dim when ``None``.
        axes: of the positions, ``None`` for plain numbers.
        position_dtype: int64, or float64 for real positions.

    Raises:
        ValueError: on appending more tokens than there are slots.

    Example:
        >>> cache = StaticCache(1, 2, 8, 4)
        >>> query, keys = cache.place(contiguous(3))
        >>> causal(query, keys).allowed(3, 8, device="cpu").sum(-1)
        tensor([[1, 2, 3]])
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        *,
        v_dim: int | None = None,
        axes: int | None = None,
        dtype: torch.dtype = torch.float32,
        position_dtype: torch.dtype = torch.int64,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if min(batch, kv_heads, length, head_dim) < 1:
            raise ValueError(
                f"StaticCache: batch = {batch}, kv_heads = {kv_heads}, length = {length}, head_dim = {head_dim}. Expected 1 or "
                "more each. Pass the longest sequence, prompt included, as length."
            )
        self.length, self.axes = length, axes
        self.k = torch.zeros(batch, kv_heads, length, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros(batch, kv_heads, length, v_dim or head_dim, dtype=dtype, device=device)
        trailing = () if axes is None else (axes,)
        self.positions = torch.zeros(batch, length, *trailing, dtype=position_dtype, device=device)
        self.order = torch.full((length,), UNFILLED, dtype=torch.int64, device=device)
        self.segments = torch.full((batch, length), PADDING, dtype=torch.int64, device=device)
        self.filled = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def empty(self) -> bool:
        return int(self.filled) == 0

    def place(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        if tokens.order is not None or tokens.axes != self.axes:
            raise ShapeError(
                f"StaticCache: tokens with {'an explicit order' if tokens.order is not None else f'{tokens.axes} axes'}. "
                f"Expected tokens as they stand, with axes = {self.axes}. Use GrowingCache for reordered tokens."
            )
        if tokens.positions.is_floating_point() and not self.positions.is_floating_point():
            raise TypeError(
                f"StaticCache: positions are {tokens.positions.dtype}. Expected integers, since the cache holds "
                f"{self.positions.dtype} and would round them. Build it with position_dtype=torch.float64."
            )
        slots = self._slots(tokens.length)
        segments = self.segments.index_copy(1, slots, self._per_row(segments_of(tokens), 1))
        where = self._per_row(tokens.positions, 1 if self.axes is None else 2)
        positions = self.positions.index_copy(1, slots, where.to(self.positions.dtype))
        order = self.order.index_copy(0, slots, slots)
        new = Tokens(tokens.positions, slots, segments.index_select(1, slots), self.axes)
        return new, Tokens(positions, order, segments, self.axes)

    def append(self, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tokens]:
        _, kept = self.place(tokens._replace(order=None))
        slots = self._slots(tokens.length)
        self.k.index_copy_(2, slots, k.to(self.k.dtype))
        self.v.index_copy_(2, slots, v.to(self.v.dtype))
        assert kept.order is not None
        assert kept.segments is not None
        self.positions.copy_(kept.positions)
        self.order.copy_(kept.order)
        self.segments.copy_(kept.segments)
        self.filled += tokens.length
        return self.k, self.v, Tokens(self.positions, self.order, self.segments, self.axes)

    def check_mask(self, mask: Mask) -> None:
        parts = mask.masks if isinstance(mask, All) else (mask,)
        if not any(isinstance(part, Visible) for part in parts):
            raise ValueError(
                f"StaticCache: mask = {mask}. Expected a mask by order, since unfilled slots must stay hidden. "
                "Use causal(*cache.place(tokens))."
            )

    def _slots(self, n: int) -> Tensor:
        slots = self.filled + torch.arange(n, dtype=torch.int64, device=self.filled.device)
        check_values(
            slots < self.length,
            lambda: (
                f"StaticCache: {int(self.filled)} of {self.length} slots are filled and {n} tokens come. Expected room for "
                "them. Make the cache as long as the longest sequence, prompt included."
            ),
        )
        return slots

    def _per_row(self, values: Tensor, trailing: int) -> Tensor:
        return values.expand(self.k.shape[0], *values.shape[values.ndim - trailing :])
