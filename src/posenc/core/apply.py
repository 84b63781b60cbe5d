"""Turning queries and keys by a table: at once where nothing stands against it, else by the backend that serves the call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from posenc.core.backends import Verdict, choose, judge
from posenc.core.rotary import Pairing, RotaryTable, is_head_axis
from posenc.core.rotary_backends import ROTARY_BACKENDS, RotaryBackend, RotaryCall, Turned, count_write, may_share
from posenc.core.rotary_checks import check_outs, checked, overlaps, sealed

_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
FARTHEST = 2**31
"""No head is as wide: a start beyond it is told of in words, before an operator's 64 bits overflow."""


def apply_rotary(
    x: Float[Tensor, "*batch heads seq head_dim"],
    table: RotaryTable,
    *,
    pairing: Pairing,
    head_axis: int | None = -3,
    start: int = 0,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Turn each channel pair of ``x`` by its token's angle: ``(a·cos - b·sin, b·cos + a·sin)``.

    The thing people get wrong: ``pairing`` belongs to the weights that made ``x``. The wrong one keeps every shape and
    gives fluent nonsense.

    Channels outside ``[start, start + 2·pairs)`` pass through bit-equal. The arithmetic is float32 (float64 for
    float64 ``x``), rounded once to ``x``'s dtype; the gradient is the transposed rotation under the same rule.

    Shape:
        x: ``[*batch, heads, seq, head_dim]``, or ``[*batch, seq, heads, head_dim]`` with ``head_axis=-2``.
        table: ``[*batch, seq, pairs]``, spread over the heads; with ``head_axis=None`` it must broadcast to ``x``
        as it stands (no head axis, or one of its own).

    Args:
        start: the first rotating channel; negative counts from the end (``-2 * pairs``: the trailing channels).
        out: where to write the result (may be ``x`` itself); not for tensors that need a gradient.
        backend: ``"auto"``, ``"native"`` (the compiled CPU kernel), ``"reference"`` (the arithmetic in torch) or
            ``"triton"`` (CUDA; not yet run on a GPU, so never chosen by itself). The first two give the same bits; `explain` says which one serves a call.

    Returns:
        The rotated tensor: ``x``'s shape, dtype, device and, in eager mode, stride order (contiguous where x's channels
        do not lie together); never aliases ``x`` unless ``out`` does.

    Raises:
        TypeError: half-precision tables, or integer ``x``.
        ShapeError: a table that does not fit ``x``.
        ValueError: an unknown pairing or head axis; an ``out`` that overlaps itself, or one that needs a gradient.
        BackendRefused: the named backend does not serve the call.

    Example:
        >>> x = torch.arange(1.0, 9.0).reshape(1, 1, 8)
        >>> inv_freq = torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64)
        >>> table = rotary_table(torch.tensor([3]), Frequencies(inv_freq))
        >>> apply_rotary(x, table, pairing="interleaved")[0, 0, :4]
        tensor([-1.2722, -1.8389,  1.6839,  4.7079])

    Differs from:
        transformers: full-width tables there, applied in the model's dtype.
        flash-attention: ``interleaved=`` there is ``pairing="interleaved"``.

    References:
        Su et al. 2021, arXiv:2104.09864 (interleaved pairs).
    """
    if backend == "auto" and out is None and not torch.compiler.is_compiling():
        turned = _at_once((x,), (table,), pairing, head_axis, start)
        if turned is not None:
            return turned[0]
    call = checked((x,), (table,), pairing, head_axis, start)
    if torch.compiler.is_compiling() and _exports_to_onnx() and head_axis == -3 and call.first == 0 and x.ndim == 4:
        return _onnx_node(x, table, pairing)
    return _run(call, backend, None if out is None else (out,))[0]


def apply_rotary_pair(
    q: Tensor,
    k: Tensor,
    table: RotaryTable,
    k_table: RotaryTable | None = None,
    *,
    pairing: Pairing,
    head_axis: int | None = -3,
    start: int = 0,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`apply_rotary` of queries and keys in one call.

    Args:
        k_table: of the keys; ``None`` means that they are the same tokens.
        out: where to write the two results; ``(q, k)`` turns in place. Not for tensors that need a gradient.
        otherwise as `apply_rotary`.

    Example:
        >>> q, k = torch.ones(1, 4, 3, 2), torch.ones(1, 2, 3, 2)
        >>> table = RotaryTable(torch.zeros(3, 1), torch.ones(3, 1))
        >>> turned = apply_rotary_pair(q, k, table, pairing="half", out=(q, k))
        >>> turned[0] is q, k[0, 0, 0]
        (True, tensor([-1.,  1.]))
    """
    k_table = table if k_table is None else k_table
    if backend == "auto" and out is None and not torch.compiler.is_compiling():
        turned = _at_once((q, k), (table, k_table), pairing, head_axis, start)
        if turned is not None:
            return turned[0], turned[1]
    if out is None and torch.compiler.is_compiling() and _exports_to_onnx():
        return (
            apply_rotary(q, table, pairing=pairing, head_axis=head_axis, start=start, backend=backend),
            apply_rotary(k, k_table, pairing=pairing, head_axis=head_axis, start=start, backend=backend),
        )
    if isinstance(q, Tensor) and isinstance(k, Tensor) and q.shape[-1:] != k.shape[-1:]:
        return _run_apart(
            [checked((x,), (own,), pairing, head_axis, start) for x, own in ((q, table), (k, k_table))], backend, out
        )
    call = checked((q, k), (table, k_table), pairing, head_axis, start)
    rotated_q, rotated_k = _run(call, backend, out)
    return rotated_q, rotated_k


def apply_rotary_(
    x: Float[Tensor, "*batch heads seq head_dim"],
    table: RotaryTable,
    *,
    pairing: Pairing,
    head_axis: int | None = -3,
    start: int = 0,
    backend: str = "auto",
) -> Tensor:
    """`apply_rotary` in place, for inference: half the memory traffic, no new memory.

    Returns:
        ``x`` itself.

    Raises:
        ValueError: ``x`` needs a gradient, or entries of it share memory (an expanded tensor).
        otherwise as `apply_rotary`.

    Example:
        >>> x = torch.ones(1, 1, 2)
        >>> table = RotaryTable(torch.tensor([[0.0]]), torch.tensor([[1.0]]))
        >>> apply_rotary_(x, table, pairing="half")
        tensor([[[-1.,  1.]]])
    """
    if backend == "auto" and not torch.compiler.is_compiling() and _in_place_at_once(x, table, pairing, head_axis, start):
        return x
    call = checked((x,), (table,), pairing, head_axis, start)
    if torch.is_grad_enabled() and (x.requires_grad or any(part.requires_grad for part in table)):
        raise ValueError(
            "apply_rotary_: x or the table needs a gradient, and turning in place would overwrite what backward reads. Expected "
            "inference. Use apply_rotary, or torch.no_grad()."
        )
    if overlaps(x):
        raise ValueError(
            f"apply_rotary_: x of shape {tuple(x.shape)} with strides {x.stride()} overlaps itself. Expected memory of its own for "
            "each entry. Call contiguous() first."
        )
    if sealed(x):
        raise ValueError(
            "apply_rotary_: x was made under torch.inference_mode() and cannot be written outside it. Expected the mode, or a tensor "
            "of its own. Use apply_rotary, or turn inside torch.inference_mode()."
        )
    _chosen(call, backend).run_into(call, (x,))
    return x


def rotary_verdicts(function: Callable[..., object], *args: Any, backend: str, **kwargs: Any) -> list[Verdict]:
    """One verdict per backend for a call of `apply_rotary`, `apply_rotary_` or `apply_rotary_pair`, without running it."""
    given = signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    call = given.arguments
    place = call["pairing"], call["head_axis"], call["start"]
    if function is apply_rotary_pair:
        k_table = call["table"] if call["k_table"] is None else call["k_table"]
        return judge(
            "apply_rotary", ROTARY_BACKENDS, checked((call["q"], call["k"]), (call["table"], k_table), *place), backend
        )
    return judge("apply_rotary", ROTARY_BACKENDS, checked((call["x"],), (call["table"],), *place), backend)


def _at_once(
    tensors: Turned,
    tables: tuple[RotaryTable, ...],
    pairing: Pairing,
    head_axis: int | None,
    start: int,
    outs: Turned | None = None,
) -> Turned | None:
    """The tensors turned by the compiled kernel, when nothing stands against it that is quick to see.

    For one token the checks of a call take longer than the call. The kernel checks shapes and dtypes itself; where it
    finds fault, the long way finds the words for it.
    """
    native = _loaded_native()
    if (
        native is None
        or pairing not in ("half", "interleaved")
        or not is_head_axis(head_axis)
        or type(start) is not int
        or not -FARTHEST < start < FARTHEST
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)  # where modes of tracing before dispatch stand
    ):
        return None
    parts: list[Tensor] = []
    grad = torch.is_grad_enabled()
    for table in tables:
        if parts and table is tables[0]:
            parts += parts
            break
        if type(table) is not RotaryTable:
            return None
        for part in table:
            if type(part) is not Tensor or not part.is_cpu or (grad and part.requires_grad):
                return None
        parts += table
    for x in tensors:
        if type(x) is not Tensor or not x.is_cpu:
            return None
    needs_gradient = grad and tensors[0].requires_grad
    if grad and tensors[-1].requires_grad is not needs_gradient:
        return None
    try:
        first = start
        if start < 0:
            first += tensors[0].shape[-1]
            if tensors[-1].shape[-1] != tensors[0].shape[-1]:
                return None
        settings = pairing == "interleaved", first, head_axis or 0, False
        if outs is None:
            turned = native.OPERATORS[len(tensors), needs_gradient](*tensors, *parts, *settings)
        else:
            native.INTO[len(outs)](*tensors, *parts, *settings, *outs)
    except (ValueError, IndexError, NotImplementedError):
        return None
    if outs is not None:
        count_write(outs)
        return outs
    return turned if len(tensors) == 2 else (turned,)


def _in_place_at_once(x: Tensor, table: RotaryTable, pairing: Pairing, head_axis: int | None, start: int) -> bool:
    """Turn in place by the compiled kernel as `_at_once` does; false when the long way is needed."""
    if type(x) is not Tensor or type(table) is not RotaryTable or not x.is_cpu or x.is_neg() or x.layout is not torch.strided:
        return False
    if x.stride()[-1:] != (1,) or overlaps(x) or sealed(x) or (torch.is_grad_enabled() and x.requires_grad):
        return False
    if any(type(part) is not Tensor or part.layout is not torch.strided or may_share(x, part) for part in table):
        return False
    return _at_once((x,), (table,), pairing, head_axis, start, outs=(x,)) is not None


@cache
def _loaded_native() -> ModuleType | None:
    """The module of the compiled kernel, if it can be had here."""
    from posenc.kernels import native

    return native if native.refusal() is None else None


def _chosen(call: RotaryCall, backend: str) -> RotaryBackend:
    chosen = choose("apply_rotary", ROTARY_BACKENDS, call, backend)
    assert isinstance(chosen, RotaryBackend)
    return chosen


def _run(call: RotaryCall, backend: str, outs: tuple[Tensor, ...] | None) -> Turned:
    if outs is None:
        return _chosen(call, backend).run(call)
    check_outs(call.tensors, call.tables, outs)
    _chosen(call, backend).run_into(call, outs)
    return outs


def _run_apart(calls: list[RotaryCall], backend: str, outs: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Queries and keys of different width, each turned before either is written."""
    if outs is not None:
        check_outs(tuple(call.tensors[0] for call in calls), tuple(call.tables[0] for call in calls), outs)
    q, k = (_chosen(call, backend).run(call)[0] for call in calls)
    return (q, k) if outs is None else (outs[0].copy_(q), outs[1].copy_(k))


def _exports_to_onnx() -> bool:
    """Whether torch.onnx is tracing; without loading it when it is not."""
    return bool(torch.compiler.is_exporting()) and torch.onnx.is_in_onnx_export()


def _onnx_node(x: Tensor, table: RotaryTable, pairing: Pairing) -> Tensor:
    """One RotaryEmbedding node of opset 23. The standard has the table in x's dtype."""
    cos, sin = (t.expand(x.shape[0], *t.shape[-2:]).to(x.dtype) for t in table)
    interleaved, rotary_dim = pairing == "interleaved", 2 * cos.shape[-1]
    turned: Tensor = torch.onnx.ops.rotary_embedding(
        x, cos, sin, interleaved=interleaved, rotary_embedding_dim=0 if rotary_dim == x.shape[-1] else rotary_dim
    )
    return turned
