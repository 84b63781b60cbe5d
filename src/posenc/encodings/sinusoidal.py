"""The fixed sine and cosine code of the original Transformer, in every convention that ships."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from posenc.core.checks import check_integers
from posenc.core.conventions import FrequencyRule as FrequencyRule
from posenc.core.conventions import Layout as Layout
from posenc.core.conventions import check_convention, code, ladder, least_width
from posenc.core.rotary import Frequencies
from posenc.core.sites import InputEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.tokens import Positions, resolve_positions
from posenc.errors import ShapeError
from posenc.schedules.base import Schedule, check_schedule


@final
class Sinusoidal(InputEncoding):
    """Adds sines and cosines of the position at geometrically spaced frequencies.

    The thing people get wrong: two independent conventions ship under one name. The *layout* only permutes channels;
    the *frequency rule* changes the numbers. Checkpoints need the pair they were trained with: interleaved + paper
    (DistilBERT), concatenated + paper (Marian, Pegasus, RoFormer), concatenated + tensor2tensor (Whisper, M2M-100).

    ``paper``: ``inv_freq[i] = base^(-2i/dim)``, i = 0 … ⌈dim/2⌉ - 1.
    ``tensor2tensor``: ``inv_freq[i] = base^(-i/(⌊dim/2⌋ - 1))``, the last one exactly ``1/base``.
    ``interleaved``: sin, cos, sin, cos, …; ``concatenated``: all sines, then all cosines. Odd widths: the paper rule
    has one sine more than cosines; the tensor2tensor rule ends with a zero channel.

    The paper multiplies token embeddings by √dim before adding; leave that out and the code (norm √(dim/2)) drowns
    embeddings drawn with a small deviation. The `posenc.Transformer` does it.

    Positions are any real numbers. For audio give them in seconds (`seconds`) and choose the frequencies in Hz
    (``schedule=Hertz(…)``): the same instant then has the same code at any sample rate and hop.

    Args:
        dim: the model width, 1 or more (4 or more for tensor2tensor; even with a schedule).
        base: above 0.
        schedule: the frequencies, instead of ``frequency_rule`` and ``base``.

    Shape:
        x: ``[*batch, seq, dim]``; positions: ``[*batch, seq]``, any real numbers.

    Returns:
        ``x`` plus the code, rounded once to ``x``'s dtype.

    Raises:
        ValueError: a width or base out of range, an unknown layout or rule, a rule or base beside a schedule.
        ShapeError: ``x`` of another width, or another number of positions.
        TypeError: half-precision positions; a schedule that is none.

    Example:
        >>> Sinusoidal(4)(torch.zeros(2, 4), 0)
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])

    Differs from:
        transformers: angles in float64 there and here, but several of its models build the table in float32.
        tensor2tensor: a width below 4 is refused (its rule divides by zero).

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762.
    """

    spec = EncodingSpec(
        name="sinusoidal",
        summary="fixed sines and cosines added to the embeddings",
        build=lambda shape: [Sinusoidal(shape.dim)],
        claims=frozenset({"parameter-free", "any-length", "real-positions"}),
        references=(Reference("Vaswani et al. 2017", "Attention Is All You Need", "1706.03762"),),
    )

    def __init__(
        self,
        dim: int,
        *,
        layout: Layout = "interleaved",
        frequency_rule: FrequencyRule = "paper",
        base: float = 10_000.0,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        check_integers("Sinusoidal", dim=dim)
        check_convention("Sinusoidal", layout, frequency_rule, base)
        least = least_width(frequency_rule)
        if dim < least:
            raise ValueError(
                f"Sinusoidal: dim = {dim}. Expected {least} or more for the {frequency_rule} rule. Pass the model width."
            )
        self.dim, self.layout, self.frequency_rule, self.base = dim, layout, frequency_rule, float(base)
        self.schedule = schedule
        if schedule is not None:
            check_schedule("Sinusoidal", schedule)
            if (frequency_rule, base) != ("paper", 10_000.0):
                raise ValueError(
                    f"Sinusoidal: frequency_rule = {frequency_rule!r}, base = {base:g} beside a schedule. Expected one or the "
                    "other, since a schedule is the frequencies. Leave rule and base out."
                )
            if dim % 2:
                raise ValueError(
                    f"Sinusoidal: dim = {dim} with a schedule, which makes pairs. Expected an even width. Add a channel."
                )
            schedule.frequencies(dim)  # one that does not fit says so now

    def extra_repr(self) -> str:
        frequencies = f"frequency_rule={self.frequency_rule!r}, base={self.base:g}"
        if self.schedule is not None:
            frequencies = f"schedule={self.schedule}"
        return f"{self.dim}, layout={self.layout!r}, {frequencies}"

    def inv_freq(self, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
        """The frequencies in radians per unit of position, ``[features]``, highest first."""
        return self._frequencies(dtype, device).inv_freq

    def table(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The code of each position, ``[*batch, seq, dim]``."""
        return code(positions, self._frequencies(torch.float64, positions.device), self.dim, layout=self.layout, dtype=dtype)

    def _frequencies(self, dtype: torch.dtype, device: torch.device | str | None) -> Frequencies:
        if self.schedule is not None:
            return self.schedule.frequencies(self.dim, dtype=dtype, device=device)
        return Frequencies(ladder(self.dim, self.frequency_rule, self.base, dtype=dtype, device=device))

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ShapeError(f"Sinusoidal: x has width {x.shape[-1]}. Expected {self.dim}. Build it with the model's width.")
        at = resolve_positions(positions, x.shape[-2], name="Sinusoidal", device=x.device)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return (x + self.table(at, dtype=wide)).to(x.dtype)
