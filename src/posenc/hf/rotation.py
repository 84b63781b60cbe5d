"""What turns in a layer: which channels, how fast, and which axis of the position each pair reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from posenc.core.rotary import Frequencies, Pairing, RotaryTable, rotary_table, rotary_table_nd
from posenc.core.tokens import Tokens, check_positions
from posenc.errors import ShapeError
from posenc.schedules.base import LengthRule, Schedule


@final
@dataclass(frozen=True)
class Axes:
    """How pairs share the axes of a position.

    Args:
        names: of the axes, in the order of the positions' last dimension.
        of_pair: the axis that each pair reads.
        step: the rung of the frequency ladder that each pair takes.
        ladder_dim: the rotary width that the schedule's ladder is made for.
        style: the layout in words.
        blocks: how many equal blocks of channels turn on their own (Gemma 4 vision: one per axis).
        text: whether a token of text has one position for all axes (M-RoPE).
        origin: added to every position (Llama 4 vision counts from 1).
    """

    names: tuple[str, ...]
    of_pair: tuple[int, ...]
    step: tuple[int, ...]
    ladder_dim: int
    style: str
    blocks: int = 1
    text: bool = False
    origin: int = 0

    def spread(self, ladder: Tensor) -> Tensor:
        """The ladder as a matrix ``[axes, pairs]``: zero where a pair does not read an axis."""
        read = torch.tensor(self.of_pair, device=ladder.device) == torch.arange(len(self.names), device=ladder.device)[:, None]
        return torch.where(read, ladder[..., None, list(self.step)], ladder.new_zeros(()))


@final
@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of one layer.

    Args:
        schedule: the frequencies; a `LengthRule` when they depend on the length in use.
        head_dim: the width of a head.
        rotary_dim: how many of its channels turn.
        start: the first that does.
        pairing: which channels form a plane.
        axes: for positions of several axes.
        original_length: the length that a length rule is read at when none is given.
    """

    schedule: Schedule | LengthRule
    head_dim: int
    rotary_dim: int
    start: int = 0
    pairing: Pairing = "half"
    axes: Axes | None = None
    original_length: int | None = None

    @property
    def pairs(self) -> int:
        return self.rotary_dim // 2 if self.axes is None else len(self.axes.of_pair)

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the length in use."""
        return isinstance(self.schedule, LengthRule)

    def frequencies(
        self,
        *,
        length: int | Tensor | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> Frequencies:
        """The frequencies at a length: ``[pairs]``, with several axes ``[axes, pairs]``."""
        width = self.rotary_dim if self.axes is None else self.axes.ladder_dim
        if isinstance(self.schedule, LengthRule):
            in_use = self.original_length or 1 if length is None else length
            ladder = self.schedule.frequencies_at(width, in_use, dtype=dtype, device=device)
        else:
            ladder = self.schedule.frequencies(width, dtype=dtype, device=device)
        if self.axes is None:
            return ladder
        return Frequencies(self.axes.spread(ladder.inv_freq), ladder.amplitude)

    def table(
        self,
        positions: Tensor | Tokens,
        *,
        length: int | Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        angle_dtype: torch.dtype = torch.float64,
    ) -> RotaryTable:
        """Cosine and sine, ``[*batch, seq, pairs]``, of these positions."""
        at = positions.positions if isinstance(positions, Tokens) else positions
        check_positions(at, name="rotary_table")
        frequencies = self.frequencies(length=length, dtype=angle_dtype, device=at.device)
        if self.axes is None:
            if isinstance(positions, Tokens) and positions.axes is not None:
                raise ShapeError(
                    f"rotary_table: positions of {positions.axes} axes for a layer that reads one. Expected [*batch, seq]. "
                    "Pass one axis of them."
                )
            return rotary_table(at, frequencies, dtype=dtype)
        return rotary_table_nd(self._on_axes(at, positions), frequencies, dtype=dtype)

    def _on_axes(self, at: Tensor, positions: Tensor | Tokens) -> Tensor:
        assert self.axes is not None
        count = len(self.axes.names)
        plain = positions.axes is None if isinstance(positions, Tokens) else self.axes.text and at.ndim <= 2
        if plain and self.axes.text:  # text: the same number on every axis
            return at[..., None].expand(*at.shape, count)
        if at.ndim < 2 or at.shape[-1] != count:
            raise ShapeError(
                f"rotary_table: positions of shape {tuple(at.shape)} for a layer that reads the axes {', '.join(self.axes.names)}. "
                f"Expected [*batch, seq, {count}]. Build them with grid(…) or multimodal(…)."
            )
        return at + self.axes.origin if self.axes.origin else at
