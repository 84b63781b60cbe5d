"""Attention with linear biases."""

from __future__ import annotations

from math import log2
from typing import Literal, final

import torch

from posenc.core.bias import ScoreBias, SlopeBias
from posenc.core.checks import check_integers
from posenc.core.sites import ScoreEncoding
from posenc.core.spec import EncodingSpec, Reference


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The released slopes, in head order: ``2^(-8j/heads)`` for powers of two, else extended from the next lower one.

    For another count the slopes of the lower power of two c come first, then every other slope (1st, 3rd, …) of 2c.
    The paper's sentence ("start at 2^(-8/heads) and use that same ratio") gives other numbers; released models follow
    this rule.

    Example:
        >>> alibi_slopes(6)
        (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    """
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f"alibi_slopes: heads = {heads!r}. Expected 1 or more. Pass the number of attention heads.")
    lower = 2 ** int(log2(heads))
    own = [2.0 ** (-8 * j / lower) for j in range(1, lower + 1)]
    doubled = [2.0 ** (-8 * j / (2 * lower)) for j in range(1, 2 * lower + 1, 2)]
    return tuple((own + doubled)[:heads])


@final
class ALiBi(ScoreEncoding):
    """Subtracts ``slope · distance`` from each score, a fixed slope per head: a recency prior.

    The thing people get wrong: the bias is added *after* the softmax scale, and the symmetric form cannot tell left
    from right.

    ``form="causal"`` is signed, ``-slope · (query - key)``; future keys, which a causal mask hides, would be favoured.
    Without a causal mask use ``form="symmetric"``, ``-slope · |query - key|``.

    Args:
        heads: 1 or more.
        form: as above.
        biased_heads: how many heads, from the first, carry a bias; the others have slope 0. The slopes are those of
            ``biased_heads`` heads.

    Returns:
        A `SlopeBias` of float64 slopes.

    Example:
        >>> ALiBi(8)().past[:3]
        tensor([0.5000, 0.2500, 0.1250], dtype=torch.float64)

    Differs from:
        Falcon in transformers: adds the bias before the scale, in bfloat16; here never.
        BLOOM: takes positions from the mask; here ``padded(mask)`` makes them.

    References:
        Press et al. 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        arXiv:2108.12409.
    """

    spec = EncodingSpec(
        name="alibi",
        summary="subtracts slope · distance from the scores",
        build=lambda shape: [ALiBi(shape.heads, form="causal" if shape.causal else "symmetric")],
        claims=frozenset({"shift-invariant", "monotone", "toeplitz", "parameter-free", "any-length", "real-positions"}),
        references=(Reference("Press et al. 2022", "Train Short, Test Long: Attention with Linear Biases", "2108.12409"),),
    )

    def __init__(self, heads: int, *, form: Literal["causal", "symmetric"] = "causal", biased_heads: int | None = None) -> None:
        super().__init__()
        check_integers("ALiBi", heads=heads)
        biased = heads if biased_heads is None else biased_heads
        if heads < 1 or not 0 < biased <= heads:
            raise ValueError(
                f"ALiBi: heads = {heads}, biased_heads = {biased_heads}. Expected 1 ≤ biased_heads ≤ heads. "
                "Pass the model's head count."
            )
        if form not in ("causal", "symmetric"):
            raise ValueError(f"ALiBi: form = {form!r}. Expected 'causal' or 'symmetric'. Use 'symmetric' in an encoder.")
        self.heads, self.form = heads, form
        self.slopes = alibi_slopes(biased) + (0.0,) * (heads - biased)

    def extra_repr(self) -> str:
        return f"{self.heads}, form={self.form!r}"

    def forward(self) -> ScoreBias:
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device="cpu")
        return SlopeBias(slopes, None if self.form == "causal" else slopes)
