"""Linear biases: slopes as released, sign, and the term of the key alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import ALiBi, alibi_slopes, materialize, padded
from posenc.testing import conform, oracles

F64 = torch.float64
FORMS = ["causal", "symmetric"]


@pytest.mark.parametrize("form", FORMS)
def test_conforms(form):
    conform(
        lambda shape: ALiBi(shape.heads, form=form),
        oracles.alibi,
        other=lambda shape: ALiBi(shape.heads, form=form, biased_heads=2),
    )


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (4, [2, 4, 6, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        # ml-explore/mlx#343: no single series for a count that is not a power of two
        (6, [2, 4, 6, 8, 1, 3]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (16, [j / 2 for j in range(1, 17)]),
        (20, [*(j / 2 for j in range(1, 17)), 0.25, 0.75, 1.25, 1.75]),
    ],
)
def test_released_slopes(heads, exponents):
    assert alibi_slopes(heads) == tuple(2.0**-e for e in exponents)


def test_the_series_starts_below_one():
    # paiml/aprender#2143
    assert (alibi_slopes(8)[0], alibi_slopes(8)[-1]) == (0.5, 0.00390625)


@pytest.mark.parametrize("heads", range(1, 65))
def test_strided_and_recursive_rules_agree(heads):
    assert alibi_slopes(heads) == pytest.approx(oracles._released_slopes(heads), rel=64 * 2**-53)


def test_powers_of_two_are_geometric_down_to_2_to_the_minus_8():
    for heads in (1, 2, 4, 8, 16, 32, 64):
        slopes = torch.tensor(alibi_slopes(heads), dtype=F64)
        torch.testing.assert_close(slopes[1:] / slopes[:-1], torch.full((heads - 1,), 2 ** (-8 / heads), dtype=F64))
        assert slopes[-1] == 2**-8


def bias(encoding, positions, k_positions=None):
    k_positions = None if k_positions is None else torch.as_tensor(k_positions)
    return materialize(encoding(), torch.as_tensor(positions), k_positions, dtype=F64)


def test_sign():
    # meta-pytorch/attention-gym#86
    assert bias(ALiBi(8), [5], [2])[0].item() == -1.5
    assert bias(ALiBi(8), [2], [5])[0].item() == 1.5
    assert bias(ALiBi(8, form="symmetric"), [2], [5])[0].item() == -1.5


@given(st.integers(1, 24), st.integers(0, 10**7))
def test_bias_is_linear_and_zero_at_home(heads, start):
    past = bias(ALiBi(heads), [start + 3], range(start, start + 4))[:, 0]
    assert bool((past[:, -1] == 0).all())
    assert bool((past.diff() > 0).all())
    torch.testing.assert_close(past.diff(n=2), torch.zeros(heads, 2, dtype=F64), rtol=0.0, atol=8 * 2**-53)


def test_row_weights():
    for slope, expected in {
        0.5: [0.10153632, 0.1674051, 0.27600434, 0.45505423],
        1 / 256: [0.24853707, 0.24950982, 0.25048637, 0.25146675],
    }.items():
        head = alibi_slopes(8).index(slope)
        weights = bias(ALiBi(8), [3], range(4))[head, 0].softmax(-1)
        assert weights.tolist() == pytest.approx(expected, abs=5e-9)


def test_causal_form_is_a_term_of_the_key_after_the_softmax():
    dense = bias(ALiBi(6), range(9))
    row = torch.tensor(alibi_slopes(6), dtype=F64)[:, None, None] * torch.arange(9)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    weights = [b.expand(6, 9, 9).masked_fill(hidden, -torch.inf).softmax(-1) for b in (dense, row)]
    torch.testing.assert_close(*weights, rtol=1e-14, atol=1e-15)


def test_some_heads_without_bias():
    # lucidrains/x-transformers#85
    encoding = ALiBi(8, biased_heads=4)
    assert encoding.slopes == (*alibi_slopes(4), 0, 0, 0, 0)
    assert bias(encoding, range(5))[4:].eq(0).all()


def test_left_padding_counts_real_tokens():
    # huggingface/transformers#22828
    at = padded(torch.tensor([[0, 0, 1, 1, 1]])).positions
    slope = 0.5
    terms = slope * at[0, 2:] - slope * at[0, 2]
    assert terms.tolist() == [0, 0.5, 1.0]
    assert bias(ALiBi(8), at)[0, 0, -1, 2:].tolist() == [-1.0, -0.5, 0.0]


@pytest.mark.parametrize("heads", [0, -1, 2.5, True])
def test_impossible_counts_are_refused(heads):
    with pytest.raises(ValueError, match=r"alibi_slopes: heads = .* Pass the number of attention heads"):
        alibi_slopes(heads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 0}, "heads = 0"),
        ({"heads": 4, "biased_heads": 5}, "Expected 1 ≤ biased_heads ≤ heads"),
        ({"heads": 4, "biased_heads": 0}, "biased_heads = 0"),
        ({"heads": 4, "form": "both"}, "form = 'both'"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"ALiBi: .*{message}"):
        ALiBi(**arguments)
