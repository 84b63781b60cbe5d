"""Blocks of queries, each with its own piece of the bias, formed again in the backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from posenc.attn.backends.base import Backend, check_batch
from posenc.attn.request import Request
from posenc.core.autocast import without_autocast
from posenc.core.bias import ScoreBias, materialize
from posenc.core.mask import All, Causal, Either, Mask, Window
from posenc.errors import BackendRefused

_BLOCK = 64
"""Queries. At 4,096 tokens and 8 heads of 64, forward and backward, 128 take 1.4 to 1.6 times the memory in 0.9 to 1.4 times
the time (T5, KERPLE, FIRE)."""
_FEW = 2**22
"""Scores. Eight heads of 1,024 tokens take 0.4 to 0.9 times as long as with a dense mask, of 512 tokens 0.9 to 1.7 times."""


@final
class Blockwise(Backend):
    """Scores, mask and bias for one block of queries at a time, and again in the backward: memory of q + k, not of q·k.

    Keys that no query of a block can see, by `CAUSAL` or a window, cost nothing. A learned bias gets its gradient block by
    block. Computes in float32 (float64 for float64).

    Args:
        block: how many queries at a time.
    """

    name = "blockwise"

    def __init__(self, block: int = _BLOCK) -> None:
        self.block = block

    def refusal(self, request: Request) -> str | None:
        if request.value_table is not None:
            return "it forms the weights of one block at a time, and its backward knows no vectors added to the values"
        if torch.compiler.is_compiling():
            return "torch.compile does not trace its backward, which forms the bias again"
        inputs = _tensors(request)
        if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in inputs):
            return "its backward is written by hand, which torch.func cannot transform"
        if any(unpack_dual(tensor).tangent is not None for tensor in inputs):
            return "it has no forward-mode derivative"
        if any(at is not None and at.requires_grad for at in (request.positions, request.k_positions)):
            return "it gives positions no gradient"
        if request.dropout_p and request.q.device.type not in ("cpu", "cuda"):
            return f"it repeats its dropout from a seed, and {request.q.device.type} has no generator to seed"
        return None

    def hesitation(self, request: Request) -> str | None:
        if request.q.device.type != "cpu":
            return "its speed is measured on the CPU alone"
        scores = request.q.shape[0] * request.q.shape[1] * request.q_length * request.k_length
        if scores < _FEW:
            return f"{scores} scores are few enough to write out, below {_FEW}"
        if request.q_length <= 4 * self.block:
            return f"{request.q_length} queries are few enough to serve at once, up to {4 * self.block}"
        if request.bias is None and not self._skips(request):
            return "without a bias, and with a mask that hides less than three quarters by windows, a fused kernel is as fast"
        return None

    def _skips(self, request: Request) -> bool:
        """Whether most keys are out of each block's reach, as a static fact."""
        k = request.k_length
        return 4 * len(_reach(request.mask, range(k - self.block, k), range(k))) <= k

    def run(self, request: Request) -> Tensor:
        bias = request.bias
        _check_fit(request)
        work = _Work(
            self.block,
            request.q_length,
            request.k_length,
            request.mask,
            None if bias is None else bias.with_tensors(tuple(tensor.detach().to("meta") for tensor in bias.tensors())),
            request.positions,
            request.k_positions,
            request.scale,
            request.dropout_p,
            int(torch.randint(2**62, (), device="cpu")) if request.dropout_p else 0,
        )
        out = _Attend.apply(work, request.q, request.k, request.v, *(() if bias is None else bias.tensors()))
        assert isinstance(out, Tensor)
        return out


class _Block(NamedTuple):
    """Some queries, and the keys that they may see as far as is known without looking into tensors."""

    queries: slice
    keys: slice


@dataclass(frozen=True, eq=False)
class _Work:
    """What both passes know of a call beside its tensors; ``bias`` is without memory, to be filled by `with_tensors`."""

    size: int
    q_length: int
    k_length: int
    mask: Mask
    bias: ScoreBias | None
    positions: Tensor | None
    k_positions: Tensor | None
    scale: float
    dropout_p: float
    seed: int

    def blocks(self) -> Iterator[_Block]:
        lead = self.k_length - self.q_length
        for first in range(0, self.q_length, self.size):
            last = min(first + self.size, self.q_length)
            keys = _reach(self.mask, range(first + lead, last + lead), range(self.k_length))
            if keys:
                yield _Block(slice(first, last), slice(keys.start, keys.stop))

    def part(self, tensors: tuple[Tensor, ...], at: _Block) -> ScoreBias | None:
        """The bias of a block, over views of some tensors."""
        return None if self.bias is None else self.bias.with_tensors(tensors).block(at.queries, at.keys)

    def term(self, part: ScoreBias | None, at: _Block, dtype: torch.dtype) -> Tensor | None:
        if part is None:
            return None
        assert self.positions is not None
        assert self.k_positions is not None
        q_at, k_at = _along(self.positions, part, at.queries), _along(self.k_positions, part, at.keys)
        return materialize(part, q_at, k_at, dtype=dtype)

    def weights(self, q: Tensor, k: Tensor, term: Tensor | None, at: _Block) -> Tensor:
        """After the softmax, ``[batch, heads, queries, keys]``: what `Reference` computes, for one block."""
        scores = _apart(_shared(q * self.scale, k) @ k.mT, q)
        if term is not None:
            scores += term
        if self.mask.sees_all(self.q_length, self.k_length):
            return scores.softmax(-1)
        rows, columns = (torch.arange(index.start, index.stop, device=q.device) for index in at)
        allowed = self.mask.sees(..., rows[:, None], columns[None, :], self.q_length, self.k_length)
        if allowed.ndim > 2:
            allowed = allowed.unsqueeze(-3)
        weights = scores.masked_fill_(~allowed, float("-inf")).softmax(-1)
        if self.mask.sees_itself(self.q_length, self.k_length):
            return weights
        return weights.masked_fill_(~allowed.any(-1, keepdim=True), 0.0)

    def dropout(self, device: torch.device) -> _Dropout | None:
        return _Dropout(self.dropout_p, self.seed, device) if self.dropout_p else None


class _Dropout:
    """The same factors, block after block, in the forward and in the backward."""

    def __init__(self, p: float, seed: int, device: torch.device) -> None:
        self._p = p
        self._generator = torch.Generator(device).manual_seed(seed)

    def factors(self, like: Tensor) -> Tensor:
        return torch.empty_like(like).bernoulli_(1 - self._p, generator=self._generator).div_(1 - self._p)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        ctx.work = work
        ctx.save_for_backward(q, k, v, *tensors)
        out, dropout = q.new_zeros(*q.shape[:-1], v.shape[-1]), work.dropout(q.device)
        with without_autocast(q.device):
            k, v = _widened(k), _widened(v)
            for at in work.blocks():
                rows, keys, values = q[:, :, at.queries].to(k.dtype), k[:, :, at.keys], v[:, :, at.keys]
                weights = work.weights(rows, keys, work.term(work.part(tensors, at), at, k.dtype), at)
                if dropout is not None:
                    weights *= dropout.factors(weights)
                out[:, :, at.queries] = _apart(_shared(weights, k) @ values, weights)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True; once_differentiable lets it pass where upstream needs no gradient
            reason = "blockwise has no second derivative"
            raise BackendRefused(
                f"attention: {reason}. Expected create_graph=False. Use backend='sdpa' or 'reference'.", {"blockwise": reason}
            )
        work: _Work = ctx.work
        q, k, v, *tensors = saved = ctx.saved_tensors
        dtypes, learned = [t.dtype for t in saved], ctx.needs_input_grad[4:]
        leaves = tuple(t.detach().requires_grad_(needed) for t, needed in zip(tensors, learned, strict=True))
        d_tensors = tuple(torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors)
        dropout = work.dropout(q.device)
        with without_autocast(q.device):
            k, v = _widened(k), _widened(v)
            dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
            for at in work.blocks():
                rows, keys, values = q[:, :, at.queries].to(k.dtype), k[:, :, at.keys], v[:, :, at.keys]
                d_out = _shared(upstream[:, :, at.queries].to(k.dtype), k)
                with torch.enable_grad():
                    part = work.part(leaves, at)
                    term = work.term(part, at, k.dtype)
                weights = kept = work.weights(rows, keys, term, at)
                d_weights = _apart(d_out @ values.mT, rows)
                if dropout is not None:
                    factors = dropout.factors(weights)
                    kept, d_weights = weights * factors, d_weights.mul_(factors)
                dv[:, :, at.keys] += _shared(kept, k).mT @ d_out
                d_scores = d_weights.sub_(torch.linalg.vecdot(weights, d_weights)[..., None]).mul_(weights)
                del weights, kept
                dq[:, :, at.queries] = _apart(_shared(d_scores, k) @ keys, rows) * work.scale
                dk[:, :, at.keys] += _shared(d_scores, k).mT @ _shared(rows * work.scale, k)
                if part is not None and term is not None and term.requires_grad:
                    _add_gradients(term, d_scores, part, work.part(d_tensors, at))
        grads = zip((dq, dk, dv, *d_tensors), dtypes, ctx.needs_input_grad[1:], strict=True)
        return None, *(grad.to(dtype) if needed else None for grad, dtype, needed in grads)


def _add_gradients(term: Tensor, d_term: Tensor, part: ScoreBias, into: ScoreBias | None) -> None:
    """Carry the gradient of a block of numbers on to the tensors of its bias, added to those of ``into``."""
    assert into is not None
    pairs = [pair for pair in zip(part.tensors(), into.tensors(), strict=True) if pair[0].requires_grad]
    found = torch.autograd.grad(term, [view for view, _ in pairs], d_term.sum_to_size(term.shape), allow_unused=True)
    for (_, total), grad in zip(pairs, found, strict=True):
        if grad is not None:
            total += grad


def _tensors(request: Request) -> tuple[Tensor, ...]:
    return request.q, request.k, request.v, *(() if request.bias is None else request.bias.tensors()), *request.mask.tensors()


def _check_fit(request: Request) -> None:
    """Refuse a bias or mask of other lengths or another batch, by its first row and column: a block would cut too long a
    one to fit."""
    first = torch.zeros(1, 1, dtype=torch.int64, device=request.q.device)
    allowed = request.mask.sees(..., first, first, request.q_length, request.k_length)
    check_batch(allowed.unsqueeze(-3) if allowed.ndim > 2 else allowed, request, "mask")
    if request.bias is None:
        return
    assert request.positions is not None
    assert request.k_positions is not None
    one, every = slice(0, 1), slice(None)
    for queries, keys in ((one, every), (every, one)):
        part = request.bias.block(queries, keys)
        with torch.no_grad():
            term = materialize(part, _along(request.positions, part, queries), _along(request.k_positions, part, keys))
        check_batch(term, request, "bias")


def _reach(mask: Mask, queries: range, keys: range) -> range:
    """Which keys some queries may see, as a static fact. Queries are counted as keys are, the last level with the last."""
    if isinstance(mask, Causal):
        return range(keys.start, min(keys.stop, queries.stop))
    if isinstance(mask, Window):
        return range(max(keys.start, queries.start - mask.before + 1), min(keys.stop, queries.stop + mask.after))
    if isinstance(mask, (All, Either)):
        parts = [_reach(one, queries, keys) for one in mask.masks]
        first, last = (max, min) if isinstance(mask, All) else (min, max)
        return range(first(part.start for part in parts), last(part.stop for part in parts))
    return keys


def _along(positions: Tensor, bias: ScoreBias, index: slice) -> Tensor:
    return positions[..., index] if bias.axes <= 1 else positions[..., index, :]


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def _shared(x: Tensor, k: Tensor) -> Tensor:
    """``[batch, heads, queries, …]`` as ``[batch, kv_heads, group · queries, …]``: one product per key head, k not repeated."""
    return x.reshape(*k.shape[:2], -1, x.shape[-1])


def _apart(x: Tensor, like: Tensor) -> Tensor:
    """Back to the heads and queries of ``like``."""
    return x.reshape(*like.shape[:3], x.shape[-1])
