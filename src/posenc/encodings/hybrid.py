"""Some channels fixed, the others learned."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.core.checks import check_integers, check_values
from posenc.core.conventions import FrequencyRule, Layout, check_convention, code, ladder, least_width
from posenc.core.rotary import Frequencies
from posenc.core.sites import InputEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.tokens import Positions, check_integer_positions, resolve_positions
from posenc.errors import ShapeError

PastEnd = Literal["raise", "clamp"]


@final
class Hybrid(InputEncoding):
    """Adds the fixed sinusoidal code in the first channels and a learned row per position in the others.

    The thing people get wrong: whose width is in the frequencies. Here the fixed block is a whole `Sinusoidal` of its own
    width, ``base^(-2i/fixed)``, bit for bit; the first channels of a wider code, ``base^(-2i/dim)``, would lack the slow
    half of the ladder. No paper settles this.

    Rows start at N(0, 0.02²), far below the fixed block's 1/√2, which the model therefore hears first.

    Args:
        dim: the model width.
        fixed: how many channels are fixed, from 1 (4 for tensor2tensor) to ``dim - 1``.
        length: positions that have a learned row.
        layout, frequency_rule, base: of the fixed block, as in `Sinusoidal`.
        past_end: ``"raise"``, or ``"clamp"``: the fixed block counts on and every later position reads the last row.
            Stretching the rows over a longer text, as `Learned` can, would let the two blocks count differently.

    Shape:
        x: ``[*batch, seq, dim]``; positions: ``[*batch, seq]`` integers.
        weight: ``[length, dim - fixed]``.

    Returns:
        ``x`` plus the code, rounded once to ``x``'s dtype.

    Raises:
        ValueError: a block that is empty or wider than the model; a position that is negative or past the end.
        TypeError: real positions.
        ShapeError: ``x`` of another width, or another number of positions.

    Example:
        >>> hybrid = Hybrid(8, fixed=4, length=16)
        >>> hybrid(torch.zeros(2, 8), 0)[:, :4]
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]], grad_fn=<SliceBackward0>)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, for both kinds of code.
    """

    spec = EncodingSpec(
        name="hybrid",
        summary="fixed sines and cosines in half of the channels, learned rows in the others",
        build=lambda shape: [Hybrid(shape.dim, shape.dim // 2, shape.max_length)],
        claims=frozenset(),
        references=(Reference("Vaswani et al. 2017", "Attention Is All You Need", "1706.03762"),),
    )

    def __init__(
        self,
        dim: int,
        fixed: int,
        length: int,
        *,
        layout: Layout = "interleaved",
        frequency_rule: FrequencyRule = "paper",
        base: float = 10_000.0,
        past_end: PastEnd = "raise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("Hybrid", 1, dim=dim, length=length)
        check_integers("Hybrid", fixed=fixed)
        check_convention("Hybrid", layout, frequency_rule, base)
        least = least_width(frequency_rule)
        if not least <= fixed < dim:
            raise ValueError(
                f"Hybrid: fixed = {fixed} of dim = {dim} channels. Expected {least} to {dim - 1}. Sinusoidal fixes all "
                "channels, Learned none."
            )
        if past_end not in ("raise", "clamp"):
            raise ValueError(f"Hybrid: past_end = {past_end!r}. Expected 'raise' or 'clamp'. Name one.")
        self.dim, self.fixed, self.length, self.past_end = dim, fixed, length, past_end
        self.layout, self.frequency_rule, self.base = layout, frequency_rule, float(base)
        self.weight = nn.Parameter(torch.empty(length, dim - fixed, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rows from N(0, 0.02²)."""
        nn.init.normal_(self.weight, std=0.02)

    def extra_repr(self) -> str:
        settings = f"layout={self.layout!r}, frequency_rule={self.frequency_rule!r}, base={self.base:g}"
        return f"{self.dim}, fixed={self.fixed}, length={self.length}, {settings}, past_end={self.past_end!r}"

    def table(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The fixed block at each position, ``[*batch, seq, fixed]``."""
        frequencies = Frequencies(ladder(self.fixed, self.frequency_rule, self.base, device=positions.device))
        return code(positions, frequencies, self.fixed, layout=self.layout, dtype=dtype)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ShapeError(f"Hybrid: x has width {x.shape[-1]}. Expected {self.dim}. Build it with the model's width.")
        at = resolve_positions(positions, x.shape[-2], name="Hybrid", device=x.device)
        check_integer_positions(at, name="Hybrid", why="each reads a row of the learned block")
        at = at.to(torch.int64)  # a uint8 compares as one, whatever it is compared with
        self._check_range(at)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        still = x[..., : self.fixed] + self.table(at, dtype=wide)
        moving = x[..., self.fixed :] + F.embedding(at.clamp(max=self.length - 1), self.weight)
        return torch.cat([still.to(x.dtype), moving.to(x.dtype)], dim=-1)

    def _check_range(self, at: Tensor) -> None:
        valid = at >= 0
        limit = "of 0 or more"
        mend = "Look at how the positions were made; padding takes any valid position."
        if self.past_end == "raise":
            valid = valid & (at < self.length)
            limit = f"from 0 to {self.length - 1}"
            mend = "Shorten the input, or choose past_end='clamp'."
        check_values(
            valid,
            lambda: (
                f"Hybrid: position {at[~valid][0].item()}. Expected positions {limit}; the learned block has no rows elsewhere. {mend}"
            ),
        )
