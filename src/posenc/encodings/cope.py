"""Positions that count what the query finds in the keys."""

from __future__ import annotations

from math import isfinite
from typing import Any, final

import torch
from torch import Tensor, nn

from posenc.core.autocast import without_autocast
from posenc.core.bias import DenseBias, ScoreBias
from posenc.core.checks import check_integers, check_values
from posenc.core.mask import FULL, All, Either, Mask, Visible
from posenc.core.sites import ContentScoreEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.errors import ShapeError


@final
class CoPE(ContentScoreEncoding):
    """Adds ``query · e[p]`` to each score; p counts, from that key to the last one seen, what the query's gates let through.

    The thing people get wrong: the mask comes before the count. Each key opens a gate ``sigmoid(scale · query · key)``
    and a key's position is the sum of the gates of itself and all *later keys that the query sees*; padding, other
    documents, unfilled cache slots and the future must not count. Give the mask that attention gets; `positional_attention`
    does. The second thing: gates read the scaled scores, but ``query · e`` is *not* scaled, as in the paper's listing.

    p is a real number: ``query · e`` is read between the two rows next to it, and positions past the last row are the last
    row. Without a causal mask p runs over the keys after it too, up to the last, so the query's own place has no meaning.
    Token positions are not read. Keys count in the order in which they lie, so reordered ones (shards of ``"head_tail"``)
    are refused.

    Not the "CoPE" of 2026 that clips rotary frequencies (arXiv:2602.05258).

    Args:
        head_dim: the width of a head as it enters attention.
        npos_max: how many rows e has, for positions from 0 to ``npos_max - 1``; 64 in the paper's language models.
        scale: the softmax scale that attention uses, 1/√head_dim by default; give both the same.

    Shape:
        q: ``[*batch, heads, q, head_dim]``; k: ``[*batch, kv_heads, k, head_dim]``, heads a multiple of kv_heads.
        pos_emb: ``[1, head_dim, npos_max]``, shared by all heads, named as in the paper's listing.

    Returns:
        A `DenseBias` in float32 or wider, O(q·k) memory, and no state: a cache keeps nothing for it.

    Raises:
        TypeError: counts that are no integers.
        ValueError: a count below 1, a scale that is not above 0, a mask by order whose keys do not lie in that order.
        ShapeError: queries or keys of another width, heads that do not share key heads evenly.

    Example:
        >>> cope, q = CoPE(8, 16), torch.ones(1, 2, 5, 8)
        >>> bias, _ = cope(q, q, torch.arange(5), mask=CAUSAL)
        >>> bias.bias.shape
        torch.Size([1, 2, 5, 5])

    References:
        Golovneva et al. 2024, "Contextual Position Encoding: Learning to Count What's Important", arXiv:2405.18719.
    """

    spec = EncodingSpec(
        name="cope",
        summary="adds the query's product with a vector at a position counted from content to the scores",
        build=lambda shape: [CoPE(shape.head_dim, min(64, shape.max_length))],
        claims=frozenset({"shift-invariant", "any-length", "real-positions"}),
        references=(Reference("Golovneva et al. 2024", "Contextual Position Encoding", "2405.18719"),),
    )
    reads_positions = False

    def __init__(
        self,
        head_dim: int,
        npos_max: int,
        *,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("CoPE", 1, head_dim=head_dim, npos_max=npos_max)
        scale = head_dim**-0.5 if scale is None else scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not (isfinite(scale) and scale > 0):
            raise ValueError(
                f"CoPE: scale = {scale!r}. Expected a finite number above 0, the softmax scale of the attention. Leave it out "
                "for 1/√head_dim."
            )
        self.head_dim, self.npos_max, self.scale = head_dim, npos_max, scale
        self.pos_emb = nn.Parameter(torch.empty(1, head_dim, npos_max, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros, as in the paper's listing: training starts without positions."""
        nn.init.zeros_(self.pos_emb)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, {self.npos_max}, scale={self.scale:g}"

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
        self._check(q, k)
        _check_order(mask)
        wide = torch.promote_types(torch.promote_types(q.dtype, self.pos_emb.dtype), torch.float32)
        allowed = mask.allowed(q.shape[-2], k.shape[-2], device=q.device)
        if allowed.ndim > 2:
            allowed = allowed.unsqueeze(-3)
        with without_autocast(q.device):
            q, k = (t.to(wide).contiguous() for t in (q, k))  # products of views may round otherwise
            gates = torch.where(allowed, (_products(q, k) * self.scale).sigmoid(), 0.0)
            at = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.npos_max - 1)
            by_row = q @ self.pos_emb[0].to(wide)
            below = at.detach().nan_to_num().to(torch.int64)  # NaN would be no row at all
            above = (below + 1).clamp(max=self.npos_max - 1)
            return DenseBias(torch.lerp(by_row.gather(-1, below), by_row.gather(-1, above), at - below)), None

    def _check(self, q: Tensor, k: Tensor) -> None:
        if not q.shape[-1] == k.shape[-1] == self.head_dim:
            raise ShapeError(
                f"CoPE: q of width {q.shape[-1]} and k of width {k.shape[-1]}. Expected {self.head_dim}, the head width it was "
                "built for. Encodings that widen queries and keys do not go with it."
            )
        if k.shape[-3] < 1 or q.shape[-3] % k.shape[-3]:
            raise ShapeError(
                f"CoPE: q of {q.shape[-3]} heads and k of {k.shape[-3]}. Expected the query heads to be a multiple of the key "
                "heads. Look at the projections."
            )


def _check_order(mask: Mask) -> None:
    for part in mask.masks if isinstance(mask, (All, Either)) else ():
        _check_order(part)
    if isinstance(mask, Visible):
        order = mask.k_order
        check_values(
            order[..., 1:] >= order[..., :-1],
            lambda: (
                f"CoPE: keys in the order {order.tolist()}. Expected orders that never fall, since gates are counted from key to "
                "key as they lie. Bring the keys into their order first."
            ),
        )


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Every query with every key of its group's head, ``[*batch, heads, q, k]``; keys are not repeated."""
    grouped = q.reshape(*q.shape[:-3], k.shape[-3], q.shape[-3] // k.shape[-3] * q.shape[-2], q.shape[-1])
    return (grouped @ k.mT).reshape(*q.shape[:-1], k.shape[-2])
