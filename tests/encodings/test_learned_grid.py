"""A row per cell: reading, prefixes, sizes, checkpoints."""

from __future__ import annotations

import pytest
import torch

from posenc import ShapeError, grid
from posenc.convert import resize_table
from posenc.encodings.learned_grid import LearnedGrid
from posenc.testing import SHAPE, conform


def oracle(encoding, x, positions):
    """Dosovitskiy et al. 2020, §3.1: one row per patch, patches in raster order."""
    table, width = encoding.weight.detach().double(), encoding.grid[1]
    out = x.double().clone()
    for token, (row, column) in enumerate(positions.tolist()):
        out[token] += table[row * width + column]
    return out


def test_conforms():
    conform(LearnedGrid, oracle, other=lambda shape: LearnedGrid(shape.dim, (shape.max_length, 3)))


def test_the_spec_builds_a_grid_that_holds_any_picture_of_the_length():
    (made,) = LearnedGrid.spec.build(SHAPE)
    assert (made.axes, made.grid, made.prefix) == (2, (SHAPE.max_length, SHAPE.max_length), 0)


def numbered(dim=1, **arguments):
    """A table whose row r holds r in every channel."""
    encoding = LearnedGrid(dim, **arguments)
    with torch.no_grad():
        encoding.weight.copy_(torch.arange(len(encoding.weight))[:, None].expand_as(encoding.weight))
    return encoding


def test_cells_are_read_row_after_row():
    # huggingface/transformers#41380: a grid that is not square
    encoding = numbered(grid=(3, 4))
    assert encoding(torch.zeros(12, 1), grid(3, 4).positions)[:, 0].tolist() == list(range(12))
    assert encoding(torch.zeros(2, 1), torch.tensor([[2, 1], [0, 3]]))[:, 0].tolist() == [9, 3]


def test_prefix_tokens_read_the_first_rows_in_order():
    encoding = numbered(grid=(2, 3), prefix=2)
    at = grid(2, 3, prefix=2).positions
    assert encoding(torch.zeros(8, 1), at)[:, 0].tolist() == list(range(8))
    # patches may be missing or in any order, as in masked training; the prefix stays in front
    some = at[[0, 1, 7, 3]]
    assert encoding(torch.zeros(4, 1), some)[:, 0].tolist() == [0, 1, 7, 3]
    assert encoding(torch.zeros(2, 4, 1), torch.stack([some, some.flip(0)]))[1, :, 0].tolist() == [0, 1, 2, 2]
    assert encoding(torch.zeros(2, 1), at[:2])[:, 0].tolist() == [0, 1]


def test_gradients_reach_the_rows_that_were_read():
    encoding = LearnedGrid(2, (2, 2), prefix=1)
    encoding(torch.zeros(3, 2), torch.tensor([[0, 0], [1, 0], [1, 0]])).sum().backward()
    assert encoding.weight.grad[:, 0].tolist() == [1, 0, 0, 2, 0]


def test_prefix_compiles_and_refuses():
    torch.compiler.reset()
    encoding = LearnedGrid(4, (5, 3), prefix=1)
    compiled = torch.compile(encoding, fullgraph=True, backend="aot_eager")
    for height in (2, 3, 4):
        at, x = grid(height, 3, prefix=1).positions, torch.randn(2, 3 * height + 1, 4)
        assert torch.equal(compiled(x, at), encoding(x, at))
    with pytest.raises(RuntimeError, match="a value check failed"):
        compiled(torch.zeros(1, 3, 4), torch.tensor([[0, 0], [5, 0], [0, 0]]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_narrow_integers_do_not_wrap(dtype):
    encoding = numbered(grid=(20, 20))
    assert encoding(torch.zeros(1, 1), torch.tensor([[19, 19]], dtype=dtype)).item() == 399


@pytest.mark.parametrize("cell", [[3, 0], [0, 4], [-1, 0], [0, -1], [1 << 40, 0]])
def test_cells_outside_are_refused(cell):
    # [0, 4] would silently read the first cell of the next row
    with pytest.raises(ValueError, match=r"LearnedGrid: position \(.*\) of a grid of \(3, 4\). Expected rows from 0 to 2 and"):
        LearnedGrid(2, (3, 4))(torch.zeros(2, 2), torch.tensor([[0, 0], cell]))


def test_positions_of_the_prefix_do_not_matter():
    encoding = LearnedGrid(2, (3, 4), prefix=1)
    x = torch.zeros(2, 2)
    assert torch.equal(encoding(x, torch.tensor([[-1, -1], [0, 0]])), encoding(x, torch.tensor([[0, 0], [0, 0]])))


@pytest.mark.parametrize("size", [(5, 5), (2, 9), (1, 1)])
@pytest.mark.parametrize("mode", ["bicubic", "linear"])
def test_resized_is_resize_table(size, mode):
    # facebookresearch/dinov2#431: the class row is no part of the picture
    encoding = LearnedGrid(6, (4, 4), prefix=1).eval()
    encoding.weight.requires_grad_(False)
    made = encoding.resized(size, mode=mode)
    expected = resize_table(encoding.weight, size, grid=(4, 4), prefix=1, mode=mode)
    assert torch.equal(made.weight, expected)
    assert torch.equal(made.weight[0], encoding.weight[0])
    assert (made.grid, made.prefix, made.training, made.weight.requires_grad) == (size, 1, False, False)
    assert len(made.weight) == 1 + size[0] * size[1]


def test_resized_to_its_own_size_is_a_copy():
    encoding = LearnedGrid(6, (3, 4), prefix=2, dtype=torch.bfloat16)
    made = encoding.resized((3, 4))
    assert torch.equal(made.weight, encoding.weight)
    assert made.weight.dtype == torch.bfloat16
    assert made.weight.requires_grad
    assert made.weight.is_leaf
    with torch.no_grad():
        made.weight.zero_()
    assert encoding.weight.any()


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_of_another_size_is_refused_with_the_way_out(strict):
    checkpoint = torch.nn.ModuleDict({"pos": LearnedGrid(4, (14, 14), prefix=1)}).state_dict()
    model = torch.nn.ModuleDict({"pos": LearnedGrid(4, (16, 16), prefix=1)})
    before = model["pos"].weight.detach().clone()
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(checkpoint, strict=strict)
    message = str(caught.value)
    assert (
        "LearnedGrid: pos.weight of shape (197, 4) in the state dict. Expected (257, 4): prefix = 1 and a grid of 16 × 16"
        in message
    )
    assert "take .resized((16, 16)); or load posenc.convert.resize_table(weight, (16, 16), prefix=1)" in message
    assert "size mismatch" not in message
    assert torch.equal(model["pos"].weight, before)
    # and what the message says works
    weight = resize_table(checkpoint["pos.weight"], (16, 16), prefix=1)
    model.load_state_dict({"pos.weight": weight}, strict=strict)
    assert torch.equal(model["pos"].weight, LearnedGridOf(checkpoint["pos.weight"]).resized((16, 16)).weight)


def LearnedGridOf(weight):  # noqa: N802
    made = LearnedGrid(4, (14, 14), prefix=1)
    made.load_state_dict({"weight": weight})
    return made


def test_missing_and_unexpected_keys_are_torch_s_business():
    with pytest.raises(RuntimeError, match="Missing key"):
        LearnedGrid(4, (2, 2)).load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        LearnedGrid(4, (2, 2)).load_state_dict({"weight": torch.zeros(4, 4), "bias": torch.zeros(4)})


def test_the_table_of_a_vit_loads():
    vit = pytest.importorskip("transformers.models.vit.modeling_vit")
    config = pytest.importorskip("transformers").ViTConfig(hidden_size=8, image_size=8, patch_size=2, num_attention_heads=2)
    theirs = vit.ViTEmbeddings(config).eval()
    with torch.no_grad():
        theirs.position_embeddings.normal_()
    encoding = LearnedGrid(8, (4, 4), prefix=1)
    encoding.load_state_dict({"weight": theirs.position_embeddings[0]})
    pixels = torch.randn(1, 3, 8, 8)
    tokens = torch.cat([theirs.cls_token, theirs.patch_embeddings(pixels)], dim=1)
    assert torch.equal(encoding(tokens, grid(4, 4, prefix=1).positions), theirs(pixels))


def test_rows_start_small():
    # the deviation of 65,600 draws strays by σ/√(2n), here 0.3 %; five of those
    assert LearnedGrid(64, (32, 32), prefix=1).weight.std().item() == pytest.approx(0.02, rel=0.014)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, (2, 2)), ValueError, "dim = 0"),
        ((4, (0, 2)), ValueError, "grid height = 0"),
        ((4, (2, 2.5)), TypeError, "grid width = 2.5"),
        ((4, 14), ValueError, r"grid = 14. Expected \(height, width\)"),
        ((4, (1, 2, 3)), ValueError, r"grid = \(1, 2, 3\)"),
        ((4, (2, 2), -1), ValueError, "prefix = -1"),
    ],
)
def test_impossible_settings_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"LearnedGrid: {message}"):
        LearnedGrid(*arguments)


@pytest.mark.parametrize(
    ("width", "positions", "error", "message"),
    [
        (3, torch.zeros(2, 2, dtype=torch.int64), ShapeError, "x has width 3. Expected 4"),
        (4, torch.zeros(2, 2), TypeError, "because each reads a row of the table"),
        (4, torch.arange(2), ShapeError, "positions have shape"),
        (4, 0, TypeError, "for 2 axes"),
    ],
)
def test_impossible_inputs_are_refused(width, positions, error, message):
    with pytest.raises(error, match=f"LearnedGrid: .*{message}"):
        LearnedGrid(4, (2, 2))(torch.zeros(2, width), positions)


def test_fewer_tokens_than_the_prefix_are_refused():
    with pytest.raises(ShapeError, match="LearnedGrid: 1 tokens with prefix = 2. Expected at least the prefix"):
        LearnedGrid(4, (2, 2), prefix=2)(torch.zeros(1, 4), torch.zeros(1, 2, dtype=torch.int64))
