"""Rotary positions with a magnitude that decays with distance."""

from __future__ import annotations

from math import isfinite, log, log1p
from typing import NamedTuple, final

import torch
from torch import Tensor

from posenc.core.apply import apply_rotary_pair
from posenc.core.checks import check_values
from posenc.core.rotary import (
    Frequencies,
    Pairing,
    RotaryTable,
    check_rotary_settings,
    rotary_span,
    rotary_table,
)
from posenc.core.sites import QKEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.errors import ShapeError
from posenc.schedules.base import Schedule, check_schedule
from posenc.schedules.geometric import Geometric

_ROOM = 16.0
"""Entries of queries and keys between 1/16 and 16 in size stay clear of underflow and overflow within the span."""


class Decayed(NamedTuple):
    """The tables of queries and keys, magnitudes folded in, and how far from the centre their tokens are."""

    q_table: RotaryTable
    k_table: RotaryTable
    q_offset: Tensor
    k_offset: Tensor


@final
class XPos(QKEncoding):
    """`RoPE` with a magnitude per pair that grows in keys and falls in queries, so that scores decay with distance.

    The thing people get wrong: the centre. Magnitudes are counted from a position that has to be the same for every
    token that ever meets another. Popular code takes the middle of the current call, and then cached keys and later
    queries disagree. Here ``centre`` is a constant of the model.

    Pair i of a query at m is rotated and multiplied by ``ζᵢ^((m - centre)/decay_base)``, of a key at n by
    ``ζᵢ^(-(n - centre)/decay_base)``, with ``ζᵢ = (2i/rotary_dim + gamma)/(1 + gamma)`` below 1. The score carries
    ``ζᵢ^(distance/decay_base)``, whatever the centre. For causal attention only: towards the future it grows without
    bound.

    The magnitudes themselves grow exponentially with the distance to the centre, so positions have a `span`; farther
    ones are refused.

    Args:
        head_dim: the width of a head.
        schedule: the frequencies, `Geometric` (base 10,000) by default.
        gamma: above 0; smaller decays faster, and 0.4 in the paper. A very large one is RoPE.
        decay_base: above 0, in positions: the distance at which the score carries ζ itself.
        centre: the position whose magnitudes are 1; the middle of the positions in use makes the most of the span.
        rotary_dim: how many channels turn, even; all by default.
        start: the first that does; negative counts from the end.
        pairing: ``"interleaved"``, as in torchscale, or ``"half"``.
        head_axis: -3 for ``[batch, heads, seq, head_dim]``, -2 for ``[batch, seq, heads, head_dim]``, ``None`` for
            ``[batch, seq, head_dim]``.
        angle_dtype: float64 is exact at any practical length.

    Shape:
        q: ``[*batch, heads, seq, head_dim]``; k likewise, of any head count; positions: ``[*batch, seq]``.

    Returns:
        Queries and keys, rotated and multiplied; dtype, device and stride order kept.

    Raises:
        ValueError: a position outside of the span; an impossible setting.
        ShapeError: another head width; queries and keys of different length without k_positions.
        TypeError: half-precision positions.

    Example:
        >>> xpos = XPos(8)
        >>> q, k = xpos(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8), torch.tensor([74]), torch.tensor([64]))
        >>> (q * k).sum()
        tensor(3.3921)

    Differs from:
        torchscale: equal scores within one call; the magnitudes there are counted from the middle of the call.
        x-transformers: the same, and ``max_pos`` there is that of the call.

    References:
        Sun et al. 2022, "A Length-Extrapolatable Transformer", arXiv:2212.10554.
    """

    spec = EncodingSpec(
        name="xpos",
        summary="turns queries and keys; scores also decay with distance, causal only",
        build=lambda shape: [XPos(shape.head_dim)],
        # shift-invariant, composes and invertible hold too, within the span, but are asked of positions outside of it
        claims=frozenset({"parameter-free", "real-positions"}),
        references=(Reference("Sun et al. 2022", "A Length-Extrapolatable Transformer", "2212.10554"),),
    )

    def __init__(
        self,
        head_dim: int,
        schedule: Schedule = Geometric(),
        *,
        gamma: float = 0.4,
        decay_base: float = 512.0,
        centre: float = 0.0,
        rotary_dim: int | None = None,
        start: int = 0,
        pairing: Pairing = "interleaved",
        head_axis: int | None = -3,
        angle_dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        check_schedule("XPos", schedule)
        rotary_dim, _ = rotary_span("XPos", head_dim, rotary_dim, start)
        for key, value in (("gamma", gamma), ("decay_base", decay_base)):
            if not _is_number(value) or value <= 0:
                raise ValueError(
                    f"XPos: {key} = {value!r}. Expected a finite number above 0. The paper uses gamma=0.4, decay_base=512."
                )
        if not _is_number(centre):
            raise ValueError(
                f"XPos: centre = {centre!r}. Expected a finite number, the same in every call. "
                "Pass 0, or the middle of the positions that the model will see."
            )
        check_rotary_settings("XPos", pairing, head_axis, angle_dtype)
        self.head_dim, self.schedule, self.rotary_dim, self.start = head_dim, schedule, rotary_dim, start
        self.gamma, self.decay_base, self.centre = float(gamma), float(decay_base), float(centre)
        self.pairing, self.head_axis, self.angle_dtype = pairing, head_axis, angle_dtype
        self.sequence_axis = -3 if head_axis == -2 else -2
        self._frequencies(torch.device("cpu"))  # a schedule that does not fit says so now

    def extra_repr(self) -> str:
        place = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}, start={self.start}"
        decay = f"gamma={self.gamma:g}, decay_base={self.decay_base:g}, centre={self.centre:g}"
        return f"{self.head_dim}, {self.schedule}, {decay}{place}, pairing={self.pairing!r}"

    def span(self, dtype: torch.dtype) -> int:
        """The farthest ``|position - centre|`` for queries and keys of a dtype.

        The largest magnitude there, ``ζ₀^(-span/decay_base)``, keeps two promises to entries between 1/16 and 16 in
        size: none becomes subnormal (which would round it coarsely) or overflows; and the score of any query with any
        key, the masked future included, is finite in float32 (float64 for float64), since masking infinity by adding
        -infinity gives NaN. The first decides in float16, the second elsewhere.

        Example:
            >>> [XPos(64).span(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
            [2832, 16147, 16147, 143059]
        """
        if not dtype.is_floating_point:
            raise TypeError(f"XPos.span: dtype = {dtype}. Expected a floating dtype. Pass that of queries and keys.")
        scores = torch.float64 if dtype == torch.float64 else torch.float32
        entries = -log(torch.finfo(dtype).tiny * _ROOM)
        products = (log(torch.finfo(scores).max) - log(self.head_dim * _ROOM**2)) / 2
        decay = log1p(1 / self.gamma) / self.decay_base  # ln(1/ζ₀) per position
        return int(min(min(entries, products) / decay, 2.0**62))

    def prepare(self, positions: Tensor, k_positions: Tensor | None = None, *, dtype: torch.dtype = torch.float32) -> Decayed:
        turn, offset = self._turn(positions, dtype)
        k_turn, k_offset = (turn, offset) if k_positions is None else self._turn(k_positions, dtype)
        return Decayed(self._decay(turn, offset, dtype), self._decay(k_turn, -k_offset, dtype), offset, k_offset)

    def transform(self, q: Tensor, k: Tensor, prepared: Decayed) -> tuple[Tensor, Tensor]:
        if not q.shape[-1] == k.shape[-1] == self.head_dim:
            raise ShapeError(
                f"XPos: q of width {q.shape[-1]} and k of width {k.shape[-1]}. Expected {self.head_dim}, the head width it was "
                "built for. To turn a part of wider heads, build it with that head_dim and rotary_dim."
            )
        q_table, k_table, *offsets = prepared
        for x, offset in zip((q, k), offsets, strict=True):
            if self.span(x.dtype) < self.span(q_table.cos.dtype):  # prepare knew the tables' dtype only
                self._check_span(offset, x.dtype)
        return apply_rotary_pair(q, k, q_table, k_table, pairing=self.pairing, head_axis=self.head_axis, start=self.start)

    def _turn(self, positions: Tensor, dtype: torch.dtype) -> tuple[RotaryTable, Tensor]:
        """Cosine and sine before any decay, and the distance to the centre, checked."""
        frequencies = self._frequencies(positions.device if isinstance(positions, Tensor) else torch.device("cpu"))
        turn = rotary_table(positions, frequencies, dtype=torch.float64)
        offset = positions.to(turn.cos.device).to(torch.float64) - self.centre
        self._check_span(offset, dtype)
        return turn, offset

    def _decay(self, turn: RotaryTable, offset: Tensor, dtype: torch.dtype) -> RotaryTable:
        pair = torch.arange(self.rotary_dim // 2, dtype=torch.int64, device=offset.device).to(torch.float64)
        zeta = (2 * pair / self.rotary_dim + self.gamma) / (1 + self.gamma)
        magnitude = (offset[..., None] / self.decay_base * zeta.log()).exp()
        return RotaryTable((turn.cos * magnitude).to(dtype), (turn.sin * magnitude).to(dtype))

    def _check_span(self, offset: Tensor, dtype: torch.dtype) -> None:
        span = self.span(dtype)
        within = offset.abs() <= span
        check_values(
            within,
            lambda: (
                f"XPos: position {offset[~within][0].item() + self.centre:.12g} with centre = {self.centre:g}. Expected positions "
                f"within {span} of the centre, the span of {dtype} with decay_base = {self.decay_base:g}; magnitudes leave the "
                "dtype beyond. Raise decay_base, or put the centre in the middle of the positions."
            ),
        )

    def _frequencies(self, device: torch.device) -> Frequencies:
        home = torch.device("cpu") if device.type == "mps" else device  # no float64 on mps
        return self.schedule.frequencies(self.rotary_dim, dtype=self.angle_dtype, device=home)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
