"""Drawn calls of every shape, stride and dtype: the kernel's bits, its errors and the memory around its results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.same_bits import DTYPES, F32, F64, PAIRINGS, bits, check_pair, same

from posenc import RotaryTable, apply_rotary, apply_rotary_, apply_rotary_pair

pytest.importorskip("posenc.kernels._rotary")

SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -6e-8, 3e38, 65504.0])


@st.composite
def views(draw, shape, dtype, writable=False):
    """A tensor of this shape in memory of any order, with steps, an offset and expanded axes."""
    order = draw(st.permutations(range(len(shape))))
    kinds = [draw(st.sampled_from(["plain", "plain", "step", "cut"] + ["expanded"] * (not writable))) for _ in shape]
    extents = [{"plain": n, "step": 2 * n + 1, "cut": n + 3, "expanded": 1}[kind] for n, kind in zip(shape, kinds, strict=True)]
    offset, total = draw(st.integers(0, 3)), 1
    for extent in extents:
        total *= extent
    flat = torch.randn(offset + total)
    flat = torch.where(torch.rand(flat.shape) < 0.05, SPECIAL[torch.randint(len(SPECIAL), flat.shape)], flat).to(dtype)
    view = flat[offset:].reshape([extents[axis] for axis in order]).permute([order.index(axis) for axis in range(len(shape))])
    for axis, (n, kind) in enumerate(zip(shape, kinds, strict=True)):
        if kind == "step":
            view = view[(slice(None),) * axis + (slice(1, None, 2),)]
        elif kind == "cut":
            view = view.narrow(axis, 2, n)
        elif kind == "expanded":
            view = view.expand(*view.shape[:axis], n, *view.shape[axis + 1 :])
    assert view.shape == tuple(shape)
    return view


@st.composite
def calls(draw, tensors=1, writable=False):
    """(tensors, tables, settings) of a call that is right."""
    dtype = draw(st.sampled_from(DTYPES))
    axes = draw(st.integers(1, 8))
    head_axis = draw(st.sampled_from([-3, -2, None])) if axes > 1 else None
    before, pairs, after = draw(st.integers(0, 3)), draw(st.sampled_from([0, 1, 2, 3, 5, 8, 9, 17])), draw(st.integers(0, 3))
    xs, tables = [], []
    batch = draw(st.lists(st.sampled_from([1, 1, 2, 3, 2, 0]), min_size=axes, max_size=axes))
    for _ in range(tensors):
        lead = [*batch[:-2], *draw(st.lists(st.sampled_from([3, 1, 2, 5, 7, 0]), min_size=min(axes, 2), max_size=min(axes, 2)))]
        rows = list(lead)
        tokens = []  # the axis on which the table may not be one for all
        if head_axis is not None:
            del rows[head_axis + 1]
            tokens = [rows.pop()]
        rows = [1 if draw(st.booleans()) else n for n in rows[draw(st.integers(0, len(rows))) :]] + tokens
        xs.append(draw(views([*lead, before + 2 * pairs + after], dtype, writable)))
        wide = F64 if dtype == F64 else F32
        wide = draw(st.sampled_from([wide, wide, F32, F64]))
        tables.append(RotaryTable(*(draw(views([*rows, pairs], wide)) for _ in range(2))))
    start = draw(st.sampled_from([before, -(2 * pairs + after) or before]))
    return xs, tables, {"pairing": draw(st.sampled_from(PAIRINGS)), "head_axis": head_axis, "start": start}


@settings(max_examples=100)
@given(calls(tensors=2))
def test_any_call_has_the_bits_of_the_arithmetic(call):
    (q, k), tables, settings = call
    check_pair(q, k, *tables, **settings)


@settings(max_examples=60)
@given(calls(writable=True), st.data())
def test_nothing_but_out_is_written(call, data):
    (x,), (table,), settings = call
    out = data.draw(views(x.shape, x.dtype, writable=True))
    steps, offset = out.stride(), out.storage_offset() + 16
    reach = offset + sum((n - 1) * step for n, step in zip(out.shape, steps, strict=True)) if out.numel() else 0
    flat = torch.full((reach + 17,), 7.0, dtype=x.dtype)
    out, expected = flat.as_strided(out.shape, steps, offset), flat.clone()
    untouched = x.clone()
    result = apply_rotary(x, table, backend="reference", **settings)
    expected.as_strided(out.shape, steps, offset).copy_(result)
    apply_rotary(x, table, out=out, **settings)
    assert torch.equal(bits(flat), bits(expected))
    assert same(x, untouched)


@settings(max_examples=60)
@given(calls(writable=True))
def test_in_place_is_the_same_and_writes_nothing_else(call):
    (x,), (table,), settings = call
    whole = x if x._base is None else x._base
    expected = whole.clone()
    result = apply_rotary(x, table, backend="reference", **settings)
    expected.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(result)
    assert apply_rotary_(x, table, **settings) is x
    assert same(whole, expected)


def outcome(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return type(error), str(error)


@settings(max_examples=150)
@given(st.data())
def test_right_and_wrong_calls_end_alike(data):
    """The kernel checks shapes by itself; what it lets through, and what it does not, must be the arithmetic's choice."""
    sizes = st.lists(st.sampled_from([0, 1, 2, 3]), min_size=0, max_size=4)
    x = torch.randn([*data.draw(sizes), data.draw(st.sampled_from([0, 2, 4, 5]))])
    cos, sin = (torch.randn([*data.draw(sizes), data.draw(st.sampled_from([0, 1, 2]))]) for _ in range(2))
    sin = data.draw(st.sampled_from([sin, torch.randn(cos.shape), torch.randn(cos.shape), torch.randn(cos.shape).double()]))
    settings = {
        "pairing": "half",
        "head_axis": data.draw(st.sampled_from([None, -3, -2])),
        "start": data.draw(st.integers(-5, 2)),
    }
    table = RotaryTable(cos, sin)
    mine, true = (outcome(apply_rotary, x, table, backend=backend, **settings) for backend in ("auto", "reference"))
    assert same(mine, true) if isinstance(true, torch.Tensor) else mine == true
    both, apart = (outcome(apply_rotary_pair, x, x, table, backend=backend, **settings) for backend in ("auto", "reference"))
    assert all(map(same, both, apart)) if isinstance(apart[0], torch.Tensor) else both == apart
