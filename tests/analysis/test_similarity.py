"""Shift matrices and similarity of sinusoids, against sums written out."""

from __future__ import annotations

from math import cos, sin

import pytest
import torch

from posenc import ShapeError, Sinusoidal
from posenc.analysis import shift_matrix, similarity_kernel, similarity_matrix

U = 2**-53  # unit roundoff of float64
LAYOUTS = ["interleaved", "concatenated"]
RULES = ["paper", "tensor2tensor"]


def code(position, omegas, layout):
    if layout == "interleaved":
        return [wave(position * w) for w in omegas for wave in (sin, cos)]
    return [sin(position * w) for w in omegas] + [cos(position * w) for w in omegas]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shift", [0, 1, 3, -7, 0.25, 1000])
def test_shifting_moves_every_code(layout, rule, shift):
    omegas = Sinusoidal(8, layout=layout, frequency_rule=rule).inv_freq()
    matrix = shift_matrix(shift, omegas, layout=layout)
    for position in (0, 1, 17, 500):
        before, after = (
            torch.tensor(code(p, omegas.tolist(), layout), dtype=torch.float64) for p in (position, position + shift)
        )
        # each angle is rounded once (≤ 1500 · U on either side), each of two products and their sum once more
        torch.testing.assert_close(matrix @ before, after, rtol=0, atol=(2 * 1500 + 8) * U)


def test_the_block_of_frequency_1():
    block = shift_matrix(3, torch.tensor([1.0], dtype=torch.float64), layout="interleaved")
    expected = [[-0.9899924966, 0.1411200081], [-0.1411200081, -0.9899924966]]
    torch.testing.assert_close(block.tolist(), expected, rtol=0, atol=5e-11)  # half of the last digit given


def test_the_concatenated_layout_has_no_neighbouring_blocks():
    omegas = Sinusoidal(8).inv_freq()
    matrix = shift_matrix(3, omegas, layout="concatenated")
    assert matrix[0, 4] == sin(3.0)
    assert matrix[0, 1] == 0
    assert not torch.equal(matrix, shift_matrix(3, omegas, layout="interleaved"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shifts_are_a_group_of_rotations(layout):
    omegas = Sinusoidal(16).inv_freq()
    a, b, both, back = (shift_matrix(k, omegas, layout=layout) for k in (5, 12, 17, -5))
    torch.testing.assert_close(a @ b, both, rtol=0, atol=(2 * 17 + 4) * U)  # angles up to 17, as above
    assert torch.equal(a.T, back)
    torch.testing.assert_close(a @ a.T, torch.eye(16, dtype=torch.float64), rtol=0, atol=4 * U)  # cos² + sin², 4 roundings
    torch.testing.assert_close(torch.linalg.det(a).item(), 1.0, rtol=0, atol=16**2 * U)  # 16 pivots, each of ≤ 16 steps


KERNEL = {
    64: {0: 32, 1: 30.9168316616, 2: 28.3038620041, 10: 21.0516288246, 100: 17.8746687851, 1000: 8.92596674992},
    512: {0: 256, 1: 249.102097827, 2: 231.73362039, 10: 173.789724924, 100: 111.950208649, 1000: 44.9716048445},
}


@pytest.mark.parametrize("dim", KERNEL)
def test_kernel_of_the_original_transformer(dim):
    found = similarity_kernel(torch.tensor(list(KERNEL[dim])), Sinusoidal(dim).inv_freq())
    torch.testing.assert_close(found.tolist(), [float(v) for v in KERNEL[dim].values()], rtol=1e-11, atol=0)  # digits given


@pytest.mark.parametrize(("dim", "first"), [(64, 6), (512, 44)])
def test_kernel_does_not_fall_steadily(dim, first):
    kernel = similarity_kernel(torch.arange(100), Sinusoidal(dim).inv_freq())
    rises = (kernel[1:] > kernel[:-1]).nonzero().flatten() + 1
    assert rises[0] == first


def test_kernel_reads_the_lag_alone_and_both_ways():
    codes = Sinusoidal(32).table(torch.arange(40), dtype=torch.float64)
    products = similarity_matrix(codes)
    kernel = similarity_kernel(torch.arange(-39, 40), Sinusoidal(32).inv_freq())
    assert torch.equal(kernel, kernel.flip(0))
    for lag in range(-39, 40):
        diagonal = products.diagonal(lag)
        # 32 products of entries ≤ 1, each entry's angle rounded at ≤ 39: 32 · (2 · 39 + 2) roundings at most
        torch.testing.assert_close(diagonal, kernel[lag + 39].expand_as(diagonal), rtol=0, atol=32 * 80 * U)


def test_similarity_of_any_table():
    codes = torch.tensor([[[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]]], requires_grad=True)
    assert similarity_matrix(codes).tolist() == [[[25.0, 8.0, 0.0], [8.0, 4.0, 0.0], [0.0, 0.0, 0.0]]]
    cosines = torch.tensor([[[1, 0.8, 0], [0.8, 1, 0], [0, 0, 0]]], dtype=torch.float64)
    # two quotients and a sum of two products
    torch.testing.assert_close(similarity_matrix(codes, measure="cosine"), cosines, rtol=0, atol=6 * U)


LADDER = torch.ones(2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: shift_matrix(1, LADDER, layout="half"),
            ValueError,
            "shift_matrix: layout = 'half'. Expected 'interleaved' or",
        ),
        (lambda: shift_matrix(1, LADDER[None], layout="interleaved"), ShapeError, "inv_freq of shape (1, 2). Expected [pairs]"),
        (lambda: shift_matrix(1, torch.arange(2), layout="interleaved"), TypeError, "inv_freq is torch.int64. Expected"),
        (lambda: shift_matrix(1, [1.0], layout="interleaved"), TypeError, "shift_matrix: inv_freq is list. Expected"),
        (
            lambda: similarity_kernel(torch.arange(2), LADDER * float("nan")),
            ValueError,
            "similarity_kernel: inv_freq holds nan.",
        ),
        (lambda: similarity_kernel(torch.ones(2).half(), LADDER), TypeError, "positions are torch.float16. Expected integers"),
        (
            lambda: similarity_matrix(torch.ones(3)),
            ShapeError,
            "similarity_matrix: codes are (3,). Expected [*batch, positions",
        ),
        (lambda: similarity_matrix(torch.ones(0, 3)), ShapeError, "similarity_matrix: codes are (0, 3). Expected"),
        (lambda: similarity_matrix(torch.ones(2, 3), measure="l2"), ValueError, "measure = 'l2'. Expected 'dot' or 'cosine'."),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
