"""Sine and cosine features and the order of their channels."""

from __future__ import annotations

import pytest
import torch

from posenc import Frequencies, rotary_table, sinusoid
from posenc.core.sinusoid import concatenate, interleave

SIN, COS = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, 20.0, 30.0]])


def test_features_are_the_rotary_table():
    inv_freq = torch.tensor([1.0, 0.01], dtype=torch.float64)
    sin, cos = sinusoid(torch.arange(5), inv_freq)
    table = rotary_table(torch.arange(5), Frequencies(inv_freq))
    assert torch.equal(sin, table.sin)
    assert torch.equal(cos, table.cos)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integer_positions_give_floating_features(dtype):
    # huggingface/transformers#47674
    sin, _ = sinusoid(torch.arange(8, dtype=dtype), torch.tensor([1.0], dtype=torch.float64))
    assert sin.dtype == torch.float32
    assert len(set(sin.flatten().tolist())) == 8


@pytest.mark.parametrize(
    ("arrange", "width", "channels"),
    [
        (interleave, 6, [1, 10, 2, 20, 3, 30]),
        (interleave, 5, [1, 10, 2, 20, 3]),
        (concatenate, 6, [1, 2, 3, 10, 20, 30]),
        (concatenate, 5, [1, 2, 3, 10, 20]),
    ],
)
def test_channel_order(arrange, width, channels):
    assert arrange(SIN, COS, width).tolist() == [channels]
