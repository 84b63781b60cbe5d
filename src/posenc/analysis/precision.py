"""What each rounding on the way from a position to a rotary table costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import NamedTuple, final

import torch
from torch import Tensor

from posenc.core.tokens import check_positions
from posenc.schedules.base import Schedule, check_schedule


@final
@dataclass(frozen=True)
class Chain:
    """The dtype of each step from a position to a table: ``angle = position · inv_freq``, then its cosine and sine.

    Args:
        positions: that they are rounded to before the product.
        inv_freq: that they are rounded to before the product.
        angle: of the product.
        table: that cosine and sine are rounded to, once.
    """

    positions: torch.dtype = torch.float64
    inv_freq: torch.dtype = torch.float64
    angle: torch.dtype = torch.float64
    table: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        for key in ("positions", "inv_freq", "angle", "table"):
            dtype = getattr(self, key)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise TypeError(f"Chain: {key} = {dtype!r}. Expected a floating-point dtype. Pass torch.float32, for example.")


CHAINS: Mapping[str, Chain] = MappingProxyType(
    {
        "bfloat16 tables": Chain(table=torch.bfloat16),
        "float32 angles": Chain(torch.float32, torch.float32, torch.float32),
        "float16 angles": Chain(torch.float16, torch.float16, torch.float16),
        "bfloat16 inv_freq": Chain(torch.float32, torch.bfloat16, torch.float32),
        "bfloat16 positions": Chain(torch.bfloat16, torch.float32, torch.float32),
    }
)
"""The ways in which models lose precision, by name: everything in float64 but what is named."""


class PrecisionLoss(NamedTuple):
    """Errors against float64 at each position and pair: ``[*batch, seq, pairs]``, float64, none negative.

    Args:
        angle: of the angle, in radians, not wrapped; infinite where a half-precision number overflows.
        table: of cosine and sine, the larger one; amplitude not included. It cannot exceed 2.
    """

    angle: Tensor
    table: Tensor


def precision_loss(schedule: Schedule, rotary_dim: int, positions: Tensor, chain: Chain) -> PrecisionLoss:
    """What a table loses when its steps are computed in lower precision.

    The thing people get wrong: which step. Rounding the *table* costs half a unit in its last place at every position;
    rounding positions, frequencies or the angle costs an error that grows with the position, and in bfloat16 or float16
    it is whole turns within the first thousand tokens.

    Args:
        schedule: the frequencies, made in float64 and then rounded as ``chain`` says.
        rotary_dim: how many channels turn, even.
        positions: integers, float32 or float64.
        chain: one of `CHAINS`, or your own.

    Shape:
        positions: ``[*batch, seq]``.

    Raises:
        TypeError: not a schedule, not a `Chain`, positions in half precision.

    Example:
        >>> loss = precision_loss(Geometric(1e4), 128, torch.arange(512), CHAINS["bfloat16 inv_freq"])
        >>> loss.angle.amax(0)[:3]
        tensor([0.0000, 0.6250, 0.0541], dtype=torch.float64)

    References:
        Wang et al. 2024, "When Precision Meets Position: BFloat16 Breaks Down RoPE in Long-Context Training",
        arXiv:2411.13476.
    """
    check_schedule("precision_loss", schedule)
    check_positions(positions, name="precision_loss")
    if not isinstance(chain, Chain):
        raise TypeError(
            f"precision_loss: chain = {chain!r}. Expected a Chain. Take one of CHAINS, or name the dtypes: Chain(…)."
        )
    exact = schedule.frequencies(rotary_dim).inv_freq
    at = positions.to(torch.float64)
    true = at[..., None] * exact
    product = at.to(chain.positions).to(chain.angle)[..., None] * exact.to(chain.inv_freq).to(chain.angle)
    angle = product.to(torch.float64)
    errors = [(wave(angle).to(chain.table).to(torch.float64) - wave(true)).abs() for wave in (torch.cos, torch.sin)]
    table = torch.maximum(*errors).nan_to_num(nan=2.0)  # of an infinite angle nothing is left
    return PrecisionLoss((angle - true).abs().nan_to_num(nan=inf, posinf=inf), table)
