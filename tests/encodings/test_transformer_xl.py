"""Transformer-XL's relative positions: the paper's sum, caches, packing, grouped heads, transformers' XLNet and Parakeet."""

from __future__ import annotations

from math import cos, sin, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from posenc import CAUSAL, NoPE, ShapeError, Transformer, causal, contiguous, decode, materialize, packed, padded
from posenc import positional_attention as attend
from posenc.attn.cache import GrowingCache, StaticCache
from posenc.encodings.transformer_xl import TransformerXL
from posenc.testing import conform

F64 = torch.float64


def code_of(distance, dim, layout="concatenated"):
    """R of one distance, from the paper's sinusoids, in float64."""
    angles = [distance * 10_000.0 ** (-2 * i / dim) for i in range(dim // 2)]
    sines, cosines = [sin(a) for a in angles], [cos(a) for a in angles]
    if layout == "concatenated":
        return torch.tensor(sines + cosines, dtype=F64)
    return torch.tensor([value for pair in zip(sines, cosines, strict=True) for value in pair], dtype=F64)


def oracle(encoding, q, k, x, positions, k_positions):
    """Dai et al. 2019, §3.3, terms b, c and d, with the released code's clamp; one pair at a time."""
    w = encoding.r_net.weight.detach().double()
    u, v = encoding.r_w_bias.detach().double(), encoding.r_r_bias.detach().double()
    k = k.repeat_interleave(len(q) // len(k), 0)
    bias = torch.zeros(len(q), len(positions), len(k_positions), dtype=F64)
    projected = {}
    for i, m in enumerate(positions.tolist()):
        for j, n in enumerate(k_positions.tolist()):
            distance = max(-encoding.future, min(encoding.max_distance, m - n))
            if distance not in projected:
                projected[distance] = (w @ code_of(distance, encoding.dim, encoding.layout)).view(len(q), -1)
            r = projected[distance]
            bias[:, i, j] = encoding.scale * (q[:, i] * r + u * k[:, j] + v * r).sum(-1)
    return bias


def test_conforms():
    conform(
        TransformerXL,
        oracle,
        other=lambda shape: TransformerXL(32, shape.heads, shape.head_dim, 4, layout="interleaved", scale=1.0),
    )


def test_conforms_as_an_encoder():
    conform(
        lambda shape: TransformerXL(shape.dim, shape.heads, shape.head_dim, 5, future=3, layout="interleaved"),
        oracle,
        claims=TransformerXL.spec.claims,
        skip={"graph capture", "gradients"},
    )


def codes_read(distances, dim, **settings):
    """What each distance reads, channel by channel, by queries that are unit vectors and a projection that is the identity."""
    encoding = TransformerXL(dim, 1, dim, scale=1.0, **settings).double()
    with torch.no_grad():
        encoding.r_net.weight.copy_(torch.eye(dim))
        encoding.r_w_bias.zero_()
        encoding.r_r_bias.zero_()
    q, at, keys = torch.eye(dim, dtype=F64)[None], torch.zeros(dim, dtype=torch.int64), -torch.as_tensor(distances)
    bias, _ = encoding(q, torch.zeros(1, len(keys), dim, dtype=F64), at, keys)
    return materialize(bias, at, keys, dtype=F64)[0].T


def test_worked_code():
    expected = torch.tensor([0.9092974268, 0.01999866669, -0.4161468365, 0.9998000067], dtype=F64)
    torch.testing.assert_close(codes_read([2], 4, max_distance=2)[0], expected, rtol=0, atol=5e-11)  # ten printed digits
    swapped = expected[[0, 2, 1, 3]]
    torch.testing.assert_close(codes_read([2], 4, max_distance=2, layout="interleaved")[0], swapped, rtol=0, atol=5e-11)


def test_signs_and_the_clamp():
    read = codes_read([-9, -3, -2, -1, 0, 1, 4, 5, 6], 4, max_distance=5, future=2)
    expected = torch.stack([code_of(d, 4) for d in (-2, -2, -2, -1, 0, 1, 4, 5, 5)])
    torch.testing.assert_close(read, expected, rtol=0, atol=8 * 2**-53 * 5)


def test_far_distances_are_exact():
    far = [99_999, 65_537, -99_999]
    expected = torch.stack([code_of(d, 4) for d in far])
    # both form the angle in a few float64 operations: off by their relative error, times the angle
    torch.testing.assert_close(codes_read(far, 4, max_distance=100_000), expected, rtol=0, atol=8 * 2**-53 * 1e5)


def test_an_encoder_reads_its_own_row_above_the_diagonal():
    """An LxL table, shifted, gives there what belongs to other rows; the right one depends on the distance alone."""
    encoding, length = TransformerXL(8, 1, 4, 3).double(), 4
    q = torch.randn(1, 1, 4, dtype=F64).expand(1, length, 4)
    bias, _ = encoding(q, torch.zeros_like(q), torch.arange(length))
    dense = materialize(bias, torch.arange(length), dtype=F64)[0].detach()
    for offset in range(-3, 4):
        diagonal = dense.diagonal(offset)
        assert torch.equal(diagonal, diagonal[:1].expand_as(diagonal))
    assert len(dense.unique()) == 2 * length - 1


def drawn(*sizes, **settings):
    """Parameters as large as the content, so that every term matters."""
    encoding = TransformerXL(*sizes, **settings).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(std=0.5)
    return encoding


def parts(length, heads=4, kv_heads=2, dim=8):
    q = torch.randn(2, heads, length, dim, dtype=F64)
    k, v = torch.randn(2, 2, kv_heads, length, dim, dtype=F64).unbind()
    return q, k, v


def paper_attention(encoding, q, k, v, allowed, scale=None):
    """The paper's A_rel = (q + u)ᵀ k + (q + v)ᵀ W R, scaled as one, for grouped heads too."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    at, w = torch.arange(q.shape[2]), encoding.r_net.weight.detach().unflatten(0, (q.shape[1], q.shape[3]))
    codes = torch.stack([torch.stack([code_of(int(m - n), encoding.dim) for n in at]) for m in at])
    r = torch.einsum("hdc,ijc->hijd", w, codes)
    u_term = (q + encoding.r_w_bias.detach()[:, None]) @ k.mT
    v_term = torch.einsum("bhid,hijd->bhij", q + encoding.r_r_bias.detach()[:, None], r)
    scores = (u_term + v_term) * (1 / sqrt(q.shape[-1]) if scale is None else scale)
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def near(actual, expected):
    # scores of some 30 products near 16 at most, exponentials and sums: some hundred roundings
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=256 * 2**-53 * 16)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_that_of_the_paper(backend, kv_heads):
    encoding, (q, k, v) = drawn(6, 4, 8, 12), parts(12, kv_heads=kv_heads)
    for mask, allowed in ((CAUSAL, torch.ones(12, 12, dtype=torch.bool).tril()), (None, torch.ones(12, 12, dtype=torch.bool))):
        given = {} if mask is None else {"mask": mask}
        result = attend(q, k, v, encodings=[encoding], positions=0, backend=backend, **given)
        near(result, paper_attention(encoding, q, k, v, allowed))


def test_another_softmax_scale_is_given_to_both():
    encoding, (q, k, v) = drawn(6, 4, 8, 12, scale=0.5), parts(12)
    result = attend(q, k, v, encodings=[encoding], positions=0, scale=0.5)
    near(result, paper_attention(encoding, q, k, v, torch.ones(12, 12, dtype=torch.bool), scale=0.5))


@settings(max_examples=12)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_split_over_a_cache_gives_the_whole(steps):
    encoding, length = drawn(6, 4, 8, 7, future=0), sum(steps)
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
    encoding, (q, k, v) = drawn(6, 4, 8, 12), parts(9)
    tokens = packed(torch.tensor([0, 5, 9]), 9)
    together = attend(q, k, v, encodings=[encoding], positions=tokens, mask=causal(tokens))
    for document in (slice(0, 5), slice(5, 9)):
        q_part, k_part, v_part = (t[:, :, document] for t in (q, k, v))
        near(together[:, :, document], attend(q_part, k_part, v_part, encodings=[encoding], positions=0, mask=CAUSAL))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_matter(side):
    encoding, (q, k, v) = drawn(6, 4, 8, 12), parts(7)
    real = torch.tensor([0, 0, 1, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 1, 0, 0])
    tokens, kept = padded(real[None].expand(2, -1)), real.bool()
    result = attend(q, k, v, encodings=[encoding], positions=tokens, mask=causal(tokens))
    alone = attend(q[:, :, kept], k[:, :, kept], v[:, :, kept], encodings=[encoding], positions=0, mask=CAUSAL)
    near(result[:, :, kept], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_the_terms(dtype):
    encoding, q, at = TransformerXL(6, 2, 8, 4), torch.randn(2, 5, 8), torch.arange(5)
    plain = materialize(encoding(q, q, at)[0], at)
    with torch.autocast("cpu", dtype=dtype):
        bias, _ = encoding(q, q, at)
    assert torch.equal(materialize(bias, at), plain)
    half = encoding.to(dtype)(q.to(dtype), q.to(dtype), at)[0]
    assert {t.dtype for t in half.tensors()} == {torch.float32}


def test_a_decoder_trains_and_generates_the_same_with_and_without_a_cache():
    model = Transformer(
        11, dim=16, layers=2, heads=4, kv_heads=2, encodings=lambda layer: [TransformerXL(16, 4, 4, 12, future=0)]
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


def heads_of(projected, heads=4, width=8):
    return projected.unflatten(-1, (heads, width)).transpose(1, 2)


@pytest.mark.parametrize("memory", [0, 5])
def test_xlnet_loads_and_agrees(memory):
    xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    config = pytest.importorskip("transformers").XLNetConfig(d_model=32, n_head=4, n_layer=1, d_inner=8, dropout=0.0)
    model = xlnet.XLNetModel(config).double().eval()
    theirs = model.layer[0].rel_attn
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    encoding, length = TransformerXL(32, 4, 8, 20).double(), 7
    state = theirs.state_dict()
    weights = {"r_net.weight": state["r"].flatten(1).T, "r_w_bias": state["r_w_bias"], "r_r_bias": state["r_r_bias"]}
    encoding.load_state_dict(weights)
    h, mems = torch.randn(length, 2, 32, dtype=F64), torch.randn(memory, 2, 32, dtype=F64)
    every = torch.cat([mems, h])
    r = model.relative_positional_encoding(length, length + memory, bsz=2).double()
    q, k, v = (torch.einsum("ibh,hnd->bnid", t, w) for t, w in ((h, theirs.q), (every, theirs.k), (every, theirs.v)))
    expected = theirs.rel_attn_core(
        *(t.permute(2, 0, 1, 3) for t in (q, k, v)), torch.einsum("ibh,hnd->ibnd", r, theirs.r)
    )  # fmt: skip
    ours = attend(q, k, v, encodings=[encoding], positions=memory, k_positions=0)
    # their codes are float32 from float32 angles up to 12: off by some roundings of those, seen through 32 × 8 products
    torch.testing.assert_close(ours, expected.permute(1, 2, 0, 3), rtol=0.0, atol=12 * 2**-23 * 16)


def test_parakeet_loads_and_agrees():
    parakeet = pytest.importorskip("transformers.models.parakeet.modeling_parakeet")
    config = pytest.importorskip("transformers").ParakeetEncoderConfig(
        hidden_size=32, num_attention_heads=4, attention_dropout=0.0, attn_implementation="eager"
    )
    theirs = parakeet.ParakeetEncoderAttention(config, 0).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    encoding = TransformerXL(32, 4, 8, 20, layout="interleaved").double()
    names = {"r_net.weight": theirs.relative_k_proj.weight, "r_w_bias": theirs.bias_u, "r_r_bias": theirs.bias_v}
    encoding.load_state_dict(names)
    x = torch.randn(2, 9, 32, dtype=F64)
    expected, _ = theirs(x, parakeet.ParakeetEncoderRelPositionalEncoding(config)(x))
    q, k, v = (heads_of(projection(x)) for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    ours = theirs.o_proj(attend(q, k, v, encodings=[encoding], positions=0).transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, expected, rtol=0.0, atol=12 * 2**-23 * 16)  # as above


@pytest.mark.parametrize(
    ("arguments", "rest", "error", "message"),
    [
        ((0, 2, 8, 4), {}, ValueError, "dim = 0. Expected an integer of 1 or more"),
        ((7, 2, 8, 4), {}, ValueError, "dim = 7. Expected an even width"),
        ((8, 2, 8, -1), {}, ValueError, "max_distance = -1. Expected an integer of 0 or more"),
        ((8, 2, 8, 4), {"future": 1.5}, TypeError, "future = 1.5"),
        ((8, 2, 8, 4), {"layout": "half"}, ValueError, "layout = 'half'"),
        ((8, 2, 8, 4), {"scale": 0}, ValueError, "scale = 0. Expected a finite number above 0"),
    ],
)
def test_impossible_settings_are_refused(arguments, rest, error, message):
    with pytest.raises(error, match=f"TransformerXL: {message}"):
        TransformerXL(*arguments, **rest)


def test_impossible_inputs_are_refused():
    encoding, q, at = TransformerXL(8, 4, 8, 4), torch.zeros(1, 4, 3, 8), torch.arange(3)
    for queries, keys in ((q[..., :6], q), (q, q[..., :6]), (q[:, :2], q), (q, q[:, :3])):
        with pytest.raises(
            ShapeError, match="TransformerXL: q of . heads of width . and k of . of width .. Expected 4 heads of"
        ):
            encoding(queries, keys, at)
    with pytest.raises(TypeError, match="positions are torch.float32. Expected integers"):
        attend(q, q, q, encodings=[encoding], positions=torch.arange(3.0))
