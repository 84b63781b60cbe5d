"""How far a bias lets attention reach, against geometric series."""

from __future__ import annotations

from math import ceil, exp, expm1, log

import pytest
import torch

from posenc import ALiBi, DenseBias, ShapeError, SlopeBias, T5Bias, TableBias
from posenc.analysis import attention_reach


def test_alibi_is_a_geometric_series():
    reach = attention_reach(ALiBi(8)(), 16_384)
    for slope, mean, distance in zip([2.0**-j for j in range(1, 9)], reach.mean, reach.distance, strict=True):
        # cut off at 16,384 tokens: e^(-16384/256) = 2e-28 of the weight is missing; a sum of 16,384 rounded terms
        assert mean == pytest.approx(1 / expm1(slope), rel=16_384 * 2**-53)
        assert distance == ceil(log(20) / slope) - 1  # the least r with 1 − e^(−slope (r + 1)) ≥ 0.95


def test_the_published_means():
    mean = attention_reach(ALiBi(8)(), 16_384).mean
    assert (round(mean[0], 1), round(mean[-1], 1)) == (1.5, 255.5)


def test_a_short_text_cuts_the_window_off():
    """Four keys, slope ½: 0.455, 0.276, 0.167, 0.102 from near to far."""
    slopes = torch.tensor([0.5, 0.0], dtype=torch.float64)
    reach = attention_reach(SlopeBias(slopes, -slopes), 4, share=0.7)
    weights = [exp(-d / 2) for d in range(4)]
    assert reach.mean[0] == pytest.approx(sum(d * w for d, w in enumerate(weights)) / sum(weights), rel=16 * 2**-53)
    assert reach.mean[1] == 1.5  # no bias: the middle of the text
    assert reach.distance == (1, 2)
    assert reach.share == 0.7


def test_learned_and_written_out_biases_work():
    bias = T5Bias(2, buckets=4, max_distance=8)
    with torch.no_grad():
        bias.relative_attention_bias.weight.zero_()
        bias.relative_attention_bias.weight[0, 1] = 100.0
    reach = attention_reach(bias(), 11)
    assert reach.mean == pytest.approx((5.0, 0.0), abs=1e-40)  # e^-100 of the weight is elsewhere
    assert reach.distance == (10, 0)
    row = DenseBias(torch.tensor([[[0.0, 50.0, 0.0]]]))  # of the last query alone
    assert attention_reach(row, 3).distance == (1,)


def test_the_whole_text_is_the_most():
    assert attention_reach(DenseBias(torch.zeros(1, 1, 3)), 3, share=1 - 2**-53).distance == (2,)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attention_reach(ALiBi(2), 4), TypeError, "Expected a ScoreBias, which calling an encoding returns."),
        (lambda: attention_reach(ALiBi(2)(), 0), ValueError, "attention_reach: length = 0. Expected an integer of 1 or more"),
        (lambda: attention_reach(ALiBi(2)(), 4, share=1.0), ValueError, "share = 1.0. Expected a number above 0 and below 1."),
        (lambda: attention_reach(TableBias(torch.ones(1, 3, 3), (1, 1)), 4), ShapeError, "a TableBias of 2 axes. Expected"),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
