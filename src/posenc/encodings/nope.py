"""No positional encoding."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from posenc.core.sites import QKEncoding
from posenc.core.spec import EncodingSpec, Reference


@final
class NoPE(QKEncoding):
    """No positions at all: queries and keys pass unchanged.

    The thing people get wrong: a *decoder* without positions still models order, because its causal mask breaks the
    symmetry; an encoder without positions does not.

    Shape:
        q, k: any; returned as they are.

    Example:
        >>> q = torch.ones(1, 1, 2, 4)
        >>> NoPE()(q, q, 0)[0] is q
        True

    References:
        Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466.
    """

    spec = EncodingSpec(
        name="nope",
        summary="nothing; a causal mask is the only source of order",
        build=lambda shape: [NoPE()],
        claims=frozenset(
            {"shift-invariant", "norm-preserving", "composes", "invertible", "parameter-free", "any-length", "real-positions"}
        ),
        references=(
            Reference("Haviv et al. 2022", "Transformer Language Models without Positional Encodings", "2203.16634"),
            Reference("Kazemnejad et al. 2023", "The Impact of Positional Encoding on Length Generalization", "2305.19466"),
        ),
    )

    reads_positions = False

    def prepare(self, positions: Tensor, k_positions: Tensor | None = None, *, dtype: torch.dtype = torch.float32) -> None:
        return None

    def transform(self, q: Tensor, k: Tensor, prepared: None) -> tuple[Tensor, Tensor]:
        return q, k
