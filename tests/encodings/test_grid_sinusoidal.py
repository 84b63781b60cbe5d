"""Fixed codes of grids: MAE's order, non-square grids, three axes, prefixes."""

from __future__ import annotations

from math import cos, sin

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import ShapeError, Sinusoidal, grid, patch_centres
from posenc.encodings.grid_sinusoidal import GridSinusoidal
from posenc.testing import conform

F64 = torch.float64


def oracle(encoding, x, positions):
    """Vaswani et al. 2017, §3.5, for each coordinate in a share of the channels; MAE's order of the shares."""
    out, share = x.double().clone(), encoding.dim // encoding.axes
    for token, place in enumerate(positions.tolist()):
        if encoding.axis_order == "width-first":
            place = place[::-1]
        for axis, p in enumerate(place):
            for pair in range(share // 2):
                angle = p * encoding.base ** (-2 * pair / share)
                where = (2 * pair, 2 * pair + 1) if encoding.layout == "interleaved" else (pair, pair + share // 2)
                out[token, axis * share + where[0]] += sin(angle)
                out[token, axis * share + where[1]] += cos(angle)
    return out


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("axis_order", ["width-first", "height-first"])
def test_conforms(axes, axis_order):
    conform(
        lambda shape: GridSinusoidal(shape.dim, axes, axis_order=axis_order),
        oracle,
        claims=GridSinusoidal.spec.claims,
        other=lambda shape: GridSinusoidal(shape.dim, axes, layout="interleaved", base=100.0),
        skip=() if (axes, axis_order) == (2, "width-first") else {"graph capture"},
    )


def table(dim, positions, axes=2, **settings):
    return GridSinusoidal(dim, axes, **settings).table(torch.as_tensor(positions), dtype=F64)


def close(actual, expected, atol):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=F64), rtol=0.0, atol=atol)


def test_worked_rows():
    # facebookresearch/mae#18: the first half encodes the column
    code = [0.90929743, 0.019998667, -0.41614684, 0.99980001, 0.84147098, 0.0099998333, 0.54030231, 0.99995]
    close(table(8, [[1, 2]]), [code], 1e-8)  # given to eight digits
    close(table(8, [[1, 2]], axis_order="height-first"), [code[4:] + code[:4]], 1e-8)
    mae = [0.9092974268, -0.4161468365, 0.8414709848, 0.5403023059]
    close(table(4, [[1, 2]]), [mae], 1e-10)
    close(table(4, [[1, 2]], axis_order="height-first"), [mae[2:] + mae[:2]], 1e-10)


def test_a_grid_that_is_not_square():
    # huggingface/transformers#41380: width 4, height 3, flattened row after row
    code = table(4, grid(3, 4).positions)
    columns = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    rows = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    close(code, [[sin(x), cos(x), sin(y), cos(y)] for x, y in zip(columns, rows, strict=True)], 4 * 2**-53)


def mae_table(dim, height, width):
    """MAE's own computation, for any grid: x before y from a mesh, each in half of the width, sines before cosines."""
    ys, xs = torch.meshgrid(torch.arange(height, dtype=F64), torch.arange(width, dtype=F64), indexing="ij")
    omega = 1 / 10_000 ** (torch.arange(dim // 4, dtype=F64) / (dim / 4))
    halves = [axis.flatten()[:, None] * omega for axis in (xs, ys)]
    return torch.cat([wave for half in halves for wave in (half.sin(), half.cos())], dim=1)


@pytest.mark.parametrize(("height", "width"), [(14, 14), (3, 5), (1, 7)])
def test_it_is_the_table_of_mae(height, width):
    ours = table(32, grid(height, width).positions)
    # frequencies of two roundings at angles of up to 14
    torch.testing.assert_close(ours, mae_table(32, height, width), rtol=0.0, atol=4 * 14 * 2**-53)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_three_axes_are_three_codes(t, h, w):
    ours = table(12, [[t, h, w]], 3, layout="interleaved")
    each = [Sinusoidal(4).table(torch.tensor([p]), dtype=F64) for p in (w, h, t)]
    assert torch.equal(ours, torch.cat(each, dim=1))


def test_prefix_tokens_get_nothing():
    patches, x = grid(2, 3, prefix=2), torch.randn(4, 8, 8)
    out = GridSinusoidal(8, prefix=2)(x, patches.positions)
    assert torch.equal(out[:, :2], x[:, :2])
    assert torch.equal(out[:, 2:], GridSinusoidal(8)(x[:, 2:], grid(2, 3).positions))
    # without saying so they get the code of the patch at the origin
    assert torch.equal(GridSinusoidal(8)(x * 0, patches.positions)[0, 0], GridSinusoidal(8).table(torch.zeros(1, 2))[0])


def test_prefix_compiles():
    torch.compiler.reset()
    encoding = GridSinusoidal(8, prefix=1)
    compiled = torch.compile(encoding, fullgraph=True, backend="aot_eager")
    for size in (2, 3, 4):
        patches, x = grid(size, 3, prefix=1).positions, torch.randn(2, 3 * size + 1, 8)
        torch.testing.assert_close(compiled(x, patches), encoding(x, patches), rtol=0.0, atol=2**-23 * 4)


def test_real_coordinates_between_cells():
    centres = patch_centres(4, 6).positions
    out = GridSinusoidal(8)(torch.zeros(24, 8, dtype=F64), centres)
    torch.testing.assert_close(out, oracle(GridSinusoidal(8), torch.zeros(24, 8), centres), rtol=0.0, atol=8 * 2**-53)


@pytest.mark.parametrize(
    ("arguments", "rest", "error", "message"),
    [
        ((6,), {}, ValueError, "dim = 6 for 2 axes. Expected a multiple of 4"),
        ((16, 3), {}, ValueError, "dim = 16 for 3 axes. Expected a multiple of 6"),
        ((8, 0), {}, ValueError, "axes = 0"),
        ((8,), {"axis_order": "xy"}, ValueError, "axis_order = 'xy'. Expected 'width-first' or 'height-first'"),
        ((8,), {"layout": "stacked"}, ValueError, "layout = 'stacked'"),
        ((8,), {"base": 0.0}, ValueError, "base = 0.0"),
        ((8,), {"prefix": -1}, ValueError, "prefix = -1"),
        ((8,), {"prefix": True}, TypeError, "prefix = True"),
    ],
)
def test_impossible_settings_are_refused(arguments, rest, error, message):
    with pytest.raises(error, match=f"GridSinusoidal: {message}"):
        GridSinusoidal(*arguments, **rest)


@pytest.mark.parametrize(
    ("width", "positions", "error", "message"),
    [
        (6, torch.zeros(4, 2), ShapeError, "x has width 6. Expected 8"),
        (8, 0, TypeError, "positions = 0. Expected a tensor .* for 2 axes"),
        (8, torch.arange(4), ShapeError, r"positions have shape \(4,\). Expected \[\*batch, 4, 2\]"),
        (8, torch.zeros(4, 3), ShapeError, "positions have shape"),
        (8, torch.zeros(4, 2, dtype=torch.bfloat16), TypeError, "positions are torch.bfloat16"),
    ],
)
def test_impossible_inputs_are_refused(width, positions, error, message):
    with pytest.raises(error, match=f"GridSinusoidal: {message}"):
        GridSinusoidal(8)(torch.zeros(4, width), positions)


def test_fewer_tokens_than_the_prefix_are_refused():
    with pytest.raises(ShapeError, match="GridSinusoidal: 1 tokens with prefix = 2. Expected at least the prefix"):
        GridSinusoidal(8, prefix=2)(torch.zeros(1, 8), torch.zeros(1, 2))
