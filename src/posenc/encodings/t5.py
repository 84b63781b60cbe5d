"""T5's learned bias over buckets of distance."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from posenc.core.bias import ScoreBias, TableBias
from posenc.core.checks import check_integers
from posenc.core.distance import Direction, check_buckets, t5_bucket
from posenc.core.sites import ScoreEncoding
from posenc.core.spec import EncodingSpec, Reference


@final
class T5Bias(ScoreEncoding):
    """Adds a learned scalar per head and distance bucket to each score.

    The thing people get wrong: T5 attends *without* the 1/√d scale (it is folded into the initialisation), so porting
    a T5 layer needs ``scale=1`` in the attention call. And one table serves all layers in T5; umT5 has one a layer.

    Half of a direction's buckets hold one distance each, the rest are spaced logarithmically up to ``max_distance``,
    past which all distances share the last. Bucket edges are exact integers here, from no logarithm.

    Args:
        heads: 1 or more.
        buckets: 32 in T5; at least 2 (4, and even, when bidirectional).
        max_distance: 128 in T5; more than the exactly held distances.
        direction: "causal" (decoders) or "bidirectional" (encoders: half of the buckets for the future).

    Shape:
        relative_attention_bias.weight: ``[buckets, heads]``, named as in transformers.

    Returns:
        A `TableBias`; positions must be integers.

    Example:
        >>> T5Bias(2)().table.shape
        torch.Size([2, 129])

    Differs from:
        transformers: bucket edges from a float32 logarithm there (equal for the shipped settings).

    References:
        Raffel et al. 2020, arXiv:1910.10683.
    """

    spec = EncodingSpec(
        name="t5",
        summary="adds a learned scalar per distance bucket to the scores",
        build=lambda shape: [T5Bias(shape.heads, direction="causal" if shape.causal else "bidirectional")],
        claims=frozenset({"shift-invariant", "toeplitz", "any-length"}),
        references=(
            Reference(
                "Raffel et al. 2020", "Exploring the Limits of Transfer Learning with a Unified Transformer", "1910.10683"
            ),
        ),
    )

    def __init__(
        self,
        heads: int,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        direction: Direction = "causal",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("T5Bias", heads=heads, buckets=buckets, max_distance=max_distance)
        if heads < 1:
            raise ValueError(f"T5Bias: heads = {heads}. Expected 1 or more. Pass the model's head count.")
        check_buckets(buckets, max_distance, direction, name="T5Bias")
        self.heads, self.buckets, self.max_distance, self.direction = heads, buckets, max_distance, direction
        self.relative_attention_bias = nn.Embedding(buckets, heads, device=device, dtype=dtype)
        distances = torch.arange(-max_distance, max_distance + 1, dtype=torch.int64, device="cpu")
        if direction == "causal":
            distances = distances[max_distance:]
        bucket_of = t5_bucket(distances, buckets=buckets, max_distance=max_distance, direction=direction)
        self._bucket_of: tuple[int, ...] = tuple(bucket_of.tolist())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scalars from N(0, 0.02²)."""
        nn.init.normal_(self.relative_attention_bias.weight, std=0.02)

    def extra_repr(self) -> str:
        return f"{self.heads}, buckets={self.buckets}, max_distance={self.max_distance}, direction={self.direction!r}"

    def forward(self) -> ScoreBias:
        weight = self.relative_attention_bias.weight
        bucket_of = torch.tensor(self._bucket_of, dtype=torch.int64, device=weight.device)
        zero = 0 if self.direction == "causal" else self.max_distance
        return TableBias(weight[bucket_of].T, (zero,))
