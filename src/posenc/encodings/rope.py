"""Rotary position embedding."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from posenc.core.rotary import (
    Frequencies,
    Pairing,
    RotaryTable,
    check_frequencies,
    check_rotary_settings,
    rotary_span,
    rotary_table,
)
from posenc.core.sites import RotaryEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.schedules.base import Schedule, check_schedule
from posenc.schedules.geometric import Geometric


@final
class RoPE(RotaryEncoding):
    """Turns each channel pair of queries and keys by ``position · inv_freq``, so that scores depend on distance alone.

    The thing people get wrong: ``pairing``. Llama as released by Meta, GPT-J and Cohere pair neighbouring channels
    ("interleaved"); transformers' Llama, NeoX, Qwen, Mistral and Gemma pair i with i + rotary_dim/2 ("half"). Their
    weights differ by a permutation of rows; with the wrong pairing every shape fits and the text is fluent nonsense.

    Args:
        head_dim: the width of a head.
        schedule: the frequencies, `Geometric` (base 10,000) by default.
        rotary_dim: how many channels turn, even; all by default.
        start: the first that does; negative counts from the end, so ``start=-rotary_dim`` turns the trailing channels.
        pairing: ``"half"`` or ``"interleaved"``.
        head_axis: -3 for ``[batch, heads, seq, head_dim]``, -2 for ``[batch, seq, heads, head_dim]``, ``None`` for
            ``[batch, seq, head_dim]``.
        angle_dtype: float64 is exact at any practical length; float32 reproduces transformers bit for bit.

    Shape:
        q: ``[*batch, heads, seq, head_dim]``; k likewise, of any head count; positions: ``[*batch, seq]``.

    Returns:
        The rotated queries and keys; dtype, device and stride order kept.

    Raises:
        ValueError: an odd or too wide rotary_dim, an unknown pairing.
        ShapeError: another head width; queries and keys of different length without k_positions.
        TypeError: half-precision positions.

    Example:
        >>> rope = RoPE(8)
        >>> q = k = torch.ones(1, 2, 5, 8)
        >>> rotated_q, rotated_k = rope(q, k, 0)
        >>> rope(q[:, :, :1], k[:, :, :1], 5)[0].shape
        torch.Size([1, 2, 1, 8])

    Differs from:
        transformers: angles in float64 by default, there in float32; tables half width; arithmetic in float32.
        flash-attention: no cache inside; positions are an argument.

    References:
        Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
    """

    spec = EncodingSpec(
        name="rope",
        summary="turns queries and keys; scores depend on distance",
        build=lambda shape: [RoPE(shape.head_dim)],
        claims=frozenset(
            {"shift-invariant", "norm-preserving", "composes", "invertible", "parameter-free", "any-length", "real-positions"}
        ),
        references=(
            Reference("Su et al. 2021", "RoFormer: Enhanced Transformer with Rotary Position Embedding", "2104.09864"),
        ),
    )

    def __init__(
        self,
        head_dim: int,
        schedule: Schedule = Geometric(),
        *,
        rotary_dim: int | None = None,
        start: int = 0,
        pairing: Pairing = "half",
        head_axis: int | None = -3,
        angle_dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        check_schedule("RoPE", schedule)
        rotary_dim, _ = rotary_span("RoPE", head_dim, rotary_dim, start)
        check_rotary_settings("RoPE", pairing, head_axis, angle_dtype)
        self.head_dim, self.schedule, self.rotary_dim, self.start = head_dim, schedule, rotary_dim, start
        self.pairing, self.head_axis, self.angle_dtype = pairing, head_axis, angle_dtype
        self.sequence_axis = -3 if head_axis == -2 else -2
        self._frequencies(torch.device("cpu"))  # a schedule that does not fit says so now

    def extra_repr(self) -> str:
        place = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}, start={self.start}"
        return f"{self.head_dim}, {self.schedule}{place}, pairing={self.pairing!r}"

    def prepare(
        self,
        positions: Tensor,
        k_positions: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        frequencies: Frequencies | None = None,
    ) -> tuple[RotaryTable, RotaryTable]:
        if frequencies is None:
            frequencies = self._frequencies(positions.device if isinstance(positions, Tensor) else torch.device("cpu"))
        else:
            check_frequencies(frequencies, name="RoPE.prepare", rotary_dim=self.rotary_dim)
        table = rotary_table(positions, frequencies, dtype=dtype)
        return table, table if k_positions is None else rotary_table(k_positions, frequencies, dtype=dtype)

    def _frequencies(self, device: torch.device) -> Frequencies:
        home = torch.device("cpu") if device.type == "mps" else device  # no float64 on mps
        return self.schedule.frequencies(self.rotary_dim, dtype=self.angle_dtype, device=home)
