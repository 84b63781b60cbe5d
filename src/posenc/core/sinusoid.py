"""Sine and cosine features of positions."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.core.rotary import Frequencies, rotary_table


def sinusoid(positions: Tensor, inv_freq: Tensor, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """``sin(p · inv_freq)`` and ``cos(p · inv_freq)``, with the exact phases of `rotary_table`.

    Shape:
        positions: ``[*batch, seq]``; inv_freq: ``[features]``; each result: ``[*batch, seq, features]``.

    Example:
        >>> sin, cos = sinusoid(torch.arange(2), torch.tensor([1.0], dtype=torch.float64))
        >>> sin
        tensor([[0.0000],
                [0.8415]])
    """
    cos, sin = rotary_table(positions, Frequencies(inv_freq), dtype=dtype)
    return sin, cos


def interleave(sin: Tensor, cos: Tensor, width: int) -> Tensor:
    """``sin, cos, sin, cos, …`` cut to ``width`` channels (an odd width ends with a sine)."""
    return torch.stack([sin, cos], dim=-1).flatten(-2)[..., :width]


def concatenate(sin: Tensor, cos: Tensor, width: int) -> Tensor:
    """``sin … | cos …`` of ``width`` channels (an odd width has one sine more)."""
    return torch.cat([sin[..., : (width + 1) // 2], cos[..., : width // 2]], dim=-1)
