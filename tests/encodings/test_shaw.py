"""Relative key vectors: the paper's sum, caches, packing, grouped heads, and transformers' Wav2Vec2-BERT."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import (
    CAUSAL,
    NoPE,
    RoPE,
    ShapeError,
    Transformer,
    causal,
    contiguous,
    decode,
    materialize,
    packed,
    padded,
    positional_attention,
)
from posenc.attn.cache import GrowingCache, StaticCache
from posenc.core.temperature import LogN
from posenc.encodings.shaw import ShawRelative
from posenc.encodings.temperature import LogitTemperature
from posenc.testing import conform

F64 = torch.float64


def oracle(encoding, q, k, x, positions, k_positions):
    """Shaw et al. 2018, §3.2: clip(j - i, -k, k) picks the vector; the term is inside the 1/√d."""
    vectors = encoding.distance_embedding.weight.detach().double().tolist()
    bias = torch.zeros(len(q), len(positions), len(k_positions), dtype=F64)
    for head, queries in enumerate(q.tolist()):
        for i, (query, m) in enumerate(zip(queries, positions.tolist(), strict=True)):
            for j, n in enumerate(k_positions.tolist()):
                clipped = max(-encoding.max_distance, min(encoding.future, n - m))
                vector = vectors[encoding.max_distance + clipped]
                bias[head, i, j] = sum(a * b for a, b in zip(query, vector, strict=True)) * encoding.scale
    return bias


@pytest.mark.parametrize("future", [None, 0, 2])
def test_conforms(future):
    conform(
        lambda shape: ShawRelative(shape.head_dim, 4, future=future),
        oracle,
        claims=ShawRelative.spec.claims,
        other=lambda shape: ShawRelative(shape.head_dim, 9, scale=1.0),
        skip=() if future is None else {"graph capture"},
    )


def rows_read(encoding, positions, k_positions):
    """The row that each pair reads, from a query that picks the row's number."""
    with torch.no_grad():
        encoding.distance_embedding.weight[:, 0] = torch.arange(len(encoding.distance_embedding.weight))
    q = torch.zeros(1, len(positions), encoding.head_dim)
    q[..., 0] = 1 / encoding.scale
    bias, _ = encoding(q, q, positions, k_positions)
    return materialize(bias, positions, k_positions)[0].round().to(torch.int64).tolist()


def test_worked_rows():
    keys = torch.arange(-6, 7)
    assert rows_read(ShawRelative(4, 4), torch.tensor([0]), keys) == [[0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8]]
    assert rows_read(ShawRelative(4, 4, future=1), torch.tensor([0]), keys) == [[0, 0, 0, 1, 2, 3, 4, 5, 5, 5, 5, 5, 5]]
    assert rows_read(ShawRelative(4, 4, future=0), torch.tensor([9]), keys + 9) == [[0, 0, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4]]


def parts(length, heads=4, kv_heads=2, dim=8, dtype=F64):
    q = torch.randn(2, heads, length, dim, dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, length, dim, dtype=dtype).unbind()
    return q, k, v


def paper_attention(encoding, q, k, v, allowed, scale=None):
    """e_ij = q_i · (k_j + a_ij) / √d, then the weighted sum of values, for grouped heads too."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    at, vectors = torch.arange(q.shape[2]), encoding.distance_embedding.weight.detach().double()
    offset = (at[None, :] - at[:, None]).clamp(-encoding.max_distance, encoding.future) + encoding.max_distance
    moved = k[:, :, None] + vectors[offset]
    scores = (q[:, :, :, None] * moved).sum(-1) * (1 / sqrt(q.shape[-1]) if scale is None else scale)
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def near(actual, expected):
    # 12 scores of 8 products near 8 at most, exponentials and sums: some hundred roundings of numbers near 1
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=256 * 2**-53 * 8)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_that_of_the_paper(backend, kv_heads):
    encoding, (q, k, v) = ShawRelative(8, 3).double(), parts(12, kv_heads=kv_heads)
    result = positional_attention(q, k, v, encodings=[encoding], positions=0, mask=CAUSAL, backend=backend)
    near(result, paper_attention(encoding, q, k, v, torch.ones(12, 12, dtype=torch.bool).tril()))


def test_another_softmax_scale_is_given_to_both():
    encoding, (q, k, v) = ShawRelative(8, 3, scale=0.5).double(), parts(12)
    result = positional_attention(q, k, v, encodings=[encoding], positions=0, scale=0.5)
    near(result, paper_attention(encoding, q, k, v, torch.ones(12, 12, dtype=torch.bool), scale=0.5))


def test_a_wide_clamp_tells_all_distances_apart_and_far_ones_are_alike():
    q, k, _ = parts(6)
    wide = ShawRelative(8, 6).double()
    bias = materialize(wide(q, k, torch.arange(6))[0], torch.arange(6), dtype=F64)
    assert len(bias[0, 0].flatten().unique()) == 36
    far = torch.tensor([0, 50, 500, 5_000_000])
    narrow = materialize(wide(q[:, :, :1], k, far[-1:] * 2, far)[0], far[-1:] * 2, far, dtype=F64)
    assert bool((narrow == narrow[..., :1]).all())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_split_over_a_cache_gives_the_whole(steps):
    encoding, length = ShawRelative(8, 3).double(), sum(steps)
    q, k, v = parts(length)
    whole = positional_attention(q, k, v, encodings=[NoPE(), encoding], positions=0, mask=CAUSAL)
    growing, fixed = GrowingCache(), StaticCache(2, 2, length + 3, 8, dtype=F64)
    for cache in (growing, fixed):
        results, start = [], 0
        for n in steps:
            tokens, new = contiguous(n, start), slice(start, start + n)
            mask = CAUSAL if cache is growing else causal(*cache.place(tokens))
            results.append(
                positional_attention(
                    q[:, :, new], k[:, :, new], v[:, :, new],
                    encodings=[NoPE(), encoding], positions=tokens, cache=cache, mask=mask,
                )
            )  # fmt: skip
            start += n
        near(torch.cat(results, 2), whole)


def test_packed_documents_are_what_they_are_apart():
    encoding, (q, k, v) = ShawRelative(8, 3).double(), parts(9)
    tokens = packed(torch.tensor([0, 5, 9]), 9)
    together = positional_attention(q, k, v, encodings=[encoding], positions=tokens, mask=causal(tokens))
    for document in (slice(0, 5), slice(5, 9)):
        q_part, k_part, v_part = (t[:, :, document] for t in (q, k, v))
        alone = positional_attention(q_part, k_part, v_part, encodings=[encoding], positions=0, mask=CAUSAL)
        near(together[:, :, document], alone)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_matter(side):
    encoding, (q, k, v) = ShawRelative(8, 3).double(), parts(7)
    real = torch.tensor([0, 0, 1, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 1, 0, 0])
    tokens, kept = padded(real[None].expand(2, -1)), real.bool()
    result = positional_attention(q, k, v, encodings=[encoding], positions=tokens, mask=causal(tokens))
    alone = positional_attention(q[:, :, kept], k[:, :, kept], v[:, :, kept], encodings=[encoding], positions=0, mask=CAUSAL)
    near(result[:, :, kept], alone)


def test_gradients_reach_table_and_queries():
    encoding, (q, k, v) = ShawRelative(4, 1).double(), parts(3, 2, 1, 4)
    table = encoding.distance_embedding.weight

    def call(q, k, v, table):
        return positional_attention(q, k, v, encodings=[encoding], positions=0, mask=CAUSAL, backend="reference")

    assert torch.autograd.gradcheck(call, (*(t.requires_grad_() for t in (q, k, v)), table))


def test_the_term_follows_what_was_done_to_the_query():
    """With a rotation and a temperature in the list, the vectors meet the query that attention sees."""
    encoding, (q, k, v) = ShawRelative(8, 3).double(), parts(6)
    rope, hotter = RoPE(8), LogitTemperature(LogN(2))
    result = positional_attention(q, k, v, encodings=[rope, hotter, encoding], positions=0, mask=CAUSAL)
    turned_q, turned_k = hotter(*rope(q, k, 0), 0)
    near(result, paper_attention(encoding, turned_q, turned_k, v, torch.ones(6, 6, dtype=torch.bool).tril()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_the_term(dtype):
    encoding, q = ShawRelative(8, 3), torch.randn(2, 5, 8)
    with torch.autocast("cpu", dtype=dtype):
        bias, _ = encoding(q, q, torch.arange(5))
    assert torch.equal(bias.logits, encoding(q, q, torch.arange(5))[0].logits)
    assert encoding.to(dtype)(q.to(dtype), q, torch.arange(5))[0].logits.dtype == torch.float32


def test_a_decoder_generates_the_same_with_and_without_a_cache():
    model = Transformer(11, dim=16, layers=2, heads=4, kv_heads=2, encodings=lambda layer: [ShawRelative(4, 3)]).double().eval()
    ids = torch.randint(0, 11, (2, 9))
    whole, cache = model(ids, 0), model.new_cache(2, 12)
    steps = [model(ids[:, :4], 0, cache=cache)]
    steps += [model(ids[:, i : i + 1], decode(torch.tensor([i, i])), cache=cache) for i in range(4, 9)]
    # two layers of some hundred float64 roundings of logits below 10
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0.0, atol=1e4 * 2**-53)


def test_wav2vec2_bert_loads_and_agrees():
    bert = pytest.importorskip("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
    config = pytest.importorskip("transformers").Wav2Vec2BertConfig(
        hidden_size=32, num_attention_heads=4, position_embeddings_type="relative_key",
        left_max_position_embeddings=5, right_max_position_embeddings=2, attention_dropout=0.0, attn_implementation="eager",
    )  # fmt: skip
    theirs = bert.Wav2Vec2BertSelfAttention(config).double().eval()
    encoding = ShawRelative(8, 5, future=2).double()
    state = {key: value for key, value in theirs.state_dict().items() if key.startswith("distance_embedding")}
    encoding.load_state_dict(state)
    x = torch.randn(2, 11, 32, dtype=F64)
    expected, _ = theirs(x)

    def heads(projection):
        return projection(x).unflatten(-1, (4, 8)).transpose(1, 2)

    q, k, v = heads(theirs.linear_q), heads(theirs.linear_k), heads(theirs.linear_v)
    ours = positional_attention(q, k, v, encodings=[encoding], positions=0)
    near(theirs.linear_out(ours.transpose(1, 2).flatten(2)), expected)


@pytest.mark.parametrize(
    ("arguments", "rest", "error", "message"),
    [
        ((0, 4), {}, ValueError, "head_dim = 0. Expected an integer of 1 or more"),
        ((8, -1), {}, ValueError, "max_distance = -1. Expected an integer of 0 or more"),
        ((8, 4), {"future": -2}, ValueError, "future = -2"),
        ((8, 4.0), {}, TypeError, "max_distance = 4.0"),
        ((8, 4), {"scale": 0}, ValueError, "scale = 0. Expected a finite number above 0"),
        ((8, 4), {"scale": "auto"}, ValueError, "scale = 'auto'"),
    ],
)
def test_impossible_settings_are_refused(arguments, rest, error, message):
    with pytest.raises(error, match=f"ShawRelative: {message}"):
        ShawRelative(*arguments, **rest)


def test_impossible_inputs_are_refused():
    encoding, x = ShawRelative(8, 4), torch.zeros(1, 2, 3, 8)
    with pytest.raises(ShapeError, match="ShawRelative: q of width 6. Expected 8, the head width"):
        encoding(x[..., :6], x, torch.arange(3))
    with pytest.raises(TypeError, match="QueryTableBias: positions are torch.float32. Expected integers"):
        positional_attention(x, x, x, encodings=[encoding], positions=torch.arange(3.0))
