"""The compiled CPU kernel behind dispatcher ops, so that tracing, autograd and dispatch modes see it as they see torch's.

Called with raw addresses from anywhere else it would be silently wrong under tracing, for negative views, in forward
mode and in dispatch modes. Inside the dispatcher's CPU kernels tensors are plain and hold their values.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library, register_autograd, register_fake, register_vmap

TABLE = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""The dtype of arithmetic and tables, by that of the tensors."""

CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

_TAIL = "bool interleaved, int first, int head_axis, bool transposed"
_ONE, _TWO = "Tensor cos, Tensor sin", "Tensor q_cos, Tensor q_sin, Tensor k_cos, Tensor k_sin"


@cache
def refusal() -> str | None:
    """Why the kernel cannot be had here, or ``None``."""
    try:
        from posenc.kernels import _rotary
    except ImportError as error:
        return f"the compiled kernel is not installed ({error}); build posenc where a C compiler is"
    address = _torch_threads()
    if address is not None:
        _rotary.use_threads(address)
    return None


@cache
def threads() -> str:
    """How many threads the kernel uses, in words."""
    return "torch's own threads" if _torch_threads() is not None else "one thread, because this torch has no torch_parallel_for"


def _torch_threads() -> int | None:
    """The address of ``torch_parallel_for``, which torch has since 2.10."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        if (folder / name).exists():
            function = getattr(ctypes.CDLL(str(folder / name)), "torch_parallel_for", None)
            return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
    return None


_LIBRARY = Library("posenc", "DEF")
_LIBRARY.define(f"rotary(Tensor x, {_ONE}, {_TAIL}) -> Tensor")
_LIBRARY.define(f"rotary_pair(Tensor q, Tensor k, {_TWO}, {_TAIL}) -> (Tensor, Tensor)")
_LIBRARY.define(f"rotary_inference(Tensor x, {_ONE}, {_TAIL}) -> Tensor")  # without the cost of asking autograd
_LIBRARY.define(f"rotary_pair_inference(Tensor q, Tensor k, {_TWO}, {_TAIL}) -> (Tensor, Tensor)")
_LIBRARY.define(f"rotary_out(Tensor x, {_ONE}, {_TAIL}, Tensor(a!) out) -> ()")
_LIBRARY.define(f"rotary_pair_out(Tensor q, Tensor k, {_TWO}, {_TAIL}, Tensor(a!) q_out, Tensor(b!) k_out) -> ()")


# fmt: off
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, first: int, head_axis: int, transposed: bool) -> Tensor:
    x, out = _rows_and_room(x)
    _turn(x, cos, sin, interleaved, first, head_axis, transposed, out)
    return out


def _rotary_out(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, first: int, head_axis: int, transposed: bool, out: Tensor
) -> None:
    _check_out(x, out)
    _turn(_rows(x), cos, sin, interleaved, first, head_axis, transposed, out)


def _turn(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, first: int, head_axis: int, transposed: bool, out: Tensor
) -> None:
    cos, sin = _columns(x, cos, sin)
    _kernel()(
        CODES[x.dtype], interleaved, first, head_axis, transposed,
        x.data_ptr(), out.data_ptr(), x.shape, x.stride(), out.stride(),
        cos.data_ptr(), sin.data_ptr(), cos.shape, cos.stride(),
    )


def _rotary_pair(
    q: Tensor, k: Tensor, q_cos: Tensor, q_sin: Tensor, k_cos: Tensor, k_sin: Tensor,
    interleaved: bool, first: int, head_axis: int, transposed: bool,
) -> tuple[Tensor, Tensor]:
    (q, q_out), (k, k_out) = _rows_and_room(q), _rows_and_room(k)
    _turn_pair(q, k, q_cos, q_sin, k_cos, k_sin, interleaved, first, head_axis, transposed, q_out, k_out)
    return q_out, k_out


def _rotary_pair_out(
    q: Tensor, k: Tensor, q_cos: Tensor, q_sin: Tensor, k_cos: Tensor, k_sin: Tensor,
    interleaved: bool, first: int, head_axis: int, transposed: bool, q_out: Tensor, k_out: Tensor,
) -> None:
    _check_out(q, q_out)
    _check_out(k, k_out)
    _turn_pair(_rows(q), _rows(k), q_cos, q_sin, k_cos, k_sin, interleaved, first, head_axis, transposed, q_out, k_out)


def _turn_pair(
    q: Tensor, k: Tensor, q_cos: Tensor, q_sin: Tensor, k_cos: Tensor, k_sin: Tensor,
    interleaved: bool, first: int, head_axis: int, transposed: bool, q_out: Tensor, k_out: Tensor,
) -> None:
    if q.dtype is not k.dtype:
        raise ValueError("posenc::rotary_pair: q and k are of different dtypes")
    shared = k_cos is q_cos and k_sin is q_sin
    q_cos, q_sin = _columns(q, q_cos, q_sin)
    tables = [q_cos.data_ptr(), q_sin.data_ptr(), q_cos.shape, q_cos.stride()]
    if not shared:
        k_cos, k_sin = _columns(k, k_cos, k_sin)
        tables += k_cos.data_ptr(), k_sin.data_ptr(), k_cos.shape, k_cos.stride()
    _kernel()(
        CODES[q.dtype], interleaved, first, head_axis, transposed,
        q.data_ptr(), q_out.data_ptr(), q.shape, q.stride(), q_out.stride(),
        k.data_ptr(), k_out.data_ptr(), k.shape, k.stride(), k_out.stride(),
        *tables,
    )
# fmt: on


def _check_out(x: Tensor, out: Tensor) -> None:
    if out.dtype is not x.dtype or out.shape != x.shape or out.stride(-1) != 1:
        raise ValueError("posenc::rotary_out: out is not of x's dtype and shape, or its channels do not lie together")


@cache
def _kernel() -> Any:
    reason = refusal()
    if reason is not None:
        raise RuntimeError(reason)
    from posenc.kernels._rotary import rotate

    return rotate


def _rows(x: Tensor) -> Tensor:
    """Rows of channels that lie together in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _columns(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A table that fits x's arithmetic, as rows that lie together in cosine and sine alike."""
    if cos.dtype is not TABLE.get(x.dtype) or sin.dtype is not cos.dtype or sin.shape != cos.shape:
        raise ValueError("posenc::rotary: a dtype that it does not serve, or cosine and sine that do not fit it or each other")
    steps = cos.stride()
    return (cos, sin) if steps == sin.stride() and steps[-1] == 1 else (cos.contiguous(), sin.contiguous())


def _rows_and_room(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as `_rows`, and an empty tensor in its order of memory; in the usual one where x overlaps itself."""
    if x.is_contiguous():  # one question for three
        return x, torch.empty_like(x)
    x = _rows(x)
    out = torch.empty_like(x)
    return x, out if out.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake(x: Tensor, *rest: Any) -> Tensor:
    return _rows_and_room(x)[1]


def _fake_pair(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake(q), _fake(k)


def _batched(operator: Any, tensors: int, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
    """One call for a batch of calls, as ``is_grads_batched`` makes of a backward."""
    settings = inputs[-4:]
    fronted: list[Tensor] = []
    for at, (value, axis) in enumerate(zip(inputs[:-4], in_dims, strict=False)):
        value = value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)
        if at >= tensors:  # a table: the axes that it leaves to broadcasting come after the new one
            x = fronted[(at - tensors) // 2]
            ones = x.ndim - value.ndim - (settings[2] != 0)
            value = value.reshape(len(value), *(1,) * ones, *value.shape[1:])
        fronted.append(value)
    turned = operator(*fronted, *settings)
    return turned, 0 if tensors == 1 else (0, 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[2 if len(inputs) == 10 else 1 : -4])  # the tables alone
    ctx.settings = inputs[-4:]


def _turn_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *_backward(torch.ops.posenc.rotary, ctx, [grad]), *(None,) * 6


def _turn_pair_back(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Any, ...]:
    return *_backward(torch.ops.posenc.rotary_pair, ctx, [q_grad, k_grad]), *(None,) * 8


def _backward(operator: Any, ctx: Any, grads: list[Tensor]) -> list[Tensor]:
    """The transposed rotation, which carries tangents too: autograd would drop them silently for a custom operator."""

    def back(grads: list[Tensor]) -> list[Tensor]:
        *settings, transposed = ctx.settings
        turned = operator(*grads, *ctx.saved_tensors, *settings, not transposed)
        return [turned] if len(grads) == 1 else list(turned)

    if forward_ad._current_level < 0:
        return back(grads)
    duals = [forward_ad.unpack_dual(grad) for grad in grads]
    primals = back([dual.primal for dual in duals])
    if all(dual.tangent is None for dual in duals):
        return primals
    tangents = back([torch.zeros_like(dual.primal) if dual.tangent is None else dual.tangent for dual in duals])
    return [forward_ad.make_dual(primal, tangent) for primal, tangent in zip(primals, tangents, strict=True)]


for _name, _compute, _shape in (
    ("rotary", _rotary, _fake),
    ("rotary_pair", _rotary_pair, _fake_pair),
    ("rotary_inference", _rotary, _fake),
    ("rotary_pair_inference", _rotary_pair, _fake_pair),
    ("rotary_out", _rotary_out, lambda *rest: None),
    ("rotary_pair_out", _rotary_pair_out, lambda *rest: None),
):
    _LIBRARY.impl(_name, _compute, "CPU")
    register_fake(f"posenc::{_name}", _shape, lib=_LIBRARY)
register_autograd("posenc::rotary", _turn_back, setup_context=_save, lib=_LIBRARY)
register_autograd("posenc::rotary_pair", _turn_pair_back, setup_context=_save, lib=_LIBRARY)
register_vmap("posenc::rotary", partial(_batched, torch.ops.posenc.rotary, 1), lib=_LIBRARY)
register_vmap("posenc::rotary_pair", partial(_batched, torch.ops.posenc.rotary_pair, 2), lib=_LIBRARY)

OPERATORS = {
    (1, False): torch.ops.posenc.rotary_inference.default,
    (1, True): torch.ops.posenc.rotary.default,
    (2, False): torch.ops.posenc.rotary_pair_inference.default,
    (2, True): torch.ops.posenc.rotary_pair.default,
}
"""By the number of tensors, and whether one of them needs a gradient."""

INTO = {1: torch.ops.posenc.rotary_out.default, 2: torch.ops.posenc.rotary_pair_out.default}
"""Those that write to tensors given after all else, by the number of tensors."""
