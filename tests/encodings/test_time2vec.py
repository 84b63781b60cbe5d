"""Learned waves and a line."""

from __future__ import annotations

from math import log, pi, sin

import pytest
import torch

from posenc import ShapeError, grid, seconds
from posenc.encodings.time2vec import Time2Vec
from posenc.testing import SHAPE, conform

F64 = torch.float64


def oracle(encoding, x, positions):
    """Kazemi et al. 2019, eq. 1."""
    out = x.double().clone()
    weight, bias = encoding.weight.detach().double().tolist(), encoding.bias.detach().double().tolist()
    for token, place in enumerate(positions.tolist()):
        place = place if encoding.axes else [place]
        for i, (omega, phi) in enumerate(zip(weight, bias, strict=True)):
            angle = sum(w * t for w, t in zip(omega, place, strict=True)) + phi
            out[token, i] += angle if i == 0 else sin(angle)
    return out


@pytest.mark.parametrize("axes", [None, 2])
def test_conforms(axes):
    conform(
        lambda shape: Time2Vec(shape.dim, 64.0, axes=axes),
        oracle,
        claims=Time2Vec.spec.claims,
        other=lambda shape: Time2Vec(shape.dim, 9.0, step=2, axes=axes),
        skip={"graph capture"} if axes else (),
    )


def test_the_spec_builds_one_for_the_trained_length():
    (made,) = Time2Vec.spec.build(SHAPE)
    assert (made.dim, made.length, made.step) == (SHAPE.dim, SHAPE.max_length, 1)


def test_first_values_are_those_that_the_class_states():
    encoding = Time2Vec(10_000, 30.0, step=0.02, dtype=F64)
    weight, bias = encoding.weight.detach()[:, 0], encoding.bias.detach()
    assert weight[0].abs() <= 1 / 30
    assert bias[0] == 0
    size = weight[1:].abs()
    assert 1 / 30 * (1 - 1e-12) <= size.min() <= size.max() <= 50 * (1 + 1e-12)
    # log-uniform: the mean of n uniform shares strays by 1/√(12n), signs by 1/√n; five of those
    shares = (size.log() + log(30)) / log(30 / 0.02)
    assert abs(shares.mean().item() - 0.5) < 5 / (12 * 9999) ** 0.5
    assert abs(weight[1:].sign().mean().item()) < 5 / 9999**0.5
    assert 0 <= bias.min() <= bias.max() <= 2 * pi
    assert abs(bias[1:].mean().item() / (2 * pi) - 0.5) < 5 / (12 * 9999) ** 0.5


def test_parameters_can_be_drawn_again_and_repeatedly():
    encoding = Time2Vec(8, 64.0)
    before = encoding.weight.detach().clone()
    for _ in range(2):
        encoding.reset_parameters(torch.Generator().manual_seed(1))
    again = encoding.weight.detach().clone()
    encoding.reset_parameters(torch.Generator().manual_seed(1))
    assert torch.equal(encoding.weight, again)
    assert not torch.equal(again, before)


def test_the_first_channel_is_a_line_and_the_others_stay_within_one():
    encoding, at = Time2Vec(8, 64.0, dtype=F64), torch.arange(0, 6400, 7)
    code = encoding.table(at, dtype=F64).detach()
    # second differences of numbers up to 100, each rounded a few times
    assert code[:, 0].diff(n=2).abs().max() <= 8 * 100 * 2**-53
    assert code[:, 1:].abs().max() <= 1
    assert code[0, 0] == 0


def test_the_same_instant_has_the_same_code():
    encoding = Time2Vec(8, 30.0, step=0.01)
    slow, fast = seconds(151, 80, 8_000).positions[150:], seconds(301, 80, 16_000).positions[300:]
    torch.testing.assert_close(encoding.table(slow), encoding.table(fast), rtol=0.0, atol=2**-23)


def test_axes_add_up_inside_a_wave():
    encoding, at = Time2Vec(6, 20.0, axes=2, dtype=F64), grid(3, 4).positions
    x = torch.zeros(12, 6, dtype=F64)
    # angles of at most 7 + 2π, rounded five times
    torch.testing.assert_close(encoding(x, at), oracle(encoding, x, at), rtol=0.0, atol=8 * 14 * 2**-53)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_are_refused(dtype):
    encoding = Time2Vec(4, 8.0).to(dtype)
    with pytest.raises(TypeError, match=f"Time2Vec: parameters are {dtype}. Expected float32 or float64"):
        encoding(torch.zeros(2, 4), 0)
    assert Time2Vec(4, 8.0)(torch.zeros(2, 4, dtype=dtype), 0).dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "rest", "error", "message"),
    [
        ((0, 8.0), {}, ValueError, "dim = 0"),
        ((4, 0.0), {}, ValueError, "length = 0.0, step = 1.0. Expected a step above 0"),
        ((4, 8.0), {"step": 8.0}, ValueError, "length = 8.0, step = 8.0"),
        ((4, 8.0), {"step": 0.0}, ValueError, "step = 0.0"),
        ((4, float("inf")), {}, ValueError, "length = inf"),
        ((4, "8"), {}, TypeError, "length = '8'. Expected a number"),
        ((4, 8.0), {"axes": 0}, ValueError, "axes = 0"),
    ],
)
def test_impossible_settings_are_refused(arguments, rest, error, message):
    with pytest.raises(error, match=f"Time2Vec: .*{message}"):
        Time2Vec(*arguments, **rest)


@pytest.mark.parametrize(
    ("width", "positions", "error", "message"),
    [
        (6, 0, ShapeError, "x has width 6. Expected 4"),
        (4, torch.arange(3), ShapeError, "positions have shape"),
        (4, torch.zeros(2, dtype=torch.float16), TypeError, "half precision"),
        (4, torch.tensor([0.0, torch.inf]), ValueError, "positions hold inf"),
    ],
)
def test_impossible_inputs_are_refused(width, positions, error, message):
    with pytest.raises(error, match=f"Time2Vec: .*{message}"):
        Time2Vec(4, 8.0)(torch.zeros(2, width), positions)
