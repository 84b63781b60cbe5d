"""Errors of each rounding, against numbers from reports of the field and bounds derived from unit roundoff."""

from __future__ import annotations

from math import cos, inf, pi

import pytest
import torch

from posenc import Geometric
from posenc.analysis import CHAINS, Chain, precision_loss


def test_float64_loses_nothing():
    loss = precision_loss(Geometric(), 64, torch.arange(100), Chain())
    assert loss.angle.max() == loss.table.max() == 0


@pytest.mark.parametrize(("length", "error"), [(512, 0.62504), (2048, 2.50384), (4096, 5.00891)])
def test_frequencies_rounded_to_bfloat16(length, error):
    """Quality that falls with length: the frequencies followed the model's dtype."""
    angle = precision_loss(Geometric(1e4), 128, torch.arange(length), CHAINS["bfloat16 inv_freq"]).angle
    assert abs(angle.max().item() - error) <= 5e-6  # half of the last digit of the reported number
    assert angle.argmax() == (length - 1) * 64 + 1


def test_an_angle_in_float16():
    """Isolated cells that are wrong: 1857 · 0.5623 became 1045."""
    loss = precision_loss(Geometric(1e4), 32, torch.tensor([1857]), CHAINS["float16 angles"])
    true = 1857 * 1e4 ** (-1 / 16)
    assert loss.angle[0, 1].item() == pytest.approx(1045 - true, rel=1e-12)  # true is 1044.27, to 13 digits on both sides
    assert loss.table[0, 1].item() == pytest.approx(abs(cos(1045) - cos(true)), rel=1e-9)  # an angle of 1e3 loses 3 digits
    assert round(cos(1045), 12) == -0.408164620577
    assert round(loss.table[0, 1].item(), 3) == 0.715


def test_positions_rounded_to_bfloat16():
    """Long inputs that diverge in bfloat16 only: 15962 is 15936 there."""
    loss = precision_loss(Geometric(1e4), 64, torch.tensor([15962]), CHAINS["bfloat16 positions"])
    assert loss.angle[0, 0] == 26
    assert loss.table[0, 0].item() == pytest.approx(abs(-0.2679500711279774 - -0.908015901251032), rel=1e-12)


# largest error of cosines of angles in float32 near a position, as published
@pytest.mark.parametrize(
    ("last", "published"),
    [(1023, 5.7e-5), (4095, 2.4e-4), (8191, 4.8e-4), (32767, 1.9e-3), (131071, 7.6e-3), (1048575, 6.2e-2)],
)
def test_angles_in_float32(last, published):
    loss = precision_loss(Geometric(1e4), 128, torch.arange(max(0, last - 4095), last + 1), CHAINS["float32 angles"])
    # the frequency and the product are rounded once each, by 2⁻²⁴ of the angle; pair 0 is exact, so angles are < last
    assert loss.table.max() <= last * 2 * 2**-24
    assert loss.table.max().item() == pytest.approx(published, rel=0.03)  # two digits, other positions sampled
    assert (loss.table <= loss.angle + 2**-50).all()  # cosine and sine turn no faster than the angle


def test_a_rounded_table_costs_the_same_everywhere():
    loss = precision_loss(Geometric(1e4), 128, torch.tensor([3, 10**3, 10**6]), CHAINS["bfloat16 tables"])
    assert loss.angle.max() == 0
    assert (loss.table.amax(-1) <= 2**-9).all()  # half a unit of 8 bits below 1
    assert (loss.table.amax(-1) > 2**-10).all()


def test_computed_in_bfloat16_nothing_is_left():
    """Over 0.15 by position 127, garbage by 1000."""
    loss = precision_loss(Geometric(1e4), 128, torch.tensor([127, 1000]), Chain(*[torch.bfloat16] * 4))
    assert loss.table[0].max() > 0.15
    assert loss.table[1].max() > 1


def test_an_overflow_is_an_infinite_error():
    loss = precision_loss(Geometric(1e4), 4, torch.tensor([70_000]), CHAINS["float16 angles"])
    assert loss.angle[0, 0] == inf
    assert loss.table[0, 0] == 2
    assert not loss.table.isnan().any()


def test_shapes_and_the_batch():
    loss = precision_loss(Geometric(), 8, torch.zeros(2, 3), CHAINS["float32 angles"])
    assert loss.angle.shape == loss.table.shape == (2, 3, 4)
    assert loss.angle.dtype == torch.float64
    assert pi > loss.angle.max() == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Chain(angle=torch.int32), TypeError, "Chain: angle = torch.int32. Expected a floating-point dtype."),
        (lambda: precision_loss(Geometric(), 8, torch.arange(2), "float32"), TypeError, "chain = 'float32'. Expected a Chain."),
        (
            lambda: precision_loss(Geometric(), 8, torch.ones(2).half(), Chain()),
            TypeError,
            "precision_loss: positions are torch.f",
        ),
        (
            lambda: precision_loss(8, 8, torch.arange(2), Chain()),
            TypeError,
            "precision_loss: schedule = 8. Expected a schedule",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
