"""A bias per offset in a window: indices, windows of any form, segments, sizes, checkpoints, transformers' Swin."""

from __future__ import annotations

import pytest
import torch

from posenc import (
    ShapeError,
    Tokens,
    Transformer,
    attention,
    grid,
    materialize,
    positional_attention,
    same_segment,
    score_mod,
    slice_heads,
)
from posenc.convert import resize_table
from posenc.encodings.swin import SwinBias
from posenc.testing import SHAPE, conform

F64 = torch.float64


def oracle(encoding, positions, k_positions):
    """Liu et al. 2021, §3.2: B has (2M - 1)² values per head, one per relative position along both axes."""
    height, width = encoding.window
    table = encoding.relative_position_bias_table.detach().double().tolist()
    bias = torch.zeros(encoding.heads, len(positions), len(k_positions), dtype=F64)
    for i, (row, column) in enumerate(positions.tolist()):
        for j, (k_row, k_column) in enumerate(k_positions.tolist()):
            down = max(1 - height, min(height - 1, row - k_row))
            right = max(1 - width, min(width - 1, column - k_column))
            scalars = table[(down + height - 1) * (2 * width - 1) + right + width - 1]
            bias[:, i, j] = torch.tensor(scalars, dtype=F64)
    return bias


@pytest.mark.parametrize("window", [(3, 5), (2, 1)])
def test_conforms(window):
    conform(
        lambda shape: SwinBias(shape.heads, window),
        oracle,
        claims=SwinBias.spec.claims,
        other=lambda shape: SwinBias(shape.heads, (7, 2)),
        skip=() if window == (3, 5) else {"graph capture"},
    )


def test_the_spec_builds_the_window_of_the_paper():
    (made,) = SwinBias.spec.build(SHAPE)
    assert (made.axes, made.heads, made.window) == (2, SHAPE.heads, (7, 7))
    assert made.relative_position_bias_table.shape == (169, SHAPE.heads)


def numbered(window, heads=1):
    """A table whose row r holds r."""
    encoding = SwinBias(heads, window)
    with torch.no_grad():
        table = encoding.relative_position_bias_table
        table.copy_(torch.arange(len(table))[:, None].expand_as(table))
    return encoding


def rows_read(window):
    return materialize(numbered(window)(), grid(*window).positions)[0].to(torch.int64).tolist()


def test_worked_rows():
    # microsoft/Swin-Transformer#281, #139, leondgarse/keras_cv_attention_models#26: the stride of windows that are no squares
    assert rows_read((2, 2)) == [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]
    two_by_three = rows_read((2, 3))
    assert two_by_three[0] == [7, 6, 5, 2, 1, 0]
    assert two_by_three[5] == [14, 13, 12, 9, 8, 7]
    assert len(numbered((2, 3)).relative_position_bias_table) == 15


@pytest.mark.parametrize("window", [(2, 3), (3, 2), (1, 5), (5, 1), (4, 4), (1, 1)])
def test_each_offset_has_a_row_of_its_own_and_each_row_an_offset(window):
    cells = grid(*window).positions
    offsets = (cells[:, None] - cells[None]).flatten(0, 1).tolist()
    read = {}
    for offset, row in zip(offsets, [row for rows in rows_read(window) for row in rows], strict=True):
        assert read.setdefault(tuple(offset), row) == row
    assert sorted(read.values()) == list(range((2 * window[0] - 1) * (2 * window[1] - 1)))


def test_offsets_past_the_window_read_its_border():
    at = torch.tensor([[0, 0], [9, 0], [0, -9], [-9, 9]])
    bias = materialize(numbered((2, 3))(), at, at[:1])[0, :, 0]
    assert bias.tolist() == [7.0, 12.0, 5.0, 4.0]


def parts(length, heads=4, kv_heads=2, batch=2, dim=8):
    q = torch.randn(batch, heads, length, dim, dtype=F64)
    k, v = torch.randn(2, batch, kv_heads, length, dim, dtype=F64).unbind()
    return q, k, v


def near(actual, expected):
    # a dozen scores of 8 products near 8 at most, exponentials and sums: some hundred roundings of numbers near 1
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=256 * 2**-53 * 8)


def test_a_picture_in_windows_is_each_window_alone():
    """Windows as segments of one picture, shifted ones too, against the cells of each window by themselves."""
    encoding, cells, (q, k, v) = SwinBias(4, (2, 3)).double(), grid(4, 6), parts(24)
    for shift in (0, 1):
        down, right = ((cells.positions[:, axis] + shift) // size for axis, size in enumerate(encoding.window))
        window = down * 4 + right
        tokens = Tokens(cells.positions, None, window, 2)
        together = positional_attention(q, k, v, encodings=[encoding], positions=tokens, mask=same_segment(window))
        for number in window.unique():
            own = window == number
            q_own, k_own, v_own = (t[:, :, own] for t in (q, k, v))
            at = cells.positions[own]
            alone = positional_attention(q_own, k_own, v_own, encodings=[encoding], positions=at - at.amin(0))
            near(together[:, :, own], alone)


def test_rows_of_a_batch_have_their_own_cells():
    bias = SwinBias(4, (3, 3)).double()()
    at = torch.stack([grid(3, 3).positions, grid(3, 3).positions.flip(0)])
    both = materialize(bias, at, dtype=F64)
    assert both.shape == (2, 4, 9, 9)
    assert torch.equal(both[1], both[0].flip(-1, -2))
    few = materialize(slice_heads(bias, slice(1, 3)), at[:, 2:4], at, dtype=F64)
    assert torch.equal(few, both[:, 1:3, 2:4])
    entry = score_mod(bias, at)(torch.zeros((), dtype=F64), *(torch.tensor(i) for i in (1, 3, 5, 2)))
    assert entry == both[1, 3, 5, 2]


def test_gradients_reach_the_rows_that_were_read():
    encoding = SwinBias(1, (2, 3))
    materialize(encoding(), grid(1, 3).positions).sum().backward()
    assert encoding.relative_position_bias_table.grad[:, 0].tolist() == [0] * 5 + [1, 2, 3, 2, 1] + [0] * 5
    encoding, (q, k, v) = SwinBias(2, (2, 2)).double(), parts(4, 2, 1, batch=1, dim=4)
    at, table = grid(2, 2), encoding.relative_position_bias_table

    def call(q, table):
        return positional_attention(q, k, v, encodings=[encoding], positions=at, backend="reference")

    assert torch.autograd.gradcheck(call, (q.requires_grad_(), table))


def test_an_encoder_of_pictures_trains():
    model = Transformer(7, dim=16, layers=2, heads=4, kind="encoder", encodings=lambda layer: [SwinBias(4, (2, 3))])
    ids, at = torch.randint(0, 7, (2, 6)), grid(2, 3)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(torch.nn.functional.cross_entropy(model(ids, at).flatten(0, 1), ids.flatten().flip(0)))
        losses[-1].backward()
        assert all(bool((swin.relative_position_bias_table.grad != 0).all()) for swin in model.encodings)
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]


def test_another_window_stretches_the_table():
    encoding = SwinBias(2, (3, 4)).double()
    wider = encoding.resized((5, 4), mode="linear")
    assert (wider.window, wider.relative_position_bias_table.dtype) == ((5, 4), F64)
    expected = resize_table(encoding.relative_position_bias_table.detach(), (9, 7), grid=(5, 7), mode="linear")
    assert torch.equal(wider.relative_position_bias_table, expected)
    assert torch.equal(wider().table[:, 4, 3], encoding().table[:, 2, 3])  # the cell itself stays in the middle
    assert torch.equal(encoding.resized((3, 4)).relative_position_bias_table, encoding.relative_position_bias_table)
    frozen = encoding.requires_grad_(False).eval().resized((2, 2))
    assert not frozen.training
    assert not frozen.relative_position_bias_table.requires_grad


def test_transformers_swin_loads_and_agrees():
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    config = pytest.importorskip("transformers").SwinConfig(
        embed_dim=32, num_heads=[4], depths=[1], window_size=3, attention_probs_dropout_prob=0.0, attn_implementation="eager"
    )  # fmt: skip
    theirs = swin.SwinAttention(config, 32, 4, 3).double().eval()
    module = theirs.relative_position_bias
    with torch.no_grad():
        module.relative_position_bias_table.normal_()
    encoding = SwinBias(4, (3, 3)).double()
    # with the index that older checkpoints hold
    encoding.load_state_dict({**module.state_dict(), "relative_position_index": module.relative_position_index})
    cells, x = grid(3, 3), torch.randn(2, 9, 32, dtype=F64)
    assert torch.equal(materialize(encoding(), cells.positions, dtype=F64), module()[0])
    q, k, v = (
        projection(x).unflatten(-1, (4, 8)).transpose(1, 2) for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    )
    ours = positional_attention(q, k, v, encodings=[encoding], positions=cells)
    # their softmax is float32: 2^-24 of weights below 1 in a sum of nine, projected by rows of 32 numbers near 1/5
    torch.testing.assert_close(theirs.o_proj(ours.transpose(1, 2).flatten(2)), theirs(x)[0], rtol=0.0, atol=9 * 32 * 2**-24)
    not_square = swin.SwinRelativePositionBias(4, (2, 5)).double()
    with torch.no_grad():
        not_square.relative_position_bias_table.normal_()
    other = SwinBias(4, (2, 5)).double()
    other.load_state_dict(not_square.state_dict())
    assert torch.equal(materialize(other(), grid(2, 5).positions, dtype=F64), not_square()[0])


def test_another_size_in_a_checkpoint_is_explained():
    model = torch.nn.ModuleDict({"bias": SwinBias(3, (2, 2))})
    given = {"bias.relative_position_bias_table": torch.zeros(169, 3)}
    with pytest.raises(
        RuntimeError, match=r"SwinBias: bias.relative_position_bias_table of shape \(169, 3\).*Expected \(9, 3\)"
    ):
        model.load_state_dict(given)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, (2, 2)), ValueError, "heads = 0. Expected an integer of 1 or more"),
        ((3, 7), ValueError, r"window = 7. Expected \(height, width\)"),
        ((3, (7, 7, 7)), ValueError, r"window = \(7, 7, 7\)"),
        ((3, (0, 2)), ValueError, "window height = 0"),
        ((3, (2, 2.5)), TypeError, "window width = 2.5"),
    ],
)
def test_impossible_settings_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"SwinBias: {message}"):
        SwinBias(*arguments)


def test_impossible_inputs_are_refused():
    encoding, q = SwinBias(2, (2, 2)), torch.zeros(1, 2, 4, 8)
    with pytest.raises(TypeError, match="TableBias: positions are torch.float32. Expected integers"):
        positional_attention(q, q, q, encodings=[encoding], positions=grid(2, 2).positions.float())
    with pytest.raises(TypeError, match="positions = 0. Expected a tensor .* for 2 axes"):
        positional_attention(q, q, q, encodings=[encoding], positions=0)
    with pytest.raises(ShapeError, match="positions have shape"):
        positional_attention(q, q, q, encodings=[encoding], positions=torch.arange(4))
    with pytest.raises(TypeError, match="positions=None with TableBias"):
        attention(q, q, q, bias=encoding())
    with pytest.raises(ShapeError, match="a bias of 2 heads for 4 query heads"):
        attention(q.repeat(1, 2, 1, 1), q, q, bias=encoding(), positions=grid(2, 2).positions)
