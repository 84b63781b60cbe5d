"""The inner product of two tokens' sinusoidal codes, as a bias."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from posenc.core.bias import FormulaBias, ScoreBias
from posenc.core.checks import check_integers
from posenc.core.sites import ScoreEncoding
from posenc.core.spec import EncodingSpec, Reference


@final
class Sandwich(ScoreEncoding):
    """Adds the inner product of the two tokens' sinusoidal codes to each score, divided by a number of the head.

    The thing people get wrong: the index. It starts at 1, so the fastest wave turns by ``10000^(-2/dim)`` per position and
    not by 1. And the product is not monotone: it falls like a logarithm, in ripples.

    Head h of H, from 1, adds ``Σ cos(distance / 10000^(2i/dim)) / (8h/H)``, i from 1 to ``dim/2``. The divisors ``8h/H`` are
    those of two public implementations (NVIDIA NeMo, attention-gym); they were not checked against the paper itself.

    Args:
        heads: 1 or more.
        dim: the width of the codes, even; the larger, the slower the fall. Independent of the model's own width.

    Returns:
        A `FormulaBias` of the distance alone, in float64: a product of ``dim`` numbers per pair of tokens, the same for all
        heads. Off by up to ``dim`` · 2⁻⁵³ · position.

    Raises:
        TypeError: counts that are no integers.
        ValueError: a head count below 1; a width that is odd or below 2.

    Example:
        >>> materialize(Sandwich(8)(), torch.tensor([2]), torch.tensor([0, 1, 2]))[0]
        tensor([[58.7980, 62.5534, 64.0000]])

    Differs from:
        NVIDIA NeMo: subtracts dim/2 first, which the softmax drops; its ``dim`` is the width of a head.
        attention-gym: starts the index at 0.

    References:
        Chi et al. 2023, "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis",
        arXiv:2212.10356.
    """

    spec = EncodingSpec(
        name="sandwich",
        summary="adds the inner product of two sinusoidal codes to the scores",
        build=lambda shape: [Sandwich(shape.heads)],
        claims=frozenset({"shift-invariant", "toeplitz", "parameter-free", "any-length", "real-positions"}),
        references=(Reference("Chi et al. 2023", "Dissecting Transformer Length Extrapolation", "2212.10356"),),
    )

    def __init__(self, heads: int, dim: int = 128) -> None:
        super().__init__()
        check_integers("Sandwich", 1, heads=heads, dim=dim)
        if dim % 2:
            raise ValueError(
                f"Sandwich: dim = {dim}. Expected an even width of 2 or more: a wave is a sine and a cosine. The paper's is 128."
            )
        self.heads, self.dim = heads, dim

    def extra_repr(self) -> str:
        return f"{self.heads}, dim={self.dim}"

    def forward(self) -> ScoreBias:
        wavelengths = [10000.0 ** (2 * i / self.dim) for i in range(1, self.dim // 2 + 1)]  # over 2π
        divisors = [8 * h / self.heads for h in range(1, self.heads + 1)]
        tables = (torch.tensor(numbers, dtype=torch.float64, device="cpu") for numbers in (wavelengths, divisors))
        heads = torch.arange(self.heads, dtype=torch.int64, device="cpu")
        return FormulaBias(_sandwich, tuple(tables), heads, pointwise=False, distance_only=True)


def _sandwich(q: Tensor, k: Tensor, head: Tensor, wavelengths: Tensor, divisors: Tensor) -> Tensor:
    # the product of codes is the sum of cosines of the distance, and one matmul in place of dim/2 cosines per pair
    if q.ndim == 0:
        product = (_code(q, wavelengths) * _code(k, wavelengths)).sum(-1)
    else:
        product = _code(q[..., 0], wavelengths) @ _code(k[..., 0, :], wavelengths).mT
    return product / divisors.to(head.device)[head]


def _code(positions: Tensor, wavelengths: Tensor) -> Tensor:
    angles = positions.double().unsqueeze(-1) / wavelengths.to(positions.device)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
