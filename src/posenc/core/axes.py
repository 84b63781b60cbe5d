"""Rotary positions of several axes: one table, in which each pair of channels reads one axis."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from posenc.core.checks import check_integers
from posenc.core.rotary import (
    Frequencies,
    Pairing,
    RotaryTable,
    check_frequencies,
    check_rotary_settings,
    rotary_span,
    rotary_table_nd,
)
from posenc.core.sites import RotaryEncoding

Part = tuple[int, slice]
"""An axis and the pairs that read it; a later part takes over pairs of an earlier one."""


def owners(parts: Sequence[Part], pairs: int) -> tuple[int, ...]:
    """The axis that each pair reads."""
    axis_of = [0] * pairs
    for axis, part in parts:
        axis_of[part] = [axis] * len(axis_of[part])
    return tuple(axis_of)


def spread(inv_freq: Tensor, parts: Sequence[Part], axes: int) -> Tensor:
    """One ladder of frequencies as a matrix, zero where a pair does not read an axis.

    Shape:
        inv_freq: ``[*batch, pairs]``; the result: ``[*batch, axes, pairs]``.
    """
    matrix = inv_freq.new_zeros(*inv_freq.shape[:-1], axes, inv_freq.shape[-1])
    for axis, part in parts:  # slices, since a mask made from a list of axes would be copied to the device on each call
        matrix[..., part] = 0
        matrix[..., axis, part] = inv_freq[..., part]
    return matrix


class AxesRotary(RotaryEncoding):
    """What rotary encodings of several axes share: their settings, checked, and one table for all axes."""

    axes: int

    def __init__(
        self,
        head_dim: int,
        *,
        axes: int,
        rotary_dim: int | None,
        start: int,
        pairing: Pairing,
        head_axis: int | None,
        angle_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_integers(name, 1, axes=axes)
        rotary_dim, _ = rotary_span(name, head_dim, rotary_dim, start)
        check_rotary_settings(name, pairing, head_axis, angle_dtype)
        self.head_dim, self.axes, self.rotary_dim, self.start = head_dim, axes, rotary_dim, start
        self.pairing, self.head_axis, self.angle_dtype = pairing, head_axis, angle_dtype
        self.sequence_axis = -3 if head_axis == -2 else -2

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The axes and the pairs that read them."""

    @abstractmethod
    def ladder(self, *, dtype: torch.dtype, device: torch.device) -> Frequencies:
        """The frequency of each pair, ``[pairs]``."""

    @abstractmethod
    def settings(self) -> str:
        """What tells this one from another with the same widths."""

    @property
    def axis_of_pair(self) -> tuple[int, ...]:
        """The axis that each pair reads."""
        return owners(self.parts, self.rotary_dim // 2)

    def extra_repr(self) -> str:
        place = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}, start={self.start}"
        return f"{self.head_dim}, {self.settings()}{place}, pairing={self.pairing!r}"

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
            frequencies: instead of the schedule's own, one per pair; which axis a pair reads stays as it is.
            dtype: of the tables, float32 or float64.
        """
        if frequencies is None:
            frequencies = self._frequencies(positions.device if isinstance(positions, Tensor) else torch.device("cpu"))
        else:
            check_frequencies(frequencies, name=f"{type(self).__name__}.prepare", rotary_dim=self.rotary_dim)
        matrix = Frequencies(spread(frequencies.inv_freq, self.parts, self.axes), frequencies.amplitude)
        table = rotary_table_nd(positions, matrix, dtype=dtype)
        return table, table if k_positions is None else rotary_table_nd(k_positions, matrix, dtype=dtype)

    def _frequencies(self, device: torch.device) -> Frequencies:
        home = torch.device("cpu") if device.type == "mps" else device  # no float64 on mps
        return self.ladder(dtype=self.angle_dtype, device=home)
