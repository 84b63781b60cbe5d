"""Fourier features: drawn, doubling and learned frequencies."""

from __future__ import annotations

from math import cos, erf, pi, sin, sqrt

import pytest
import torch

from posenc import ShapeError, grid, patch_centres
from posenc.encodings.fourier import FourierFeatures
from posenc.testing import SHAPE, conform

F64 = torch.float64


def oracle(encoding, x, positions):
    """Tancik et al. 2020, eq. 5; Mildenhall et al. 2020, eq. 4; Li et al. 2021, eqs. 2 and 3."""
    out = x.double().clone()
    for token, place in enumerate(positions.tolist()):
        place = place if encoding.axes else [place]
        code = features(encoding, place)
        if encoding.kind == "learned":
            first, second = encoding.mlp[0], encoding.mlp[2]
            inner = [0.5 * h * (1 + erf(h / sqrt(2))) for h in affine(first, code)]
            code = affine(second, inner)
        out[token] += torch.tensor(code, dtype=F64)
    return out


def features(encoding, place):
    if encoding.kind == "bands":
        bands = encoding.dim // len(place) // 2
        return [wave(2**k * pi * p) for p in place for k in range(bands) for wave in (sin, cos)]
    rows = encoding.weight.detach().double().tolist()
    unit, gain = (2 * pi, 1.0) if encoding.kind == "gaussian" else (1.0, encoding.dim**-0.5)
    angles = [unit * sum(w * p for w, p in zip(row, place, strict=True)) for row in rows]
    return [gain * wave(angle) for wave in (cos, sin) for angle in angles]


def affine(layer, values):
    weight, bias = layer.weight.detach().double().tolist(), layer.bias.detach().double().tolist()
    return [sum(w * v for w, v in zip(row, values, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


# far positions are owed angles of at most one radian per unit of position: 0.03 · 2π · 4 deviations
SETTINGS = {
    "gaussian": ({"kind": "gaussian", "std": 0.03}, FourierFeatures.spec.claims),
    "gaussian of two axes": ({"kind": "gaussian", "std": 0.03, "axes": 2}, FourierFeatures.spec.claims),
    "learned": ({"kind": "learned", "std": 0.2}, FourierFeatures.spec.claims),
    "learned of three axes": ({"kind": "learned", "std": 0.2, "axes": 3}, FourierFeatures.spec.claims),
    "bands": ({"kind": "bands"}, FourierFeatures.spec.claims | {"parameter-free"}),
    "bands of three axes": ({"kind": "bands", "axes": 3}, FourierFeatures.spec.claims | {"parameter-free"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_conforms(name):
    settings, claims = SETTINGS[name]
    conform(
        lambda shape: FourierFeatures(shape.dim, **settings),
        oracle,
        claims=claims,
        # 2^11 π radians per unit of position: no such angle is owed at 10⁷
        skip=({"far positions", "dtypes"} if name == "bands" else set()) | (set() if "axes" in name else {"graph capture"}),
    )


def test_the_spec_builds_the_learned_kind_for_one_axis():
    # drawn at one radian per unit of position, so above one: no such angle is owed at 10⁷
    conform(FourierFeatures, oracle, skip={"graph capture", "far positions", "dtypes"})
    (made,) = FourierFeatures.spec.build(SHAPE)
    assert (made.kind, made.axes) == ("learned", None)


def test_half_precision_inputs_keep_their_dtype():
    x = torch.randn(6, 12)
    for dtype in (torch.bfloat16, torch.float16):
        for settings, _ in SETTINGS.values():
            encoding = FourierFeatures(12, **settings)
            at = torch.rand(6) if encoding.axes is None else torch.rand(6, encoding.axes)
            out, wide = encoding(x.to(dtype), at), encoding(x.to(dtype).float(), at)
            assert out.dtype == dtype
            assert torch.equal(out, wide.to(dtype))


def test_worked_bands():
    code = FourierFeatures(8, 2, "bands").features(torch.tensor([[0.5, 0.25]], dtype=F64), dtype=F64)
    # sin, cos of π/2 and π, then of π/4 and π/2
    expected = [1, 0, 0, -1, sqrt(0.5), sqrt(0.5), 1, 0]
    torch.testing.assert_close(code, torch.tensor([expected], dtype=F64), rtol=0.0, atol=4 * 2**-53)


def test_bands_of_whole_numbers_say_nothing():
    """Why positions have to be normalised."""
    code = FourierFeatures(8, kind="bands").features(torch.arange(1, 5), dtype=F64)
    assert code[:, 0::2].abs().max() < 4 * 8 * pi * 2**-53
    assert code[:, 3::2].sub(1).abs().max() < 1e-12


@pytest.mark.parametrize("std", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("axes", [None, 2, 3])
def test_learned_features_have_the_norm_of_the_paper(std, axes):
    encoding = FourierFeatures(64, axes, "learned", std=std)
    at = torch.randn(50, dtype=F64) if axes is None else torch.randn(50, axes, dtype=F64)
    norm = encoding.features(at, dtype=F64).norm(dim=-1)
    torch.testing.assert_close(norm, torch.full((50,), 1 / sqrt(2), dtype=F64), rtol=0.0, atol=64 * 2**-53)


def test_products_of_gaussian_features_depend_on_the_offset_alone():
    encoding = FourierFeatures(32, 2, std=2.0)
    at = torch.rand(6, 2, dtype=F64)
    moved = at + torch.tensor([0.37, -1.25])
    first, second = (encoding.features(p, dtype=F64).detach() for p in (at, moved))
    # 16 products of angles up to 2π · 2 · 4 deviations · 2 · √2: below 150 radians
    torch.testing.assert_close(first @ first.T, second @ second.T, rtol=0.0, atol=32 * 150 * 2**-53)


def test_gaussian_frequencies_are_drawn_once_saved_and_never_trained():
    encoding = FourierFeatures(2000, 2, std=3.0, generator=torch.Generator().manual_seed(5))
    assert list(encoding.state_dict()) == ["weight"]
    assert [p.requires_grad for p in encoding.parameters()] == [False]
    assert encoding.weight.shape == (1000, 2)
    # the deviation of n draws strays by σ/√(2n); five of those
    assert encoding.weight.std().item() == pytest.approx(3.0, rel=5 / sqrt(2 * 2000))
    twin = FourierFeatures(2000, 2, std=3.0, generator=torch.Generator().manual_seed(5))
    other = FourierFeatures(2000, 2, std=3.0, generator=torch.Generator().manual_seed(6))
    assert torch.equal(twin.weight, encoding.weight)
    assert not torch.equal(other.weight, encoding.weight)
    other.load_state_dict(encoding.state_dict())
    at = torch.rand(4, 2)
    assert torch.equal(other.features(at), encoding.features(at))
    other.reset_parameters(torch.Generator().manual_seed(6))
    assert not other.weight.requires_grad
    assert not torch.equal(other.weight, encoding.weight)


def test_learned_frequencies_are_trained():
    encoding = FourierFeatures(8, 2, "learned", generator=torch.Generator().manual_seed(1))
    twin = FourierFeatures(8, 2, "learned", generator=torch.Generator().manual_seed(1))
    for (name, one), other in zip(encoding.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other), name
    encoding(torch.zeros(6, 8), patch_centres(2, 3).positions).square().sum().backward()
    assert [name for name, _ in encoding.named_parameters()] == [
        "weight",
        "mlp.0.weight",
        "mlp.0.bias",
        "mlp.2.weight",
        "mlp.2.bias",
    ]
    assert all(p.grad.abs().max() > 0 for p in encoding.parameters())


@pytest.mark.parametrize("kind", ["gaussian", "learned"])
def test_half_precision_frequencies_are_refused(kind):
    with pytest.raises(TypeError, match="FourierFeatures: frequencies are torch.bfloat16. Expected float32 or float64"):
        FourierFeatures(8, kind=kind).bfloat16()(torch.zeros(2, 8), 0)


def test_axes_are_told_apart():
    at = grid(2, 2).positions
    for kind in ("gaussian", "learned"):
        encoding = FourierFeatures(8, 2, kind)
        assert not torch.allclose(encoding.features(at), encoding.features(at.flip(-1)))


@pytest.mark.parametrize(
    ("arguments", "rest", "error", "message"),
    [
        ((7,), {}, ValueError, "dim = 7 of kind 'gaussian' with axes = None. Expected a multiple of 2"),
        ((6, 2, "bands"), {}, ValueError, "dim = 6 of kind 'bands' with axes = 2. Expected a multiple of 4"),
        ((8, 2, "nerf"), {}, ValueError, "kind = 'nerf'. Expected 'gaussian', 'bands' or 'learned'"),
        ((8, 0), {}, ValueError, "axes = 0"),
        ((8, 2.0), {}, TypeError, "axes = 2.0"),
        ((8, 2, "bands"), {"std": 1.0}, ValueError, "std = 1.0 of kind 'bands'. Expected none"),
        ((8,), {"std": 0.0}, ValueError, "std = 0.0. Expected a finite number above 0"),
        ((8,), {"std": "1"}, ValueError, "std = '1'"),
    ],
)
def test_impossible_settings_are_refused(arguments, rest, error, message):
    with pytest.raises(error, match=f"FourierFeatures: {message}"):
        FourierFeatures(*arguments, **rest)


@pytest.mark.parametrize(
    ("axes", "width", "positions", "error", "message"),
    [
        (None, 6, 0, ShapeError, "x has width 6. Expected 8"),
        (2, 8, 0, TypeError, "for 2 axes"),
        (2, 8, torch.zeros(4, 3), ShapeError, "positions have shape"),
        (None, 8, torch.zeros(4, dtype=torch.float16), TypeError, "half precision"),
    ],
)
def test_impossible_inputs_are_refused(axes, width, positions, error, message):
    with pytest.raises(error, match=f"FourierFeatures: .*{message}"):
        FourierFeatures(8, axes)(torch.zeros(4, width), positions)
