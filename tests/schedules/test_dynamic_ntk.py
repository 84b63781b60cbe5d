"""NTK-aware scaling that grows with the sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import Geometric, RoPE
from posenc.schedules.dynamic_ntk import DynamicNTK

from . import oracle

RULE = DynamicNTK(Geometric(1e4), 2.0, 2048)


@pytest.mark.parametrize(
    ("factor", "length", "base"),
    [
        (2, 2048, 10000),
        (2, 4096, 30527.736748807),
        (2, 8192, 72195.860086509),
        (1, 8192, 40889.942432486),
        (1, 1000, 10000),
    ],
)
def test_known_bases(factor, length, base):
    inv_freq = DynamicNTK(Geometric(1e4), factor, 2048).frequencies_at(128, length).inv_freq
    # the last frequency is base^(-126/128), and the base is known to 14 digits
    assert inv_freq[-1].item() ** (-128 / 126) == pytest.approx(base, rel=1e-13)


@given(
    st.integers(2, 64),
    st.floats(1.5, 1e7),
    st.floats(1, 64),
    st.integers(1, 10**5),
    st.lists(st.integers(0, 10**6), max_size=3),
)
def test_values(pairs, base, factor, original, lengths):
    inv_freq = (
        DynamicNTK(Geometric(base), factor, original)
        .frequencies_at(2 * pairs, torch.tensor(lengths, dtype=torch.int64))
        .inv_freq
    )
    assert inv_freq.shape == (len(lengths), pairs)
    for row, length in zip(inv_freq.tolist(), lengths, strict=True):
        # the stretch loses the factor's digits to cancellation, then is raised to at most 2
        allowed = oracle.allowed(base * max(1.0, factor * length / original) ** 2) + 16 * factor * oracle.EPS
        assert row == pytest.approx(oracle.dynamic(base, 2 * pairs, factor, original, length), rel=allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 1.3, 8.0])  # 1.3 - 0.3 is not 1 in float32
def test_nothing_changes_up_to_the_original_length(dtype, factor):
    rule = DynamicNTK(Geometric(5e5), factor, 3000)
    lengths = torch.tensor([[0, 1], [2999, 3000]])
    ladder = Geometric(5e5).frequencies(64, dtype=dtype).inv_freq
    assert torch.equal(rule.frequencies_at(64, lengths, dtype=dtype).inv_freq, ladder.expand(2, 2, 32))
    assert not torch.equal(rule.frequencies_at(64, 3001, dtype=dtype).inv_freq, ladder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sequence_is_the_same_alone_and_in_a_batch(dtype):
    # vllm-project/vllm#52665; 64 rows, because long batches go through other kernels than single numbers
    lengths = torch.randint(0, 20_000, (64,))
    together = RULE.frequencies_at(32, lengths, dtype=dtype).inv_freq
    for row, length in zip(together, lengths.tolist(), strict=True):
        assert torch.equal(row, RULE.frequencies_at(32, length, dtype=dtype).inv_freq)
        assert torch.equal(row, RULE.at(length or 1).frequencies(32, dtype=dtype).inv_freq)


def test_an_earlier_long_sequence_leaves_nothing_behind():
    # huggingface/transformers#25104
    before = RULE.frequencies_at(128, 100).inv_freq
    RULE.frequencies_at(128, 100_000)
    assert torch.equal(RULE.frequencies_at(128, 100).inv_freq, before)


def score(query, key):
    """The score of equal unit vectors in pair 40, from two tables."""
    return (query.cos * key.cos + query.sin * key.sin)[..., 40].item()


def test_keys_cached_at_another_length_do_not_follow():
    # huggingface/transformers#25104, #24653: what a pinned length prevents
    short, long = RULE.at(2048).frequencies(128), RULE.at(4096).frequencies(128)
    rope = RoPE(128)
    query, key = rope.prepare(torch.tensor([4095]), torch.tensor([100]), dtype=torch.float64, frequencies=long)
    assert score(query, key) == pytest.approx(0.9999830054, abs=1e-10)
    _, stale = rope.prepare(torch.tensor([4095]), torch.tensor([100]), dtype=torch.float64, frequencies=short)
    assert score(query, stale) == pytest.approx(0.9883220365, abs=1e-10)


def test_each_sequence_turns_by_its_own_frequencies():
    rope, at = RoPE(16), torch.arange(6).expand(2, 6)
    lengths = torch.tensor([2000, 9000])
    both, _ = rope.prepare(at, frequencies=RULE.frequencies_at(16, lengths))
    for row, length in enumerate(lengths.tolist()):
        alone, _ = RoPE(16, RULE.at(length)).prepare(at[row])
        assert torch.equal(both.cos[row], alone.cos)
        assert torch.equal(both.sin[row], alone.sin)


def test_one_graph_serves_all_lengths():
    def run(lengths):
        return RULE.frequencies_at(16, lengths).inv_freq

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for lengths in (torch.tensor([100, 5000]), torch.tensor([2048, 2049])):
        assert torch.equal(compiled(lengths), run(lengths))


@pytest.mark.parametrize("lengths", [torch.tensor([1.0]), torch.tensor([True])])
def test_lengths_that_are_no_integers_are_refused(lengths):
    with pytest.raises(TypeError, match=r"DynamicNTK.frequencies_at: lengths are torch\.\w+. Expected integers, in tokens"):
        RULE.frequencies_at(8, lengths)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match=r"DynamicNTK.frequencies_at: lengths = \[3, -1\]. Expected 0 or more"):
        RULE.frequencies_at(8, torch.tensor([3, -1]))
    with pytest.raises(ValueError, match=r"DynamicNTK.frequencies_at: lengths = -1. Expected an integer of 0 or more"):
        RULE.frequencies_at(8, -1)
    with pytest.raises(TypeError, match=r"DynamicNTK.frequencies_at: lengths = 2.5. Expected an integer"):
        RULE.frequencies_at(8, 2.5)
    with pytest.raises(ValueError, match=r"DynamicNTK.frequencies_at: rotary_dim = 2. Expected 4 or more"):
        RULE.frequencies_at(2, 100)
    with pytest.raises(ValueError, match=r"DynamicNTK: original_length = 0. Expected an integer of 1 or more"):
        DynamicNTK(Geometric(), 2.0, 0)
    with pytest.raises(TypeError, match=r"DynamicNTK: original_length = 2048.0. Expected an integer of 1 or more"):
        DynamicNTK(Geometric(), 2.0, 2048.0)
    with pytest.raises(ValueError, match=r"DynamicNTK: factor = 0.5. Expected a finite number of 1 or more"):
        DynamicNTK(Geometric(), 0.5, 2048)
    # InternLM/lmdeploy#846: a flag that became the number 1
    with pytest.raises(TypeError, match=r"DynamicNTK: factor = True. Expected a finite number of 1 or more"):
        DynamicNTK(Geometric(), True, 2048)
    with pytest.raises(TypeError, match=r"DynamicNTK: schedule = 10000.0. Expected a Geometric"):
        DynamicNTK(10000.0, 2.0, 2048)
