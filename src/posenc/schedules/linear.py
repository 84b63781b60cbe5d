"""Linear position interpolation."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import final

import torch

from posenc.core.rotary import Frequencies
from posenc.schedules.base import Schedule, check_schedule, keep_numbers
from posenc.schedules.geometric import Geometric


@final
@dataclass(frozen=True)
class Linear:
    """Every frequency divided by ``factor``: positions are squeezed into the trained range.

    The thing people get wrong: the direction. ``factor`` divides frequencies, so that a context 4 times as long has
    factor 4 and position 8 turns as position 2 did. Libraries that multiply positions name the inverse.

    ``inv_freq' = inv_freq / factor``; the amplitude of the schedule inside is kept.

    Args:
        schedule: any; its frequencies are divided.
        factor: 1 or more; how many times longer the context becomes.

    Raises:
        ValueError: a factor below 1, or not finite.
        TypeError: a factor that is no number; something else than a schedule.

    Example:
        >>> from posenc.schedules.geometric import Geometric
        >>> Linear(Geometric(1e4), 4.0).frequencies(4).inv_freq
        tensor([0.2500, 0.0025], dtype=torch.float64)

    Differs from:
        transformers: ``rope_type="linear"``; equal bit for bit with ``dtype=torch.float32``.

    References:
        Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation",
        arXiv:2306.15595.
    """

    schedule: Schedule = Geometric()
    factor: float = nan  # not given, which the check refuses

    def __post_init__(self) -> None:
        check_schedule("Linear", self.schedule)
        keep_numbers(self, "factor", least=1.0)

    def frequencies(
        self, rotary_dim: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Frequencies:
        """The frequencies of ``rotary_dim / 2`` pairs, computed in ``dtype``."""
        inv_freq, amplitude = self.schedule.frequencies(rotary_dim, dtype=dtype, device=device)
        return Frequencies(inv_freq / self.factor, amplitude)
