"""torch.nn.functional.scaled_dot_product_attention: fused where mask and bias allow."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from posenc.attn.backends.base import Backend, dense_terms, without_autocast
from posenc.attn.request import Request
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
        return None

    def run(self, request: Request) -> Tensor:
        if request.bias is None and request.mask == CAUSAL and request.q_length == request.k_length:
            return self._call(request, None, is_causal=True)
        dtype = torch.float64 if request.q.dtype == torch.float64 else torch.float32
        terms = dense_terms(request, dtype)
        mask = terms.allowed
        if terms.bias is not None:
            mask = terms.bias if mask is None else terms.bias.masked_fill(~mask, float("-inf"))
        out = self._call(request, mask)
        return out if terms.sees is None else torch.where(terms.sees, out, 0.0)

    def _call(self, request: Request, mask: Tensor | None, *, is_causal: bool = False) -> Tensor:
        with without_autocast(request.q.device):
            return scaled_dot_product_attention(
                request.q,
                request.k,
                request.v,
                attn_mask=mask,
                dropout_p=request.dropout_p,
                is_causal=is_causal,
                scale=request.scale,
                enable_gqa=request.grouped,
            )
