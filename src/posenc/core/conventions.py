"""The conventions of sinusoidal codes: which frequencies a width has, and which channel holds what."""

from __future__ import annotations

from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from posenc.core.rotary import Frequencies, rotary_table
from posenc.core.sinusoid import concatenate, interleave

Layout = Literal["interleaved", "concatenated"]
"""``"interleaved"``: sin, cos, sin, cos, …; ``"concatenated"``: all sines, then all cosines."""

FrequencyRule = Literal["paper", "tensor2tensor"]
"""``"paper"``: ``base^(-2i/dim)``; ``"tensor2tensor"``: ``base^(-i/(⌊dim/2⌋ - 1))``."""


def check_convention(name: str, layout: str, frequency_rule: str, base: float) -> None:
    """Refuse a layout, rule or base that is none.

    Raises:
        ValueError: any of them.
    """
    if layout not in ("interleaved", "concatenated") or frequency_rule not in ("paper", "tensor2tensor"):
        raise ValueError(
            f"{name}: layout = {layout!r}, frequency_rule = {frequency_rule!r}. Expected 'interleaved' or "
            "'concatenated', and 'paper' or 'tensor2tensor'. Name the convention of the checkpoint."
        )
    if isinstance(base, bool) or not isinstance(base, (int, float)) or not (isfinite(base) and base > 0):
        raise ValueError(f"{name}: base = {base}. Expected a finite number above 0. The paper uses 10000.")


def least_width(frequency_rule: FrequencyRule) -> int:
    """The smallest width that a rule has frequencies for; tensor2tensor's divides by zero below."""
    return 4 if frequency_rule == "tensor2tensor" else 1


def ladder(
    dim: int,
    frequency_rule: FrequencyRule,
    base: float,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    """The frequencies of ``dim`` channels in radians per unit of position, highest first.

    Example:
        >>> ladder(4, "paper", 10_000.0)
        tensor([1.0000, 0.0100], dtype=torch.float64)
    """
    count, divisor = ((dim + 1) // 2, dim / 2) if frequency_rule == "paper" else (dim // 2, dim // 2 - 1)
    exponent = torch.arange(count, dtype=torch.int64, device=device).to(dtype) / divisor
    return 1.0 / (base**exponent)


def code(
    positions: Tensor, frequencies: Frequencies, dim: int, *, layout: Layout, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Sines and cosines of positions in ``dim`` channels: an odd one out is a sine where there is a frequency for it,
    else zero.

    Shape:
        positions: ``[*batch, seq]``; the result: ``[*batch, seq, dim]``.

    Example:
        >>> code(torch.tensor([0]), Frequencies(torch.ones(1, dtype=torch.float64)), 3, layout="interleaved")
        tensor([[0., 1., 0.]])
    """
    cos, sin = rotary_table(positions, frequencies, dtype=dtype)
    width = min(dim, 2 * sin.shape[-1])
    arrange = interleave if layout == "interleaved" else concatenate
    return torch.nn.functional.pad(arrange(sin, cos, width), (0, dim - width))
