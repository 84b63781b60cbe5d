"""Random training positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import Randomized, packed, padded
from posenc.testing import conform, oracles


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_conforms():
    conform(Randomized, oracles.randomized, other=lambda shape: Randomized(5 * shape.max_length))


@given(st.integers(0, 20), st.integers(0, 40), st.integers(1, 3), st.integers(0, 99))
def test_draws_are_sorted_distinct_and_in_range(n, spare, rows, seed):
    drawn = Randomized(max(n + spare, 1))(torch.arange(n).expand(rows, n), seeded(seed))
    assert drawn.shape == (rows, n)
    assert drawn.dtype == torch.int64
    assert bool((drawn.diff() > 0).all())
    assert bool(((drawn >= 0) & (drawn < n + spare)).all())


def test_a_full_draw_is_no_draw():
    assert torch.equal(Randomized(7)(torch.arange(7)), torch.arange(7))


def test_evaluation_is_the_identity_and_takes_any_positions():
    transform = Randomized(4).eval()
    for positions in (torch.arange(9), torch.tensor([-2, 100]), torch.tensor([0.5])):
        assert transform(positions) is positions


def test_a_generator_decides_the_draw():
    transform, at = Randomized(1000), torch.arange(20)
    assert torch.equal(transform(at, seeded(1)), transform(at, seeded(1)))
    assert not torch.equal(transform(at, seeded(1)), transform(at, seeded(2)))


def test_rows_draw_apart_and_a_shared_row_once():
    drawn = Randomized(1000)(torch.arange(20).expand(2, 20), seeded())
    assert not torch.equal(drawn[0], drawn[1])
    assert Randomized(1000)(torch.arange(20), seeded()).shape == (20,)


def test_narrow_integers_do_not_wrap():
    at = torch.arange(200)
    drawn = Randomized(1000)(at.expand(2, 200), seeded())
    assert torch.equal(Randomized(1000)(at.to(torch.uint8).expand(2, 200), seeded()), drawn)
    assert Randomized(1000)(torch.zeros(300, dtype=torch.uint8)).shape == (300,)


def test_training_draws_are_captured():
    torch.compiler.reset()
    transform = torch.compile(Randomized(100), fullgraph=True, backend="aot_eager")
    for n in (8, 16, 24):
        drawn = transform(torch.arange(n))
        assert bool((drawn.diff() > 0).all())
        assert drawn.max() < 100


def test_every_position_is_drawn_equally_often():
    draws = torch.cat([Randomized(10)(torch.arange(5).expand(4000, 5), seeded(seed)) for seed in range(2)])
    share = draws.flatten().bincount(minlength=10) / len(draws)
    # each position is in a draw with probability 1/2: five deviations of a mean of 8,000
    assert share.sub(0.5).abs().max() < 5 * 0.5 / 8000**0.5


def test_padding_and_packing_keep_their_meaning():
    rows = padded(torch.tensor([[0, 0, 1, 1, 1]])).positions
    drawn = Randomized(100)(rows, seeded())[0]
    assert bool((drawn[2:].diff() > 0).all())
    assert drawn[0] == drawn[1] == drawn[2]
    documents = Randomized(100)(packed(torch.tensor([0, 3, 6]), 6).positions, seeded())
    assert torch.equal(documents[:3], documents[3:])


@pytest.mark.parametrize("limit", [0, -3, 2.5, True])
def test_impossible_limits_are_refused(limit):
    with pytest.raises(ValueError, match="Randomized: limit = "):
        Randomized(limit)


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (torch.arange(5), ValueError, "5 tokens with limit = 4"),
        (torch.tensor([0, 3]), ValueError, "positions from 0 to 3 for 2 tokens"),
        (torch.tensor([-1, 0]), ValueError, "positions from -1 to 0"),
        (torch.tensor([0.0, 1.0]), TypeError, "because each picks an entry of the draw"),
        (torch.zeros(2, dtype=torch.bfloat16), TypeError, "half precision"),
    ],
)
def test_impossible_inputs_are_refused(positions, error, message):
    with pytest.raises(error, match=f"Randomized: .*{message}"):
        Randomized(4)(positions)
