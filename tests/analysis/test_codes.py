"""Whether codes and positions stay apart."""

from __future__ import annotations

from math import cos, dist, sqrt

import pytest
import torch

from posenc import ShapeError, Sinusoidal
from posenc.analysis import code_distances, distinct_positions

U = 2**-53


@pytest.mark.parametrize(("dim", "positions", "adjacent"), [(64, 2000, 1.47184805), (512, 600, 3.71427037)])
def test_neighbours_are_the_closest_sinusoids(dim, positions, adjacent):
    found = code_distances(Sinusoidal(dim).table(torch.arange(positions), dtype=torch.float64))
    omegas = [1e4 ** (-2 * i / dim) for i in range(dim // 2)]
    expected = sqrt(sum(2 - 2 * cos(omega) for omega in omegas))
    # entries are off by angle · U ≤ positions · U each, and dim of them add up in the norm as its root
    for distance in (*found.adjacent, found.closest):
        assert abs(distance - expected) <= 2 * sqrt(dim) * positions * U + dim * U * expected
        assert abs(distance - adjacent) <= 5e-9  # half of the last digit of the check value
    assert found.closest_pair[1] - found.closest_pair[0] == 1
    assert (found.positions, found.distinct) == (positions, positions)
    assert found.largest == 1.0


def test_distances_across_blocks_are_found():
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(600, 3, generator=generator)
    codes[570] = codes[3] + torch.tensor([1e-4, 0.0, 0.0])  # 300 rows a block would not see each other
    found = code_distances(codes)
    assert found.closest_pair == (3, 570)
    assert found.closest == pytest.approx(dist(codes[3].tolist(), codes[570].tolist()), rel=8 * U)


def test_a_repeated_row_is_not_distinct():
    found = code_distances(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [1.0, 0.0]]))
    assert (found.distinct, found.closest, found.closest_pair, found.largest) == (2, 0.0, (0, 2), 2.0)
    assert found.adjacent == (3.0, 3.0)


def test_a_cast_moves_codes_together():
    """The table itself survives bfloat16; two rows 1/1024 apart do not."""
    table = Sinusoidal(64).table(torch.arange(300), dtype=torch.float64)
    assert code_distances(table, dtype=torch.bfloat16).distinct == 300
    rows = torch.tensor([[1.0], [1.0 + 2**-10]])
    assert code_distances(rows).distinct == 2
    assert code_distances(rows, dtype=torch.bfloat16).distinct == 1


@pytest.mark.parametrize(
    ("start", "dtype", "distinct"),
    [  # bfloat16 has 8 bits: the spacing is 1 below 256, 4 below 1024, 32 below 8192, 512 below 131072; ends round up
        (0, torch.bfloat16, 256),
        (768, torch.bfloat16, 65),
        (7936, torch.bfloat16, 9),
        (130_816 - 256, torch.bfloat16, 1),
        (1792, torch.float16, 256),
        (2048, torch.float16, 129),
        (2**24 - 256, torch.float32, 256),
        (2**24, torch.float32, 129),
    ],
)
def test_positions_after_a_cast(start, dtype, distinct):
    assert distinct_positions(start, 256, dtype) == distinct


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: code_distances(torch.ones(1, 3)), ShapeError, "codes of shape (1, 3). Expected [positions, dim] with two"),
        (lambda: code_distances(torch.ones(2, 2, 3)), ShapeError, "codes of shape (2, 2, 3). Expected [positions, dim]"),
        (lambda: code_distances(torch.full((2, 3), torch.inf)), ValueError, "code_distances: codes hold inf. Expected finite"),
        (lambda: distinct_positions(-1, 2, torch.float16), ValueError, "start = -1. Expected an integer of 0 or more"),
        (lambda: distinct_positions(0, 0, torch.float16), ValueError, "count = 0. Expected an integer of 1 or more"),
        (lambda: distinct_positions(0, 2, torch.int8), TypeError, "dtype = torch.int8. Expected a floating-point dtype."),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
