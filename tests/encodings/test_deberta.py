"""Disentangled attention: the released code's sum, bucket rows, lookup by key, caches, packing, transformers' DeBERTa."""

from __future__ import annotations

from math import ceil, log, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from posenc import (
    CAUSAL,
    NoPE,
    ShapeError,
    Transformer,
    causal,
    contiguous,
    decode,
    materialize,
    packed,
    padded,
    score_mod,
    slice_heads,
)
from posenc import positional_attention as attend
from posenc.attn.cache import GrowingCache, StaticCache
from posenc.core.bias import KeyTableBias, QueryTableBias
from posenc.encodings.deberta import DeBERTa
from posenc.testing import conform

F64 = torch.float64


def row_of(distance, max_distance, buckets):
    """The released code's row of a distance: logarithmic buckets in float64, then a clamp that is short by one above."""
    bucket, span = distance, max_distance
    if buckets is not None:
        half, span = buckets // 2, buckets
        if abs(distance) > half:
            size = ceil(log(abs(distance) / half) / log((max_distance - 1) / half) * (half - 1)) + half
            bucket = size if distance > 0 else -size
    return max(0, min(2 * span - 1, bucket + span))


def oracle(encoding, q, k, x, positions, k_positions):
    """He et al. 2021, eq. 4, with the released code's row for the second term; one pair at a time."""
    table = encoding.rel_embeddings.weight.detach().double()
    if encoding.norm == "layer_norm":
        centred = table - table.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + 1e-7).sqrt()
        table = centred / spread * encoding.LayerNorm.weight.detach().double() + encoding.LayerNorm.bias.detach().double()

    def vectors(name):
        projection = getattr(encoding, name)
        projected = table @ projection.weight.detach().double().T + projection.bias.detach().double()
        return projected.unflatten(-1, (len(q), -1))

    keys = vectors("pos_key_proj") if "c2p" in encoding.terms else None
    queries = vectors("pos_query_proj") if "p2c" in encoding.terms else None
    groups = len(q) // len(k)
    bias = torch.zeros(len(q), len(positions), len(k_positions), dtype=F64)
    for i, m in enumerate(positions.tolist()):
        for j, n in enumerate(k_positions.tolist()):
            row = row_of(m - n, encoding.max_distance, encoding.buckets)
            if keys is not None:
                bias[:, i, j] += encoding.scale * (q[:, i] * keys[row]).sum(-1)
            if queries is not None:
                bias[:, i, j] += encoding.scale * (k[:, j].repeat_interleave(groups, 0) * queries[row]).sum(-1)
    return bias


def test_conforms():
    conform(
        lambda shape: DeBERTa(shape.dim, shape.heads, shape.head_dim, 9, buckets=4, norm="layer_norm", scale=0.2),
        oracle,
        claims=DeBERTa.spec.claims,
        other=lambda shape: DeBERTa(shape.dim, shape.heads, shape.head_dim, 3),
    )


def test_the_catalogued_one_and_each_term_alone_conform():
    slow = {"graph capture", "gradients"}
    conform(DeBERTa, oracle, skip=slow)
    for term in ("c2p", "p2c"):
        conform(
            lambda shape, term=term: DeBERTa(shape.dim, shape.heads, shape.head_dim, 4, terms=[term]),
            oracle,
            claims=DeBERTa.spec.claims,
            skip=slow,
        )


def rows_read(term, distances, max_distance, buckets=None):
    """The row that each distance reads, from a table that holds its rows' numbers."""
    encoding = DeBERTa(1, 1, 1, max_distance, buckets=buckets, terms=[term], scale=1.0).double()
    with torch.no_grad():
        encoding.rel_embeddings.weight.copy_(torch.arange(len(encoding.rel_embeddings.weight))[:, None])
        for projection in (getattr(encoding, "pos_key_proj", None), getattr(encoding, "pos_query_proj", None)):
            if projection is not None:
                projection.weight.fill_(1)
    at, keys = torch.tensor([1000]), 1000 - torch.as_tensor(distances)
    bias, _ = encoding(torch.ones(1, 1, 1, dtype=F64), torch.ones(1, len(keys), 1, dtype=F64), at, keys)
    return materialize(bias, at, keys, dtype=F64)[0, 0].to(torch.int64).tolist()


@pytest.mark.parametrize("term", ["c2p", "p2c"])
def test_worked_rows(term):
    assert rows_read(term, range(-6, 7), 4) == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7]
    # 1 and 2 have buckets of their own, 3 to 7 share the third; a fourth begins at 8, and only the future has a row for it
    assert rows_read(term, [-9, -8, -7, -3, -2, -1, 0, 1, 2, 3, 7, 8, 9], 8, 4) == [0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7]


def test_rows_of_the_released_settings():
    distances = [*range(-600, 601)]
    assert rows_read("c2p", distances, 512, 256) == [row_of(d, 512, 256) for d in distances]
    # exactly held to 128; then 127 logarithmic steps to 511
    some = [0, 1, 127, 128, 129, 130, 131, 132, 200, 300, 510, 511, 512, 10_000]
    assert rows_read("c2p", some, 512, 256) == [256, 257, 383, 384, 385, 386, 387, 387, 425, 463, 511, 511, 511, 511]
    assert rows_read("c2p", [-d for d in some], 512, 256) == [256, 255, 129, 128, 127, 126, 125, 125, 87, 49, 1, 1, 0, 0]


@pytest.mark.parametrize(("buckets", "max_distance"), [(256, 512), (4, 4), (6, 20), (32, 128), (16, 4096)])
def test_rows_equal_transformers(buckets, max_distance):
    deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    distances = torch.arange(-max_distance - 3, max_distance + 4)
    theirs = deberta.make_log_bucket_position(distances, buckets, max_distance).long() + buckets
    assert rows_read("c2p", distances, max_distance, buckets) == theirs.clamp(0, 2 * buckets - 1).tolist()


def test_a_lookup_by_key_is_one_by_query_on_its_side():
    logits, at, keys = (
        torch.randn(2, 3, 5, 6, dtype=F64),
        torch.tensor([4, 9, -2]),
        torch.tensor([[0, 1, 7, 3, 3], [8, 2, 2, 0, 5]]),
    )
    bias = KeyTableBias(logits, 2)
    dense = materialize(bias, at, keys, dtype=F64)
    entry = score_mod(bias, at, keys)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in (2, 3, 3, 5))):
        expected = logits[b, h, j, (at[i] - keys[b, j] + 2).clamp(0, 5)]
        assert dense[b, h, i, j] == expected == entry(torch.zeros((), dtype=F64), b, h, i, j)
    assert torch.equal(materialize(slice_heads(bias, slice(1, 3)), at, keys, dtype=F64), dense[:, 1:])
    block = bias.block(slice(1, 3), slice(2, 5))
    assert torch.equal(materialize(block, at[1:], keys[:, 2:], dtype=F64), dense[:, :, 1:, 2:])
    assert bias.with_tensors((2 * logits,)).tensors()[0].equal(2 * logits)
    turned = QueryTableBias(logits.flip(-1), 3)  # the same with queries and keys, and so the sign, exchanged
    assert torch.equal(materialize(turned, keys, at, dtype=F64).mT, dense)


def drawn(*sizes, **settings):
    """Parameters as large as the content, so that every term matters."""
    encoding = DeBERTa(*sizes, **settings).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(std=0.5)
    return encoding


def parts(length, heads=4, kv_heads=2, dim=8):
    q = torch.randn(2, heads, length, dim, dtype=F64)
    k, v = torch.randn(2, 2, kv_heads, length, dim, dtype=F64).unbind()
    return q, k, v


def plain_attention(encoding, q, k, v, allowed):
    at, groups = torch.arange(q.shape[2]), q.shape[1] // k.shape[1]
    bias = torch.stack([oracle(encoding, q[row], k[row], None, at, at) for row in range(len(q))])
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.mT / sqrt(q.shape[-1] * (1 + len(encoding.terms))) + bias
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def near(actual, expected):
    # scores of some 30 products near 16 at most, exponentials and sums: some hundred roundings
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=256 * 2**-53 * 16)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(("kv_heads", "terms"), [(4, ("c2p", "p2c")), (2, ("c2p", "p2c")), (1, ("p2c",)), (2, ("c2p",))])
def test_attention_is_that_of_the_paper(backend, kv_heads, terms):
    encoding, (q, k, v) = drawn(6, 4, 8, 9, buckets=6, terms=terms), parts(12, kv_heads=kv_heads)
    result = attend(q, k, v, encodings=[encoding], positions=0, scale=encoding.scale, backend=backend)
    near(result, plain_attention(encoding, q, k, v, torch.ones(12, 12, dtype=torch.bool)))


@settings(max_examples=12)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_split_over_a_cache_gives_the_whole(steps):
    encoding, length = drawn(6, 4, 8, 5), sum(steps)
    q, k, v = parts(length)
    whole = attend(q, k, v, encodings=[NoPE(), encoding], positions=0, mask=CAUSAL)
    growing, fixed = GrowingCache(), StaticCache(2, 2, length + 3, 8, dtype=F64)
    for cache in (growing, fixed):
        results, start = [], 0
        for n in steps:
            tokens, new = contiguous(n, start), slice(start, start + n)
            mask = CAUSAL if cache is growing else causal(*cache.place(tokens))
            results.append(
                attend(
                    q[:, :, new], k[:, :, new], v[:, :, new],
                    encodings=[NoPE(), encoding], positions=tokens, cache=cache, mask=mask,
                )
            )  # fmt: skip
            start += n
        near(torch.cat(results, 2), whole)


def test_packed_documents_are_what_they_are_apart():
    encoding, (q, k, v) = drawn(6, 4, 8, 5), parts(9)
    tokens = packed(torch.tensor([0, 5, 9]), 9)
    together = attend(q, k, v, encodings=[encoding], positions=tokens, mask=causal(tokens))
    for document in (slice(0, 5), slice(5, 9)):
        q_part, k_part, v_part = (t[:, :, document] for t in (q, k, v))
        near(together[:, :, document], attend(q_part, k_part, v_part, encodings=[encoding], positions=0, mask=CAUSAL))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_matter(side):
    encoding, (q, k, v) = drawn(6, 4, 8, 5), parts(7)
    real = torch.tensor([0, 0, 1, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 1, 0, 0])
    tokens, kept = padded(real[None].expand(2, -1)), real.bool()
    result = attend(q, k, v, encodings=[encoding], positions=tokens, mask=causal(tokens))
    alone = attend(q[:, :, kept], k[:, :, kept], v[:, :, kept], encodings=[encoding], positions=0, mask=CAUSAL)
    near(result[:, :, kept], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_the_terms(dtype):
    encoding, q, at = DeBERTa(6, 2, 8, 9, buckets=4, norm="layer_norm"), torch.randn(2, 5, 8), torch.arange(5)
    plain = materialize(encoding(q, q, at)[0], at)
    with torch.autocast("cpu", dtype=dtype):
        bias, _ = encoding(q, q, at)
    assert torch.equal(materialize(bias, at), plain)
    half = encoding.to(dtype)(q.to(dtype), q.to(dtype), at)[0]
    assert {t.dtype for t in half.tensors()} == {torch.float32}


def test_a_decoder_trains_and_generates_the_same_with_and_without_a_cache():
    model = Transformer(
        11, dim=16, layers=2, heads=4, kv_heads=2, encodings=lambda layer: [DeBERTa(16, 4, 4, 6, buckets=4, scale=0.5)]
    ).double()  # fmt: skip
    ids = torch.randint(0, 11, (2, 9))
    F.cross_entropy(model(ids, 0)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, parameter in model.encodings.named_parameters():
        assert parameter.grad.abs().max() > 0, name
    model.eval()
    whole, cache = model(ids, 0), model.new_cache(2, 12)
    steps = [model(ids[:, :4], 0, cache=cache)]
    steps += [model(ids[:, i : i + 1], decode(torch.tensor([i, i])), cache=cache) for i in range(4, 9)]
    # two layers of some hundred float64 roundings of logits below 10
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0.0, atol=1e4 * 2**-53)
    assert torch.equal(model.generate(ids[:, :4], 5), model.generate(ids[:, :4], 5, cache=model.new_cache(2, 12)))


def their_attention(terms=("c2p", "p2c"), **settings):
    deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    config = pytest.importorskip("transformers").DebertaV2Config(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, relative_attention=True,
        pos_att_type=list(terms), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings,
    )  # fmt: skip
    encoder = deberta.DebertaV2Encoder(config).double().eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(std=0.3)
    return encoder, encoder.layer[0].attention.self


def content(theirs, x):
    return [p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (theirs.query_proj, theirs.key_proj, theirs.value_proj)]


@pytest.mark.parametrize("terms", [("c2p", "p2c"), ("c2p",), ("p2c",)])
@pytest.mark.parametrize("buckets", [None, 6])
def test_deberta_v2_loads_and_agrees(terms, buckets):
    encoder, theirs = their_attention(
        terms, max_relative_positions=9, position_buckets=-1 if buckets is None else buckets, norm_rel_ebd="layer_norm"
    )
    encoding = DeBERTa(32, 4, 8, 9, buckets=buckets, terms=terms, norm="layer_norm").double()
    state = encoder.state_dict() | theirs.state_dict()
    encoding.load_state_dict({name: state[name] for name in encoding.state_dict()})
    x, seen = torch.randn(2, 14, 32, dtype=F64), torch.ones(2, 1, 14, 14, dtype=torch.bool)
    expected, _ = theirs(x, seen, rel_embeddings=encoder.get_rel_embedding())
    ours = attend(*content(theirs, x), encodings=[encoding], positions=0, scale=encoding.scale)
    # their scale is a float32 square root; scores are some tens
    torch.testing.assert_close(ours.transpose(1, 2).flatten(2), expected, rtol=0.0, atol=64 * 2**-23)


def test_shared_projections_are_assigned():
    encoder, theirs = their_attention(max_relative_positions=9, position_buckets=6, share_att_key=True)
    encoding = DeBERTa(32, 4, 8, 9, buckets=6).double()
    encoding.rel_embeddings = encoder.rel_embeddings
    encoding.pos_key_proj, encoding.pos_query_proj = theirs.key_proj, theirs.query_proj
    x, seen = torch.randn(2, 14, 32, dtype=F64), torch.ones(2, 1, 14, 14, dtype=torch.bool)
    expected, _ = theirs(x, seen, rel_embeddings=encoder.get_rel_embedding())
    ours = attend(*content(theirs, x), encodings=[encoding], positions=0, scale=encoding.scale)
    torch.testing.assert_close(ours.transpose(1, 2).flatten(2), expected, rtol=0.0, atol=64 * 2**-23)  # as above


def test_first_version_agrees():
    deberta = pytest.importorskip("transformers.models.deberta.modeling_deberta")
    config = pytest.importorskip("transformers").DebertaConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, relative_attention=True,
        max_relative_positions=5, pos_att_type=["c2p", "p2c"], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = deberta.DisentangledSelfAttention(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    table = torch.randn(10, 32, dtype=F64)
    encoding = DeBERTa(32, 4, 8, 5).double()
    names = {"pos_key_proj.weight": "pos_proj.weight", "pos_query_proj.weight": "pos_q_proj.weight"}
    names |= {"pos_query_proj.bias": "pos_q_proj.bias"}
    state = {ours: theirs.state_dict()[name] for ours, name in names.items()}
    encoding.load_state_dict(state | {"rel_embeddings.weight": table, "pos_key_proj.bias": torch.zeros(32)})
    x, seen = torch.randn(2, 9, 32, dtype=F64), torch.ones(2, 1, 9, 9, dtype=torch.bool)
    at = torch.arange(9)
    relative = (at[:, None] - at)[None]
    expected, _ = theirs(x, seen, rel_embeddings=table, relative_pos=relative)
    packed_heads = theirs.in_proj(x).unflatten(-1, (4, 24)).transpose(1, 2)
    q, k, v = packed_heads.chunk(3, dim=-1)
    q, v = q + theirs.q_bias.view(4, 1, 8), v + theirs.v_bias.view(4, 1, 8)
    ours = attend(q, k, v, encodings=[encoding], positions=0, scale=encoding.scale)
    torch.testing.assert_close(ours.transpose(1, 2).flatten(2), expected, rtol=0.0, atol=64 * 2**-23)  # as above


def test_fewer_queries_than_keys_are_right_where_transformers_swaps_the_bucket_settings():
    """Known there: build_rpos is given max_relative_positions as the bucket count and the bucket count as the maximum."""
    encoder, theirs = their_attention(("p2c",), max_relative_positions=9, position_buckets=6)
    encoding = DeBERTa(32, 4, 8, 9, buckets=6, terms=["p2c"]).double()
    state = encoder.state_dict() | theirs.state_dict()
    encoding.load_state_dict({name: state[name] for name in encoding.state_dict()})
    q, k, _ = content(theirs, torch.randn(2, 14, 32, dtype=F64))
    whole = materialize(encoding(q, k, torch.arange(14))[0], torch.arange(14), dtype=F64)
    last = torch.tensor([13])
    one = materialize(encoding(q[:, :, 13:], k, last, torch.arange(14))[0], last, torch.arange(14), dtype=F64)
    torch.testing.assert_close(one, whole[:, :, 13:], rtol=0.0, atol=64 * 2**-53)
    table = encoder.get_rel_embedding()
    by_heads = theirs.disentangled_attention_bias(q.flatten(0, 1), k.flatten(0, 1), None, table, 2)
    torch.testing.assert_close(whole.flatten(0, 1), by_heads, rtol=0.0, atol=64 * 2**-23)
    shorter = theirs.disentangled_attention_bias(q[:, :, 13:].flatten(0, 1), k.flatten(0, 1), None, table, 2)
    assert not torch.allclose(shorter, by_heads[:, 13:], atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "rest", "error", "message"),
    [
        ((8, 2, 8, 0), {}, ValueError, "max_distance = 0. Expected an integer of 1 or more"),
        ((8, 2, 8.0, 4), {}, TypeError, "head_dim = 8.0"),
        ((8, 2, 8, 4), {"buckets": 5}, ValueError, "buckets = 5, max_distance = 4. Expected an even count of 4 or more"),
        ((8, 2, 8, 5), {"buckets": 8}, ValueError, "buckets = 8, max_distance = 5. Expected an even count"),
        ((8, 2, 8, 9), {"buckets": 4.0}, TypeError, "buckets = 4.0"),
        ((8, 2, 8, 4), {"terms": []}, ValueError, r"terms = \[\]. Expected 'c2p', 'p2c' or both"),
        ((8, 2, 8, 4), {"terms": ["c2p", "p2p"]}, ValueError, r"terms = \['c2p', 'p2p'\]"),
        ((8, 2, 8, 4), {"terms": "c2p"}, ValueError, "terms = 'c2p'"),
        ((8, 2, 8, 4), {"norm": "rms"}, ValueError, "norm = 'rms'. Expected 'none' or 'layer_norm'"),
        ((8, 2, 8, 4), {"scale": -1.0}, ValueError, "scale = -1.0. Expected a finite number above 0"),
    ],
)
def test_impossible_settings_are_refused(arguments, rest, error, message):
    with pytest.raises(error, match=f"DeBERTa: {message}"):
        DeBERTa(*arguments, **rest)


def test_impossible_inputs_are_refused():
    encoding, q, at = DeBERTa(8, 4, 8, 4), torch.zeros(1, 4, 3, 8), torch.arange(3)
    for queries, keys in ((q[..., :6], q), (q, q[..., :6]), (q[:, :2], q), (q, q[:, :3])):
        with pytest.raises(ShapeError, match="DeBERTa: q of . heads of width . and k of . of width .. Expected 4 heads of"):
            encoding(queries, keys, at)
    with pytest.raises(TypeError, match="positions are torch.float32. Expected integers"):
        attend(q, q, q, encodings=[encoding], positions=torch.arange(3.0))
