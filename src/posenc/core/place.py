"""Where a bias is evaluated: over a whole grid of queries and keys, or at one entry of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from posenc.errors import ShapeError


class Place(ABC):
    """The (batch, head, query, key) at which a bias is evaluated: a whole grid, or one entry of it."""

    def __init__(self, q_positions: Tensor, k_positions: Tensor) -> None:
        self._positions = q_positions, k_positions

    @abstractmethod
    def pick(self, tensor: Tensor, letters: str) -> Tensor:
        """The entries of a tensor whose axes are named by letters of ``bhqk``; a missing batch is spread."""

    @abstractmethod
    def look_up(self, rows: Tensor, letters: str, index: Tensor) -> Tensor:
        """The entry ``index`` of each of the rows (last axis) of a tensor with the axes ``letters`` before it."""

    @property
    def q(self) -> Tensor:
        return self.pick(self._positions[0], "bq")

    @property
    def k(self) -> Tensor:
        return self.pick(self._positions[1], "bk")

    def axis_distances(self, axes: int) -> list[Tensor]:
        """The signed integer distance along each axis."""
        if axes == 1:
            return [self.q - self.k]
        q, k = self._positions
        return [self.pick(q[..., a], "bq") - self.pick(k[..., a], "bk") for a in range(axes)]

    def distance(self, like: Tensor) -> Tensor:
        """The signed distance in ``like``'s dtype; integers are subtracted as integers."""
        q, k = self.q, self.k
        if q.is_floating_point() or k.is_floating_point():
            q, k = q.to(like.dtype), k.to(like.dtype)
        return (q - k).to(like.dtype)


@final
class Grid(Place):
    """All entries: results broadcast to ``[*batch, heads, q, k]``."""

    def pick(self, tensor: Tensor, letters: str) -> Tensor:
        tensor = tensor.to(self._positions[0].device)
        for axis, letter in ((-1, "k"), (-2, "q"), (-3, "h")):
            if letter not in letters:
                tensor = tensor.unsqueeze(axis)
        return tensor

    def look_up(self, rows: Tensor, letters: str, index: Tensor) -> Tensor:
        rows = rows.to(index.device)
        if letters == "h":
            rows = rows.unsqueeze(-2)  # [heads, 1, span]
        batch = torch.broadcast_shapes(rows.shape[:-3], index.shape[:-3])
        heads, queries = max(rows.shape[-3], index.shape[-3]), index.shape[-2]
        if rows.shape[-2] not in (1, queries):
            raise ShapeError(
                f"materialize: a table of {rows.shape[-2]} rows for {queries} tokens. Expected a row per token. Make the bias for "
                "exactly these queries and keys."
            )
        rows = rows.expand(*batch, heads, queries, rows.shape[-1])
        return rows.gather(-1, index.expand(*batch, heads, queries, index.shape[-1]))


@final
class Entry(Place):
    """One entry, with scalar index tensors, as flex_attention's score_mod sees it."""

    def __init__(self, q_positions: Tensor, k_positions: Tensor, **index: Tensor) -> None:
        super().__init__(q_positions, k_positions)
        self._index = index

    def pick(self, tensor: Tensor, letters: str) -> Tensor:
        return tensor[self._where(tensor, letters)]

    def look_up(self, rows: Tensor, letters: str, index: Tensor) -> Tensor:
        return rows[(*self._where(rows, letters, 1), index)]

    def _where(self, tensor: Tensor, letters: str, more: int = 0) -> tuple[Tensor, ...]:
        """The index along all axes, to be used at once: flex_attention's backward scatters scalars, not rows."""
        letters = letters[max(0, len(letters) + more - tensor.ndim) :]
        every = [self._index[letter] for letter in letters]
        return tuple(torch.zeros_like(i) if size == 1 else i for size, i in zip(tensor.shape, every, strict=False))
