"""Packed documents, one fused causal call for each."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from posenc.attn.backends.base import NO_WEIGHTS, Backend
from posenc.attn.backends.fused import filled, fused_attention
from posenc.attn.backends.key_channels import TILE, channels, no_channels, too_far, with_channels
from posenc.attn.request import Request
from posenc.core.autocast import without_autocast
from posenc.core.checks import readable
from posenc.core.mask import CAUSAL, All, SameSegment
from posenc.core.tokens import PADDING

_WIDEST = 256
"""Channels, of torch's flash kernel on CUDA."""
_SHORT = 256


@final
class Varlen(Backend):
    """``CAUSAL & same_segment(segments)`` as one causal call per document: the pairs between documents cost nothing.

    Each document is brought into one piece, in token order: equal numbers see each other, wherever they stand. On the
    CPU the boundaries are read; on CUDA they stay on the device, in `torch.nn.attention.varlen` (unverified until it
    has run there).
    """

    name = "varlen"

    def refusal(self, request: Request) -> str | None:
        if request.value_table is not None:
            return NO_WEIGHTS
        segments = _segments(request)
        if segments is None:
            return "it takes CAUSAL & same_segment(segments) alone, with the queries' segments for the keys"
        if segments.shape[-1] != request.q_length or segments.shape[:-1] not in ((), (1,), request.q.shape[:1]):
            return f"segments of shape {tuple(segments.shape)} do not fit {request.q.shape[0]} × {request.q_length} tokens"
        reason = None if request.bias is None else no_channels(request)
        if reason is not None:
            return reason
        device = request.q.device.type
        if device == "cpu":
            return None if readable(segments) else "boundaries between documents cannot be read while a graph is captured"
        return _no_kernel(request) if device == "cuda" else f"there is no kernel for {device}"

    def hesitation(self, request: Request) -> str | None:
        if request.q.device.type != "cpu":
            return "its speed and error are measured on the CPU alone"
        if request.q_length < _SHORT:
            return f"below {_SHORT} tokens a dense mask costs less than a call per document"
        return None if request.bias is None else too_far(request)

    def run(self, request: Request) -> Tensor:
        segments = _segments(request)
        assert segments is not None
        batch, _, length, _ = request.q.shape
        with without_autocast(request.q.device):
            q, k = (request.q, request.k) if request.bias is None else with_channels(request)
            segments = segments.to(q.device).expand(batch, length)
            order = _order(segments)
            tokens = None
            if q.device.type != "cpu" or not bool((order[:, 1:] > order[:, :-1]).all()):
                tokens = (order + length * torch.arange(batch, device=q.device)[:, None]).flatten()
            segments = segments.gather(-1, order)
            q, k, v = (_flatten(x, tokens) for x in (q, k, request.v))
            attend = _one_by_one if q.device.type == "cpu" else _at_once
            out = attend(q, k, v, segments, request)
            out = out if tokens is None else out.index_select(0, tokens.argsort())
            return out.reshape(batch, length, *out.shape[1:]).transpose(1, 2)


def _segments(request: Request) -> Tensor | None:
    """The segments of a mask that is causal within them and nothing else."""
    parts = request.mask.masks if isinstance(request.mask, All) else ()
    if len(parts) != 2 or CAUSAL not in parts or request.q_length != request.k_length:
        return None
    (same,) = (part for part in parts if part != CAUSAL)
    return same.q_segments if isinstance(same, SameSegment) and same.q_segments is same.k_segments else None


def _no_kernel(request: Request) -> str | None:
    if find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no variable-length attention; 2.10 has"
    if request.q.dtype not in (torch.bfloat16, torch.float16):
        return f"torch's kernel takes bfloat16 and float16, not {request.q.dtype}"
    if max(request.q.shape[-1] + channels(request), request.v.shape[-1]) > _WIDEST:
        return f"torch's kernel takes up to {_WIDEST} channels"
    if request.dropout_p:
        return "torch's kernel has no dropout"
    if torch.cuda.get_device_capability(request.q.device) < (8, 0):
        return "torch's kernel needs an Ampere GPU or a later one"
    return None


def _order(segments: Tensor) -> Tensor:
    """The tokens of each sequence, document after document; padding, the largest number without its sign, comes last."""
    unsigned = segments.to(torch.int64) ^ torch.iinfo(torch.int64).min
    return unsigned.argsort(dim=-1, stable=True)


def _flatten(x: Tensor, tokens: Tensor | None) -> Tensor:
    x = x.transpose(1, 2).flatten(0, 1)
    return x if tokens is None else x.index_select(0, tokens)


def _firsts(segments: Tensor) -> Tensor:
    """Whether a token is the first of its document, ``[batch · tokens]``."""
    new = segments[:, 1:] != segments[:, :-1]
    return pad(new, (1, 0), value=True).flatten()


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, request: Request) -> Tensor:
    """``[tokens, heads, v_dim]``, a call for each document."""
    starts = _firsts(segments).nonzero().flatten()
    lengths = [end - start for start, end in pairwise([*starts.tolist(), q.shape[0]])]
    padding = (segments.flatten()[starts] == PADDING).tolist()
    documents = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    out = []
    for hidden, document in zip(padding, documents, strict=True):
        if hidden:  # zeros that know of q, so that a batch of padding alone has gradients
            out.append(document[0][..., :0].sum(-1, keepdim=True).expand(-1, -1, v.shape[-1]))
        else:
            q_, k_, v_ = (x.transpose(0, 1)[None] for x in document)
            whole = fused_attention(q_, k_, v_, causal=True, scale=request.scale, dropout_p=request.dropout_p)
            out.append(whole[0].transpose(0, 1))
    return torch.cat(out)


def _at_once(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, request: Request) -> Tensor:
    """``[tokens, heads, v_dim]``, a call for all documents. Padding stands alone, token by token; as many documents as
    tokens could come, so the edges end in empty ones."""
    from torch.nn.attention.varlen import varlen_attn  # heavy, and for CUDA alone

    hidden, total = (segments == PADDING).flatten(), q.shape[0]
    edges = torch.where(_firsts(segments) | hidden, torch.arange(total, device=q.device), total).sort().values
    edges = pad(edges, (0, 1), value=total).to(torch.int32)
    width = max(q.shape[-1], v.shape[-1])
    width += -width % TILE
    q, k, wide_v = (filled(x, width) for x in (q, k, v))
    longest, causal = segments.shape[-1], (-1, 0)
    out = varlen_attn(
        q, k, wide_v, edges, edges, longest, longest,
        scale=request.scale, window_size=causal, enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[..., : v.shape[-1]].masked_fill(hidden[:, None, None], 0.0)
