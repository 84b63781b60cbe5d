"""Tokens of text, pictures and videos: positions by the papers' rule, padding, packing, decoding, and transformers' numbers."""

from __future__ import annotations

from functools import partial
from math import pi, trunc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import (
    GrowingCache,
    ShapeError,
    causal,
    contiguous,
    decode,
    grid,
    packed,
    padded,
    positional_attention,
)
from posenc.core.multimodal import multimodal, next_positions, on_axes, patch_centres
from posenc.encodings.mrope import MRoPE

EXAMPLE = [[3, 0, 0], [1, 2, 2], [2, 0, 0]]


def laid_out(blocks, steps=None, documents=None):
    """Qwen2-VL, §2.1, and Qwen2.5-VL, §2.1.2, block by block: each starts one past the largest number so far."""
    places, segments, farthest, last = [], [], -1, None
    for index, (t, h, w) in enumerate(blocks):
        document = 0 if documents is None else documents[index]
        if document != last:
            farthest, last = -1, document
        start, step = farthest + 1, 1 if steps is None else steps[index]
        if h == 0:
            block = [[start + i] * 3 for i in range(t)]
        else:
            block = [[start + trunc(f * step), start + r, start + c] for f in range(t) for r in range(h) for c in range(w)]
        places += block
        segments += [document] * len(block)
        farthest = max([farthest, *(number for place in block for number in place)])
    return places, segments, farthest + 1


def check_row(positions, segments, blocks, side="right", **settings):
    places, numbers, _ = laid_out(blocks, **settings)
    spare = len(segments) - len(places)
    fill = ([[0, 0, 0]] * spare, [-1] * spare)
    before, after = (fill, ([], [])) if side == "left" else (([], []), fill)
    assert positions.tolist() == before[0] + places + after[0]
    assert segments.tolist() == before[1] + numbers + after[1]


BLOCKS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 4), st.just(0), st.just(0)),
        st.tuples(st.just(1), st.integers(1, 3), st.integers(1, 4)),
        st.tuples(st.integers(1, 5), st.integers(1, 2), st.integers(1, 3)),
    ),
    max_size=5,
)


def table(rows):
    """Rows of blocks, filled up to the longest with empty ones."""
    longest = max(map(len, rows))
    filled = [list(row) + [(0, 0, 0)] * (longest - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.int64).reshape(len(rows), longest, 3)


@given(st.lists(BLOCKS, min_size=1, max_size=3), st.integers(0, 3), st.sampled_from(["right", "left"]))
def test_any_blocks_stand_where_the_paper_puts_them(rows, spare, side):
    total = max(len(laid_out(row)[0]) for row in rows) + spare
    tokens = multimodal(table(rows), total, side=side)
    assert tokens.axes == 3
    assert tokens.positions.shape == (len(rows), total, 3)
    for row, blocks in enumerate(rows):
        check_row(tokens.positions[row], tokens.segments[row], blocks, side)
    assert next_positions(tokens).tolist() == [laid_out(row)[2] for row in rows]


@given(BLOCKS, st.data())
def test_any_clock_is_cut_before_the_start_is_added(blocks, data):
    steps = data.draw(st.lists(st.sampled_from([0, 0.4, 1, 1.5, 2.75, 50]), min_size=len(blocks), max_size=len(blocks)))
    total = len(laid_out(blocks)[0])
    grids = torch.tensor(blocks, dtype=torch.int64).reshape(-1, 3)
    tokens = multimodal(grids, total, time_step=torch.tensor(steps, dtype=torch.float64))
    check_row(tokens.positions, tokens.segments, blocks, steps=steps)


@given(BLOCKS, st.data(), st.sampled_from(["right", "left"]))
def test_any_documents_start_again(blocks, data, side):
    documents = sorted(data.draw(st.lists(st.integers(0, 3), min_size=len(blocks), max_size=len(blocks))))
    places, segments, _ = laid_out(blocks, documents=documents)
    grids = torch.tensor(blocks, dtype=torch.int64).reshape(-1, 3)
    tokens = multimodal(grids, len(places) + 2, documents=torch.tensor(documents, dtype=torch.int64), side=side)
    check_row(tokens.positions, tokens.segments, blocks, side, documents=documents)
    last = [max(place) for place, document in zip(places, segments, strict=True) if document == segments[-1]]
    assert next_positions(tokens).item() == max(last, default=-1) + 1


def test_worked_example():
    # huggingface/transformers#35569, linkedin/Liger-Kernel#276: text after a picture starts past every axis
    tokens = multimodal(torch.tensor(EXAMPLE), 9)
    assert tokens.positions.T.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 3, 4, 4, 5, 6],
        [0, 1, 2, 3, 4, 3, 4, 5, 6],
    ]
    assert (next_positions(tokens) - 9).item() == -2
    assert multimodal(torch.tensor(EXAMPLE, dtype=torch.int32), 9).positions.dtype == torch.int64


def test_text_after_a_long_video_starts_past_its_last_frame():
    tokens = multimodal(torch.tensor([[4, 1, 2], [1, 0, 0]]), 9)
    assert tokens.positions[-1].tolist() == [4, 4, 4]
    slow = multimodal(torch.tensor([[4, 1, 2], [1, 0, 0]]), 9, time_step=torch.tensor([25.0, 25.0]))
    assert slow.positions[:, 0].tolist() == [0, 0, 25, 25, 50, 50, 75, 75, 76]


def test_the_clock_is_cut_in_its_own_dtype():
    # 10 · float32(0.7) is 6.99999988, which float32 rounds to 7
    step = torch.tensor([0.7], dtype=torch.float32)
    assert multimodal(torch.tensor([[11, 1, 1]]), 11, time_step=step).positions[-1, 0] == 7
    assert multimodal(torch.tensor([[11, 1, 1]]), 11, time_step=step.double()).positions[-1, 0] == 6


def test_packed_documents_are_the_documents_alone():
    rows = [EXAMPLE, [[1, 3, 2], [2, 0, 0]]]
    together = multimodal(torch.tensor(rows[0] + rows[1]), 17, documents=torch.tensor([0, 0, 0, 1, 1]))
    alone = [multimodal(torch.tensor(row), total) for row, total in zip(rows, (9, 8), strict=True)]
    assert torch.equal(together.positions, torch.cat([tokens.positions for tokens in alone]))
    assert together.segments.tolist() == [0] * 9 + [1] * 8


def test_text_alone_is_what_other_builders_make():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    tokens, plain = multimodal(torch.tensor([[[3, 0, 0]], [[5, 0, 0]]]), 5, side="left"), on_axes(padded(mask), 3)
    assert torch.equal(tokens.positions, plain.positions)
    assert torch.equal(tokens.segments, plain.segments)
    documents = multimodal(torch.tensor([[5, 0, 0], [4, 0, 0]]), 9, documents=torch.tensor([0, 1]))
    lengths = on_axes(packed(torch.tensor([0, 5, 9]), 9), 3)
    assert torch.equal(documents.positions, lengths.positions)
    assert torch.equal(documents.segments, lengths.segments)


def test_no_blocks_and_no_tokens():
    assert multimodal(torch.zeros(2, 0, 3, dtype=torch.int64), 2).segments.tolist() == [[-1, -1]] * 2
    empty = multimodal(torch.zeros(2, 1, 3, dtype=torch.int64), 0, documents=torch.zeros(2, 1, dtype=torch.int64))
    assert empty.positions.shape == (2, 0, 3)
    assert next_positions(empty).tolist() == [0, 0]


def test_decoding_goes_on_after_the_largest_position():
    rows = table([EXAMPLE, [(1, 3, 3), (2, 0, 0)]])
    prompt = multimodal(rows, 11, side="left")
    step = on_axes(decode(next_positions(prompt), 2), 3)
    assert step.positions[..., 0].tolist() == [[7, 8], [5, 6]]
    assert step.axes == 3
    assert next_positions(step).tolist() == [9, 7]
    assert next_positions(contiguous(4)).item() == 4
    assert next_positions(padded(torch.tensor([[0, 1, 1], [0, 0, 0]]))).tolist() == [2, 0]
    assert next_positions(grid(2, 5)).item() == 5


def test_cached_decoding_equals_the_whole_sequence():
    rope, q = MRoPE(8, (2, 1, 1)), torch.randn(2, 2, 13, 8, dtype=torch.float64)
    blocks = [EXAMPLE, [(1, 3, 3)]]
    prompt = multimodal(table(blocks), 9)
    whole = multimodal(table([[*row, (4, 0, 0)] for row in blocks]), 13)
    expected = positional_attention(q, q, q, encodings=[rope], positions=whole, mask=causal(whole))
    cache = GrowingCache()
    for first, n in ((0, 9), (9, 1), (10, 3)):
        tokens = on_axes(decode(next_positions(prompt) + first - 9, n), 3) if first else prompt
        part = q[:, :, first : first + n]
        actual = positional_attention(
            part, part, part, encodings=[rope], positions=tokens, mask=causal(*cache.place(tokens)), cache=cache
        )
        torch.testing.assert_close(actual, expected[:, :, first : first + n], rtol=0.0, atol=1e-12)


def test_one_graph_for_any_sizes():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def build(grids, total, time_step, documents):
        tokens = multimodal(grids, total, time_step=time_step, documents=documents, side="left")
        return tokens, on_axes(decode(next_positions(tokens)), 3)

    compiled = torch.compile(build, fullgraph=True, backend=counter)
    for rows, total in (([EXAMPLE, [(1, 3, 2)]], 9), ([EXAMPLE * 2] * 3, 20), ([[(5, 2, 2)] * 7] * 4, 150)):
        grids = table(rows)
        steps, documents = torch.full(grids.shape[:-1], 1.5), torch.arange(grids.shape[1]).expand(grids.shape[:-1])
        for actual, expected in zip(
            compiled(grids, total, steps, documents), build(grids, total, steps, documents), strict=True
        ):
            assert torch.equal(actual.positions, expected.positions)
            assert actual.segments is expected.segments is None or torch.equal(actual.segments, expected.segments)
    assert counter.frame_count <= 2


def released(name, cls):
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    model = getattr(modeling, cls)
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    place = partial(model.get_vision_position_ids, None)
    return partial(
        model.get_rope_index, SimpleNamespace(config=SimpleNamespace(vision_config=vision), get_vision_position_ids=place)
    )


def as_transformers(rows, total, side):
    """Token types, mask and grids in patches for rows of blocks; more than one frame is a video."""
    kinds, mask, images, videos = [], [], [], []
    for row in rows:
        kind = []
        for t, h, w in row:
            kind += [0] * t if h == 0 else [1 if t == 1 else 2] * (t * h * w)
            if h:
                (images if t == 1 else videos).append([t, 2 * h, 2 * w])
        spare = [0] * (total - len(kind))
        real = [1] * len(kind)
        kinds.append(spare + kind if side == "left" else kind + spare)
        mask.append(spare + real if side == "left" else real + spare)
    as_grid = [torch.tensor(grids) if grids else None for grids in (images, videos)]
    return torch.tensor(kinds), torch.tensor(mask), *as_grid


# videos that are no longer than they are high or wide, with text between: there version 5 follows the papers
ROWS = [
    [(3, 0, 0), (1, 2, 4), (2, 0, 0), (2, 3, 2), (1, 0, 0)],
    [(1, 3, 3), (5, 0, 0)],
    [(2, 0, 0), (2, 2, 2)],
    [(7, 0, 0)],
]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("name", "cls"), [("qwen2_vl", "Qwen2VLModel"), ("qwen2_5_vl", "Qwen2_5_VLModel"), ("glm46v", "Glm46VModel")]
)
def test_positions_equal_transformers(name, cls, side):
    index = released(name, cls)
    rows = ROWS if name != "glm46v" else [[b for b in row if b[0] == 1 or not b[1]] for row in ROWS]  # a video is frames there
    kinds, mask, images, videos = as_transformers(rows, 30, side)
    # half a second per frame and two positions per second: one position per frame
    clock = {"second_per_grid_ts": torch.full((2,), 0.5)} if name == "qwen2_5_vl" else {}
    theirs, deltas = index(kinds, kinds, image_grid_thw=images, video_grid_thw=videos, attention_mask=mask, **clock)
    tokens = multimodal(table(rows), 30, side=side)
    assert torch.equal(tokens.positions.movedim(-1, 0), theirs)
    assert torch.equal(tokens.segments, mask - 1)
    assert torch.equal(next_positions(tokens) - mask.sum(-1), deltas[:, 0])


def test_frames_as_pictures_equal_qwen3_vl():
    # a video is a row of pictures between timestamps there
    index = released("qwen3_vl", "Qwen3VLModel")
    rows = [[(3, 0, 0), (1, 2, 4), (2, 0, 0), (1, 2, 4), (2, 0, 0), (1, 2, 4), (1, 0, 0)]]
    kinds, mask, images, _ = as_transformers(rows, 35, "right")
    video = {"video_grid_thw": torch.tensor([[3, 4, 8]])}
    theirs, deltas = index(kinds, torch.where(kinds == 1, 2, 0), attention_mask=mask, **video)
    tokens = multimodal(table(rows), 35)
    assert images.shape == (3, 3)
    assert torch.equal(tokens.positions.movedim(-1, 0), theirs)
    assert torch.equal(next_positions(tokens) - mask.sum(-1), deltas[:, 0])


@pytest.mark.parametrize("seconds", [0.5, 1.0, 0.7, 1 / 3])
def test_the_clock_equals_qwen2_5_vl(seconds):
    # the video last: what version 5 puts after it starts elsewhere
    index = released("qwen2_5_vl", "Qwen2_5_VLModel")
    rows = [[(3, 0, 0), (9, 1, 2)]]
    kinds, mask, _, videos = as_transformers(rows, 21, "right")
    interval = torch.tensor([seconds])
    theirs, deltas = index(kinds, kinds, video_grid_thw=videos, attention_mask=mask, second_per_grid_ts=interval)
    tokens = multimodal(table(rows), 21, time_step=torch.stack([torch.ones(1), 2 * interval], -1))
    assert torch.equal(tokens.positions.movedim(-1, 0), theirs)
    assert torch.equal(next_positions(tokens) - mask.sum(-1), deltas[:, 0])


def test_patch_centres_are_those_of_dinov3():
    tokens = patch_centres(14, 14, extent=2 * pi, prefix=5)
    assert tokens.axes == 2
    assert tokens.positions.shape == (201, 2)
    assert tokens.positions[:5].eq(0).all()
    assert tokens.positions[5].tolist() == pytest.approx([-5.834386357] * 2, rel=1e-9)
    assert patch_centres(14, 1).positions[0].tolist() == pytest.approx([-0.9285714286, 0], rel=1e-9)
    # row-major, as grid counts
    wide = patch_centres(3, 4).positions.view(3, 4, 2)
    assert wide[:, 0, 0].tolist() == pytest.approx([-2 / 3, 0, 2 / 3])
    assert wide[0, :, 1].tolist() == pytest.approx([-0.75, -0.25, 0.25, 0.75])


def test_float32_patch_centres_equal_transformers():
    dinov3 = pytest.importorskip("transformers.models.dinov3_vit.modeling_dinov3_vit")
    theirs = dinov3.get_patches_center_coordinates(5, 7, torch.float32, torch.device("cpu"))
    assert torch.equal(patch_centres(5, 7, dtype=torch.float32).positions, theirs)


@pytest.mark.parametrize(
    ("grids", "settings", "error", "message"),
    [
        ([[10, 0, 0]], {}, ValueError, "the blocks hold 10 tokens with total = 9"),
        ([[-1, 0, 0]], {}, ValueError, r"Expected \(n, 0, 0\) for text, or three sizes of 1 or more"),
        ([[1, 0, 3]], {}, ValueError, r"grids = \[\[1, 0, 3\]\]"),
        ([[1, 3, 0]], {}, ValueError, r"grids = \[\[1, 3, 0\]\]"),
        ([[0, 2, 2]], {}, ValueError, "Give pictures a time of 1"),
        ([[1.0, 0, 0]], {}, TypeError, "multimodal: grids is torch.float32. Expected an integer tensor"),
        ([[1, 2]], {}, ShapeError, r"grids of shape \(1, 2\). Expected \[\*batch, blocks, 3\]"),
        ([1, 2, 2], {}, ShapeError, r"grids of shape \(3,\)"),
        (EXAMPLE, {"side": "top"}, ValueError, "side = 'top'. Expected 'right' or 'left'"),
        (EXAMPLE, {"time_step": torch.ones(2)}, ShapeError, r"time_step of shape \(2,\) for grids of shape \(3, 3\)"),
        (EXAMPLE, {"time_step": -torch.ones(3)}, ValueError, "Expected numbers of 0 or more"),
        (EXAMPLE, {"time_step": torch.full((3,), torch.inf)}, ValueError, "multimodal: time_step: positions hold inf"),
        (EXAMPLE, {"time_step": torch.ones(3).half()}, TypeError, "half precision"),
        (EXAMPLE, {"documents": torch.zeros(1, 3, dtype=torch.int64)}, ShapeError, r"documents of shape \(1, 3\)"),
        (EXAMPLE, {"documents": torch.tensor([0, 1, 0])}, ValueError, "numbers from 0 that never fall"),
        (EXAMPLE, {"documents": torch.tensor([-1, 0, 0])}, ValueError, "numbers from 0 that never fall"),
        (EXAMPLE, {"documents": torch.zeros(3)}, TypeError, "multimodal: documents is torch.float32"),
        (EXAMPLE, {"total": 9.0}, TypeError, "multimodal: total = 9.0. Expected an integer"),
    ],
)
def test_impossible_blocks_are_refused(grids, settings, error, message):
    with pytest.raises(error, match=message):
        multimodal(torch.tensor(grids), **({"total": 9} | settings))


def test_impossible_builders_are_refused():
    with pytest.raises(ShapeError, match="on_axes: tokens of 2 axes. Expected tokens of one axis"):
        on_axes(grid(2, 2), 3)
    with pytest.raises(ValueError, match="on_axes: axes = 0"):
        on_axes(contiguous(2), 0)
    with pytest.raises(ValueError, match=r"patch_centres: sizes = \(\)"):
        patch_centres()
    with pytest.raises(ValueError, match="extent = inf"):
        patch_centres(2, extent=float("inf"))
    with pytest.raises(ValueError, match="size of axis 1 = -1"):
        patch_centres(2, -1)
    with pytest.raises(TypeError, match="patch_centres: dtype = torch.bfloat16"):
        patch_centres(2, dtype=torch.bfloat16)
