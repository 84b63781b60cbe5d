"""How long each channel pair takes to turn once, and how far it gets within a trained length."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import final

import torch
from torch import Tensor

from posenc.core.checks import check_integers
from posenc.schedules.base import Schedule, check_schedule


def wavelengths(schedule: Schedule, rotary_dim: int) -> Tensor:
    """How many positions each pair takes to turn once: ``2π / |inv_freq|``, infinite for a pair that does not turn.

    The thing people get wrong: the index. i counts pairs and the exponent is ``2i/rotary_dim``; counting channels
    instead squares the range, 6·10⁸ in place of 6·10⁴. And the last wavelength is not ``base · 2π``, which is the limit
    of ever wider heads.

    Args:
        schedule: the frequencies.
        rotary_dim: how many channels turn, even.

    Returns:
        float64, ``[pairs]``, in units of position.

    Raises:
        TypeError: not a schedule. ValueError: a rotary_dim that is not a positive even integer.

    Example:
        >>> wavelengths(Geometric(1e4), 512)[[0, 1, -1]]
        tensor([6.2832e+00, 6.5134e+00, 6.0611e+04], dtype=torch.float64)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762.
    """
    check_schedule("wavelengths", schedule)
    return 2 * pi / schedule.frequencies(rotary_dim).inv_freq.abs()


@final
@dataclass(frozen=True)
class AngleCoverage:
    """How far each pair turns within a trained length.

    Args:
        length: in tokens.
        turns: per pair, how many whole circles fit: ``length / wavelength``.
    """

    length: int
    turns: tuple[float, ...]

    @property
    def incomplete(self) -> tuple[int, ...]:
        """The pairs that never complete a turn, whose wavelength exceeds the length."""
        return tuple(pair for pair, turns in enumerate(self.turns) if turns < 1)


def angle_coverage(schedule: Schedule, rotary_dim: int, length: int) -> AngleCoverage:
    """Which angles a model has seen in training: the turns of each pair within a length.

    The thing people get wrong: "defined at any position" is not "seen". A pair that never completes a turn meets new
    angles on the first token past the trained length; the others have seen every angle there is. That is why rules for
    longer contexts slow the slow pairs and leave the fast ones alone.

    Args:
        schedule: the frequencies.
        rotary_dim: how many channels turn, even.
        length: trained, in tokens; 1 or more.

    Raises:
        TypeError, ValueError: as for `wavelengths`; a length that is not an integer of 1 or more.

    Example:
        >>> seen = angle_coverage(Geometric(1e4), 128, 4096)
        >>> len(seen.incomplete), seen.incomplete[0]
        (18, 46)

    References:
        Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", arXiv:2309.00071.
    """
    check_integers("angle_coverage", 1, length=length)
    check_schedule("angle_coverage", schedule)
    turns = length * schedule.frequencies(rotary_dim).inv_freq.abs().to(torch.float64) / (2 * pi)
    return AngleCoverage(length, tuple(turns.tolist()))
