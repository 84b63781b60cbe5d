"""Factors on queries: worked values of what ships, and the encoding that multiplies."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from math import floor, log, nan

import pytest
import torch

from posenc import CAUSAL, RoPE, ShapeError, packed, positional_attention
from posenc.core.temperature import LogN, LogRatio, LogTemperature, Temperature
from posenc.encodings.temperature import LogitTemperature
from posenc.testing import conform

F64 = torch.float64
RULES = {
    "llama 4": (LogTemperature(0.1, 8192, shift=1), lambda p: 1 + 0.1 * log(1 + floor((p + 1) / 8192))),
    "ministral": (LogTemperature(0.1, 16_384), lambda p: 1 + 0.1 * log(1 + max(0, floor(p / 16_384)))),
    "inkling": (LogRatio(0.1, 50), lambda p: 1 + 0.1 * log(max(1.0, (p + 1) / 50))),
    "log n": (LogN(32), lambda p: log(p + 1) / log(32) if p + 1 > 32 else 1.0),
}


def oracle_of(rule):
    def oracle(encoding, q, k, positions, k_positions):
        factors = torch.tensor([rule(p) for p in positions.tolist()], dtype=F64)
        return q * factors[:, None], k.clone()

    return oracle


@pytest.mark.parametrize("name", RULES)
def test_conforms(name):
    factor, rule = RULES[name]
    conform(
        lambda shape: LogitTemperature(factor),
        oracle_of(rule),
        claims=LogitTemperature.spec.claims,
        skip=() if name == "llama 4" else {"graph capture"},
    )


def test_the_spec_builds_one_that_rests_up_to_the_trained_length():
    from posenc.testing import SHAPE

    (made,) = LogitTemperature.spec.build(SHAPE)
    factors = made.prepare(torch.tensor([0, SHAPE.max_length - 1, SHAPE.max_length]))
    assert factors[:2].tolist() == [1, 1]
    assert factors[2] > 1


@pytest.mark.parametrize(
    ("factor", "positions", "expected"),
    [
        (LogTemperature(0.1, 8192, shift=1), [8190, 8191, 16_383, 131_071], [1, 1.06931471806, 1.10986122887, 1.28332133441]),
        (LogTemperature(0.1, 16_384), [16_383, 16_384, 262_143], [1, 1.06931471806, 1.27725887222]),
        (LogN(2048), [0, 2047, 8191], [1, 1, 1.18181818182]),
        (LogRatio(0.1, 128_000), [0, 127_999, 255_999], [1, 1, 1.06931471806]),
    ],
)
def test_worked_values(factor, positions, expected):
    assert factor(torch.tensor(positions)).tolist() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("length", [2, 3, 1000, 2048, 32_768])
def test_the_trained_range_is_left_as_it_is(length):
    assert LogN(length)(torch.arange(length)).eq(1).all()
    assert LogRatio(0.1, length)(torch.arange(length)).eq(1).all()
    assert LogTemperature(0.1, length)(torch.arange(length)).eq(1).all()
    assert LogTemperature(0.1, length, shift=1)(torch.arange(length - 1)).eq(1).all()


@pytest.mark.parametrize("name", RULES)
def test_factors_are_finite_and_never_fall(name):
    factor, _ = RULES[name]
    factors = factor(torch.arange(-5, 100_000, 7))
    assert factors.dtype == F64
    assert bool(factors.isfinite().all())
    assert bool((factors.diff() >= 0).all())
    assert factors[0] == 1
    assert factors[-1] > 1


def test_far_positions_are_counted_exactly():
    # 2²⁴ + 1 is no float32: a step there would come one token late
    step = 2**24 + 1
    assert LogTemperature(1.0, step)(torch.tensor([step - 1, step])).tolist() == pytest.approx([1, 1 + log(2)])


def test_values_are_values():
    assert LogN(8) == LogN(8)
    assert {LogRatio(0.1, 8): 1}[LogRatio(0.1, 8)] == 1
    assert all(isinstance(factor, Temperature) for factor, _ in RULES.values())
    with pytest.raises(FrozenInstanceError):
        LogN(8).length = 9
    assert str(LogTemperature(0.1, 8192, shift=1)) == "queries × (1 + 0.1·ln(1 + ⌊(position + 1)/8192⌋))"
    assert str(LogTemperature(0.1, 8192)) == "queries × (1 + 0.1·ln(1 + ⌊position/8192⌋))"
    assert str(LogRatio(0.1, 9)) == "queries × (1 + 0.1·ln(max(1, (position + 1)/9)))"
    assert str(LogN(9)) == "queries × max(1, ln(position + 1)/ln(9))"


def test_scores_are_multiplied_once_beside_rotation():
    factor, rope = LogN(2), RoPE(8)
    q, k, v, at = *torch.randn(3, 2, 4, 5, 8, dtype=F64).unbind(), torch.arange(5) + 7
    for order in ([rope, LogitTemperature(factor)], [LogitTemperature(factor), rope]):
        result = positional_attention(q, k, v, encodings=order, positions=at, mask=CAUSAL, backend="reference")
        turned_q, turned_k = rope(q, k, at)
        scores = turned_q @ turned_k.mT / 8**0.5 * ((at + 1).double().log() / log(2))[:, None]
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
        expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        # sums of 8 products, turned and multiplied: 8 + 4 roundings of logits of up to 3.6 |q||k|
        reach = 3.6 * (q.norm(dim=-1).max() * k.norm(dim=-1).max()).item() * v.abs().max().item()
        torch.testing.assert_close(result, expected, rtol=0.0, atol=12 * 2**-53 * reach)


def test_packed_documents_start_over():
    tokens = packed(torch.tensor([0, 3, 6]), 6)
    factors = LogitTemperature(LogN(2)).prepare(tokens.positions)
    assert torch.equal(factors[:3], factors[3:])
    assert factors[2] > 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LogTemperature(0.1, 0), ValueError, "LogTemperature: floor = 0. Expected an integer of 1 or more"),
        (lambda: LogTemperature(0.1, 8.5), TypeError, "LogTemperature: floor = 8.5"),
        (lambda: LogTemperature(0.1, 8, shift=0.5), TypeError, "LogTemperature: shift = 0.5"),
        (lambda: LogTemperature("0.1", 8), TypeError, "LogTemperature: strength = '0.1'. Expected a number"),
        (lambda: LogRatio(nan, 8), ValueError, "LogRatio: strength = nan. Expected a finite number"),
        (lambda: LogRatio(0.1, -1), ValueError, "LogRatio: floor = -1"),
        (lambda: LogN(1), ValueError, "LogN: length = 1. Expected an integer of 2 or more"),
        (lambda: LogN(True), TypeError, "LogN: length = True"),
        (lambda: LogitTemperature(1.5), TypeError, "LogitTemperature: factor = 1.5. Expected a function of positions"),
        (lambda: LogitTemperature(LogN), TypeError, "LogitTemperature: factor = <class"),
    ],
)
def test_impossible_settings_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_impossible_inputs_are_refused():
    encoding, x = LogitTemperature(LogN(8)), torch.zeros(1, 2, 4, 8)
    with pytest.raises(TypeError, match="LogitTemperature: .*half precision"):
        encoding(x, x, torch.arange(4).bfloat16())
    with pytest.raises(ShapeError, match="LogitTemperature: positions have shape"):
        encoding(x, x, torch.arange(3))
    with pytest.raises(ShapeError, match="LogitTemperature: factors of .* positions of exactly these tokens"):
        encoding.transform(x, x, encoding.prepare(torch.arange(3)))
