"""What a rotation is given, and where it is to be written: refused in words, or a call that any backend may serve."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.core.checks import check_integers
from posenc.core.rotary import Pairing, RotaryTable, is_head_axis
from posenc.core.rotary_backends import RotaryCall, Turned, may_share
from posenc.errors import ShapeError


def checked(
    tensors: tuple[Tensor, ...], tables: tuple[RotaryTable, ...], pairing: Pairing, head_axis: int | None, start: int
) -> RotaryCall:
    """The call that these arguments make, or an error in words."""
    if not is_head_axis(head_axis):
        raise ValueError(
            f"apply_rotary: head_axis = {head_axis!r}. Expected -3 for [batch, heads, seq, head_dim], -2 for [batch, seq, heads, "
            "head_dim], or None for a table that broadcasts as it stands. Count axes from the end."
        )
    check_integers("apply_rotary", start=start)
    first = 0
    for x, table in zip(tensors, tables, strict=True):
        first, pairs = _rotating(x, table, pairing, start)
        spread = list(table.cos.shape)
        if head_axis is not None:
            spread.insert(len(spread) + 1 + head_axis, 1)
        seq_axis = -3 if head_axis == -2 else -2
        one_for_all = head_axis is not None and table.cos.shape[-2:-1] != x.shape[seq_axis:][:1]
        if one_for_all or not _spreads(tuple(spread), (*x.shape[:-1], pairs)):
            raise ShapeError(
                f"apply_rotary: table of shape {tuple(table.cos.shape)} for x of shape {tuple(x.shape)} with head_axis = "
                f"{head_axis}. Expected [*batch, seq, pairs] that spreads over x's heads. Make the table from the positions "
                "of exactly these tokens, and set head_axis=-2 for [batch, seq, heads, head_dim]."
            )
    return RotaryCall(tensors, tables, pairing, head_axis, first)


def _rotating(x: Tensor, table: RotaryTable, pairing: Pairing, start: int) -> tuple[int, int]:
    """The first rotating channel and the number of pairs, checked."""
    if pairing not in ("half", "interleaved"):
        raise ValueError(
            f"apply_rotary: pairing = {pairing!r}. Expected 'half' (i, i + rotary_dim/2) or 'interleaved' (2i, 2i + 1). "
            "Name the one that the weights were trained with."
        )
    if not isinstance(x, Tensor) or not isinstance(table, RotaryTable):
        raise TypeError(
            f"apply_rotary: x is a {type(x).__name__} and the table a {type(table).__name__}. Expected a tensor and a RotaryTable. "
            "Make the table with rotary_table, or RotaryTable(cos, sin) with one column per pair."
        )
    if not isinstance(table.cos, Tensor) or not isinstance(table.sin, Tensor):
        raise TypeError(
            f"apply_rotary: the table holds a {type(table.cos).__name__} and a {type(table.sin).__name__}. Expected two tensors. Make "
            "it with rotary_table, or torch.from_numpy."
        )
    if table.cos.dtype not in (torch.float32, torch.float64) or table.sin.dtype != table.cos.dtype:
        raise TypeError(
            f"apply_rotary: the table is {table.cos.dtype} and {table.sin.dtype}. Expected float32 or float64. A "
            "mixed-precision wrapper that casts its inputs is the usual cause: pass integer positions through it and "
            "prepare the table inside."
        )
    if not x.is_floating_point():
        raise TypeError(f"apply_rotary: x is {x.dtype}. Expected a floating dtype. Pass queries or keys.")
    if any(part.is_nested or part.layout is not torch.strided or part.ndim == 0 for part in (x, *table)):
        layouts = ["nested" if part.is_nested else str(part.layout) for part in (x, *table)]
        raise ShapeError(
            f"apply_rotary: x of {x.ndim} axes ({layouts[0]}) with a table of {table.cos.ndim} and {table.sin.ndim} ({layouts[1]} and "
            f"{layouts[2]}). Expected dense tensors of one axis or more. Use to_dense() or a padded tensor."
        )
    if table.cos.device != x.device or table.sin.device != x.device:
        raise ValueError(
            f"apply_rotary: x is on {x.device} and the table on {table.cos.device} and {table.sin.device}. Expected one device. "
            "Make the table from positions that are where x is."
        )
    pairs, head_dim = table.cos.shape[-1], x.shape[-1]
    first = start + head_dim if start < 0 else start
    if table.cos.shape != table.sin.shape or not 0 <= first <= head_dim - 2 * pairs:
        raise ShapeError(
            f"apply_rotary: a table of {pairs} pairs (cos {tuple(table.cos.shape)}, sin {tuple(table.sin.shape)}) at "
            f"start = {start} for head_dim = {head_dim}. Expected start + 2·pairs ≤ head_dim. Tables are half width: "
            "one column per pair, not per channel."
        )
    return first, pairs


def sealed(x: Tensor) -> bool:
    """Whether torch forbids writing to it here: a tensor of inference mode, which counts no versions, outside that mode."""
    return not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled()


def overlaps(x: Tensor) -> bool:
    """Whether entries of x may share memory: false for all that slicing and transposing make of a tensor that owns its own."""
    if x.numel() == 0:
        return False
    reach = 0
    for step, size in sorted((step, size) for size, step in zip(x.shape, x.stride(), strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _spreads(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    tail = over[len(over) - len(shape) :] if len(shape) <= len(over) else ()
    return len(tail) == len(shape) and all(a in (1, b) for a, b in zip(shape, tail, strict=True))


def check_outs(tensors: Turned, tables: tuple[RotaryTable, ...], outs: object) -> None:
    """Refuse what the results cannot be written to."""
    if len(tensors) == 1 and isinstance(outs, tuple) and not isinstance(outs[0], Tensor):
        raise TypeError(f"apply_rotary: out is a {type(outs[0]).__name__}. Expected a tensor. Pass torch.empty_like(x).")
    if not isinstance(outs, tuple) or len(outs) != len(tensors) or not all(isinstance(out, Tensor) for out in outs):
        given = [type(out).__name__ for out in outs] if isinstance(outs, tuple) else type(outs).__name__
        raise TypeError(
            f"apply_rotary_pair: out is {given}. Expected a tuple of two tensors, out=(q_out, k_out). Pass "
            "torch.empty_like(q) and torch.empty_like(k)."
        )
    for x, table, out in zip(tensors, tables, outs, strict=True):
        _check_out(x, table, out)
    if len(outs) == 2 and may_share(*outs):
        raise ValueError(
            "apply_rotary_pair: the two tensors of out share memory. Expected memory of its own for each. Pass torch.empty_like(q) "
            "and torch.empty_like(k)."
        )


def _check_out(x: Tensor, table: RotaryTable, out: Tensor) -> None:
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ShapeError(
            f"apply_rotary: out is {out.dtype} of shape {tuple(out.shape)}. Expected {x.dtype} of shape {tuple(x.shape)}. "
            "Pass torch.empty_like(x)."
        )
    if out.device != x.device:
        raise ValueError(
            f"apply_rotary: out is on {out.device} and x on {x.device}. Expected one device. Pass torch.empty_like(x)."
        )
    if overlaps(out):
        raise ValueError(
            f"apply_rotary: out of shape {tuple(out.shape)} with strides {out.stride()} overlaps itself. Expected memory of its own for "
            "each entry. Pass torch.empty_like(x)."
        )
    if sealed(out):
        raise ValueError(
            "apply_rotary: out was made under torch.inference_mode() and cannot be written outside it. Expected the mode, or a tensor "
            "of its own. Pass torch.empty_like(x) made here."
        )
    table_grad = any(part.requires_grad for part in table)
    if torch.is_grad_enabled() and (x.requires_grad or table_grad or out.requires_grad):
        raise ValueError(
            "apply_rotary: out= with a tensor that needs a gradient. Expected inference. Leave out= away, or use torch.no_grad()."
        )
