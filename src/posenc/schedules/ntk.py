"""NTK-aware scaling of the base."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import final

import torch

from posenc.core.rotary import Frequencies, check_rotary_dim
from posenc.schedules.base import keep_numbers
from posenc.schedules.geometric import Geometric, check_geometric


@final
@dataclass(frozen=True)
class NTK:
    """A larger base, such that the fastest pair keeps its frequency and the slowest is divided by ``factor``.

    The thing people get wrong: the pairs between are divided by less than ``factor``, so the context that this really
    reaches is shorter than ``factor`` times the trained one.

    ``base' = base · factor^(rotary_dim / (rotary_dim - 2))``

    Args:
        schedule: the ladder whose base grows.
        factor: 1 or more. Hunyuan's ``alpha`` is this number.

    Raises:
        ValueError: a factor below 1, or not finite; rotary_dim = 2, whose one pair is both fastest and slowest.
        TypeError: a factor that is no number; a schedule that is no `Geometric`.

    Example:
        >>> NTK(Geometric(1e4), 4.0).frequencies(4).inv_freq
        tensor([1.0000, 0.0025], dtype=torch.float64)

    Differs from:
        transformers: Hunyuan's ``rope_type="dynamic"`` with ``alpha``; equal bit for bit with ``dtype=torch.float32``.

    References:
        bloc97 2023, "NTK-Aware Scaled RoPE"; described in Peng et al. 2023, arXiv:2309.00071, §3.1.
    """

    schedule: Geometric = Geometric()
    factor: float = nan  # not given, which the check refuses

    def __post_init__(self) -> None:
        check_geometric("NTK", self.schedule)
        keep_numbers(self, "factor", least=1.0)

    def frequencies(
        self, rotary_dim: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Frequencies:
        """The frequencies of ``rotary_dim / 2`` pairs, computed in ``dtype``."""
        base = self.schedule.base * self.factor ** growth_exponent("NTK.frequencies", rotary_dim)
        return Geometric(base).frequencies(rotary_dim, dtype=dtype, device=device)


def growth_exponent(name: str, rotary_dim: int) -> float:
    """``rotary_dim / (rotary_dim - 2)``: the power that divides the slowest frequency by exactly the factor."""
    check_rotary_dim(rotary_dim, name=name)
    if rotary_dim == 2:
        raise ValueError(
            f"{name}: rotary_dim = 2. Expected 4 or more: the rule keeps the fastest pair and slows the slowest, and a "
            "single pair is both. Use Linear."
        )
    return rotary_dim / (rotary_dim - 2)
