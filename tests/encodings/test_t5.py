"""Buckets of distance with a learned scalar each."""

from __future__ import annotations

import pytest
import torch

from posenc import T5Bias, materialize
from posenc.testing import conform, oracles

DIRECTIONS = ["causal", "bidirectional"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_conforms(direction):
    conform(
        lambda shape: T5Bias(shape.heads, direction=direction),
        oracles.t5,
        other=lambda shape: T5Bias(shape.heads, direction=direction, buckets=20, max_distance=70),
    )


def buckets(encoding, relative):
    """The bucket of each ``key - query``, read off a table that holds its own index."""
    with torch.no_grad():
        weight = encoding.relative_attention_bias.weight
        weight.copy_(torch.arange(len(weight))[:, None].expand_as(weight))
    dense = materialize(encoding(), torch.tensor([0]), torch.tensor(relative))
    assert torch.equal(dense, dense[:1].expand_as(dense))
    return dense[0, 0].int().tolist()


def test_buckets_of_both_directions():
    # lucidrains/x-transformers#10, huggingface/candle#727
    relative = [-128, -64, -32, -16, -8, -1, 0, 1, 8, 16, 32, 64, 128]
    expected = [15, 14, 12, 10, 8, 1, 0, 17, 24, 26, 28, 30, 31]
    assert buckets(T5Bias(2, direction="bidirectional"), relative) == expected
    assert buckets(T5Bias(2), [-128, -64, -32, -16, -1, 0, 1, 50]) == [31, 26, 21, 16, 1, 0, 0, 0]
    assert buckets(T5Bias(2), [-127, -129, -1_000_000]) == [31, 31, 31]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("count", "farthest"), [(32, 128), (20, 70), (8, 1000), (64, 256)])
def test_every_distance_reads_the_bucket_of_the_formula(direction, count, farthest):
    encoding = T5Bias(1, buckets=count, max_distance=farthest, direction=direction)
    relative = list(range(-2 * farthest, 2 * farthest))
    assert buckets(encoding, relative) == [oracles._bucket(r, encoding) for r in relative]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bias_equals_transformers(direction):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = pytest.importorskip("transformers").T5Config(num_heads=4, d_model=32, d_kv=8, is_decoder=direction == "causal")
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = T5Bias(4, direction=direction)
    ours.load_state_dict(
        {name: value for name, value in theirs.state_dict().items() if name.startswith("relative_attention_bias")}
    )
    assert torch.equal(materialize(ours(), torch.arange(300)), theirs.compute_bias(300, 300)[0])


def test_every_bucket_in_reach_gets_a_gradient():
    encoding = T5Bias(2, direction="bidirectional")
    materialize(encoding(), torch.arange(200)).sum().backward()
    reached = encoding.relative_attention_bias.weight.grad.ne(0).all(-1)
    # a future distance of 0 does not exist, so the bucket that would hold it is never read
    assert reached.tolist() == [bucket != 16 for bucket in range(32)]


def test_real_positions_are_refused():
    with pytest.raises(TypeError, match="because it looks distances up in a table"):
        materialize(T5Bias(2)(), torch.tensor([0.0, 1.5]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 0}, "heads = 0"),
        ({"heads": 2, "buckets": 31, "direction": "bidirectional"}, "even, bidirectional"),
        ({"heads": 2, "buckets": 1}, "at least 2 buckets"),
        ({"heads": 2, "max_distance": 16}, "max_distance above the 16 exactly held"),
        ({"heads": 2, "direction": "both"}, "direction = 'both'"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"T5Bias: .*{message}"):
        T5Bias(**arguments)
