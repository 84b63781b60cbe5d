"""The Triton kernel for CUDA devices, behind dispatcher ops as the CPU kernel is.

Checked under Triton's interpreter and compiled for sm_80 and sm_90; not yet run on a GPU. Importing this file imports
triton, so nothing does before a call has tensors on such a device.

Every product and sum is rounded by itself (no fused multiply-add), in the table's dtype, and results are rounded once.
A program takes a tile of tokens and walks a few heads with it, so that a table is read once for those heads.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"
# triton has no types, and is not installed everywhere

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from posenc.errors import ShapeError

WIDE = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""The dtype of arithmetic and tables, by that of the tensors."""

MOST_AXES = 5
"""How many axes a tensor may have, channels included."""


def refusal() -> str | None:
    """Why the kernel cannot be had with this triton, or ``None``."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return None if version >= (3, 3) else f"triton is {triton.__version__}, and the kernel needs 3.3 or later"


_TILE = 1024  # pairs in a tile: eight per thread of four warps, 16 bytes of a 16-bit dtype
_MANY = 2048  # tiles that keep a large GPU busy; with more of them a program takes several heads


@triton.jit
def _rows_of_table(
    lookup, token, present, pair, length, row_step, axis_step, axis_of_pair, axes, documents, bisections,
    PAIRS: tl.constexpr, LOOKUP: tl.constexpr,
):  # fmt: skip
    """Where in the table the pairs of each token are, which of them are there, and which tokens are padding."""
    padding = token < 0
    if LOOKUP == "none":  # the table has a row for each token
        return token[:, None] + pair[None, :], present[:, None], padding
    if LOOKUP == "axes":
        axis = tl.load(axis_of_pair + pair, mask=pair < PAIRS, other=-1).to(tl.int64)
        read = present[:, None] & ((axis >= 0) & (axis < axes))[None, :]
        position = tl.load(lookup + token[:, None] + (axis * axis_step)[None, :], mask=read, other=-1).to(tl.int64)
    elif LOOKUP == "positions":
        position = tl.load(lookup + token, mask=present, other=0).to(tl.int64)[:, None]
    else:  # the last document that begins at the token or before
        low = (token * 0).to(tl.int32)
        high = low + documents
        for _ in range(bisections):
            middle = (low + high + 1) // 2
            begun = tl.load(lookup + middle, mask=present, other=0).to(tl.int64) <= token
            low = tl.where(begun, middle, low)
            high = tl.where(begun, high, middle - 1)
        padding = low == documents
        position = (token - tl.load(lookup + low, mask=present, other=0).to(tl.int64))[:, None]
    known = present[:, None] & (position >= 0) & (position < length)
    return position * row_step + pair[None, :], known, padding


@triton.jit
def _turn_tile(
    program, job, length, row_step, axis_of_pair, axes, documents, bisections,
    CHANNELS: tl.constexpr, FIRST: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, LOOKUP: tl.constexpr,
):  # fmt: skip
    """Turn a tile of tokens, for a few heads one after the other."""
    x, out, cos, sin, lookup, size, x_step, out_step, table_step, axis_step = job
    row_blocks = (size[0] + ROWS - 1) // ROWS
    head_blocks = (size[1] + HEADS - 1) // HEADS
    rest = program // row_blocks
    row = (program % row_blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first_head = (rest % head_blocks * HEADS).to(tl.int64)
    inner = (rest // head_blocks % size[2]).to(tl.int64)
    outer = (rest // head_blocks // size[2]).to(tl.int64)
    present = row < size[0]

    pair = tl.arange(0, BLOCK)
    turning = present[:, None] & (pair < PAIRS)[None, :]
    token = row * table_step[0] + first_head * table_step[1] + inner * table_step[2] + outer * table_step[3]
    at, known, padding = _rows_of_table(
        lookup, token, present, pair, length, row_step, axis_step, axis_of_pair, axes, documents, bisections, PAIRS, LOOKUP
    )
    # what a table does not hold is not a number, and never read from beside it
    c = tl.load(cos + at, mask=turning & known, other=float("nan"))
    s = tl.load(sin + at, mask=turning & known, other=float("nan"))
    if LOOKUP == "documents":
        c = tl.where(padding[:, None], 1.0, c)
        s = tl.where(padding[:, None], 0.0, s)
    if TRANSPOSED:
        s = -s

    x_row = x + (row * x_step[0] + inner * x_step[2] + outer * x_step[3])[:, None]
    out_row = out + (row * out_step[0] + inner * out_step[2] + outer * out_step[3])[:, None]
    for h in tl.static_range(HEADS):
        head = first_head + h
        source = x_row + head * x_step[1]
        target = out_row + head * out_step[1]
        here = (row < tl.where(head < size[1], size[0], 0))[:, None]
        if INTERLEAVED:
            channel = tl.arange(0, 2 * BLOCK)[None, :]
            mask = here & (channel < 2 * PAIRS)
            both = tl.load(source + FIRST + channel, mask=mask, other=0.0).to(c.dtype)
            a, b = tl.split(tl.reshape(both, [ROWS, BLOCK, 2]))
            turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [ROWS, 2 * BLOCK])
            tl.store(target + FIRST + channel, turned.to(out.dtype.element_ty), mask=mask)
        else:
            mask = here & (pair < PAIRS)[None, :]
            one = FIRST + pair[None, :]
            other = FIRST + PAIRS + pair[None, :]
            a = tl.load(source + one, mask=mask, other=0.0).to(c.dtype)
            b = tl.load(source + other, mask=mask, other=0.0).to(c.dtype)
            tl.store(target + one, (a * c - b * s).to(out.dtype.element_ty), mask=mask)
            tl.store(target + other, (b * c + a * s).to(out.dtype.element_ty), mask=mask)
        if REST > 0:
            channel = tl.arange(0, REST)[None, :]
            mask = here & (channel < CHANNELS - 2 * PAIRS)
            channel = tl.where(channel < FIRST, channel, channel + 2 * PAIRS)
            tl.store(target + channel, tl.load(source + channel, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["programs", "length", "axes", "documents", "bisections"])
def _turn(
    q, k, programs, length, row_step, axis_of_pair, axes, documents, bisections,
    CHANNELS: tl.constexpr, FIRST: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, LOOKUP: tl.constexpr,
    TENSORS: tl.constexpr,
):  # fmt: skip
    """Turn one tensor or two, the programs of the first before those of the second."""
    program = tl.program_id(0)
    if TENSORS == 2:
        if program < programs:
            _turn_tile(
                program, q, length, row_step, axis_of_pair, axes, documents, bisections,
                CHANNELS, FIRST, PAIRS, ROWS, HEADS, BLOCK, REST, INTERLEAVED, TRANSPOSED, LOOKUP,
            )  # fmt: skip
        else:
            _turn_tile(
                program - programs, k, length, row_step, axis_of_pair, axes, documents, bisections,
                CHANNELS, FIRST, PAIRS, ROWS, HEADS, BLOCK, REST, INTERLEAVED, TRANSPOSED, LOOKUP,
            )  # fmt: skip
    else:
        _turn_tile(
            program, q, length, row_step, axis_of_pair, axes, documents, bisections,
            CHANNELS, FIRST, PAIRS, ROWS, HEADS, BLOCK, REST, INTERLEAVED, TRANSPOSED, LOOKUP,
        )  # fmt: skip


Pairing = Literal["half", "interleaved"]


def rotate(
    xs: Sequence[Tensor],
    tables: Sequence[tuple[Tensor, Tensor]],
    *,
    pairing: Pairing,
    first: int = 0,
    head_axis: int | None = -3,
    transposed: bool = False,
    outs: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Turn one tensor or two in one launch, each by its own table. Not yet run on a GPU.

    For float32 each entry is within ``2⁻²³ · (|a·cos| + |b·sin|)`` of the exact rotation by the table; 16-bit results are
    rounded once more. Channels outside ``[first, first + 2 · pairs)`` are copied.

    Args:
        tables: cosine and sine of each tensor, float32 (float64 for float64 tensors).
        first: the first channel that turns, not negative.
        head_axis: the axis that a table lacks, -3 or -2; ``None`` where it has all of them or broadcasts as it stands.
        transposed: turn back, as the gradient does.
        outs: where to write, one for each tensor, or the tensors themselves; not for tensors that need a gradient.

    Shape:
        xs: ``[*batch, heads, seq, head_dim]``, or as ``head_axis`` says, at most five axes, any strides; head counts may
        differ. tables: ``[*batch, seq, pairs]``.

    Returns:
        New tensors in the order of memory of ``xs``, or ``outs``.

    Raises:
        TypeError: tensors of different or unknown dtypes, or another dtype of tables.
        ShapeError: a table that does not spread over its tensor, or channels outside it.
    """
    parts = [part for table in tables for part in table]
    _check(xs, parts, first, "rotate")
    for x, (cos, _) in zip(xs, tables, strict=True):
        _spread(cos, x, head_axis or 0, "a table")
    return _run(xs, parts, None, None, None, pairing, first, head_axis, transposed, outs)


def rotate_gathered(
    xs: Sequence[Tensor],
    table: tuple[Tensor, Tensor],
    positions: Tensor | None = None,
    *,
    pairing: Pairing,
    axis_of_pair: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    first: int = 0,
    head_axis: int | None = -3,
    transposed: bool = False,
    outs: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Turn one tensor or two of the same tokens, each token by the row of one table that its position names.

    The thing people get wrong: a position past the table. Nothing here waits for the device to look, so such a token
    comes out as not a number, from which everybody sees that the table was too short; so does a pair that reads an axis
    which positions do not have. Memory beside the table and the positions is never read. Not yet run on a GPU.

    Args:
        table: cosine and sine of the positions ``0, 1, …, length - 1``.
        positions: integers. Exactly one of this and ``cu_seqlens`` is given.
        axis_of_pair: the axis that each pair reads, for positions of several axes (`posenc.axis_of_pair`).
        cu_seqlens: boundaries of documents that are laid end to end, from 0: positions count from each boundary. Tokens
            past the last boundary are padding and pass as they are.
        otherwise as `rotate`.

    Shape:
        table: ``[length, pairs]`` each; positions: ``[*batch, seq]``, with ``axis_of_pair`` ``[*batch, seq, axes]``;
        axis_of_pair: ``[pairs]`` int32 or int64; cu_seqlens: ``[documents + 1]`` int32 or int64.

    Raises:
        ValueError: neither or both of positions and cu_seqlens.
        TypeError: positions, axes or boundaries that are not integers; otherwise as `rotate`.
        ShapeError: a table that has not two axes, positions that do not spread over the tensors; otherwise as `rotate`.
    """
    _check(xs, list(table), first, "rotate_gathered")
    if (positions is None) == (cu_seqlens is None):
        raise ValueError(
            f"rotate_gathered: {'neither' if positions is None else 'both'} of positions and cu_seqlens. Expected one of them. "
            "cu_seqlens says where positions begin again; positions say all of them."
        )
    if axis_of_pair is not None and (positions is None or axis_of_pair.shape != table[0].shape[-1:]):
        raise ShapeError(
            f"rotate_gathered: axis_of_pair of shape {tuple(axis_of_pair.shape)} for a table of {table[0].shape[-1]} pairs. Expected "
            "[pairs], with positions [*batch, seq, axes]. Give the axis that each pair reads."
        )
    if table[0].ndim != 2 or (cu_seqlens is not None and (cu_seqlens.ndim != 1 or not len(cu_seqlens))):
        raise ShapeError(
            f"rotate_gathered: a table of shape {tuple(table[0].shape)}"
            f"{'' if cu_seqlens is None else f' with cu_seqlens of shape {tuple(cu_seqlens.shape)}'}. Expected [length, pairs], "
            "a row for each position, and boundaries [documents + 1]. Use rotate for a table with a row for each token."
        )
    for name, given in {"positions": positions, "axis_of_pair": axis_of_pair, "cu_seqlens": cu_seqlens}.items():
        if given is not None and given.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"rotate_gathered: {name} is {given.dtype}. Expected int32 or int64. They name rows of the table.")
        if given is not None and given.device != xs[0].device:
            raise ValueError(
                f"rotate_gathered: {name} on {given.device} and tensors on {xs[0].device}. Expected one device. Move them there."
            )
    if positions is not None:
        for x in xs:
            _spread(positions if axis_of_pair is not None else positions[..., None], x, head_axis or 0, "positions")
    return _run(xs, table, positions, axis_of_pair, cu_seqlens, pairing, first, head_axis, transposed, outs)


def _check(xs: Sequence[Tensor], tables: Sequence[Tensor], first: int, name: str) -> None:
    dtypes = {x.dtype for x in xs}
    wide = WIDE.get(xs[0].dtype)
    if len(dtypes) > 1 or wide is None or any(part.dtype != wide for part in tables):
        raise TypeError(
            f"{name}: tensors of {', '.join(sorted(map(str, dtypes)))} with tables of {', '.join(sorted({str(t.dtype) for t in tables}))}. Expected "
            "float32, bfloat16 or float16 with float32 tables, or float64 with float64. Cast the tables."
        )
    if len({t.device for t in (*xs, *tables)}) > 1:
        raise ValueError(
            f"{name}: tensors and tables on {', '.join(sorted({str(t.device) for t in (*xs, *tables)}))}. Expected one device. "
            "Move the tables."
        )
    widths = {x.shape[-1] for x in xs}
    pairs = {part.shape[-1] for part in tables}
    if (
        len(widths) > 1
        or len(pairs) > 1
        or not 0 <= first <= min(widths) - 2 * max(pairs)
        or max(x.ndim for x in xs) > MOST_AXES
    ):
        raise ShapeError(
            f"{name}: {', '.join(map(str, sorted(pairs)))} pairs from channel {first} in tensors of shapes "
            f"{', '.join(str(tuple(x.shape)) for x in xs)}. Expected one width with first + 2·pairs channels or more, at most {MOST_AXES} "
            "axes. Turn them one by one."
        )


def _spread(table: Tensor, x: Tensor, head_axis: int, what: str) -> Tensor:
    """A view of something per token as something per row of channels."""
    spread = table if head_axis == 0 else table.unsqueeze(head_axis)
    try:
        return spread.expand(*x.shape[:-1], table.shape[-1])
    except RuntimeError:
        raise ShapeError(
            f"rotate: {what} of shape {tuple(table.shape)} for a tensor of shape {tuple(x.shape)} with head_axis = {head_axis or None}. "
            "Expected [*batch, seq, …] that spreads over the heads. Give one row for each of its tokens."
        ) from None


def _run(
    xs: Sequence[Tensor], tables: Sequence[Tensor], positions: Tensor | None, axis_of_pair: Tensor | None,
    cu_seqlens: Tensor | None, pairing: Pairing, first: int, head_axis: int | None, transposed: bool,
    outs: Sequence[Tensor] | None,
) -> list[Tensor]:  # fmt: skip
    if pairing not in ("half", "interleaved"):
        raise ValueError(f"rotate: pairing = {pairing!r}. Expected 'half' or 'interleaved'. Name the one of the weights.")
    settings = pairing == "interleaved", first, head_axis or 0, transposed
    given = list(xs), list(tables), positions, axis_of_pair, cu_seqlens, *settings
    if outs is not None:
        for x, out in zip(xs, outs, strict=True):
            if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device or out.stride(-1) != 1:
                raise ShapeError(
                    f"rotate: an output of {out.dtype} {tuple(out.shape)} with strides {out.stride()} on {out.device} for a tensor of "
                    f"{x.dtype} {tuple(x.shape)} on {x.device}. Expected its like, channels side by side. Pass torch.empty_like(x)."
                )
            if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
                raise ValueError("rotate: outs with tensors that need a gradient. Expected inference. Use torch.no_grad().")
        torch.ops.posenc.triton_rotary_out(*given, list(outs))
        torch.autograd.graph.increment_version([out for out in outs if not out.is_inference()])  # those count no versions
        return list(outs)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in xs):
        return list(torch.ops.posenc.triton_rotary_inference(*given))
    turned = torch.ops.posenc.triton_rotary(*given)
    # of an operator all results need a gradient; one that does not comes out of the other's graph
    return [out if x.requires_grad else out.detach() for x, out in zip(xs, turned, strict=True)]


# ---------------------------------------------------------------------------------------------------- inside the ops

Axis = tuple[int, int, int, int]
"""The size of an axis, and its steps in the input, in the output and among the tokens of the table."""


def _turn_into(
    xs: list[Tensor], tables: list[Tensor], positions: Tensor | None, axis_of_pair: Tensor | None, cu_seqlens: Tensor | None,
    interleaved: bool, first: int, head_axis: int, transposed: bool, outs: list[Tensor],
) -> None:  # fmt: skip
    if cu_seqlens is not None:
        lookup, per_token = "documents", cu_seqlens.contiguous()
    elif positions is None:
        lookup, per_token = "none", None
    else:
        lookup, per_token = ("positions", positions[..., None]) if axis_of_pair is None else ("axes", positions)
    columns = [_columns(*tables[at : at + 2]) for at in range(0, len(tables), 2)]
    jobs, layouts = [], []
    for index, (x, out) in enumerate(zip(xs, outs, strict=True)):
        x = x if x.stride(-1) == 1 else x.contiguous()
        cos, sin = columns[index if lookup == "none" else 0]
        if lookup == "documents":
            token_step = [int(axis == x.ndim - (3 if head_axis == -2 else 2)) for axis in range(x.ndim - 1)]
            axis_step = 0
        else:
            *token_step, axis_step = _spread(cos if per_token is None else per_token, x, head_axis, "a table").stride()
        layout = _layout(list(zip(x.shape[:-1], x.stride(), out.stride(), token_step, strict=False)))
        size, x_step, out_step, step = zip(*layout, strict=True)
        jobs.append((x, out, cos, sin, cos if per_token is None else per_token, size, x_step, out_step, step, axis_step))
        layouts.append(layout)

    cos, channels = columns[0][0], xs[0].shape[-1]
    pairs = cos.shape[-1]
    block = triton.next_power_of_2(max(pairs, 1))
    rows = min(max(_TILE // block, 1), triton.next_power_of_2(max(1, *(layout[0][0] for layout in layouts))))
    tiles = sum(triton.cdiv(row[0], rows) * head[0] * inner[0] * outer[0] for row, head, inner, outer in layouts)
    heads = 4 if tiles >= _MANY and all(head[3] == 0 for _, head, _, _ in layouts) else 1
    programs = [
        triton.cdiv(row[0], rows) * triton.cdiv(head[0], heads) * inner[0] * outer[0] for row, head, inner, outer in layouts
    ]
    in_place = all(x.data_ptr() == out.data_ptr() and x.stride() == out.stride() for x, out in zip(xs, outs, strict=True))
    passing = 0 if in_place else channels - 2 * pairs
    if not sum(programs):
        return
    documents = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    with torch.cuda.device_of(xs[0]):
        _turn[(sum(programs),)](
            jobs[0], jobs[-1], programs[0], cos.shape[0], cos.stride(0), cos if axis_of_pair is None else axis_of_pair.contiguous(),
            0 if positions is None else positions.shape[-1], documents, documents.bit_length(),
            CHANNELS=channels, FIRST=first, PAIRS=pairs, ROWS=rows, HEADS=heads, BLOCK=block,
            REST=triton.next_power_of_2(passing) if passing else 0,
            INTERLEAVED=interleaved, TRANSPOSED=transposed, LOOKUP=lookup, TENSORS=len(xs),
            num_warps=max(1, min(4, rows * block // 256)), enable_fp_fusion=False,
        )  # fmt: skip


def _layout(axes: list[Axis]) -> tuple[Axis, Axis, Axis, Axis]:
    """The axes of a tensor by their part in the kernel: tiled, walked with one stretch of the table, and two more.

    Tiled is the longest along which the table changes, which is the sequence; for one token it is the heads.
    """
    one: Axis = 1, 0, 0, 0
    left = [axis for axis in axes if axis[0] != 1]
    tiled = max([axis for axis in left if axis[3]] or left or [one], key=lambda axis: axis[0])
    left = [axis for axis in left if axis is not tiled]
    walked = max([axis for axis in left if not axis[3]] or left or [one], key=lambda axis: axis[0])
    inner, outer = ([axis for axis in left if axis is not walked] + [one, one])[:2]
    return tiled, walked, inner, outer


def _columns(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a table that lie together, in cosine and sine alike."""
    return (cos, sin) if cos.stride() == sin.stride() and cos.stride(-1) == 1 else (cos.contiguous(), sin.contiguous())


def _new(xs: list[Tensor]) -> list[Tensor]:
    """Empty tensors in the order of memory of others, their channels together."""
    outs = [torch.empty_like(x) for x in xs]
    return [out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format) for out in outs]


def _turn_new(xs: list[Tensor], *rest: Any) -> list[Tensor]:
    outs = _new(xs)
    _turn_into(*(xs, *rest, outs))
    return outs


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, tables, positions, axis_of_pair, cu_seqlens, *ctx.settings = inputs
    ctx.tables = len(tables)
    ctx.save_for_backward(*tables, positions, axis_of_pair, cu_seqlens)


def _turn_back(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    *tables, positions, axis_of_pair, cu_seqlens = ctx.saved_tensors
    *settings, transposed = ctx.settings
    back = torch.ops.posenc.triton_rotary(grads, tables, positions, axis_of_pair, cu_seqlens, *settings, not transposed)
    return back, [None] * ctx.tables, *(None,) * 7


_LIBRARY = Library("posenc", "FRAGMENT")
_GIVEN = (
    "Tensor[] xs, Tensor[] tables, Tensor? positions, Tensor? axis_of_pair, Tensor? cu_seqlens, "
    "bool interleaved, int first, int head_axis, bool transposed"
)
_LIBRARY.define(f"triton_rotary({_GIVEN}) -> Tensor[]")
_LIBRARY.define(f"triton_rotary_inference({_GIVEN}) -> Tensor[]")  # without the cost of asking autograd
_LIBRARY.define(f"triton_rotary_out({_GIVEN}, Tensor(a!)[] outs) -> ()")

_INTERPRETED = not isinstance(_turn, triton.JITFunction)
for _name, _compute, _shape in (
    ("triton_rotary", _turn_new, lambda xs, *rest: _new(xs)),
    ("triton_rotary_inference", _turn_new, lambda xs, *rest: _new(xs)),
    ("triton_rotary_out", _turn_into, lambda *rest: None),
):
    _LIBRARY.impl(_name, _compute, "CPU" if _INTERPRETED else "CUDA")
    register_fake(f"posenc::{_name}", _shape, lib=_LIBRARY)
register_autograd("posenc::triton_rotary", _turn_back, setup_context=_save, lib=_LIBRARY)
