"""Weights from one pairing to the other: the same scores, the heads of each tensor, nothing lost."""

from __future__ import annotations

import pytest
import torch

from posenc import Geometric, RoPE, ShapeError, apply_rotary, rotary_table
from posenc.convert import pair_order, reorder_pairs

F64 = torch.float64


def test_grouped_keys_move_by_their_own_heads():
    # huggingface/transformers#31766, #31788; ggml-org/llama.cpp#2376: with four heads of four channels for two of eight,
    # a multi-head model survives and a grouped one does not
    keys = torch.arange(16)
    assert reorder_pairs(keys, 2, "half").tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert reorder_pairs(keys, 2, "interleaved").tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert reorder_pairs(keys, 4, "half").tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15], "the bug's order"


@pytest.mark.parametrize("to", ["half", "interleaved"])
@pytest.mark.parametrize(("rotary_dim", "start"), [(None, 0), (4, 0), (4, -4), (2, 3), (6, 1)])
def test_there_and_back_is_the_identity(to, rotary_dim, start):
    weight = torch.randn(3 * 8, 5)
    other = "half" if to == "interleaved" else "interleaved"
    there = reorder_pairs(weight, 3, to, rotary_dim=rotary_dim, start=start)
    assert torch.equal(reorder_pairs(there, 3, other, rotary_dim=rotary_dim, start=start), weight)


def test_the_two_pairings_score_the_reordered_vectors_alike():
    # jzhang38/TinyLlama#24; tatsu-lab/stanford_alpaca#227: fluent nonsense without the reordering
    q, k = torch.arange(1.0, 9, dtype=F64), torch.arange(8.0, 0, -1, dtype=F64)

    def score(q, k, pairing):
        def turned(x, position):
            table = rotary_table(torch.tensor([position]), Geometric(1e4).frequencies(8), dtype=F64)
            return apply_rotary(x[None, None], table, pairing=pairing)[0, 0]

        return float(turned(q, 5) @ turned(k, 2))

    assert score(q, k, "half") == pytest.approx(45.92956725201566, rel=1e-14)
    assert score(q, k, "interleaved") == pytest.approx(70.27903255028566, rel=1e-14)
    order = pair_order(8, "half")
    assert score(q[order], k[order], "half") == pytest.approx(70.27903255028566, rel=1e-14)


@pytest.mark.parametrize(("rotary_dim", "start"), [(16, 0), (8, 0), (8, -8)])
def test_a_reordered_attention_scores_as_before(rotary_dim, start):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 7, 12, generator=generator, dtype=F64)
    weights = {
        "q": torch.randn(4 * 16, 12, generator=generator, dtype=F64),
        "k": torch.randn(2 * 16, 12, generator=generator, dtype=F64),
    }

    def scores(weights, pairing):
        rope = RoPE(16, rotary_dim=rotary_dim, start=start, pairing=pairing)
        q, k = ((x @ w.T).unflatten(-1, (-1, 16)).transpose(1, 2) for w in (weights["q"], weights["k"]))
        q, k = rope(q, k, 3)
        return q @ k.repeat_interleave(2, dim=1).transpose(-1, -2)

    place = {"rotary_dim": rotary_dim, "start": start}
    moved = {"q": reorder_pairs(weights["q"], 4, "half", **place), "k": reorder_pairs(weights["k"], 2, "half", **place)}
    # the same products, added in another order: sixteen terms
    torch.testing.assert_close(scores(moved, "half"), scores(weights, "interleaved"), rtol=16 * 2**-52, atol=1e-12)
    assert not torch.allclose(scores(weights, "half"), scores(weights, "interleaved"), atol=1e-2), (
        "the pairings differ at fixed weights"
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: reorder_pairs(torch.zeros(15, 2), 2, "half"), ShapeError, "for 2 heads. Expected heads · head_dim rows"),
        (lambda: reorder_pairs(torch.zeros(16, 2), 0, "half"), ValueError, "heads = 0"),
        (lambda: reorder_pairs(torch.zeros(16, 2), 2, "neox"), ValueError, "to = 'neox'. Expected 'half' or 'interleaved'"),
        (lambda: pair_order(8, "half", rotary_dim=5), ValueError, "rotary_dim = 5. Expected an even integer"),
        (lambda: pair_order(8, "half", rotary_dim=6, start=4), ValueError, "Expected start . rotary_dim ≤ head_dim"),
    ],
)
def test_impossible_orders_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
