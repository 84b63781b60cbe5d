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

_TILE = 1024  # pairs in a tile: eight per thread of four warps, 16 bytes of a 16-bit dtype
_MANY = 2048  # tiles that keep a large GPU busy; with more of them a program takes several heads


@triton.jit
def _rows_of_table(
    lookup, token, present, pair, length, row_step, axis_step, axis_of_pair, documents, bisections,
    PAIRS: tl.constexpr, LOOKUP: tl.constexpr,
):  # fmt: skip
    """Where in the table the pairs of each token are, which of them are there, and which tokens are padding."""
    padding = token < 0
    if LOOKUP == "none":  # the table has a row for each token
        return token[:, None] + pair[None, :], present[:, None], padding
    if LOOKUP == "axes":
        axis = tl.load(axis_of_pair + pair, mask=pair < PAIRS, other=0).to(tl.int64)
        turning = present[:, None] & (pair < PAIRS)[None, :]
        position = tl.load(lookup + token[:, None] + (axis * axis_step)[None, :], mask=turning, other=0).to(tl.int64)
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
    program, job, length, row_step, axis_of_pair, documents, bisections,
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
        lookup, token, present, pair, length, row_step, axis_step, axis_of_pair, documents, bisections, PAIRS, LOOKUP
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
        here = present[:, None] & (head < size[1])
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


@triton.jit
def _turn(
    q, k, programs, length, row_step, axis_of_pair, documents, bisections,
    CHANNELS: tl.constexpr, FIRST: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, LOOKUP: tl.constexpr,
    TENSORS: tl.constexpr,
):  # fmt: skip
    """Turn one tensor or two, the programs of the first before those of the second."""
    program = tl.program_id(0)
    if TENSORS == 1:
        _turn_tile(
            program, q, length, row_step, axis_of_pair, documents, bisections,
            CHANNELS, FIRST, PAIRS, ROWS, HEADS, BLOCK, REST, INTERLEAVED, TRANSPOSED, LOOKUP,
        )  # fmt: skip
    elif program < programs:
        _turn_tile(
            program, q, length, row_step, axis_of_pair, documents, bisections,
            CHANNELS, FIRST, PAIRS, ROWS, HEADS, BLOCK, REST, INTERLEAVED, TRANSPOSED, LOOKUP,
        )  # fmt: skip
    else:
        _turn_tile(
            program - programs, k, length, row_step, axis_of_pair, documents, bisections,
            CHANNELS, FIRST, PAIRS, ROWS, HEADS, BLOCK, REST, INTERLEAVED, TRANSPOSED, LOOKUP,
        )  # fmt: skip
