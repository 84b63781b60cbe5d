"""Disentangled attention of DeBERTa: content meets position from both sides."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.core.autocast import without_autocast
from posenc.core.bias import KeyTableBias, QueryTableBias, ScoreBias, SumBias
from posenc.core.checks import check_integers, check_softmax_scale
from posenc.core.mask import FULL, Mask
from posenc.core.sites import ContentScoreEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.errors import ShapeError

Term = Literal["c2p", "p2c"]
"""``"c2p"``: the query meets the distance's key vector; ``"p2c"``: the key meets the distance's query vector."""


@final
class DeBERTa(ContentScoreEncoding):
    """Adds ``scale · (query · K[distance] + key · Q[distance])``: a key vector and a query vector for each distance, both
    projected from one table.

    The thing people get wrong: the scale. DeBERTa divides *all* terms, content to content too, by
    ``√(head_dim · (1 + terms))``: √(3d) with both. So attention needs this encoding's ``scale``, or the three terms
    weigh differently: ``positional_attention(…, encodings=[deberta], scale=deberta.scale)``. A model that attends with
    1/√d gives ``scale=head_dim**-0.5`` here.

    The second thing: which distance the second term reads. The paper writes δ(key, query); the released code, and every
    checkpoint, reads the *same* row as the first term, that of ``query - key``. So does this.

    Row ``span + distance`` of ``2 · span`` rows belongs to a distance, so the past has one row fewer than the future:
    distances from span - 1 on share the last row, those up to -span the first. Without buckets span is ``max_distance``
    (DeBERTa v1); with them it is their number, half of them hold one distance each, the others are spaced
    logarithmically up to ``max_distance - 1`` (v2, v3). Bucket edges are exact integers here, from no logarithm.

    Args:
        dim: the width of the table, the model width.
        heads: of queries; keys may have fewer (grouped).
        head_dim: the width of a head as it enters attention.
        max_distance: max_relative_positions in transformers, 512 in all released models.
        buckets: position_buckets in transformers, 256 in v2 and v3; even, 4 or more; ``None`` for a row per distance.
        terms: pos_att_type in transformers: "c2p", "p2c" or both.
        norm: "layer_norm" normalises the table's rows before they are projected (norm_rel_ebd in v2 and v3).
        scale: the softmax scale that attention uses, ``1/√(head_dim · (1 + terms))`` by default; give both the same.

    Shape:
        q: ``[*batch, heads, seq, head_dim]``; k: ``[*batch, kv_heads, keys, head_dim]``; positions: ``[*batch, seq]``
        integers. Named as in transformers' DeBERTa-v2: rel_embeddings.weight ``[2 · span, dim]``, pos_key_proj (for c2p)
        and pos_query_proj (for p2c) with weight ``[heads · head_dim, dim]`` and bias; LayerNorm. In v1 they are pos_proj,
        whose bias is 0, and pos_q_proj.

        Modules are shared by assignment. One table for all layers, as in DeBERTa: ``second.rel_embeddings =
        first.rel_embeddings`` (LayerNorm likewise). Content projections in place of their own, share_att_key in v2 and
        v3: ``encoding.pos_key_proj, encoding.pos_query_proj = attention.key_proj, attention.query_proj``.

    Returns:
        A `QueryTableBias`, a `KeyTableBias` or the sum of both, in float32 or wider, and no state: a cache keeps nothing
        for it. Each holds ``2 · max_distance`` numbers per query or key and head.

    Raises:
        TypeError: a count that is no integer; real positions.
        ValueError: a count below 1, a bucket rule without room, unknown or no terms, an unknown norm, a scale that is
            not above 0.
        ShapeError: queries or keys of another width or head count.

    Example:
        >>> deberta, q = DeBERTa(16, 2, 8, 4), torch.ones(1, 2, 5, 8)
        >>> bias, _ = deberta(q, q, torch.arange(5))
        >>> materialize(bias, torch.arange(5)).shape
        torch.Size([1, 2, 5, 5])

    Differs from:
        the paper: the row of the second term, as above.
        transformers: bucket edges from a float32 logarithm there (equal for the shipped settings); the table's dropout is
            not here; with fewer queries than keys it swaps the two bucket settings, here nothing changes.

    References:
        He et al. 2021, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", arXiv:2006.03654.
    """

    spec = EncodingSpec(
        name="deberta",
        summary="adds products of query and key with a learned vector per distance, each its own, to the scores",
        build=lambda shape: [DeBERTa(shape.dim, shape.heads, shape.head_dim, shape.max_length, scale=shape.head_dim**-0.5)],
        claims=frozenset({"shift-invariant", "any-length"}),
        references=(Reference("He et al. 2021", "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", "2006.03654"),),
    )

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        max_distance: int,
        *,
        buckets: int | None = None,
        terms: Iterable[Term] = ("c2p", "p2c"),
        norm: Literal["none", "layer_norm"] = "none",
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("DeBERTa", 1, dim=dim, heads=heads, head_dim=head_dim, max_distance=max_distance)
        self.terms: tuple[Term, ...] = tuple(terms)
        if not self.terms or len({*self.terms}) < len(self.terms) or not {*self.terms} <= {"c2p", "p2c"}:
            raise ValueError(
                f"DeBERTa: terms = {terms!r}. Expected 'c2p', 'p2c' or both, each once. Pass the checkpoint's pos_att_type."
            )
        if norm not in ("none", "layer_norm"):
            raise ValueError(f"DeBERTa: norm = {norm!r}. Expected 'none' or 'layer_norm'. Pass the checkpoint's norm_rel_ebd.")
        if buckets is not None:
            _check_buckets(buckets, max_distance)
        scale = (head_dim * (1 + len(self.terms))) ** -0.5 if scale is None else scale
        check_softmax_scale("DeBERTa", scale, "1/√(head_dim · (1 + terms))")
        self.dim, self.heads, self.head_dim, self.max_distance = dim, heads, head_dim, max_distance
        self.buckets, self.norm, self.scale = buckets, norm, scale
        self._row_of = None if buckets is None else _rows(buckets, max_distance)
        span = max_distance if buckets is None else buckets
        self.rel_embeddings = nn.Embedding(2 * span, dim, device=device, dtype=dtype)
        if norm == "layer_norm":
            self.LayerNorm = nn.LayerNorm(dim, eps=1e-7, device=device, dtype=dtype)
        if "c2p" in self.terms:
            self.pos_key_proj = nn.Linear(dim, heads * head_dim, device=device, dtype=dtype)
        if "p2c" in self.terms:
            self.pos_query_proj = nn.Linear(dim, heads * head_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights from N(0, 0.02²), biases 0; the norm starts as plain normalisation."""
        for module in self.children():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            if isinstance(module, (nn.Embedding, nn.Linear)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, {self.heads}, {self.head_dim}, {self.max_distance}, buckets={self.buckets}, terms={self.terms}, "
            f"norm={self.norm!r}, scale={self.scale:g}"
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
                f"DeBERTa: q of {q.shape[-3]} heads of width {q.shape[-1]} and k of {kv_heads} of width {k.shape[-1]}. "
                f"Expected {self.heads} heads of width {self.head_dim}, and as many key heads or a divisor. Build it with "
                "the attention's shape; encodings that widen queries and keys do not go with it."
            )
        wide = torch.promote_types(torch.promote_types(q.dtype, self.rel_embeddings.weight.dtype), torch.float32)
        terms: list[ScoreBias] = []
        with without_autocast(q.device):
            table = self._table(wide)
            if "c2p" in self.terms:
                keys = self._vectors(self.pos_key_proj, table)
                terms.append(QueryTableBias(self._by_distance((q.to(wide) * self.scale) @ keys.mT), self.max_distance))
            if "p2c" in self.terms:
                queries = self._vectors(self.pos_query_proj, table).unflatten(0, (kv_heads, -1))
                products = ((k.to(wide) * self.scale).unsqueeze(-3) @ queries.mT).flatten(-4, -3)
                terms.append(KeyTableBias(self._by_distance(products), self.max_distance))
        return terms[0] if len(terms) == 1 else SumBias(tuple(terms)), None

    def _table(self, dtype: torch.dtype) -> Tensor:
        table = self.rel_embeddings.weight.to(dtype)
        if self.norm == "none":
            return table
        layer = self.LayerNorm
        normal: Tensor = F.layer_norm(table, layer.normalized_shape, layer.weight.to(dtype), layer.bias.to(dtype), layer.eps)
        return normal

    def _vectors(self, projection: nn.Linear, table: Tensor) -> Tensor:
        """A vector per head and row, ``[heads, 2 · span, head_dim]``."""
        bias = None if projection.bias is None else projection.bias.to(table.dtype)  # a shared one may have none
        projected = F.linear(table, projection.weight.to(table.dtype), bias)
        vectors: Tensor = projected.unflatten(-1, (self.heads, self.head_dim)).transpose(0, 1)
        return vectors

    def _by_distance(self, by_row: Tensor) -> Tensor:
        """Products with each row, spread over the distances from ``-max_distance`` to ``max_distance - 1``."""
        if self._row_of is None:
            return by_row
        return by_row.index_select(-1, torch.tensor(self._row_of, dtype=torch.int64, device=by_row.device))


def _check_buckets(buckets: int, max_distance: int) -> None:
    check_integers("DeBERTa", buckets=buckets)
    if buckets < 4 or buckets % 2 or max_distance < buckets // 2 + 2:
        raise ValueError(
            f"DeBERTa: buckets = {buckets}, max_distance = {max_distance}. Expected an even count of 4 or more, and "
            "max_distance - 1 above its half, which hold one distance each. DeBERTa-v3 has 256 and 512."
        )


def _rows(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The row of each distance from ``-max_distance`` to ``max_distance - 1``, in exact integer arithmetic.

    With h = buckets/2, distances up to h have buckets of their own; x beyond has ``h + ⌈log(x/h) / log(far/h) · (h - 1)⌉``
    with ``far = max_distance - 1``, which is at least h + j where ``x^(h-1) · h^(j-1) > far^(j-1) · h^(h-1)``. A past
    bucket is its future one's negative.
    """
    half, far = buckets // 2, max_distance - 1
    beyond = range(half + 1, max_distance + 1)

    def start(j: int) -> int:
        bound = far ** (j - 1) * half ** (half - j)
        return beyond[bisect_left(beyond, True, key=lambda x: x ** (half - 1) > bound)]

    starts = [*range(1, half + 1), *(start(j) for j in range(1, half + 1))]
    bucket_of = [0] * (max_distance + 1)
    for first in starts:
        bucket_of[first] += 1
    for x in range(1, max_distance + 1):
        bucket_of[x] += bucket_of[x - 1]
    past = bucket_of[:max_distance]
    return tuple([buckets - bucket for bucket in bucket_of[:0:-1]] + [buckets + bucket for bucket in past])
