"""A ladder of frequencies in Hz, for positions in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import final

import torch

from posenc.core.rotary import Frequencies, check_rotary_dim
from posenc.schedules.base import keep_numbers


@final
@dataclass(frozen=True)
class Hertz:
    """Frequencies spaced geometrically between two in Hz: ``inv_freq[i] = 2π · fastest · (slowest/fastest)^(i/(pairs - 1))``.

    The thing people get wrong: the unit of positions. Frame numbers at another hop or sample rate are other positions for
    the same sound; seconds are not (`seconds`). But a ladder made for frame numbers, whose fastest tone has a period of 6
    frames, sees 30 seconds as 30 positions. In Hz the ladder says what it can tell apart: its slowest tone should turn at
    most once per clip, its fastest at most once in two frames, since two frames a turn is all that sampling can hold.

    Args:
        slowest: in Hz, above 0; 1 / clip length for a code that never repeats.
        fastest: in Hz, above ``slowest``; at most 1 / (2 · hop).

    Raises:
        TypeError: not a number. ValueError: not finite, not above 0, or in the wrong order.

    Example:
        >>> Hertz(0.1, 10.0).frequencies(6).inv_freq / (2 * torch.pi)
        tensor([10.0000,  1.0000,  0.1000], dtype=torch.float64)

    Differs from:
        transformers (Whisper): counts frames of 20 ms there, at up to 1 radian per frame, 8 Hz.
    """

    slowest: float
    fastest: float

    def __post_init__(self) -> None:
        keep_numbers(self, "slowest", "fastest", above=0.0)
        if self.slowest >= self.fastest:
            raise ValueError(
                f"Hertz: slowest = {self.slowest:g}, fastest = {self.fastest:g}. Expected slowest below fastest, both in Hz, "
                "not periods in seconds. Swap them."
            )

    @classmethod
    def of_frames(cls, clip: float, hop: float) -> Hertz:
        """The widest ladder for clips of this length and frames this far apart, both in seconds: 1/clip to 1/(2 · hop).

        Raises:
            TypeError: not a number. ValueError: not finite, not above 0, or a clip shorter than two hops.

        Example:
            >>> Hertz.of_frames(clip=32.0, hop=0.0078125)
            Hertz(slowest=0.03125, fastest=64.0)
        """
        for key, value in (("clip", clip), ("hop", hop)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Hertz.of_frames: {key} = {value!r}. Expected seconds. Pass a plain int or float.")
        if not (0 < 2 * hop < clip < float("inf")):
            raise ValueError(
                f"Hertz.of_frames: clip = {clip}, hop = {hop}. Expected seconds above 0, and a clip of more than two hops. "
                "Divide samples by the sample rate."
            )
        return cls(1 / clip, 1 / (2 * hop))

    def frequencies(
        self, rotary_dim: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Frequencies:
        """The frequencies of ``rotary_dim / 2`` pairs, fastest first; at least two pairs."""
        check_rotary_dim(rotary_dim, name="Hertz.frequencies")
        if rotary_dim < 4:
            raise ValueError(
                f"Hertz.frequencies: rotary_dim = {rotary_dim}. Expected 4 or more, a pair for each end of the ladder. "
                "Give a single frequency as Explicit((2 * pi * hertz,))."
            )
        pairs = rotary_dim // 2
        step = torch.arange(pairs, dtype=torch.int64, device=device).to(dtype) / (pairs - 1)
        return Frequencies(2 * pi * self.fastest * torch.pow(self.slowest / self.fastest, step))
