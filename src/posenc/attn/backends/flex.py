"""torch's flex_attention, with mask and bias compiled into the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, TypeVar, final

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.library import Library, register_fake
from torch.nn.functional import pad

from posenc.attn.backends.base import NO_WEIGHTS, Backend, dense_terms
from posenc.attn.request import Request
from posenc.core.autocast import without_autocast
from posenc.core.bias import FormulaBias, ScoreBias, SumBias, score_mod

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128
_NARROW = 24
_NARROWEST = 16
"""Channels, of torch's kernel on CUDA."""

Modify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Value = TypeVar("Value")


@final
class Flex(Backend):
    """`torch.nn.attention.flex_attention`: the bias entry by entry inside the kernel, blocks that nobody sees skipped.

    Whether it is fused is the caller's choice, as with flex_attention itself. Under `torch.compile` of the function that calls
    `attention` no scores are written out, only, on the CPU, a byte per pair of the mask; compiling takes some ten seconds
    for each kind of bias and mask. Called eagerly it writes all scores out, and torch warns once.

    Training needs CUDA: there is no backward on the CPU. What is said of CUDA is unverified until it has run there. In
    compiled calls on the CPU a key that is no finite number makes every row NaN, hidden or not.
    """

    name = "flex"

    def refusal(self, request: Request) -> str | None:
        if request.value_table is not None:
            return NO_WEIGHTS
        device, compiled = request.q.device.type, torch.compiler.is_compiling()
        tensors = [request.q, request.k, request.v, *(() if request.bias is None else request.bias.tensors())]
        if device not in ("cpu", "cuda"):
            return f"it is used on cpu and cuda, not on {device}"
        if request.dropout_p:
            return "it has no dropout"
        if any(isinstance(term, FormulaBias) and not term.pointwise for term in _terms(request.bias)):
            return "its compiler takes formulas of elementwise arithmetic, and this one is not pointwise"
        if compiled and request.q.dtype == torch.float64:
            return "compiled it computes in float32, and the inputs are float64"
        if compiled and device == "cuda" and min(request.q.shape[-1], request.v.shape[-1]) < _NARROWEST:
            return f"its kernel on cuda needs {_NARROWEST} channels or more"
        if not compiled and any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
            return "torch.func cannot transform it"
        if not compiled and any(unpack_dual(tensor).tangent is not None for tensor in tensors):
            return "it has no forward-mode derivative"
        if any(at is not None and at.requires_grad for at in (request.positions, request.k_positions)):
            return "it gives positions no gradient"
        learned = [tensor for tensor in tensors if tensor.requires_grad] if torch.is_grad_enabled() else []
        if learned and device == "cpu":
            return "it has no backward on the CPU, and a gradient is needed"
        learned = [tensor for tensor in learned if not any(tensor is given for given in tensors[:3])]
        if len({id(tensor) for tensor in learned}) < len(learned):
            return "its backward reads a learned tensor once, and this bias holds one twice"
        if learned and torch.are_deterministic_algorithms_enabled():
            return "it adds up the gradient of a bias in no fixed order, and deterministic algorithms are asked for"
        return None

    def hesitation(self, request: Request) -> str | None:
        return "torch calls it a prototype, and it is slow where the call is not compiled"

    def run(self, request: Request) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention  # not with `import posenc`

        q, k, v = request.q, request.k, request.v
        if not torch.is_grad_enabled():
            q, k, v = q.detach(), k.detach(), v.detach()  # on the CPU torch refuses their flags alone
        with without_autocast(q.device):
            dense_terms(_map(lambda tensor: tensor.to("meta"), request), torch.float32)  # refuses shapes that do not fit
            hold, given = _hold(q.device), request
            request = replace(
                given, mask=_map(hold, given.mask), bias=_map(hold, given.bias),
                positions=_map(hold, given.positions), k_positions=_map(hold, given.k_positions),
            )  # fmt: skip
            allowed = blocks = None
            if not request.mask.sees_all(request.q_length, request.k_length):
                allowed = _finished(request.mask.allowed(request.q_length, request.k_length, device=q.device))
                blocks = _blocks(request, allowed)
            cpu = _compiled_on_cpu(q)
            out = flex_attention(
                _wide(q) if cpu else q, _wide(k) if cpu else k, v + _nan_of(k) if cpu else v,
                score_mod=_modify(request), block_mask=blocks, scale=request.scale, enable_gqa=request.grouped,
            )  # fmt: skip
            assert isinstance(out, Tensor)
            if cpu:
                out = _finished(out) + _nan_of(q)
            if allowed is None or request.mask.sees_itself(request.q_length, request.k_length):
                return out
            sees = allowed.any(-1)[..., None, :, None]
            return torch.where(sees, out, 0.0)  # torch's kernels for decoding divide by zero in a row that sees nothing


def _compiled_on_cpu(q: Tensor) -> bool:
    return torch.compiler.is_compiling() and q.device.type == "cpu"


def _wide(x: Tensor) -> Tensor:
    """With channels of zeros where there are few: below 24, torch 2.13 reads eight keys past the last and keeps their scores."""
    return pad(x, (0, max(0, _NARROW - x.shape[-1])))


def _nan_of(x: Tensor) -> Tensor:
    """0, or NaN where any channel is no finite number: torch 2.13's kernel takes scores of NaN for hidden ones."""
    return (0.0 * x).sum(-1, keepdim=True)


def _modify(request: Request) -> Modify | None:
    if request.bias is None:
        return None
    assert request.positions is not None
    return score_mod(request.bias, request.positions, request.k_positions)


def _blocks(request: Request, allowed: Tensor) -> BlockMask:
    """The blocks of queries and keys in which anyone sees anything, the wholly seen ones apart.

    As torch's create_block_mask, which maps the rule over every pair where `Mask.allowed` is at hand.
    """
    from torch.nn.attention.flex_attention import BlockMask

    mask, q_length, k_length = request.mask, request.q_length, request.k_length
    whole = pad(allowed, (0, -k_length % _BLOCK, 0, -q_length % _BLOCK))
    tiles = whole.unflatten(-1, (-1, _BLOCK)).unflatten(-3, (-1, _BLOCK))  # [*batch, rows, BLOCK, columns, BLOCK]
    some, every = tiles.any(-1).any(-2), tiles.all(-1).all(-2)
    return BlockMask.from_kv_blocks(
        *_in_order(some & ~every), *_in_order(every), BLOCK_SIZE=_BLOCK,
        mask_mod=lambda b, h, q, k: mask.sees(b, q, k, q_length, k_length), seq_lengths=(q_length, k_length),
    )  # fmt: skip


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and which, those first: ``[batch, 1, rows]`` and one axis more."""
    wanted = (blocks if blocks.ndim > 2 else blocks[None]).unsqueeze(1).to(torch.int32)
    return wanted.sum(-1, dtype=torch.int32), wanted.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def _terms(bias: ScoreBias | None) -> Iterator[ScoreBias]:
    for term in bias.terms if isinstance(bias, SumBias) else () if bias is None else (bias,):
        yield from _terms(term) if isinstance(term, SumBias) else (term,)


def _hold(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Moves a tensor to where kernels read it, in one piece; integers as int64."""

    def hold(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device)
        return _finished((tensor if tensor.is_floating_point() else tensor.to(torch.int64)).contiguous())

    return hold


def _finished(tensor: Tensor) -> Tensor:
    """A tensor that the CPU's compiler takes as it is.

    Around flex_attention torch 2.13 fails there on what it could fuse: on captured tensors that are not in memory yet, on
    arithmetic that follows, on counting the blocks of a mask while it is made.
    """
    if _compiled_on_cpu(tensor):
        return torch.ops.posenc.finished(tensor)  # type: ignore[no-any-return]
    return tensor


def _map(function: Callable[[Tensor], Tensor], value: Value) -> Value:
    """A value with a function applied to every tensor in it."""
    if isinstance(value, Tensor):
        return function(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(_map(function, each) for each in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _map(function, getattr(value, field.name)) for field in fields(value)})
    return value


_LIBRARY = Library("posenc", "FRAGMENT")
_LIBRARY.define("finished(Tensor x) -> Tensor")
_LIBRARY.impl("finished", lambda x: x.clone(memory_format=torch.contiguous_format), "CPU")
register_fake("posenc::finished", lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
