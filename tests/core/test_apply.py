"""Turning in place, into another tensor and by a named backend; what is refused, and in which words."""

from __future__ import annotations

import itertools
import operator
import os
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.same_bits import BF16, DTYPES, F16, F32, F64, PAIRINGS, same, table_of

from posenc import BackendRefused, RotaryTable, ShapeError, apply_rotary, apply_rotary_, apply_rotary_pair, explain
from posenc.core import apply, rotary_backends
from posenc.core.rotary_backends import may_share
from posenc.core.rotary_checks import overlaps

HALF = {"pairing": "half"}
AT = torch.tensor([[0, 1, 2, 500, 7], [3, 3, 90, 11, 1_000_003]])


@pytest.fixture(params=["native", "reference"])
def backend(request):
    if request.param == "native":
        pytest.importorskip("posenc.kernels._rotary")
    return request.param


def tables(dtype, pairs=4):
    return table_of(AT, pairs, F64 if dtype == F64 else F32)


def randn(*shape, dtype=F32):
    return torch.randn(shape).to(dtype)


# --- in place and into out --------------------------------------------------------------------------------------------

VIEWS = {
    "plain": lambda d: randn(2, 3, 5, 12, dtype=d),
    "by token": lambda d: randn(2, 5, 3, 12, dtype=d).transpose(1, 2),
    "a slice of a projection": lambda d: randn(2, 5, 3, 3, 12, dtype=d).select(2, 1).transpose(1, 2),
    "some channels": lambda d: randn(2, 3, 5, 20, dtype=d)[..., 5:17],
    "every other channel": lambda d: randn(2, 3, 5, 24, dtype=d)[..., ::2],
    "channels outermost": lambda d: randn(12, 2, 3, 5, dtype=d).permute(1, 2, 3, 0),
    "empty": lambda d: randn(2, 0, 5, 12, dtype=d),
}


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_and_out_give_the_same_bits(dtype, pairing, backend):
    for view in VIEWS:
        check_in_place_and_out(view, dtype, pairing, backend)


def check_in_place_and_out(view, dtype, pairing, backend):
    x, table = VIEWS[view](dtype), tables(dtype)
    settings = {"pairing": pairing, "start": 3}
    expected = apply_rotary(x, table, backend="reference", **settings)
    for make in VIEWS.values():
        out = make(dtype) if view != "empty" else torch.empty_like(x)
        if out.shape == x.shape:
            assert apply_rotary(x, table, out=out, backend=backend, **settings) is out
            assert same(out, expected)
    again = x.clone()
    assert apply_rotary(again, table, out=again, backend=backend, **settings) is again
    assert same(again, expected)
    assert apply_rotary_(x, table, backend=backend, **settings) is x
    assert same(x, expected)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_pair_is_written_to_its_buffers_or_in_place(pairing, backend):
    q, k, table = torch.randn(2, 4, 5, 12), torch.randn(2, 2, 5, 12), table_of(AT[0], 6)
    settings = {"pairing": pairing, "backend": backend}
    expected = apply_rotary_pair(q, k, table, pairing=pairing, backend="reference")
    buffers = torch.empty_like(q), torch.empty(2, 5, 2, 12).transpose(1, 2)
    turned = apply_rotary_pair(q, k, table, out=buffers, **settings)
    assert turned[0] is buffers[0]
    assert turned[1] is buffers[1]
    assert all(map(same, turned, expected))
    assert all(map(same, apply_rotary_pair(q, k, table, out=(q, k), **settings), expected))
    assert all(map(same, (q, k), expected))


def test_a_pair_may_be_written_over_what_is_still_to_be_read(backend):
    q, k, table = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8), table_of(AT[0], 4)
    expected = apply_rotary_pair(q, k, table, backend="reference", **HALF)
    turned = apply_rotary_pair(q, k, table, out=(k, q), backend=backend, **HALF)
    assert turned[0] is k
    assert all(map(same, (k, q), expected))
    memory = torch.randn(2 * 80 + 8)
    q, k = memory[:80].view(1, 2, 5, 8), memory[88:].view(1, 2, 5, 8)
    shifted = memory[8:88].view(1, 2, 5, 8)  # over q, and next to k
    expected = apply_rotary_pair(q, k, table, backend="reference", **HALF)
    turned = apply_rotary_pair(q, k, table, out=(shifted, k), backend=backend, **HALF)
    assert all(map(same, turned, expected))


def test_the_buffers_of_a_pair_are_checked(backend):
    q, k, table = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), table_of(AT[0], 4)

    def into(*out):
        return apply_rotary_pair(q, k, table, out=out, backend=backend, **HALF)

    with pytest.raises(
        TypeError, match=r"apply_rotary_pair: out is \['Tensor'\]\. Expected a tuple of two tensors, out=\(q_out, k_out\)"
    ):
        into(torch.empty_like(q))
    with pytest.raises(TypeError, match=r"apply_rotary_pair: out is Tensor\. Expected a tuple of two tensors"):
        apply_rotary_pair(q, k, table, out=q, backend=backend, **HALF)
    with pytest.raises(ShapeError, match=r"out is torch.float64 of shape .*Expected torch.float32"):
        into(torch.empty_like(q), torch.empty_like(k).double())
    one = torch.empty_like(q)
    with pytest.raises(ValueError, match=r"apply_rotary_pair: the two tensors of out share memory"):
        into(one, one)
    with pytest.raises(ValueError, match="out= with a tensor that needs a gradient"):
        apply_rotary_pair(q, k.requires_grad_(), table, out=(torch.empty_like(q), one), backend=backend, **HALF)


def test_queries_and_keys_of_different_width_are_turned_before_either_is_written(backend):
    memory, table = torch.randn(80 + 64), table_of(AT[0, :4], 2)
    q, k = memory[80:].view(1, 2, 4, 8), memory[:80].view(1, 2, 4, 10)
    expected = apply_rotary_pair(q.clone(), k.clone(), table, backend="reference", **HALF)
    outs = memory[:64].view(1, 2, 4, 8), torch.empty(1, 2, 4, 10)  # q goes where k is still to be read
    assert all(map(same, apply_rotary_pair(q, k, table, out=outs, backend=backend, **HALF), expected))
    held = torch.empty(8, 4)
    held[:, :2], held[:, 2:] = torch.cat(list(table)), torch.cat(list(table))
    inside = RotaryTable(held[:4, :2], held[4:, :2])
    outs = held.view(1, 1, 4, 8), torch.empty(1, 2, 4, 10)  # and where the table is
    expected = apply_rotary_pair(q[:, :1], k, table, backend="reference", **HALF)
    assert all(map(same, apply_rotary_pair(q[:, :1], k, inside, out=outs, backend=backend, **HALF), expected))


def test_queries_and_keys_of_different_width_are_checked_before_either_is_written(backend):
    q, k, table = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 10), table_of(AT[0], 4)
    before, memory = q.clone(), torch.zeros(160)

    def into(out, k_table=None):
        return apply_rotary_pair(q, k, table, k_table, out=out, backend=backend, **HALF)

    with pytest.raises(ValueError, match="the two tensors of out share memory"):
        into((memory[:80].view(1, 2, 5, 8), memory[40:140].view(1, 2, 5, 10)))
    with pytest.raises(ShapeError, match=r"table of shape \(3, 4\)"):
        into((q, k), table_of(AT[0, :3], 4))
    for out in ((q,), (q, None), [q, k]):
        with pytest.raises(TypeError, match="Expected a tuple of two tensors"):
            into(out)
    assert torch.equal(q, before)
    assert not memory.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_fused_projection_turn_in_place(dtype, backend):
    fused, table = randn(2, 5, 3, 2, 8, dtype=dtype), tables(dtype)
    q, k, v = fused.unbind(2)
    expected = *apply_rotary_pair(q, k, table, head_axis=-2, backend="reference", **HALF), v.clone()
    apply_rotary_pair(q, k, table, head_axis=-2, out=(q, k), backend=backend, **HALF)
    assert all(map(same, fused.unbind(2), expected))


@st.composite
def views(draw):
    """A tensor that lies anyhow in the first bytes of some memory."""
    dtype = draw(st.sampled_from([BF16, F32, F64]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    steps = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    return dtype, shape, steps, draw(st.integers(0, 12))


@given(views(), views())
def test_shared_memory_is_found_byte_by_byte(one, other):
    memory = torch.zeros(2048, dtype=torch.uint8)

    def bytes_of(dtype, shape, steps, offset):
        firsts = [offset + sum(map(operator.mul, index, steps)) for index in itertools.product(*map(range, shape))]
        return {first * dtype.itemsize + byte for first in firsts for byte in range(dtype.itemsize)}

    tensors = [torch.as_strided(memory.view(dtype), shape, steps, at) for dtype, shape, steps, at in (one, other)]
    assert may_share(*tensors) is bool(bytes_of(*one) & bytes_of(*other))


def test_a_search_for_shared_memory_that_takes_too_long_is_cut_short(monkeypatch):
    monkeypatch.setattr(rotary_backends, "MOST_TRIES", 3)
    memory = torch.zeros(40_000)
    one, other = (torch.as_strided(memory, (5, 5, 5), (3000, 3001, 3002), at) for at in (0, 1_000))
    assert may_share(one, other)
    monkeypatch.undo()
    assert not may_share(one, other)


def test_tensors_of_inference_mode_are_written_in_that_mode_alone(backend):
    table = table_of(AT[0], 4)
    with torch.inference_mode():
        x = torch.randn(2, 5, 8)
        assert apply_rotary_(x, table, backend=backend, **HALF) is x
        apply_rotary(x, table, out=torch.empty_like(x), backend=backend, **HALF)
    for call in (
        lambda: apply_rotary_(x, table, backend=backend, **HALF),
        lambda: apply_rotary_(x, table, **HALF),
        lambda: apply_rotary(torch.randn(2, 5, 8), table, out=x, backend=backend, **HALF),
    ):
        with pytest.raises(ValueError, match=r"made under torch\.inference_mode\(\) and cannot be written outside it"):
            call()


def test_the_result_is_contiguous_where_channels_do_not_lie_together(backend):
    table = table_of(range(4), 4)
    for x in (torch.randn(2, 3, 4, 8).to(memory_format=torch.channels_last), torch.randn(8, 2, 3, 4).permute(1, 2, 3, 0)):
        assert apply_rotary(x, table, backend=backend, **HALF).is_contiguous()


X, GOOD = torch.randn(2, 3, 5, 8), table_of(AT[0], 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: apply_rotary(X, GOOD, start=2**70, **HALF), ShapeError, f"start = {2**70}"),
        (lambda: apply_rotary(X, GOOD, start=-(2**70), **HALF), ShapeError, f"start = -{2**70}"),
        (lambda: apply_rotary(X, GOOD, head_axis=-3.0, **HALF), ValueError, r"head_axis = -3\.0"),
        (lambda: apply_rotary(X, GOOD, head_axis=torch.tensor([-3, -2]), **HALF), ValueError, "head_axis = tensor"),
        (lambda: apply_rotary(X, RotaryTable(GOOD.cos, None), **HALF), TypeError, "the table holds a Tensor and a NoneType"),
        (lambda: apply_rotary_(X, RotaryTable(GOOD.cos, None), **HALF), TypeError, "the table holds a Tensor and a NoneType"),
        (
            lambda: apply_rotary(X, RotaryTable(*(t.numpy() for t in GOOD)), **HALF),
            TypeError,
            "holds a ndarray .* torch.from_numpy",
        ),
        (lambda: apply_rotary(X, RotaryTable(*(t.to_sparse() for t in GOOD)), **HALF), ShapeError, "torch.sparse_coo and"),
        (lambda: apply_rotary_(X.to_sparse(), GOOD, **HALF), ShapeError, r"x of 4 axes \(torch.sparse_coo\)"),
        (lambda: apply_rotary_(None, GOOD, **HALF), TypeError, "x is a NoneType"),
        (lambda: apply_rotary_(X, None, **HALF), TypeError, "the table a NoneType"),
        (lambda: apply_rotary_pair(None, X, GOOD, **HALF), TypeError, "x is a NoneType"),
        (lambda: apply_rotary_pair(X, None, GOOD, **HALF), TypeError, "x is a NoneType"),
        (lambda: apply_rotary(X, GOOD, out="a", **HALF), TypeError, "apply_rotary: out is a str. Expected a tensor"),
        (lambda: apply_rotary(X, GOOD, out=(X,), **HALF), TypeError, "apply_rotary: out is a tuple. Expected a tensor"),
    ],
)
def test_what_is_no_tensor_no_table_or_no_number_is_told_in_words(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_backward_notices_that_a_pair_was_overwritten(backend):
    q, k, table = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), table_of(AT[0], 4)
    w = torch.ones(8, requires_grad=True)
    loss = (q * w).sum() + (k * w).sum()
    with torch.no_grad():
        apply_rotary_pair(q, k, table, out=(q, k), backend=backend, **HALF)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_turning_in_place_at_once_asks_what_the_long_way_asks():
    table = table_of(AT[0], 4)
    wide = torch.randn(5, 8)
    shared = RotaryTable(wide[:, :4], wide[:, 4:])
    expected = apply_rotary(wide.clone(), RotaryTable(wide[:, :4].clone(), wide[:, 4:].clone()), head_axis=None, **HALF)
    assert same(apply_rotary_(wide, shared, head_axis=None, **HALF), expected)
    negative = torch._neg_view(torch.randn(1, 5, 8))
    expected = apply_rotary(negative.clone(), table, **HALF)
    assert same(apply_rotary_(negative, table, **HALF), expected)
    x = torch.randn(1, 5, 8)
    with pytest.raises(ShapeError, match="table of shape"):
        apply_rotary_(x, table_of(AT[0][:4], 4), **HALF)
    with pytest.raises(ShapeError, match="0 axes"):
        apply_rotary_(torch.tensor(1.0), table, **HALF)


@pytest.mark.parametrize("shift", [0, 1, 2, 8, 12, 40, 59, 60, 61])
def test_out_may_be_a_shifted_view_of_x(shift, backend):
    # as numpy.copyto: the result is that of a call without shared memory
    memory = torch.randn(2 * 5 * 6 + 61)
    x, out = memory[61 - shift :][:60].view(2, 5, 6), memory[61:][:60].view(2, 5, 6)
    back = memory[61 - shift :][:60].view(2, 5, 6)
    table = table_of(AT[0], 3)
    for source, target in ((x, out), (out, back)):
        expected = apply_rotary(source.clone(), table, **HALF)
        apply_rotary(source, table, out=target, backend=backend, **HALF)
        assert same(target, expected)


def test_out_may_lie_in_memory_that_two_storages_own(backend):
    numpy = pytest.importorskip("numpy")
    memory = numpy.random.default_rng(0).random(70, dtype=numpy.float32)
    x, out = torch.from_numpy(memory[:60]).view(2, 5, 6), torch.from_numpy(memory[6:66]).view(2, 5, 6)
    assert x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
    expected = apply_rotary(x.clone(), table_of(AT[0], 3), **HALF)
    apply_rotary(x, table_of(AT[0], 3), out=out, backend=backend, **HALF)
    assert same(out, expected)


def test_out_may_be_the_table_and_heads_may_swap(backend):
    cos, sin = torch.randn(5, 4), torch.randn(5, 4)
    x = torch.randn(5, 8)
    both = torch.cat([cos, sin], dim=-1)
    settings = {**HALF, "head_axis": None, "backend": backend}
    expected = apply_rotary(x, RotaryTable(cos, sin), **settings)
    apply_rotary(x, RotaryTable(both[:, :4], both[:, 4:]), out=both, **settings)
    assert same(both, expected)
    heads = torch.randn(2, 5, 8)
    expected = apply_rotary(heads.flip(0), RotaryTable(cos, sin), **settings)
    swapped = heads.as_strided((2, 5, 8), (40, 8, 1))
    apply_rotary(heads.flip(0), RotaryTable(cos, sin), out=swapped, **settings)
    assert same(heads, expected)


OVERLAPPING = {
    "expanded": lambda: torch.randn(1, 1, 5, 8).expand(2, 3, 5, 8),
    "one row": lambda: torch.randn(8).expand(2, 3, 5, 8),
    "windows": lambda: torch.randn(16).unfold(0, 8, 2).expand(1, 1, 5, 8),
    "rows that meet": lambda: torch.randn(200).as_strided((1, 3, 5, 8), (0, 50, 7, 1)),
    "woven": lambda: torch.randn(200).as_strided((1, 2, 5, 8), (0, 3, 16, 2)),
}


@pytest.mark.parametrize("of", OVERLAPPING)
def test_what_overlaps_itself_is_refused(of, backend):
    x, table = OVERLAPPING[of](), table_of(AT[0], 4)
    table = RotaryTable(*(part[: x.shape[2]] for part in table))
    before = x.clone()
    with pytest.raises(
        ValueError, match=r"apply_rotary_: x of shape .* with strides .* overlaps itself.*Call contiguous\(\) first"
    ):
        apply_rotary_(x, table, backend=backend, **HALF)
    with pytest.raises(ValueError, match=r"apply_rotary: out of shape .* overlaps itself.*Pass torch\.empty_like\(x\)"):
        apply_rotary(before, table, out=x, backend=backend, **HALF)
    assert same(x, before)
    assert same(apply_rotary(x, table, backend=backend, **HALF), apply_rotary(before, table, **HALF))  # as an input it is fine


def test_ordinary_views_are_not_taken_to_overlap():
    x = torch.randn(4, 6, 8, 10)
    for view in (
        x[::2, 1:, :, ::3],
        x.permute(3, 0, 2, 1),
        x.diagonal(0, 1, 2),
        x[:1].expand(1, 6, 8, 10),
        x.mT,
        x[0, 0, 0],
        x[:0],
    ):
        assert not overlaps(view)
    # what cannot be decided quickly is taken to overlap: these six entries do not
    assert overlaps(x.as_strided((2, 3), (3, 2)))


def test_what_needs_a_gradient_is_refused(backend):
    x, table = torch.randn(2, 3, 5, 8), tables(F32)
    learned = RotaryTable(table.cos.clone().requires_grad_(), table.sin)
    message = "apply_rotary_: x or the table needs a gradient.*Use apply_rotary, or torch.no_grad()"
    for tensor, turning in ((x.clone().requires_grad_(), table), (x, learned)):
        with pytest.raises(ValueError, match=message):
            apply_rotary_(tensor, turning, backend=backend, **HALF)
    for tensor, turning, out in (
        (x.clone().requires_grad_(), table, torch.empty_like(x)),
        (x, learned, torch.empty_like(x)),
        (x, table, torch.empty_like(x).requires_grad_()),
    ):
        with pytest.raises(ValueError, match="apply_rotary: out= with a tensor that needs a gradient.*Leave out= away"):
            apply_rotary(tensor, turning, out=out, backend=backend, **HALF)
    parameter = torch.nn.Parameter(x.clone())
    with torch.no_grad():
        apply_rotary_(parameter, table, backend=backend, **HALF)
    assert same(parameter, apply_rotary(x, table, **HALF))
    assert parameter.is_leaf


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (lambda x: torch.empty(3, 5, 8), ShapeError, r"out is torch\.float32 of shape \(3, 5, 8\)"),
        (lambda x: x.double(), ShapeError, r"out is torch\.float64 .* Expected torch\.float32"),
        (lambda x: x.to(BF16), ShapeError, r"out is torch\.bfloat16"),
        (lambda x: x.to("meta"), ValueError, "out is on meta and x on cpu"),
    ],
)
def test_out_must_fit(out, error, message, backend):
    x = torch.randn(2, 3, 5, 8)
    with pytest.raises(error, match=f"apply_rotary: {message}.*Pass torch.empty_like"):
        apply_rotary(x, tables(F32), out=out(x), backend=backend, **HALF)


@pytest.mark.parametrize("how", ["in place", "out"])
def test_overwriting_what_backward_reads_is_noticed(how, backend):
    x, table, weight = torch.randn(2, 3, 5, 8), tables(F32), torch.randn(8, requires_grad=True)
    product, version = (x * weight).sum(), x._version
    if how == "in place":
        apply_rotary_(x, table, backend=backend, **HALF)
    else:
        apply_rotary(torch.randn_like(x), table, out=x, backend=backend, **HALF)
    assert x._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# --- backends by name -------------------------------------------------------------------------------------------------


def said(function, *args, **kwargs):
    return {verdict.backend: (verdict.chosen, verdict.reason) for verdict in explain(function, *args, **HALF, **kwargs)}


def test_explain_says_who_serves_each_function():
    pytest.importorskip("posenc.kernels._rotary")
    x, table = torch.randn(2, 3, 5, 8), tables(F32)
    untouched = x.clone()
    first = (True, "the first in the order of 'auto' that accepts")
    for function, args in ((apply_rotary, (x, table)), (apply_rotary_, (x, table)), (apply_rotary_pair, (x, x, table, table))):
        verdicts = said(function, *args)
        assert verdicts["native"] == first
        assert verdicts["reference"] == (False, "accepts, but another was named or comes first")
        named = said(function, *args, backend="reference")
        assert named["reference"] == (True, "named")
        assert not named["native"][0]
    assert same(x, untouched)  # nothing ran
    assert said(apply_rotary_pair, q=x, k=x[:, :1], table=table)["native"] == first
    assert said(apply_rotary, x.to(torch.float8_e4m3fn), table)["native"] == (
        False, "refuses: it serves one of float32, float64, bfloat16 and float16 at a time, not torch.float8_e4m3fn",
    )  # fmt: skip
    mixed = said(apply_rotary_pair, x, x.double(), table)["native"][1]
    assert mixed.startswith("refuses: it serves one of float32")
    axes = said(apply_rotary_pair, x, x[0], RotaryTable(*(part[0] for part in table)))["native"][1]
    assert axes == "refuses: it serves tensors of the same number of axes, at most nine"
    with pytest.raises(ShapeError, match="positions of exactly these tokens"):
        explain(apply_rotary, x[:, :, :4], table, **HALF)


def test_a_named_backend_never_falls_back():
    x, table = torch.randn(2, 3, 5, 8).to(torch.float8_e5m2), tables(F32)
    for call in (
        lambda: apply_rotary(x, table, backend="native", **HALF),
        lambda: apply_rotary_(x, table, backend="native", **HALF),
        lambda: apply_rotary(x, table, out=torch.empty_like(x), backend="native", **HALF),
        lambda: apply_rotary_pair(x, x, table, backend="native", **HALF),
    ):
        with pytest.raises(BackendRefused, match=r"backend = 'native' refuses \(native: .*float8_e5m2\)") as caught:
            call()
        assert list(caught.value.refusals) == ["native"]
    with pytest.raises(ValueError, match="backend = 'magic'. Expected 'auto' or one of native"):
        apply_rotary_pair(x.float(), x.float(), table, backend="magic", **HALF)


@pytest.fixture
def forgotten():
    """The caches of what this installation has, empty before and after."""
    from posenc.kernels import native

    caches = native.refusal, native.threads, native._kernel, apply._loaded_native
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_without_the_extension_torch_turns(forgotten, monkeypatch):
    import posenc.kernels

    monkeypatch.setitem(sys.modules, "posenc.kernels._rotary", None)  # as where no compiler was
    monkeypatch.delattr(posenc.kernels, "_rotary", raising=False)
    x, table = torch.randn(2, 3, 5, 8), tables(F32)
    expected = apply_rotary(x, table, backend="reference", **HALF)
    assert all(same(turned, expected) for turned in apply_rotary_pair(x, x, table, **HALF))
    assert same(apply_rotary(x, table, **HALF), expected)
    assert same(apply_rotary_(x.clone(), table, **HALF), expected)
    learned = x.clone().requires_grad_()
    apply_rotary(learned, table, **HALF).sum().backward()
    assert bool(learned.grad.any())
    reason = said(apply_rotary, x, table)["native"][1].removeprefix("refuses: ")
    assert reason.startswith("the compiled kernel is not installed (")
    assert reason.endswith("); build posenc where a C compiler is")
    with pytest.raises(BackendRefused) as caught:
        apply_rotary(x, table, backend="native", **HALF)
    assert caught.value.refusals == {"native": reason}


def test_a_torch_without_parallel_for_is_served_by_one_thread(forgotten, monkeypatch):
    rotary = pytest.importorskip("posenc.kernels._rotary")
    from posenc.kernels import native

    used = []
    monkeypatch.setattr(native, "_torch_threads", lambda: None)
    monkeypatch.setattr(rotary, "use_threads", used.append)
    assert native.refusal() is None
    assert used == []
    assert native.threads() == "one thread, because this torch has no torch_parallel_for"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(2, 3, 5, 8, dtype=torch.int32)}, TypeError, r"x is torch\.int32"),
        ({"x": torch.ones(2, 3, 5, 8, dtype=torch.bool)}, TypeError, r"x is torch\.bool"),
        ({"x": torch.ones(2, 3, 5, 8, dtype=torch.complex64)}, TypeError, r"x is torch\.complex64"),
        ({"x": torch.ones(2, 3, 5, 8).to_sparse()}, ShapeError, "torch.sparse_coo.*Use to_dense"),
        ({"x": torch.tensor(1.0)}, ShapeError, "x of 0 axes"),
        ({"table": RotaryTable(torch.tensor(1.0), torch.tensor(1.0))}, ShapeError, "with a table of 0"),
        ({"table": (torch.ones(5, 4), torch.ones(5, 4))}, TypeError, "the table a tuple"),
        ({"table": torch.ones(2, 5, 4)}, TypeError, "the table a Tensor"),
        ({"table": RotaryTable(torch.ones(5, 8), torch.ones(5, 8))}, ShapeError, "one column per pair, not per channel"),
        ({"table": RotaryTable(torch.ones(5, 4), torch.ones(4, 4))}, ShapeError, r"cos \(5, 4\), sin \(4, 4\)"),
        ({"table": RotaryTable(torch.ones(5, 4), torch.ones(5, 3))}, ShapeError, r"cos \(5, 4\), sin \(5, 3\)"),
        ({"table": RotaryTable(torch.ones(5, 4), torch.ones(1, 4).expand(5, 4)[:2])}, ShapeError, r"sin \(2, 4\)"),
        ({"table": RotaryTable(torch.ones(5, 4), torch.ones(5, 4).double())}, TypeError, "mixed-precision wrapper"),
        ({"table": RotaryTable(*[torch.ones(5, 4).to(F16)] * 2)}, TypeError, r"the table is torch\.float16"),
        ({"table": RotaryTable(*[torch.ones(6, 4)] * 2)}, ShapeError, "positions of exactly these tokens"),
        ({"table": RotaryTable(*[torch.ones(3, 5, 4)] * 2)}, ShapeError, "positions of exactly these tokens"),
        ({"table": RotaryTable(*[torch.ones(4)] * 2)}, ShapeError, "positions of exactly these tokens"),
        ({"head_axis": 1}, ValueError, "head_axis = 1. Expected -3"),
        ({"head_axis": 0}, ValueError, "head_axis = 0. Expected -3"),
        ({"head_axis": -1}, ValueError, "head_axis = -1. Expected -3"),
        ({"head_axis": -4}, ValueError, "head_axis = -4. Expected -3"),
        ({"pairing": "neox"}, ValueError, "pairing = 'neox'"),
        ({"start": 1}, ShapeError, "start = 1 for head_dim = 8"),
        ({"start": -7}, ShapeError, "start = -7"),
        ({"start": -9}, ShapeError, "start = -9"),
        ({"start": 2**63 - 1}, ShapeError, "start = 9223372036854775807"),
        ({"start": -(2**63)}, ShapeError, "start = -9223372036854775808"),
        ({"start": 0.0}, TypeError, "start = 0.0. Expected an integer"),
        ({"start": None}, TypeError, "start = None. Expected an integer"),
        ({"start": True}, TypeError, "start = True. Expected an integer"),
    ],
)
def test_bad_input_is_refused(change, error, message):
    for backend in ("auto", "native", "reference"):
        call = {"x": torch.randn(2, 3, 5, 8), "table": table_of(AT[0], 4), "backend": backend, **HALF} | change
        x = call.pop("x")
        for function, tensors in ((apply_rotary, (x,)), (apply_rotary_pair, (x, x))):
            with pytest.raises(error, match=f"apply_rotary: .*{message}"):
                function(*tensors, **call)


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match="apply_rotary: x is a list and the table a RotaryTable. Expected a tensor"):
        apply_rotary([1.0, 2.0], table_of(AT[0], 4), **HALF)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_small_floats_are_turned_by_the_arithmetic(dtype):
    x, table = torch.randn(2, 3, 5, 8).to(dtype), tables(F32)
    expected = apply_rotary(x.float(), table, **HALF).to(dtype)
    assert torch.equal(apply_rotary(x, table, **HALF).float(), expected.float())
    assert torch.equal(apply_rotary_pair(x, x, table, **HALF)[1].float(), expected.float())


def test_q_and_k_of_different_kinds_are_turned_apart():
    table = table_of(AT[0], 4)
    for q, k in (
        (torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8).to(BF16)),
        (torch.randn(2, 3, 5, 8), torch.randn(3, 5, 8)),
        (torch.randn(2, 3, 5, 8).double(), torch.randn(2, 3, 5, 10)),
    ):
        turned = apply_rotary_pair(q, k, table, pairing="half", start=-8)
        for x, mine in zip((q, k), turned, strict=True):
            assert same(mine, apply_rotary(x, table, pairing="half", start=-8, backend="reference"))


def test_a_wrong_direct_call_of_an_operator_is_an_error():
    pytest.importorskip("posenc.kernels._rotary")
    from posenc.kernels import native

    x, table = torch.randn(2, 3, 5, 8), table_of(AT[0], 4)
    settings = (False, 0, -3, False)
    for args in (
        (x.int(), *table), (x.to(torch.float8_e5m2), *table), (x.double(), *table), (x, table.cos, table.sin[:4]),
        (x, table.cos, table.sin.double()), (x, table.cos.to(F16), table.sin.to(F16)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="a dtype that it does not serve, or cosine and sine that do not fit"):
            native.OPERATORS[1, False](*args, *settings)
    with pytest.raises(ValueError, match="q and k are of different dtypes"):
        native.OPERATORS[2, False](x, x.to(F16), *table, *table, *settings)
    for out in (torch.empty(2, 3, 5, 7), torch.empty_like(x).double(), torch.empty(2, 3, 5, 16)[..., ::2]):
        with pytest.raises(ValueError, match="out is not of x's dtype and shape"):
            torch.ops.posenc.rotary_out(x, *table, *settings, out)


@pytest.mark.skipif(os.name != "posix", reason="resource limits")
def test_many_calls_leak_nothing():
    resource = pytest.importorskip("resource")
    x, table = torch.randn(1, 2, 5, 8), table_of(AT[0], 4)
    for _ in range(200):
        apply_rotary_pair(x, x, table, **HALF)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20_000):
        apply_rotary_pair(x, x, table, **HALF)
    # a leak of one number or tuple per call would be a megabyte or more
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600
