"""The fixed sine and cosine code of the original Transformer, in every convention that ships."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor

from posenc.core.checks import check_integers
from posenc.core.sinusoid import concatenate, interleave, sinusoid
from posenc.core.sites import InputEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.tokens import Positions, resolve_positions
from posenc.errors import ShapeError

Layout = Literal["interleaved", "concatenated"]
FrequencyRule = Literal["paper", "tensor2tensor"]


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

    Args:
        dim: the model width, 1 or more (4 or more for tensor2tensor).
        base: above 0.

    Shape:
        x: ``[*batch, seq, dim]``; positions: ``[*batch, seq]``, any real numbers.

    Returns:
        ``x`` plus the code, rounded once to ``x``'s dtype.

    Raises:
        ValueError: a width or base out of range, an unknown layout or rule.
        ShapeError: ``x`` of another width, or another number of positions.
        TypeError: half-precision positions.

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
    ) -> None:
        super().__init__()
        if layout not in ("interleaved", "concatenated") or frequency_rule not in ("paper", "tensor2tensor"):
            raise ValueError(
                f"Sinusoidal: layout = {layout!r}, frequency_rule = {frequency_rule!r}. Expected 'interleaved' or "
                "'concatenated', and 'paper' or 'tensor2tensor'. Name the convention of the checkpoint."
            )
        check_integers("Sinusoidal", dim=dim)
        least = 4 if frequency_rule == "tensor2tensor" else 1
        if dim < least:
            raise ValueError(
                f"Sinusoidal: dim = {dim}. Expected {least} or more for the {frequency_rule} rule. Pass the model width."
            )
        if not 0 < base < float("inf"):
            raise ValueError(f"Sinusoidal: base = {base}. Expected a finite number above 0. The paper uses 10000.")
        self.dim, self.layout, self.frequency_rule, self.base = dim, layout, frequency_rule, float(base)

    def extra_repr(self) -> str:
        return f"{self.dim}, layout={self.layout!r}, frequency_rule={self.frequency_rule!r}, base={self.base:g}"

    def inv_freq(self, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
        """The frequencies in radians per position, ``[features]``, highest first."""
        if self.frequency_rule == "paper":
            count, divisor = (self.dim + 1) // 2, self.dim / 2
        else:
            count, divisor = self.dim // 2, self.dim // 2 - 1
        exponent = torch.arange(count, dtype=torch.int64, device=device).to(dtype) / divisor
        return 1.0 / (self.base**exponent)

    def table(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The code of each position, ``[*batch, seq, dim]``."""
        sin, cos = sinusoid(positions, self.inv_freq(device=positions.device), dtype=dtype)
        arrange = interleave if self.layout == "interleaved" else concatenate
        if self.frequency_rule == "paper":
            return arrange(sin, cos, self.dim)
        code = arrange(sin, cos, self.dim - self.dim % 2)
        return torch.nn.functional.pad(code, (0, self.dim % 2))

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ShapeError(f"Sinusoidal: x has width {x.shape[-1]}. Expected {self.dim}. Build it with the model's width.")
        at = resolve_positions(positions, x.shape[-2], name="Sinusoidal", device=x.device)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return (x + self.table(at, dtype=wide)).to(x.dtype)
