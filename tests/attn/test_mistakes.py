"""Mistakes that used to pass in silence, or surface far from their cause."""

from __future__ import annotations

import pytest
import torch

from posenc import (
    CAUSAL,
    ALiBi,
    Geometric,
    GrowingCache,
    InputEncoding,
    Learned,
    NoPE,
    QKEncoding,
    RoPE,
    ScoreEncoding,
    ShapeError,
    Sinusoidal,
    T5Bias,
    Tokens,
    Transformer,
    attention,
    causal,
    contiguous,
    decode,
    grid,
    padded,
    positional_attention,
    prepare,
    same_segment,
    seconds,
    t5_bucket,
    visible,
    window,
)

A = torch.arange
Q = torch.randn(2, 4, 5, 8)
IDS = torch.zeros(2, 5, dtype=torch.int64)


def model(*encodings, **shape):
    settings = {"dim": 16, "layers": 2, "heads": 2, "encodings": list(encodings) or [RoPE(8)], **shape}
    return Transformer(10, **settings).eval()


class NoBias(ScoreEncoding):
    def forward(self):
        return None


class Narrow(InputEncoding):
    def forward(self, x, positions):
        return x[..., :4]


class OnlyQ(QKEncoding):
    def prepare(self, positions, k_positions=None, *, dtype=torch.float32):
        return None

    def transform(self, q, k, prepared):
        return q


MISTAKES = {
    "head width": (lambda: RoPE(8)(Q.repeat(1, 1, 1, 2), Q.repeat(1, 1, 1, 2), 0), ShapeError, "q of width 16.*Expected 8"),
    "head width in a model": (lambda: model(RoPE(4))(IDS, 0), ShapeError, "q of width 8.*Expected 4"),
    "head axis": (lambda: model(RoPE(4, head_axis=-2), heads=5, head_dim=4), ValueError, "head_axis = -2. Expected -3"),
    "bare base": (lambda: RoPE(8, 1e4), TypeError, r"Geometric\(10000.0\)"),
    "bias module": (lambda: attention(Q, Q, Q, bias=ALiBi(4)), TypeError, r"bias is ALiBi.*ALiBi\(8\)\(\)"),
    "scale": (lambda: attention(Q, Q, Q, scale=float("nan")), ValueError, "scale = nan"),
    "no bias": (lambda: model(NoBias())(IDS, 0), TypeError, "NoBias: its forward returned NoneType"),
    "narrow input": (lambda: model(Narrow())(IDS, 0), ShapeError, r"Narrow: its forward returned \(2, 5, 4\)"),
    "only q": (lambda: model(OnlyQ())(IDS, 0), TypeError, "OnlyQ: its transform returned Tensor"),
    "one encoding": (lambda: Transformer(10, dim=16, layers=1, heads=2, encodings=RoPE(8)), TypeError, "Expected a list"),
    "one prepared": (lambda: prepare(RoPE(8), A(5)), TypeError, "Expected a list"),
    "one in attention": (
        lambda: positional_attention(Q, Q, Q, encodings=RoPE(8), positions=0),
        TypeError,
        "Expected a list",
    ),
    "a name": (lambda: model("rope"), TypeError, "'rope' is no encoding"),
    "a class": (lambda: model(RoPE), TypeError, "RoPE.* is no encoding"),
    "ids": (lambda: model()(IDS + 10, 0), ValueError, "ids from 10 to 10. Expected 0 to 9"),
    "positions of another batch": (lambda: model(Sinusoidal(16))(IDS, A(15).reshape(3, 5)), ShapeError, r"batch \(3,\)"),
    "mask of another batch": (
        lambda: model(NoPE())(IDS, padded(torch.ones(3, 5, dtype=torch.int64))),
        ShapeError,
        r"batch \(3,\)",
    ),
    "real order": (lambda: model()(IDS, Tokens(A(5), order=A(5) * 1.0)), TypeError, "order is torch.float32"),
    "half positions unread": (lambda: model(NoPE())(IDS, Tokens(A(5).half())), TypeError, "float16"),
    "real segments": (lambda: same_segment(torch.ones(5)), TypeError, "q_segments is torch.float32"),
    "no order": (lambda: visible(A(5), None), TypeError, "k_order is NoneType"),
    "half a cache": (lambda: model().new_cache(2), ValueError, "Expected both"),
    "one cache for two layers": (lambda: model()(IDS, 0, cache=[GrowingCache()] * 2), ValueError, "one of its own"),
    "too few caches": (lambda: model()(IDS, 0, cache=[]), ValueError, "list of 2 caches"),
    "a cache in an encoder": (
        lambda: model(kind="encoder")(IDS, 0, cache=[GrowingCache(), GrowingCache()]),
        ValueError,
        "sees the future",
    ),
    "additive mask": (lambda: padded(torch.tensor([[0, 0, -10000]])), ValueError, "from -10000 to 0. Expected 0 and 1"),
    "negative length": (lambda: decode(torch.tensor([-1])), ValueError, r"cache_lengths = \[-1\]"),
    "half a token": (lambda: contiguous(2.5), TypeError, "n = 2.5. Expected an integer"),
    "half a cell": (lambda: grid(2.5, 2), TypeError, "axis 0 = 2.5"),
    "endless hop": (lambda: seconds(3, float("inf"), 1), ValueError, "hop = inf"),
    "half a window": (lambda: window(2.5), TypeError, "before = 2.5"),
    "a word for a width": (lambda: Sinusoidal("8"), TypeError, "dim = '8'"),
    "true heads": (lambda: T5Bias(True), TypeError, "heads = True"),
    "half a row": (lambda: Learned(8, 8, past_end="interpolate", length=16.5), TypeError, "length = 16.5"),
    "far start": (lambda: RoPE(8)(Q, Q, 2**63 - 3), ValueError, "positions = 9223372036854775805"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    call, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("spoil", ["backend", "heads", "dtype"])
def test_a_refused_call_leaves_the_cache_as_it_was(kind, spoil):
    cache = GrowingCache() if kind == "growing" else model().new_cache(2, 8)[0]
    if kind == "static":
        cache = type(cache)(2, 4, 8, 8)
    tokens = contiguous(5)

    mask = CAUSAL if kind == "growing" else causal(*cache.place(tokens))
    call = {"encodings": [ALiBi(3)] if spoil == "heads" else [RoPE(8)], "positions": tokens, "mask": mask, "cache": cache}
    v = Q.double() if spoil == "dtype" else Q
    with pytest.raises((ValueError, TypeError)):
        positional_attention(Q, Q, v, **call, backend="nope" if spoil == "backend" else "auto")
    assert cache.empty


def test_generation_starts_from_an_empty_cache():
    net = model()
    cache = net.new_cache()
    net(IDS, 0, cache=cache)
    with pytest.raises(ValueError, match="holds tokens already"):
        net.generate(IDS[:, -1:], 3, cache=cache)


def test_narrow_integer_distances_do_not_wrap():
    assert t5_bucket(torch.tensor([-128], dtype=torch.int8), direction="bidirectional").tolist() == [31]
    assert t5_bucket(torch.tensor([-(2**63)]), direction="bidirectional").tolist() == [31]


def test_a_schedule_of_ones_own_is_a_schedule():
    class Slow:
        def frequencies(self, rotary_dim, *, dtype=torch.float64, device=None):
            return Geometric(1e6).frequencies(rotary_dim, dtype=dtype, device=device)

    assert torch.equal(RoPE(8, Slow())(Q, Q, 0)[0], RoPE(8, Geometric(1e6))(Q, Q, 0)[0])
