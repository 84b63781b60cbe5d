"""Linear biases whose slopes are learned."""

from __future__ import annotations

from math import log
from typing import Literal, final

import torch
from torch import Tensor, nn

from posenc.core.bias import ScoreBias, SlopeBias
from posenc.core.checks import check_integers
from posenc.core.sites import ScoreEncoding
from posenc.core.spec import EncodingSpec, Reference


@final
class LearnedALiBi(ScoreEncoding):
    """Subtracts ``slope · distance`` from each score, a learned slope per head that starts at ALiBi's.

    The thing people get wrong: what is learned is the logarithm of the slope, so a slope is never negative, weight decay
    pulls it towards 1 and not towards 0, and a checkpoint of plain slopes has to go through ``log`` first.

    ``form="causal"`` is signed, ``-slope · (query - key)``; future keys, which a causal mask hides, would be favoured.
    Without a causal mask ``"symmetric"`` is ``-slope · |query - key|``, which cannot tell left from right, and
    ``"two-sided"`` learns slopes of their own for keys in the future.

    Args:
        heads: 1 or more.
        form: as above.
        biased_heads: how many heads, from the first, carry a bias; the others have slope 0.

    Shape:
        learned_logslopes, and learned_logslopes_future of the two-sided form: ``[biased_heads, 1, 1]``, named as in
        x-transformers.

    Returns:
        A `SlopeBias` of float64 slopes.

    Raises:
        TypeError: counts that are no integers.
        ValueError: counts that do not fit each other, an unknown form.

    Example:
        >>> slopes = LearnedALiBi(8)().past[:3]
        >>> slopes.detach().float()
        tensor([0.5000, 0.2500, 0.1250])

    Differs from:
        x-transformers: symmetric there, also under a causal mask, where the forms agree.
        the paper: fixed slopes; trainable ones did not extrapolate well there.

    References:
        Press et al. 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        arXiv:2108.12409.
    """

    spec = EncodingSpec(
        name="learned-alibi",
        summary="subtracts slope · distance from the scores, with learned slopes",
        build=lambda shape: [LearnedALiBi(shape.heads, form="causal" if shape.causal else "two-sided")],
        claims=frozenset({"shift-invariant", "monotone", "toeplitz", "any-length", "real-positions"}),
        references=(Reference("Press et al. 2022", "Train Short, Test Long: Attention with Linear Biases", "2108.12409"),),
    )

    def __init__(
        self,
        heads: int,
        *,
        form: Literal["causal", "symmetric", "two-sided"] = "causal",
        biased_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        biased = heads if biased_heads is None else biased_heads
        check_integers("LearnedALiBi", heads=heads, biased_heads=biased)
        if not 0 < biased <= heads:
            raise ValueError(
                f"LearnedALiBi: heads = {heads}, biased_heads = {biased_heads}. Expected 1 ≤ biased_heads ≤ heads. "
                "Pass the model's head count."
            )
        if form not in ("causal", "symmetric", "two-sided"):
            raise ValueError(
                f"LearnedALiBi: form = {form!r}. Expected 'causal', 'symmetric' or 'two-sided'. Use 'two-sided' in an encoder."
            )
        self.heads, self.form, self.biased_heads = heads, form, biased
        self.learned_logslopes = nn.Parameter(torch.empty(biased, 1, 1, device=device, dtype=dtype))
        if form == "two-sided":
            self.learned_logslopes_future = nn.Parameter(torch.empty(biased, 1, 1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """ALiBi's released slopes, on both sides."""
        # 2^(-8j/c) for the lower power of two c, then every other slope of 2c
        lower = 2 ** (self.biased_heads.bit_length() - 1)
        exponents = [8 * j / lower for j in range(1, lower + 1)] + [4 * j / lower for j in range(1, 2 * lower, 2)]
        start = torch.tensor(exponents[: self.biased_heads], dtype=torch.float64, device="cpu") * -log(2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(start[:, None, None])

    def extra_repr(self) -> str:
        return f"{self.heads}, form={self.form!r}"

    def forward(self) -> ScoreBias:
        past = self._slopes(self.learned_logslopes)
        if self.form == "two-sided":
            return SlopeBias(past, self._slopes(self.learned_logslopes_future))
        return SlopeBias(past, None if self.form == "causal" else past)

    def _slopes(self, logarithms: Tensor) -> Tensor:
        return nn.functional.pad(logarithms.flatten().double().exp(), (0, self.heads - self.biased_heads))
