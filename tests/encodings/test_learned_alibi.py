"""Slopes that are learned: where they start, their sides, x-transformers' names, and agreement with fixed ones."""

from __future__ import annotations

from math import exp, log

import pytest
import torch

from posenc import CAUSAL, ALiBi, NoPE, Transformer, alibi_slopes, attention, contiguous, materialize
from posenc.encodings.learned_alibi import LearnedALiBi
from posenc.testing import conform

F64 = torch.float64
FORMS = ["causal", "symmetric", "two-sided"]


def oracle(encoding, positions, k_positions):
    """Press et al. 2022, §3, with each slope the exponential of what is stored."""
    past = [exp(s) for s in encoding.learned_logslopes.double().flatten().tolist()]
    future = past
    if encoding.form == "two-sided":
        future = [exp(s) for s in encoding.learned_logslopes_future.double().flatten().tolist()]
    bias = torch.zeros(encoding.heads, len(positions), len(k_positions), dtype=F64)
    for head, (back, ahead) in enumerate(zip(past, future, strict=True)):
        for i, query in enumerate(positions.tolist()):
            for j, key in enumerate(k_positions.tolist()):
                distance = query - key
                towards_future = -ahead if encoding.form == "causal" else ahead
                bias[head, i, j] = -back * distance if distance >= 0 else towards_future * distance
    return bias


def drawn(encoding):
    """Slopes anywhere, those of the two sides different."""
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    return encoding


@pytest.mark.parametrize("form", FORMS)
def test_conforms(form):
    conform(
        lambda shape: drawn(LearnedALiBi(shape.heads, form=form)),
        oracle,
        claims=LearnedALiBi.spec.claims,
        other=lambda shape: drawn(LearnedALiBi(shape.heads, form="two-sided" if form == "causal" else "causal")),
        skip=() if form == "two-sided" else {"graph capture"},
    )


@pytest.mark.parametrize("biased", [1, 2, 3, 6, 8, 12, 20])
@pytest.mark.parametrize("form", FORMS)
def test_slopes_start_at_those_of_alibi(form, biased):
    start = LearnedALiBi(24, form=form, biased_heads=biased, dtype=F64)()
    # a logarithm up to 6 is rounded once, its exponential once
    expected = torch.tensor([*alibi_slopes(biased), *[0.0] * (24 - biased)], dtype=F64)
    torch.testing.assert_close(start.past.detach(), expected, rtol=8 * 2**-53, atol=0.0)
    if form == "causal":
        assert start.future is None
    else:
        torch.testing.assert_close(start.future.detach(), expected, rtol=8 * 2**-53, atol=0.0)


def test_in_bfloat16_slopes_start_within_its_rounding():
    slopes = LearnedALiBi(8, dtype=torch.bfloat16)().past
    assert slopes.dtype == F64
    # logarithms up to 5.5 have 8 bits: off by 2⁻⁷
    torch.testing.assert_close(slopes.detach(), torch.tensor(alibi_slopes(8), dtype=F64), rtol=1.01 * 2**-6, atol=0.0)


def test_the_two_sides_learn_apart():
    encoding = drawn(LearnedALiBi(2, form="two-sided").double())
    bias = materialize(encoding(), torch.tensor([5]), torch.tensor([3, 5, 8]), dtype=F64)[:, 0]
    past, future = encoding.learned_logslopes.exp().flatten(), encoding.learned_logslopes_future.exp().flatten()
    torch.testing.assert_close(bias, torch.stack([-2 * past, 0 * past, -3 * future], -1), rtol=4 * 2**-53, atol=0.0)
    bias[:, 0].sum().backward()
    assert bool((encoding.learned_logslopes.grad != 0).all())
    assert bool((encoding.learned_logslopes_future.grad == 0).all())


def test_heads_without_bias_have_no_parameters():
    # lucidrains/x-transformers#85
    encoding = LearnedALiBi(8, biased_heads=4)
    assert encoding.learned_logslopes.shape == (4, 1, 1)
    assert bool((materialize(encoding(), torch.arange(5))[4:] == 0).all())


def test_names_and_shapes_are_those_of_x_transformers():
    theirs = torch.tensor([0.3, 0.7, 0.2]).log().view(3, 1, 1)
    encoding = LearnedALiBi(3)
    encoding.load_state_dict({"learned_logslopes": theirs})
    bias = materialize(encoding(), torch.tensor([2]), torch.tensor([0]))
    torch.testing.assert_close(bias.flatten(), -2 * torch.tensor([0.3, 0.7, 0.2]))
    assert list(LearnedALiBi(3, form="two-sided").state_dict()) == ["learned_logslopes", "learned_logslopes_future"]


def test_slopes_stay_positive_whatever_is_learned():
    """A plain parameter would be negative after the first of these steps."""
    encoding = LearnedALiBi(4)
    optimizer = torch.optim.SGD(encoding.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        (100 * encoding().past.sum()).backward()
        optimizer.step()
        assert bool((encoding().past > 0).all())
    assert encoding().past.max() < 0.01


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("form", ["causal", "symmetric"])
def test_attention_is_that_of_fixed_slopes_at_the_start(form, backend):
    q, k, v = torch.randn(3, 2, 6, 7, 8, dtype=F64)
    fixed = attention(q, k, v, bias=ALiBi(6, form=form)(), mask=CAUSAL, backend=backend)
    learned = attention(q, k, v, bias=LearnedALiBi(6, form=form, dtype=F64)(), mask=CAUSAL, backend=backend)
    torch.testing.assert_close(learned, fixed, rtol=0.0, atol=256 * 2**-53)


@pytest.mark.parametrize("slots", [None, 12])
@pytest.mark.parametrize("form", FORMS)
def test_a_decoder_trains_and_generates_the_same_with_a_cache(form, slots):
    model = Transformer(11, dim=16, layers=2, heads=4, kv_heads=2, encodings=[NoPE(), LearnedALiBi(4, form=form)]).double()
    ids = torch.randint(0, 11, (2, 9))
    torch.nn.functional.cross_entropy(model(ids, 0)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert bool((model.encodings[1].learned_logslopes.grad != 0).all())
    model.eval()
    cache = model.new_cache(*(() if slots is None else (2, slots)))
    steps = [
        model(ids[:, first:last], contiguous(last - first, first), cache=cache) for first, last in ((0, 4), (4, 5), (5, 9))
    ]
    # two layers of some hundred float64 roundings of logits below 10
    torch.testing.assert_close(torch.cat(steps, 1), model(ids, 0), rtol=0.0, atol=1e4 * 2**-53)


def test_an_encoder_tells_left_from_right_only_with_two_sides():
    ids = torch.tensor([[1, 2, 3, 4, 3, 2, 5]])
    for form, told in (("symmetric", False), ("two-sided", True)):
        encoding = LearnedALiBi(2, form=form)
        if told:
            with torch.no_grad():
                encoding.learned_logslopes_future.fill_(log(0.9))
        model = Transformer(7, dim=8, layers=1, heads=2, kind="encoder", encodings=[encoding]).double().eval()
        there, back = model(ids, 0), model(ids.flip(1), 0).flip(1)
        # one layer of some hundred float64 roundings of logits below 10
        assert ((there - back).abs().max() > 1e4 * 2**-53) == told


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"heads": 0}, ValueError, "heads = 0"),
        ({"heads": 4, "biased_heads": 5}, ValueError, "heads = 4, biased_heads = 5. Expected 1 ≤ biased_heads ≤ heads"),
        ({"heads": 4, "biased_heads": 2.0}, TypeError, "biased_heads = 2.0"),
        ({"heads": 4, "form": "both"}, ValueError, "form = 'both'. Expected 'causal', 'symmetric' or 'two-sided'"),
    ],
)
def test_impossible_settings_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"LearnedALiBi: {message}"):
        LearnedALiBi(**arguments)
