"""Packed documents, a causal call for each: the numbers of the dense mask, nothing between documents, none of the work."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from posenc import (
    CAUSAL,
    FULL,
    ALiBi,
    BackendRefused,
    GrowingCache,
    KeyBias,
    RoPE,
    ScoreBias,
    ShapeError,
    SlopeBias,
    T5Bias,
    attention,
    causal,
    explain,
    materialize,
    packed,
    padded,
    positional_attention,
    same_segment,
    window,
)
from posenc.attn.backends import varlen
from posenc.attn.request import make_request

from .oracle import attention_oracle, budget, plain_attention
from .test_leaks import assert_hidden

N = 12
SEGMENTS = {
    "one document": [0] * N,
    "packed": [0, 0, 0, 1, 2, 2, 2, 2, 2, -1, -1, -1],
    "falling numbers": [9, 9, 9, 9, 4, 4, 4, -1, 0, 0, 0, 0],
    "in pieces": [3, 3, 1, 1, 3, 3, 3, -1, 1, 0, 3, 1],
    "alone": [*range(N)],
    "odd numbers": [2**63 - 1, 2**63 - 1, -1, -(2**63), -2, -2, 2**63 - 1, -1, -(2**63), 5, 5, 5],
    "padding alone": [-1] * N,
}
BATCHES = {
    "shared": torch.tensor(SEGMENTS["in pieces"]),
    "shared, with an axis": torch.tensor([SEGMENTS["packed"]]),
    "of each": torch.tensor([SEGMENTS["packed"], SEGMENTS["in pieces"]]),
    "left and right": torch.tensor([[-1] * 4 + [1] * 8, [1] * 8 + [-1] * 4]),
    "int32": torch.tensor([SEGMENTS["falling numbers"], SEGMENTS["padding alone"]], dtype=torch.int32),
}


def qkv(
    dtype: torch.dtype = torch.float64,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    v_dim: int = 8,
    n: int = N,
    batch: int = 2,
):
    torch.manual_seed(0)
    shapes = (batch, heads, n, dim), (batch, kv_heads, n, dim), (batch, kv_heads, n, v_dim)
    return [torch.randn(*shape).to(dtype) for shape in shapes]


def rule(segments: Tensor):
    rows = segments.expand(2, segments.shape[-1]).tolist()
    return lambda b, i, j: j <= i and rows[b][i] == rows[b][j] != -1


def run(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, **more: Any) -> Tensor:
    return attention(q, k, v, mask=CAUSAL & same_segment(segments), backend=more.pop("backend", "varlen"), **more)


ROWS = {**{name: torch.tensor(row) for name, row in SEGMENTS.items()}, **BATCHES}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROWS)
def test_every_packing_is_the_definition(name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    exact = attention_oracle(q, k, v, sees=rule(ROWS[name]))
    allowed = (CAUSAL & same_segment(ROWS[name])).allowed(N, N, device="cpu")
    allowed = allowed[:, None] if allowed.ndim == 3 else allowed
    plain = plain_attention(q, k, v, allowed=allowed | ~allowed.any(-1, keepdim=True)).masked_fill(
        ~allowed.any(-1, keepdim=True), 0
    )
    out = run(q, k, v, ROWS[name])
    assert out.dtype == dtype
    assert float((out - exact).abs().max()) <= budget(plain, exact)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)])
@pytest.mark.parametrize(("dim", "v_dim"), [(8, 3), (3, 8), (1, 1)])
@pytest.mark.parametrize("scale", [None, 2.0, 0.0, -0.5])
def test_heads_widths_and_scales(scale: float | None, dim: int, v_dim: int, heads: int, kv_heads: int) -> None:
    q, k, v = qkv(heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim)
    exact = attention_oracle(q, k, v, sees=rule(BATCHES["of each"]), scale=scale)
    torch.testing.assert_close(run(q, k, v, BATCHES["of each"], scale=scale), exact, rtol=0, atol=1e-13)  # 60 roundings near 4


@pytest.mark.parametrize("name", ROWS)
def test_gradients_are_those_of_the_definition(name: str) -> None:
    leaves, up = [x.requires_grad_() for x in qkv()], torch.randn(2, 4, N, 8, dtype=torch.float64)
    out = attention_oracle(*leaves, sees=rule(ROWS[name]))
    exact = torch.autograd.grad(out, leaves, up) if out.requires_grad else [None] * 3  # padding alone
    found = torch.autograd.grad(run(*leaves, ROWS[name]), leaves, up, materialize_grads=True)
    hidden = (ROWS[name].expand(2, N) == -1)[:, None, :, None]
    for ours, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if truth is None else truth, rtol=0, atol=1e-12)
        assert not ours.masked_select(hidden).any()


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", ["packed", "in pieces", "of each"])
def test_biases_ride_in_channels(name: str, learned: bool) -> None:
    at = torch.stack([torch.arange(N) % 5, torch.arange(N).flip(0)])
    q, k, v = qkv(torch.bfloat16)
    gates = -torch.rand(4, N).cumsum(-1)

    def bias(slopes: Tensor) -> ScoreBias:
        return SlopeBias(slopes) + KeyBias(gates)

    slopes, up = torch.linspace(0.1, 0.8, 4), torch.randn(2, 4, N, 8).bfloat16()
    wide = slopes.double().requires_grad_()
    dense = materialize(bias(wide), at, dtype=torch.float64)
    exact = attention_oracle(q, k, v, sees=rule(ROWS[name]), bias=dense)
    slopes.requires_grad_(learned)
    out = run(q, k, v, ROWS[name], bias=bias(slopes), positions=at)
    allowed = (CAUSAL & same_segment(ROWS[name])).allowed(N, N, device="cpu")
    allowed = (allowed[:, None] if allowed.ndim == 3 else allowed[None, None]).expand(2, 1, N, N)
    empty = ~allowed.any(-1, keepdim=True)
    plain = plain_attention(q, k, v, allowed=allowed | empty, bias=dense.detach()).masked_fill(empty, 0)
    assert float((out - exact).abs().max().detach()) <= budget(plain, exact.detach())
    if learned:
        (truth,) = torch.autograd.grad(exact, wide, up.double())
        (found,) = torch.autograd.grad(out, slopes, up)
        # A weight of at most 1 is rounded, times |∂/∂weight| below, times a distance: independent, six deviations.
        toward = (up.double() @ v.double().repeat_interleave(2, 1).mT).abs() * allowed
        distance = (at[:, :, None] - at[:, None, :]).abs()[:, None]
        limit = 6 * torch.finfo(torch.bfloat16).eps * (toward * distance).square().sum((0, 2, 3)).sqrt()
        assert bool(((found - truth).abs() <= limit).all())


# ------------------------------------------------------------------------------------------------ what stays hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["packed", "in pieces", "odd numbers", "of each", "left and right"])
def test_nothing_leaks_between_documents(name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    assert_hidden(lambda k, v: run(q, k, v, ROWS[name]), k, v, rule(ROWS[name]), range(N))


@pytest.mark.parametrize("encodings", [[RoPE(8)], [ALiBi(4)]], ids=["rope", "alibi"])
def test_tokens_choose_it_and_hide_the_same(encodings: list) -> None:
    q, k, v = qkv(torch.bfloat16)
    for tokens in (packed(torch.tensor([0, 3, 3, 8]), N), padded(torch.tensor([[0] * 5 + [1] * 7, [1] * 9 + [0] * 3]))):
        call = {"encodings": encodings, "positions": tokens, "mask": causal(tokens)}
        assert tokens.segments is not None
        assert_hidden(
            lambda k, v, call=call: positional_attention(q, k, v, backend="varlen", **call),
            k, v, rule(tokens.segments), range(N),
        )  # fmt: skip


def test_nan_stays_in_its_query_and_its_padding() -> None:
    q, k, v = qkv(torch.float32)
    clean = run(q, k, v, ROWS["packed"])
    q[:, :, 4] = float("nan")
    assert torch.equal((run(q, k, v, ROWS["packed"]) != clean).any(-1).any(1), torch.arange(N).expand(2, N) == 4)
    q, k, v = qkv(torch.float32)
    for x in (q, k, v):
        x[:, :, 9:] = float("nan")
        x.requires_grad_()
    out = run(q, k, v, ROWS["packed"])
    assert torch.equal(out, clean)
    assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_dropout_drops_and_keeps_the_mean() -> None:
    n = 512
    q, k = torch.zeros(2, 1, 2, n, 8)
    torch.manual_seed(0)
    out = run(q, k, torch.ones(1, 2, n, 1), torch.arange(n) // 64, dropout_p=0.5)
    last = out[0, :, 63::64].flatten()  # 16 means of 64 values, each 0 or 2: of deviation 1
    assert bool((last != 1).any())
    assert abs(float(last.mean()) - 1) <= 6 / (16 * 64) ** 0.5


# ------------------------------------------------------------------------------------------------ which calls, and how


def test_the_work_is_that_of_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def count(q: Tensor, *rest: Tensor, **more: Any) -> Tensor:
        lengths.append(q.shape[-2])
        return fused(q, *rest, **more)

    fused = varlen.fused_attention
    monkeypatch.setattr(varlen, "fused_attention", count)
    run(*qkv(), ROWS["in pieces"])
    assert sorted(lengths) == [1, 1, 4, 4, 6, 6]  # in two sequences; padding costs nothing


def test_documents_in_one_piece_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []

    def watch(x: Tensor, tokens: Tensor | None) -> Tensor:
        moved.append(tokens is not None)
        return flatten(x, tokens)

    flatten = varlen._flatten
    monkeypatch.setattr(varlen, "_flatten", watch)
    for name, expected in (("packed", False), ("alone", False), ("in pieces", True), ("falling numbers", True)):
        moved.clear()
        run(*qkv(), ROWS[name])
        assert moved == [expected] * 3


def verdict(**changes: Any):
    q, k, v = changes.pop("qkv", qkv(n=256))
    call = {"mask": CAUSAL & same_segment(torch.arange(q.shape[-2]) // 50), **changes}
    (said,) = [one for one in explain(attention, q, k, v, **call) if one.backend == "varlen"]
    return said


def test_auto_takes_it_where_a_mask_would_be_large() -> None:
    assert verdict().chosen
    assert verdict(qkv=qkv(torch.bfloat16, n=256), bias=ALiBi(4)()).chosen
    assert verdict(qkv=qkv(n=255)).reason.startswith("only by name: below 256 tokens a dense mask costs less")
    tokens = packed(torch.tensor([0, 100, 256]), 256)
    assert verdict(mask=causal(tokens)).chosen


def mask(**more: Any) -> dict[str, Any]:
    return {"qkv": qkv(n=N), **more}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (mask(mask=CAUSAL), "it takes CAUSAL & same_segment"),
        (mask(mask=FULL), "it takes CAUSAL & same_segment"),
        (mask(mask=same_segment(ROWS["packed"])), "it takes CAUSAL & same_segment"),
        (mask(mask=CAUSAL & same_segment(ROWS["packed"]) & window(3)), "it takes CAUSAL & same_segment"),
        (mask(mask=CAUSAL | same_segment(ROWS["packed"])), "it takes CAUSAL & same_segment"),
        (mask(mask=CAUSAL & same_segment(ROWS["packed"], ROWS["packed"].clone())), "with the queries' segments for the keys"),
        (mask(mask=CAUSAL & same_segment(ROWS["packed"][:-1])), r"segments of shape (11,) do not fit 2 × 12 tokens"),
        (mask(mask=CAUSAL & same_segment(ROWS["packed"].expand(3, N))), "segments of shape (3, 12) do not fit 2 × 12 tokens"),
        (mask(mask=CAUSAL & same_segment(ROWS["packed"]), bias=T5Bias(4)()), "TableBias is no term of the key alone"),
        (mask(mask=CAUSAL & same_segment(ROWS["packed"]), bias=ALiBi(4)()), "torch.float64 sums q·k and slope"),
        ({"qkv": [torch.empty(1, 1, N, 8, device="meta")] * 3, "mask": CAUSAL & same_segment(ROWS["packed"])}, "no kernel for meta"),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    said = verdict(**changes).reason
    assert said.startswith("refuses: ")
    assert reason in said
    q, k, v = changes["qkv"]
    with pytest.raises(BackendRefused, match="backend = 'varlen' refuses"):
        attention(q, k, v, **{name: value for name, value in changes.items() if name != "qkv"}, backend="varlen")


def test_segments_that_do_not_fit_are_still_an_error() -> None:
    with pytest.raises(ShapeError, match=r"same_segment: q_segments has shape \(11,\)"):
        run(*qkv(), ROWS["packed"][:-1], backend="auto")
    with pytest.raises(ShapeError, match=r"the mask has the batch \(3,\)"):
        run(*qkv(), ROWS["packed"].expand(3, N), backend="auto")


def test_a_cache_keeps_the_documents_apart() -> None:
    n = 300
    q, k, v = qkv(torch.float32, n=n, batch=1)
    tokens = packed(torch.tensor([0, 120, n]), n)
    whole = positional_attention(q, k, v, encodings=[], positions=tokens, mask=causal(tokens), backend="varlen")
    cache = GrowingCache()
    out = positional_attention(q, k, v, encodings=[], positions=tokens, cache=cache, mask=causal(tokens))
    assert torch.equal(out, whole)
    assert cache.length == n


def test_a_captured_graph_takes_another_backend() -> None:
    torch._dynamo.reset()
    q, k, v = qkv(torch.float32, n=256)
    segments = torch.arange(256) // 50
    captured = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        captured(q, k, v, segments, backend="auto"), run(q, k, v, segments), rtol=0, atol=4e-6
    )  # two sums of 256 in float32
    torch._dynamo.reset()
    with FakeTensorMode():
        fake = [torch.empty(2, 4, 256, 8) for _ in range(3)]
        segments = torch.empty(256, dtype=torch.int64)
        assert "cannot be read while a graph is captured" in verdict(qkv=fake, mask=CAUSAL & same_segment(segments)).reason
        assert run(*fake, segments, backend="auto").shape == (2, 4, 256, 8)


def test_deterministic_mode_changes_nothing() -> None:
    def results() -> list[Tensor]:
        leaves = [x.requires_grad_() for x in qkv(torch.float32)]
        out = run(*leaves, ROWS["in pieces"])
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    free = results()
    torch.use_deterministic_algorithms(True)
    try:
        bound = results()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(free, bound, strict=True))


# ------------------------------------------------------------------------------------------------ all at once, as on CUDA


def kernel(q, k, v, q_edges, k_edges, q_most, k_most, *, scale, window_size, enable_gqa):
    """What `torch.nn.attention.varlen.varlen_attn` promises, from its definition."""
    assert window_size == (-1, 0)  # its way to say causal
    assert q_edges is k_edges
    assert q_edges.dtype == torch.int32
    edges = q_edges.tolist()
    assert edges[0] == 0
    assert edges[-1] == len(q)
    assert len(edges) == len(q) + 1  # a static shape, whatever the documents
    assert enable_gqa == (q.shape[1] != k.shape[1])
    out = q.new_full((*q.shape[:-1], v.shape[-1]), float("nan"))
    for start, end in pairwise(edges):
        assert 0 <= end - start <= min(q_most, k_most)
        if end > start:
            document = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            out[start:end] = attention_oracle(*document, sees=lambda b, i, j: j <= i, scale=scale)[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("name", ROWS)
def test_all_at_once_is_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(v_dim=3)
    exact = attention_oracle(q, k, v, sees=rule(ROWS[name]))
    monkeypatch.setattr(varlen, "_one_by_one", varlen._at_once)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=kernel))
    torch.testing.assert_close(run(q, k, v, ROWS[name]), exact, rtol=0, atol=1e-13)  # 60 roundings near 4


def test_all_at_once_reads_no_value() -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    with FakeTensorMode():
        q, k, v = (torch.empty(2 * N, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
        segments = torch.empty(2, N, dtype=torch.int64)
        call = make_request(
            *qkv(torch.bfloat16), mask=CAUSAL, bias=None, positions=None, k_positions=None, scale=None, dropout_p=0.0
        )  # fmt: skip
        assert varlen._at_once(q, k, v, segments, call).shape == (2 * N, 4, 8)


@pytest.mark.cuda
@pytest.mark.parametrize("bias", [None, ALiBi(4)()], ids=["no bias", "alibi"])
@pytest.mark.parametrize("name", ROWS)
def test_on_cuda(name: str, bias: ScoreBias | None) -> None:
    q, k, v = (x.cuda().requires_grad_() for x in qkv(torch.bfloat16, dim=16, v_dim=16))
    out = run(q, k, v, ROWS[name].cuda(), bias=bias)
    exact = run(*(x.detach().cpu().double() for x in (q, k, v)), ROWS[name], bias=bias, backend="reference")
    assert float((out.cpu() - exact).abs().max()) <= 8 * torch.finfo(torch.bfloat16).eps * float(exact.abs().max())
    assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(out.sum(), (q, k, v)))
