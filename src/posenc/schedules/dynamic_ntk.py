"""NTK-aware scaling that grows with the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import final

import torch
from torch import Tensor

from posenc.core.rotary import Frequencies
from posenc.schedules.base import LengthRule, keep_length, keep_numbers, known_length, resolve_lengths
from posenc.schedules.geometric import Geometric, check_geometric, powers
from posenc.schedules.ntk import growth_exponent


@final
@dataclass(frozen=True)
class DynamicNTK(LengthRule):
    """`NTK` whose base grows with each sequence's own length, and which changes nothing up to ``original_length``.

    The thing people get wrong: the length is that of each sequence, not of the padded batch, or a row's result depends
    on its neighbours; and keys cached at a shorter length keep the base of that length (see `LengthRule`).

    ``base' = base · (factor · length / original_length - (factor - 1))^(rotary_dim / (rotary_dim - 2))`` for lengths
    above ``original_length``; with factor 1 the context is stretched by exactly ``length / original_length``.

    Args:
        schedule: the ladder whose base grows.
        factor: 1 or more; how fast it does.
        original_length: the trained length, in tokens; may be left out where `posenc.hf.extend` fills in the model's own. In a configuration file this is ``max_position_embeddings``.

    Shape:
        lengths: ``[*batch]``; inv_freq: ``[*batch, pairs]``.

    Raises:
        ValueError: a factor below 1, or not finite; rotary_dim = 2; negative lengths.
        TypeError: settings or lengths of another type; a schedule that is no `Geometric`.

    Example:
        >>> rule = DynamicNTK(Geometric(1e4), 2.0, 2048)
        >>> rule.frequencies_at(4, torch.tensor([2048, 4096])).inv_freq
        tensor([[1.0000, 0.0100],
                [1.0000, 0.0033]], dtype=torch.float64)

    Differs from:
        transformers: one length for the batch there, remembered between calls; a fresh module's frequencies are equal
        bit for bit with ``dtype=torch.float32``.

    References:
        emozilla 2023, "Dynamically Scaled RoPE"; described in Peng et al. 2023, arXiv:2309.00071, §3.3.
    """

    schedule: Geometric = Geometric()
    factor: float = nan  # not given, which the check refuses
    original_length: int | None = None

    def __post_init__(self) -> None:
        check_geometric("DynamicNTK", self.schedule)
        keep_numbers(self, "factor", least=1.0)
        keep_length(self)

    def frequencies_at(
        self,
        rotary_dim: int,
        lengths: Tensor | int,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> Frequencies:
        """The frequencies of sequences of these lengths, computed in ``dtype``."""
        name = "DynamicNTK.frequencies_at"
        exponent = growth_exponent(name, rotary_dim)
        lengths = resolve_lengths(name, lengths, device)
        original = known_length(self)
        stretch = self.factor * lengths.to(dtype) / original - (self.factor - 1)
        # The vectorised power rounds otherwise than the power of one number. A row of equal numbers is too short for
        # it, so that a sequence has the same frequencies alone and in a batch.
        growth = (stretch[..., None].expand(*stretch.shape, 2) ** exponent)[..., :1]
        base = torch.where(lengths[..., None] > original, self.schedule.base * growth, self.schedule.base)
        return Frequencies(1.0 / powers(base, rotary_dim, dtype=dtype, device=base.device))
