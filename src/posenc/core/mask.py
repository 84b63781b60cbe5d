"""Which keys a query may see, as values on token order and segments.

No mask reads positions: they repeat and run backwards (images in multimodal models, equal time stamps, packing), and a
causal rule on them lets later tokens through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import reduce
from types import EllipsisType
from typing import final

import torch
from torch import Tensor

from posenc.core.checks import check_integers
from posenc.core.tokens import PADDING, Tokens, check_whole, segments_of, standing_order
from posenc.errors import ShapeError


class Mask(ABC):
    """A rule for which keys each query sees. Combine with ``&`` and ``|``. A row that sees nothing attends to zeros."""

    @abstractmethod
    def sees(self, b: Tensor | EllipsisType, q: Tensor, k: Tensor, q_length: int, k_length: int) -> Tensor:
        """Whether query ``q`` of row ``b`` sees key ``k``: index tensors that broadcast, scalars in flex_attention.

        ``b = ...`` asks for all rows; they stand first in the result.
        """

    def allowed(self, q_length: int, k_length: int, *, device: torch.device | str) -> Tensor:
        """The rule as booleans, true where the query sees the key: ``[q, k]`` or ``[*batch, q, k]``."""
        q, k = torch.arange(q_length, device=device)[:, None], torch.arange(k_length, device=device)[None, :]
        return self.sees(..., q, k, q_length, k_length)

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors it holds, for questions such as "does it differ from row to row"."""
        return ()

    def sees_all(self, q_length: int, k_length: int) -> bool:
        """Whether, as a static fact, every query sees every key."""
        return False

    def sees_itself(self, q_length: int, k_length: int) -> bool:
        """Whether, as a static fact, every query sees the key at its own place, so that no row is empty."""
        return False

    def __and__(self, other: Mask) -> Mask:
        parts = [*_members(self, All), *_members(other, All)]
        kept = [part for part in dict.fromkeys(parts) if part != FULL]
        return kept[0] if len(kept) == 1 else All(tuple(kept)) if kept else FULL

    def __or__(self, other: Mask) -> Mask:
        parts = list(dict.fromkeys([*_members(self, Either), *_members(other, Either)]))
        return FULL if FULL in parts else parts[0] if len(parts) == 1 else Either(tuple(parts))


def _members(mask: Mask, kind: type[All] | type[Either]) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, kind) else (mask,)


@final
@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def sees(self, b: Tensor | EllipsisType, q: Tensor, k: Tensor, q_length: int, k_length: int) -> Tensor:
        return (q >= 0) & (k >= 0)

    def sees_all(self, q_length: int, k_length: int) -> bool:
        return True

    def sees_itself(self, q_length: int, k_length: int) -> bool:
        return k_length > 0


@final
@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and what came before, the queries aligned with the end of the keys."""

    def sees(self, b: Tensor | EllipsisType, q: Tensor, k: Tensor, q_length: int, k_length: int) -> Tensor:
        return q + (k_length - q_length) >= k

    def sees_all(self, q_length: int, k_length: int) -> bool:
        return q_length == 1 <= k_length

    def sees_itself(self, q_length: int, k_length: int) -> bool:
        return q_length <= k_length


@final
@dataclass(frozen=True)
class Window(Mask):
    """A query sees itself, ``before - 1`` earlier and ``after`` later tokens, aligned with the end of the keys."""

    before: int
    after: int = 0

    def __post_init__(self) -> None:
        check_integers("window", before=self.before, after=self.after)
        if self.before < 1 or self.after < 0:
            raise ValueError(
                f"window: before = {self.before}, after = {self.after}. Expected before ≥ 1 (the token itself counts) and "
                "after ≥ 0. window(4) sees itself and three earlier tokens."
            )

    def sees(self, b: Tensor | EllipsisType, q: Tensor, k: Tensor, q_length: int, k_length: int) -> Tensor:
        lag = q + (k_length - q_length) - k
        return (lag < self.before) & (lag >= -self.after)

    def sees_itself(self, q_length: int, k_length: int) -> bool:
        return q_length <= k_length


@final
@dataclass(frozen=True, eq=False)
class SameSegment(Mask):
    """A query sees the keys of its own document; padding (-1) sees nothing and is not seen."""

    q_segments: Tensor = field(repr=False)
    k_segments: Tensor = field(repr=False)

    def sees(self, b: Tensor | EllipsisType, q: Tensor, k: Tensor, q_length: int, k_length: int) -> Tensor:
        own = _of_tokens(self.q_segments, b, q, q_length, "same_segment: q_segments")
        theirs = _of_tokens(self.k_segments, b, k, k_length, "same_segment: k_segments")
        return (own == theirs) & (own != PADDING)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.q_segments, self.k_segments


@final
@dataclass(frozen=True, eq=False)
class Visible(Mask):
    """A query sees keys whose order is not later than its own and, with a window, less than ``window`` earlier."""

    q_order: Tensor = field(repr=False)
    k_order: Tensor = field(repr=False)
    window: int | None = None

    def sees(self, b: Tensor | EllipsisType, q: Tensor, k: Tensor, q_length: int, k_length: int) -> Tensor:
        own = _of_tokens(self.q_order, b, q, q_length, "visible: q_order")
        theirs = _of_tokens(self.k_order, b, k, k_length, "visible: k_order")
        seen = theirs <= own
        return seen if self.window is None else seen & (theirs > own - self.window)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.q_order, self.k_order


@final
@dataclass(frozen=True)
class All(Mask):
    """Seen by every one of ``masks``."""

    masks: tuple[Mask, ...]

    def sees(self, b: Tensor | EllipsisType, q: Tensor, k: Tensor, q_length: int, k_length: int) -> Tensor:
        return reduce(torch.logical_and, [m.sees(b, q, k, q_length, k_length) for m in self.masks])

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for mask in self.masks for tensor in mask.tensors())

    def sees_itself(self, q_length: int, k_length: int) -> bool:
        return all(m.sees_itself(q_length, k_length) for m in self.masks)


@final
@dataclass(frozen=True)
class Either(Mask):
    """Seen by at least one of ``masks``."""

    masks: tuple[Mask, ...]

    def sees(self, b: Tensor | EllipsisType, q: Tensor, k: Tensor, q_length: int, k_length: int) -> Tensor:
        return reduce(torch.logical_or, [m.sees(b, q, k, q_length, k_length) for m in self.masks])

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for mask in self.masks for tensor in mask.tensors())

    def sees_itself(self, q_length: int, k_length: int) -> bool:
        return any(m.sees_itself(q_length, k_length) for m in self.masks)


FULL = Full()
"""Every query sees every key."""

CAUSAL = Causal()
"""Token order as it stands, queries aligned with the end of the keys. A static fact, so fused kernels apply."""

UNFILLED = torch.iinfo(torch.int64).max
"""The order of a cache slot that holds no token yet: later than every token, so nothing sees it."""


def window(before: int, after: int = 0) -> Mask:
    """Itself, ``before - 1`` earlier and ``after`` later tokens. ``CAUSAL & window(w)`` is a sliding window.

    Example:
        >>> window(2).allowed(3, 3, device="cpu").int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    return Window(before, after)


def same_segment(q_segments: Tensor, k_segments: Tensor | None = None) -> Mask:
    """Tokens of one document see each other; segment -1 is padding.

    Shape:
        q_segments: ``[*batch, q]`` integers; k_segments: ``[*batch, k]``, the queries' own when ``None``.
    """
    k_segments = q_segments if k_segments is None else k_segments
    check_whole(q_segments, name="same_segment: q_segments")
    check_whole(k_segments, name="same_segment: k_segments")
    return SameSegment(q_segments, k_segments)


def visible(q_order: Tensor, k_order: Tensor, window: int | None = None) -> Mask:
    """Causality by explicit order: for shards, static caches (unfilled slots come last) and reordered tokens.

    Shape:
        q_order: ``[*batch, q]`` integers; k_order: ``[*batch, k]``.

    Args:
        window: a query sees itself and at most ``window - 1`` orders back.
    """
    if window is not None:
        check_integers("visible", window=window)
        if window < 1:
            raise ValueError(f"visible: window = {window}. Expected 1 or more, or None. window=1 sees only the token itself.")
    check_whole(q_order, name="visible: q_order")
    check_whole(k_order, name="visible: k_order")
    return Visible(q_order, k_order, window)


def causal(tokens: Tokens, k_tokens: Tokens | None = None, window: int | None = None) -> Mask:
    """The causal mask of some tokens, in the barest form that their facts allow.

    Tokens that stand as they come give the static `CAUSAL` (fused attention kernels apply); an explicit order gives
    `visible`; segments add `same_segment`.

    Args:
        k_tokens: the keys' tokens, ending with the queries'; the queries' own when ``None``.
        window: a sliding window of this many tokens, itself included.

    Example:
        >>> causal(contiguous(4))
        Causal()
    """
    keys = tokens if k_tokens is None else k_tokens
    if tokens.order is None and keys.order is None:
        mask: Mask = CAUSAL if window is None else CAUSAL & Window(window)
    else:
        k_order = standing_order(keys) if keys.order is None else keys.order
        q_order = k_order[..., k_order.shape[-1] - tokens.length :] if tokens.order is None else tokens.order
        mask = visible(q_order, k_order, window)
    if tokens.segments is None and keys.segments is None:
        return mask
    return mask & same_segment(segments_of(tokens), segments_of(keys))


def _of_tokens(tensor: Tensor, b: Tensor | EllipsisType, index: Tensor, length: int, name: str) -> Tensor:
    if tensor.shape[-1] != length:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}. Expected [*batch, {length}]. Pass one integer per token.")
    tensor = tensor.to(index.device)
    if tensor.ndim == 1:
        return tensor[index]
    return tensor[torch.zeros_like(b) if isinstance(b, Tensor) and tensor.shape[0] == 1 else b, index]
