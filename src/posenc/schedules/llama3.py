"""Llama 3.1's frequencies by parts."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import nan, pi
from typing import final

import torch

from posenc.core.rotary import Frequencies
from posenc.schedules.base import Schedule, check_schedule, keep_length, keep_numbers, known_length
from posenc.schedules.geometric import Geometric


@final
@dataclass(frozen=True)
class Llama3:
    """Pairs with short wavelengths keep their frequency, long ones are divided by ``factor``, those between are blended.

    The thing people get wrong: nothing breaks without it. Short texts are fluent with the unscaled ladder, because the
    pairs that differ have hardly turned; test a long one. There is no amplitude.

    With ``wavelength = 2π / |inv_freq|``: kept below ``original_length / high_freq_factor``, divided above
    ``original_length / low_freq_factor``, and between ``(1 - s) · inv_freq / factor + s · inv_freq`` with ``s =
    (original_length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)``. With equal factors
    nothing lies between, and the edge itself is kept: a wavelength that fits was seen in training.

    Args:
        schedule: any; the amplitude of the schedule inside is kept.
        factor: 1 or more; how many times longer the context becomes.
        original_length: the trained length, in tokens; may be left out where `posenc.hf.extend` fills in the model's own.
        low_freq_factor: pairs that turn less often than this within ``original_length`` are divided.
        high_freq_factor: pairs that turn more often are kept; no less than ``low_freq_factor``.

    Raises:
        ValueError: a factor below 1; high_freq_factor below low_freq_factor; numbers that are not finite or not positive.
        TypeError: settings of another type; something else than a schedule.

    Example:
        >>> from posenc.schedules.geometric import Geometric
        >>> ladder = Geometric(5e5)
        >>> llama = Llama3(ladder, 8.0, 8192)
        >>> llama.frequencies(128).inv_freq[[28, 32, 63]] / ladder.frequencies(128).inv_freq[[28, 32, 63]]
        tensor([1.0000, 0.3711, 0.1250], dtype=torch.float64)

    Differs from:
        transformers: ``rope_type="llama3"``; equal bit for bit with ``dtype=torch.float32``. There equal factors give
        NaN at the edge.

    References:
        Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv:2407.21783; the rule is that of the released code.
    """

    schedule: Schedule = Geometric()
    factor: float = nan  # not given, which the check refuses
    original_length: int | None = None
    _: KW_ONLY
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        check_schedule("Llama3", self.schedule)
        keep_numbers(self, "factor", least=1.0)
        keep_numbers(self, "low_freq_factor", "high_freq_factor", above=0.0)
        keep_length(self)
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"Llama3: low_freq_factor = {self.low_freq_factor}, high_freq_factor = {self.high_freq_factor}. Expected "
                "high_freq_factor ≥ low_freq_factor. Swap them."
            )

    def frequencies(
        self, rotary_dim: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Frequencies:
        """The frequencies of ``rotary_dim / 2`` pairs, computed in ``dtype``."""
        inv_freq, amplitude = self.schedule.frequencies(rotary_dim, dtype=dtype, device=device)
        if self.factor == 1 and dtype == torch.float64:
            # the blend of equals is off by a rounding; float32 keeps it, as transformers does
            return Frequencies(inv_freq, amplitude)
        wavelength = 2 * pi / inv_freq.abs()
        low, high = self.low_freq_factor, self.high_freq_factor
        original = known_length(self)
        slow, fast = wavelength > original / low, wavelength < original / high
        scaled = torch.where(slow, inv_freq / self.factor, inv_freq)
        if low < high:
            share = (original / wavelength - low) / (high - low)
            blended = (1 - share) * inv_freq / self.factor + share * inv_freq
            scaled = torch.where(slow | fast, scaled, blended)
        return Frequencies(scaled, amplitude)
