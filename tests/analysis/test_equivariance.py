"""Attention without positions moves with its tokens; with positions, or under a causal mask, it does not."""

from __future__ import annotations

from math import exp

import pytest
import torch

from posenc import CAUSAL, FULL, ALiBi, Learned, NoPE, RoPE, ShapeError, Sinusoidal, T5Bias
from posenc.analysis import shuffle

# sums over 12 keys and 32 channels in another order: some 12 · 32 · 2⁻⁵³ = 4e-14 of values around 1, a layer or two
SAME = 1e-12
NOTICED = 1e-3


@pytest.mark.parametrize("encodings", [[], [NoPE()]])
@pytest.mark.parametrize("layers", [1, 2])
def test_without_positions_outputs_move_with_their_tokens(encodings, layers):
    found = shuffle(encodings, layers=layers)
    assert found.outputs < SAME
    assert found.order.tolist() != list(range(12))
    torch.testing.assert_close(found.shuffled_weights, found.weights, rtol=0, atol=SAME)


ENCODINGS = {
    "sinusoidal": lambda: [Sinusoidal(32)],
    "learned": lambda: [Learned(12, 32)],
    "rope": lambda: [RoPE(8)],
    "alibi": lambda: [ALiBi(4, form="symmetric")],
    "t5": lambda: [T5Bias(4, direction="bidirectional")],
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_any_encoding_breaks_that(name):
    assert shuffle(ENCODINGS[name]()).outputs > NOTICED


def test_one_causal_layer_leaves_the_last_output_alone():
    found = shuffle([], mask=CAUSAL)
    assert found.last < SAME
    assert found.outputs > NOTICED


def test_two_causal_layers_do_not():
    assert shuffle([], mask=CAUSAL, layers=2).last > NOTICED


def test_the_weights_are_those_of_the_first_layer():
    """Written out: softmax of x W_q · x W_k / √(dim/heads) for the first head."""
    generator = torch.Generator().manual_seed(3)
    found = shuffle([], length=4, dim=2, heads=2, generator=generator)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    weights = torch.randn(1, 3, 2, 2, generator=generator, dtype=torch.float64) / 2**0.5
    q, k = ([sum(row[c] * m[c, 0] for c in range(2)).item() for row in x] for m in weights[0, :2])
    for i in range(4):
        raw = [exp(q[i] * k[j]) for j in range(4)]
        expected = [value / sum(raw) for value in raw]
        torch.testing.assert_close(found.weights[i].tolist(), expected, rtol=32 * 2**-53, atol=0)  # some dozen roundings


def test_shuffled_weights_are_put_back_in_order():
    found = shuffle([RoPE(8)])
    assert not torch.allclose(found.weights, found.shuffled_weights)
    rows = found.shuffled_weights.sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=12 * 2**-52)
    assert found.order[-1] == 11


def test_the_same_call_gives_the_same_numbers():
    assert shuffle([RoPE(8)]).outputs == shuffle([RoPE(8)], mask=FULL).outputs
    other = shuffle([RoPE(8)], generator=torch.Generator().manual_seed(7))
    assert other.outputs != shuffle([RoPE(8)]).outputs


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: shuffle([], length=2), ValueError, "shuffle: length = 2. Expected an integer of 3 or more"),
        (lambda: shuffle([], dim=30), ShapeError, "shuffle: dim = 30 for 4 heads. Expected a multiple of heads. Pass dim=28."),
        (lambda: shuffle([RoPE(16)]), ShapeError, "q of width 8"),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
