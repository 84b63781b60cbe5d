"""Rotary position embedding with learned directions."""

from __future__ import annotations

from math import isfinite, pi
from typing import final

import torch
from torch import Tensor, nn

from posenc.core.apply import apply_rotary_pair
from posenc.core.checks import check_integers
from posenc.core.rotary import Frequencies, Pairing, RotaryTable, rotary_table_nd
from posenc.core.sites import QKEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.tokens import check_positions
from posenc.errors import ShapeError


@final
class MixedRoPE(QKEncoding):
    """RoPE-Mixed: turns every channel pair by a learned frequency vector times the position, one per head and pair.

    The thing people get wrong: half precision and weight decay. The vectors are angles per patch; rounded to bfloat16 they
    are off by a tenth of a radian across a picture, and decay slows every rotation down. Keep this module in float32 when
    the model is cast (bfloat16 is refused) and its parameter in a group without weight decay.

    ``angle[h, i] = position · freqs[:, h, i]``. At first the magnitudes are ``base^(-4i / head_dim)``, at one random
    direction per head for the first half of its pairs and at right angles to it for the second half.

    Args:
        head_dim: the width of a head, a multiple of 4.
        heads: how many heads keys have; queries that share a key share its frequencies, or scores would not depend on offsets.
        base: above 0; 10 in the paper. Larger bases turn more slowly.
        pairing: ``"interleaved"`` as in the released weights, or ``"half"``.
        device, dtype: of the parameter, float32 or float64.

    Shape:
        k: ``[*batch, heads, seq, head_dim]``; q likewise, with a multiple of these heads; positions: ``[*batch, seq, 2]``;
        the parameter ``freqs``: ``[2, heads, head_dim / 2]``, in the order of the positions' axes.

    Returns:
        The rotated queries and keys; dtype, device and stride order kept.

    Raises:
        ValueError: a head_dim that is no multiple of 4, an unknown pairing.
        ShapeError: another head width or number of heads.
        TypeError: half-precision parameters or positions.

    Example:
        >>> rope = MixedRoPE(8, heads=4)
        >>> q = k = torch.ones(1, 4, 6, 8)
        >>> rope(q, k, grid(2, 3).positions)[0].shape
        torch.Size([1, 4, 6, 8])
        >>> rope.freqs.shape
        torch.Size([2, 4, 4])

    Differs from:
        rope-vit: one parameter for all layers there, ``[2, layers, heads · head_dim/2]``, and the column (x) first: with
            `grid`'s rows first, layer l is ``freqs[:, l].unflatten(-1, (heads, -1)).flip(0)``. Class tokens are left out
            there; at the origin (``grid(…, prefix=1)``) they do not turn either. Every query has a key of its own there.
            Angles in float64 here.

    References:
        Heo et al. 2024, "Rotary Position Embedding for Vision Transformer", arXiv:2403.13298.
    """

    spec = EncodingSpec(
        name="mixed",
        summary="turns queries and keys by learned two-axis frequencies",
        build=lambda shape: [MixedRoPE(shape.head_dim, shape.kv_heads)],
        claims=frozenset({"norm-preserving", "composes", "invertible", "any-length", "real-positions"}),
        references=(Reference("Heo et al. 2024", "Rotary Position Embedding for Vision Transformer", "2403.13298"),),
    )
    axes = 2

    def __init__(
        self,
        head_dim: int,
        heads: int,
        *,
        base: float = 10.0,
        pairing: Pairing = "interleaved",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("MixedRoPE", 1, head_dim=head_dim, heads=heads)
        if head_dim % 4:
            raise ValueError(
                f"MixedRoPE: head_dim = {head_dim}. Expected a multiple of 4, since directions come in pairs at right angles. "
                "Choose another head width."
            )
        if isinstance(base, bool) or not isinstance(base, (int, float)) or not (isfinite(base) and base > 0):
            raise ValueError(f"MixedRoPE: base = {base!r}. Expected a finite number above 0. The paper uses 10.")
        if pairing not in ("half", "interleaved"):
            raise ValueError(
                f"MixedRoPE: pairing = {pairing!r}. Expected 'half' or 'interleaved'. Name the one the weights were trained with."
            )
        self.head_dim, self.heads, self.base, self.pairing = head_dim, heads, base, pairing
        self.freqs = nn.Parameter(torch.empty(2, heads, head_dim // 2, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """A random direction per head and the one at right angles to it, with geometric magnitudes along each."""
        device = self.freqs.device
        exponent = torch.arange(0, self.head_dim, 4, dtype=torch.float32, device=device) / self.head_dim
        first = 2 * pi * torch.rand(self.heads, generator=generator, dtype=torch.float32, device=device)
        direction = torch.stack([first, first + pi / 2], dim=-1)[..., None]
        vectors = torch.stack([direction.cos(), direction.sin()]) / self.base**exponent
        with torch.no_grad():
            self.freqs.copy_(vectors.flatten(-2))

    def extra_repr(self) -> str:
        return f"{self.head_dim}, heads={self.heads}, base={self.base}, pairing={self.pairing!r}"

    def prepare(
        self, positions: Tensor, k_positions: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> tuple[RotaryTable, RotaryTable]:
        """The tables of queries and keys, ``[*batch, heads, seq, head_dim / 2]``, from the frequencies as they are now."""
        if self.freqs.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"MixedRoPE: freqs are {self.freqs.dtype}. Expected float32 or float64, since angles from rounded frequencies "
                "are wrong by more with every patch. Call .float() on this module after casting the model, and load its "
                "frequencies again."
            )
        freqs = self.freqs.cpu() if self.freqs.device.type == "mps" else self.freqs  # no float64 on mps
        frequencies = Frequencies(freqs.to(torch.float64).transpose(0, 1))
        table = self._table(positions, frequencies, dtype)
        return table, table if k_positions is None else self._table(k_positions, frequencies, dtype)

    def transform(self, q: Tensor, k: Tensor, prepared: tuple[RotaryTable, RotaryTable]) -> tuple[Tensor, Tensor]:
        """Queries and keys turned by the tables of their heads."""
        groups, over = divmod(q.shape[-3], self.heads) if q.ndim > 2 else (0, 0)
        for name, x, table, heads in (("q", q, prepared[0], groups * self.heads + over), ("k", k, prepared[1], self.heads)):
            length = table.cos.shape[-2]
            if tuple(x.shape[-3:]) != (heads, length, self.head_dim) or over:
                raise ShapeError(
                    f"MixedRoPE: {name} of shape {tuple(x.shape)}. Expected [*batch, heads, {length}, {self.head_dim}] with "
                    f"{self.heads} key heads and a multiple of them in q. Build it with the model's key heads, and prepare the "
                    "tables from the positions of exactly these tokens."
                )
        q_table, k_table = prepared
        if groups > 1:
            q_table = RotaryTable(*(part.repeat_interleave(groups, dim=-3) for part in q_table))
        return apply_rotary_pair(q, k, q_table, k_table, pairing=self.pairing, head_axis=None)

    @staticmethod
    def _table(positions: Tensor, frequencies: Frequencies, dtype: torch.dtype) -> RotaryTable:
        check_positions(positions, name="MixedRoPE")
        per_head = positions.unsqueeze(-3) if positions.ndim > 2 else positions
        return rotary_table_nd(per_head, frequencies, dtype=dtype)
