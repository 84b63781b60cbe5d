"""Frequencies given one by one."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import final

import torch

from posenc.core.rotary import Frequencies, check_rotary_dim
from posenc.errors import ShapeError
from posenc.schedules.base import keep_list


@final
@dataclass(frozen=True)
class Explicit:
    """Frequencies as plain numbers, for ladders that no rule makes: searched, learned elsewhere, read from a checkpoint.

    Args:
        inv_freq: radians per unit of position, one per pair; finite, and 0 for a pair that does not turn.
        amplitude: multiplies the rotated channels.

    Example:
        >>> Explicit((1.0, 0.5)).frequencies(4).inv_freq
        tensor([1.0000, 0.5000], dtype=torch.float64)
    """

    inv_freq: tuple[float, ...]
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        keep_list(self, "inv_freq")
        if isinstance(self.amplitude, bool) or not isinstance(self.amplitude, (int, float)):
            raise TypeError(f"Explicit: amplitude = {self.amplitude!r}. Expected a number. Pass a plain int or float.")
        object.__setattr__(self, "amplitude", float(self.amplitude))
        bad = [f for f in (*self.inv_freq, self.amplitude) if not isfinite(f)]
        if bad or not self.inv_freq or self.amplitude == 0:
            raise ValueError(
                f"Explicit: inv_freq = {self.inv_freq}, amplitude = {self.amplitude}. Expected at least one frequency, all "
                "finite, and an amplitude other than 0. Pass radians per position, one per channel pair."
            )

    def frequencies(
        self, rotary_dim: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Frequencies:
        """The given frequencies, if there is one for each of ``rotary_dim / 2`` pairs."""
        check_rotary_dim(rotary_dim, name="Explicit.frequencies")
        if len(self.inv_freq) != rotary_dim // 2:
            raise ShapeError(
                f"Explicit.frequencies: {len(self.inv_freq)} frequencies for rotary_dim = {rotary_dim}. Expected one per "
                f"pair, {rotary_dim // 2}. Set rotary_dim to {2 * len(self.inv_freq)} or give more frequencies."
            )
        return Frequencies(torch.tensor(self.inv_freq, dtype=dtype, device=device), self.amplitude)
