"""Scaled dot-product attention over mask and bias values."""

from __future__ import annotations

from torch import Tensor

from posenc.attn.request import make_request
from posenc.attn.select import select
from posenc.core.bias import ScoreBias
from posenc.core.mask import FULL, Mask
from posenc.core.tokens import Positions
from posenc.core.value_table import ValueTable


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = FULL,
    bias: ScoreBias | None = None,
    positions: Positions | None = None,
    k_positions: Positions | None = None,
    value_table: ValueTable | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """``softmax(scale · q kᵀ + bias) v`` under a mask.

    The thing people get wrong: alignment. With fewer queries than keys `CAUSAL` aligns the last query with the last
    key (decoding with a cache), on every backend.

    Args:
        mask: a value from `posenc.core.mask`; a row that sees nothing gives zeros and finite gradients. What is hidden
            gets weight 0 and must be finite, because 0 · NaN is NaN: allocate caches with zeros.
        bias: a `ScoreBias`, added after the scale; may need a gradient.
        positions: what the bias reads: a tensor, or an int for contiguous queries from this start. ``None`` has one
            exact meaning, "contiguous, the last query level with the last key", and only biases of one-axis distance
            take it.
        k_positions: ``None`` with positions given says that q and k are the same tokens.
        value_table: vectors per distance that are added to the values; ``"reference"`` alone can, since it forms the
            weights.
        scale: the softmax scale, 1/√dim when ``None``.
        backend: ``"auto"``, or one by name, which never falls back: ``"sdpa"``; ``"channels"`` (ALiBi and forget gates without a
            mask); ``"varlen"`` (packed documents); ``"blockwise"`` (long sequences, no second derivative); ``"flex"``;
            ``"reference"``. `posenc.explain` says which one serves a call, and why.

    Shape:
        q: ``[batch, heads, q, dim]``; k: ``[batch, kv_heads, k, dim]``; v: ``[batch, kv_heads, k, v_dim]``, heads a
        multiple of kv_heads; positions: ``[*batch, q]``; k_positions: ``[*batch, k]``.

    Returns:
        ``[batch, heads, q, v_dim]`` in q's dtype (autocast's under autocast). No queries give an empty result, no keys
        zeros.

    Raises:
        ShapeError, TypeError, ValueError: inputs that do not fit each other.
        BackendRefused: the named backend cannot do it.

    Example:
        >>> q = k = v = torch.ones(1, 2, 3, 4)
        >>> attention(q, k, v, mask=CAUSAL, bias=ALiBi(2)()).shape
        torch.Size([1, 2, 3, 4])

    References:
        Vaswani et al. 2017, arXiv:1706.03762.
    """
    request = make_request(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        positions=positions,
        k_positions=k_positions,
        value_table=value_table,
        scale=scale,
        dropout_p=dropout_p,
    )
    chosen = select(request, backend)
    if request.q_length == 0 or request.k_length == 0:
        return request.q.new_zeros(*request.q.shape[:3], request.v.shape[-1])
    return chosen.run(request)
