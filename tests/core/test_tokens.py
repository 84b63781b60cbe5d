"""Positions, order and segments, and what is refused as positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import ShapeError, Tokens, contiguous, decode, follow, grid, packed, padded, seconds, shard
from posenc.core.tokens import PADDING, check_integer_positions, resolve_positions, segments_of, standing_order

CPU = torch.device("cpu")


def test_contiguous_starts_where_it_is_told():
    assert contiguous(3, start=7).positions.tolist() == [7, 8, 9]
    assert contiguous(0).length == 0
    assert contiguous(2).order is None
    assert contiguous(2).segments is None


def test_packed_restarts_at_each_document():
    # OpenRLHF/OpenRLHF#377
    tokens = packed(torch.tensor([0, 5, 9]), 9)
    assert tokens.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert tokens.segments.tolist() == [0] * 5 + [1] * 4


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 4))
def test_packed_equals_its_documents(lengths, tail):
    edges = torch.tensor([0, *lengths]).cumsum(0)
    tokens = packed(edges, sum(lengths) + tail)
    expected = [p for n in lengths for p in range(n)]
    assert tokens.positions[: sum(lengths)].tolist() == expected
    assert tokens.segments.tolist() == [d for d, n in enumerate(lengths) for _ in range(n)] + [PADDING] * tail


@pytest.mark.parametrize("edges", [[1, 5], [0, 5, 3], [0, 10]])
def test_packed_refuses_edges_that_are_none(edges):
    with pytest.raises(ValueError, match=r"packed: cu_seqlens = .* Expected boundaries that start at 0"):
        packed(torch.tensor(edges), 9)


@pytest.mark.parametrize("shape", [(3, 1, 256), (2, 4), ()])
def test_packed_takes_one_axis(shape):
    # QwenLM/Qwen3.8#104: positions of three axes read as three documents
    with pytest.raises(ShapeError, match="one axis"):
        packed(torch.zeros(shape, dtype=torch.int64), 256)


def test_decode_continues_each_row():
    # keras-team/keras-hub#1544
    assert decode(torch.tensor([4, 2]), 2).positions.tolist() == [[4, 5], [2, 3]]
    with pytest.raises(ShapeError, match="one length per row"):
        decode(torch.tensor([4.0]))


MASKS = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_padded_counts_real_tokens_of_each_row(dtype):
    # unslothai/unsloth#3699: the shorter rows of a left-padded batch
    tokens = padded(torch.tensor(MASKS).to(dtype))
    assert tokens.positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 0, 0, 0], [0] * 5]
    assert tokens.segments.tolist() == [[m - 1 for m in row] for row in MASKS]


def test_padding_holds_a_valid_position_unless_asked():
    assert padded(torch.tensor(MASKS)).positions.min() == 0
    assert padded(torch.tensor(MASKS), fill=-1).positions[0].tolist() == [-1, -1, 0, 1, 2]


def test_padded_refuses_an_additive_mask():
    with pytest.raises(TypeError, match="not an additive float mask"):
        padded(torch.zeros(1, 4))


def test_grid_is_row_major():
    # huggingface/transformers#41380
    y, x = grid(3, 4).positions.T.tolist()
    assert x == [0, 1, 2, 3] * 3
    assert y == [0] * 4 + [1] * 4 + [2] * 4


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 2))
def test_grid_cells_are_distinct_and_counted(sizes, prefix):
    tokens = grid(*sizes, prefix=prefix)
    cells = [tuple(cell) for cell in tokens.positions[prefix:].tolist()]
    assert cells == sorted(set(cells))
    assert len(cells) == torch.Size(sizes).numel()
    assert tokens.length == prefix + len(cells)
    assert tokens.positions[:prefix].eq(0).all()


def test_grid_refuses_no_axes():
    with pytest.raises(ValueError, match="at least one axis"):
        grid()


@pytest.mark.parametrize(("rate", "hop"), [(16_000, 160), (24_000, 240), (8_000, 80), (44_100, 441)])
def test_an_instant_has_one_position_at_any_rate(rate, hop):
    assert torch.equal(seconds(200, hop, rate).positions, seconds(200, 160, 16_000).positions)
    assert seconds(151, hop, rate).positions[150] == 1.5


def test_seconds_start_and_refusal():
    assert seconds(2, 1, 2, start=3.0).positions.tolist() == [3.0, 3.5]
    with pytest.raises(ValueError, match="hop = 0"):
        seconds(2, 0, 16_000)


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_shards_together_are_the_sequence(layout):
    whole = packed(torch.tensor([0, 10, 24]), 24)
    parts = [shard(whole, rank, 3, layout=layout) for rank in range(3)]
    order = torch.cat([part.order for part in parts])
    assert sorted(order.tolist()) == list(range(24))
    for name in ("positions", "segments"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined[order.argsort()], getattr(whole, name))


def test_head_tail_shards_share_causal_work():
    work = [shard(contiguous(16), rank, 2, layout="head_tail").order.sum() for rank in range(2)]
    assert work[0] == work[1]


def test_shard_keeps_axes_and_refuses_the_rest():
    assert shard(grid(4, 4), 1, 2).positions.tolist() == grid(4, 4).positions[8:].tolist()
    with pytest.raises(ShapeError, match="Pad the sequence first"):
        shard(contiguous(9), 0, 2)
    with pytest.raises(ValueError, match="rank = 2 of 2"):
        shard(contiguous(8), 2, 2)


@given(st.integers(0, 6), st.integers(0, 6))
def test_follow_joins_what_was_split(a, b):
    joined = follow(contiguous(a), contiguous(b, start=a))
    assert joined.positions.tolist() == list(range(a + b))
    assert joined.order is None
    assert joined.segments is None


def test_follow_spells_facts_out_when_one_side_has_them():
    rows = padded(torch.tensor([[0, 1, 1], [1, 1, 1]]))
    joined = follow(rows, decode(torch.tensor([2, 3])))
    assert joined.positions.tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]
    assert joined.segments.tolist() == [[-1, 0, 0, 0], [0, 0, 0, 0]]
    ordered = follow(shard(contiguous(4), 1, 2), contiguous(1, start=4))
    assert ordered.order.tolist() == [2, 3, 4]  # after the latest before, or the new token could not see it
    with pytest.raises(ShapeError, match="2 axes after positions of 1"):
        follow(contiguous(4), grid(2, 2))


def test_static_facts_spelled_out():
    assert standing_order(contiguous(3, start=5)).tolist() == [0, 1, 2]
    assert segments_of(contiguous(2)).tolist() == [0, 0]


def test_an_int_means_contiguous_from_there():
    assert resolve_positions(4, 3, name="x", device=CPU).tolist() == [4, 5, 6]
    assert resolve_positions(-2, 4, name="x", device=CPU).tolist() == [-2, -1, 0, 1]
    with pytest.raises(TypeError, match="An integer start is for one axis"):
        resolve_positions(0, 3, name="x", device=CPU, axes=2)


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.bfloat16), TypeError, "half precision cannot"),
        (torch.zeros(3, dtype=torch.float16), TypeError, "half precision cannot"),
        (torch.zeros(3).to(torch.float8_e5m2), TypeError, "half precision cannot"),
        (torch.ones(3, dtype=torch.bool), TypeError, "If this is a mask"),
        (torch.zeros(3, dtype=torch.complex64), TypeError, "complex64"),
        ([0, 1, 2], TypeError, "positions are list"),
        (True, TypeError, "positions are bool"),
        (torch.tensor([0.0, float("nan"), 1.0]), ValueError, "positions hold nan"),
        (torch.tensor([0.0, float("inf"), 1.0]), ValueError, "positions hold inf"),
        (torch.arange(4), ShapeError, r"shape \(4,\). Expected \[\*batch, 3\]"),
        (torch.zeros(3, 1), ShapeError, "one position per token"),
    ],
)
def test_what_is_not_positions_is_refused(positions, error, message):
    with pytest.raises(error, match=message):
        resolve_positions(positions, 3, name="x", device=CPU)


def test_rows_and_buckets_need_integers():
    with pytest.raises(TypeError, match="because reasons"):
        check_integer_positions(torch.zeros(2), name="x", why="reasons")


def test_tokens_know_their_length():
    assert Tokens(torch.zeros(2, 5, dtype=torch.int64)).length == 5
    assert grid(2, 3).length == 6
