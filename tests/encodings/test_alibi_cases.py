"""Linear biases where they are used: other implementations' slopes, sign, padding, shards and encoders, through attention."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from posenc import (
    CAUSAL,
    FULL,
    ALiBi,
    Transformer,
    alibi_slopes,
    attention,
    causal,
    contiguous,
    materialize,
    packed,
    padded,
    positional_attention,
    slice_heads,
)
from posenc.encodings.learned_alibi import LearnedALiBi

F64 = torch.float64
each_backend = pytest.mark.parametrize("backend", ["reference", "sdpa"])


def near(actual, expected):
    # a dozen scores near 10 in float64, their exponentials and a sum: some hundred roundings of numbers near 1
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=256 * 2**-53 * 8)


def parts(length, heads=6, kv_heads=2, dim=8):
    q = torch.randn(2, heads, length, dim, dtype=F64)
    return q, *torch.randn(2, 2, kv_heads, length, dim, dtype=F64)


def weights(bias, mask, length, heads, backend):
    """The attention weights of zero content, ``[heads, q, k]``: values that are the unit vectors."""
    q = torch.zeros(1, heads, length, 4, dtype=F64)
    v = torch.eye(length, dtype=F64).expand(1, heads, -1, -1)
    return attention(q, q, v, mask=mask, bias=bias, backend=backend)[0]


@pytest.mark.parametrize("model", ["bloom", "falcon", "mpt"])
def test_slopes_are_those_of_transformers(model):
    # ml-explore/mlx#343: one geometric series for a count that is no power of two
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    for heads in range(1, 65):
        if model == "mpt":
            theirs = -modeling.build_mpt_alibi_tensor(heads, 2).flatten(0, -2)[:, -2]
        else:
            theirs = modeling.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        # falcon goes through bfloat16, the others through a few float32 powers
        near_float = 2**-8 if model == "falcon" else 8 * 2**-24
        torch.testing.assert_close(theirs.double(), torch.tensor(alibi_slopes(heads), dtype=F64), rtol=near_float, atol=0.0)


@each_backend
@pytest.mark.parametrize("heads", [1, 6, 8])
def test_far_tokens_are_never_favoured(heads, backend):
    # meta-pytorch/attention-gym#86: reversed sign
    for encoding in (ALiBi(heads), ALiBi(heads, form="symmetric"), LearnedALiBi(heads), LearnedALiBi(heads, form="two-sided")):
        seen = weights(encoding(), CAUSAL, 9, heads, backend)
        assert bool((seen[:, -1].diff() > 0).all())
        assert bool((seen.triu(1) == 0).all())
    both = weights(ALiBi(heads, form="symmetric")(), FULL, 9, heads, backend)
    assert torch.equal(both.argmax(-1), torch.arange(9).expand(heads, -1))
    near(both, both.flip(-1, -2))


@each_backend
def test_the_bias_comes_after_the_scale(backend):
    """Falcon's is inside: a slope over √d."""
    q, k, v = parts(7, kv_heads=6)
    bias = materialize(ALiBi(6)(), torch.arange(7), dtype=F64)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    for scale in (None, 0.25, 3.0):
        scores = q @ k.mT * (1 / sqrt(8) if scale is None else scale) + bias
        result = attention(q, k, v, mask=CAUSAL, bias=ALiBi(6)(), scale=scale, backend=backend)
        near(result, scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)


@each_backend
def test_heads_without_bias_attend_as_without_positions(backend):
    # lucidrains/x-transformers#85
    q, k, v = parts(7, heads=8)
    result = attention(q, k, v, mask=CAUSAL, bias=ALiBi(8, biased_heads=4)(), backend=backend)
    near(result[:, 4:], attention(q, k, v, mask=CAUSAL, backend=backend)[:, 4:])
    near(result[:, :4], attention(q[:, :4], k[:, :1], v[:, :1], mask=CAUSAL, bias=ALiBi(4)(), backend=backend))


@each_backend
@pytest.mark.parametrize("form", ["causal", "symmetric"])
def test_left_padding_does_not_matter(form, backend):
    # huggingface/transformers#22828
    q, k, v = parts(7)
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    tokens, call = padded(real), {"encodings": [ALiBi(6, form=form)], "backend": backend}
    result = positional_attention(q, k, v, positions=tokens, mask=causal(tokens), **call)
    for row, first in ((0, 2), (1, 0)):
        alone = (t[row : row + 1, :, first:] for t in (q, k, v))
        near(result[row : row + 1, :, first:], positional_attention(*alone, positions=0, mask=CAUSAL, **call))


def test_key_terms_are_those_of_bloom_under_any_mask():
    # huggingface/transformers#22828: the cumulative mask; real tokens differ by a constant, which the softmax drops
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    theirs = bloom.build_alibi_tensor(real, 6, torch.float32).view(3, 6, 5)
    ours = materialize(ALiBi(6)(), padded(real).positions)
    for row, kept in enumerate(real.bool()):
        terms, last = theirs[row, :, kept], ours[row][:, kept][:, -1][:, kept]
        torch.testing.assert_close(last - last[:, :1], terms - terms[:, :1], rtol=0.0, atol=8 * 2**-24 * 4)
    assert (theirs[0, 4, 2:] - theirs[0, 4, 2]).tolist() == [0, 0.5, 1.0]


@each_backend
def test_few_queries_are_level_with_the_end_of_the_keys(backend):
    q, k, v = parts(7)
    whole = attention(q, k, v, mask=CAUSAL, bias=ALiBi(6)(), backend=backend)
    for n in (1, 3):
        near(attention(q[:, :, -n:], k, v, mask=CAUSAL, bias=ALiBi(6)(), backend=backend), whole[:, :, -n:])


@each_backend
def test_packed_documents_are_what_they_are_apart(backend):
    q, k, v = parts(9)
    tokens, call = packed(torch.tensor([0, 5, 9]), 9), {"encodings": [ALiBi(6)], "backend": backend}
    together = positional_attention(q, k, v, positions=tokens, mask=causal(tokens), **call)
    for part in (slice(0, 5), slice(5, 9)):
        alone = positional_attention(*(t[:, :, part] for t in (q, k, v)), positions=0, mask=CAUSAL, **call)
        near(together[:, :, part], alone)


def test_a_shard_of_heads_keeps_the_slopes_of_the_whole():
    """12 heads on 3 ranks: ALiBi(4) on each would give every rank the slopes of four heads."""
    q, k, v = parts(7, heads=12, kv_heads=12)
    whole = attention(q, k, v, mask=CAUSAL, bias=ALiBi(12)())
    for rank in range(3):
        mine = slice(4 * rank, 4 * rank + 4)
        bias = slice_heads(ALiBi(12)(), mine)
        assert bias.past.tolist() == list(alibi_slopes(12)[mine])
        near(attention(q[:, mine], k[:, mine], v[:, mine], mask=CAUSAL, bias=bias), whole[:, mine])


@pytest.mark.parametrize("heads", [8, 12])
def test_distances_of_a_bfloat16_model_stay_apart(heads):
    """In bfloat16 4096 distances times a slope are 769 numbers."""
    encoding = ALiBi(heads).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        row = materialize(encoding(), torch.tensor([4095]), torch.arange(4096))[:, 0]
    assert all(len(head.unique()) == 4096 for head in row)
    assert len(row[0].to(torch.bfloat16).unique()) < 800


@pytest.mark.parametrize("heads", [3, 4])
def test_encoder_and_decoder_train_and_a_decoder_decodes(heads):
    for kind, form in (("encoder", "symmetric"), ("decoder", "causal")):
        model = Transformer(11, dim=8 * heads, layers=2, heads=heads, kind=kind, encodings=[ALiBi(heads, form=form)]).double()
        ids = torch.randint(0, 11, (2, 9))
        torch.nn.functional.cross_entropy(model(ids, 0).flatten(0, 1), ids.flatten()).backward()
        assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    model.eval()
    for cache in (model.new_cache(), model.new_cache(2, 10)):
        spans = ((0, 4), (4, 5), (5, 9))
        steps = [model(ids[:, first:last], contiguous(last - first, first), cache=cache) for first, last in spans]
        # two layers of some hundred float64 roundings of logits below 10
        torch.testing.assert_close(torch.cat(steps, 1), model(ids, 0), rtol=0.0, atol=1e4 * 2**-53)
