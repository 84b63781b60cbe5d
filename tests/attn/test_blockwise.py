"""Blocks of queries against the whole: values, gradients, memory, what is hidden, what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from posenc import (
    CAUSAL,
    FULL,
    ALiBi,
    BackendRefused,
    DenseBias,
    FormulaBias,
    KeyBias,
    Mask,
    QueryTableBias,
    ScoreBias,
    ShapeError,
    SlopeBias,
    T5Bias,
    TableBias,
    attention,
    explain,
    same_segment,
    visible,
    window,
)
from posenc.attn.backends.base import Backend
from posenc.attn.backends.blockwise import Blockwise
from posenc.attn.backends.reference import Reference
from posenc.attn.request import Request, make_request
from posenc.core.bias import KeyTableBias

from .oracle import budget

BATCH, HEADS, DIM, V_DIM, BLOCK = 2, 4, 8, 6, 4
Q, K = 11, 17
"""Neither is a multiple of the block."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers that every dtype holds exactly."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    return (values * 32).round() / 32


def masks(q: int, k: int) -> dict[str, Mask]:
    random = torch.Generator().manual_seed(q + 100 * k)
    rows = [torch.randint(-1, 2, (BATCH, n), generator=random) for n in (q, k)]
    orders = [torch.randint(0, 9, (BATCH, n), generator=random) for n in (q, k)]
    blind = max(0, k - q) + BLOCK + 1  # a whole block of rows that see nothing, and one more
    padded = torch.where(torch.arange(k) < torch.tensor([[blind], [0]]), -1, 0)
    return {
        "full": FULL,
        "causal": CAUSAL,
        "window": window(3),
        "window after": window(2, 5),
        "causal & window": CAUSAL & window(6),
        "causal | window": CAUSAL | window(1, 2),
        "segments": same_segment(*rows),
        "causal & segments": CAUSAL & same_segment(*rows),
        "left padding": CAUSAL & same_segment(padded[:, -q:] if q <= k else torch.zeros(BATCH, q, dtype=torch.int64), padded),
        "visible": visible(orders[0][0], orders[1][0]),
        "visible by row": visible(*orders, window=3),
    }


def repulsion(q: Tensor, k: Tensor, head: Tensor, slope: Tensor, power: Tensor) -> Tensor:
    """A formula that is not of the distance alone, of one parameter by head and one for all."""
    return slope[head] * (q - k).abs() / (q + k + 1) * power


def network(q: Tensor, k: Tensor, head: Tensor, rise: Tensor, rows: Tensor) -> Tensor:
    """A small network of the distance, as FIRE's is."""
    units = torch.relu(linear(((q - k).to(rise.dtype) / 8).unsqueeze(-1), rise))
    return linear(units, rows[head.flatten()]).movedim(-1, -4).squeeze(-3)


class Case(NamedTuple):
    shapes: tuple[tuple[int, ...], ...]
    value: Callable[..., ScoreBias]
    axes: int = 1


def biases(q: int, k: int) -> dict[str, Case]:
    every = torch.arange(HEADS)
    return {
        "slopes": Case(((HEADS,), (HEADS,)), SlopeBias),
        "signed slopes": Case(((HEADS,),), SlopeBias),
        "formula": Case(((HEADS,), ()), lambda *w: FormulaBias(repulsion, w, every)),
        "network": Case(((5, 1), (HEADS, 5)), lambda *w: FormulaBias(network, w, every, pointwise=False)),
        "table": Case(((HEADS, 6),), lambda w: TableBias(w, (2,))),
        "table of one head": Case(((1, 6),), lambda w: TableBias(w, (2,))),
        "table of two axes": Case(((HEADS, 5, 3),), lambda w: TableBias(w, (2, 1)), axes=2),
        "key": Case(((BATCH, HEADS, k),), KeyBias),
        "key, no batch": Case(((HEADS, k),), KeyBias),
        "query table": Case(((BATCH, HEADS, q, 5),), lambda w: QueryTableBias(w, 1)),
        "key table": Case(((BATCH, HEADS, k, 5),), lambda w: KeyTableBias(w, 1)),
        "dense": Case(((BATCH, HEADS, q, k),), DenseBias),
        "dense, spread": Case(((1, q, 1),), DenseBias),
        "sum": Case(
            ((HEADS, 6), (BATCH, HEADS, k), (HEADS,), (q, k)),
            lambda table, key, slope, dense: (
                TableBias(table, (2,)) + KeyBias(key) + (SlopeBias(slope) + DenseBias(dense.expand(HEADS, -1, -1)))
            ),
        ),
        "sum of axes": Case(
            ((HEADS, 5, 3), (HEADS, k)), lambda table, key: TableBias(table, (2, 1)) + KeyBias(key), axes=2
        ),
    }  # fmt: skip


def positions(length: int, axes: int, seed: int) -> Tensor:
    """Different from row to row, repeated and backward: masks must not care."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (BATCH, length) if axes == 1 else (BATCH, length, axes), generator=random)


def request(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask = FULL, bias: ScoreBias | None = None, dropout_p: float = 0.0, **at: Any
) -> Request:
    at = {"positions": None, "k_positions": None, "scale": None} | at
    return make_request(q, k, v, mask=mask, bias=bias, dropout_p=dropout_p, **at)


def qkv(q: int, k: int, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return draw(BATCH, HEADS, q, DIM), draw(BATCH, kv_heads, k, DIM, seed=1), draw(BATCH, kv_heads, k, V_DIM, seed=2)


def results(
    backend: Backend, q: int, k: int, kv_heads: int, mask: Mask, case: Case | None, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """The output, and the gradients of q, k, v and every parameter; parameters stay wide."""
    wide = torch.promote_types(dtype, torch.float32)
    inputs = [t.to(dtype).requires_grad_() for t in qkv(q, k, kv_heads)]
    learned = [draw(*shape, seed=3 + i).to(wide).requires_grad_() for i, shape in enumerate(case.shapes if case else ())]
    at = {"positions": positions(q, case.axes, 0), "k_positions": positions(k, case.axes, 1)} if case else {}
    out = backend.run(request(*inputs, mask, case.value(*learned) if case else None, **at))
    upstream = draw(BATCH, HEADS, q, V_DIM, seed=4).to(out.dtype)
    found = torch.autograd.grad(out, [*inputs, *learned], upstream, allow_unused=True)  # no row may see anything
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip([*inputs, *learned], found, strict=True))]


def assert_same(ours: list[Tensor], whole: list[Tensor]) -> None:
    """Float64, the same products in another order. Sums of at most 2 · 4 · 17 terms (a table's gradient: all queries and
    keys), four of them one after another: 2¹⁰ roundings of the largest number."""
    for mine, theirs in zip(ours, whole, strict=True):
        assert mine.shape == theirs.shape
        most = 2**10 * torch.finfo(torch.float64).eps * max(1.0, float(theirs.abs().max()))
        assert float((mine - theirs).abs().max()) <= most


@pytest.mark.parametrize("bias", [None, *biases(Q, K)])
@pytest.mark.parametrize("mask", masks(Q, K))
def test_every_mask_and_bias_is_the_whole(mask: str, bias: str | None) -> None:
    case = None if bias is None else biases(Q, K)[bias]
    of = (Q, K, 2, masks(Q, K)[mask], case)
    assert_same(results(Blockwise(BLOCK), *of), results(Reference(), *of))


@pytest.mark.parametrize(("q", "k"), [(1, K), (K, K), (K, Q), (K, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize("mask", masks(Q, K))
def test_every_length_is_the_whole(mask: str, q: int, k: int) -> None:
    for bias in ("sum", "query table"):
        of = (q, k, 2, masks(q, k)[mask], biases(q, k)[bias])
        assert_same(results(Blockwise(BLOCK), *of), results(Reference(), *of))


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("block", [2, 64])
def test_every_grouping_and_block_is_the_whole(kv_heads: int, block: int) -> None:
    for bias in (None, *biases(Q, K).values()):
        of = (Q, K, kv_heads, masks(Q, K)["causal & segments"], bias)
        assert_same(results(Blockwise(block), *of), results(Reference(), *of))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [None, *biases(Q, K)])
def test_every_dtype_is_as_exact_as_the_reference(bias: str | None, dtype: torch.dtype) -> None:
    of = (Q, K, 2, masks(Q, K)["causal"], None if bias is None else biases(Q, K)[bias])
    exact, plain, ours = results(Reference(), *of), results(Reference(), *of, dtype), results(Blockwise(BLOCK), *of, dtype)
    for mine, theirs, truth in zip(ours, plain, exact, strict=True):
        assert mine.dtype == theirs.dtype
        assert float((mine.double() - truth).abs().max()) <= budget(theirs, truth)


def test_gradients_of_a_narrow_parameter_are_summed_wide() -> None:
    """A quarter from each of 320 queries, one by one: a sum in bfloat16 stops at 64."""
    q, v = torch.zeros(1, 1, 320, DIM), torch.tensor([[0.0], [1.0]]).expand(1, 1, 2, 1)
    values = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    out = Blockwise(1).run(request(q, torch.zeros(1, 1, 2, DIM), v, FULL, KeyBias(values)))
    (grad,) = torch.autograd.grad(out.sum(), values)
    assert grad.dtype == torch.bfloat16
    assert grad.tolist() == [[-80.0, 80.0]]


class Sizes(TorchDispatchMode):
    """How many numbers the largest tensor has that is made inside, and how many scores are made in all."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.scores = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t.untyped_storage().nbytes() // t.itemsize for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.largest = max([self.largest, *made])
        if func is torch.ops.aten._softmax.default:
            self.scores += out.numel()
        return out


LONG, STRIDE, HIDDEN = 512, 32, 5


def kerple(q: Tensor, k: Tensor, head: Tensor, slope: Tensor, rate: Tensor) -> Tensor:
    return -slope[head] * torch.log1p(rate[head] * (q - k).abs().to(slope.dtype))


def learned_biases() -> dict[str, tuple[list[Tensor], Callable[..., ScoreBias], int]]:
    """Parameters, value, and how many numbers it makes of one entry of one head."""
    t5, every = T5Bias(HEADS), torch.arange(HEADS)
    free = [torch.rand(*shape).requires_grad_() for shape in ((HEADS,), (HEADS,), (HIDDEN, 1), (HEADS, HIDDEN))]
    return {
        "t5": ([t5.relative_attention_bias.weight], lambda w: t5(), 1),
        "kerple": (free[:2], lambda *w: FormulaBias(kerple, w, every), 1),
        "network": (free[2:], lambda *w: FormulaBias(network, w, every, pointwise=False), HIDDEN),
    }


@pytest.mark.parametrize("bias", learned_biases())
@pytest.mark.parametrize("mask", ["causal", "segments"])
def test_no_tensor_has_the_size_of_all_scores(bias: str, mask: str) -> None:
    """Forward and backward, and nothing but the inputs is kept between them."""
    learned, value, by_entry = learned_biases()[bias]
    inputs = [torch.randn(1, HEADS, LONG, DIM, requires_grad=True) for _ in range(3)]
    documents = torch.arange(LONG)[None] // 200
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with Sizes() as sizes:
        made = request(*inputs, CAUSAL if mask == "causal" else same_segment(documents), value(*learned), positions=0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = Blockwise(STRIDE).run(made)
        torch.autograd.grad(out, [*inputs, *learned], torch.ones_like(out))
    assert sizes.largest <= HEADS * by_entry * STRIDE * LONG  # one sixteenth of HEADS · LONG²
    assert max(t.numel() for t in kept) <= HEADS * LONG * DIM


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (CAUSAL, LONG * (LONG + STRIDE) // 2),
        (CAUSAL & window(40), LONG * (STRIDE + 39)),
        (window(40, 7), LONG * (STRIDE + 39 + 7)),
        (CAUSAL & same_segment(torch.zeros(1, LONG, dtype=torch.int64)), LONG * (LONG + STRIDE) // 2),
        (window(3) | window(40), LONG * (STRIDE + 39)),
    ],
    ids=["causal", "causal & window", "window", "causal & segments", "window | window"],
)
def test_keys_out_of_reach_cost_nothing(mask: Mask, most: int) -> None:
    q = torch.randn(1, 1, LONG, DIM)
    with Sizes() as sizes:
        Blockwise(STRIDE).run(request(q, q, q, mask))
    assert sizes.scores <= most


def test_after_the_backward_nothing_is_held() -> None:
    """A loss that stays in a variable through the next step must not keep the last one's logits."""
    q, k, v = (t.float().requires_grad_() for t in qkv(Q, Q))
    weight = torch.randn(DIM, 5, requires_grad=True)
    logits = q @ weight
    held = weakref.ref(logits)
    out = Blockwise(BLOCK).run(request(q, k, v, CAUSAL, QueryTableBias(logits, 1)))
    del logits
    out.sum().backward()
    gc.collect()
    assert held() is None
    assert weight.grad is not None


def test_hidden_keys_reach_neither_result_nor_gradient() -> None:
    q, k, v = (t.float() for t in qkv(Q, K))
    for name, mask in masks(Q, K).items():
        allowed = mask.allowed(Q, K, device="cpu").expand(BATCH, Q, K)

        def run(k: Tensor, v: Tensor, mask: Mask = mask) -> Tensor:
            return Blockwise(BLOCK).run(request(q, k, v, mask, ALiBi(HEADS)()))

        before = run(k, v)
        for j in range(0, K, 2):
            other_k, other_v = k.clone(), v.clone()
            other_k[:, :, j], other_v[:, :, j] = -30 * k[:, :, j], 1e4
            moved = (run(other_k, other_v) != before).any(-1).any(1)
            assert torch.equal(moved, allowed[:, :, j]), f"{name}, key {j}"
        keys = k.clone().requires_grad_()
        for i in range(0, Q, 3):
            (grad,) = torch.autograd.grad(run(keys, v)[:, :, i].sum(), keys)
            assert not grad.any(-1).any(1)[~allowed[:, i]].any(), f"{name}, query {i}"


@pytest.mark.parametrize("mask", ["left padding", "causal & segments"])
def test_rows_that_see_nothing_are_zero_and_have_finite_gradients(mask: str) -> None:
    rule = masks(Q, K)[mask]
    empty = ~rule.allowed(Q, K, device="cpu").any(-1)
    assert empty.any()
    for bias in biases(Q, K).values():
        out, dq, *others = results(Blockwise(BLOCK), Q, K, 2, rule, bias)
        assert not out.transpose(1, 2)[empty].any()
        assert not dq.transpose(1, 2)[empty].any()
        assert all(grad.isfinite().all() for grad in others)


def test_nan_in_one_query_stays_in_its_row() -> None:
    q, k, v = qkv(K, K)
    broken = q.clone()
    broken[:, :, 5] = float("nan")
    others = torch.arange(K) != 5
    for mask in (CAUSAL, window(3)):
        clean, dirty = (Blockwise(BLOCK).run(request(x, k, v, mask, ALiBi(HEADS)())) for x in (q, broken))
        assert torch.equal(clean[:, :, others], dirty[:, :, others])
        assert dirty[:, :, 5].isnan().all()


def test_transposed_inputs_and_frozen_ones() -> None:
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(Q, K))
    table = draw(HEADS, 6).requires_grad_()
    bias = TableBias(table, (2,))
    ours, whole = (backend.run(request(q, k, v, CAUSAL, bias)) for backend in (Blockwise(BLOCK), Reference()))
    assert_same(
        [ours.detach(), *torch.autograd.grad(ours.sum(), table)], [whole.detach(), *torch.autograd.grad(whole.sum(), table)]
    )  # fmt: skip
    assert not Blockwise(BLOCK).run(request(q, k, v, CAUSAL, SlopeBias(draw(HEADS)))).requires_grad


def test_autocast_leaves_biases_wide() -> None:
    q, k, v = (t.float().requires_grad_() for t in qkv(Q, Q))
    table = (torch.randn(HEADS, 6) * 100).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ours, whole = (b.run(request(q, k, v, CAUSAL, TableBias(table, (0,)))) for b in (Blockwise(BLOCK), Reference()))
        assert ours.dtype == torch.bfloat16
        grads = [torch.autograd.grad(out.float().sum(), [q, table]) for out in (ours, whole)]
    for mine, theirs in zip((ours, *grads[0]), (whole, *grads[1]), strict=True):
        # sums in float32, rounded to bfloat16 once: where they fall on two sides of a boundary, one unit in the last place
        bound = torch.finfo(torch.bfloat16).eps * theirs.abs().max()
        assert (mine - theirs).abs().max() <= bound


def test_deterministic_mode() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        of = (Q, K, 2, CAUSAL, biases(Q, K)["sum"], torch.float32)
        first, again = results(Blockwise(BLOCK), *of), results(Blockwise(BLOCK), *of)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def dropped(*inputs: Tensor, seed: int = 0, p: float = 0.5) -> Tensor:
    torch.manual_seed(seed)
    q, k, v, table = inputs
    return Blockwise(BLOCK).run(request(q, k, v, CAUSAL, TableBias(table, (2,)), dropout_p=p))


def test_dropout_is_the_same_in_the_backward() -> None:
    inputs = [t[:1].clone().requires_grad_() for t in qkv(6, 6)] + [draw(HEADS, 6).requires_grad_()]
    assert torch.autograd.gradcheck(dropped, inputs, fast_mode=True)
    assert torch.equal(dropped(*inputs), dropped(*inputs))
    assert not torch.equal(dropped(*inputs), dropped(*inputs, seed=1))
    recomputed = checkpoint(dropped, *inputs, use_reentrant=False)
    for mine, theirs in zip(
        torch.autograd.grad(recomputed.sum(), inputs), torch.autograd.grad(dropped(*inputs).sum(), inputs), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_dropout_drops_its_share() -> None:
    """Equal weights of 1/256 over values of 1: a row is the share of kept weights over 1 - p. Five standard deviations of the
    mean over 4 · 64 rows of 256 weights: √(p / (1 - p) / 65,536) is 1/512 for p = 0.2."""
    q, v = torch.zeros(1, HEADS, 64, DIM), torch.ones(1, HEADS, 256, DIM)
    torch.manual_seed(0)
    out = Blockwise(BLOCK).run(request(q, torch.zeros_like(v), v, dropout_p=0.2))
    assert abs(float(out.mean()) - 1) < 5 / 512
    assert float((out[..., 0] * 256 * 0.8).round().sub(out[..., 0] * 256 * 0.8).abs().max()) < 1e-3  # whole weights are dropped
    assert len(out[0, :, :, 0].flatten().unique()) > 20  # not the same ones in each block


def test_a_second_derivative_is_refused() -> None:
    """Anything less would leave a gradient penalty without its gradient."""
    q, k, v = (t.requires_grad_() for t in qkv(Q, Q))
    out = Blockwise(BLOCK).run(request(q, k, v, CAUSAL, ALiBi(HEADS)()))
    with pytest.raises(BackendRefused, match="blockwise has no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def long(**more: Any) -> dict[str, Any]:
    q = torch.zeros(()).expand(1, 8, 1024, DIM)  # as long as it says, without the memory
    return {"q": q, "k": q, "v": q, "mask": CAUSAL, "bias": SlopeBias(torch.ones(8), torch.ones(8))} | more


def said(**call: Any) -> str:
    return next(verdict.reason for verdict in explain(attention, **call) if verdict.backend == "blockwise")


def stretched(heads: int, length: int, device: str = "cpu") -> Tensor:
    return torch.zeros((), device=device).expand(1, heads, length, DIM)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({}, "the first in the order"),
        ({"bias": None, "mask": CAUSAL & window(64)}, "the first in the order"),
        ({"bias": None, "mask": CAUSAL & window(512)}, "only by name: without a bias, and with a mask that hides less"),
        ({"bias": None}, "only by name: without a bias"),
        ({"bias": None, "mask": FULL}, "only by name: without a bias"),
        ({"q": stretched(8, 512)}, "the first in the order"),
        ({"q": stretched(8, 1)}, "only by name: 8192 scores are few enough to write out"),
        ({"k": stretched(8, 16384), "v": stretched(8, 16384), "q": stretched(8, 256)}, "only by name: 256 queries are few"),
        ({x: stretched(8, 1024, "meta") for x in "qkv"}, "only by name: its speed is measured on the CPU alone"),
        (
            {x: stretched(8, 1024, "meta") for x in "qkv"} | {"dropout_p": 0.1},
            "refuses: it repeats its dropout from a seed, and meta has no generator",
        ),
        ({"positions": torch.ones(1024, requires_grad=True)}, "refuses: it gives positions no gradient"),
    ],
)
def test_auto_takes_it_by_static_facts(call: dict[str, Any], reason: str) -> None:
    assert said(**long(**call)).startswith(reason)


def named(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, mask=CAUSAL, bias=ALiBi(HEADS)(), backend="blockwise")


def test_transformed_calls_are_refused_by_name() -> None:
    q, k, v = qkv(Q, Q)
    with pytest.raises(BackendRefused, match=r"torch\.func cannot transform"):
        torch.func.grad(lambda q: named(q, k, v).sum())(q)
    with pytest.raises(BackendRefused, match=r"torch\.func cannot transform"):
        torch.vmap(named, in_dims=(0, None, None))(q[None], k, v)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(BackendRefused, match="no forward-mode derivative"):
        named(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def test_compiled_calls_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "refuses: torch.compile does not trace its backward" in said(**long())


@pytest.mark.slow
def test_a_long_call_compiles_in_one_graph() -> None:
    q, bias = torch.randn(1, HEADS, 1024, DIM), T5Bias(HEADS).requires_grad_(False)

    def call(q: Tensor) -> Tensor:
        return attention(q, q, q, mask=CAUSAL, bias=bias())

    assert said(q=q, k=q, v=q, mask=CAUSAL, bias=bias()).startswith("the first")
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(q)
    assert float((compiled - call(q)).abs().max()) <= 2**-18  # float32 sums of 1,024 weights, which are 1 together


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (KeyBias(torch.zeros(HEADS, Q + 1)), r"KeyBias of \d+ keys for 11 queries and 11 keys"),
        (KeyBias(torch.zeros(HEADS, Q - 1)), r"KeyBias of \d+ keys for 11 queries and 11 keys"),
        (QueryTableBias(torch.zeros(HEADS, Q + 1, 3), 0), "QueryTableBias of 12 queries for"),
        (DenseBias(torch.zeros(HEADS, Q, Q + 2)), r"DenseBias of \d+ queries and \d+ keys for 11 queries"),
        (DenseBias(torch.zeros(HEADS, Q + 2, Q)), r"DenseBias of \d+ queries and \d+ keys for 11 queries"),
        (KeyBias(torch.zeros(3, HEADS, Q)), r"the bias has the batch \(3,\)"),
    ],
)
def test_biases_of_other_tokens_are_refused(bias: ScoreBias, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Blockwise(BLOCK).run(request(*qkv(Q, Q), CAUSAL, bias))


def test_masks_of_other_tokens_are_refused() -> None:
    for mask, message in (
        (same_segment(torch.zeros(BATCH, Q + 1, dtype=torch.int64)), r"Expected \[\*batch, 11\]"),
        (same_segment(torch.zeros(3, Q, dtype=torch.int64)), r"the mask has the batch \(3,\)"),
    ):
        with pytest.raises(ShapeError, match=message):
            Blockwise(BLOCK).run(request(*qkv(Q, Q), mask))
