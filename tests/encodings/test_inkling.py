"""Profiles of distance mixed by the token: the formula, the extent, caches, packing, and transformers' Inkling."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from posenc import CAUSAL, NoPE, ShapeError, Transformer, causal, contiguous, decode, materialize, packed
from posenc import positional_attention as attend
from posenc.attn.cache import GrowingCache, StaticCache
from posenc.core.temperature import LogRatio
from posenc.encodings.inkling import ContentProfile
from posenc.encodings.temperature import LogitTemperature
from posenc.testing import conform

F64 = torch.float64


def oracle(encoding, q, k, x, positions, k_positions):
    """bias(m, Δ) = r_m · P[:, Δ] for 0 ≤ Δ < extent, else 0, with r_m = W x_m; one pair at a time."""
    w, bank = encoding.r_proj.weight.detach().double(), encoding.proj.detach().double()
    bias = torch.zeros(encoding.heads, len(positions), len(k_positions), dtype=F64)
    for i, m in enumerate(positions.tolist()):
        r = (w @ x[i]).view(encoding.heads, encoding.width)
        if encoding.temperature is not None:
            r = r * encoding.temperature(torch.tensor(m))
        for j, n in enumerate(k_positions.tolist()):
            if 0 <= m - n < encoding.extent:
                bias[:, i, j] = r @ bank[:, m - n]
    return bias


def test_conforms():
    conform(ContentProfile, oracle, other=lambda shape: ContentProfile(shape.dim, shape.heads, 3, width=5))


def test_conforms_with_a_temperature():
    conform(
        lambda shape: ContentProfile(shape.dim, shape.heads, 4, temperature=LogRatio(0.1, 2)),
        oracle,
        claims={"any-length"},
        skip={"graph capture", "gradients"},
    )


def test_worked_profile():
    """Two profiles, 1 2 3 and 10 20 30, mixed as 1 + 1 by one head and as -1 · the first by the other."""
    encoding = ContentProfile(1, 2, 3, width=2)
    with torch.no_grad():
        encoding.proj.copy_(torch.tensor([[1.0, 2, 3], [10, 20, 30]]))
        encoding.r_proj.weight.copy_(torch.tensor([[1.0], [1], [-1], [0]]))
    at, keys = torch.tensor([7]), torch.tensor([9, 8, 7, 6, 5, 4, 0, -5_000_000])
    bias, _ = encoding(torch.zeros(2, 1, 4), torch.zeros(1, 8, 4), at, keys, x=torch.ones(1, 1))
    assert materialize(bias, at, keys)[:, 0].tolist() == [[0, 0, 11, 22, 33, 0, 0, 0], [0, 0, -1, -2, -3, 0, 0, 0]]


def drawn(*sizes, **settings):
    """Parameters as large as the content, so that the bias matters."""
    encoding = ContentProfile(*sizes, **settings).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(std=0.5)
    return encoding


def parts(length, heads=4, kv_heads=2, dim=8):
    q = torch.randn(2, heads, length, dim, dtype=F64)
    k, v = torch.randn(2, 2, kv_heads, length, dim, dtype=F64).unbind()
    return q, k, v, torch.randn(2, length, 6, dtype=F64)


def plain_attention(encoding, q, k, v, x, allowed):
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    at = torch.arange(q.shape[2])
    bias = torch.stack([oracle(encoding, q[row], k[row], x[row], at, at) for row in range(len(q))])
    scores = q @ k.mT / sqrt(q.shape[-1]) + bias
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def near(actual, expected):
    # scores of some 30 products near 16 at most, exponentials and sums: some hundred roundings
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=256 * 2**-53 * 16)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_adds_it_after_the_scale(backend, kv_heads):
    encoding, (q, k, v, x) = drawn(6, 4, 5, width=3), parts(12, kv_heads=kv_heads)
    result = attend(q, k, v, encodings=[encoding], positions=0, x=x, mask=CAUSAL, backend=backend)
    near(result, plain_attention(encoding, q, k, v, x, torch.ones(12, 12, dtype=torch.bool).tril()))


@settings(max_examples=12)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_split_over_a_cache_gives_the_whole(steps):
    encoding, length = drawn(6, 4, 5, width=3, temperature=LogRatio(0.5, 3)), sum(steps)
    q, k, v, x = parts(length)
    whole = attend(q, k, v, encodings=[NoPE(), encoding], positions=0, x=x, mask=CAUSAL)
    growing, fixed = GrowingCache(), StaticCache(2, 2, length + 3, 8, dtype=F64)
    for cache in (growing, fixed):
        results, start = [], 0
        for n in steps:
            tokens, new = contiguous(n, start), slice(start, start + n)
            mask = CAUSAL if cache is growing else causal(*cache.place(tokens))
            results.append(
                attend(
                    q[:, :, new], k[:, :, new], v[:, :, new], x=x[:, new],
                    encodings=[NoPE(), encoding], positions=tokens, cache=cache, mask=mask,
                )
            )  # fmt: skip
            start += n
        near(torch.cat(results, 2), whole)


def test_packed_documents_are_what_they_are_apart():
    encoding, (q, k, v, x) = drawn(6, 4, 5, width=3), parts(9)
    tokens = packed(torch.tensor([0, 5, 9]), 9)
    together = attend(q, k, v, encodings=[encoding], positions=tokens, x=x, mask=causal(tokens))
    for document in (slice(0, 5), slice(5, 9)):
        q_part, k_part, v_part = (t[:, :, document] for t in (q, k, v))
        alone = attend(q_part, k_part, v_part, encodings=[encoding], positions=0, x=x[:, document], mask=CAUSAL)
        near(together[:, :, document], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_the_bias(dtype):
    encoding, q, x, at = ContentProfile(6, 2, 4), torch.zeros(2, 5, 8), torch.randn(5, 6), torch.arange(5)
    with torch.autocast("cpu", dtype=dtype):
        bias, _ = encoding(q, q, at, x=x)
    assert torch.equal(bias.logits, encoding(q, q, at, x=x)[0].logits)
    assert encoding.to(dtype)(q, q, at, x=x.to(dtype))[0].logits.dtype == torch.float32


def test_a_decoder_trains_and_generates_the_same_with_and_without_a_cache():
    model = Transformer(
        11, dim=16, layers=2, heads=4, kv_heads=2, encodings=lambda layer: [ContentProfile(16, 4, 5)]
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


@pytest.mark.parametrize("kind", ["hybrid", "hybrid_sliding"])
def test_inkling_loads_and_agrees(kind):
    """The whole attention but its convolutions, positions past the floor of the temperature included."""
    inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    config = pytest.importorskip("transformers").InklingTextConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=3, d_rel=5, rel_extent=6,
        log_scaling_n_floor=4, log_scaling_alpha=0.5, layer_types=[kind], mlp_layer_types=["dense"],
        attention_dropout=0.0, attn_implementation="eager",
    )  # fmt: skip
    theirs = inkling.InklingAttention(config, 0).double().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(std=0.3)
            if "sconv" in name:
                parameter.zero_()  # the convolutions add to keys and values; without them these are the projections
    sliding = kind == "hybrid_sliding"
    factor = None if sliding else LogRatio(0.5, 4)
    encoding = ContentProfile(32, 4, 3 if sliding else 6, width=5, temperature=factor).double()
    state = {name.removeprefix("rel_logits_proj."): value for name, value in theirs.state_dict().items()}
    encoding.load_state_dict({name: state[name] for name in ("r_proj.weight", "proj")})
    x = torch.randn(2, 11, 32, dtype=F64)
    mask = torch.zeros(11, 11, dtype=F64).masked_fill(~CAUSAL.allowed(11, 11, device="cpu"), -torch.inf)
    expected, _ = theirs(x, mask)

    def heads(projected, norm=lambda t: t):
        return norm(projected.unflatten(-1, (-1, 8))).transpose(1, 2)

    q, k, v = heads(theirs.q_proj(x), theirs.q_norm), heads(theirs.k_proj(x), theirs.k_norm), heads(theirs.v_proj(x))
    encodings = [encoding] if factor is None else [LogitTemperature(factor), encoding]
    ours = attend(q, k, v, encodings=encodings, positions=0, x=x, mask=CAUSAL, scale=1 / 8)
    # their norms, and the temperatures they multiply queries and bias by, are float32
    torch.testing.assert_close(theirs.o_proj(ours.transpose(1, 2).flatten(2)), expected, rtol=0.0, atol=64 * 2**-23)


@pytest.mark.parametrize(
    ("arguments", "rest", "error", "message"),
    [
        ((0, 2, 8), {}, ValueError, "dim = 0. Expected an integer of 1 or more"),
        ((8, 2, 0), {}, ValueError, "extent = 0. Expected an integer of 1 or more"),
        ((8, 2, 4.0), {}, TypeError, "extent = 4.0"),
        ((8, 2, 4), {"width": 0}, ValueError, "width = 0"),
        ((8, 2, 4), {"temperature": 1.2}, TypeError, "temperature = 1.2. Expected a function of positions"),
        ((8, 2, 4), {"temperature": LogRatio}, TypeError, "temperature = <class"),
    ],
)
def test_impossible_settings_are_refused(arguments, rest, error, message):
    with pytest.raises(error, match=f"ContentProfile: {message}"):
        ContentProfile(*arguments, **rest)


def test_impossible_inputs_are_refused():
    encoding, q, x, at = ContentProfile(6, 4, 4), torch.zeros(1, 4, 3, 8), torch.zeros(1, 3, 6), torch.arange(3)
    with pytest.raises(TypeError, match="ContentProfile: x is missing. Expected the hidden states"):
        attend(q, q, q, encodings=[encoding], positions=0)
    for queries, states in ((q, x[..., :5]), (q, x[:, :2]), (q[:, :2], x)):
        with pytest.raises(ShapeError, match="ContentProfile: x of shape .* Expected 4 heads and x of "):
            encoding(queries, q, at, x=states)
    with pytest.raises(TypeError, match="QueryTableBias: positions are torch.float32. Expected integers"):
        attend(q, q, q, encodings=[encoding], positions=torch.arange(3.0), x=x)
