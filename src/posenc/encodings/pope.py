"""Polar positions: content decides magnitudes, position decides phases."""

from __future__ import annotations

from math import pi
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.core.checks import check_integers
from posenc.core.rotary import Frequencies, RotaryTable, rotary_table
from posenc.core.sites import QKEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.errors import ShapeError
from posenc.schedules.base import Schedule, check_schedule
from posenc.schedules.geometric import Geometric

Init = Literal["zero", "uniform"]
Tables = tuple[RotaryTable, RotaryTable]


@final
class PoPE(QKEncoding):
    """Makes each channel a complex number: its size from content, its phase from position.

    The thing people get wrong: the width. Every channel becomes two, so queries and keys leave ``2 · head_dim`` wide,
    but the softmax scale stays 1/√head_dim. `positional_attention` sees to that; with `attention` pass ``scale``. A
    `StaticCache` of your own is built with ``head_dim=2 * head_dim, v_dim=head_dim``.

    Channel c of a query at m becomes ``softplus(q_c)·e^(i·m·w_c)``, of a key at n
    ``softplus(k_c)·e^(i·(n·w_c + phase_c))``; real parts first, then imaginary ones. The score is
    ``Σ softplus(q_c)·softplus(k_c)·cos((m - n)·w_c - phase_c)``. There is a frequency per *channel*,
    ``w_c = base^(-c/head_dim)``; RoPE has one per pair. A channel of frequency 0 (`Explicit`) keeps its phase.

    The learned phase is on keys only and is clamped to [-2π, 0]. It starts at the clamp's end, so a step upwards
    leaves it at 0 without a gradient; ``init="uniform"`` starts inside.

    Args:
        head_dim: the width of a head before.
        kv_heads: the heads of the keys, each with phases of its own.
        schedule: `Geometric` (base 10,000) by default; asked for ``2 · head_dim`` channels, which is a pair for each.
        init: of the phases, ``"zero"`` or ``"uniform"`` over [-2π, 0].

    Shape:
        q: ``[*batch, heads, seq, head_dim]``; k: ``[*batch, kv_heads, seq, head_dim]``; positions: ``[*batch, seq]``;
        both results ``2 · head_dim`` wide.
        learned_bias: ``[kv_heads, 1, head_dim]``, named as in x-transformers so that checkpoints load.

    Returns:
        Queries and keys in their dtype, of float32 arithmetic (float64 for float64) rounded once.

    Raises:
        ShapeError: another head width or count; queries and keys of different length without k_positions.
        TypeError: half-precision positions.

    Example:
        >>> q, k = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)
        >>> pope = PoPE(8, kv_heads=2)
        >>> [tuple(x.shape) for x in pope(q, k, 0)]
        [(1, 4, 3, 16), (1, 2, 3, 16)]

    Differs from:
        x-transformers: angles in float64 here; one phase per key head under grouped queries.

    References:
        Gopalakrishnan et al. 2025, "Decoupling the 'What' and 'Where' With Polar Coordinate Positional Embeddings",
        arXiv:2509.10534.
    """

    spec = EncodingSpec(
        name="pope",
        summary="channels as complex numbers: size from content, phase from position",
        build=lambda shape: [PoPE(shape.head_dim, shape.kv_heads)],
        claims=frozenset({"shift-invariant", "any-length", "real-positions"}),
        references=(
            Reference(
                "Gopalakrishnan et al. 2025",
                "Decoupling the 'What' and 'Where' With Polar Coordinate Positional Embeddings",
                "2509.10534",
            ),
        ),
    )

    def __init__(
        self,
        head_dim: int,
        kv_heads: int,
        schedule: Schedule = Geometric(),
        *,
        init: Init = "zero",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("PoPE", 1, head_dim=head_dim, kv_heads=kv_heads)
        check_schedule("PoPE", schedule)
        if init not in ("zero", "uniform"):
            raise ValueError(f"PoPE: init = {init!r}. Expected 'zero' or 'uniform'. Name one.")
        self.head_dim, self.kv_heads, self.schedule, self.init = head_dim, kv_heads, schedule, init
        self.learned_bias = nn.Parameter(torch.empty(kv_heads, 1, head_dim, device=device, dtype=dtype))
        self._frequencies(torch.device("cpu"))  # a schedule that does not fit says so now
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Phases of 0, or uniform over [-2π, 0]."""
        nn.init.uniform_(self.learned_bias, -2 * pi if self.init == "uniform" else 0.0, 0.0)

    def width(self, head_dim: int) -> int:
        return 2 * head_dim

    def extra_repr(self) -> str:
        return f"{self.head_dim}, {self.kv_heads}, {self.schedule}"

    def prepare(self, positions: Tensor, k_positions: Tensor | None = None, *, dtype: torch.dtype = torch.float32) -> Tables:
        """Tables of ``[*batch, heads or 1, seq, head_dim]``, the keys' with their phases in."""
        turn = self._turn(positions)
        cos, sin = turn if k_positions is None else self._turn(k_positions)
        phase = self.learned_bias.to(cos.device, torch.float64).clamp(-2 * pi, 0.0)
        ahead, aside = phase.cos(), phase.sin()
        k_turn = RotaryTable(cos * ahead - sin * aside, sin * ahead + cos * aside)
        q_table, k_table = (RotaryTable(table.cos.to(dtype), table.sin.to(dtype)) for table in (turn, k_turn))
        return q_table, k_table

    def transform(self, q: Tensor, k: Tensor, prepared: Tables) -> tuple[Tensor, Tensor]:
        if not q.shape[-1] == k.shape[-1] == self.head_dim or k.ndim < 3 or k.shape[-3] != self.kv_heads:
            raise ShapeError(
                f"PoPE: q {tuple(q.shape)} and k {tuple(k.shape)}. Expected [*batch, heads, seq, {self.head_dim}] and "
                f"[*batch, {self.kv_heads}, seq, {self.head_dim}]. Build it with the model's head_dim and kv_heads."
            )
        return _polar(q, prepared[0], "q"), _polar(k, prepared[1], "k")

    def _turn(self, positions: Tensor) -> RotaryTable:
        frequencies = self._frequencies(positions.device if isinstance(positions, Tensor) else torch.device("cpu"))
        cos, sin = rotary_table(positions, frequencies, dtype=torch.float64)
        return RotaryTable(cos.unsqueeze(-3), sin.unsqueeze(-3))

    def _frequencies(self, device: torch.device) -> Frequencies:
        home = torch.device("cpu") if device.type == "mps" else device  # no float64 on mps
        return self.schedule.frequencies(2 * self.head_dim, device=home)


def _polar(x: Tensor, table: RotaryTable, name: str) -> Tensor:
    shape = tuple(table.cos.shape)
    spreads = len(shape) <= x.ndim and all(a in (1, b) for a, b in zip(reversed(shape), reversed(x.shape), strict=False))
    if not spreads or shape[-2] != x.shape[-2]:
        raise ShapeError(
            f"PoPE: a table of shape {shape} for {name} of shape {tuple(x.shape)}. Expected one that spreads over it. "
            "Prepare the positions of exactly these tokens."
        )
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # torch's own threshold of 20 is an error of 2e-9, too much for float64; past 40 softplus(x) is x in any dtype.
    # Contiguous, because its vectorised and its strided kernels differ in the last bit.
    magnitude = F.softplus(x.to(wide).contiguous(), threshold=40.0)
    return torch.cat([(magnitude * part.to(wide)).to(x.dtype) for part in table], dim=-1)
