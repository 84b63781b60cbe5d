"""The Inkling models' bias: a mixture of learned profiles over distance, chosen by the token."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.core.autocast import without_autocast
from posenc.core.bias import QueryTableBias, ScoreBias
from posenc.core.checks import check_integers
from posenc.core.mask import FULL, Mask
from posenc.core.sites import ContentScoreEncoding
from posenc.core.spec import EncodingSpec
from posenc.core.temperature import Temperature
from posenc.errors import ShapeError


@final
class ContentProfile(ContentScoreEncoding):
    """Adds ``r · P[:, distance]`` to each score: P is a learned bank of profiles over distance, and each token mixes them
    with its own weights ``r = W x`` for each head.

    The thing people get wrong: the scale. The bias is added *after* the softmax scale and takes none (Inkling's own is
    1/head_dim, since it normalises queries and keys). The second thing: r comes from the hidden state, not from the
    query, so attention must be given ``x``.

    Only distances ``0 ≤ query - key < extent`` have a bias. It is 0, not the last value, for farther keys, and 0 for
    future ones. Were r constant, this would be a learned table of distances; were it the query, Shaw's.

    Inkling turns no queries or keys. Its layers without a window also get sharper with position: give the same factor
    to `LogitTemperature`, which multiplies queries, and here, which multiplies the bias as the model does.

    Args:
        dim: the width of the hidden states x.
        heads: of queries.
        extent: how many distances have a bias, from 0: 1024 in Inkling, and the window in layers with one.
        width: how many profiles a head mixes, 16 in Inkling (d_rel).
        temperature: a factor of the position for the bias, such as ``LogRatio(0.1, 128_000)``; with it, scores no longer
            depend on the distance alone.

    Shape:
        x: ``[*batch, seq, dim]``, the hidden states of the queries' tokens; q: ``[*batch, heads, seq, any]``; positions:
        ``[*batch, seq]`` integers. r_proj.weight (W): ``[heads · width, dim]``; proj (P): ``[width, extent]``, leaves
        named as in transformers, where proj lies in ``rel_logits_proj``.

    Returns:
        A `QueryTableBias` in float32 or wider, and no state: a cache keeps nothing for it.

    Raises:
        TypeError: no x; a count that is no integer; a temperature that cannot be called; real positions.
        ValueError: a count below 1.
        ShapeError: x of another width or length; another head count.

    Example:
        >>> profile, q, x = ContentProfile(16, 2, 4), torch.ones(1, 2, 5, 8), torch.ones(1, 5, 16)
        >>> bias, _ = profile(q, q, torch.arange(5), x=x)
        >>> materialize(bias, torch.arange(5))[0, 0, 4, 0].item()
        0.0

    Differs from:
        transformers (Inkling): the bias in the model's dtype there, in float32 or wider here. Inkling 2 also clips the
        norm of r, which is not here.

    References:
        No paper: the Inkling models, as released in transformers 5.24.
    """

    spec = EncodingSpec(
        name="content-profile",
        summary="adds a mixture of learned profiles over distance, chosen by the token, to the scores",
        build=lambda shape: [ContentProfile(shape.dim, shape.heads, min(1024, shape.max_length))],
        claims=frozenset({"shift-invariant", "any-length"}),
    )

    def __init__(
        self,
        dim: int,
        heads: int,
        extent: int,
        *,
        width: int = 16,
        temperature: Temperature | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("ContentProfile", 1, dim=dim, heads=heads, extent=extent, width=width)
        if temperature is not None and (isinstance(temperature, type) or not callable(temperature)):
            raise TypeError(
                f"ContentProfile: temperature = {temperature!r}. Expected a function of positions such as LogRatio(0.1, 128_000), "
                "or None. Leave it out in layers with a window."
            )
        self.dim, self.heads, self.extent, self.width, self.temperature = dim, heads, extent, width, temperature
        self.r_proj = nn.Linear(dim, heads * width, bias=False, device=device, dtype=dtype)
        self.proj = nn.Parameter(torch.empty(width, extent, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Both from N(0, 0.02²)."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def extra_repr(self) -> str:
        factor = "" if self.temperature is None else f", temperature={self.temperature!r}"
        return f"{self.dim}, {self.heads}, {self.extent}, width={self.width}{factor}"

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
        if x is None:
            raise TypeError(
                "ContentProfile: x is missing. Expected the hidden states that the queries were made from. Pass "
                "positional_attention(…, x=hidden_states)."
            )
        if x.shape[-1] != self.dim or x.shape[-2] != q.shape[-2] or q.shape[-3] != self.heads:
            raise ShapeError(
                f"ContentProfile: x of shape {tuple(x.shape)} and q of shape {tuple(q.shape)}. Expected {self.heads} heads and "
                f"x of [*batch, {q.shape[-2]}, {self.dim}], one state per query. Pass the layer's input, before its projections."
            )
        weight = self.r_proj.weight
        wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
        with without_autocast(q.device):
            r = F.linear(x.to(wide), weight.to(wide)).unflatten(-1, (self.heads, self.width)).transpose(-3, -2)
            if self.temperature is not None:
                r = r * self._factors(self.temperature, positions, wide)
            # a zero before distance 0 and one past the extent, which clamped lookups of all other keys read
            logits = F.pad(r @ self.proj.to(wide), (1, 1))
        return QueryTableBias(logits, 1), None

    def _factors(self, temperature: Temperature, positions: Tensor, dtype: torch.dtype) -> Tensor:
        home = positions.cpu() if positions.device.type == "mps" else positions  # no float64 on mps
        return temperature(home).to(dtype).to(positions.device)[..., None, :, None]
