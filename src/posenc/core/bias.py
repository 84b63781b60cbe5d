"""The few values that describe a score bias, and the two forms that backends consume.

Every relative encoding ends in one of these values; every attention backend starts from them: N encodings + M backends,
never N × M. Each value has one private `evaluate`, used with whole grids by `materialize` and with single indices by
`score_mod`, so that the dense and the programmed form cannot disagree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import add
from typing import Any, final

import torch
from torch import Tensor

from posenc.core.place import Entry, Grid, Place
from posenc.core.tokens import check_integer_positions, check_positions
from posenc.errors import ShapeError


class ScoreBias(ABC):
    """A bias on attention scores, added after the softmax scale."""

    axes = 1
    """How many axes of a position it reads; 0 when positions do not matter to it."""
    integers_only = False
    """Whether it looks distances up, so that positions must be integers."""
    reads_distance_only = True
    """Whether positions enter by their distance alone, or not at all: any contiguous ones then give the same bias."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """How many heads it has; 1 is spread over all."""

    @abstractmethod
    def evaluate(self, at: Place) -> Tensor:
        """The bias at a place."""

    @abstractmethod
    def slice_heads(self, index: slice) -> ScoreBias:
        """The bias of some heads."""

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """For how many queries and keys it is made; ``None`` where it fits any number, and 1 is spread."""
        return None, None

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors it holds, for questions such as "does any need a gradient"."""

    @abstractmethod
    def with_tensors(self, tensors: tuple[Tensor, ...]) -> ScoreBias:
        """The same value over other tensors, in the order of `tensors`."""

    def block(self, queries: slice, keys: slice) -> ScoreBias:
        """The bias of some queries and keys, to be evaluated at their positions; its tensors are views of this one's."""
        return self

    def __add__(self, other: ScoreBias) -> ScoreBias:
        return SumBias((self, other))


@final
@dataclass(frozen=True, eq=False)
class SlopeBias(ScoreBias):
    """``-past · distance`` for keys in the past, ``-future · |distance|`` for keys in the future: the ALiBi family.

    Causal ALiBi is signed, ``-past · distance`` for every pair, which a fused kernel can split into a term of the key
    and a term of the query. ``future=None`` says so as a static fact; ``future = -past`` gives the same numbers only.

    Shape:
        past, future: ``[heads]``.
    """

    past: Tensor
    future: Tensor | None = None

    @property
    def heads(self) -> int:
        return self.past.shape[0]

    def evaluate(self, at: Place) -> Tensor:
        distance = at.distance(self.past)
        slope = -at.pick(self.past, "h")
        if self.future is not None:
            slope = torch.where(distance >= 0, slope, at.pick(self.future, "h"))
        return slope * distance

    def slice_heads(self, index: slice) -> ScoreBias:
        return self.with_tensors(tuple(tensor[index] for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.past,) if self.future is None else (self.past, self.future)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> ScoreBias:
        return SlopeBias(*tensors)


@final
@dataclass(frozen=True, eq=False)
class FormulaBias(ScoreBias):
    """``formula(q, k, head, *parameters)``, broadcasting over positions q, k and head indices.

    Args:
        formula: a module-level function of positions ``q``, ``k`` and an index tensor ``head``.
        parameters: tensors that it indexes by ``head``.
        head_index: ``[heads]`` integers, the global index of each head (kept when heads are sliced).
        pointwise: whether each entry depends on its own q and k by elementwise arithmetic alone; a small network is not.
        distance_only: whether the formula reads nothing of q and k but ``q - k``.
    """

    formula: Callable[..., Tensor]
    parameters: tuple[Tensor, ...]
    head_index: Tensor
    pointwise: bool = True
    distance_only: bool = False

    @property
    def reads_distance_only(self) -> bool:  # type: ignore[override]
        return self.distance_only

    @property
    def heads(self) -> int:
        return self.head_index.shape[0]

    def evaluate(self, at: Place) -> Tensor:
        return self.formula(at.q, at.k, at.pick(self.head_index, "h"), *self.parameters)

    def slice_heads(self, index: slice) -> ScoreBias:
        return replace(self, head_index=self.head_index[index])

    def tensors(self) -> tuple[Tensor, ...]:
        return self.parameters

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> ScoreBias:
        return replace(self, parameters=tensors)


@final
@dataclass(frozen=True, eq=False)
class TableBias(ScoreBias):
    """A row per head, looked up by clamped signed distance: ``table[head, clamp(distance + zero, 0, span - 1)]``.

    Shape:
        table: ``[heads, span]``, or ``[heads, *spans]`` with one span per axis of the positions.

    Args:
        zero: the index of distance 0, one per axis.
    """

    table: Tensor
    zero: tuple[int, ...]
    integers_only = True

    @property
    def axes(self) -> int:  # type: ignore[override]
        return len(self.zero)

    @property
    def heads(self) -> int:
        return self.table.shape[0]

    def evaluate(self, at: Place) -> Tensor:
        return at.look_up(self.table.flatten(1), "h", _table_index(at, self.table.shape[1:], self.zero))

    def slice_heads(self, index: slice) -> ScoreBias:
        return replace(self, table=self.table[index])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> ScoreBias:
        return replace(self, table=tensors[0])


@final
@dataclass(frozen=True, eq=False)
class KeyBias(ScoreBias):
    """A term of the key alone, ``values[…, key]``: forgetting gates, after the softmax.

    Shape:
        values: ``[*batch, heads, k]``.
    """

    values: Tensor
    axes = 0

    @property
    def heads(self) -> int:
        return self.values.shape[-2]

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        return None, self.values.shape[-1]

    def evaluate(self, at: Place) -> Tensor:
        return at.pick(self.values, "bhk")

    def slice_heads(self, index: slice) -> ScoreBias:
        return KeyBias(self.values[..., index, :])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> ScoreBias:
        return KeyBias(*tensors)

    def block(self, queries: slice, keys: slice) -> ScoreBias:
        return KeyBias(_cut(self.values, -1, keys))


@final
@dataclass(frozen=True, eq=False)
class QueryTableBias(ScoreBias):
    """A lookup by clamped distance whose rows depend on the query: Shaw, Transformer-XL, DeBERTa.

    Shape:
        logits: ``[*batch, heads, q, span]``.

    Args:
        zero: the index of distance 0.
    """

    logits: Tensor
    zero: int
    integers_only = True

    @property
    def heads(self) -> int:
        return self.logits.shape[-3]

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        return self.logits.shape[-2], None

    def evaluate(self, at: Place) -> Tensor:
        return at.look_up(self.logits, "bhq", _table_index(at, self.logits.shape[-1:], (self.zero,)))

    def slice_heads(self, index: slice) -> ScoreBias:
        return replace(self, logits=self.logits[..., index, :, :])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.logits,)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> ScoreBias:
        return replace(self, logits=tensors[0])

    def block(self, queries: slice, keys: slice) -> ScoreBias:
        return replace(self, logits=_cut(self.logits, -2, queries))


@final
@dataclass(frozen=True, eq=False)
class KeyTableBias(ScoreBias):
    """A lookup by clamped distance whose rows depend on the key: DeBERTa's position-to-content term.

    Shape:
        logits: ``[*batch, heads, k, span]``.

    Args:
        zero: the index of distance 0; distance is query - key, as everywhere.
    """

    logits: Tensor
    zero: int
    integers_only = True

    @property
    def heads(self) -> int:
        return self.logits.shape[-3]

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        return None, self.logits.shape[-2]

    def evaluate(self, at: Place) -> Tensor:
        index = _table_index(at, self.logits.shape[-1:], (self.zero,))
        if isinstance(at, Entry):
            return at.look_up(self.logits, "bhk", index)
        return at.look_up(self.logits, "bhq", index.mT).mT  # the grid on its side, where keys are the rows

    def slice_heads(self, index: slice) -> ScoreBias:
        return replace(self, logits=self.logits[..., index, :, :])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.logits,)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> ScoreBias:
        return replace(self, logits=tensors[0])

    def block(self, queries: slice, keys: slice) -> ScoreBias:
        return replace(self, logits=_cut(self.logits, -2, keys))


@final
@dataclass(frozen=True, eq=False)
class DenseBias(ScoreBias):
    """Every entry written out, ``[*batch, heads, q, k]``: the escape hatch, with its O(q·k) memory in the name."""

    bias: Tensor
    axes = 0

    @property
    def heads(self) -> int:
        return self.bias.shape[-3]

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        return self.bias.shape[-2], self.bias.shape[-1]

    def evaluate(self, at: Place) -> Tensor:
        return at.pick(self.bias, "bhqk")

    def slice_heads(self, index: slice) -> ScoreBias:
        return DenseBias(self.bias[..., index, :, :])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bias,)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> ScoreBias:
        return DenseBias(*tensors)

    def block(self, queries: slice, keys: slice) -> ScoreBias:
        return DenseBias(_cut(_cut(self.bias, -2, queries), -1, keys))


@final
@dataclass(frozen=True, eq=False)
class SumBias(ScoreBias):
    """The sum of several biases, all of one head count (or one head)."""

    terms: tuple[ScoreBias, ...]

    def __post_init__(self) -> None:
        counts = {term.heads for term in self.terms} - {1}
        if not self.terms or len(counts) > 1:
            raise ShapeError(
                f"SumBias: terms of {[term.heads for term in self.terms]} heads. Expected at least one term and one head "
                "count (or 1). Build every bias for the same attention."
            )

    @property
    def heads(self) -> int:
        return max([term.heads for term in self.terms])

    @property
    def axes(self) -> int:  # type: ignore[override]
        return max([term.axes for term in self.terms])

    @property
    def integers_only(self) -> bool:  # type: ignore[override]
        return any(term.integers_only for term in self.terms)

    @property
    def reads_distance_only(self) -> bool:  # type: ignore[override]
        return all(term.reads_distance_only for term in self.terms)

    def evaluate(self, at: Place) -> Tensor:
        return reduce(add, [term.evaluate(at) for term in self.terms])

    def slice_heads(self, index: slice) -> ScoreBias:
        return SumBias(tuple(term if term.heads == 1 else term.slice_heads(index) for term in self.terms))

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for term in self.terms for tensor in term.tensors())

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> ScoreBias:
        rest = iter(tensors)
        return SumBias(tuple(term.with_tensors(tuple(islice(rest, len(term.tensors())))) for term in self.terms))

    def block(self, queries: slice, keys: slice) -> ScoreBias:
        return SumBias(tuple(term.block(queries, keys) for term in self.terms))


def materialize(
    bias: ScoreBias, positions: Tensor, k_positions: Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A bias as numbers: ``[*batch, heads, q, k]`` in ``dtype``, O(q·k) memory.

    Args:
        positions: of the queries, ``[*batch, q]``; k_positions: of the keys, the queries' own when ``None``.

    Example:
        >>> slopes = torch.tensor([0.5])
        >>> materialize(SlopeBias(slopes, -slopes), torch.tensor([5]), torch.tensor([2, 5]))
        tensor([[[-1.5000, -0.0000]]])
    """
    positions, keys = _places(bias, positions, k_positions, "materialize")
    grid = bias.evaluate(Grid(positions, keys))
    axes = bias.axes
    batch = torch.broadcast_shapes(_batch(positions, axes), _batch(keys, axes), grid.shape[:-3])
    shape = bias.heads, *(t.shape[len(_batch(t, axes))] for t in (positions, keys))
    if any(size not in (1, expected) for size, expected in zip(grid.shape[-3:][::-1], shape[::-1], strict=False)):
        raise ShapeError(
            f"materialize: a {type(bias).__name__} of shape {tuple(grid.shape)} for {shape[1]} queries and {shape[2]} keys. "
            f"Expected [*batch, {', '.join(map(str, shape))}]. Make the bias for exactly these tokens."
        )
    return grid.to(dtype).expand(*batch, *shape)


def score_mod(bias: ScoreBias, positions: Tensor, k_positions: Tensor | None = None) -> Callable[..., Tensor]:
    """A bias as flex_attention's ``score_mod(score, batch, head, q_index, k_index)``.

    Args:
        positions: of the queries, ``[q]`` or ``[batch, q]``; k_positions: of the keys, the queries' own when ``None``.
    """
    positions, keys = _places(bias, positions, k_positions, "score_mod")

    def modified(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score.to(torch.promote_types(score.dtype, torch.float32))  # half a bias would be rounded
        return score + bias.evaluate(Entry(positions, keys, b=b, h=h, q=q, k=k)).to(score.dtype)

    return modified


def slice_heads(bias: ScoreBias, index: slice) -> ScoreBias:
    """The bias of some heads, for tensor parallelism: ``slice_heads(bias, slice(first, last))`` by *global* head index.

    Example:
        >>> slopes = torch.tensor([0.5, 0.25])
        >>> slice_heads(SlopeBias(slopes, -slopes), slice(1, 2)).past
        tensor([0.2500])
    """
    return bias.slice_heads(index)


def _places(bias: ScoreBias, positions: Tensor, k_positions: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """The positions of queries and keys, checked; integers as int64, so that no difference wraps around."""
    keys = positions if k_positions is None else k_positions
    for at in (positions, keys):
        check_positions(at, name=name)
        if bias.integers_only:
            check_integer_positions(at, name=type(bias).__name__, why="it looks distances up in a table")
    q, k = (at if at.is_floating_point() else at.to(torch.int64) for at in (positions, keys))
    return q, k


def _table_index(at: Place, spans: Any, zero: tuple[int, ...]) -> Tensor:
    if len(zero) != len(spans):
        raise ShapeError(
            f"TableBias: {len(zero)} zeros for a table of {len(spans)} spans. Expected one per axis. Give zero as a tuple."
        )
    distances = at.axis_distances(len(spans))
    index = torch.zeros_like(distances[0])
    for distance, span, origin in zip(distances, spans, zero, strict=True):
        index = index * span + (distance + origin).clamp(0, span - 1)
    return index


def _cut(tensor: Tensor, axis: int, index: slice) -> Tensor:
    """Part of an axis; one of size 1 is spread, and stays."""
    size = tensor.shape[axis]
    start, stop, _ = index.indices(size)
    return tensor if size == 1 else tensor.narrow(axis, start, stop - start)


def _batch(positions: Tensor, axes: int) -> torch.Size:
    return positions.shape[: positions.ndim - (1 if axes <= 1 else 2)]
