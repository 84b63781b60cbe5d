"""How much sharper attention becomes with position: the factors on queries that ship, as values."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor

from posenc.core.checks import check_integers


@runtime_checkable
class Temperature(Protocol):
    """A factor on each query: `LogTemperature`, `LogRatio`, `LogN`, or your own frozen dataclass."""

    def __call__(self, positions: Tensor) -> Tensor:
        """The factor at each position, float64."""
        ...


@final
@dataclass(frozen=True)
class LogTemperature:
    """Queries times ``1 + strength · ln(1 + ⌊(position + shift) / floor⌋)``: Llama 4, Ministral 3, Mistral 4.

    The thing people get wrong: the shift. Llama 4 counts tokens (``shift=1``), so its factor rises at position
    ``floor - 1``; Ministral 3 and Mistral 4 count positions (``shift=0``) and rise one token later. Llama 4 uses it on
    layers that do not rotate, the others on all. Positions below ``-shift`` count as ``-shift``.

    Args:
        strength: 0.1 in Llama 4.
        floor: how many positions a step is long, 1 or more; 8192 in Llama 4, the original length in Ministral 3.
        shift: added to positions.

    Raises:
        TypeError: a strength that is no number, a floor or shift that is no integer. ValueError: a floor below 1.

    Example:
        >>> LogTemperature(0.1, 8192, shift=1)(torch.tensor([8190, 8191]))
        tensor([1.0000, 1.0693], dtype=torch.float64)
    """

    strength: float
    floor: int
    shift: int = 0

    def __post_init__(self) -> None:
        _check_strength("LogTemperature", self.strength)
        check_integers("LogTemperature", 1, floor=self.floor)
        check_integers("LogTemperature", shift=self.shift)

    def __call__(self, positions: Tensor) -> Tensor:
        steps = torch.floor((positions.to(torch.float64) + self.shift) / self.floor)
        return 1 + self.strength * torch.log1p(steps.clamp(min=0))

    def __str__(self) -> str:
        position = f"(position + {self.shift})" if self.shift else "position"
        return f"queries × (1 + {self.strength:g}·ln(1 + ⌊{position}/{self.floor}⌋))"


@final
@dataclass(frozen=True)
class LogRatio:
    """Queries times ``1 + strength · ln(max(1, (position + 1) / floor))``: Inkling, on layers without a window.

    Without steps: 1 up to position ``floor - 1``, then rising with every token.

    Args:
        strength: 0.1 in Inkling.
        floor: how many tokens are left as they are, 1 or more; 128,000 in Inkling.

    Raises:
        TypeError: a strength that is no number, a floor that is no integer. ValueError: a floor below 1.

    Example:
        >>> LogRatio(0.1, 128_000)(torch.tensor([127_999, 255_999]))
        tensor([1.0000, 1.0693], dtype=torch.float64)
    """

    strength: float
    floor: int

    def __post_init__(self) -> None:
        _check_strength("LogRatio", self.strength)
        check_integers("LogRatio", 1, floor=self.floor)

    def __call__(self, positions: Tensor) -> Tensor:
        ratio = (positions.to(torch.float64) + 1) / self.floor
        return 1 + self.strength * torch.log(ratio.clamp(min=1))

    def __str__(self) -> str:
        return f"queries × (1 + {self.strength:g}·ln(max(1, (position + 1)/{self.floor})))"


@final
@dataclass(frozen=True)
class LogN:
    """Queries times ``max(1, ln(position + 1) / ln(length))``: log-n attention, as in Qwen.

    The entropy of attention over n keys grows like ln n; this holds it at what it was over ``length`` keys.

    The thing people get wrong: below ``length`` the bare quotient is under 1, and 0 at the first token, which flattens
    what the model has learned. It is 1 there, so a model trained at ``length`` is unchanged up to it.

    Args:
        length: tokens that the model was trained on, 2 or more.

    Raises:
        TypeError: a length that is no integer. ValueError: a length below 2.

    Example:
        >>> LogN(2048)(torch.tensor([0, 2047, 8191]))
        tensor([1.0000, 1.0000, 1.1818], dtype=torch.float64)
    """

    length: int

    def __post_init__(self) -> None:
        check_integers("LogN", 2, length=self.length)

    def __call__(self, positions: Tensor) -> Tensor:
        n = (positions.to(torch.float64) + 1).clamp(min=self.length)
        trained = torch.full((), self.length, dtype=torch.float64, device=n.device)
        return n.log() / trained.log()  # by one logarithm, so that it is exactly 1 up to length

    def __str__(self) -> str:
        return f"queries × max(1, ln(position + 1)/ln({self.length}))"


def _check_strength(name: str, strength: float) -> None:
    if isinstance(strength, bool) or not isinstance(strength, (int, float)):
        raise TypeError(f"{name}: strength = {strength!r}. Expected a number. Pass a plain int or float, such as 0.1.")
    if not isfinite(strength):
        raise ValueError(f"{name}: strength = {strength}. Expected a finite number. Look at the configuration it comes from.")
