"""A network of logarithmic offsets: the released formula, other windows than the trained one, transformers' Swin v2."""

from __future__ import annotations

from math import copysign, exp, log2

import pytest
import torch
from torch.nn import functional as F

from posenc import Transformer, grid, materialize, positional_attention
from posenc.encodings.swin_v2 import SwinV2Bias
from posenc.testing import SHAPE, conform

F64 = torch.float64


def oracle(encoding, positions, k_positions):
    """Liu et al. 2022, §3.3, with the constants of the released code, pair by pair and unit by unit."""
    numbers = {name: value.detach().double().tolist() for name, value in encoding.named_parameters()}
    sizes = list(zip(encoding.window, encoding.pretrained_window, strict=True))
    bias = torch.zeros(encoding.heads, len(positions), len(k_positions), dtype=F64)
    for i, cell in enumerate(positions.tolist()):
        for j, k_cell in enumerate(k_positions.tolist()):
            inputs = []
            for own, key, (size, known) in zip(cell, k_cell, sizes, strict=True):
                offset = max(1 - size, min(size - 1, own - key)) * 8 / max(known - 1, 1)
                inputs.append(copysign(log2(abs(offset) + 1) / log2(8), offset))
            units = zip(numbers["cpb_mlp.0.weight"], numbers["cpb_mlp.0.bias"], strict=True)
            units = [max(0.0, rise[0] * inputs[0] + rise[1] * inputs[1] + shift) for rise, shift in units]
            for head, row in enumerate(numbers["cpb_mlp.2.weight"]):
                bias[head, i, j] = 16 / (1 + exp(-sum(a * b for a, b in zip(row, units, strict=True))))
    return bias


def off_the_kink(heads, window, **settings):
    """The cell itself, offset (0, 0), starts at the ReLU's kink, where finite differences see half a gradient."""
    encoding = SwinV2Bias(heads, window, **settings)
    torch.nn.init.normal_(encoding.cpb_mlp[0].bias, std=0.02)
    return encoding


@pytest.mark.parametrize("window", [(3, 5), (2, 1)])
def test_conforms(window):
    conform(
        lambda shape: off_the_kink(shape.heads, window, hidden=16),
        oracle,
        claims=SwinV2Bias.spec.claims,
        other=lambda shape: off_the_kink(shape.heads, (4, 2), pretrained_window=(2, 3), hidden=8),
        skip=() if window == (3, 5) else {"graph capture"},
    )


def loud(heads, window, **settings):
    """One whose offsets give visibly different biases."""
    encoding = SwinV2Bias(heads, window, hidden=16, dtype=F64, **settings)
    with torch.no_grad():
        for weight in encoding.parameters():
            weight.normal_()
    return encoding


@pytest.mark.parametrize("pretrained", [None, (2, 2), (8, 3)])
def test_large_weights_follow_the_paper_too(pretrained):
    encoding, at = loud(3, (3, 4), pretrained_window=pretrained), grid(3, 4).positions
    bias = materialize(encoding(), at, dtype=F64)
    # sums of 16 products below 100, each sum some 20 roundings of numbers below 1000; the sigmoid's slope is 4 at most
    torch.testing.assert_close(bias, oracle(encoding, at, at), rtol=0.0, atol=4 * 20 * 1000 * 2**-53)
    assert bool((bias > 0).all())
    assert bool((bias < 16).all())
    assert len(bias[0].unique()) == 5 * 7


def test_another_window_counts_in_the_pretrained_one():
    small = loud(2, (3, 3))
    large = SwinV2Bias(2, (5, 4), pretrained_window=(3, 3), hidden=16, dtype=F64)
    large.load_state_dict(small.state_dict())
    assert torch.equal(large().table[:, 2:7, 1:6], small().table)
    measured_anew = SwinV2Bias(2, (5, 4), hidden=16, dtype=F64)
    measured_anew.load_state_dict(small.state_dict())
    assert not torch.allclose(measured_anew().table[:, 2:7, 1:6], small().table)


def test_the_spec_builds_the_window_of_the_paper():
    (made,) = SwinV2Bias.spec.build(SHAPE)
    assert (made.axes, made.heads, made.window, made.pretrained_window) == (2, SHAPE.heads, (8, 8), (8, 8))
    shapes = {name: tuple(value.shape) for name, value in made.state_dict().items()}
    assert shapes == {"cpb_mlp.0.weight": (512, 2), "cpb_mlp.0.bias": (512,), "cpb_mlp.2.weight": (SHAPE.heads, 512)}


def test_gradients_reach_the_network():
    encoding = loud(2, (2, 3))
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=F64).unbind()

    def call(q, *_):
        return positional_attention(q, k, v, encodings=[encoding], positions=grid(2, 3), backend="reference")

    assert torch.autograd.gradcheck(call, (q.requires_grad_(), *encoding.parameters()), fast_mode=True)


def test_half_precision_and_autocast_leave_the_bias_wide():
    encoding = SwinV2Bias(3, (4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = encoding().table
    assert torch.equal(inside, encoding().table)
    assert SwinV2Bias(3, (4, 4), dtype=torch.bfloat16)().table.dtype == torch.float32


def test_an_encoder_of_pictures_trains():
    model = Transformer(7, dim=16, layers=2, heads=4, kind="encoder", encodings=lambda layer: [SwinV2Bias(4, (2, 3), hidden=8)])
    ids, at = torch.randint(0, 7, (2, 6)), grid(2, 3)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(ids, at).flatten(0, 1), ids.flatten().flip(0)))
        losses[-1].backward()
        assert all(bool((p.grad != 0).any()) for swin in model.encodings for p in swin.parameters())
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(("window", "pretrained"), [((3, 3), (0, 0)), ((2, 4), (0, 0)), ((4, 4), (3, 3)), ((2, 1), (3, 2))])
def test_transformers_swin_v2_loads_and_agrees(window, pretrained):
    """Its whole attention: cosine scores with a factor per head, then the bias."""
    swin = pytest.importorskip("transformers.models.swinv2.modeling_swinv2")
    config = pytest.importorskip("transformers").Swinv2Config(attention_probs_dropout_prob=0.0)
    theirs = swin.Swinv2SelfAttention(config, 32, 4, window, list(pretrained)).double().eval()
    with torch.no_grad():
        theirs.logit_scale.normal_(1.0)
    encoding = SwinV2Bias(4, window, pretrained_window=pretrained if pretrained[0] else None).double()
    # with the tables of offsets that the released checkpoints hold
    state = {f"cpb_mlp.{key}": value for key, value in theirs.continuous_position_bias_mlp.state_dict().items()}
    fixed = {name: getattr(theirs, name) for name in ("relative_coords_table", "relative_position_index")}
    encoding.load_state_dict({**state, **fixed})
    cells = grid(*window)
    x = torch.randn(2, cells.length, 32, dtype=F64)

    def heads(projection):
        return projection(x).unflatten(-1, (4, 8)).transpose(1, 2)

    q, k, v = heads(theirs.query), heads(theirs.key), heads(theirs.value)
    q = F.normalize(q, dim=-1) * theirs.logit_scale.clamp(max=torch.tensor(100.0).log().item()).exp()
    ours = positional_attention(q, F.normalize(k, dim=-1), v, encodings=[encoding], positions=cells, scale=1.0)
    # the bias of 512 units below 10 and offsets that transformers takes in float32 first: 16 · 2^-24 of an input below 2,
    # through slopes of at most 16/4 and a network of gain below 8, then a softmax over scores of that exactness
    torch.testing.assert_close(ours.transpose(1, 2).flatten(2), theirs(x)[0], rtol=0.0, atol=4 * 8 * 32 * 2**-24)


@pytest.mark.parametrize("window", [(1, 5), (5, 1), (1, 1)])
def test_a_window_of_one_row_or_column_is_finite(window):
    encoding = loud(2, window)
    table = encoding().table
    assert table.shape == (2, 2 * window[0] - 1, 2 * window[1] - 1)
    assert bool(table.isfinite().all())


@pytest.mark.parametrize(
    ("arguments", "rest", "error", "message"),
    [
        ((0, (2, 2)), {}, ValueError, "heads = 0. Expected an integer of 1 or more"),
        ((3, 8), {}, ValueError, r"window = 8. Expected \(height, width\)"),
        ((3, (0, 2)), {}, ValueError, "window height = 0"),
        ((3, (2, 2.5)), {}, TypeError, "window width = 2.5"),
        ((3, (2, 2)), {"pretrained_window": (0, 0)}, ValueError, "pretrained_window height = 0"),
        ((3, (2, 2)), {"pretrained_window": 12}, ValueError, "pretrained_window = 12"),
        ((3, (2, 2)), {"hidden": 0}, ValueError, "hidden = 0"),
    ],
)
def test_impossible_settings_are_refused(arguments, rest, error, message):
    with pytest.raises(error, match=f"SwinV2Bias: {message}"):
        SwinV2Bias(*arguments, **rest)
