"""Bias values: the dense and the programmed form agree, entry by entry, for every one of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import (
    DenseBias,
    FormulaBias,
    KeyBias,
    QueryTableBias,
    ShapeError,
    SlopeBias,
    SumBias,
    TableBias,
    grid,
    materialize,
    score_mod,
    slice_heads,
)

BATCH, HEADS, Q, K = 2, 3, 4, 5
F64 = torch.float64


def log_kernel(q, k, head, rate):
    return -rate[head] * ((q - k).abs() + 1).log()


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=F64)


SLOPES = SlopeBias(normal(HEADS).abs(), normal(HEADS + 1)[1:].abs())
FORMULA = FormulaBias(log_kernel, (normal(HEADS).abs(),), torch.arange(HEADS))
TABLE = TableBias(normal(HEADS, 7), (3,))
BIASES = {
    "slope": SLOPES,
    "formula": FORMULA,
    "table": TABLE,
    "table of one row": TableBias(normal(HEADS, 1), (0,)),
    "key": KeyBias(normal(BATCH, HEADS, K)),
    "key, no batch": KeyBias(normal(HEADS, K)),
    "query table": QueryTableBias(normal(BATCH, HEADS, Q, 6), 2),
    "query table, no batch": QueryTableBias(normal(HEADS, Q, 6), 2),
    "dense": DenseBias(normal(BATCH, HEADS, Q, K)),
    "dense, one head": DenseBias(normal(1, 1, Q, K)),
    "sum": SLOPES + TABLE,
    "sum with one head": SumBias((TABLE, DenseBias(normal(BATCH, 1, Q, K)), FORMULA)),
}
POSITIONS = {
    "shared": (torch.tensor([3, 4, 5, 6]), torch.tensor([0, 9, 2, 5, 1])),
    "per row": (torch.randint(0, 9, (BATCH, Q)), torch.randint(0, 9, (BATCH, K))),
    "mixed": (torch.randint(0, 9, (BATCH, Q)), torch.arange(K)),
}
each_bias = pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
each_place = pytest.mark.parametrize("at", POSITIONS.values(), ids=POSITIONS)


def entry_by_entry(bias, q_at, k_at, heads, q, k):
    """What score_mod adds to a score of 0, index by index: [batch, heads, q, k]."""
    modify, zero = score_mod(bias, q_at, k_at), torch.zeros((), dtype=F64)
    index = torch.cartesian_prod(*(torch.arange(n) for n in (BATCH, heads, q, k)))
    return torch.stack([modify(zero, *place) for place in index]).reshape(BATCH, heads, q, k)


@each_bias
@each_place
def test_dense_and_programmed_forms_agree(bias, at):
    dense = materialize(bias, *at, dtype=F64)
    assert dense.shape[-3:] == (bias.heads, Q, K)
    assert torch.equal(dense.expand(BATCH, -1, -1, -1), entry_by_entry(bias, *at, bias.heads, Q, K))


@each_bias
@pytest.mark.parametrize("index", [slice(0, 2), slice(1, 3), slice(2, 3)])
def test_sliced_heads_are_those_of_the_whole(bias, index):
    if bias.heads == 1:
        return
    at = POSITIONS["per row"]
    sliced = slice_heads(bias, index)
    assert sliced.heads == index.stop - index.start
    assert torch.equal(materialize(sliced, *at, dtype=F64), materialize(bias, *at, dtype=F64)[..., index, :, :])


@each_bias
def test_biases_hand_out_their_tensors(bias):
    assert bias.tensors()
    assert all(isinstance(tensor, torch.Tensor) for tensor in bias.tensors())


def test_dense_and_programmed_forms_agree_on_a_grid_of_axes():
    bias = TableBias(normal(HEADS, 3, 5), (1, 2))
    at = grid(2, 3).positions
    assert torch.equal(materialize(bias, at, dtype=F64).expand(BATCH, -1, -1, -1), entry_by_entry(bias, at, at, HEADS, 6, 6))


def test_window_table_of_two_axes():
    # microsoft/Swin-Transformer#281: rows are strided by the width's span, so no two offsets collide
    index = torch.arange(15.0).reshape(1, 3, 5)
    dense = materialize(TableBias(index, (1, 2)), grid(2, 3).positions)[0].int().tolist()
    assert dense[0] == [7, 6, 5, 2, 1, 0]
    assert dense[5] == [14, 13, 12, 9, 8, 7]
    square = materialize(TableBias(torch.arange(9.0).reshape(1, 3, 3), (1, 1)), grid(2, 2).positions)[0]
    assert square.int().tolist() == [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]


@given(st.integers(1, 4), st.integers(1, 4))
def test_distinct_offsets_read_distinct_rows(height, width):
    span = (2 * height - 1, 2 * width - 1)
    table = torch.arange(float(span[0] * span[1])).reshape(1, *span)
    at = grid(height, width).positions
    rows = materialize(TableBias(table, (height - 1, width - 1)), at)[0].flatten().tolist()
    offsets = (at[:, None] - at[None]).flatten(0, 1).tolist()
    assert len({(tuple(o), r) for o, r in zip(offsets, rows, strict=True)}) == len(set(rows)) == len(set(map(tuple, offsets)))


def test_table_covers_both_sides_of_full_attention():
    # espnet/espnet#2684: 2L - 1 rows; an L-row shift would hand the upper half the rows of other queries
    length = 4
    dense = materialize(TableBias(torch.arange(7.0)[None], (3,)), torch.arange(length))[0]
    assert torch.equal(dense, torch.arange(4.0)[:, None] - torch.arange(4.0) + 3)


def test_query_table_reads_the_row_of_its_own_query():
    # kimiyoung/transformer-xl#132
    logits = 10 * torch.arange(4.0)[:, None] + torch.arange(7.0)
    dense = materialize(QueryTableBias(logits[None], 3), torch.arange(4))[0]
    assert torch.equal(dense, 10 * torch.arange(4.0)[:, None] + torch.arange(4.0)[:, None] - torch.arange(4.0) + 3)


def test_lags_past_the_table_share_its_ends():
    dense = materialize(TableBias(torch.arange(9.0)[None], (4,)), torch.tensor([0]), torch.arange(6, -7, -1))
    assert dense.int().flatten().tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8]


def test_slope_sign():
    # meta-pytorch/attention-gym#86: far tokens are not favoured
    slopes = torch.tensor([0.5], dtype=F64)
    at = torch.tensor([5]), torch.tensor([2, 5, 9])
    assert materialize(SlopeBias(slopes, -slopes), *at).flatten().tolist() == [-1.5, 0.0, 2.0]
    assert materialize(SlopeBias(slopes, slopes), *at).flatten().tolist() == [-1.5, 0.0, -2.0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_narrow_integers_do_not_wrap(dtype):
    at = torch.tensor([2, 100], dtype=dtype), torch.tensor([127], dtype=dtype)
    for bias in (SLOPES, TABLE, FORMULA):
        wide = materialize(bias, *(t.long() for t in at), dtype=F64)
        assert torch.equal(materialize(bias, *at, dtype=F64), wide)
        none = torch.zeros((), dtype=torch.int64)
        assert score_mod(bias, *at)(torch.zeros((), dtype=F64), none, none, none, none) == wide[0, 0, 0]


def test_distances_are_exact_at_long_range():
    slopes = torch.tensor([0.5], dtype=F64)
    far = 2**30
    dense = materialize(SlopeBias(slopes, -slopes), torch.tensor([far + 1, far]), torch.tensor([far]))
    assert dense.flatten().tolist() == [-0.5, 0.0]


def test_gradients_reach_every_table():
    for make in (
        lambda t: TableBias(t, (1,)),
        lambda t: SlopeBias(t[:, 0], t[:, 1]),
        lambda t: QueryTableBias(t[:, None].expand(2, 4, 3), 1),
        lambda t: FormulaBias(log_kernel, (t[:, 0],), torch.arange(2)),
    ):
        table = normal(2, 3).requires_grad_()
        assert torch.autograd.gradcheck(lambda t, make=make: materialize(make(t), torch.arange(4), dtype=F64), (table,))


def test_lookups_refuse_real_positions():
    for bias in (TABLE, QueryTableBias(normal(HEADS, Q, 6), 2), SLOPES + TABLE):
        for form in (materialize, score_mod):
            with pytest.raises(TypeError, match="because it looks distances up in a table"):
                form(bias, torch.zeros(Q))
    assert materialize(SLOPES, torch.zeros(Q)).shape == (HEADS, Q, Q)


@pytest.mark.parametrize("form", [materialize, score_mod])
def test_half_precision_and_nan_positions_are_refused(form):
    with pytest.raises(TypeError, match=f"{form.__name__}: .*half precision cannot"):
        form(SLOPES, torch.zeros(Q, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="positions hold nan"):
        form(SLOPES, torch.tensor([float("nan")]))


def test_sums_need_one_head_count():
    with pytest.raises(ShapeError, match=r"terms of \[3, 2\] heads"):
        SLOPES + TableBias(normal(2, 3), (0,))
    with pytest.raises(ShapeError, match="at least one term"):
        SumBias(())


def test_tables_need_a_zero_for_each_axis():
    with pytest.raises(ShapeError, match="Expected one per axis"):
        materialize(TableBias(normal(HEADS, 3, 3), (1,)), torch.arange(3))


def test_no_tokens_no_entries():
    none = torch.arange(0)
    assert materialize(SLOPES, none, torch.arange(3)).shape == (HEADS, 0, 3)
    assert materialize(TABLE, torch.arange(2), none).shape == (HEADS, 2, 0)
