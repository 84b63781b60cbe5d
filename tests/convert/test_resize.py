"""Resizing learned tables: exact sizes, kept prefixes, both alignments, and what other libraries do where they are right."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from posenc import ShapeError
from posenc.convert import resize_table

F64 = torch.float64


def table(rows, dim=3, dtype=F64):
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(rows), dtype=F64).to(dtype)


def cubic(t):
    """Keys' kernel with a = -0.75, as image libraries have it."""
    t, a = abs(t), -0.75
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * (t**3 - 5 * t**2 + 8 * t - 4) if t < 2 else 0.0


def hat(t):
    return max(0.0, 1 - abs(t))


def line(values, size, kernel, reach, *, corners=False, smooth=False):
    """One axis by the definition: each new position is a weighted mean of old ones around its place."""
    old = len(values)
    scale = (old - 1) / max(size - 1, 1) if corners else old / size
    width = max(scale, 1.0) if smooth else 1.0
    out = []
    for i in range(size):
        place = i * scale if corners else (i + 0.5) * scale - 0.5
        near = range(int(place - reach * width) - 2, int(place + reach * width) + 3)
        weights = {j: kernel((j - place) / width) for j in near}
        if smooth:  # outside the table there is nothing; the weights that are left sum to one
            weights = {j: w for j, w in weights.items() if 0 <= j < old}
            total = sum(weights.values())
            weights = {j: w / total for j, w in weights.items()}
        out.append(sum(w * values[min(max(j, 0), old - 1)] for j, w in weights.items()))
    return torch.stack(out)


@pytest.mark.parametrize("mode", ["linear", "bicubic"])
@pytest.mark.parametrize(("rows", "to"), [(4, 7), (4, 8), (9, 5), (5, 14), (16, 3)])
@pytest.mark.parametrize("how", ["cells", "corners", "smooth"])
def test_lines_are_what_the_definition_says(mode, rows, to, how):
    weight = table(rows)
    kernel, reach = (hat, 1) if mode == "linear" else (cubic, 2)
    if how == "smooth" and mode == "bicubic":
        kernel = lambda t: cubic_pillow(t)  # noqa: E731  (PIL's a = -0.5 when smoothing)
    expected = line(list(weight), to, kernel, reach, corners=how == "corners", smooth=how == "smooth")
    got = resize_table(weight, to, mode=mode, align_corners=how == "corners", antialias=how == "smooth")
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def cubic_pillow(t):
    t, a = abs(t), -0.5
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * (t**3 - 5 * t**2 + 8 * t - 4) if t < 2 else 0.0


def test_published_values():
    ramp = torch.arange(4.0, dtype=F64)[:, None]
    half = resize_table(ramp, 7, mode="linear").flatten()
    torch.testing.assert_close(
        half, torch.tensor([0, 0.357143, 0.928571, 1.5, 2.071429, 2.642857, 3], dtype=F64), rtol=0, atol=1e-6
    )
    eight = resize_table(ramp, 8, mode="linear").flatten().tolist()
    assert eight == pytest.approx([0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3])


@pytest.mark.parametrize(("side", "sizes"), [(14, (61, 115, 122)), (37, (39, 43, 78, 86, 115, 123))])
def test_targets_are_exact_where_a_scale_loses_a_row(side, sizes):
    # facebookresearch/dinov2#378, #333; facebookresearch/dino#8
    weight = table(side * side, 1)
    for size in sizes:
        assert resize_table(weight, (size, size)).shape == (size * size, 1)
        lossy = F.interpolate(weight.T.reshape(1, 1, side, side), scale_factor=size / side, mode="bicubic")
        assert lossy.shape[-1] == size - 1, "the bug is still there to be avoided"


def test_prefix_rows_are_kept_and_wrong_ones_named():
    # facebookresearch/dinov2#431
    weight = table(17)
    bigger = resize_table(weight, (5, 5), prefix=1)
    assert bigger.shape == (26, 3)
    assert torch.equal(bigger[0], weight[0])
    with pytest.raises(ShapeError, match="14 rows after prefix = 1, which is no square. Expected prefix . height . width rows"):
        resize_table(table(15), (5, 5), prefix=1)
    assert resize_table(table(15), (5, 5), prefix=1, grid=(2, 7)).shape == (26, 3)


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16, torch.float16])
def test_the_same_size_gives_the_same_bits(dtype):
    weight = table(17, dtype=dtype)
    for options in ({}, {"offset": 0.1}, {"mode": "linear"}):
        same = resize_table(weight, (4, 4), prefix=1, **options)
        assert torch.equal(same, weight)
        assert same.data_ptr() != weight.data_ptr()


def test_a_grid_is_resized_axis_by_axis_and_is_not_transposed():
    weight = table(6, 2)
    up = resize_table(weight, (4, 5), grid=(2, 3), mode="linear", antialias=False).reshape(4, 5, 2)
    by_rows = torch.stack([line(list(weight.reshape(2, 3, 2)[:, j]), 4, hat, 1) for j in range(3)], dim=1)
    expected = torch.stack([line(list(by_rows[i]), 5, hat, 1) for i in range(4)])
    torch.testing.assert_close(up, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "antialias"), [(9, None), (20, None), (5, False)])
def test_grids_equal_torch_by_size(size, antialias):
    weight = table(14 * 14, 4)
    picture = weight.reshape(1, 14, 14, 4).permute(0, 3, 1, 2)
    smooth = size < 14 if antialias is None else antialias
    expected = F.interpolate(picture, size=(size, size), mode="bicubic", antialias=smooth).permute(0, 2, 3, 1).reshape(-1, 4)
    assert torch.equal(resize_table(weight, (size, size), antialias=antialias), expected)


def test_the_old_offset_reproduces_the_scale_form():
    weight = table(37 * 37, 2)
    picture = weight.reshape(1, 37, 37, 2).permute(0, 3, 1, 2)
    for size in (16, 24, 50):
        expected = F.interpolate(picture, scale_factor=(size + 0.1) / 37, mode="bicubic").permute(0, 2, 3, 1).reshape(-1, 2)
        assert torch.equal(resize_table(weight, (size, size), offset=0.1, antialias=False), expected)
        assert not torch.equal(resize_table(weight, (size, size), antialias=False), expected)


def test_constants_and_ramps_stay_what_they_are():
    flat = torch.full((16, 2), 3.0, dtype=F64)
    torch.testing.assert_close(resize_table(flat, (7, 9)), torch.full((63, 2), 3.0, dtype=F64), rtol=0, atol=1e-12)
    ramp = torch.arange(10.0, dtype=F64)[:, None]
    steps = resize_table(ramp, 30, mode="linear").flatten().diff()[2:-2]
    torch.testing.assert_close(steps, torch.full_like(steps, 1 / 3), rtol=0, atol=1e-12)


def test_leading_axes_and_half_precision():
    weight = table(17, 4).expand(1, 17, 4)
    assert resize_table(weight, (6, 6), prefix=1).shape == (1, 37, 4)
    low = resize_table(weight.bfloat16(), (6, 6), prefix=1)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, resize_table(weight.bfloat16().float(), (6, 6), prefix=1).bfloat16()), "rounded once"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w: resize_table(w, 0), ValueError, r"to = \(1, 0\). Expected a number of rows"),
        (lambda w: resize_table(w, (4, 0)), ValueError, r"to = \(4, 0\)"),
        (lambda w: resize_table(w, (4, 4.0)), ValueError, r"to = \(4, 4.0\)"),
        (lambda w: resize_table(w, 8, prefix=16), ValueError, "prefix = 16 of 16 rows"),
        (lambda w: resize_table(w, 8, mode="nearest"), ValueError, "mode = 'nearest'. Expected 'linear' or 'bicubic'"),
        (lambda w: resize_table(w, 8, grid=(4, 4)), ValueError, "Expected to = .height, width. for a grid"),
        (lambda w: resize_table(w, (8, 8), grid=(3, 5)), ShapeError, r"16 rows after prefix = 0 for grid = \(3, 5\)"),
        (lambda w: resize_table(w, 8, antialias=True, align_corners=True), ValueError, "antialias with align_corners"),
        (lambda w: resize_table(w, 8, offset=-1.0), ValueError, "offset = -1.0"),
        (lambda w: resize_table(w.long(), 8), ShapeError, "torch.int64"),
    ],
)
def test_impossible_targets_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(table(16))
