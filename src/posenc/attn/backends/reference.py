"""Attention as its definition says: the yardstick of every other backend."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from posenc.attn.backends.base import Backend, dense_terms
from posenc.attn.request import Request
from posenc.core.autocast import without_autocast


@final
class Reference(Backend):
    """``softmax(scale · q kᵀ + bias) v``, and vectors added to the values, in float32 (float64 for float64), O(q·k) memory."""

    name = "reference"
    dense = True

    def refusal(self, request: Request) -> str | None:
        return None

    def run(self, request: Request) -> Tensor:
        dtype = torch.float64 if request.q.dtype == torch.float64 else torch.float32
        with without_autocast(request.q.device):
            q, k, v = (t.to(dtype) for t in (request.q, request.k, request.v))
            if request.grouped:
                groups = q.shape[1] // k.shape[1]
                k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
            terms = dense_terms(request, dtype)
            scores = (q * request.scale) @ k.transpose(-1, -2)
            if terms.bias is not None:
                scores = scores + terms.bias
            if terms.allowed is not None:
                scores = scores.masked_fill(~terms.allowed, float("-inf"))
            weights = torch.nn.functional.dropout(scores.softmax(-1), request.dropout_p)
            out = weights @ v
            if request.value_table is not None:
                assert request.positions is not None
                assert request.k_positions is not None
                out = out + request.value_table.weighted(weights, request.positions, request.k_positions)
            if terms.sees is not None:
                out = torch.where(terms.sees, out, 0.0)
            return out.to(request.q.dtype)
