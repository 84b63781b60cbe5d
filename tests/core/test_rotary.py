"""Frequencies, tables and the rotation, against numbers worked out elsewhere and against mpmath."""

from __future__ import annotations

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posenc import (
    Explicit,
    Frequencies,
    Geometric,
    RotaryTable,
    ShapeError,
    apply_rotary,
    apply_rotary_pair,
    inverse,
    rotary_table,
    rotary_table_nd,
    transpose,
)

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
FAR = [0, 1, 2, 1857, 4095, 15962, 131_071, 1_048_575, 9_999_991, 10_000_000]
X = torch.arange(1.0, 9.0, dtype=F64).reshape(1, 1, 8)
AT_3 = {
    "interleaved": [-1.27223251272, -1.83886498514, 1.68392864073, 4.70790657649, 4.81777716753, 6.14727770351, 6.97596853602, 8.02096396853],
    "half": [-1.6955925369, 0.137551738283, 2.78868159983, 3.97598203601, -4.80884247494, 6.32305934808, 7.08683673685, 8.01196398203],
}  # fmt: skip
PAIRINGS = list(AT_3)


def table_at(positions, dim=8, base=1e4, dtype=F64, angle=F64):
    return rotary_table(torch.as_tensor(positions), Geometric(base).frequencies(dim, dtype=angle), dtype=dtype)


def exact(positions, dim, base):
    """Cosine and sine with 40 digits, rounded to float64: [seq, pairs]."""
    with mpmath.workdps(40):
        frequencies = [mpmath.mpf(base) ** (-mpmath.mpf(2 * i) / dim) for i in range(dim // 2)]
        angles = [[p * f for f in frequencies] for p in positions]
        return [torch.tensor([[float(of(a)) for a in row] for row in angles], dtype=F64) for of in (mpmath.cos, mpmath.sin)]


def worst(table, truth):
    return max(float((mine.double() - true).abs().max()) for mine, true in zip(table, truth, strict=True))


# --- tables -----------------------------------------------------------------------------------------------------------

# A float32 rounding of a number up to 1 costs 2⁻²⁵ = 3e-8; the float64 angle adds at most 4 · 10⁷ · 2⁻⁵³ = 4e-9.
EXACT = 6e-8


@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize("base", [100.0, 1e4, 5e5])
def test_tables_are_exact_at_any_position(dim, base):
    # huggingface/transformers#29496, EleutherAI/gpt-neox#1003, huggingface/candle#3520
    truth = exact(FAR, dim, base)
    assert worst(table_at(FAR, dim, base, F32), truth) < EXACT
    assert worst(table_at(FAR, dim, base, F64), truth) < 4 * max(FAR) * 2**-53


def test_float32_angles_would_not_pass():
    assert worst(table_at(FAR, 128, angle=F32, dtype=F32), exact(FAR, 128, 1e4)) > 1e-3


def build(positions: Tensor) -> RotaryTable:
    return rotary_table(positions, Geometric(1e4).frequencies(128, device=positions.device))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_tables_are_exact_when_compiled(backend):
    torch.compiler.reset()
    table = torch.compile(build, fullgraph=True, backend=backend)(torch.tensor(FAR))
    assert worst(table, exact(FAR, 128, 1e4)) < EXACT


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast_leaves_tables_alone(dtype):
    # huggingface/diffusers#13922
    with torch.autocast("cpu", dtype=dtype):
        inside = build(torch.tensor(FAR))
    assert all(torch.equal(a, b) for a, b in zip(inside, build(torch.tensor(FAR)), strict=True))


def test_known_phases():
    # EleutherAI/gpt-neox#1003: a half-precision product is off by 0.7 rad at position 1857 of pair 1
    assert table_at([1857], 32).cos[0, 1].item() == pytest.approx(0.30669280981876773, abs=1e-12)
    # huggingface/candle#3520: bfloat16 rounds the position 15962 to 15936
    assert table_at([15962]).cos[0, 0].item() == pytest.approx(-0.908015901251032, abs=1e-12)


def test_the_divisor_is_the_rotary_width():
    # rasbt/LLMs-from-scratch#410
    assert Geometric(1e4).frequencies(64).inv_freq[31].item() == pytest.approx(1.3335214321633240e-04, rel=1e-12)


def test_positions_may_be_negative_or_real():
    # turboderp-org/exllamav2#606
    forward, backward = table_at([1, 2]), table_at([-1, -2])
    assert torch.equal(forward.cos, backward.cos)
    assert torch.equal(forward.sin, -backward.sin)
    assert torch.equal(table_at([3.0]).cos, table_at([3]).cos)
    assert worst(table_at([0.5]), exact([mpmath.mpf("0.5")], 8, 1e4)) < 1e-15


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, F32, F64])
def test_the_dtype_of_positions_does_not_matter(dtype):
    assert torch.equal(table_at(torch.arange(200).to(dtype)).sin, table_at(torch.arange(200)).sin)


def test_float32_tables_equal_transformers_bit_for_bit():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=256, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}
    )
    positions = torch.cat([torch.arange(4096), torch.tensor([131_071, 1_000_003])])
    cos, sin = llama.LlamaRotaryEmbedding(config)(torch.zeros(1, 1), positions[None])
    table = table_at(positions, 128, 5e5, F32, angle=F32)
    assert torch.equal(torch.cat([table.cos] * 2, -1), cos[0])
    assert torch.equal(torch.cat([table.sin] * 2, -1), sin[0])


def test_amplitude_is_folded_in_per_sequence_too():
    inv_freq = Geometric().frequencies(8).inv_freq
    plain, gained = (rotary_table(torch.arange(5), Frequencies(inv_freq, a), dtype=F64) for a in (1.0, 1.5))
    torch.testing.assert_close(gained.cos, 1.5 * plain.cos)
    each = rotary_table(torch.arange(5).expand(2, 5), Frequencies(inv_freq, torch.tensor([1.0, 1.5])), dtype=F64)
    assert torch.equal(each.cos[0], plain.cos)
    torch.testing.assert_close(each.sin[1], gained.sin)


def test_frequencies_may_differ_per_sequence():
    both = torch.stack([Geometric(base).frequencies(8).inv_freq for base in (1e4, 1e6)])
    table = rotary_table(torch.arange(4).expand(2, 4), Frequencies(both), dtype=F64)
    for row, base in enumerate((1e4, 1e6)):
        assert torch.equal(table.cos[row], table_at(range(4), base=base).cos)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"positions": torch.zeros(3, dtype=BF16)}, TypeError, "half precision cannot"),
        ({"positions": torch.tensor([float("nan")])}, ValueError, "positions hold nan"),
        ({"frequencies": Frequencies(torch.ones(2, dtype=BF16))}, TypeError, "inv_freq is torch.bfloat16"),
        ({"dtype": F16}, TypeError, r"dtype = torch\.float16"),
        ({"positions": torch.tensor(3)}, ShapeError, r"positions of 0 axes .* positions\[None\]"),
        ({"frequencies": Frequencies(torch.tensor(1.0))}, ShapeError, "inv_freq of 0"),
        ({"frequencies": torch.ones(2)}, TypeError, "frequencies are Tensor"),
        ({"frequencies": Frequencies([1.0, 0.1])}, TypeError, "frequencies are Frequencies of a list"),
        ({"frequencies": Frequencies(torch.ones(2), None)}, TypeError, "amplitude = None"),
        ({"frequencies": Frequencies(torch.ones(2), True)}, TypeError, "amplitude = True"),
        ({"frequencies": Frequencies(torch.ones(3, 2), torch.ones(2))}, ShapeError, r"batch \(3,\) and amplitudes of \(2,\)"),
        (
            {"positions": torch.zeros(2, 3), "frequencies": Frequencies(torch.ones(3, 2))},
            ShapeError,
            r"batch \(2,\) with .* \(3,\)",
        ),
        (
            {"positions": torch.zeros(2, 3), "frequencies": Frequencies(torch.ones(2), torch.ones(3))},
            ShapeError,
            r"amplitudes of \(3,\)",
        ),
    ],
)
def test_tables_of_wrong_input_are_refused(change, error, message):
    arguments = {"positions": torch.arange(3), "frequencies": Frequencies(torch.ones(2, dtype=F64))} | change
    with pytest.raises(error, match=f"rotary_table: .*{message}"):
        rotary_table(**arguments)


# --- several axes -----------------------------------------------------------------------------------------------------


def test_axes_add_up():
    inv_freq = torch.rand(3, 4, dtype=F64)
    positions = torch.randint(-50, 50, (2, 5, 3))
    table = rotary_table_nd(positions, Frequencies(inv_freq), dtype=F64)
    angle = sum(positions[..., a, None] * inv_freq[a] for a in range(3))
    torch.testing.assert_close(table.cos, angle.cos())
    torch.testing.assert_close(table.sin, angle.sin())


def test_equal_axes_that_share_the_pairs_are_one_axis():
    one = Geometric().frequencies(16).inv_freq
    owner = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    inv_freq = torch.stack([torch.where(owner == axis, one, 0.0) for axis in range(3)])
    positions = torch.arange(50)[:, None].expand(50, 3)
    table = rotary_table_nd(positions, Frequencies(inv_freq), dtype=F64)
    assert torch.equal(table.cos, table_at(range(50), 16).cos)


@pytest.mark.parametrize("positions", [torch.zeros(4), torch.zeros(4, 3)])
def test_other_axes_are_refused(positions):
    with pytest.raises(ShapeError, match="Use rotary_table for positions of one axis"):
        rotary_table_nd(positions, Frequencies(torch.ones(2, 4, dtype=F64)))


def test_no_axes_at_all_are_refused():
    with pytest.raises(ShapeError, match=r"positions \(3, 0\) with inv_freq \(0, 4\).* one axis or more"):
        rotary_table_nd(torch.zeros(3, 0), Frequencies(torch.ones(0, 4)))


# --- the rotation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_worked_rotation(pairing):
    rotated = apply_rotary(X, table_at([3]), pairing=pairing)
    torch.testing.assert_close(rotated.flatten(), torch.tensor(AT_3[pairing], dtype=F64), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("pairing", "score"), [("half", 45.92956725201566), ("interleaved", 70.27903255028566)])
def test_each_pairing_has_its_own_score(pairing, score):
    # jzhang38/TinyLlama#24
    q, k = apply_rotary_pair(X, X.flip(-1), table_at([5]), table_at([2]), pairing=pairing)
    assert (q * k).sum().item() == pytest.approx(score, rel=1e-12)


def test_pairings_differ_by_a_permutation_of_channels():
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    x, table = torch.randn(2, 3, 5, 8, dtype=F64), table_at(range(5))
    half = apply_rotary(x[..., order], table, pairing="half")
    assert torch.equal(half, apply_rotary(x, table, pairing="interleaved")[..., order])


def test_a_probe_tells_the_pairing():
    probe = torch.zeros(1, 1, 8, dtype=F64)
    probe[..., 0] = 1
    assert apply_rotary(probe, table_at([1]), pairing="half").nonzero()[:, -1].tolist() == [0, 4]
    assert apply_rotary(probe, table_at([1]), pairing="interleaved").nonzero()[:, -1].tolist() == [0, 1]


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("start", [0, 2, 4, -4, -8])
def test_channels_outside_pass_bit_equal(pairing, start):
    x, table = torch.randn(2, 3, 5, 8), table_at(range(5), 4, dtype=F32)
    out = apply_rotary(x, table, pairing=pairing, start=start)
    first = start % 8
    turning = slice(first, first + 4)
    rest = [c for c in range(8) if c not in range(first, first + 4)]
    assert torch.equal(out[..., rest], x[..., rest])
    assert torch.equal(out[..., turning], apply_rotary(x[..., turning], table, pairing=pairing))


def test_head_axes_agree():
    x, table = torch.randn(2, 3, 5, 8), table_at(torch.arange(10).reshape(2, 5), dtype=F32)
    expected = apply_rotary(x, table, pairing="half")
    assert torch.equal(apply_rotary(x.transpose(1, 2), table, pairing="half", head_axis=-2), expected.transpose(1, 2))
    own_axis = RotaryTable(*(t.unsqueeze(1).expand(2, 3, 5, 4) for t in table))
    assert torch.equal(apply_rotary(x, own_axis, pairing="half", head_axis=None), expected)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_strides_and_values_of_views_are_kept(pairing):
    table = table_at(range(5), dtype=F32)
    storage = torch.randn(2, 5, 3, 16)
    views = {"transposed": storage[..., :8].transpose(1, 2), "every other": storage.transpose(1, 2)[..., ::2]}
    for view in views.values():
        out = apply_rotary(view, table, pairing=pairing)
        assert torch.equal(out, apply_rotary(view.contiguous(), table, pairing=pairing))
    by_token = apply_rotary(views["transposed"], table, pairing=pairing)
    assert by_token.transpose(1, 2).is_contiguous()


def test_out_takes_the_result_and_may_be_x():
    x, table = torch.randn(1, 2, 5, 8), table_at(range(5), dtype=F32)
    expected = apply_rotary(x, table, pairing="half")
    assert apply_rotary(x, table, pairing="half", out=x) is x
    assert torch.equal(x, expected)
    with pytest.raises(ShapeError, match="empty_like"):
        apply_rotary(x, table, pairing="half", out=torch.empty(1))
    with pytest.raises(ValueError, match=r"needs? a gradient"):
        apply_rotary(x.requires_grad_(), table, pairing="half", out=torch.empty_like(x))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_low_precision_rounds_once_forward_and_backward(pairing, dtype):
    x, grad = (torch.randn(2, 3, 5, 8).to(dtype) for _ in range(2))
    table = table_at(range(5), dtype=F32)
    x.requires_grad_()
    out = apply_rotary(x, table, pairing=pairing)
    out.backward(grad)
    assert torch.equal(out, apply_rotary(x.detach().float(), table, pairing=pairing).to(dtype))
    assert torch.equal(x.grad, apply_rotary(grad.float(), transpose(table), pairing=pairing).to(dtype))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradients(pairing):
    x = torch.randn(2, 3, 4, 8, dtype=F64, requires_grad=True)
    cos, sin = (t.clone().requires_grad_() for t in table_at(range(4), 6))
    assert torch.autograd.gradcheck(
        lambda x, cos, sin: apply_rotary(x, RotaryTable(cos, sin), pairing=pairing, start=1), (x, cos, sin)
    )


def test_learned_frequencies_train_twice():
    # lucidrains/rotary-embedding-torch#18
    inv_freq = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=F64, requires_grad=True)
    for _ in range(2):
        apply_rotary(X, rotary_table(torch.tensor([3]), Frequencies(inv_freq)), pairing="half").sum().backward()
    assert bool((inv_freq.grad != 0).all())


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), st.sampled_from(PAIRINGS))
def test_rotations_compose_undo_and_keep_norms(m, n, pairing):
    x = torch.randn(1, 1, 8, dtype=F64)
    tolerance = {"rtol": 0.0, "atol": 8 * (abs(m) + abs(n) + 2) * 2**-53 * x.abs().max().item()}
    at_m = apply_rotary(x, table_at([m]), pairing=pairing)
    torch.testing.assert_close(
        apply_rotary(at_m, table_at([n]), pairing=pairing), apply_rotary(x, table_at([m + n]), pairing=pairing), **tolerance
    )
    torch.testing.assert_close(apply_rotary(at_m, table_at([-m]), pairing=pairing), x, **tolerance)
    torch.testing.assert_close(at_m.norm(), x.norm(), rtol=1e-14, atol=0.0)
    assert torch.equal(apply_rotary(x, table_at([0]), pairing=pairing), x)


@pytest.mark.parametrize("amplitude", [1.0, 1.3688879])
def test_inverse_undoes_an_amplitude_and_transpose_keeps_it(amplitude):
    table = rotary_table(torch.arange(5), Explicit((1.0, 0.3), amplitude).frequencies(4), dtype=F64)
    x = torch.randn(1, 5, 4, dtype=F64)
    turned = apply_rotary(x, table, pairing="half")
    torch.testing.assert_close(apply_rotary(turned, inverse(table), pairing="half"), x, rtol=1e-14, atol=1e-14)
    back = apply_rotary(turned, transpose(table), pairing="half")
    torch.testing.assert_close(back, amplitude**2 * x, rtol=1e-14, atol=1e-14)


def test_rotating_twice_doubles_the_angle():
    # the sign and the single application show in the score: cos(3) at distance 3, cos(6) when applied twice
    x = torch.tensor([[[1.0, 0.0]]], dtype=F64)
    table = table_at([3], 2)
    once = apply_rotary(x, table, pairing="half")
    assert (once * x).sum().item() == pytest.approx(-0.9899924966, abs=1e-10)
    assert (apply_rotary(once, table, pairing="half") * x).sum().item() == pytest.approx(0.9601702867, abs=1e-10)


def test_integers_and_half_tables_are_refused():
    table = table_at([0], dtype=F32)
    with pytest.raises(TypeError, match=r"x is torch\.int64"):
        apply_rotary(X.long(), table, pairing="half")
    for cast in (RotaryTable(*(t.to(BF16) for t in table)), RotaryTable(table.cos, table.sin.to(F16))):
        with pytest.raises(TypeError, match="mixed-precision wrapper that casts its inputs"):
            apply_rotary(X, cast, pairing="half")


@pytest.mark.parametrize(
    ("shape", "positions", "dim", "message"),
    [
        ((2, 3, 5, 8), range(4), 8, "positions of exactly these tokens"),
        ((2, 3, 5, 8), [4], 8, "positions of exactly these tokens"),  # one token's table is not everybody's
        ((2, 3, 0, 8), [4], 8, "positions of exactly these tokens"),
        ((5, 8), range(5), 8, "positions of exactly these tokens"),
        ((2, 3, 5, 8), range(5), 16, "one column per pair, not per channel"),
    ],
)
def test_tables_of_other_tokens_are_refused(shape, positions, dim, message):
    with pytest.raises(ShapeError, match=message):
        apply_rotary(torch.zeros(shape), table_at(list(positions), dim, dtype=F32), pairing="half")


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="pairing = 'neox'"):
        apply_rotary(X, table_at([0]), pairing="neox")
    with pytest.raises(ValueError, match="backend = 'magic'"):
        apply_rotary(X, table_at([0]), pairing="half", backend="magic")


@pytest.mark.parametrize("shape", [(2, 3, 0, 8), (0, 3, 5, 8), (2, 0, 5, 8)])
def test_empty_tensors_pass(shape):
    assert apply_rotary(torch.zeros(shape), table_at(torch.arange(shape[2]), dtype=F32), pairing="half").shape == shape


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    return apply_rotary(x, build(positions), pairing="interleaved")


def test_export_serves_other_lengths():
    # onnx/onnx#6480, pytorch/pytorch#110347
    class Rotate(torch.nn.Module):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return rotate(x, positions)

    length = torch.export.Dim("length", min=2, max=4096)
    inputs = torch.randn(1, 2, 4, 128), torch.arange(4)
    program = torch.export.export(Rotate(), inputs, dynamic_shapes=({2: length}, {0: length}))
    x, positions = torch.randn(1, 2, 9, 128), torch.arange(9) + 3
    assert torch.equal(program.module()(x, positions), rotate(x, positions))
