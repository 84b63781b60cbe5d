"""Relative positions of Transformer-XL: projected sinusoids of the distance, and two learned queries."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.core.autocast import without_autocast
from posenc.core.bias import KeyBias, QueryTableBias, ScoreBias
from posenc.core.checks import check_integers, check_softmax_scale
from posenc.core.conventions import Layout, check_convention, code, ladder
from posenc.core.mask import FULL, Mask
from posenc.core.rotary import Frequencies
from posenc.core.sites import ContentScoreEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.errors import ShapeError


@final
class TransformerXL(ContentScoreEncoding):
    """Adds ``scale · ((query + v) · W R[distance] + u · key)``: R is the sinusoidal code of the distance, W and the two
    queries u and v are learned.

    The thing people get wrong: the table. The papers' shift trick on a table of as many rows as tokens is right below
    the diagonal only; an encoder needs future distances too, and gets other rows' numbers there. Here the span is
    explicit, distances are looked up, and nothing is shifted. The second thing: every term is inside the paper's 1/√d,
    so it is scaled here, once.

    ``distance = query - key``; rows of R run over ``-future … max_distance``, and farther keys read the last row of
    their side (``clamp_len`` in the authors' code). Up to there R is exact, from float64 angles, with gaps, packing and
    caches; for the paper without a clamp make ``max_distance`` the longest distance that will occur. A call holds
    ``max_distance + future + 1`` numbers per query and head.

    Args:
        dim: the width of R, even: the model width in all released models.
        heads: of queries; keys may have fewer (grouped).
        head_dim: the width of a head as it enters attention.
        max_distance: the farthest distance with a code of its own; of past keys when ``future`` is given.
        future: the same for future keys, ``max_distance`` by default; 0 for a decoder, which sees none.
        layout: "concatenated" (the paper, XLNet) or "interleaved" (Parakeet) sines and cosines.
        scale: the softmax scale that attention uses, 1/√head_dim by default; give both the same.

    Shape:
        q: ``[*batch, heads, seq, head_dim]``; k: ``[*batch, kv_heads, keys, head_dim]``; positions: ``[*batch, seq]``
        integers. Named as in the authors' code: r_net.weight (W) ``[heads · head_dim, dim]``, r_w_bias (u) and r_r_bias
        (v) ``[heads, head_dim]``. From XLNet: ``r_net.weight = r.flatten(1).T``. From Parakeet: relative_k_proj, bias_u
        and bias_v. Where all layers share u and v, assign one layer's to the others.

    Returns:
        The sum of a `QueryTableBias` and a `KeyBias` in float32 or wider, and no state: a cache keeps nothing for it.

    Raises:
        TypeError: a width or distance that is no integer; real positions.
        ValueError: a width below 1, an odd dim, a negative distance, an unknown layout, a scale that is not above 0.
        ShapeError: queries or keys of another width or head count.

    Example:
        >>> encoding, q = TransformerXL(16, 2, 8, 4), torch.ones(1, 2, 5, 8)
        >>> bias, _ = encoding(q, q, torch.arange(5))
        >>> materialize(bias, torch.arange(5)).shape
        torch.Size([1, 2, 5, 5])

    Differs from:
        transformers (XLNet): R from float32 angles there; its segment term (r_s_bias) is not here.

    References:
        Dai et al. 2019, "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", arXiv:1901.02860.
    """

    spec = EncodingSpec(
        name="transformer-xl",
        summary="adds products of query and key with projected sinusoids of the distance to the scores",
        build=lambda shape: [
            TransformerXL(
                shape.dim + shape.dim % 2, shape.heads, shape.head_dim, shape.max_length, future=0 if shape.causal else None
            )
        ],
        claims=frozenset({"shift-invariant", "any-length"}),
        references=(
            Reference(
                "Dai et al. 2019", "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", "1901.02860"
            ),
        ),
    )

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        max_distance: int,
        *,
        future: int | None = None,
        layout: Layout = "concatenated",
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        future = max_distance if future is None else future
        check_integers("TransformerXL", 1, dim=dim, heads=heads, head_dim=head_dim)
        check_integers("TransformerXL", 0, max_distance=max_distance, future=future)
        check_convention("TransformerXL", layout, "paper", 10_000.0)
        if dim % 2:
            raise ValueError(
                f"TransformerXL: dim = {dim}. Expected an even width, a sine and a cosine of each frequency. Add a channel."
            )
        scale = head_dim**-0.5 if scale is None else scale
        check_softmax_scale("TransformerXL", scale, "1/√head_dim")
        self.dim, self.heads, self.head_dim = dim, heads, head_dim
        self.max_distance, self.future, self.layout, self.scale = max_distance, future, layout, scale
        self.r_net = nn.Linear(dim, heads * head_dim, bias=False, device=device, dtype=dtype)
        self.r_w_bias = nn.Parameter(torch.empty(heads, head_dim, device=device, dtype=dtype))
        self.r_r_bias = nn.Parameter(torch.empty(heads, head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All from N(0, 0.02²)."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, {self.heads}, {self.head_dim}, {self.max_distance}, future={self.future}, "
            f"layout={self.layout!r}, scale={self.scale:g}"
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        k_positions: Tensor | None = None,
        *,
        x: Tensor | None = None,
        state: Any = None,
        mask: Mask = FULL,
    ) -> tuple[ScoreBias, Any]:
        kv_heads = k.shape[-3]
        if not q.shape[-1] == k.shape[-1] == self.head_dim or q.shape[-3] != self.heads or self.heads % kv_heads:
            raise ShapeError(
                f"TransformerXL: q of {q.shape[-3]} heads of width {q.shape[-1]} and k of {kv_heads} of width {k.shape[-1]}. "
                f"Expected {self.heads} heads of width {self.head_dim}, and as many key heads or a divisor. Build it with "
                "the attention's shape; encodings that widen queries and keys do not go with it."
            )
        weight = self.r_net.weight
        wide = torch.promote_types(torch.promote_types(q.dtype, weight.dtype), torch.float32)
        with without_autocast(q.device):
            r = F.linear(self._codes(wide, weight.device), weight.to(wide)).unflatten(-1, (self.heads, self.head_dim))
            queries = (q.to(wide) + self.r_r_bias.to(wide)[:, None]) * self.scale
            by_distance = queries @ r.permute(1, 2, 0)
            learned = (self.r_w_bias.to(wide) * self.scale).unflatten(0, (kv_heads, -1))
            by_key = (k.to(wide) @ learned.mT).mT.flatten(-3, -2)
        return QueryTableBias(by_distance, self.future) + KeyBias(by_key), None

    def _codes(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """R, a row for each distance from ``-future`` to ``max_distance``: ``[span, dim]``."""
        distances = torch.arange(-self.future, self.max_distance + 1, dtype=torch.int64, device=device)
        home = "cpu" if device.type == "mps" else device  # no float64 on mps
        return code(
            distances, Frequencies(ladder(self.dim, "paper", 10_000.0, device=home)), self.dim, layout=self.layout, dtype=dtype
        )
