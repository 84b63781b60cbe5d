"""A trainable row per position."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.core.checks import check_integers, check_values
from posenc.core.sites import InputEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.tokens import Positions, check_integer_positions, resolve_positions
from posenc.errors import ShapeError

PastEnd = Literal["raise", "clamp", "interpolate"]


@final
class Learned(InputEncoding):
    """Adds a learned vector per position: BERT, GPT-2, ViT, OPT, RoBERTa.

    The thing people get wrong: the table's rows and the usable positions differ. OPT and RoBERTa start at row 2, so a
    table of 514 rows serves 512 tokens; here ``num_positions`` is what is usable, ``offset`` the rows before it.

    Position p reads row ``p + offset``. What happens past the end is a choice: ``"raise"``; ``"clamp"`` (every later
    position reads the last row); ``"interpolate"`` (positions 0 … ``length - 1`` are spread evenly over the table,
    first and last row kept, linear in between; real positions allowed). ``length`` is a fixed fact of the model, never
    the length of this call: a stretch that followed the call would change under a key-value cache.

    Args:
        num_positions: usable positions, 1 or more.
        dim: the model width.
        past_end: as above.
        length: the length that ``"interpolate"`` stretches the table to.
        offset: rows before position 0 (2 in OPT, ``padding_idx + 1`` in RoBERTa).
        padding_idx: the row that position -1 (padding) reads; it gets no gradient. ``padded(mask, fill=-1)`` makes
            such positions.

    Shape:
        x: ``[*batch, seq, dim]``; positions: ``[*batch, seq]`` integers.
        weight: ``[num_positions + offset, dim]``, named as in ``nn.Embedding`` so that checkpoints load unchanged.

    Raises:
        ValueError: a position that is negative or past the end. A negative one never wraps around.
        TypeError: real positions, unless interpolating.

    Example:
        >>> Learned(512, 8)(torch.zeros(1, 3, 8), 0).shape
        torch.Size([1, 3, 8])

    Differs from:
        transformers: positions are an argument here; OPT and RoBERTa derive them from the mask or the ids inside.

    References:
        Gehring et al. 2017, arXiv:1705.03122; Devlin et al. 2018, arXiv:1810.04805.
    """

    spec = EncodingSpec(
        name="learned",
        summary="a trained vector per position added to the embeddings",
        build=lambda shape: [Learned(shape.max_length, shape.dim)],
        claims=frozenset(),
        references=(
            Reference("Gehring et al. 2017", "Convolutional Sequence to Sequence Learning", "1705.03122"),
            Reference("Devlin et al. 2018", "BERT: Pre-training of Deep Bidirectional Transformers", "1810.04805"),
        ),
    )

    def __init__(
        self,
        num_positions: int,
        dim: int,
        *,
        past_end: PastEnd = "raise",
        length: int | None = None,
        offset: int = 0,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("Learned", num_positions=num_positions, dim=dim, offset=offset)
        if length is not None:
            check_integers("Learned", length=length)
        if num_positions < 1 or dim < 1 or offset < 0:
            raise ValueError(
                f"Learned: num_positions = {num_positions}, dim = {dim}, offset = {offset}. Expected at least one position "
                "and channel, and no negative offset. Pass the usable length; the table gets offset rows more."
            )
        if past_end not in ("raise", "clamp", "interpolate"):
            raise ValueError(f"Learned: past_end = {past_end!r}. Expected 'raise', 'clamp' or 'interpolate'. Name one.")
        if (length is not None) != (past_end == "interpolate") or (length is not None and length < num_positions):
            raise ValueError(
                f"Learned: length = {length} with past_end = {past_end!r}. Expected length ≥ num_positions = {num_positions} "
                "with 'interpolate' and none otherwise. Pass the context length that the table is stretched to; it is "
                "never taken from the call, which would change cached tokens."
            )
        if padding_idx is not None and not 0 <= padding_idx < offset:
            raise ValueError(
                f"Learned: padding_idx = {padding_idx} with offset = {offset}. Expected one of the {offset} rows before "
                "position 0. RoBERTa has offset=2, padding_idx=1."
            )
        self.num_positions, self.dim, self.past_end, self.length = num_positions, dim, past_end, length
        self.offset, self.padding_idx = offset, padding_idx
        self.weight = nn.Parameter(torch.empty(num_positions + offset, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rows from N(0, 0.02²), the padding row zero."""
        nn.init.normal_(self.weight, std=0.02)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def extra_repr(self) -> str:
        return f"{self.num_positions}, {self.dim}, past_end={self.past_end!r}, offset={self.offset}"

    def rows(self, positions: Tensor) -> Tensor:
        """The row that each position reads (integers), checked: ``[*batch, seq]``."""
        why = "each reads a row of the table"
        check_integer_positions(positions, name="Learned", why=why)
        positions = positions.to(torch.int64)  # a uint8 compares as one, whatever it is compared with
        self._check_range(positions, self.num_positions if self.past_end == "raise" else None)
        rows = positions.clamp(max=self.num_positions - 1) + self.offset
        return rows if self.padding_idx is None else rows.where(positions >= 0, self.padding_idx)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ShapeError(f"Learned: x has width {x.shape[-1]}. Expected {self.dim}. Build it with the model's width.")
        at = resolve_positions(positions, x.shape[-2], name="Learned", device=x.device)
        if self.past_end != "interpolate":
            return (x + F.embedding(self.rows(at), self.weight, padding_idx=self.padding_idx)).to(x.dtype)
        return (x + self._between_rows(at)).to(x.dtype)

    def _between_rows(self, positions: Tensor) -> Tensor:
        assert self.length is not None
        positions = positions if positions.is_floating_point() else positions.to(torch.int64)
        self._check_range(positions, self.length)
        stretch = (self.num_positions - 1) / max(self.length - 1, 1)
        place = positions.clamp(min=0).to(torch.float64) * stretch
        low = place.floor().clamp(max=max(self.num_positions - 2, 0))
        share = (place - low).to(torch.promote_types(self.weight.dtype, torch.float32))[..., None]
        first = low.to(torch.int64)
        second = (first + 1).clamp(max=self.num_positions - 1)
        low_row, high_row = (F.embedding(row + self.offset, self.weight) for row in (first, second))
        between = torch.lerp(low_row.to(share.dtype), high_row.to(share.dtype), share.expand_as(low_row))
        if self.padding_idx is None:
            return between
        return torch.where((positions >= 0)[..., None], between, self.weight[self.padding_idx].detach())

    def _check_range(self, positions: Tensor, end: int | None) -> None:
        least = 0 if self.padding_idx is None else -1
        valid = positions >= least
        if end is not None:
            valid = valid & (positions <= end - 1)
        limit = f"from {least} to {end - 1}" if end is not None else f"of {least} or more"
        check_values(
            valid,
            lambda: (
                f"Learned: position {positions[~valid][0].item()}. Expected positions {limit}; a learned table has no "
                f"rows elsewhere. {self._mend()}"
            ),
        )

    def _mend(self) -> str:
        if self.past_end == "raise":
            return "Shorten the input, or choose past_end='clamp' or 'interpolate'."
        return "Look at how the positions were made; padding takes any valid position."
