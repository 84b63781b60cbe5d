"""Mistakes in one attention: functions of queries, keys and values, and modules of vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.audit.bugs.bug import Bug
from torch import Tensor, nn

from posenc import CAUSAL, ALiBi, window
from posenc.audit import Report
from posenc.audit.attention.checking import check_attention

HEADS, GROUPS, WIDTH = 4, 2, 16


def lower(queries: int, keys: int) -> Tensor:
    """The causal rule, aligned with the last key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def weigh(scores: Tensor, seen: Tensor, v: Tensor, hidden: float = -math.inf) -> Tensor:
    return scores.masked_fill(~seen, hidden).softmax(-1) @ v


def score(q: Tensor, k: Tensor, scale: float = WIDTH**-0.5) -> Tensor:
    return q @ k.transpose(-1, -2) * scale


def causal(q, k, v, seen=lower):
    return weigh(score(q, k), seen(q.shape[2], k.shape[2]), v)


def upper_left(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def by_order(q, k, v, positions, k_positions):
    return causal(q, k, v)


def by_positions(q, k, v, positions, k_positions):
    seen = positions[:, :, None] >= k_positions[:, None, :]
    return weigh(score(q, k), seen[:, None], v)


def masked(q, k, v, attn_mask=None):
    seen = lower(q.shape[2], k.shape[2])
    return weigh(score(q, k), seen if attn_mask is None else seen & attn_mask, v)


def mask_not_read(q, k, v, attn_mask=None):
    return causal(q, k, v)


def padded(q, k, v, key_padding_mask=None, hidden=-math.inf):
    scores = score(q, k)
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], hidden)
    return scores.softmax(-1) @ v


def scaled(q, k, v, scale=WIDTH**-0.5):
    return weigh(score(q, k, scale), lower(q.shape[2], k.shape[2]), v)


def biased(q, k, v, times=1.0):
    scores = score(q, k) + times * slopes(q, k)
    return weigh(scores, lower(q.shape[2], k.shape[2]), v)


def slopes(q: Tensor, k: Tensor) -> Tensor:
    rates = torch.tensor([2.0 ** (-2 * (head + 1)) for head in range(HEADS)], dtype=q.dtype)
    at = torch.arange(k.shape[2], dtype=q.dtype)
    return -rates[:, None, None] * (at[-q.shape[2] :, None] - at)


def biased_then_scaled(q, k, v):
    scores = (q @ k.transpose(-1, -2) + slopes(q, k)) * WIDTH**-0.5
    return weigh(scores, lower(q.shape[2], k.shape[2]), v)


def windowed(q, k, v, size=8):
    seen = lower(q.shape[2], k.shape[2])
    return weigh(score(q, k), seen & ~seen.tril(k.shape[2] - q.shape[2] - size), v)


def grouped(q, k, v):
    return causal(q, *(x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v)))


def tiled(q, k, v):
    return causal(q, *(x.repeat(1, HEADS // GROUPS, 1, 1) for x in (k, v)))


def turn(x: Tensor, at: Tensor) -> Tensor:
    angle = at[:, None] * 100.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


def turned(q, k, v):
    at = torch.arange(k.shape[2])
    return causal(turn(q, at[-q.shape[2] :]), turn(k, at), v)


def turned_with_values(q, k, v):
    at = torch.arange(k.shape[2])
    return causal(turn(q, at[-q.shape[2] :]), turn(k, at), turn(v, at))


def turned_from_zero(q, k, v):
    at = torch.arange(k.shape[2])
    return causal(turn(q, at[: q.shape[2]]), turn(k, at), v)


class SelfAttention(nn.Module):
    """A module of vectors, turned and causal."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.qkv, self.out = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.attend = attend

    def forward(self, x, cache=None):
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        k, v = (k, v) if cache is None else (torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)), (k, v)


def bug(name: str, finding: str, source: str, broken: Any, mended: Any, **expected: Any) -> Bug:
    def check(attention: Any) -> Callable[[], Report]:
        return lambda: check_attention(attention, heads=HEADS, head_dim=WIDTH, **expected)

    return Bug(name, finding, source, check(broken), check(mended))


BUGS = [
    bug("one new query sees the first key alone", "causal-alignment", "pytorch/pytorch#108108", partial(causal, seen=upper_left), causal),
    bug("causal by positions", "causal-on-positions", "ggml-org/llama.cpp#15474", by_positions, by_order),
    bug("a mask is taken and not read", "mask-dropped", "huggingface/transformers#45811", mask_not_read, masked),
    bug("hidden by a penalty of 10", "attention-leak", "timeseriesAI/tsai#171", partial(padded, hidden=-10.0), padded),
    bug("nothing hides the future", "attention-future", "huggingface/transformers#29946",
        lambda q, k, v: score(q, k).softmax(-1) @ v, causal, mask=CAUSAL),
    bug("scaled by the width of all heads", "attention-scale", "karpathy/ng-video-lecture#6",
        partial(scaled, scale=(HEADS * WIDTH) ** -0.5), scaled),
    bug("scaled twice", "attention-scale", "FrancescoSaverioZuppichini/ViT#1", partial(scaled, scale=1 / WIDTH), scaled),
    bug("ALiBi added before the scale", "attention-bias-order", "NVIDIA/TensorRT-Model-Connect#32", biased_then_scaled, biased, bias=ALiBi(HEADS)()),
    bug("ALiBi never arrives", "attention-bias", "huggingface/transformers#29067", partial(biased, times=0.0), biased, bias=ALiBi(HEADS)()),
    bug("ALiBi with the other sign", "attention-bias", "meta-pytorch/attention-gym#86", partial(biased, times=-1.0), biased, bias=ALiBi(HEADS)()),
    bug("a window that leaves out its own token", "attention-window", "huggingface/transformers#39408",
        partial(windowed, size=9), windowed, mask=CAUSAL & window(8)),
    bug("key-value heads tiled", "attention-heads", "onnx/onnx#7274", tiled, grouped, kv_heads=GROUPS),
    bug("values turned too", "attention-values", "labmlai/annotated_deep_learning_paper_implementations#251", turned_with_values, turned),
    bug("new queries turned from 0", "decode-offset", "OpenNMT/CTranslate2#1572", turned_from_zero, turned),
    bug("a module turns new tokens from 0", "decode-offset", "keras-team/keras-hub#1544", SelfAttention(turned_from_zero), SelfAttention(turned)),
    bug("a module turns its values", "attention-values", "mistralai/mistral-inference#147", SelfAttention(turned_with_values), SelfAttention(turned)),
]  # fmt: skip
