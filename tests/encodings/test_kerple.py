"""Learned kernels of the distance: the paper's two formulas, the released names, and finite slopes at distance 0."""

from __future__ import annotations

from math import exp, log1p

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import (
    CAUSAL,
    ALiBi,
    NoPE,
    Transformer,
    attention,
    causal,
    contiguous,
    materialize,
    packed,
    positional_attention,
    score_mod,
    slice_heads,
)
from posenc.encodings.kerple import KERPLE
from posenc.testing import conform

F64 = torch.float64
KERNELS = ["log", "power"]


def coefficients(encoding):
    """r1 and r2 of each head, from the stored numbers, in Python."""

    def softplus(raw):
        return log1p(exp(raw))

    def exponent(raw):
        return 2 / (1 + exp(-raw))

    raw_r1, raw_r2 = encoding.raw_r1.double().tolist(), encoding.raw_r2.double().tolist()
    return [*zip(map(softplus, raw_r1), map(softplus if encoding.kernel == "log" else exponent, raw_r2), strict=True)]


def oracle(encoding, positions, k_positions):
    """Chi et al. 2022, §4: -r1 · log(1 + r2 |m - n|), and -r1 · |m - n|^r2."""
    bias = torch.zeros(encoding.heads, len(positions), len(k_positions), dtype=F64)
    for head, (r1, r2) in enumerate(coefficients(encoding)):
        for i, m in enumerate(positions.tolist()):
            for j, n in enumerate(k_positions.tolist()):
                distance = abs(m - n)
                bias[head, i, j] = -r1 * (log1p(r2 * distance) if encoding.kernel == "log" else distance**r2)
    return bias


@pytest.mark.parametrize("kernel", KERNELS)
def test_conforms(kernel):
    conform(
        lambda shape: KERPLE(shape.heads, kernel),
        oracle,
        claims=KERPLE.spec.claims,
        other=lambda shape: KERPLE(shape.heads, "log"),
        skip={"graph capture"} if kernel == "log" else (),
    )


def with_coefficients(kernel, r1, r2, dtype=torch.float64):
    """An encoding with these coefficients, through the released names."""
    p, a = (r1, r2) if kernel == "log" else (r2, r1)
    encoding = KERPLE(len(r1), kernel, dtype=dtype)
    encoding.load_state_dict({"bias_p": torch.tensor(p).view(-1, 1, 1), "bias_a": torch.tensor(a).view(-1, 1, 1)})
    return encoding


def row(encoding, distances, dtype=F64):
    return materialize(encoding(), torch.tensor([0]), -torch.tensor(distances), dtype=dtype)[:, 0].detach()


def test_check_values():
    bias = row(with_coefficients("log", [1.0], [1.0]), [0, 1, 7, 100])[0]
    assert bias.tolist() == pytest.approx([0, -0.6931471806, -2.079441542, -4.615120517], rel=1e-9)
    assert row(with_coefficients("power", [1.0], [0.5]), [7])[0].item() == pytest.approx(-2.645751311, rel=1e-9)


def test_a_power_of_one_is_alibi():
    alibi = ALiBi(6)
    ours = with_coefficients("power", [max(slope, 0.01) for slope in alibi.slopes], [1.0] * 6)
    biased = [head for head, slope in enumerate(alibi.slopes) if slope >= 0.01]
    expected = materialize(alibi(), torch.tensor([0]), -torch.arange(200), dtype=F64)[biased, 0]
    torch.testing.assert_close(row(ours, list(range(200)))[biased], expected, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kernel", KERNELS)
def test_released_names_load_and_are_clamped_as_released(kernel, dtype):
    """The factor is bias_p of one kernel and bias_a of the other; below 0.01 (exponents above 2) they are clamped in forward."""
    p, a = torch.tensor([1.5, 0.3, 0.002, 2.7]), torch.tensor([0.25, 0.9, -0.4, 0.6])
    encoding = torch.nn.ModuleList([KERPLE(4, kernel, dtype=dtype)])
    state = {"0.bias_p": p.view(4, 1, 1), "0.bias_a": a.view(4, 1, 1)}
    result = encoding.load_state_dict(state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert set(state) == {"0.bias_p", "0.bias_a"}
    p, a = p.double().clamp(min=0.01), a.double().clamp(min=0.01)
    distances = torch.arange(50.0, dtype=F64)
    if kernel == "log":
        expected = -p[:, None] * (1 + a[:, None] * distances).log()
    else:
        expected = -a[:, None] * distances ** p.clamp(max=2)[:, None]
    # a stored float32 near 4 is off by 2⁻²³, an exponent of 2 by 2⁻²³ too, which ln(50) multiplies
    near = 8 * 2**-23 if dtype == torch.float32 or kernel == "power" else 64 * 2**-53
    torch.testing.assert_close(row(encoding[0], list(range(50))), expected, rtol=near, atol=0.0)


def test_own_names_are_saved_and_loaded():
    encoding, twin = KERPLE(4), KERPLE(4)
    assert list(encoding.state_dict()) == ["raw_r1", "raw_r2"]
    twin.load_state_dict(encoding.state_dict())
    assert torch.equal(row(twin, [5]), row(encoding, [5]))
    with pytest.raises(RuntimeError, match="raw_r2"):
        twin.load_state_dict({"raw_r1": encoding.raw_r1})
    with pytest.raises(RuntimeError, match="bias_p"):
        twin.load_state_dict({"bias_p": encoding.raw_r1})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_coefficients_start_where_the_released_ones_do(kernel, dtype):
    encoding = KERPLE(4000, kernel, dtype=dtype)
    factor, other = (encoding.r1, encoding.r2) if kernel == "log" else (encoding.r2, encoding.r1)
    # a uniform mean of n draws is off by width / √(12 n) in the root mean square: five of those, and bfloat16's 2⁻⁹
    for values, most in ((factor, 2), (other, 1)):
        assert 0.0099 < values.min() < 0.02
        assert 0.98 * most < values.max() <= most * (1 + 2**-7)
        assert abs(values.mean() - most / 2) < most * (5 / (12 * 4000) ** 0.5 + 2**-8)


@given(st.floats(-90.0, 90.0), st.floats(-90.0, 90.0), st.sampled_from(KERNELS))
def test_any_stored_number_is_a_finite_positive_coefficient(raw_r1, raw_r2, kernel):
    encoding = KERPLE(1, kernel).double()
    with torch.no_grad():
        encoding.raw_r1.fill_(raw_r1)
        encoding.raw_r2.fill_(raw_r2)
    assert encoding.r1.item() > 0
    assert 0 < encoding.r2.item() <= (2 if kernel == "power" else 91)
    bias = materialize(encoding(), torch.arange(9), dtype=F64)
    bias.sum().backward()
    assert bool((bias <= 0).all())
    assert all(bool(parameter.grad.isfinite().all()) for parameter in encoding.parameters())


def test_slopes_at_distance_zero_are_finite():
    """A power below 1 is infinitely steep at 0: one zero distance makes the gradient of the whole call NaN."""
    encoding = with_coefficients("power", [1.0, 0.5], [0.3, 2.0])
    at = torch.arange(4.0, dtype=F64, requires_grad=True)
    materialize(encoding(), at, dtype=F64).sum().backward()
    assert all(bool(grad.isfinite().all()) for grad in (at.grad, encoding.raw_r1.grad, encoding.raw_r2.grad))
    assert bool((encoding.raw_r2.grad != 0).all())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_biases_stay_wide(kernel, dtype):
    encoding = KERPLE(3, kernel).to(dtype)
    grid = score_mod(encoding(), torch.arange(4))
    zero, index = torch.zeros((), dtype=F64), torch.tensor(3)
    assert grid(zero, index * 0, index * 0, index, index * 0) == materialize(encoding(), torch.arange(4), dtype=F64)[0, 3, 0]
    values = [parameter.dtype for parameter in encoding().parameters]
    assert values == 2 * [F64 if kernel == "power" or dtype == F64 else torch.float32]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(row(encoding, [0, 3, 900]), row(encoding, [0, 3, 900]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_positions_may_be_left_out_because_only_the_distance_counts(kernel):
    encoding = KERPLE(2, kernel).double()
    q, k, v = torch.randn(1, 2, 3, 4, dtype=F64), *torch.randn(2, 1, 2, 5, 4, dtype=F64)
    without = attention(q, k, v, bias=encoding(), mask=CAUSAL)
    given = attention(q, k, v, bias=encoding(), mask=CAUSAL, positions=torch.arange(9, 12), k_positions=torch.arange(7, 12))
    torch.testing.assert_close(without, given, rtol=0.0, atol=1e-14)


def test_heads_of_a_shard_keep_their_own_coefficients():
    encoding, at = KERPLE(6), torch.arange(5)
    whole = materialize(encoding(), at)
    assert torch.equal(materialize(slice_heads(encoding(), slice(2, 4)), at), whole[2:4])
    assert not torch.equal(whole[2:4], whole[:2])


def test_packed_documents_are_what_they_are_apart():
    encoding, (q, k, v) = KERPLE(2).double(), torch.randn(3, 1, 2, 9, 4, dtype=F64)
    tokens = packed(torch.tensor([0, 5, 9]), 9)
    together = positional_attention(q, k, v, encodings=[encoding], positions=tokens, mask=causal(tokens))
    for part in (slice(0, 5), slice(5, 9)):
        alone = positional_attention(*(t[:, :, part] for t in (q, k, v)), encodings=[encoding], positions=0, mask=CAUSAL)
        torch.testing.assert_close(together[:, :, part], alone, rtol=0.0, atol=1e-14)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("slots", [None, 12])
def test_a_decoder_trains_and_generates_the_same_with_a_cache(kernel, slots):
    model = Transformer(11, dim=16, layers=2, heads=4, kv_heads=2, encodings=[NoPE(), KERPLE(4, kernel)]).double()
    ids = torch.randint(0, 11, (2, 9))
    torch.nn.functional.cross_entropy(model(ids, 0)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert all(parameter.grad.abs().min() > 0 for parameter in model.encodings[1].parameters())
    model.eval()
    cache = model.new_cache(*(() if slots is None else (2, slots)))
    steps = [
        model(ids[:, first:last], contiguous(last - first, first), cache=cache) for first, last in ((0, 4), (4, 5), (5, 9))
    ]
    # two layers of some hundred float64 roundings of logits below 10
    torch.testing.assert_close(torch.cat(steps, 1), model(ids, 0), rtol=0.0, atol=1e4 * 2**-53)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "heads = 0. Expected an integer of 1 or more"),
        ((2.0,), TypeError, "heads = 2.0"),
        ((4, "exp"), ValueError, "kernel = 'exp'. Expected 'log' or 'power'"),
    ],
)
def test_impossible_settings_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"KERPLE: {message}"):
        KERPLE(*arguments)
