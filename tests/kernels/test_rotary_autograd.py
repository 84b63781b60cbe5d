"""Gradients of the compiled kernel: right, equal to those of the arithmetic, and refused rather than wrong."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.kernels.same_bits import BF16, DTYPES, F32, F64, PAIRINGS, same, table_of
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from posenc import RotaryTable, apply_rotary, apply_rotary_pair, explain
from posenc.core.backends import Verdict

pytest.importorskip("posenc.kernels._rotary")

AT = torch.tensor([[0, 1, 2, 500, 7], [3, 3, 90, 11, 1_000_003]])


def leaves(dtype=F64, width=12, pairs=4):
    q, k = (torch.randn(2, heads, 5, width).to(dtype).requires_grad_() for heads in (4, 2))
    return q, k, table_of(AT, pairs, F64 if dtype == F64 else F32)


def chosen(verdicts: list[Verdict]) -> str:
    return next(verdict.backend for verdict in verdicts if verdict.chosen)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("check", "width", "start"), [(gradcheck, 4, 0), (gradcheck, 7, -5), (gradgradcheck, 6, 1)])
def test_gradients_by_differences(check, width, start, pairing):
    q, k = (torch.randn(1, heads, 2, width, dtype=F64, requires_grad=True) for heads in (2, 1))
    table, k_table = table_of([1, 9], 2, F64), table_of([70, 3], 2, F64)
    settings = {"pairing": pairing, "start": start, "backend": "native"}
    assert check(lambda q: apply_rotary(q, table, **settings), (q,))
    assert check(lambda q, k: apply_rotary_pair(q, k, table, k_table, **settings), (q, k))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_the_arithmetic(dtype, pairing):
    # each is one rotation by the transposed table, rounded once; zeros may differ in sign, which torch.equal allows
    found = {}
    for backend in ("auto", "native", "reference"):
        torch.manual_seed(0)
        q, k, table = leaves(dtype)
        turned = apply_rotary_pair(q, k, table, pairing=pairing, start=1, backend=backend)
        out = (*turned, apply_rotary(q, table, pairing=pairing, start=1, backend=backend))
        weights = [torch.randn(x.shape).to(dtype) for x in out]
        found[backend] = torch.autograd.grad(out[:2], (q, k), weights[:2]) + torch.autograd.grad(out[2], q, weights[2])
    for backend in ("auto", "native"):
        assert all(map(torch.equal, found[backend], found["reference"]))
        assert [x.dtype for x in found[backend]] == [dtype] * 3


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_half_gradients_round_once(pairing):
    q, k, table = leaves(BF16)
    grads = torch.randn_like(q), torch.randn_like(k)
    found = torch.autograd.grad(apply_rotary_pair(q, k, table, pairing=pairing), (q, k), grads)
    back = RotaryTable(table.cos, -table.sin)
    wide = apply_rotary_pair(grads[0].float(), grads[1].float(), back, pairing=pairing, backend="reference")
    assert all(same(mine, true.to(BF16)) for mine, true in zip(found, wide, strict=True))


@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
def test_only_what_asks_gets_a_gradient(backend):
    q, k, table = leaves()
    for one, other in ((q, k.detach()), (q.detach(), k)):
        out = apply_rotary_pair(one, other, table, pairing="half", backend=backend)
        assert [x.requires_grad for x in out] == [one.requires_grad, other.requires_grad]
        want = one if one.requires_grad else other
        (grad,) = torch.autograd.grad(sum(x.square().sum() for x in out), want)
        # cos² + sin² is 1.3² everywhere, so the squared norm grows by that, and its gradient too
        assert torch.allclose(grad[..., :8], 2 * 1.3**2 * want[..., :8])
        assert torch.equal(grad[..., 8:], 2 * want[..., 8:])


@pytest.mark.parametrize("at", [0, 1])
def test_a_result_that_is_not_used(at):
    q, k, table = leaves()
    apply_rotary_pair(q, k, table, pairing="half", backend="native")[at].sum().backward()
    used, unused = (q, k) if at == 0 else (k, q)
    assert bool(used.grad.any())
    assert unused.grad is None or not unused.grad.any()


def test_gradients_of_any_strides():
    q, k, table = leaves(F32)
    incoming = {
        "expanded": torch.ones(()).expand(q.shape),
        "permuted": torch.randn(12, 5, 4, 2).permute(3, 2, 1, 0),
        "every other": torch.randn(2, 4, 10, 24)[:, :, ::2, ::2],
        "by token": torch.randn(2, 5, 4, 12).transpose(1, 2),
        "one row for all": torch.randn(12).expand(q.shape),
    }
    for grad in incoming.values():
        turned, _ = apply_rotary_pair(q, k, table, pairing="half", backend="native")
        expected, _ = apply_rotary_pair(q, k, table, pairing="half", backend="reference")
        mine, true = (torch.autograd.grad(x, q, grad)[0] for x in (turned, expected))
        assert torch.equal(mine, true)
    sums = [apply_rotary(q, table, pairing="half", backend=backend).sum() for backend in ("native", "reference")]
    assert torch.equal(*(torch.autograd.grad(x, q)[0] for x in sums))


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("part", ["cos", "sin"])
def test_a_table_that_is_overwritten_is_noticed(part, pair):
    q, k, table = leaves()
    out = apply_rotary_pair(q, k, table, pairing="half")[0] if pair else apply_rotary(q, table, pairing="half")
    getattr(table, part).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_inputs_may_be_overwritten_since_they_are_not_kept():
    q, _, table = leaves()
    out = apply_rotary(q * 1, table, pairing="half", backend="native")
    (expected,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    with torch.no_grad():
        q.zero_()
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], expected)


@pytest.mark.parametrize("pair", [False, True])
def test_a_table_that_learns_goes_through_the_arithmetic(pair):
    q, k, _ = leaves(width=8)
    cos, sin = torch.randn(2, 5, 4, dtype=F64, requires_grad=True), torch.randn(2, 5, 4, dtype=F64, requires_grad=True)

    def turn(q, k, cos, sin):
        table = RotaryTable(cos, sin)
        return apply_rotary_pair(q, k, table, pairing="half") if pair else apply_rotary(q, table, pairing="half")

    assert gradcheck(turn, (q[:1, :1].detach().requires_grad_(), k[:1, :1].detach(), cos[:1], sin[:1]))
    table = RotaryTable(cos, sin)
    verdicts = explain(apply_rotary, q.detach(), table, pairing="half")
    assert chosen(verdicts) == "reference"
    assert {v.backend: v.reason for v in verdicts}["native"] == "refuses: the table needs a gradient"
    with torch.no_grad():
        assert chosen(explain(apply_rotary, q, table, pairing="half")) == "native"


def test_a_learned_k_table_alone_is_noticed():
    q, k, table = leaves(width=8)
    k_table = RotaryTable(table.cos.clone().requires_grad_(), table.sin.clone())
    _, turned = apply_rotary_pair(q.detach(), k.detach(), table, k_table, pairing="half")
    turned.sum().backward()
    assert torch.allclose(k_table.cos.grad, k.detach().reshape(2, 2, 5, 2, 4).sum((1, 3)))


def test_backward_twice_and_hooks():
    q, k, table = leaves()
    seen = []
    q.register_hook(lambda grad: seen.append(grad.clone()) or 2 * grad)
    out = apply_rotary_pair(q, k, table, pairing="half", backend="native")
    total = sum(x.sum() for x in out)
    total.backward(retain_graph=True)
    once = q.grad.clone()
    total.backward()
    assert torch.equal(once, 2 * seen[0])
    assert torch.equal(q.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


def test_hooks_on_saved_tensors_see_the_tables_alone():
    q, _, table = leaves()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
        out = apply_rotary(q, table, pairing="half", backend="native")
    assert [x.shape for x in packed] == [part.shape for part in table]
    (grad,) = torch.autograd.grad(out.sum(), q)
    expected = apply_rotary(q, table, pairing="half", backend="reference").sum()
    assert torch.equal(grad, torch.autograd.grad(expected, q)[0])


def block(q, k, table):
    q, k = apply_rotary_pair(q * 1.5, k.tanh(), table, pairing="half")
    return (q @ k.repeat_interleave(2, 1).mT).softmax(-1)


@pytest.mark.parametrize("how", ["plain", "reentrant", "selective"])
def test_checkpoints(how):
    q, k, table = leaves()
    expected = torch.autograd.grad(block(q, k, table).square().sum(), (q, k))
    seen = []

    def policy(context, operator, *args, **kwargs):
        seen.append((context.is_recompute, str(operator)))
        keep = operator is torch.ops.posenc.rotary_pair.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    settings = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(block, q, k, table, **settings)
    found = torch.autograd.grad(out.square().sum(), (q, k)) if how != "reentrant" else None
    if found is None:
        out.square().sum().backward()
        found = q.grad, k.grad
    assert all(map(torch.equal, found, expected))
    assert how != "selective" or (False, "posenc.rotary_pair.default") in seen


@pytest.mark.parametrize("head_axis", [-3, -2, None])
@pytest.mark.parametrize("pair", [False, True])
def test_a_batch_of_gradients_at_once(pair, head_axis):
    q, k = (torch.randn(2, 5, 3, 8, dtype=F64, requires_grad=True) for _ in range(2))
    if head_axis == -3:
        q, k = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k))
    table = table_of(AT[0] if head_axis else [[4], [5], [6], [7], [8]], 4, F64)
    if head_axis is None:
        table = RotaryTable(*(part.expand(5, 3, 4) for part in table))

    def turn(q, k):
        settings = {"pairing": "interleaved", "head_axis": head_axis}
        out = apply_rotary_pair(q, k, table, **settings) if pair else (apply_rotary(q, table, **settings),)
        return torch.cat([x.flatten()[:7] for x in out])

    for create_graph in (False, True):
        one, many = (
            torch.autograd.functional.jacobian(turn, (q, k), vectorize=v, create_graph=create_graph) for v in (False, True)
        )
        assert all(map(torch.equal, one, many))


OPERATORS = ["rotary", "rotary_pair", "rotary_inference", "rotary_pair_inference", "rotary_out", "rotary_pair_out"]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layout", ["plain", "by token", "every other channel"])
def test_the_operators_keep_their_promises(operator, layout):
    """torch's own checks of a custom operator: schema, autograd registration, fake tensors."""
    q, k, table = leaves(F32, width=16)
    q, k = (x.detach() for x in (q, k))
    if layout == "by token":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    if layout == "every other channel":
        q, k = (x[..., ::2] for x in (q, k))
    differentiable = operator in ("rotary", "rotary_pair")
    q, k = (x.requires_grad_(differentiable) for x in (q, k))
    tensors = (q, k, *table, *table) if "pair" in operator else (q, *table)
    settings = (False, 0, -3, False)
    written = {"rotary_out": (q,), "rotary_pair_out": (q, k)}.get(operator, ())
    out = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in written)
    tests = ["test_schema", "test_faketensor"] + ["test_autograd_registration"] * differentiable
    torch.library.opcheck(getattr(torch.ops.posenc, operator).default, (*tensors, *settings, *out), test_utils=tests)
