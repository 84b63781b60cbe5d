"""Whatever torch does around a call: the compiled kernel is right there, or leaves the call to the arithmetic."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.kernels.same_bits import BF16, F32, F64, PAIRINGS, same, table_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from posenc import RotaryTable, apply_rotary, apply_rotary_, apply_rotary_pair, explain

pytest.importorskip("posenc.kernels._rotary")

AT = torch.tensor([[0, 1, 2, 500, 7], [3, 3, 90, 11, 1_000_003]])
HALF = {"pairing": "half"}


def given(dtype=F32, requires_grad=False):
    q, k = (torch.randn(2, heads, 5, 12).to(dtype).requires_grad_(requires_grad) for heads in (4, 2))
    return q, k, table_of(AT, 4, F64 if dtype == F64 else F32)


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rotary_pair(q, k, RotaryTable(cos, sin), **HALF)


def turn_one(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rotary(q, RotaryTable(cos, sin), **HALF)


def truth(q, k, table):
    return apply_rotary_pair(q, k, table, backend="reference", **HALF)


def reason(*args, function=apply_rotary, **kwargs):
    return {verdict.backend: verdict.reason for verdict in explain(function, *args, **HALF, **kwargs)}["native"]


# --- tracing and compiling --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_traces_the_arithmetic(requires_grad):
    q, k, table = given(requires_grad=requires_grad)
    traced = torch.jit.trace(turn, (q, k, *table))
    assert "posenc::" not in str(traced.graph)
    other = torch.randn_like(q), torch.randn_like(k), RotaryTable(table.sin, table.cos)
    assert all(map(same, traced(*other[:2], *other[2]), truth(*other)))
    assert "posenc::" not in str(torch.jit.trace(turn_one, (q, *table)).graph)


@pytest.mark.parametrize(("mode", "requires_grad"), [("real", False), ("real", True), ("fake", False), ("symbolic", False)])
def test_make_fx(mode, requires_grad):
    q, k, table = given(requires_grad=requires_grad)
    graph = make_fx(turn, tracing_mode=mode)(q, k, *table)
    assert "posenc" not in graph.code
    other = torch.randn_like(q), torch.randn_like(k), RotaryTable(table.sin, table.cos)
    assert all(map(same, graph(*other[:2], *other[2]), truth(*other)))


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_make_fx_recorded_has_every_gradient(requires_grad, pre_dispatch):
    q, k, table = given(requires_grad=requires_grad)
    graph = make_fx(lambda q, *table: turn_one(2 * q, *table), pre_dispatch=pre_dispatch)(q, *table)
    inputs, tangents = (q.detach(), *table), (k.detach().repeat(1, 2, 1, 1), table.sin, table.cos)

    def expected(q, *table):
        return apply_rotary(2 * q, RotaryTable(*table), backend="reference", **HALF)

    for mine, true in zip(jvp(graph, inputs, tangents), jvp(expected, inputs, tangents), strict=True):
        assert torch.equal(mine, true)
    for found in (graph, expected):
        every = [x.clone().requires_grad_() for x in inputs]
        found(*every).square().sum().backward()
        assert all(bool(x.grad.any()) for x in every)
    assert bool(grad(lambda q: graph(q, *table).square().sum())(inputs[0]).any())


def test_compiles_whole():
    torch.compiler.reset()
    compiled = torch.compile(turn, fullgraph=True, backend="aot_eager")
    q, k, table = given(requires_grad=True)
    found = compiled(q, k, *table)
    assert all(map(same, found, truth(q, k, table)))
    grads = (torch.autograd.grad(sum(x.square().sum() for x in out), (q, k)) for out in (found, truth(q, k, table)))
    assert all(map(torch.equal, *grads))


def test_compiles_in_place_and_into_out():
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, out, cos, sin):
        table = RotaryTable(cos, sin)
        apply_rotary(x, table, out=out, **HALF)
        return apply_rotary_(x, table, **HALF)

    q, k, table = given()
    expected, out, x = apply_rotary(q, table, **HALF), torch.empty_like(q), q.clone()
    compiled(x, out, *table)
    assert same(x, expected)
    assert same(out, expected)
    for outs in ((q.clone(), k.clone()), (torch.empty_like(q), torch.empty_like(k))):
        torch.compile(turn_pair_into, fullgraph=True, backend="aot_eager")(q, k, *table, *outs)
        assert all(map(same, outs, truth(q, k, table)))


def turn_pair_into(q, k, cos, sin, q_out, k_out):
    return apply_rotary_pair(q, k, RotaryTable(cos, sin), out=(q_out, k_out), **HALF)


def turn_pair_in_place(q, k, cos, sin):
    return turn_pair_into(q, k, cos, sin, q, k)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_in_place(mode):
    q, k, table = given()
    graph = make_fx(turn_pair_in_place, tracing_mode=mode)(q.clone(), k.clone(), *table)
    assert all(map(same, graph(q.clone(), k.clone(), *table), truth(q, k, table)))


def test_transforms_in_place():
    q, k, table = given()
    for transformed in (vmap(turn_pair_in_place), functionalize(turn_pair_in_place)):
        assert all(map(same, transformed(q.clone(), k.clone(), *table), truth(q, k, table)))
    one = vmap(lambda q, cos, sin: apply_rotary_(q, RotaryTable(cos, sin), **HALF))(q.clone(), *table)
    assert same(one, truth(q, k, table)[0])
    _, tangent = jvp(lambda q: apply_rotary_(q.clone(), table, **HALF), (q,), (q,))
    assert same(tangent, truth(q, k, table)[0])


@pytest.mark.parametrize("strict", [False, True])
def test_export_writes_the_arithmetic(strict):
    class Turn(torch.nn.Module):
        forward = staticmethod(turn)

    q, k, table = given()
    program = torch.export.export(Turn(), (q, k, *table), strict=strict)
    assert "torch.ops.posenc" not in str(program.graph)
    assert "aten.cat" in str(program.graph)
    assert all(map(same, program.module()(q, k, *table), truth(q, k, table)))


# --- tensors without values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "by token"])
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(layout):
    q, k, table = given()
    if layout == "by token":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, *table)]
        turned = (*turn(*fakes), turn_one(fakes[0], *fakes[2:]), apply_rotary_(fakes[1], RotaryTable(*fakes[2:]), **HALF))
    real = (*turn(q, k, *table), q, k)
    assert [x.stride() for x in turned] == [x.stride() for x in real]
    assert [x.shape for x in turned] == [x.shape for x in real]
    assert reason(fakes[0], RotaryTable(*fakes[2:])) == "refuses: FakeTensor is a subclass of Tensor"
    assert reason(fakes[0], table) == "refuses: FakeTensor is a subclass of Tensor"


def test_meta_tensors():
    q, k, table = (x.to("meta") if isinstance(x, Tensor) else RotaryTable(*(t.to("meta") for t in x)) for x in given())
    assert [x.device.type for x in turn(q, k, *table)] == ["meta"] * 2
    assert apply_rotary_(q, table, **HALF).is_meta
    assert turn_pair_in_place(q, k, *table)[1] is k
    assert "it serves the CPU, and the tensors are on meta" in reason(q, table)


@pytest.mark.parametrize("which", ["x", "cos", "sin"])
def test_half_on_another_device_is_refused(which):
    q, k, table = given()
    if which == "x":
        q, k = q.to("meta"), k.to("meta")
    else:
        table = table._replace(**{which: getattr(table, which).to("meta")})
    for call in (lambda: apply_rotary_pair(q, k, table, **HALF), lambda: apply_rotary(q, table, **HALF)):
        with pytest.raises(ValueError, match="apply_rotary: x is on .* and the table on .*Expected one device"):
            call()


# --- transforms -------------------------------------------------------------------------------------------------------


def test_vmap_over_everything():
    q, k, table = given(F64)
    q, k = torch.stack([q, q + 1, -q], dim=2), torch.stack([k, k + 1, -k])
    found = vmap(turn, in_dims=(2, 0, None, None))(q, k, *table)
    for row in range(3):
        assert all(map(same, (found[0][row], found[1][row]), truth(q.select(2, row), k[row], table)))
    tables = [torch.stack([part, -part]) for part in table]
    found = vmap(turn_one, in_dims=(None, 0, 0))(q[:, :, 0], *tables)
    assert same(found[1], truth(q[:, :, 0], k[0], RotaryTable(*(-part for part in table)))[0])


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_functorch_transforms(backend):
    # the rotation is linear, so each transform has its value written down
    q, _, table = given(F64)
    back = RotaryTable(table.cos, -table.sin)
    settings = {**HALF, "backend": backend}

    def one(q):
        return apply_rotary(q, table, **settings)

    tangent = torch.randn_like(q)
    primal, pushed = jvp(one, (q,), (tangent,))
    assert torch.equal(primal, one(q))
    assert torch.equal(pushed, one(tangent))
    assert torch.equal(vjp(one, q)[1](tangent)[0], apply_rotary(tangent, back, **settings))
    assert torch.equal(grad(lambda q: (one(q) * tangent).sum())(q), apply_rotary(tangent, back, **settings))
    few = RotaryTable(*(t[:1, :2] for t in table))
    jacobian = jacrev(lambda x: apply_rotary(x, few, **settings))(q[:1, :1, :2])
    columns = torch.eye(24, dtype=F64).reshape(24, 1, 1, 2, 12)
    expected = torch.stack([apply_rotary(x, few, **settings) for x in columns], dim=-1)
    assert torch.allclose(jacobian.reshape(expected.shape), expected)
    one_token = RotaryTable(*(t[:1, :1] for t in table))
    second = hessian(lambda x: apply_rotary(x, one_token, **settings).square().sum() / 2)(q[:1, :1, :1])
    gain = torch.tensor([1.3**2] * 8 + [1.0] * 4, dtype=F64)
    assert torch.allclose(second.reshape(12, 12), gain.diag())


def test_forward_mode():
    q, k, table = given(F64)
    tangents = torch.randn_like(q), torch.randn_like(k)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip((q, k), tangents, strict=True)]
        found = [forward_ad.unpack_dual(x).tangent for x in turn(*duals, *table)]
        assert torch.equal(forward_ad.unpack_dual(turn_one(duals[0], *table)).tangent, found[0])
        turning = RotaryTable(table.cos, forward_ad.make_dual(table.sin, torch.ones_like(table.sin)))
        assert forward_ad.unpack_dual(apply_rotary(q, turning, **HALF)).tangent is not None
        assert reason(q, table) == "refuses: forward-mode differentiation goes through the arithmetic"
    assert all(map(torch.equal, found, truth(*tangents, table)))


@pytest.mark.parametrize("pair", [False, True])
def test_forward_over_reverse(pair):
    # a graph made by the kernel, then differentiated in forward mode: the tangent turns back as the gradient does
    q, k, table = given(F64, requires_grad=True)
    out, inputs = (turn(q, k, *table), (q, k)) if pair else ((turn_one(q, *table),), (q,))
    incoming, tangents = ([torch.randn_like(x).detach() for x in inputs] for _ in range(2))
    transposed = RotaryTable(table.cos, -table.sin)
    expected = [apply_rotary(x, transposed, **HALF) for x in tangents]

    def backward(*grads):
        return torch.autograd.grad(out, inputs, grads, retain_graph=True)

    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(incoming, tangents, strict=True)]
        assert all(map(torch.equal, (forward_ad.unpack_dual(x).tangent for x in backward(*duals)), expected))
        last = [*incoming[:-1], duals[-1]]
        assert torch.equal(forward_ad.unpack_dual(backward(*last)[-1]).tangent, expected[-1])
        assert all(forward_ad.unpack_dual(x).tangent is None for x in backward(*incoming))
    assert all(map(torch.equal, jvp(backward, tuple(incoming), tuple(tangents))[1], expected))


# --- modes ------------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_dispatch_mode_sees_one_operator(requires_grad):
    q, k, table = given(requires_grad=requires_grad)
    with Recorder() as mode:
        pair = turn(q, k, *table)
        one = turn_one(q, *table)
        if not requires_grad:
            apply_rotary(q, table, out=torch.empty_like(q), **HALF)
    ending = ".default" if requires_grad else "_inference.default"
    assert mode.seen[:2] == [f"posenc.rotary_pair{ending}", f"posenc.rotary{ending}"]
    assert mode.seen[2:] == ([] if requires_grad else ["aten.empty_like.default", "posenc.rotary_out.default"])
    assert all(map(same, (*pair, one), (*truth(q, k, table), truth(q, k, table)[0])))


def test_a_dispatch_mode_may_change_what_it_sees():
    class Double(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            return tuple(2 * x for x in out) if "posenc" in str(function) else out

    q, k, table = given()
    with Double():
        found = turn(q, k, *table)
    assert all(same(mine, 2 * true) for mine, true in zip(found, truth(q, k, table), strict=True))


def test_a_function_mode_and_flop_counting_do_no_harm():
    class Passing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    q, k, table = given()
    with Passing():
        assert all(map(same, turn(q, k, *table), truth(q, k, table)))
    with FlopCounterMode(display=False) as counter:
        assert all(map(same, turn(q, k, *table), truth(q, k, table)))
    assert counter.get_total_flops() == 0


def test_inference_mode():
    q, k, table = given(requires_grad=True)
    with torch.inference_mode():
        assert all(map(same, turn(q, k, *table), truth(q, k, table)))
        x = q.clone()
        assert x.is_inference()
        assert same(apply_rotary_(x, table, **HALF), truth(q, k, table)[0])
        assert same(apply_rotary(q, table, out=torch.empty_like(q), **HALF), x)
    assert same(apply_rotary(x, table, backend="native", **HALF), apply_rotary(x, table, backend="reference", **HALF))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_autocast(dtype):
    q, k, table = given(dtype, requires_grad=True)
    expected = truth(q, k, table)
    with torch.autocast("cpu", dtype=BF16):
        found = turn(q, k, *table)
        assert all(map(same, truth(q, k, table), expected))
    assert all(map(same, found, expected))
    assert torch.autograd.grad(found[0].sum(), q)[0].dtype == dtype


def test_process_wide_settings():
    q, k, table = given()
    expected = truth(q, k, table)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(BF16)
    try:
        with torch.device("meta"):
            assert all(map(same, turn(q, k, *table), expected))
            assert same(turn_one(q, *table), expected[0])
            assert same(apply_rotary_(q.clone(), table, **HALF), expected[0])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(F32)


# --- tensors that are not plain ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("of", ["negative view", "imaginary part of a conjugate", "real part"])
def test_negative_and_complex_views(of, pairing):
    z = torch.randn(2, 3, 5, 8, dtype=torch.complex64)
    view = {
        "negative view": torch._neg_view(z.real.contiguous()),
        "imaginary part of a conjugate": z.conj().imag,
        "real part": z.real,
    }[of]
    assert view.is_neg() == (of != "real part")
    table = table_of(AT, 4)
    expected = apply_rotary(view.clone().contiguous(), table, pairing=pairing, backend="reference")
    for backend in ("auto", "native", "reference"):
        assert same(apply_rotary(view, table, pairing=pairing, backend=backend), expected)
        assert all(same(x, expected) for x in apply_rotary_pair(view, view, table, pairing=pairing, backend=backend))
        negated = RotaryTable(*(torch._neg_view(-part) for part in table))
        assert same(apply_rotary(view.clone().contiguous(), negated, pairing=pairing, backend=backend), expected)
        own = torch._neg_view(z.real.contiguous()) if of == "negative view" else view.clone()
        assert same(apply_rotary_(own, table, pairing=pairing, backend=backend), expected)
        into = torch._neg_view(torch.zeros(2, 3, 5, 8))
        assert same(apply_rotary(view, table, pairing=pairing, out=into, backend=backend), expected)


def test_zero_tensors():
    zero, table = torch._efficientzerotensor((2, 3, 5, 8)), table_of(AT, 4)
    for backend in ("auto", "reference"):
        assert not apply_rotary(zero, table, backend=backend, **HALF).any()
        assert not apply_rotary_pair(zero, zero, table, backend=backend, **HALF)[1].any()


class Named(Tensor):
    """A subclass that only carries its type along."""


class Wrapper(Tensor):
    """A subclass with its values in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def bare(x):
            return x.inner if isinstance(x, Wrapper) else [bare(y) for y in x] if isinstance(x, (list, tuple)) else x

        out = function(*(bare(x) for x in args), **{key: bare(x) for key, x in (kwargs or {}).items()})
        return cls(out) if isinstance(out, Tensor) else out


@pytest.mark.parametrize("kind", [Named, Wrapper])
def test_subclasses_go_through_the_arithmetic(kind):
    q, k, table = given()
    expected = truth(q, k, table)
    mine = [x.as_subclass(Named) if kind is Named else Wrapper(x) for x in (q, k, *table)]

    def values(x):
        assert type(x) is kind
        return x.as_subclass(Tensor) if kind is Named else x.inner

    turned = turn(mine[0], mine[1], *table)
    assert all(same(values(x), true) for x, true in zip(turned, expected, strict=True))
    assert same(values(turn(q, k, *mine[2:])[1]), expected[1])
    assert same(values(turn_one(mine[0], *mine[2:])), expected[0])
    assert reason(mine[0], table) == f"refuses: {kind.__name__} is a subclass of Tensor"
    assert reason(q, RotaryTable(*mine[2:])) == f"refuses: {kind.__name__} is a subclass of Tensor"
    parameter = torch.nn.Parameter(q)
    assert reason(parameter, k, table, function=apply_rotary_pair).startswith("the first in the order")
    assert reason(parameter, mine[1], table, function=apply_rotary_pair) == f"refuses: {kind.__name__} is a subclass of Tensor"


def test_parameters():
    q, k, table = given()
    q, k = torch.nn.Parameter(q), torch.nn.Parameter(k)
    found = turn(q, k, *(torch.nn.Parameter(part, requires_grad=False) for part in table))
    assert all(map(same, found, truth(q, k, table)))
    sum(x.sum() for x in found).backward()
    assert torch.equal(q.grad, torch.autograd.grad(truth(q, k, table)[0].sum(), q)[0])


# --- processes and threads --------------------------------------------------------------------------------------------


def test_threads_may_call_at_once():
    cases = [given(dtype) for dtype in (F32, F64, BF16) for _ in range(4)]
    cases += [(torch.randn(2, 4, 500, 40), torch.randn(2, 1, 500, 40), table_of(torch.arange(500), 20)) for _ in range(4)]
    expected = [truth(*case) for case in cases]

    def work(at):
        q, k, table = cases[at % len(cases)]
        return all(map(same, turn(q, k, *table), expected[at % len(cases)]))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(160)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_turns():
    x, table = torch.randn(2, 4, 500, 40), table_of(torch.arange(500), 20)
    before = apply_rotary(x, table, backend="native", **HALF)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # rather than hang
        torch.set_num_threads(1)  # as torch's own workers do: OpenMP does not survive a fork with threads
        os._exit(not torch.equal(before, apply_rotary(x, table, backend="native", **HALF)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
