"""Half precision and autocast round queries, keys and values, never positions, tables and biases."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from posenc import (
    CAUSAL,
    ALiBi,
    DenseBias,
    Encoding,
    FormulaBias,
    Learned,
    NoPE,
    Randomized,
    RoPE,
    ScoreBias,
    Sinusoidal,
    SlopeBias,
    T5Bias,
    Transformer,
    attention,
    contiguous,
    materialize,
    positional_attention,
)

from .oracle import attention_oracle

BACKENDS = ("reference", "sdpa", "blockwise")
HEADS, DIM, FAR = 4, 8, 5000
"""bfloat16 holds every 32nd integer near 5000."""

MODELS: dict[str, list[Encoding]] = {
    "nope": [NoPE()],
    "sinusoidal": [Sinusoidal(32)],
    "learned": [Learned(FAR + 40, 32)],
    "rope": [RoPE(DIM)],
    "alibi": [ALiBi(HEADS)],
    "t5": [T5Bias(HEADS)],
    "randomized": [Randomized(FAR + 40), RoPE(DIM)],
}


def distance_times(q: Tensor, k: Tensor, head: Tensor, slope: Tensor) -> Tensor:
    return -slope[head] * (q - k).to(slope.dtype)


def far_biases() -> dict[str, ScoreBias]:
    """``-distance / 2`` in three ways: between neighbours near 1000 bfloat16 sees no difference."""
    half = torch.full((1,), 0.5)
    distance = torch.arange(1000, 1006) - torch.arange(4)[:, None]
    return {
        "slope": SlopeBias(half, -half),
        "formula": FormulaBias(distance_times, (half,), torch.arange(1)),
        "dense": DenseBias(-0.5 * distance.T[None].float()),
    }


@pytest.mark.parametrize("name", list(far_biases()))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_biases_keep_their_width(autocast: bool, backend: str, name: str) -> None:
    q, k = torch.zeros(1, 1, 6, DIM), torch.zeros(1, 1, 4, DIM)
    v = torch.tensor([0.0, 1.0, 2.0, 4.0]).reshape(1, 1, 4, 1)
    bias, at = far_biases()[name], {"positions": torch.arange(1000, 1006), "k_positions": torch.arange(4)}
    exact = attention_oracle(
        q, k, v, sees=lambda b, i, j: True, bias=materialize(bias, *at.values(), dtype=torch.float64)[None]
    )
    if not autocast:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attention(q, k, v, bias=bias, backend=backend, **at)
    assert out.dtype == torch.bfloat16
    rounding = 4 * torch.finfo(torch.bfloat16).eps * float(exact.abs().max())  # of the weights, and of the result
    assert float((out - exact).abs().max()) <= rounding
    rounded = DenseBias(materialize(bias, *at.values()).bfloat16())
    assert float((attention(q, k, v, bias=rounded, backend=backend) - exact).abs().max()) > 2 * rounding


@pytest.mark.parametrize("backend", BACKENDS)
def test_far_phases_keep_their_width(backend: str) -> None:
    """Rotated by tables at position 5000 and at 0, bfloat16 queries and keys give the same scores."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, 6, DIM) for _ in range(3))

    def run(start: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return positional_attention(q, k, v, encodings=[RoPE(DIM)], positions=start, mask=CAUSAL, backend=backend)

    exact = positional_attention(q, k, v, encodings=[RoPE(DIM)], positions=0, mask=CAUSAL, backend="reference")
    near, far = (float((run(start) - exact).abs().max()) for start in (0, FAR))
    assert near > 0
    assert far <= 2 * near


@pytest.mark.parametrize("name", list(MODELS))
@torch.no_grad()
def test_autocast_stays_near_float32_far_out(name: str) -> None:
    """Twice what autocast costs a model of the same weights without positions."""
    ids = torch.arange(24).reshape(1, 24) % 7

    def cost(encodings: list[Encoding]) -> float:
        torch.manual_seed(0)
        model = Transformer(7, dim=32, layers=2, heads=HEADS, kv_heads=2, encodings=encodings).eval()
        wide = model(ids, FAR)
        with torch.autocast("cpu", torch.bfloat16):
            return float((model(ids, FAR) - wide).abs().max())

    assert 0 < cost(MODELS[name]) <= 2 * cost([NoPE()])


@pytest.mark.parametrize("name", ["sinusoidal", "rope", "alibi"])
def test_casting_a_model_leaves_its_tables_alone(name: str) -> None:
    (encoding,) = copy.deepcopy(MODELS[name])
    model = Transformer(7, dim=32, layers=1, heads=HEADS, encodings=[encoding])
    at = contiguous(9, FAR).positions

    def tables() -> tuple[Tensor, ...]:
        if isinstance(encoding, Sinusoidal):
            return (encoding.table(at),)
        return encoding().tensors() if isinstance(encoding, ALiBi) else encoding.prepare(at)[0]

    before = tables()
    for dtype in (torch.bfloat16, torch.float16):
        model.to(dtype)
        assert next(model.parameters()).dtype == dtype
        for a, b in zip(before, tables(), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", list(MODELS))
@torch.no_grad()
def test_a_bfloat16_model_stays_near_its_own_weights_in_float32(name: str) -> None:
    """Twice what the cast costs a model without positions."""
    ids = torch.arange(24).reshape(1, 24) % 7

    def cost(encodings: list[Encoding]) -> float:
        torch.manual_seed(0)
        model = Transformer(7, dim=32, layers=2, heads=HEADS, kv_heads=2, encodings=copy.deepcopy(encodings)).eval()
        narrow = model.to(torch.bfloat16)(ids, FAR)
        assert narrow.dtype == torch.bfloat16
        return float((narrow - model.float()(ids, FAR)).abs().max())

    assert 0 < cost(MODELS[name]) <= 2 * cost([NoPE()])


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_leaves_float64_alone(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, 5, DIM, dtype=torch.float64) for _ in range(3))
    chosen = [RoPE(DIM), ALiBi(HEADS)]
    plain = positional_attention(q, k, v, encodings=chosen, positions=0, mask=CAUSAL, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(positional_attention(q, k, v, encodings=chosen, positions=0, mask=CAUSAL, backend=backend), plain)
