"""Mistakes in biases on attention scores."""

from __future__ import annotations

import math

import torch
from tests.audit.bugs.bug import Bug
from torch import Tensor

from posenc import KERPLE, ALiBi, T5Bias, materialize, slice_heads
from posenc.audit.biases.checking import check_bias, check_scores
from posenc.encodings.alibi import alibi_slopes

EIGHT = torch.tensor([2.0**-j for j in range(1, 9)])
TWELVE = torch.tensor(alibi_slopes(12))


def lines(slopes: Tensor):
    """-slope · (query - key)."""
    return lambda q, k: -slopes[:, None, None] * (q[:, None] - k).float()


def of_positions(fn, heads: int = 8, **settings):
    return lambda: check_bias(fn, heads=heads, **settings)


def of_lengths(fn, heads: int = 8, **settings):
    return lambda: check_bias(fn, heads=heads, takes="lengths", **settings)


def of_window(fn, **settings):
    return lambda: check_bias(fn, heads=1, takes="grid", **settings)


def of_scores(fn, **settings):
    return lambda: check_scores(fn, heads=8, head_dim=64, **settings)


def t5(relative: Tensor, *, log_dtype: torch.dtype = torch.float32, rounds=torch.floor, exact_share: int = 2) -> Tensor:
    """T5's buckets of key - query as they are usually written, bidirectional."""
    half = 16
    exact = half // exact_share
    size = relative.abs()
    large = (size.clamp(min=1).to(log_dtype) / exact).log() / math.log(128 / exact) * (half - exact)
    large = (exact + rounds(large.float())).clamp(max=half - 1).long()
    return (relative > 0).long() * half + torch.where(size < exact, size, large)


def key_minus_query(q: Tensor, k: Tensor) -> Tensor:
    return k - q[:, None]


TABLE = T5Bias(8, direction="causal")
with torch.no_grad():
    TABLE.relative_attention_bias.weight.normal_(generator=torch.Generator().manual_seed(0))


def t5_bias(queries: Tensor, keys: Tensor) -> Tensor:
    with torch.no_grad():
        return materialize(TABLE(), queries, keys)


def aligned(fn):
    """The last queries of the keys."""
    return lambda q_len, k_len: fn(torch.arange(k_len - q_len, k_len), torch.arange(k_len))


def key_term(length: int) -> Tensor:
    """The form that adds slope · key: the same after a causal softmax."""
    return EIGHT[:, None, None] * torch.arange(length).float()


DISTANCES = torch.randn(8, 2 * 4096 - 1, generator=torch.Generator().manual_seed(0))


def shifted(rows: int, length: int) -> Tensor:
    """Transformer-XL's shift of a table of distances, the farthest past first."""
    start = 4095 - (length - 1)
    table = DISTANCES[:, None, start : start + rows].expand(-1, length, -1)
    padded = torch.nn.functional.pad(table, (1, 0)).reshape(8, rows + 1, length)
    return padded[:, 1:].reshape(8, length, rows)[..., :length]


def window_rows(stride):
    def rows(height: int, width: int) -> Tensor:
        cells = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        down, across = (cells[:, None] - cells[None]).unbind(-1)
        return (down + height - 1) * stride(height, width) + across + width - 1

    return rows


def softmax_scores(inside: bool):
    def scores(q: Tensor, k: Tensor) -> Tensor:
        bias = aligned(lines(EIGHT))(q.shape[-2], k.shape[-2])
        scale = q.shape[-1] ** -0.5
        return (q @ k.mT + bias) * scale if inside else q @ k.mT * scale + bias

    return scores


def released_kerple(factor: str, rate: str) -> KERPLE:
    values = {"bias_p": torch.linspace(0.5, 2, 8), "bias_a": torch.linspace(0.1, 0.9, 8)}
    kerple = KERPLE(8)
    kerple.load_state_dict({"bias_p": values[factor].view(8, 1, 1), "bias_a": values[rate].view(8, 1, 1)})
    return kerple


def of_kerple(factor: str, rate: str):
    def bias(q: Tensor, k: Tensor) -> Tensor:
        with torch.no_grad():
            return materialize(released_kerple(factor, rate)(), q, k)

    return of_positions(bias, expect=released_kerple("bias_p", "bias_a"))


BUGS = [
    Bug(
        "ALiBi with the sign of query - key",
        "bias-sign",
        "meta-pytorch/attention-gym#86",
        of_positions(lines(-EIGHT)),
        of_positions(lines(EIGHT)),
    ),
    Bug(
        "signed ALiBi in an encoder",
        "bias-future",
        "lucidrains/x-transformers#88",
        of_positions(lines(EIGHT), direction="bidirectional"),
        of_positions(lambda q, k: -EIGHT[:, None, None] * (q[:, None] - k).abs(), direction="bidirectional"),
    ),
    Bug(
        "the key's term of causal ALiBi in an encoder",
        "bias-future",
        "ofirpress/attention_with_linear_biases#5",
        of_lengths(lambda q_len, k_len: key_term(k_len), direction="bidirectional"),
        of_lengths(lambda q_len, k_len: key_term(k_len), direction="causal"),
    ),
    Bug(
        "one ratio of slopes for twelve heads",
        "bias-slopes",
        "ml-explore/mlx#3071, huggingface/transformers#28380",
        of_positions(lines(torch.tensor([2.0 ** (-8 * j / 12) for j in range(1, 13)])), 12, expect=ALiBi(12)),
        of_positions(lines(TWELVE), 12, expect=ALiBi(12)),
    ),
    Bug(
        "exponents of the slopes from 0",
        "bias-slopes",
        "paiml/aprender#2143",
        of_positions(lines(torch.tensor([2.0**-j for j in range(8)]))),
        of_positions(lines(torch.tensor([2.0 ** -(j + 1) for j in range(8)]))),
    ),
    Bug(
        "every rank with the slopes of the first heads",
        "bias-slopes",
        "bigscience-workshop/Megatron-DeepSpeed#227",
        of_positions(lines(EIGHT[:4]), 4, expect=slice_heads(ALiBi(8)(), slice(4, 8))),
        of_positions(lines(EIGHT[4:]), 4, expect=slice_heads(ALiBi(8)(), slice(4, 8))),
    ),
    Bug(
        "slopes sorted",
        "bias-head-order",
        "mosaicml/examples#307",
        of_positions(lines(TWELVE.sort(descending=True).values), 12),
        of_positions(lines(TWELVE), 12),
    ),
    Bug(
        "bias in the heads that should have none",
        "bias-heads",
        "lucidrains/x-transformers#85",
        of_positions(lines(torch.tensor([0.0] * 4 + [2.0 ** (-2 * j) for j in range(1, 5)])), expect=ALiBi(8, biased_heads=4)),
        of_positions(lines(torch.tensor([2.0 ** (-2 * j) for j in range(1, 5)] + [0.0] * 4)), expect=ALiBi(8, biased_heads=4)),
    ),
    Bug(
        "decoding with a bias of one key",
        "bias-alignment",
        "keras-team/keras-hub#2861",
        of_lengths(lambda q_len, k_len: key_term(q_len)),
        of_lengths(lambda q_len, k_len: key_term(k_len)),
    ),
    Bug(
        "relative bias that does not know the cache",
        "bias-alignment",
        "huggingface/candle#899",
        of_lengths(lambda q_len, k_len: t5_bias(torch.arange(q_len), torch.arange(k_len))),
        of_lengths(lambda q_len, k_len: t5_bias(torch.arange(k_len - q_len, k_len), torch.arange(k_len))),
    ),
    Bug(
        "ALiBi from places in the call",
        "bias-positions-ignored",
        "huggingface/transformers#22828",
        of_positions(lambda q, k: aligned(lines(EIGHT))(len(q), len(k))),
        of_positions(lambda q, k: lines(EIGHT)(q, k)),
    ),
    Bug(
        "ALiBi cast to bfloat16 with the model",
        "bias-precision",
        "HabanaAI/vllm-fork#503, bigscience-workshop/Megatron-DeepSpeed#101",
        of_positions(lambda q, k: lines(EIGHT)(q, k).bfloat16().float()),
        of_positions(lambda q, k: lines(EIGHT)(q, k)),
    ),
    Bug(
        "the key's term of ALiBi in float16",
        "bias-precision",
        "bigscience-workshop/Megatron-DeepSpeed#101",
        of_lengths(lambda q_len, k_len: key_term(k_len).half(), length=4096),
        of_lengths(lambda q_len, k_len: key_term(k_len), length=4096),
    ),
    Bug(
        "T5 buckets of query - key",
        "bias-bucket-sides",
        "lucidrains/x-transformers#10",
        of_positions(lambda q, k: t5(-key_minus_query(q, k)), direction="bidirectional", expect="t5"),
        of_positions(lambda q, k: t5(key_minus_query(q, k)), direction="bidirectional", expect="t5"),
    ),
    Bug(
        "T5 buckets with logarithms in bfloat16",
        "bias-buckets",
        "huggingface/candle#727",
        of_positions(lambda q, k: t5(key_minus_query(q, k), log_dtype=torch.bfloat16), direction="bidirectional", expect="t5"),
        of_positions(lambda q, k: t5(key_minus_query(q, k), log_dtype=torch.float32), direction="bidirectional", expect="t5"),
    ),
    Bug(
        "T5 buckets rounded to the nearest",
        "bias-buckets",
        "lucidrains/x-transformers#10",
        of_positions(lambda q, k: t5(key_minus_query(q, k), rounds=torch.round), direction="bidirectional", expect="t5"),
        of_positions(lambda q, k: t5(key_minus_query(q, k), rounds=torch.floor), direction="bidirectional", expect="t5"),
    ),
    Bug(
        "table rows of a window with the height in the stride",
        "bias-index-collision",
        "microsoft/Swin-Transformer#281",
        of_window(window_rows(lambda height, width: 2 * height - 1)),
        of_window(window_rows(lambda height, width: 2 * width - 1)),
    ),
    Bug(
        "relative shift of a square table in an encoder",
        "bias-shift",
        "espnet/espnet#2684, kimiyoung/transformer-xl#132",
        of_lengths(lambda q_len, k_len: shifted(k_len, k_len)[:, -q_len:], direction="bidirectional", length=256),
        of_lengths(lambda q_len, k_len: shifted(2 * k_len - 1, k_len)[:, -q_len:], direction="bidirectional", length=256),
    ),
    Bug(
        "distances divided by the length of the call",
        "bias-call-dependent",
        "a rule that follows the length of the call, as in huggingface/transformers#25104",
        of_lengths(lambda q_len, k_len: aligned(lines(EIGHT))(q_len, k_len) / k_len),
        of_lengths(lambda q_len, k_len: aligned(lines(EIGHT))(q_len, k_len)),
    ),
    Bug(
        "bias inside the division by √head_dim",
        "bias-scale-order",
        "NVIDIA/TensorRT-Model-Connect#32",
        of_scores(softmax_scores(inside=True), expect="alibi"),
        of_scores(softmax_scores(inside=False), expect="alibi"),
    ),
    Bug(
        "logarithm of the distance without the 1",
        "bias-not-finite",
        "the kernel of arXiv:2205.09921 is the logarithm of 1 + distance",
        of_positions(lambda q, k: -EIGHT[:, None, None] * (q[:, None] - k).abs().float().log()),
        of_positions(lambda q, k: -EIGHT[:, None, None] * (q[:, None] - k).abs().float().log1p()),
    ),
    Bug(
        "distance divided by the query's position",
        "bias-not-relative",
        "FIRE's normalisation (arXiv:2310.04418) where a function of the distance was promised",
        of_positions(lambda q, k: lines(EIGHT)(q, k) / (q[:, None] + 1), expect="relative"),
        of_positions(lambda q, k: lines(EIGHT)(q, k), expect="relative"),
    ),
    Bug(
        "KERPLE's factor and rate exchanged",
        "bias-formula",
        "the released names: bias_p is the factor of the logarithm, bias_a its rate (arXiv:2205.09921)",
        of_kerple("bias_a", "bias_p"),
        of_kerple("bias_p", "bias_a"),
    ),
]
