"""LongRoPE: one searched factor per pair, in two lists."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import isfinite, log, sqrt
from typing import final

import torch
from torch import Tensor

from posenc.core.checks import check_integers
from posenc.core.rotary import Frequencies, check_rotary_dim
from posenc.errors import ShapeError
from posenc.schedules.base import LengthRule, keep_list, keep_numbers, resolve_lengths
from posenc.schedules.geometric import Geometric, check_geometric, powers


@final
@dataclass(frozen=True)
class LongRoPE(LengthRule):
    """Each frequency divided by its own factor, from one list up to ``original_length`` and from another beyond.

    The thing people get wrong: the switch. A sequence of exactly ``original_length`` tokens is short, one token more is
    long; each sequence decides for itself, not the padded batch; and keys cached while it was short do not follow
    (see `LengthRule`).

    ``inv_freq'[i] = inv_freq[i] / short_factor[i]``, or ``long_factor[i]``.

    Args:
        schedule: the ladder that the factors divide.
        short_factor, long_factor: one number above 0 per pair, in order.
        original_length: the longest short sequence, in tokens; 2 or more.
        factor: the whole extension, 1 or more, which decides the amplitude: ``sqrt(1 + ln(factor) /
            ln(original_length))``. A configuration without it means ``max_position_embeddings / original_length``.
        amplitude: instead, the gain on rotated channels.
        short_amplitude, long_amplitude: instead, one for each list (PhiMoE's ``short_mscale`` and ``long_mscale``).

    Shape:
        lengths: ``[*batch]``; inv_freq: ``[*batch, pairs]``; amplitude: a number, or ``[*batch]`` if the lists have
        their own.

    Raises:
        ValueError: factors that are not finite and above 0; nothing that decides the amplitude; negative lengths.
        TypeError: settings or lengths of another type; a schedule that is no `Geometric`.
        ShapeError: lists without one factor per pair.

    Example:
        >>> rule = LongRoPE(Geometric(1e4), [1.0, 1.0], [1.0, 4.0], 4096, factor=32.0)
        >>> rule.frequencies_at(4, torch.tensor([4096, 4097])).inv_freq
        tensor([[1.0000, 0.0100],
                [1.0000, 0.0025]], dtype=torch.float64)
        >>> round(rule.at(4097).frequencies(4).amplitude, 4)
        1.1902

    Differs from:
        transformers: ``rope_type="longrope"``, one length for the batch there; frequencies are equal bit for bit with
        ``dtype=torch.float32``.

    References:
        Ding et al. 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", arXiv:2402.13753; Abdin et
        al. 2024, arXiv:2404.14219 (the amplitude).
    """

    schedule: Geometric
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    _: KW_ONLY
    factor: float | None = None
    amplitude: float | None = None
    short_amplitude: float | None = None
    long_amplitude: float | None = None

    def __post_init__(self) -> None:
        check_geometric("LongRoPE", self.schedule)
        for key in ("short_factor", "long_factor"):
            keep_list(self, key)
            bad = [f for f in getattr(self, key) if not (isfinite(f) and f > 0)]
            if bad:
                raise ValueError(
                    f"LongRoPE: {key} contains {bad[0]}. Expected finite numbers above 0: they divide frequencies. "
                    "Look at the configuration they come from."
                )
        check_integers("LongRoPE", 2, original_length=self.original_length)
        keep_numbers(self, "factor", least=1.0, optional=True)
        keep_numbers(self, "amplitude", "short_amplitude", "long_amplitude", above=0.0, optional=True)
        if self.factor is None and self.amplitude is None and None in (self.short_amplitude, self.long_amplitude):
            raise ValueError(
                "LongRoPE: neither factor nor amplitude. Expected what decides the gain on rotated channels. Pass "
                "factor=max_length / original_length, or amplitude=1.0 for none."
            )

    def frequencies_at(
        self,
        rotary_dim: int,
        lengths: Tensor | int,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> Frequencies:
        """The frequencies of sequences of these lengths, computed in ``dtype``."""
        name = "LongRoPE.frequencies_at"
        check_rotary_dim(rotary_dim, name=name)
        for key in ("short_factor", "long_factor"):
            if len(getattr(self, key)) != rotary_dim // 2:
                raise ShapeError(
                    f"{name}: {key} has {len(getattr(self, key))} numbers for rotary_dim = {rotary_dim}. Expected one per "
                    f"pair, {rotary_dim // 2}. Set rotary_dim to the rotating width; a partial factor makes it less than head_dim."
                )
        long = resolve_lengths(name, lengths, device) > self.original_length
        reciprocal = powers(self.schedule.base, rotary_dim, dtype=dtype, device=long.device)
        inv_freq = torch.where(long[..., None], _divide(reciprocal, self.long_factor), _divide(reciprocal, self.short_factor))
        gain, long_gain = self._amplitude(self.short_amplitude), self._amplitude(self.long_amplitude)
        if gain == long_gain:
            return Frequencies(inv_freq, gain)
        if not isinstance(lengths, Tensor):
            return Frequencies(inv_freq, long_gain if lengths > self.original_length else gain)
        here = torch.full((), gain, dtype=dtype, device=long.device)
        beyond = torch.full((), long_gain, dtype=dtype, device=long.device)
        return Frequencies(inv_freq, torch.where(long, beyond, here))

    def _amplitude(self, own: float | None) -> float:
        if own is not None:
            return own
        if self.amplitude is not None:
            return self.amplitude
        assert self.factor is not None
        return sqrt(1 + log(self.factor) / log(self.original_length))


def _divide(reciprocal: Tensor, factors: tuple[float, ...]) -> Tensor:
    # made on the host and sent without waiting: a list that goes straight to a device waits for it
    on_host = torch.tensor(factors, dtype=reciprocal.dtype, device="cpu")
    return 1.0 / (on_host.to(reciprocal.device, non_blocking=True) * reciprocal)
