"""The one place that dispatches on where an encoding acts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import sqrt
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.attn.attention import attention
from posenc.attn.cache import Cache
from posenc.attn.prepared import Prepared, check_axes, check_list, check_site, prepare
from posenc.attn.request import check_heads, make_request
from posenc.attn.select import select
from posenc.core.bias import ScoreBias
from posenc.core.mask import FULL, Mask
from posenc.core.sites import ContentScoreEncoding, Encoding, QKEncoding, ScoreEncoding
from posenc.core.tokens import Positions, Tokens, check_tokens, resolve_positions
from posenc.core.value_table import ValueTable
from posenc.errors import ShapeError


class _Keys(NamedTuple):
    k: Tensor
    v: Tensor
    positions: Tensor


def positional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    encodings: Sequence[Encoding],
    positions: Positions | Tokens,
    k_positions: Positions | None = None,
    prepared: Prepared | None = None,
    cache: Cache | None = None,
    x: Tensor | None = None,
    mask: Mask = FULL,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Attention with positional encodings, wherever they act: on queries and keys or on the score.

    The new queries and keys are transformed, appended to the cache when there is one, and attend over all that is
    cached with the encodings' biases.

    Args:
        encodings: of queries and keys or of the score. Input encodings and position transforms are refused by name.
        positions: of the queries: a tensor, an int for contiguous queries from this start, or `Tokens`.
        k_positions: of the new keys; ``None`` says that they are the same tokens as q.
        prepared: from `prepare`, to share tables and biases among layers.
        cache: appended to. With a `StaticCache` the mask is ``causal(*cache.place(tokens))``.
        x: the hidden states, for encodings that read them.
        mask, scale, dropout_p, backend: as in `attention`; ``scale=None`` is 1/√(q's width on entry).

    Shape:
        q: ``[batch, heads, seq, dim]``; k, v: ``[batch, kv_heads, seq, dim]``.

    Returns:
        ``[batch, heads, seq, v_dim]``.

    Example:
        >>> q = k = v = torch.ones(1, 2, 3, 8)
        >>> positional_attention(q, k, v, encodings=[RoPE(8)], positions=0, mask=CAUSAL).shape
        torch.Size([1, 2, 3, 8])
    """
    for encoding in check_list(encodings, "positional_attention"):
        check_site(encoding, "positional_attention")
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    tokens, k_tokens = _tokens(q, k, encodings, positions, k_positions)
    if prepared is None:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        same = None if k_tokens is tokens else k_tokens.positions
        prepared = prepare(encodings, tokens.positions, same, dtype=dtype)
    for encoding in encodings:
        if isinstance(encoding, QKEncoding):
            q, k = _transformed(encoding, q, k, prepared)
    keys = _Keys(k, v, k_tokens.positions)
    if cache is not None:
        cache.check_mask(mask)
        _check_before_append(q, k, v, encodings, tokens, k_tokens, prepared, cache, mask, backend)
        all_k, all_v, all_tokens = cache.append(k, v, k_tokens)
        keys = _Keys(all_k, all_v, all_tokens.positions)
    terms = _biases(q, keys, encodings, tokens.positions, prepared, cache, x, mask)
    value_table = _value_table(encodings)
    placed = bool(terms) or value_table is not None
    return attention(
        q,
        keys.k,
        keys.v,
        mask=mask,
        bias=reduce(add, terms) if terms else None,
        positions=tokens.positions if placed else None,
        k_positions=keys.positions if placed else None,
        value_table=value_table,
        scale=scale,
        dropout_p=dropout_p,
        backend=backend,
    )


def _tokens(
    q: Tensor, k: Tensor, encodings: Sequence[Encoding], positions: Positions | Tokens, k_positions: Positions | None
) -> tuple[Tokens, Tokens]:
    q_length, k_length = q.shape[-2], k.shape[-2]
    if k_positions is None and q_length != k_length:
        raise ShapeError(
            f"positional_attention: {q_length} queries and {k_length} keys without k_positions. Expected equal lengths, since "
            "k_positions=None says that they are the same tokens. Pass k_positions."
        )
    if isinstance(positions, Tokens):
        check_axes(encodings, positions.axes, "positional_attention")
    else:
        axes = next((encoding.axes for encoding in encodings if encoding.axes is not None), None)
        positions = Tokens(
            resolve_positions(positions, q_length, name="positional_attention", device=q.device, axes=axes), axes=axes
        )
    check_tokens(positions, q.shape[0], q_length, name="positional_attention")
    if k_positions is None:
        return positions, positions
    name = "positional_attention (keys)"
    resolved = resolve_positions(k_positions, k_length, name=name, device=k.device, axes=positions.axes)
    return positions, Tokens(resolved, axes=positions.axes)


def _transformed(encoding: QKEncoding, q: Tensor, k: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
    transformed = encoding.transform(q, k, prepared[encoding])
    if not isinstance(transformed, tuple) or len(transformed) != 2:
        raise TypeError(
            f"{type(encoding).__name__}: its transform returned {type(transformed).__name__}. Expected the pair (q, k). Return both."
        )
    return transformed


def _check_before_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encodings: Sequence[Encoding],
    tokens: Tokens,
    k_tokens: Tokens,
    prepared: Prepared,
    cache: Cache,
    mask: Mask,
    backend: str,
) -> None:
    """Refuse now what attention would refuse later, so that a refused call leaves the cache as it was."""
    make_request(q, k, v, mask=FULL, bias=None, positions=None, k_positions=None, scale=None, dropout_p=0.0)
    terms = [prepared[encoding] for encoding in encodings if isinstance(encoding, ScoreEncoding)]
    for term in terms:
        check_heads(term, q.shape[1])
    if any(isinstance(encoding, ContentScoreEncoding) for encoding in encodings):
        return  # what content adds, and which backends take it, is known with all keys only
    _, keys = cache.place(k_tokens)
    row = k.new_zeros(()).expand(k.shape[0], k.shape[1], keys.length, 1)  # all keys to look at, without their memory
    request = make_request(
        q,
        row.expand(-1, -1, -1, k.shape[-1]),
        row.expand(-1, -1, -1, v.shape[-1]),
        mask=mask,
        bias=reduce(add, terms) if terms else None,
        positions=tokens.positions if terms else None,
        k_positions=keys.positions if terms else None,
        scale=None,
        dropout_p=0.0,
    )
    select(request, backend)


def _value_table(encodings: Sequence[Encoding]) -> ValueTable | None:
    asked = [one.value_table() for one in encodings if isinstance(one, ContentScoreEncoding)]
    tables = [table for table in asked if table is not None]
    if len(tables) > 1:
        raise ValueError(
            f"positional_attention: {len(tables)} encodings add to the values. Expected one at most. Give value_dim to one of them."
        )
    return tables[0] if tables else None


def _biases(
    q: Tensor,
    keys: _Keys,
    encodings: Sequence[Encoding],
    positions: Tensor,
    prepared: Prepared,
    cache: Cache | None,
    x: Tensor | None,
    mask: Mask,
) -> list[ScoreBias]:
    biases: list[ScoreBias] = []
    for index, encoding in enumerate(encodings):
        if isinstance(encoding, ScoreEncoding):
            biases.append(prepared[encoding])
        elif isinstance(encoding, ContentScoreEncoding):
            state = None if cache is None else cache.states.get(index)
            bias, state = encoding(q, keys.k, positions, keys.positions, x=x, state=state, mask=mask)
            if cache is not None:
                cache.states[index] = state
            biases.append(bias)
    return biases
