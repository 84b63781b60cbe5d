"""A fixed block beside a learned one."""

from __future__ import annotations

from math import cos, sin

import pytest
import torch

from posenc import ShapeError, Sinusoidal
from posenc.encodings.hybrid import Hybrid
from posenc.testing import conform

F64 = torch.float64
CONVENTIONS = [
    {"layout": layout, "frequency_rule": rule}
    for layout in ("interleaved", "concatenated")
    for rule in ("paper", "tensor2tensor")
]
each_convention = pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: "-".join(c.values()))


def oracle(encoding, x, positions):
    """Vaswani et al. 2017, §3.5, as if the model were ``fixed`` wide; rows of the table behind it."""
    out, fixed = x.double().clone(), encoding.fixed
    rows = encoding.weight.detach().double()
    for token, p in enumerate(positions.tolist()):
        for channel in range(fixed):
            out[token, channel] += wave(encoding, p, channel)
        out[token, fixed:] += rows[min(p, encoding.length - 1)]
    return out


def wave(encoding, p, channel):
    fixed, paper = encoding.fixed, encoding.frequency_rule == "paper"
    sines = (fixed + 1) // 2 if paper else fixed // 2
    if not paper and channel >= 2 * sines:
        return 0.0
    if encoding.layout == "interleaved":
        pair, is_cosine = divmod(channel, 2)
    else:
        pair, is_cosine = channel % sines, channel >= sines
    angle = p * encoding.base ** (-2 * pair / fixed if paper else -pair / (sines - 1))
    return cos(angle) if is_cosine else sin(angle)


@each_convention
@pytest.mark.parametrize("fixed", [4, 7])
def test_conforms(convention, fixed):
    conform(
        lambda shape: Hybrid(shape.dim, fixed, shape.max_length, **convention),
        oracle,
        other=lambda shape: Hybrid(shape.dim, fixed + 3, 2 * shape.max_length, base=500.0),
        claims=(),
        skip=() if fixed == 4 and convention == CONVENTIONS[0] else {"graph capture"},
    )


def test_clamped_conforms_at_any_length():
    conform(
        lambda shape: Hybrid(shape.dim, 8, shape.max_length, past_end="clamp"),
        oracle,
        claims=("any-length",),
        skip={"graph capture"},
    )


def test_the_spec_builds_one_with_halves():
    conform(Hybrid, oracle, skip={"graph capture"})


@each_convention
@pytest.mark.parametrize("fixed", [4, 5, 8, 15])
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_the_fixed_block_is_a_sinusoidal_code_of_its_own_width_bit_for_bit(convention, fixed, dtype):
    hybrid, x, at = Hybrid(16, fixed, 1000, **convention), torch.randn(3, 9, 16).to(dtype), torch.arange(9) * 111
    assert torch.equal(hybrid(x, at)[..., :fixed], Sinusoidal(fixed, **convention)(x[..., :fixed], at))


def test_frequencies_do_not_use_the_width_of_the_model():
    at = torch.arange(9)
    ours, cut = Hybrid(16, 8, 9).table(at), Sinusoidal(16).table(at)[:, :8]
    assert not torch.allclose(ours, cut, atol=0.1)


def test_only_rows_that_were_read_get_a_gradient():
    hybrid = Hybrid(6, 4, 8)
    x = torch.zeros(3, 6, requires_grad=True)
    hybrid(x, torch.tensor([1, 1, 5])).sum().backward()
    assert [name for name, _ in hybrid.named_parameters()] == ["weight"]
    assert hybrid.weight.grad.tolist() == [[0, 0], [2, 2], [0, 0], [0, 0], [0, 0], [1, 1], [0, 0], [0, 0]]
    assert x.grad.eq(1).all()


def test_past_the_end_the_fixed_block_counts_on():
    hybrid = Hybrid(8, 4, 3, past_end="clamp")
    out = hybrid(torch.zeros(3, 8), torch.tensor([2, 3, 1000]))
    assert torch.equal(out[:, 4:], hybrid.weight[2].expand(3, 4))
    assert torch.equal(out[:, :4], Sinusoidal(4).table(torch.tensor([2, 3, 1000])))


@pytest.mark.parametrize("positions", [[3], [0, 3], [-1], [1 << 40]])
def test_there_are_no_rows_elsewhere(positions):
    at = torch.tensor(positions)
    with pytest.raises(ValueError, match=r"Hybrid: position -?\d+. Expected positions from 0 to 2; .* choose past_end='clamp'"):
        Hybrid(8, 4, 3)(torch.zeros(len(at), 8), at)
    if min(positions) < 0:
        with pytest.raises(ValueError, match="Hybrid: position -1. Expected positions of 0 or more"):
            Hybrid(8, 4, 3, past_end="clamp")(torch.zeros(len(at), 8), at)


def test_compiled_calls_refuse_too():
    torch.compiler.reset()
    hybrid = Hybrid(8, 4, 3)
    compiled, x = torch.compile(hybrid, fullgraph=True, backend="aot_eager"), torch.zeros(2, 8)
    assert torch.equal(compiled(x, torch.tensor([0, 2])), hybrid(x, torch.tensor([0, 2])))
    with pytest.raises(RuntimeError, match="a value check failed"):
        compiled(x, torch.tensor([1, 3]))


def test_narrow_integers_do_not_wrap():
    hybrid, at = Hybrid(8, 4, 300), torch.tensor([0, 100, 250], dtype=torch.uint8)
    assert torch.equal(hybrid(torch.zeros(3, 8), at), hybrid(torch.zeros(3, 8), at.long()))


def test_rows_start_small_beside_the_fixed_block():
    hybrid = Hybrid(128, 64, 1000)
    # the deviation of 64,000 draws strays by σ/√(2n), here 0.3 %; five of those
    assert hybrid.weight.std().item() == pytest.approx(0.02, rel=0.014)
    assert hybrid.table(torch.arange(1000)).square().mean().item() == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "rest", "error", "message"),
    [
        ((8, 9, 4), {}, ValueError, "fixed = 9 of dim = 8 channels. Expected 1 to 7. Sinusoidal fixes all"),
        ((8, 8, 4), {}, ValueError, "fixed = 8 of dim = 8"),
        ((8, 0, 4), {}, ValueError, "fixed = 0 of dim = 8 .* Learned none"),
        ((8, 3, 4), {"frequency_rule": "tensor2tensor"}, ValueError, "fixed = 3 of dim = 8 channels. Expected 4 to 7"),
        ((8, 4, 0), {}, ValueError, "length = 0"),
        ((8, 4.0, 4), {}, TypeError, "fixed = 4.0"),
        ((8, 4, 4), {"past_end": "interpolate"}, ValueError, "past_end = 'interpolate'. Expected 'raise' or 'clamp'"),
        ((8, 4, 4), {"layout": "stacked"}, ValueError, "layout = 'stacked'"),
        ((8, 4, 4), {"base": -1.0}, ValueError, "base = -1.0"),
    ],
)
def test_impossible_settings_are_refused(arguments, rest, error, message):
    with pytest.raises(error, match=f"Hybrid: {message}"):
        Hybrid(*arguments, **rest)


@pytest.mark.parametrize(
    ("width", "positions", "error", "message"),
    [
        (6, 0, ShapeError, "x has width 6. Expected 8"),
        (8, torch.zeros(2), TypeError, "because each reads a row of the learned block"),
        (8, torch.zeros(2, dtype=torch.float16), TypeError, "half precision"),
        (8, torch.arange(3), ShapeError, "one position per token"),
    ],
)
def test_impossible_inputs_are_refused(width, positions, error, message):
    with pytest.raises(error, match=f"Hybrid: .*{message}"):
        Hybrid(8, 4, 4)(torch.zeros(2, width), positions)
