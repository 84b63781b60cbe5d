"""Proportional RoPE: the slow pairs of a whole head stand still."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from posenc.core.rotary import Frequencies, check_rotary_dim
from posenc.schedules.base import keep_numbers
from posenc.schedules.geometric import Geometric, check_geometric, powers


@final
@dataclass(frozen=True)
class Proportional:
    """The fastest pairs of the whole head turn as ever, the others not at all.

    The thing people get wrong: this is not ``rotary_dim`` smaller than ``head_dim``. There a full ladder, down to the
    slowest frequency, fills the first channels; here the ladder is that of the whole width, cut off. With pairing
    ``"half"`` the still channels are not a contiguous slice.

    ``inv_freq[i] = base^(-2i / rotary_dim) / factor`` for ``i < int(proportion · rotary_dim // 2)``, else 0.

    Args:
        schedule: the ladder that is cut.
        proportion: from 0 (nothing turns) to 1 (everything does).
        factor: 1 or more; divides the frequencies as `Linear` does.

    Raises:
        ValueError: a proportion outside [0, 1]; a factor below 1; numbers that are not finite.
        TypeError: settings that are no numbers; a schedule that is no `Geometric`.

    Example:
        >>> Proportional(Geometric(1e4), 0.5).frequencies(8).inv_freq
        tensor([1.0000, 0.1000, 0.0000, 0.0000], dtype=torch.float64)

    Differs from:
        transformers: ``rope_type="proportional"``, where ``partial_rotary_factor`` is the proportion; equal bit for bit
        with ``dtype=torch.float32``.

    References:
        Barbero et al. 2024, "Round and Round We Go! What makes Rotary Positional Encodings useful?", arXiv:2410.06205.
    """

    schedule: Geometric
    proportion: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_geometric("Proportional", self.schedule)
        keep_numbers(self, "proportion", least=0.0)
        keep_numbers(self, "factor", least=1.0)
        if self.proportion > 1:
            raise ValueError(
                f"Proportional: proportion = {self.proportion}. Expected a number from 0 to 1. Pass the share of pairs that turn."
            )

    def frequencies(
        self, rotary_dim: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Frequencies:
        """The frequencies of ``rotary_dim / 2`` pairs, computed in ``dtype``."""
        check_rotary_dim(rotary_dim, name="Proportional.frequencies")
        pairs = int(self.proportion * rotary_dim // 2)
        turning = 1.0 / powers(self.schedule.base, rotary_dim, pairs=pairs, dtype=dtype, device=device)
        still = torch.zeros(rotary_dim // 2 - pairs, dtype=dtype, device=device)
        return Frequencies(torch.cat((turning, still)) / self.factor)
