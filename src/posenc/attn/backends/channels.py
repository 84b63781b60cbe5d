"""A bias of the key alone as extra channels of q and k, so that the fused causal path needs no mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from posenc.attn.backends.base import NO_WEIGHTS, Backend
from posenc.attn.backends.fused import fused_attention
from posenc.attn.backends.key_channels import no_channels, too_far, with_channels
from posenc.attn.request import Request
from posenc.core.autocast import without_autocast
from posenc.core.mask import CAUSAL

_LARGE = 2**25
"""Bytes. Two calls for half the heads each take 1.06 times as long as one, at 4,096 tokens and 8 heads of 64."""


@final
class Channels(Backend):
    """Signed slopes and key biases as extra channels of q and k: ALiBi at the speed of plain causal attention.

    Exact for any positions, repeated or backward, up to the float32 sums of the kernel: ``slope · position`` keeps its
    first 24 bits.
    """

    name = "channels"

    def refusal(self, request: Request) -> str | None:
        if request.value_table is not None:
            return NO_WEIGHTS
        if request.bias is None:
            return "there is no bias to put into channels"
        if request.mask != CAUSAL or request.q_length != request.k_length:
            return "the fused path without a mask is CAUSAL alone, with as many queries as keys"
        if request.dropout_p and request.q.device.type == "cpu":
            return "torch's fused kernel for the CPU has no dropout"
        return no_channels(request)

    def hesitation(self, request: Request) -> str | None:
        return too_far(request) if request.q.device.type == "cpu" else "its speed and error are measured on the CPU alone"

    def run(self, request: Request) -> Tensor:
        with without_autocast(request.q.device):
            return torch.cat([_attend(some) for some in _portions(request)], dim=1)


def _attend(request: Request) -> Tensor:
    q, k = with_channels(request)
    return fused_attention(q, k, request.v, causal=True, scale=request.scale, dropout_p=request.dropout_p)


def _portions(request: Request) -> Iterator[Request]:
    """Half the key heads at a time where the wider copies of q, k, v and the result are large."""
    kv_heads, share = request.k.shape[1], request.q.shape[1] // request.k.shape[1]
    whole = torch.compiler.is_compiling() or 2 * (request.q.nbytes + request.k.nbytes) < _LARGE  # sizes stay symbolic
    some = kv_heads if whole else -(-kv_heads // 2)
    for first in range(0, kv_heads, some):
        heads, queries = slice(first, first + some), slice(first * share, (first + some) * share)
        bias = request.bias
        if bias is not None and bias.heads > 1:
            bias = bias.slice_heads(queries)
        yield replace(request, q=request.q[:, queries], k=request.k[:, heads], v=request.v[:, heads], bias=bias)
