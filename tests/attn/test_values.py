"""Attention against the definition: every mask, bias, backend, dtype and grouping, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from posenc import (
    CAUSAL,
    FULL,
    DenseBias,
    FormulaBias,
    KeyBias,
    Mask,
    QueryTableBias,
    ScoreBias,
    SlopeBias,
    TableBias,
    attention,
    same_segment,
    visible,
    window,
)

from .oracle import BiasAt, Sees, attention_oracle, budget, dense_bias, plain_attention

BATCH, HEADS, DIM, V_DIM = 2, 4, 8, 6
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("reference", "sdpa", "blockwise")


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers that every dtype holds exactly, so that one oracle serves all of them."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    return (values * 32).round() / 32


Q_SEGMENTS = torch.tensor([[0, 0, 1, 1, -1], [3, 3, 3, -1, 3]])
K_SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, -1], [3, 3, 3, 3, -1, 3, 3]])
Q_ORDER, K_ORDER = torch.tensor([3, 1, 0, 5, 2]), torch.tensor([6, 5, 4, 3, 2, 1, 7])
ROW_ORDER = torch.tensor([[3, 1, 0, 5, 2], [9, 8, 7, 6, 5]])


def lag(q: int, k: int, i: int, j: int) -> int:
    return i + (k - q) - j


def masks(q: int, k: int) -> dict[str, tuple[Mask, Sees]]:
    every: dict[str, tuple[Mask, Sees]] = {
        "full": (FULL, lambda b, i, j: True),
        "causal": (CAUSAL, lambda b, i, j: lag(q, k, i, j) >= 0),
        "window": (window(3), lambda b, i, j: lag(q, k, i, j) < 3 and lag(q, k, i, j) >= 0),
        "window after": (window(2, 1), lambda b, i, j: -1 <= lag(q, k, i, j) < 2),
        "causal & window": (CAUSAL & window(2, 2), lambda b, i, j: 0 <= lag(q, k, i, j) < 2),
        "causal | window": (CAUSAL | window(1, 2), lambda b, i, j: lag(q, k, i, j) >= -2),
    }
    if (q, k) == (5, 7):
        every |= {
            "segments": (
                same_segment(Q_SEGMENTS, K_SEGMENTS),
                lambda b, i, j: bool(Q_SEGMENTS[b, i] == K_SEGMENTS[b, j] != -1),
            ),
            "causal & segments": (
                CAUSAL & same_segment(Q_SEGMENTS, K_SEGMENTS),
                lambda b, i, j: lag(q, k, i, j) >= 0 and bool(Q_SEGMENTS[b, i] == K_SEGMENTS[b, j] != -1),
            ),
            "visible": (visible(Q_ORDER, K_ORDER), lambda b, i, j: bool(K_ORDER[j] <= Q_ORDER[i])),
            "visible by row": (
                visible(ROW_ORDER, K_ORDER, window=2),
                lambda b, i, j: bool(0 <= ROW_ORDER[b, i] - K_ORDER[j] < 2),
            ),
        }
    return every


def repulsion(q: Tensor, k: Tensor, head: Tensor, slope: Tensor) -> Tensor:
    """A formula that is not of the distance alone."""
    return slope[head] * (q - k).abs() / (q + k + 1)


class Bias(NamedTuple):
    """A bias value, the definition of each entry, and the shape of the parameter that both are made of."""

    shape: tuple[int, ...]
    value: Callable[[Tensor], ScoreBias]
    entry: Callable[[Tensor, Tensor, Tensor], BiasAt]


def clamped(distance: Tensor, low: int, high: int) -> int:
    return max(low, min(high, int(distance)))


def by_row(t: Tensor, b: int) -> Tensor:
    return t[b] if t.ndim > 1 else t


def biases(q: int, k: int) -> dict[str, Bias]:
    def distance(qp: Tensor, kp: Tensor, b: int, i: int, j: int) -> Tensor:
        return by_row(qp, b)[i] - by_row(kp, b)[j]

    slope = Bias(
        (2, HEADS),
        lambda w: SlopeBias(w[0], w[1]),
        lambda w, qp, kp: (
            lambda b, h, i, j: (-w[0, h] if distance(qp, kp, b, i, j) >= 0 else w[1, h]) * distance(qp, kp, b, i, j)
        ),
    )
    table = Bias(
        (HEADS, 6),
        lambda w: TableBias(w, (2,)),
        lambda w, qp, kp: lambda b, h, i, j: w[h, clamped(distance(qp, kp, b, i, j), -2, 3) + 2],
    )
    return {
        "slope": slope,
        "formula": Bias(
            (HEADS,),
            lambda w: FormulaBias(repulsion, (w,), torch.arange(HEADS)),
            lambda w, qp, kp: (
                lambda b, h, i, j: w[h] * abs(distance(qp, kp, b, i, j)) / (by_row(qp, b)[i] + by_row(kp, b)[j] + 1)
            ),
        ),
        "table": table,
        "table of one head": Bias(
            (1, 6),
            lambda w: TableBias(w, (2,)),
            lambda w, qp, kp: lambda b, h, i, j: w[0, clamped(distance(qp, kp, b, i, j), -2, 3) + 2],
        ),
        "key": Bias((BATCH, HEADS, k), KeyBias, lambda w, qp, kp: lambda b, h, i, j: w[b, h, j]),
        "key, no batch": Bias((HEADS, k), KeyBias, lambda w, qp, kp: lambda b, h, i, j: w[h, j]),
        "query table": Bias(
            (BATCH, HEADS, q, 5),
            lambda w: QueryTableBias(w, 1),
            lambda w, qp, kp: lambda b, h, i, j: w[b, h, i, clamped(distance(qp, kp, b, i, j), -1, 3) + 1],
        ),
        "dense": Bias((BATCH, HEADS, q, k), DenseBias, lambda w, qp, kp: lambda b, h, i, j: w[b, h, i, j]),
        "dense, no batch": Bias((HEADS, q, k), DenseBias, lambda w, qp, kp: lambda b, h, i, j: w[h, i, j]),
        "sum": Bias(
            (BATCH, HEADS, k),
            lambda w: TableBias(w[0, :, :6], (2,)) + KeyBias(w) + SlopeBias(w[1, :, 0], w[1, :, 1]),
            lambda w, qp, kp: (
                lambda b, h, i, j: (
                    table.entry(w[0, :, :6], qp, kp)(b, h, i, j)
                    + w[b, h, j]
                    + slope.entry(torch.stack([w[1, :, 0], w[1, :, 1]]), qp, kp)(b, h, i, j)
                )
            ),
        ),
    }


def positions_for(bias: str, q: int, k: int) -> tuple[Tensor, Tensor]:
    """Repeated, backward and, for some, different from row to row: masks must not care."""
    q_at, k_at = torch.tensor([4, 4, 1, 7, 2, 0, 3])[:q], torch.tensor([0, 3, 3, 2, 9, 1, 4])[:k]
    return (torch.stack([q_at, q_at.flip(0)]), k_at) if bias in ("slope", "query table", "sum") else (q_at, k_at)


Call = Callable[[dict[str, Tensor]], Tensor]


def run(call: Call, inputs: dict[str, Tensor], upstream: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The result and the gradient of every input. Biases stay wide, as a float32 table in a bfloat16 model does."""
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {name: t.detach().to(dtype if name in "qkv" else wide, copy=True).requires_grad_() for name, t in inputs.items()}
    out = call(leaves)
    out.backward(upstream.to(out.dtype))
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def check(
    q: int, k: int, kv_heads: int, mask_name: str, bias_name: str | None, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> None:
    mask, sees = masks(q, k)[mask_name]
    allowed = torch.tensor([[[sees(b, i, j) for j in range(k)] for i in range(q)] for b in range(BATCH)])[:, None]
    unseeing = ~allowed.any(-1).expand(BATCH, HEADS, q)
    qkv = {
        "q": draw(BATCH, HEADS, q, DIM), "k": draw(BATCH, kv_heads, k, DIM, seed=1), "v": draw(BATCH, kv_heads, k, V_DIM, seed=2),
    }  # fmt: skip
    upstream = draw(BATCH, HEADS, q, V_DIM, seed=4)
    written, given, at = dict(qkv), dict(qkv), {}
    if bias_name is not None:
        bias = biases(q, k)[bias_name]
        parameter = draw(*bias.shape, seed=3).requires_grad_()
        q_at, k_at = positions_for(bias_name, q, k)
        dense = dense_bias(bias.entry(parameter, q_at, k_at), BATCH, HEADS, q, k)
        written["dense"], given["parameter"], at = dense, parameter, {"positions": q_at, "k_positions": k_at}

    def with_parameter(results: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradient of the written-out bias carried on, in float64, to the parameter that it was made of."""
        if "dense" in results:
            upstream = results["dense"]
            (carried,) = torch.autograd.grad(dense, parameter, upstream.double(), retain_graph=True)
            results["parameter"] = carried.to(upstream.dtype)
        return results

    truth = with_parameter(
        run(
            lambda x: attention_oracle(x["q"], x["k"], x["v"], sees=sees, bias=x.get("dense")), written, upstream, torch.float64
        )
    )
    for dtype in dtypes:
        plain = with_parameter(
            run(
                lambda x: plain_attention(x["q"], x["k"], x["v"], allowed=allowed, bias=x.get("dense")),
                written,
                upstream,
                dtype,
            )
        )
        for backend in BACKENDS:

            def ours(x: dict[str, Tensor], backend: str = backend) -> Tensor:
                value = bias.value(x["parameter"]) if "parameter" in x else None
                return attention(x["q"], x["k"], x["v"], mask=mask, bias=value, backend=backend, **at)

            got = run(ours, given, upstream, dtype)
            assert got["out"].dtype == dtype
            for name in got:
                error, most = float((got[name].double() - truth[name]).abs().max()), budget(plain[name], truth[name])
                assert error <= most, f"{name}, {dtype}, {backend}: {error} above {most}"
            assert not got["out"][unseeing].any()
            assert not got["q"][unseeing].any()


@pytest.mark.parametrize("bias", [None, *biases(5, 7)])
@pytest.mark.parametrize("mask", [name for name in masks(5, 7) if name not in ("window", "window after", "causal | window")])
def test_every_mask_and_bias_follows_the_definition(mask: str, bias: str | None) -> None:
    """Windows alone and ``|`` are in the test of lengths; here they would say nothing new."""
    check(5, 7, 2, mask, bias, (torch.float32, torch.bfloat16))


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("bias", [None, *biases(5, 7)])
def test_every_grouping_follows_the_definition(bias: str | None, kv_heads: int) -> None:
    check(5, 7, kv_heads, "causal & segments", bias)


@pytest.mark.parametrize(("q", "k"), [(1, 7), (7, 7), (7, 4), (1, 1)])
@pytest.mark.parametrize("mask", list(masks(7, 7)))
def test_every_length_follows_the_definition(q: int, k: int, mask: str) -> None:
    check(q, k, 2, mask, None)
    check(q, k, 2, mask, "slope", (torch.float32,))
