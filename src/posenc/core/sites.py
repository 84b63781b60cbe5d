"""Where an encoding acts is its type: on the positions, the input, queries and keys, the score, the score with content.

Every class here is abstract; every encoding is final. To vary an encoding, wrap it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor, nn

from posenc.core.apply import apply_rotary_pair
from posenc.core.bias import ScoreBias
from posenc.core.mask import FULL, Mask
from posenc.core.rotary import Frequencies, Pairing, RotaryTable
from posenc.core.spec import EncodingSpec
from posenc.core.tokens import Positions, resolve_positions
from posenc.core.value_table import ValueTable
from posenc.errors import ShapeError


class Encoding(nn.Module, ABC):
    """What all encodings share: a description, and the place where they act."""

    spec: ClassVar[EncodingSpec]
    acts_on: ClassVar[str]
    axes: int | None = None
    """How many axes a position has; ``None`` for plain numbers."""
    reads_positions: bool = True
    """Whether positions matter to it; if not, they may have any number of axes."""


class PositionTransform(Encoding):
    """Changes the positions that the other encodings see, in training; the identity in evaluation."""

    acts_on = "the positions"

    @abstractmethod
    def forward(self, positions: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """``[*batch, seq]`` positions to positions."""

    if TYPE_CHECKING:
        __call__ = forward


class InputEncoding(Encoding):
    """Acts on the token embeddings, once, before the first layer."""

    acts_on = "the input"

    @abstractmethod
    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """``x`` of ``[*batch, seq, dim]`` with the positions' code; same shape and dtype."""

    if TYPE_CHECKING:
        __call__ = forward


class QKEncoding(Encoding):
    """Acts on queries and keys, in every layer.

    `prepare` makes all that does not depend on content, once per model forward; `transform` uses it in each layer;
    calling the module does both.
    """

    acts_on = "queries and keys"
    sequence_axis: int = -2
    head_axis: int | None = -3

    def width(self, head_dim: int) -> int:
        """How wide queries and keys of this width come out; a cache with fixed slots needs to know."""
        return head_dim

    @abstractmethod
    def prepare(self, positions: Tensor, k_positions: Tensor | None = None, *, dtype: torch.dtype = torch.float32) -> Any:
        """What `transform` needs for tokens at these positions. ``k_positions=None``: the keys are the same tokens."""

    @abstractmethod
    def transform(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, Tensor]:
        """Queries and keys with their positions, from what `prepare` made."""

    @final  # type: ignore[misc]  # nn.Module declares forward as an attribute
    def forward(
        self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys with their positions.

        Args:
            positions: a tensor, or an ``int``: contiguous from this start (0 for a whole sequence, the cached length
                for a decode step).
            k_positions: ``None`` means "the same tokens as q" and is an error when the lengths differ.
        """
        name = type(self).__name__
        q_length, k_length = q.shape[self.sequence_axis], k.shape[self.sequence_axis]
        if k_positions is None and q_length != k_length:
            raise ShapeError(
                f"{name}: {q_length} queries and {k_length} keys without k_positions. Expected equal lengths, since "
                "k_positions=None says that q and k are the same tokens. Pass k_positions."
            )
        q_at = resolve_positions(positions, q_length, name=name, device=q.device, axes=self.axes)
        k_at = None
        if k_positions is not None:
            k_at = resolve_positions(k_positions, k_length, name=f"{name} (keys)", device=k.device, axes=self.axes)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return self.transform(q, k, self.prepare(q_at, k_at, dtype=dtype))

    if TYPE_CHECKING:
        __call__ = forward


class RotaryEncoding(QKEncoding):
    """A `QKEncoding` whose preparation is a pair of rotary tables; one object twice when q and k are the same tokens."""

    head_dim: int
    pairing: Pairing
    start: int

    @abstractmethod
    def prepare(
        self,
        positions: Tensor,
        k_positions: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        frequencies: Frequencies | None = None,
    ) -> tuple[RotaryTable, RotaryTable]:
        """The tables of queries and keys.

        Args:
            frequencies: instead of the schedule's own; per sequence with a batch axis.
            dtype: of the tables, float32 or float64.
        """

    @final
    def transform(self, q: Tensor, k: Tensor, prepared: tuple[RotaryTable, RotaryTable]) -> tuple[Tensor, Tensor]:
        """Queries and keys turned by the tables."""
        if not q.shape[-1] == k.shape[-1] == self.head_dim:
            raise ShapeError(
                f"{type(self).__name__}: q of width {q.shape[-1]} and k of width {k.shape[-1]}. Expected {self.head_dim}, the head width "
                "it was built for. To turn a part of wider heads, build it with that head_dim and rotary_dim."
            )
        return apply_rotary_pair(q, k, *prepared, pairing=self.pairing, head_axis=self.head_axis, start=self.start)


class ScoreEncoding(Encoding):
    """Adds a bias to the attention scores that content does not change.

    Calling it returns a bias *value*, made without positions; attention gives those to it.
    """

    acts_on = "the score"

    @abstractmethod
    def forward(self) -> ScoreBias:
        """The bias value."""

    if TYPE_CHECKING:
        __call__ = forward


class ContentScoreEncoding(Encoding):
    """Adds a bias to the attention scores that depends on queries, keys or hidden states."""

    acts_on = "the score, with content"

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        k_positions: Tensor | None = None,
        *,
        x: Tensor | None = None,
        state: Any = None,
        mask: Mask = FULL,
    ) -> tuple[ScoreBias, Any]:
        """The bias value, and the state that a cache keeps for the next call.

        Args:
            k: all keys, the cached ones first; with fixed slots the unfilled ones follow, as zeros.
            x: the hidden states of the new tokens, ``[*batch, seq, dim]``.
            state: what the last call returned, ``None`` at first.
            mask: what attention will hide, for encodings that count or sum over the keys that a query sees.
        """

    def value_table(self) -> ValueTable | None:
        """Vectors that attention adds to the values by distance, for encodings that have some."""
        return None

    if TYPE_CHECKING:
        __call__ = forward
