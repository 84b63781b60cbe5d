"""Relative vectors, learned for each clamped distance, added to keys and, if asked for, to values."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.core.autocast import without_autocast
from posenc.core.bias import QueryTableBias, ScoreBias
from posenc.core.checks import check_integers, check_softmax_scale
from posenc.core.mask import FULL, Mask
from posenc.core.sites import ContentScoreEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.value_table import ValueTable
from posenc.errors import ShapeError


@final
class ShawRelative(ContentScoreEncoding):
    """Adds ``scale · (query · a[distance])`` to each score: a learned vector per distance, clamped, shared by all heads.

    The thing people get wrong: the sign. Row r belongs to ``key - query = r - max_distance``, as in the paper and in
    transformers, so row 0 is the farthest *past* key; the rest of posenc counts ``query - key``. A table read backwards
    fits every shape. The second thing: the term is inside the paper's 1/√d, so it is scaled here, once.

    The paper's second term, vectors added to the *values*, comes with ``value_dim``. It needs the attention weights, which
    fused kernels never form, so only the backend ``"reference"`` serves it. The paper's own ablation finds nothing lost
    without it, and Wav2Vec2-BERT has none.

    Farther keys than ``max_distance`` all read the last vector of their side, so it runs at any length, and cannot tell
    far distances apart.

    Args:
        head_dim: the width of a head as it enters attention.
        max_distance: the farthest distance with a vector of its own, k in the paper; of past keys when ``future`` is given.
        future: the same for future keys, ``max_distance`` by default; 0 for a decoder, which sees none. Wav2Vec2-BERT
            has 64 and 8.
        value_dim: the width of values, to add vectors to them too; ``None`` adds none.
        scale: the softmax scale that attention uses, 1/√head_dim by default; give both the same.

    Shape:
        q: ``[*batch, heads, seq, head_dim]``; k: any keys; positions: ``[*batch, seq]`` integers.
        distance_embedding.weight: ``[max_distance + future + 1, head_dim]``, named as in transformers' Wav2Vec2-BERT.
        value_embedding.weight: ``[max_distance + future + 1, value_dim]``, rows in the same order.

    Returns:
        A `QueryTableBias` in float32 or wider, and no state: a cache keeps nothing for it.

    Raises:
        TypeError: a width or distance that is no integer; real positions.
        ValueError: a width below 1, a negative distance, a scale that is not above 0.
        ShapeError: queries of another width.

    Example:
        >>> shaw, q = ShawRelative(8, 16), torch.ones(1, 2, 5, 8)
        >>> bias, _ = shaw(q, q, torch.arange(5))
        >>> materialize(bias, torch.arange(5)).shape
        torch.Size([1, 2, 5, 5])

    Differs from:
        transformers (Wav2Vec2-BERT): the same numbers; the table is read once per query there, ``[seq, seq, head_dim]``.
        tensor2tensor: forms the values' term as a vector per query and key, ``[q, k, value_dim]``; here the weights of equal
        distances are summed first.

    References:
        Shaw et al. 2018, "Self-Attention with Relative Position Representations", arXiv:1803.02155.
    """

    spec = EncodingSpec(
        name="shaw",
        summary="adds the query's product with a learned vector per distance to the scores",
        build=lambda shape: [ShawRelative(shape.head_dim, 16, future=0 if shape.causal else 16)],
        claims=frozenset({"shift-invariant", "any-length"}),
        references=(Reference("Shaw et al. 2018", "Self-Attention with Relative Position Representations", "1803.02155"),),
    )

    def __init__(
        self,
        head_dim: int,
        max_distance: int,
        *,
        future: int | None = None,
        value_dim: int | None = None,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        future = max_distance if future is None else future
        check_integers("ShawRelative", 1, head_dim=head_dim)
        check_integers("ShawRelative", 0, max_distance=max_distance, future=future)
        scale = head_dim**-0.5 if scale is None else scale
        check_softmax_scale("ShawRelative", scale, "1/√head_dim")
        self.head_dim, self.max_distance, self.future, self.scale = head_dim, max_distance, future, scale
        span = max_distance + future + 1
        self.distance_embedding = nn.Embedding(span, head_dim, device=device, dtype=dtype)
        self.value_embedding: nn.Embedding | None = None
        if value_dim is not None:
            check_integers("ShawRelative", 1, value_dim=value_dim)
            self.value_embedding = nn.Embedding(span, value_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Vectors from N(0, 0.02²)."""
        nn.init.normal_(self.distance_embedding.weight, std=0.02)
        if self.value_embedding is not None:
            nn.init.normal_(self.value_embedding.weight, std=0.02)

    def extra_repr(self) -> str:
        values = "" if self.value_embedding is None else f", value_dim={self.value_embedding.embedding_dim}"
        return f"{self.head_dim}, {self.max_distance}, future={self.future}{values}, scale={self.scale:g}"

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
        if q.shape[-1] != self.head_dim:
            raise ShapeError(
                f"ShawRelative: q of width {q.shape[-1]}. Expected {self.head_dim}, the head width it was built for. Encodings that "
                "widen queries and keys do not go with it."
            )
        weight = self.distance_embedding.weight
        wide = torch.promote_types(torch.promote_types(q.dtype, weight.dtype), torch.float32)
        by_distance = weight.flip(0)  # rows count key - query, the bias counts query - key
        with without_autocast(q.device):
            logits = F.linear(q.to(wide) * self.scale, by_distance.to(wide))
        return QueryTableBias(logits, self.future), None

    def value_table(self) -> ValueTable | None:
        """The vectors added to the values, for attention; ``None`` without ``value_dim``."""
        if self.value_embedding is None:
            return None
        return ValueTable(self.value_embedding.weight.flip(0), self.future)
