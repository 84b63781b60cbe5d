"""Real models with biases on their scores: the same attention weights from posenc's values, with padding and caches.

Each model runs as it is, in one call or in pieces; its attention weights are then made again by `posenc.attention` from
its own queries and keys, with the identity in place of values. DeBERTa, Swin and Transformer-XL stand beside their
encodings' tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.hf.tiny_models import tiny
from torch import Tensor, nn

from posenc import ALiBi, T5Bias, attention, causal, padded, same_segment
from posenc.core.bias import KeyBias, ScoreBias, SlopeBias
from posenc.core.mask import Mask
from posenc.core.tokens import Tokens
from posenc.encodings.alibi import alibi_slopes

SEQ, HEADS = 14, 4
WHOLE, PIECES = (SEQ,), (6, 5, 1, 1, 1)
PADDED = torch.tensor([[0] * 4 + [1] * (SEQ - 4), [1] * SEQ])
LARGEST = 32.0
"""No score is larger."""
# Product, scale, bias and sum round four times, at 2⁻²⁴ of the score, on both sides; a weight moves by no more than it.
CLOSE = 2 * 4 * LARGEST * 2.0**-24


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Any:
    """transformers' remarks on tiny configurations are not of interest."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def sharp(net: Any) -> Any:
    """Weights that make attention far from uniform, as training does."""
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.ndim == 2 and "embed" not in name and "wte" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=dice) * 1.5 / parameter.shape[1] ** 0.5)
            elif "embed" in name or "wte" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=dice))
    net.set_attn_implementation("eager")
    return net.eval()


def ids() -> Tensor:
    return torch.randint(2, 64, (2, SEQ), generator=torch.Generator().manual_seed(1))


class Recorded:
    """Hidden states and attention weights of one attention module, piece by piece."""

    def __init__(self, module: nn.Module, weights_at: int) -> None:
        self.module: Any = module
        self.states: list[Tensor] = []
        self.weights: list[Tensor] = []
        self._at = weights_at
        self._hook = module.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self.states.append(args[0] if args else kwargs["hidden_states"])
        self.weights.append(out[self._at])


@torch.no_grad()
def in_pieces(
    net: Any, modules: list[Any], weights_at: int, sizes: tuple[int, ...], attended: Tensor | None, weights: bool = True
) -> list[Recorded]:
    """A decoder over the text in pieces, with a cache where there are several."""
    recorded = [Recorded(module, weights_at) for module in modules]
    cache = transformers.DynamicCache(config=net.config) if len(sizes) > 1 else None
    start = 0
    for size in sizes:
        end = start + size
        mask = {} if attended is None else {"attention_mask": attended[:, :end]}
        net(ids()[:, start:end], cache=cache, use_cache=cache is not None, output_attentions=weights, **mask)
        start = end
    return recorded


def agree(
    recorded: Recorded,
    project: Callable[[Any, Tensor], tuple[Tensor, Tensor]],
    bias: ScoreBias,
    tokens: Tokens,
    mask: Callable[[Tokens, Tokens], Mask],
    scale: float | None,
) -> float:
    """The largest difference of attention weights, over all pieces and queries that are not padding."""
    keys, start, worst = torch.empty(0), 0, 0.0
    for states, theirs in zip(recorded.states, recorded.weights, strict=True):
        with torch.no_grad():
            q, k = project(recorded.module, states)
        keys = k if start == 0 else torch.cat([keys, k], 2)
        end = start + q.shape[2]
        queries, known = part(tokens, start, end), part(tokens, 0, end)
        values = torch.eye(end).expand(*keys.shape[:2], -1, -1)
        ours = attention(
            q, keys, values, mask=mask(queries, known), bias=bias, positions=queries.positions,
            k_positions=known.positions, scale=scale,
        )  # fmt: skip
        real = torch.ones(2, end - start, dtype=torch.bool)
        if queries.segments is not None:
            real = queries.segments >= 0
        assert theirs.shape == ours.shape
        assert float((q @ keys.mT).abs().max()) * (q.shape[-1] ** -0.5 if scale is None else scale) < LARGEST
        worst = max(worst, float((ours - theirs).detach().abs().amax((1, 3))[real].max()))
        start = end
    assert start == SEQ
    return worst


def part(tokens: Tokens, start: int, end: int) -> Tokens:
    segments = None if tokens.segments is None else tokens.segments[..., start:end]
    return Tokens(tokens.positions[..., start:end], None, segments)


def tokens_of(attended: Tensor | None) -> Tokens:
    return Tokens(torch.arange(SEQ)) if attended is None else padded(attended)


decoding = pytest.mark.parametrize("sizes", [WHOLE, PIECES], ids=["whole", "pieces"])
padding = pytest.mark.parametrize("attended", [None, PADDED], ids=["full", "padded"])


# ----------------------------------------------------------------------------------------------------------------------
# T5: no softmax scale, one table for all layers


def t5() -> Any:
    net = tiny_t5()
    for stack in (net.encoder, net.decoder):
        nn.init.normal_(stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight, std=2.0)
    return net


def tiny_t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
        relative_attention_max_distance=10, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return sharp(transformers.T5ForConditionalGeneration(config))


def t5_heads(module: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (linear(states).unflatten(-1, (4, 8)).transpose(1, 2) for linear in (module.q, module.k))
    return q, k


def t5_bias(stack: Any, **settings: Any) -> ScoreBias:
    encoding = T5Bias(4, buckets=8, max_distance=10, **settings)
    encoding.relative_attention_bias.weight.data.copy_(stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight)
    return encoding()


@padding
def test_t5_encoder(attended: Tensor | None):
    net = t5()
    recorded = [Recorded(block.layer[0].SelfAttention, 2) for block in net.encoder.block]
    with torch.no_grad():
        net.encoder(ids(), attention_mask=attended, output_attentions=True)
    bias = t5_bias(net.encoder, direction="bidirectional")
    # T5 counts places, padding or not: distances between real tokens are the same
    tokens = tokens_of(attended)
    for layer in recorded:
        everything = torch.zeros(2, SEQ, dtype=torch.int64) if tokens.segments is None else tokens.segments
        assert agree(layer, t5_heads, bias, tokens, lambda q, k: same_segment(everything), 1.0) <= CLOSE  # noqa: B023
        assert agree(layer, t5_heads, bias, tokens, lambda q, k: same_segment(everything), None) > 1e-2  # noqa: B023


@decoding
def test_t5_decoder(sizes: tuple[int, ...]):
    net = t5()
    recorded = [Recorded(block.layer[0].SelfAttention, 2) for block in net.decoder.block]
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    start = 0
    with torch.no_grad():
        encoded = net.encoder(ids())
        for size in sizes:
            text = ids()[:, start : start + size]
            net(encoder_outputs=encoded, decoder_input_ids=text, cache=cache, use_cache=True, output_attentions=True)
            start += size
    bias = t5_bias(net.decoder)
    for layer in recorded:
        assert agree(layer, t5_heads, bias, tokens_of(None), causal, 1.0) <= CLOSE


# ----------------------------------------------------------------------------------------------------------------------
# BLOOM: the key's term alone, counted over attended tokens


def fused(module: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    """q, k and v interleaved head by head, as in BLOOM and Falcon-RW."""
    qkv = module.query_key_value(states).unflatten(-1, (module.num_heads, 3, -1)).transpose(1, 2)
    return qkv[..., 0, :], qkv[..., 1, :]


def bloom(heads: int) -> Any:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=8 * heads, n_layer=2, n_head=heads)
    torch.manual_seed(0)
    return sharp(transformers.BloomForCausalLM(config))


@decoding
@padding
@pytest.mark.parametrize("heads", [4, 6])
def test_bloom(heads: int, sizes: tuple[int, ...], attended: Tensor | None):
    net = bloom(heads)
    layers = [block.self_attention for block in net.transformer.h]
    for layer in in_pieces(net, layers, 1, sizes, attended):
        assert agree(layer, fused, ALiBi(heads)(), tokens_of(attended), causal, None) <= CLOSE


def test_bloom_counts_attended_tokens_alone():
    """Its positions are the running sum of the mask, so a hole in it moves keys together; `padded` counts likewise."""
    net, attended = bloom(4), torch.ones(2, SEQ, dtype=torch.int64)
    attended[0, 5:8] = 0
    (layer, _) = in_pieces(net, [block.self_attention for block in net.transformer.h], 1, WHOLE, attended)
    assert agree(layer, fused, ALiBi(4)(), padded(attended), causal, None) <= CLOSE
    by_place = Tokens(torch.arange(SEQ), None, padded(attended).segments)
    assert agree(layer, fused, ALiBi(4)(), by_place, causal, None) > 1e-2


# ----------------------------------------------------------------------------------------------------------------------
# MPT: distances from the last place of its longest sequence


def mpt_heads(module: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    q, k, _ = module.Wqkv(states).chunk(3, -1)
    return tuple(x.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for x in (q, k))  # type: ignore[return-value]


@decoding
@padding
@pytest.mark.parametrize("heads", [4, 6])
def test_mpt(heads: int, sizes: tuple[int, ...], attended: Tensor | None):
    config = transformers.MptConfig(vocab_size=64, d_model=8 * heads, n_heads=heads, n_layers=2, max_seq_len=32)
    torch.manual_seed(0)
    net = sharp(transformers.MptForCausalLM(config))
    for layer in in_pieces(net, [block.attn for block in net.transformer.blocks], 1, sizes, attended):
        assert agree(layer, mpt_heads, ALiBi(heads)(), tokens_of(attended), causal, None) <= CLOSE


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 7, 12, 16, 20])
def test_mpt_takes_the_slopes_of_the_next_power_of_two_and_ends_at_the_same_ones(heads: int):
    build = pytest.importorskip("transformers.models.mpt.modeling_mpt").build_mpt_alibi_tensor
    theirs = -build(heads, 2)[:, 0, 0]
    torch.testing.assert_close(theirs, torch.tensor(alibi_slopes(heads)), rtol=2.0**-22, atol=0.0)


# ----------------------------------------------------------------------------------------------------------------------
# Falcon with ALiBi: before the scale, in bfloat16


def falcon() -> Any:
    config = tiny("falcon").config(alibi=True, multi_query=False, new_decoder_architecture=False)
    return sharp(tiny("falcon").build(config))


def falcon_bias(heads: int, head_dim: int, positions: Tensor) -> KeyBias:
    """What Falcon adds, after the scale: ``slope · position / √head_dim``, rounded to bfloat16 before the division."""
    rounded = torch.tensor(alibi_slopes(heads)).bfloat16()[:, None] * positions[..., None, :]
    return KeyBias(rounded.float() / head_dim**0.5)


def falcon_slopes(net: Any) -> Tensor:
    heads = net.config.num_attention_heads
    return torch.tensor(alibi_slopes(heads), dtype=torch.float64) / (net.config.hidden_size // heads) ** 0.5


@decoding
@padding
def test_falcon_adds_its_bias_before_the_scale(sizes: tuple[int, ...], attended: Tensor | None):
    """Upstream's deviation from the paper, with which its checkpoints were trained: slopes are √head_dim times smaller."""
    net = falcon()
    slopes, tokens = falcon_slopes(net), tokens_of(attended)
    for layer in in_pieces(net, [block.self_attention for block in net.transformer.h], 0, sizes, attended, weights=False):
        states = torch.cat(layer.states, 1)
        qkv = layer.module.query_key_value(states).unflatten(-1, (HEADS, 3, -1)).transpose(1, 2)
        for bias, same in ((SlopeBias(slopes, -slopes), True), (ALiBi(HEADS)(), False)):
            out = attention(*qkv.unbind(-2), mask=causal(tokens), bias=bias, positions=tokens.positions)
            ours = layer.module.dense(out.transpose(1, 2).flatten(2))
            # a sum of values of weights that are CLOSE, through a matrix
            reach = float(layer.module.dense.weight.detach().abs().sum(1).max() * qkv.detach()[..., 2, :].abs().max())
            off = (ours - torch.cat(layer.weights, 1)).detach().abs()
            off = off if tokens.segments is None else off[tokens.segments >= 0]
            assert (float(off.max()) <= CLOSE * reach) == same


@decoding
@padding
def test_falcon_adds_it_twice_where_attention_is_eager(sizes: tuple[int, ...], attended: Tensor | None):
    """Upstream's defect: there it is in the mask as well, so eager attention and sdpa are two models."""
    net = falcon()
    slopes = 2 * falcon_slopes(net)
    for layer in in_pieces(net, [block.self_attention for block in net.transformer.h], 1, sizes, attended):
        assert agree(layer, fused, SlopeBias(slopes, -slopes), tokens_of(attended), causal, None) <= CLOSE


def test_falcon_rounds_its_bias_to_bfloat16():
    """Upstream's second deviation: from position 257 on bfloat16 holds no odd integer, so neighbours get one bias."""
    build = pytest.importorskip("transformers.models.falcon.modeling_falcon").build_alibi_tensor
    length, heads, head_dim = 600, 6, 64
    theirs = build(torch.ones(1, length, dtype=torch.int64), heads, torch.float32).view(heads, length) / head_dim**0.5
    positions = torch.arange(length)
    assert torch.equal(falcon_bias(heads, head_dim, positions).values, theirs)
    exact = torch.tensor(alibi_slopes(heads))[:, None] * positions / head_dim**0.5
    assert torch.equal(theirs[:, :257], exact[:, :257])
    assert bool((theirs[:, 257::2] != exact[:, 257::2]).any(0).all())
    assert len(theirs[4, 256:].unique()) < len(exact[4, 256:].unique()) / 1.9
