"""The geometric ladder of RoPE and of the original Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import final

import torch
from torch import Tensor

from posenc.core.rotary import Frequencies, check_rotary_dim


@final
@dataclass(frozen=True)
class Geometric:
    """``inv_freq[i] = base^(-2i / rotary_dim)``, one frequency per channel pair.

    The thing people get wrong: i counts *pairs*, not channels, and the divisor is the rotary width.

    Args:
        base: above 0; 10,000 in the papers. Larger bases turn more slowly.

    Raises:
        ValueError: a base that is not a finite number above 0.

    Example:
        >>> Geometric(1e4).frequencies(4).inv_freq
        tensor([1.0000, 0.0100], dtype=torch.float64)

    Differs from:
        transformers: equal bit for bit with ``dtype=torch.float32``, because the order of operations is the same,
        ``1 / base ** (2i / rotary_dim)``.

    References:
        Vaswani et al. 2017, arXiv:1706.03762; Su et al. 2021, arXiv:2104.09864.
    """

    base: float = 10_000.0

    def __post_init__(self) -> None:
        if (
            isinstance(self.base, bool)
            or not isinstance(self.base, (int, float))
            or not (isfinite(self.base) and self.base > 0)
        ):
            raise ValueError(f"Geometric: base = {self.base!r}. Expected a finite number above 0. The papers use 10000.")

    def frequencies(
        self, rotary_dim: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Frequencies:
        """The frequencies of ``rotary_dim / 2`` pairs, computed in ``dtype``."""
        check_rotary_dim(rotary_dim, name="Geometric.frequencies")
        return Frequencies(powers(self.base, rotary_dim, dtype=dtype, device=device).reciprocal())


def powers(
    base: float | Tensor,
    rotary_dim: int,
    *,
    pairs: int | None = None,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tensor:
    """``base^(2i / rotary_dim)``, the reciprocal of the ladder, of the first ``pairs`` pairs; all by default.

    Several bases at once end in an axis of 1: ``[*batch, 1]`` gives ``[*batch, pairs]``.
    """
    turning = rotary_dim if pairs is None else 2 * pairs
    exponent = torch.arange(0, turning, 2, dtype=dtype, device=device) / rotary_dim
    return torch.pow(base, exponent)


def check_geometric(name: str, schedule: object) -> None:
    """Refuse a schedule without a base of its own, for rules that change or read it.

    Raises:
        TypeError: not a `Geometric`.
    """
    if not isinstance(schedule, Geometric):
        raise TypeError(
            f"{name}: schedule = {schedule!r}. Expected a Geometric, whose base the rule reads. A bare base goes into "
            "Geometric; to apply two rules, put Linear or Llama3 outside."
        )
