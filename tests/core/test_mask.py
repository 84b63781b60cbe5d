"""Masks against rules written out pair by pair."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import (
    CAUSAL,
    FULL,
    ShapeError,
    Tokens,
    causal,
    contiguous,
    decode,
    follow,
    grid,
    packed,
    padded,
    same_segment,
    shard,
    visible,
    window,
)
from posenc.core.mask import UNFILLED, All, Either


def allowed(mask, q, k=None):
    return mask.allowed(q, q if k is None else k, device="cpu")


def by_rule(rule, q, k):
    return torch.tensor([[rule(i, j) for j in range(k)] for i in range(q)], dtype=torch.bool).reshape(q, k)


@given(st.integers(0, 6), st.integers(0, 6))
def test_causal_aligns_the_queries_with_the_end_of_the_keys(q, k):
    # pytorch/pytorch#103082
    assert torch.equal(allowed(CAUSAL, q, k), by_rule(lambda i, j: j <= i + k - q, q, k))


@given(st.integers(1, 7), st.integers(0, 3), st.integers(1, 4), st.integers(0, 2))
def test_window_counts_the_token_itself(q, more, before, after):
    k = q + more
    expected = by_rule(lambda i, j: -after <= i + more - j < before, q, k)
    assert torch.equal(allowed(window(before, after), q, k), expected)


def test_segments_see_their_own_and_padding_sees_nothing():
    mask = allowed(same_segment(torch.tensor([0, 0, 1, -1])), 4)
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_unfilled_slots_are_never_seen():
    order = torch.tensor([0, 1, UNFILLED, UNFILLED])
    assert allowed(visible(torch.tensor([1]), order), 1, 4).tolist() == [[True, True, False, False]]
    assert allowed(visible(torch.tensor([1]), order, window=1), 1, 4).tolist() == [[False, True, False, False]]


def test_and_or_follow_the_pairs():
    a, b = window(2), same_segment(torch.tensor([0, 0, 1, 1]))
    both, one = allowed(a & b, 4), allowed(a | b, 4)
    assert torch.equal(both, allowed(a, 4) & allowed(b, 4))
    assert torch.equal(one, allowed(a, 4) | allowed(b, 4))


def test_and_or_simplify():
    w = window(3)
    assert (FULL & w) == w
    assert (w & w) == w
    assert (FULL | w) == FULL
    assert (w | w) == w
    assert FULL & FULL == FULL
    assert (CAUSAL & w) & CAUSAL == All((CAUSAL, w))
    assert (CAUSAL | w) | CAUSAL == Either((CAUSAL, w))


MASKS = {
    "full": FULL,
    "causal": CAUSAL,
    "window": window(2, 1),
    "sliding": CAUSAL & window(2),
    "either": CAUSAL | window(1, 2),
    "segments": same_segment(torch.tensor([0, 0, 1])),
}


@pytest.mark.parametrize(
    "mask",
    [
        *MASKS.values(),
        CAUSAL & same_segment(torch.tensor([[0, 0, 1], [2, -1, 2]])),
        visible(torch.tensor([[1, 0, 2]]), torch.tensor([2, 0, 1]), window=2)
        | same_segment(torch.tensor([[0, 0, 1], [1, 1, 0]])),
    ],
)
def test_entry_by_entry_is_the_whole(mask):
    whole = allowed(mask, 3).expand(2, 3, 3)
    index = torch.cartesian_prod(*(torch.arange(n) for n in (2, 3, 3)))
    assert torch.equal(torch.stack([mask.sees(b, q, k, 3, 3) for b, q, k in index]).reshape(2, 3, 3), whole)
    rows, columns = torch.arange(1, 3)[:, None], torch.arange(2)[None, :]
    assert torch.equal(mask.sees(..., rows, columns, 3, 3).expand(2, 2, 2), whole[:, 1:, :2])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("q", "k"), [(3, 3), (1, 3), (3, 1), (1, 1), (3, 0)])
def test_static_facts_are_true(mask, q, k):
    """A fact may be missed, never wrong: fused kernels rely on it."""
    try:
        seen = allowed(mask, q, k)
    except ShapeError:
        return
    assert not mask.sees_all(q, k) or bool(seen.all())
    assert not mask.sees_itself(q, k) or bool(seen.any(-1).all())


def test_one_query_needs_no_causal_mask():
    assert CAUSAL.sees_all(1, 5)
    assert not CAUSAL.sees_all(2, 5)


def test_causal_is_bare_only_when_the_tokens_allow_it():
    assert causal(contiguous(4)) is CAUSAL
    assert causal(contiguous(1, start=4), contiguous(5)) is CAUSAL
    assert causal(grid(2, 2)) is CAUSAL  # positions are no order
    assert causal(contiguous(4), window=2) == CAUSAL & window(2)
    for tokens in (packed(torch.tensor([0, 2, 4]), 4), padded(torch.tensor([[0, 1, 1, 1]])), shard(contiguous(8), 1, 2)):
        assert causal(tokens) is not CAUSAL


def test_causal_of_packed_documents():
    mask = allowed(causal(packed(torch.tensor([0, 2, 3]), 4)), 4)
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_causal_of_padded_rows_and_the_next_token():
    rows = padded(torch.tensor([[0, 1, 1], [1, 1, 1]]))
    step = decode(torch.tensor([2, 3]))
    keys = follow(rows, step)
    assert allowed(causal(step, keys), 1, 4).int().tolist() == [[[0, 1, 1, 1]], [[1, 1, 1, 1]]]
    assert allowed(causal(rows), 3)[0].int().tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("w", [None, 3])
def test_shards_see_what_the_whole_sees(layout, w):
    whole = packed(torch.tensor([0, 5, 12]), 12)
    expected = allowed(causal(whole, window=w), 12)
    for rank in range(2):
        part = shard(whole, rank, 2, layout=layout)
        assert torch.equal(allowed(causal(part, whole, window=w), 6, 12), expected[part.order])


def test_no_mask_reads_positions():
    """Positions of an image repeat and run backwards; a causal rule on them would let later tokens through."""
    image = Tokens(grid(3, 3).positions[:, 1])
    assert torch.equal(allowed(causal(image), 9), torch.ones(9, 9, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    "make", [lambda: window(0), lambda: window(1, -1), lambda: visible(torch.arange(2), torch.arange(2), 0)]
)
def test_an_empty_window_is_refused(make):
    with pytest.raises(ValueError, match=r"sees (itself|only the token itself)"):
        make()


def test_other_lengths_are_refused():
    with pytest.raises(ShapeError, match=r"same_segment: q_segments has shape \(3,\). Expected \[\*batch, 4\]"):
        allowed(same_segment(torch.zeros(3, dtype=torch.int64)), 4)
    with pytest.raises(ShapeError, match="visible: k_order"):
        allowed(visible(torch.arange(3), torch.arange(3)), 3, 4)
