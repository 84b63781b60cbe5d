"""YaRN: frequencies by parts, and a temperature."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import ceil, floor, log, nan, pi
from typing import Literal, final

import torch

from posenc.core.rotary import Frequencies, check_rotary_dim
from posenc.schedules.base import keep_length, keep_numbers, known_length
from posenc.schedules.geometric import Geometric, check_geometric, powers


@final
@dataclass(frozen=True)
class YaRN:
    """Fast pairs keep their frequency, slow ones are divided by ``factor``, a ramp over pairs lies between.

    The thing people get wrong: the paper ramps over the number of turns; every implementation, and so every
    checkpoint, ramps over the pair's index. They differ by a factor of 2 to 4 in single frequencies. This is the
    latter. And ``original_length`` is the trained length, not the extended one.

    ``pair(turns) = rotary_dim · ln(original_length / (2π · turns)) / (2 · ln base)``; from ``low = pair(beta_fast)`` to
    ``high = pair(beta_slow)`` rises ``ramp[i]``, from 0 to 1, and ``inv_freq' = inv_freq · (1 - ramp) + inv_freq /
    factor · ramp``. ``low`` is at least 0 and ``high`` at most ``rotary_dim - 1``.

    Args:
        schedule: the ladder; its base is above 1.
        factor: 1 or more; how many times longer the context becomes.
        original_length: the trained length, in tokens; may be left out where `posenc.hf.extend` fills in the model's own.
        beta_fast: pairs that turn at least this often within ``original_length`` are kept.
        beta_slow: pairs that turn at most this often are divided; no more than ``beta_fast``.
        amplitude: the gain on rotated channels of queries *and* keys, so that scores change by its square; computed
            when ``None``, see `resolved_amplitude`.
        mscale, mscale_all_dim: DeepSeek's pair, which decides the amplitude if both are given and not 0. Such models
            also multiply the softmax scale: see `scale_multiplier`.
        rounding: ``"outward"`` rounds ``low`` down and ``high`` up; ``"none"`` (``truncate: false`` in the
            configuration of gpt-oss) keeps them.

    Raises:
        ValueError: a factor below 1; a base of 1 or less; beta_fast below beta_slow; numbers that are not finite; in
            `frequencies`, an ``original_length`` so short, or a base so small, that the ramp would fall.
        TypeError: settings of another type; a schedule that is no `Geometric`.

    Example:
        >>> yarn = YaRN(Geometric(1e4), 16.0, 4096)
        >>> yarn.frequencies(128).inv_freq[[0, 32, 63]] / Geometric(1e4).frequencies(128).inv_freq[[0, 32, 63]]
        tensor([1.0000, 0.5673, 0.0625], dtype=torch.float64)
        >>> round(yarn.resolved_amplitude, 4)
        1.2773

    Differs from:
        transformers: ``rope_type="yarn"``; equal bit for bit with ``dtype=torch.float32``. There a ramp that falls goes
        unnoticed and scales the wrong pairs.
        torchtitan: the temperature acts on the softmax scale there; here on rotated channels alone.

    References:
        Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", arXiv:2309.00071;
        DeepSeek-AI 2024, arXiv:2412.19437 (mscale).
    """

    schedule: Geometric = Geometric()
    factor: float = nan  # not given, which the check refuses
    original_length: int | None = None
    _: KW_ONLY
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    rounding: Literal["outward", "none"] = "outward"

    def __post_init__(self) -> None:
        check_geometric("YaRN", self.schedule)
        keep_numbers(self, "factor", least=1.0)
        keep_numbers(self, "beta_fast", "beta_slow", above=0.0)
        keep_numbers(self, "amplitude", above=0.0, optional=True)
        keep_numbers(self, "mscale", "mscale_all_dim", least=0.0, optional=True)
        keep_length(self)
        if self.schedule.base <= 1:
            raise ValueError(
                f"YaRN: base = {self.schedule.base}. Expected a base above 1, or no pair is slower than another. "
                "Pass the base the model was trained with."
            )
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"YaRN: beta_fast = {self.beta_fast}, beta_slow = {self.beta_slow}. Expected beta_fast ≥ beta_slow: fast "
                "pairs turn more often. Swap them."
            )
        if self.rounding not in ("outward", "none"):
            raise ValueError(
                f"YaRN: rounding = {self.rounding!r}. Expected 'outward' or 'none'. A configuration's truncate: false is 'none'."
            )

    @property
    def resolved_amplitude(self) -> float:
        """The gain on rotated channels.

        ``amplitude`` if given; else ``m(mscale) / m(mscale_all_dim)`` if both are given and not 0; else ``m(1)``, where
        ``m(k) = 0.1 · k · ln(factor) + 1``.
        """
        if self.amplitude is not None:
            return self.amplitude
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def scale_multiplier(self) -> float:
        """What DeepSeek models multiply the softmax scale by, besides the amplitude: ``m(mscale_all_dim)²``, else 1.

        Nothing here applies it, because a schedule never sees scores. For a model of that family, pass
        ``scale=yarn.scale_multiplier / sqrt(query_width)`` to attention; other models ignore it.
        """
        return self._temperature(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _temperature(self, weight: float) -> float:
        return 0.1 * weight * log(self.factor) + 1.0

    def frequencies(
        self, rotary_dim: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Frequencies:
        """The frequencies of ``rotary_dim / 2`` pairs, computed in ``dtype``."""
        check_rotary_dim(rotary_dim, name="YaRN.frequencies")
        low, high = self._ramp(rotary_dim)
        reciprocal = powers(self.schedule.base, rotary_dim, dtype=dtype, device=device)
        kept, divided = 1.0 / reciprocal, 1.0 / (self.factor * reciprocal)
        if self.factor == 1 and dtype == torch.float64:
            # the blend of equals is off by a rounding; float32 keeps it, as transformers does
            return Frequencies(kept, self.resolved_amplitude)
        pairs = torch.arange(rotary_dim // 2, dtype=dtype, device=device)
        share = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
        return Frequencies(divided * (1 - share) + kept * share, self.resolved_amplitude)

    def _ramp(self, rotary_dim: int) -> tuple[float, float]:
        """The pairs between which frequencies pass from kept to divided."""
        low, high = (
            rotary_dim * log(known_length(self) / (turns * 2 * pi)) / (2 * log(self.schedule.base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.rounding == "outward":
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low > high:
            why = "no pair turns even beta_slow times" if high < 0 else "all pairs turn more than beta_fast times"
            raise ValueError(
                f"YaRN.frequencies: original_length = {self.original_length} with {self.schedule} and rotary_dim = "
                f"{rotary_dim}: {why} in it, and the ramp would fall, from pair {low:g} to {high:g}. Expected it to rise. "
                "Check original_length and base, or change beta_slow or beta_fast."
            )
        return low, high + 0.001 if low == high else high
