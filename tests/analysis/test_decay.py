"""What distance does to rotary scores."""

from __future__ import annotations

from math import cos, sqrt

import pytest
import torch

from posenc import Geometric, RoPE, YaRN
from posenc.analysis import random_scores, rotary_kernel

DISTANCES = torch.tensor([0, 1, 10, 100, 1000, 10_000])


def test_the_mean_of_cosines_as_published():
    found = rotary_kernel(Geometric(1e4), 128, DISTANCES)
    expected = [sum(cos(d * 1e4 ** (-i / 64)) for i in range(64)) / 64 for d in DISTANCES.tolist()]
    # angles up to 10⁴, each from a product and a frequency of a few roundings
    torch.testing.assert_close(found.tolist(), expected, rtol=0, atol=1e4 * 8 * 2**-53)
    assert [round(value, 2) for value in found.tolist()] == [1, 0.97, 0.67, 0.48, 0.16, -0.03]


@pytest.mark.parametrize("schedule", [Geometric(1e4), YaRN(Geometric(1e4), 16.0, 4096)])
def test_the_kernel_is_the_score_of_ones(schedule):
    """The amplitude counts twice, once on each side."""
    ones = torch.ones(1, 1, len(DISTANCES), 64, dtype=torch.float64)
    rotated, start = RoPE(64, schedule)(ones, ones[:, :, :1], DISTANCES, torch.zeros(1, dtype=torch.int64))
    scores = (rotated * start).sum(-1)[0, 0] / 64
    torch.testing.assert_close(rotary_kernel(schedule, 64, DISTANCES), scores, rtol=0, atol=64 * 4 * 2**-53)  # a sum of 64


def test_it_is_not_monotone():
    kernel = rotary_kernel(Geometric(1e4), 128, torch.arange(1000))
    assert (kernel.diff() > 0).any()


def test_independent_content_does_not_decay():
    samples = 4096
    scores = random_scores(Geometric(1e4), 64, DISTANCES, samples=samples)
    # deviation 1: the mean is off by 1/√samples, the deviation by about √((kurtosis − 1)/4/samples) with kurtosis
    # 3 + 6/64; five of them, which chance exceeds once in a million
    assert scores.mean.abs().max() < 5 / sqrt(samples)
    assert (scores.spread - 1).abs().max() < 5 * sqrt((2 + 6 / 64) / 4 / samples)


def test_equal_content_follows_the_kernel():
    samples, dim = 4096, 64
    scores = random_scores(Geometric(1e4), dim, DISTANCES, content="equal", samples=samples)
    # a plane gives |q|² cos with mean 2 and variance 4, so mean √dim · kernel and deviation √(2 · mean of cos²)
    kernel = rotary_kernel(Geometric(1e4), dim, DISTANCES)
    squares = [sum(cos(d * 1e4 ** (-2 * i / dim)) ** 2 for i in range(dim // 2)) / (dim // 2) for d in DISTANCES.tolist()]
    deviation = (2 * torch.tensor(squares, dtype=torch.float64)).sqrt()
    assert ((scores.mean - sqrt(dim) * kernel).abs() < 5 * deviation / sqrt(samples)).all()
    # kurtosis of such sums of exponentials is at most 3 + 6 · Σcos⁴/(Σcos²)² ≤ 9
    assert ((scores.spread - deviation).abs() < 5 * deviation * sqrt((9 - 1) / 4 / samples)).all()


def test_samples_are_reproducible_and_the_generator_counts():
    call = {"schedule": Geometric(), "rotary_dim": 8, "distances": DISTANCES, "samples": 16}
    assert torch.equal(random_scores(**call).mean, random_scores(**call).mean)
    assert not torch.equal(random_scores(**call).mean, random_scores(**call, generator=torch.Generator().manual_seed(1)).mean)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rotary_kernel(1e4, 8, DISTANCES), TypeError, "rotary_kernel: schedule = 10000.0. Expected a schedule"),
        (lambda: rotary_kernel(Geometric(), 8, DISTANCES.half()), TypeError, "positions are torch.float16."),
        (
            lambda: random_scores(Geometric(), 8, DISTANCES, content="same"),
            ValueError,
            "content = 'same'. Expected 'independent'",
        ),
        (
            lambda: random_scores(Geometric(), 8, DISTANCES, samples=1),
            ValueError,
            "samples = 1. Expected an integer of 2 or more",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
