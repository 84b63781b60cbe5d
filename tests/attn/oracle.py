"""Attention written from its definition, in float64, one query at a time: imports nothing of the package's attention.

Masks are functions ``sees(batch, i, j)``, biases ``bias(batch, head, i, j)``, of indices alone. Only visible keys enter
the softmax, so nothing hidden can reach a result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Sees = Callable[[int, int, int], bool]
BiasAt = Callable[[int, int, int, int], Tensor | float]


def attention_oracle(
    q: Tensor, k: Tensor, v: Tensor, *, sees: Sees, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """``softmax(scale · q kᵀ + bias) v`` over the keys that each query sees; zeros where it sees none.

    The bias is written out, ``[batch, heads, q, k]``, by `dense_bias`.
    """
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, q_length, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    share = heads // k.shape[1]
    rows = []
    seen_by = {(b, i): [j for j in range(k.shape[2]) if sees(b, i, j)] for b in range(batch) for i in range(q_length)}
    for b in range(batch):
        for h in range(heads):
            for i in range(q_length):
                seen = seen_by[b, i]
                if not seen:
                    rows.append(v.new_zeros(v.shape[-1]))
                    continue
                scores = scale * torch.einsum("d,jd->j", q[b, h, i], k[b, h // share][seen])
                if bias is not None:
                    scores = scores + bias[b, h, i][seen]
                weights = (scores - scores.max().detach()).exp()
                rows.append(torch.einsum("j,jc->c", weights / weights.sum(), v[b, h // share][seen]))
    return torch.stack(rows).reshape(batch, heads, q_length, v.shape[-1])


def dense_bias(entry: BiasAt, batch: int, heads: int, q_length: int, k_length: int) -> Tensor:
    """Every entry of a bias, one by one, in float64."""
    entries = [
        torch.as_tensor(entry(b, h, i, j)).double()
        for b in range(batch)
        for h in range(heads)
        for i in range(q_length)
        for j in range(k_length)
    ]
    return torch.stack(entries).reshape(batch, heads, q_length, k_length)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, allowed: Tensor, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """What anyone writes in the inputs' own dtype (softmax in float32 at least): its error sets the tolerance."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.mT * scale).to(torch.promote_types(q.dtype, torch.float32))
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1).to(q.dtype)
    return weights.masked_fill(~allowed, 0.0) @ v


def budget(plain: Tensor, exact: Tensor) -> float:
    """Twice the error of a plain implementation. Where that is lucky, sixteen roundings of the largest result in the
    dtype that sums are made in and two in the dtype of the result."""
    summed = torch.promote_types(plain.dtype, torch.float32)
    floor = (16 * torch.finfo(summed).eps + 2 * torch.finfo(plain.dtype).eps) * float(exact.abs().max())
    return max(2 * float((plain.double() - exact).abs().max()), floor)
