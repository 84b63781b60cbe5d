"""The inner product of sinusoidal codes as a bias: its index, its heads, and exactness at any distance."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from mpmath import mp, mpf

from posenc import (
    CAUSAL,
    NoPE,
    Transformer,
    attention,
    contiguous,
    materialize,
    padded,
    positional_attention,
    score_mod,
    slice_heads,
)
from posenc.core.mask import causal
from posenc.encodings.sandwich import Sandwich
from posenc.testing import conform

F64 = torch.float64


@cache
def kernel(distance, dim):
    """Chi et al. 2023: Σ cos(distance / 10000^(2i/dim)), i from 1 to dim/2; float64 angles, forty digits after."""
    with mp.workdps(40):
        return mp.fsum(mp.cos(mpf(distance / 10000 ** (2 * i / dim))) for i in range(1, dim // 2 + 1))


def oracle(encoding, positions, k_positions):
    bias = torch.zeros(encoding.heads, len(positions), len(k_positions), dtype=F64)
    for i, m in enumerate(positions.tolist()):
        for j, n in enumerate(k_positions.tolist()):
            for head in range(1, encoding.heads + 1):
                bias[head - 1, i, j] = float(kernel(abs(m - n), encoding.dim) / (mpf(8 * head) / encoding.heads))
    return bias


def test_conforms():
    conform(
        lambda shape: Sandwich(shape.heads),
        oracle,
        claims=Sandwich.spec.claims,
        other=lambda shape: Sandwich(shape.heads, 32),
        skip={"dtypes"},  # in float64 the angles of far positions show: below
    )


def test_far_positions_are_as_exact_as_their_float64_angles():
    at = torch.tensor([5, 4_095, 131_071, 1_000_003, 10_000_000])
    encoding = Sandwich(6)
    expected = oracle(encoding, at, at)
    # 64 cosines of angles that each of two positions puts off by 2⁻⁵³ of itself twice
    allowed = 64 * 4 * 10_000_000 * 2**-53
    torch.testing.assert_close(materialize(encoding(), at, dtype=F64), expected, rtol=0.0, atol=allowed)
    torch.testing.assert_close(materialize(encoding(), at), expected.float(), rtol=2**-23, atol=allowed)


def row(encoding, distances):
    return materialize(encoding(), torch.tensor([0]), -torch.tensor(distances), dtype=F64)[:, 0]


def test_check_values():
    """The first head of eight divides by 1, the last by 8."""
    first, *_, last = row(Sandwich(8), [0, 1, 2, 10, 100, 1000])
    expected = [64, 62.55338149, 58.79800737, 44.65909393, 30.68108583, 10.61035322]
    assert first.tolist() == pytest.approx(expected, rel=1e-9)
    assert (8 * last).tolist() == pytest.approx(expected, rel=1e-9)


def test_it_is_the_product_of_the_codes_themselves():
    """With the index from 1: the code of Vaswani et al. without its fastest wave and with one slower."""
    at, dim = torch.arange(40, dtype=F64), 32
    waves = 10000 ** (-2 * torch.arange(1, dim // 2 + 1, dtype=F64) / dim)
    codes = torch.cat([(at[:, None] * waves).sin(), (at[:, None] * waves).cos()], -1)
    expected = codes @ codes.T / 2
    # products of numbers up to 1 with angles up to 40, summed over 32 channels
    torch.testing.assert_close(materialize(Sandwich(4, dim)(), at, dtype=F64)[0], expected, rtol=0.0, atol=64 * 40 * 2**-53)


def test_heads_divide_by_multiples():
    bias = row(Sandwich(6), [7, 100])
    heads = torch.arange(1, 7, dtype=F64)[:, None]
    torch.testing.assert_close(bias * heads, bias[:1].expand(6, -1), rtol=4 * 2**-53, atol=0.0)
    at = torch.arange(5)
    assert torch.equal(materialize(slice_heads(Sandwich(6)(), slice(2, 4)), at), materialize(Sandwich(6)(), at)[2:4])


def test_it_falls_in_ripples():
    bias = row(Sandwich(1), list(range(3000)))[0]
    assert bool((bias[1:] < bias[0]).all())
    assert bias.diff().max() > 0
    assert bias[2000:].mean() < bias[200:400].mean() < bias[20:40].mean()


def test_one_entry_is_that_of_the_grid():
    at, index = torch.tensor([3.0, 0.5, 8.25], dtype=F64), torch.tensor([[0, 2, 1], [3, 0, 2]])
    dense, modify = materialize(Sandwich(4)(), at, dtype=F64), score_mod(Sandwich(4)(), at)
    for head, query, key in index:
        entry = modify(torch.zeros((), dtype=F64), torch.zeros((), dtype=torch.int64), head, query, key)
        torch.testing.assert_close(entry, dense[head, query, key], rtol=0.0, atol=64 * 8 * 2**-53)


def test_positions_may_be_left_out_because_only_the_distance_counts():
    q, (k, v) = torch.randn(1, 2, 3, 4, dtype=F64), torch.randn(2, 1, 2, 5, 4, dtype=F64)
    without = attention(q, k, v, bias=Sandwich(2)(), mask=CAUSAL)
    given = attention(q, k, v, bias=Sandwich(2)(), mask=CAUSAL, positions=torch.arange(9, 12), k_positions=torch.arange(7, 12))
    torch.testing.assert_close(without, given, rtol=0.0, atol=1e-14)


def test_padding_does_not_matter():
    q, k, v = torch.randn(3, 1, 2, 7, 4, dtype=F64)
    tokens = padded(torch.tensor([[0, 0, 1, 1, 1, 1, 1]]))
    result = positional_attention(q, k, v, encodings=[Sandwich(2)], positions=tokens, mask=causal(tokens))
    alone = positional_attention(*(t[:, :, 2:] for t in (q, k, v)), encodings=[Sandwich(2)], positions=0, mask=CAUSAL)
    torch.testing.assert_close(result[:, :, 2:], alone, rtol=0.0, atol=1e-14)


@pytest.mark.parametrize("slots", [None, 12])
def test_a_decoder_trains_and_generates_the_same_with_a_cache(slots):
    model = Transformer(11, dim=16, layers=2, heads=4, kv_heads=2, encodings=[NoPE(), Sandwich(4)]).double()
    ids = torch.randint(0, 11, (2, 9))
    torch.nn.functional.cross_entropy(model(ids, 0)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    model.eval()
    cache = model.new_cache(*(() if slots is None else (2, slots)))
    steps = [
        model(ids[:, first:last], contiguous(last - first, first), cache=cache) for first, last in ((0, 4), (4, 5), (5, 9))
    ]
    # two layers of some hundred float64 roundings of logits below 10
    torch.testing.assert_close(torch.cat(steps, 1), model(ids, 0), rtol=0.0, atol=1e4 * 2**-53)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "heads = 0. Expected an integer of 1 or more"),
        ((4, 0), ValueError, "dim = 0. Expected an integer of 1 or more"),
        ((4, 7), ValueError, "dim = 7. Expected an even width"),
        ((4, 8.0), TypeError, "dim = 8.0"),
    ],
)
def test_impossible_settings_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"Sandwich: {message}"):
        Sandwich(*arguments)
