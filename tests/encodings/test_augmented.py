"""Augmented training positions: ranges, order, seeds, integers."""

from __future__ import annotations

from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import Learned, ShapeError, Sinusoidal, Transformer, grid, packed, padded, seconds
from posenc.encodings.augmented import Augmented
from posenc.testing import conform

F64 = torch.float64
FULL = {"shift": 5.0, "jitter": 0.5, "stretch": 1.5}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("settings", [FULL, {"shift": 7, "numbers": "integer"}], ids=["real", "integer"])
def test_conforms_in_evaluation_as_the_identity(settings):
    conform(
        lambda shape: Augmented(**settings),
        lambda encoding, positions: positions.clone(),
        claims=Augmented.spec.claims,
        skip=() if settings is FULL else {"graph capture"},
    )


def test_evaluation_is_the_identity_and_takes_any_positions():
    transform = Augmented(**FULL).eval()
    for positions in (torch.arange(9), torch.tensor([-2, 100]), torch.tensor([0.5, 0.6])):
        assert transform(positions) is positions


@given(st.floats(0, 1000), st.floats(0, 0.5), st.floats(1, 4), st.integers(0, 99), st.booleans())
def test_the_order_is_preserved(shift, jitter, stretch, seed, backwards):
    at = torch.arange(30).expand(3, 30)
    at = at.flip(-1) if backwards else at
    moved = Augmented(shift=shift, jitter=jitter, stretch=stretch)(at, seeded(seed))
    assert moved.shape == at.shape
    assert moved.dtype == F64
    assert bool((moved.diff().sign() == at.diff().sign()).all())


@given(st.integers(0, 99))
def test_each_change_stays_in_its_range(seed):
    at = torch.arange(20).expand(4, 20)
    shift = Augmented(shift=3.0)(at, seeded(seed)) - at
    # sums near 23 are rounded at 2⁻⁵³ of themselves
    assert (shift - shift[:, :1]).abs().max() <= 2 * 23 * 2**-53
    assert shift.abs().max() <= 3
    jitter = Augmented(jitter=0.25)(at, seeded(seed)) - at
    assert jitter.abs().max() <= 0.25
    assert len(jitter.unique()) > 70
    stretch = Augmented(stretch=2.0)(at, seeded(seed))[:, 1:] / at[:, 1:]
    assert (stretch - stretch[:, :1]).abs().max() <= 4 * 2 * 2**-53
    assert bool(((stretch >= 0.5) & (stretch <= 2)).all())


def test_draws_are_uniform_and_the_stretch_in_its_logarithm():
    at = torch.ones(20_000, 1)
    shift = Augmented(shift=3.0)(at, seeded()) - 1
    stretch = Augmented(stretch=2.0)(at, seeded()).log() / log(2)
    jitter = Augmented(jitter=0.5)(torch.zeros(20_000), seeded())
    for draw, reach in ((shift, 3.0), (stretch, 1.0), (jitter, 0.5)):
        # the mean of n uniform draws strays by reach/√(3n); their mean square from reach²/3 by reach²·√(4/45n); five of those
        assert abs(draw.mean().item()) < 5 * reach / (3 * 20_000) ** 0.5
        assert draw.square().mean().item() == pytest.approx(reach**2 / 3, abs=5 * reach**2 * (4 / 45 / 20_000) ** 0.5)


def test_the_formula_is_that_of_cape():
    """λ (p + Δ + ε): the stretch multiplies shift and jitter too."""
    at, same = torch.arange(6).expand(2, 6), {"shift": 5.0, "jitter": 0.25}
    plain, stretched = Augmented(**same)(at, seeded(3)), Augmented(**same, stretch=2.0)(at, seeded(3))
    ratio = stretched / plain
    assert (ratio - ratio[:, :1]).abs().max() <= 8 * 2 * 2**-53
    assert not torch.equal(ratio, torch.ones_like(ratio))


def test_a_generator_decides_and_rows_draw_apart():
    transform, at = Augmented(**FULL), torch.arange(8)
    assert torch.equal(transform(at, seeded(1)), transform(at, seeded(1)))
    assert not torch.equal(transform(at, seeded(1)), transform(at, seeded(2)))
    rows = Augmented(shift=5.0)(at.expand(2, 8), seeded())
    assert rows[0, 0] != rows[1, 0]


@given(st.integers(0, 20), st.integers(0, 99))
def test_integers_move_together_and_stay_integers(shift, seed):
    at = torch.arange(9, dtype=torch.int32).expand(50, 9)
    moved = Augmented(shift=shift, numbers="integer")(at, seeded(seed))
    assert moved.dtype == torch.int64
    steps = moved - at
    assert bool((steps == steps[:, :1]).all())
    assert bool(((steps >= 0) & (steps <= shift)).all())


def test_every_integer_shift_is_drawn_both_ends_included():
    steps = Augmented(shift=4, numbers="integer")(torch.zeros(5000, 1, dtype=torch.int64), seeded())
    share = steps.flatten().bincount(minlength=5) / 5000
    # each with probability 1/5: five deviations of a mean of 5,000
    assert len(share) == 5
    assert (share - 0.2).abs().max() < 5 * (0.2 * 0.8 / 5000) ** 0.5


def test_narrow_integers_do_not_wrap():
    at = torch.arange(200, dtype=torch.uint8)
    assert Augmented(shift=1000, numbers="integer")(at, seeded(1)).diff().eq(1).all()
    assert Augmented(jitter=0.5)(at.flip(0), seeded(1)).diff().lt(0).all()


def test_axes_move_apart_and_stretch_together():
    at = grid(3, 4).positions.expand(2, 12, 2)
    shift = Augmented(shift=5.0, axes=2)(at, seeded()) - at
    assert (shift - shift[:, :1]).abs().max() <= 2 * 8 * 2**-53
    assert shift[0, 0, 0] != shift[0, 0, 1]
    stretch = Augmented(stretch=2.0, axes=2)(at, seeded())[:, -1] / at[:, -1]
    assert (stretch[:, 0] - stretch[:, 1]).abs().max() <= 4 * 2 * 2**-53
    whole = Augmented(shift=9, numbers="integer", axes=2)(at, seeded()) - at
    assert bool((whole == whole[:, :1]).all())


def test_padding_and_packing():
    moved = Augmented(shift=9.0, jitter=0.5)(padded(torch.tensor([[0, 0, 1, 1, 1]])).positions, seeded())
    assert bool((moved[0, 2:].diff() > 0).all())
    documents = Augmented(shift=9.0)(packed(torch.tensor([0, 3, 6]), 6).positions, seeded())
    torch.testing.assert_close(documents[:3], documents[3:], rtol=0.0, atol=2 * 12 * 2**-53)


def test_seconds_have_their_own_spacing():
    frames = seconds(50, 160, 16_000).positions
    for jitter in (0.004, 0.005):
        assert bool((Augmented(jitter=jitter)(frames, seeded()).diff() > 0).all())
    with pytest.raises(ValueError, match="Augmented: jitter = 0.5 with neighbours 0.01 apart. Expected at most half"):
        Augmented(jitter=0.5)(frames)


@pytest.mark.parametrize("settings", [FULL, {"shift": 7, "numbers": "integer"}], ids=["real", "integer"])
def test_training_is_captured_for_any_length_and_batch(settings):
    torch.compiler.reset()
    transform = torch.compile(Augmented(**settings), fullgraph=True, backend="aot_eager")
    for rows, n in ((2, 8), (3, 16), (4, 24)):
        moved = transform(torch.arange(n).expand(rows, n))
        assert bool((moved.diff() > 0).all())
        assert len(moved.unique(dim=0)) > 1


def test_a_model_trains_on_moved_positions_and_rests_in_evaluation():
    ids = torch.zeros(2, 5, dtype=torch.int64)
    for encodings in (
        [Augmented(**FULL), Sinusoidal(8)],
        [Augmented(shift=7, numbers="integer"), Learned(12, 8)],
    ):
        model = Transformer(4, dim=8, layers=1, heads=2, encodings=encodings)
        moved = [model(ids, 0, generator=seeded(seed)) for seed in (1, 1, 5)]
        assert torch.equal(moved[0], moved[1])
        assert not torch.equal(moved[0], moved[2])
        still = Transformer(4, dim=8, layers=1, heads=2, encodings=encodings[1:])
        still.load_state_dict({k.replace("encodings.1", "encodings.0"): v for k, v in model.state_dict().items()})
        assert torch.equal(model.eval()(ids, 0), still(ids, 0))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"shift": -1.0}, ValueError, "shift = -1.0. Expected a finite number of 0 or more"),
        ({"jitter": float("nan")}, ValueError, "jitter = nan"),
        ({"stretch": 0.5}, ValueError, "stretch = 0.5. Expected a finite number of 1 or more"),
        ({"shift": "5"}, TypeError, "shift = '5'. Expected a number"),
        ({"numbers": "whole"}, ValueError, "numbers = 'whole'. Expected 'real' or 'integer'"),
        ({"shift": 2.5, "numbers": "integer"}, TypeError, "shift = 2.5. Expected an integer"),
        ({"shift": 2, "jitter": 0.5, "numbers": "integer"}, ValueError, "jitter = 0.5, stretch = 1.0 with integers"),
        ({"axes": 0}, ValueError, "axes = 0"),
    ],
)
def test_impossible_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=f"Augmented: {message}"):
        Augmented(**settings)


@pytest.mark.parametrize(
    ("settings", "positions", "error", "message"),
    [
        ({"shift": 2, "numbers": "integer"}, torch.zeros(3), TypeError, "because it keeps them integers"),
        ({"shift": 2}, torch.zeros(3, dtype=torch.bfloat16), TypeError, "half precision"),
        ({"shift": 2, "axes": 2}, torch.zeros(5, 3), ShapeError, r"positions of shape \(5, 3\). Expected \[\*batch, seq, 2\]"),
        ({"jitter": 0.6}, torch.arange(3), ValueError, "jitter = 0.6 with neighbours 1 apart"),
    ],
)
def test_impossible_inputs_are_refused(settings, positions, error, message):
    with pytest.raises(error, match=f"Augmented: .*{message}"):
        Augmented(**settings)(positions)
