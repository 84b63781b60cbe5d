"""A forget gate per token and head, read from the hidden state: the Forgetting Transformer."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.core.autocast import without_autocast
from posenc.core.bias import KeyBias, ScoreBias
from posenc.core.checks import check_integers, check_values
from posenc.core.mask import FULL, UNFILLED, All, Mask, SameSegment, Visible
from posenc.core.sites import ContentScoreEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.errors import ShapeError


class Gates(NamedTuple):
    """The gates of all cached tokens.

    Shape:
        log_gates: ``[*batch, heads, k]``, one per key; 0 in unfilled slots.
        filled: ``[]`` int64, how many are filled.
    """

    log_gates: Tensor
    filled: Tensor


@final
class FoX(ContentScoreEncoding):
    """Forgets by content: each token has a gate per head, and a score gains the log gates of all tokens after its key.

    The thing people get wrong: which gates count. A query at m sees the key at n through the gates of n + 1 … m: the key's
    own gate is *not* among them, the query's own is. A constant gate g is causal ALiBi with slope -ln g.

    ``Σ log σ(fgate_proj(x_j))`` over the tokens j after the key, up to the query. Up to a constant per query, which the
    softmax drops, that is a term of the key alone, and that is what is returned: the sum up to the newest token. It runs
    in the order that the mask gives, inside the key's own document, so padding between two real tokens does not count.

    For causal attention only: a key in the future would gain what the tokens between *forget*. And for self-attention only:
    every key needs its gate, and a cache keeps those of earlier tokens.

    Gates are kept in float32 or wider, one number per key and head; their sums are formed anew in float64 by each call, so
    nothing drifts. A backend adds them in its own precision: a float32 score is off by up to 2⁻²⁴ of the sum from the key
    to the newest token (to the end of its document when packed), which the weight of a key that far back hides; early
    queries of a long prefill see all their keys at that distance.

    Args:
        dim: the width of the hidden states.
        heads: query heads, 1 or more; key heads may be fewer.

    Shape:
        x: ``[*batch, seq, dim]``, the new tokens' hidden states, as they enter the projections of q and k.
        fgate_proj.weight: ``[heads, dim]``, fgate_proj.bias: ``[heads]``, named as in the released code.

    Returns:
        A `KeyBias` in float64, and the gates for the cache: of fixed shape when the cache has fixed slots.

    Raises:
        TypeError: no hidden states.
        ShapeError: hidden states of another width or length, queries of another head count, keys without gates.
        ValueError: counts below 1; filled slots that this encoding has not seen.

    Example:
        >>> fox, x, q = FoX(8, 2), torch.ones(1, 5, 8), torch.ones(1, 2, 5, 4)
        >>> bias, state = fox(q, q, torch.arange(5), x=x)
        >>> state.log_gates.shape
        torch.Size([1, 2, 5])

    Differs from:
        the released code: the same gates and sums; the projection is computed in float32 here, in the model's dtype there.
        x-transformers (data-dependent ALiBi): the gate's bias starts at 5 there, at 0 in the released code and here.

    References:
        Lin et al. 2025, "Forgetting Transformer: Softmax Attention with a Forget Gate", arXiv:2503.02130.
    """

    spec = EncodingSpec(
        name="fox",
        summary="lowers scores by gates that the tokens in between choose, causal only",
        build=lambda shape: [FoX(shape.dim, shape.heads)],
        claims=frozenset({"shift-invariant", "any-length"}),
        references=(
            Reference("Lin et al. 2025", "Forgetting Transformer: Softmax Attention with a Forget Gate", "2503.02130"),
        ),
    )
    reads_positions = False

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("FoX", 1, dim=dim, heads=heads)
        self.dim, self.heads = dim, heads
        self.fgate_proj = nn.Linear(dim, heads, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As released: weights from N(0, 0.02²), bias 0, so that gates start at one half."""
        nn.init.normal_(self.fgate_proj.weight, std=0.02)
        nn.init.zeros_(self.fgate_proj.bias)

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.heads}"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        k_positions: Tensor | None = None,
        *,
        x: Tensor | None = None,
        state: Gates | None = None,
        mask: Mask = FULL,
    ) -> tuple[ScoreBias, Gates]:
        new = self._log_gates(q, x)
        parts = mask.masks if isinstance(mask, All) else (mask,)
        order = next((part.k_order for part in parts if isinstance(part, Visible)), None)
        segments = next((part.k_segments for part in parts if isinstance(part, SameSegment)), None)
        kept = _appended(new, state, k.shape[-2], order)
        return KeyBias(_sums_after(kept.log_gates.double(), order, segments)), kept

    def _log_gates(self, q: Tensor, x: Tensor | None) -> Tensor:
        """Of the new tokens, ``[*batch, heads, seq]`` in float32 or wider."""
        if x is None:
            raise TypeError(
                "FoX: x is None. Expected the hidden states of the new tokens, from which their gates are read. Pass "
                "positional_attention(…, x=x), the input of the projections of q and k."
            )
        if x.shape[-1] != self.dim or q.shape[-3:-1] != (self.heads, x.shape[-2]):
            raise ShapeError(
                f"FoX: x of shape {tuple(x.shape)} with q of shape {tuple(q.shape)}. Expected [*batch, seq, {self.dim}] and "
                f"[*batch, {self.heads}, seq, head_dim] of the same tokens. Build it for the model's width and query heads."
            )
        weight, bias = self.fgate_proj.weight, self.fgate_proj.bias
        wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
        with without_autocast(x.device):
            return F.logsigmoid(F.linear(x.to(wide), weight.to(wide), bias.to(wide))).mT


def _appended(new: Tensor, state: Gates | None, keys: int, order: Tensor | None) -> Gates:
    """The gates of all ``keys``: appended, or written into the next slots when the cache's slots are fixed."""
    n = new.shape[-1]
    known = 0 if state is None else state.log_gates.shape[-1]
    count = torch.full((), n, dtype=torch.int64, device=new.device)
    if known + n == keys:
        return Gates(new, count) if state is None else Gates(torch.cat([state.log_gates, new], -1), state.filled + count)
    if state is not None and known == keys:
        slots = state.filled + torch.arange(n, dtype=torch.int64, device=new.device)
        return Gates(state.log_gates.index_copy(-1, slots, new.to(state.log_gates.dtype)), state.filled + count)
    if state is not None or order is None or n > keys:
        raise ShapeError(
            f"FoX: {keys} keys, and gates of {known} cached and {n} new tokens. Expected a gate for every key: cross-attention "
            "has none, and a cache must have been with it from its first token. Use it in self-attention, one cache per layer."
        )
    check_values(
        order[..., n:] == UNFILLED,
        lambda: (
            f"FoX: {keys} keys, of which {int((order[..., n:] != UNFILLED).sum(-1).max()) + n} are filled, and gates of {n} tokens. "
            "Expected an empty cache on the first call. Give it the whole sequence, or start with a new cache."
        ),
    )
    return Gates(F.pad(new, (0, keys - n)), count)


def _sums_after(gates: Tensor, order: Tensor | None, segments: Tensor | None) -> Tensor:
    """For each key the sum of the gates that come after it in its document, ``[*batch, heads, k]``."""
    if order is None and segments is None:
        sums = gates.cumsum(-1)
        return sums[..., -1:] - sums
    # in the order of (segment, order), where a document's tokens stand together
    place = torch.arange(gates.shape[-1], dtype=torch.int64, device=gates.device)
    for key in (order, segments):
        if key is not None:
            key, place = torch.broadcast_tensors(key.to(gates.device), place)
            place = place.gather(-1, key.gather(-1, place).argsort(dim=-1, stable=True))
    last = torch.full_like(place, gates.shape[-1] - 1)
    if segments is not None:
        document = segments.to(gates.device).expand_as(place).gather(-1, place)
        last = torch.searchsorted(document, document, right=True) - 1
    place, last, gates = torch.broadcast_tensors(place.unsqueeze(-2), last.unsqueeze(-2), gates)
    sums = gates.gather(-1, place).cumsum(-1)
    return torch.zeros_like(sums).scatter(-1, place, sums.gather(-1, last) - sums)
