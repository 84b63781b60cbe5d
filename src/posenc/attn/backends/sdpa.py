"""torch.nn.functional.scaled_dot_product_attention: fused where mask and bias allow."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from posenc.attn.backends.base import NO_WEIGHTS, Backend, dense_terms
from posenc.attn.backends.fused import fused_attention
from posenc.attn.request import Request
from posenc.core.autocast import without_autocast
from posenc.core.mask import CAUSAL


@final
class SDPA(Backend):
    """Fused kernels for no mask and for `CAUSAL` without a bias; anything else as a dense mask.

    torch's ``is_causal`` aligns the *first* query with the first key, so it is used for equal lengths only; a single
    query at the end needs no mask at all.
    """

    name = "sdpa"
    dense = True

    def refusal(self, request: Request) -> str | None:
        return None if request.value_table is None else NO_WEIGHTS

    def run(self, request: Request) -> Tensor:
        scale, dropout_p = request.scale, request.dropout_p
        with without_autocast(request.q.device):
            if request.bias is None and request.mask == CAUSAL and request.q_length == request.k_length:
                return fused_attention(request.q, request.k, request.v, causal=True, scale=scale, dropout_p=dropout_p)
            terms = dense_terms(request, torch.float64 if request.q.dtype == torch.float64 else torch.float32)
            mask = terms.allowed
            if terms.bias is not None:
                mask = terms.bias if mask is None else terms.bias.masked_fill(~mask, float("-inf"))
            if mask is not None and mask.ndim == 3:
                mask = mask[None]
            out = fused_attention(request.q, request.k, request.v, mask, scale=scale, dropout_p=dropout_p)
            return out if terms.sees is None else torch.where(terms.sees, out, 0.0)
