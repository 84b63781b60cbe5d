"""Frequencies given one by one."""

from __future__ import annotations

import pytest
import torch

from posenc import Explicit, Geometric, ShapeError


def test_what_is_given_comes_out():
    frequencies = Explicit((1.0, 0.5, 0.0), amplitude=1.2).frequencies(6)
    assert frequencies.inv_freq.tolist() == [1.0, 0.5, 0.0]
    assert frequencies.amplitude == 1.2
    assert Explicit((1.0,)).frequencies(2, dtype=torch.float32).inv_freq.dtype == torch.float32


def test_a_checkpoint_s_ladder_is_kept_exactly():
    ladder = Geometric(1e6).frequencies(64).inv_freq
    assert torch.equal(Explicit(tuple(ladder.tolist())).frequencies(64).inv_freq, ladder)


def test_lists_become_values():
    assert Explicit([1, 2]) == Explicit((1.0, 2.0))
    assert hash(Explicit([1, 2])) == hash(Explicit((1.0, 2.0)))


@pytest.mark.parametrize(
    "arguments", [((),), ((1.0, float("nan")),), ((float("inf"),),), ((1.0,), 0.0), ((1.0,), float("nan"))]
)
def test_impossible_ladders_are_refused(arguments):
    with pytest.raises(ValueError, match=r"Explicit: .* finite, and an amplitude other than 0"):
        Explicit(*arguments)


def test_other_widths_are_refused():
    with pytest.raises(ShapeError, match=r"2 frequencies for rotary_dim = 6. Expected one per pair, 3"):
        Explicit((1.0, 0.5)).frequencies(6)


@pytest.mark.parametrize("arguments", [("12",), (1.0,), ((True,),), ((1.0,), "1"), ((1.0,), True)])
def test_what_is_no_number_is_refused(arguments):
    with pytest.raises(TypeError, match=r"Explicit: (inv_freq|amplitude) = .* Expected a (list of )?number"):
        Explicit(*arguments)
