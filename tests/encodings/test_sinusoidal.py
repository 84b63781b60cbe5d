"""The sine and cosine code in the four conventions that ship."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import ShapeError, Sinusoidal
from posenc.testing import conform, oracles

F64 = torch.float64
CONVENTIONS = [
    {"layout": layout, "frequency_rule": rule}
    for layout in ("interleaved", "concatenated")
    for rule in ("paper", "tensor2tensor")
]
each_convention = pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: "-".join(c.values()))


def table(dim, positions, **settings):
    return Sinusoidal(dim, **settings).table(torch.as_tensor(positions), dtype=F64)


def close(actual, expected, atol=1e-11):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=F64), rtol=0.0, atol=atol)


@each_convention
def test_conforms(convention):
    conform(
        lambda shape: Sinusoidal(shape.dim, **convention),
        oracles.sinusoidal,
        other=lambda shape: Sinusoidal(shape.dim, base=500.0, **convention),
    )


@each_convention
@pytest.mark.parametrize("dim", [4, 5, 7, 8, 9])
def test_odd_and_even_widths_follow_the_oracle(convention, dim):
    encoding, at = Sinusoidal(dim, **convention), torch.tensor([0, 1, 10, 1000])
    x = torch.zeros(4, dim, dtype=F64)
    torch.testing.assert_close(encoding(x, at), oracles.sinusoidal(encoding, x, at), rtol=0.0, atol=1e-12)


def test_worked_rows():
    close(
        table(8, [0, 1, 10, 1000]),
        [
            [0, 1, 0, 1, 0, 1, 0, 1],
            [0.841470984808, 0.540302305868, 0.0998334166468, 0.995004165278, 0.00999983333417, 0.999950000417, 0.000999999833333, 0.9999995],
            [-0.544021110889, -0.839071529076, 0.841470984808, 0.540302305868, 0.0998334166468, 0.995004165278, 0.00999983333417, 0.999950000417],
            [0.826879540532, 0.562379076291, -0.50636564111, 0.862318872288, -0.544021110889, -0.839071529076, 0.841470984808, 0.540302305868],
        ],
        atol=1e-7,  # the last column is given to seven digits
    )  # fmt: skip
    close(
        table(512, [1, 100])[:, [0, 1, 2, 3, 510, 511]],
        [
            [0.841470984808, 0.540302305868, 0.821856190018, 0.569695008693, 0.000103663292658, 0.999999994627],
            [-0.50636564111, 0.862318872288, 0.797542363403, -0.603262943149, 0.0103661436231, 0.99994627009],
        ],
    )


def test_worked_rows_of_the_other_conventions():
    t2t = {"layout": "concatenated", "frequency_rule": "tensor2tensor"}
    sines = [0.841470984808, 0.0463992234647, 0.00215443302337, 9.99999998333e-5]
    close(table(8, [1], **t2t), [[*sines, 0.540302305868, 0.998922976041, 0.999997679206, 0.999999995]])
    close(Sinusoidal(8, **t2t).inv_freq(), [1, 0.0464158883361, 0.00215443469003, 1e-4])
    # wenet-e2e/wenet#2141: Whisper's ladder ends at exactly 1/base
    close(table(384, [1], **t2t)[:, [0, 1, 191, 192]], [[0.8414709848, 0.8151120104, 9.999999983e-5, 0.5403023059]], 1e-10)
    assert Sinusoidal(512, **t2t).inv_freq()[-1].item() == pytest.approx(1e-4, rel=1e-14)
    assert Sinusoidal(512).inv_freq()[-1].item() == pytest.approx(1.036632928e-04, rel=1e-9)


def test_odd_width():
    # gc-os-ai/pyaptamer#607
    close(table(5, [1]), [[0.8414709848, 0.5403023059, 0.0251162229, 0.9996845379, 0.0006309573]], 1e-10)


def test_layouts_permute_channels():
    # allenai/allennlp#2993
    close(table(4, [1]), [[0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004]], 1e-10)
    close(table(4, [1], layout="concatenated"), [[0.8414709848, 0.0099998333, 0.5403023059, 0.9999500004]], 1e-10)


def test_wavelengths():
    wavelengths = 2 * math.pi / Sinusoidal(512).inv_freq()
    close(wavelengths[[0, 1, 255]], [6.28318530718, 6.5133567849, 60611.4771663], 1e-7)


@pytest.mark.parametrize(
    ("dim", "kernel", "adjacent"),
    [
        (64, [32, 30.9168316616, 28.3038620041, 21.0516288246, 17.8746687851, 8.92596674992], 1.47184805),
        (512, [256, 249.102097827, 231.73362039, 173.789724924, 111.950208649, 44.9716048445], 3.71427037),
    ],
)
def test_products_depend_on_distance_and_rows_stay_apart(dim, kernel, adjacent):
    lags = torch.tensor([0, 1, 2, 10, 100, 1000])
    for start in (0, 5, 12_345):
        code = table(dim, lags + start)
        close(code @ code[0], kernel, 1e-8)
    rows = table(dim, range(2000))
    distances = torch.pdist(rows)
    assert distances.min().item() == pytest.approx(adjacent, abs=1e-8)


@each_convention
@given(p=st.integers(0, 10**6), k=st.integers(-(10**6), 10**6))
def test_a_shift_is_a_rotation_of_the_code(convention, p, k):
    dim = 16
    code, moved = table(dim, [p], **convention)[0], table(dim, [p + k], **convention)[0]
    angle = k * Sinusoidal(dim, **convention).inv_freq()
    halves = (code[0::2], code[1::2]) if convention["layout"] == "interleaved" else code.chunk(2)
    sin, cos = halves[0] * angle.cos() + halves[1] * angle.sin(), halves[1] * angle.cos() - halves[0] * angle.sin()
    expected = torch.stack([sin, cos], -1).flatten() if convention["layout"] == "interleaved" else torch.cat([sin, cos])
    torch.testing.assert_close(moved, expected, rtol=0.0, atol=4 * (p + abs(k) + abs(p + k) + 4) * 2**-53)


@each_convention
def test_norms_and_bounds(convention):
    code = table(64, [0, 1, 77, 10**7], **convention)
    close(code.square().sum(-1), [32.0] * 4, 32 * 64 * 2**-53)
    assert code.abs().max() <= 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_output_has_the_dtype_of_x(dtype, x_dtype):
    # huggingface/transformers#47674: a code cast to the dtype of its integer positions
    out = Sinusoidal(256)(torch.zeros(8, 256, dtype=x_dtype), torch.arange(8).to(dtype))
    assert out.dtype == x_dtype
    assert len(out.float().unique(dim=0)) == 8


def test_every_row_of_a_batch_gets_the_same_code():
    # KasperGroesLudvigsen/influenza_transformer#9: the code added along the batch
    out = Sinusoidal(4)(torch.zeros(2, 3, 4), 0)
    assert torch.equal(out[0], out[1])
    assert out[1, 0].tolist() == [0, 1, 0, 1]


def test_every_token_gets_its_own_code():
    # DiffPoseTalk/DiffPoseTalk#20: one row for all tokens
    close(Sinusoidal(4)(torch.zeros(1, 3, 4, dtype=F64), 0)[0], table(4, [0, 1, 2]).tolist())


@pytest.mark.parametrize("shape", [(2, 5, 384), (1, 750, 384), (5, 384)])
def test_the_sequence_is_as_long_as_x(shape):
    # huggingface/transformers#23167, huggingface/transformers#25744
    out = Sinusoidal(384)(torch.zeros(shape, dtype=F64), 3)
    torch.testing.assert_close(out, table(384, range(3, 3 + shape[-2])).expand(shape), rtol=0.0, atol=0.0)


def test_codes_are_continued_in_decoding():
    encoding, x = Sinusoidal(8), torch.randn(2, 6, 8)
    whole = encoding(x, 0)
    assert torch.equal(torch.cat([encoding(x[:, :4], 0), encoding(x[:, 4:5], 4), encoding(x[:, 5:], 5)], 1), whole)


def test_decode_steps_do_not_recompile():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    encoding, x = Sinusoidal(8), torch.randn(2, 1, 8)
    step = torch.compile(encoding, fullgraph=True, backend=counter)
    for start in (3, 4, 5, 6, 7):
        assert torch.equal(step(x, start), encoding(x, start))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim = 0. Expected 1 or more"),
        ({"dim": 3, "frequency_rule": "tensor2tensor"}, "dim = 3. Expected 4 or more for the tensor2tensor"),
        ({"dim": 8, "base": 0}, "base = 0. Expected a finite number above 0"),
        ({"dim": 8, "base": -1.0}, "base = -1.0"),
        ({"dim": 8, "base": float("nan")}, "base = nan"),
        ({"dim": 8, "layout": "stacked"}, "layout = 'stacked'"),
        ({"dim": 8, "frequency_rule": "t2t"}, "frequency_rule = 't2t'"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"Sinusoidal: .*{message}"):
        Sinusoidal(**arguments)


@pytest.mark.parametrize(
    ("shape", "positions", "error", "message"),
    [
        ((2, 3, 6), 0, ShapeError, "x has width 6. Expected 8"),
        ((2, 3, 8), torch.arange(4), ShapeError, "Sinusoidal: positions have shape"),
        ((2, 3, 8), torch.zeros(3, dtype=torch.bfloat16), TypeError, "Sinusoidal: .*half precision"),
        ((2, 3, 8), torch.tensor([0.0, float("nan"), 1.0]), ValueError, "Sinusoidal: positions hold nan"),
    ],
)
def test_impossible_inputs_are_refused(shape, positions, error, message):
    with pytest.raises(error, match=message):
        Sinusoidal(8)(torch.zeros(shape), positions)
