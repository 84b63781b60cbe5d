"""Biases of the key alone in extra channels: the numbers of a dense mask, for any positions, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from posenc import (
    CAUSAL,
    FULL,
    ALiBi,
    BackendRefused,
    DenseBias,
    GrowingCache,
    KeyBias,
    ScoreBias,
    ShapeError,
    SlopeBias,
    T5Bias,
    Transformer,
    attention,
    explain,
    materialize,
    positional_attention,
    slice_heads,
    window,
)
from posenc.attn.backends import channels

from .oracle import budget, plain_attention
from .test_leaks import assert_hidden, standing

N = 40
HALF = [torch.bfloat16, torch.float16]
half = pytest.mark.parametrize("dtype", HALF, ids=["bf16", "fp16"])


def qkv(heads: int, kv_heads: int, n: int = N, dim: int = 16, dtype: torch.dtype = torch.bfloat16, batch: int = 2):
    torch.manual_seed(0)
    shapes = (batch, heads, n, dim), (batch, kv_heads, n, dim), (batch, kv_heads, n, dim)
    return [torch.randn(*shape).to(dtype) for shape in shapes]


def exact_and_plain(q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias, positions: Tensor, scale: float | None = None):
    """The definition in float64, and what anyone writes in q's dtype."""
    wide = (x.double() for x in (q, k, v))
    exact = attention(*wide, mask=CAUSAL, bias=bias, positions=positions, scale=scale, backend="reference")
    allowed = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    plain = plain_attention(q, k, v, allowed=allowed, bias=materialize(bias, positions), scale=scale)
    return exact, plain


def gates(*shape: int) -> Tensor:
    return -torch.rand(*shape, generator=torch.Generator().manual_seed(1)).cumsum(-1)


BIASES: dict[str, Callable[[int], ScoreBias]] = {
    "alibi": lambda heads: ALiBi(heads)(),
    "slopes of any value": lambda heads: SlopeBias(torch.linspace(-0.3, 1.7, heads)),
    "one slope": lambda heads: SlopeBias(torch.tensor([0.1])),
    "float16 slopes": lambda heads: SlopeBias(torch.linspace(0.1, 1.7, heads).half()),
    "keys": lambda heads: KeyBias(gates(heads, N)),
    "keys of each sequence": lambda heads: KeyBias(gates(2, heads, N)),
    "keys of all heads": lambda heads: KeyBias(gates(2, 1, N)),
    "far keys": lambda heads: KeyBias(1e4 + gates(heads, N)),
    "slopes and keys": lambda heads: ALiBi(heads)() + (KeyBias(gates(heads, N)) + KeyBias(gates(1, N))),
}
POSITIONS = {
    "contiguous": torch.arange(N),
    "far": torch.arange(N) + 10**9,
    "backward": torch.arange(N).flip(0),
    "repeated": torch.arange(N) // 7 % 3,
    "of each sequence": torch.stack([torch.arange(N), torch.arange(N).flip(0) + 70_000]),
    "real": torch.linspace(0.0, 3.3, N, dtype=torch.float64) ** 2,
    "spread": torch.arange(N) + 10**4 * (torch.arange(N) // 20),
}


@half
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("name", BIASES)
def test_every_bias_is_the_dense_one(name: str, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    q, k, v = qkv(heads, kv_heads, dtype=dtype)
    bias = BIASES[name](heads)
    exact, plain = exact_and_plain(q, k, v, bias, torch.arange(N))
    out = attention(q, k, v, mask=CAUSAL, bias=bias, backend="channels")
    assert out.dtype == dtype
    assert float((out - exact).abs().max()) <= budget(plain, exact)


@half
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_may_be_any(name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(6, 2, dtype=dtype)
    exact, plain = exact_and_plain(q, k, v, ALiBi(6)(), POSITIONS[name])
    out = attention(q, k, v, mask=CAUSAL, bias=ALiBi(6)(), positions=POSITIONS[name], backend="channels")
    assert float((out - exact).abs().max()) <= budget(plain, exact)


@half
@pytest.mark.parametrize(("dim", "v_dim"), [(1, 1), (20, 20), (80, 80), (64, 16), (16, 40)])
@pytest.mark.parametrize("scale", [None, 1.0, -0.3])
def test_widths_and_scales(scale: float | None, dim: int, v_dim: int, dtype: torch.dtype) -> None:
    q, k, _ = qkv(4, 2, dim=dim, dtype=dtype)
    v = qkv(4, 2, dim=v_dim, dtype=dtype)[2]
    exact, plain = exact_and_plain(q, k, v, ALiBi(4)(), torch.arange(N), scale)
    out = attention(q, k, v, mask=CAUSAL, bias=ALiBi(4)(), scale=scale, backend="channels")
    assert out.shape == exact.shape
    assert float((out - exact).abs().max()) <= budget(plain, exact)


def test_a_slice_of_heads_keeps_its_slopes() -> None:
    q, k, v = qkv(4, 4)
    whole = attention(q, k, v, mask=CAUSAL, bias=ALiBi(4)(), backend="channels")
    part = slice_heads(ALiBi(4)(), slice(1, 3))
    out = attention(q[:, 1:3], k[:, 1:3], v[:, 1:3], mask=CAUSAL, bias=part, backend="channels")
    assert torch.equal(out, whole[:, 1:3])


@pytest.mark.parametrize("slope", [2**-0.5, 2**-8])
def test_two_thousand_tokens_are_as_exact_as_with_a_dense_mask(slope: float) -> None:
    """Slope times position, 724 at each end, is not rounded to the dtype of the keys."""
    n = 2048
    q, k, v = qkv(1, 1, n, batch=1)
    bias = SlopeBias(torch.tensor([slope], dtype=torch.float64))
    exact = attention(q.double(), k.double(), v.double(), mask=CAUSAL, bias=bias, backend="reference")
    mask = materialize(bias, torch.arange(n)).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
    dense = scaled_dot_product_attention(q, k, v, attn_mask=mask[None])
    out = attention(q, k, v, mask=CAUSAL, bias=bias, backend="channels")
    for error in (lambda x: (x - exact).abs().max(), lambda x: (x - exact).square().mean().sqrt()):
        assert float(error(out)) <= 1.25 * float(error(dense))


@pytest.mark.parametrize(("dtype", "apart"), [(torch.bfloat16, 30_001.37), (torch.float16, 8_001.37)])
def test_a_far_key_that_content_makes_up_for_gets_its_weight(dtype: torch.dtype, apart: float) -> None:
    """Its score is the difference of two numbers near 20,000; slope and position with fewer bits would tip the balance."""
    slope = 2 / 3
    q, k, rest = torch.zeros(1, 1, 2, 8, dtype=dtype), torch.zeros(1, 1, 2, 8, dtype=dtype), slope * apart
    for channel in range(3):
        q[..., 1, channel], k[..., 0, channel] = rest, 1.0
        rest -= float(q[0, 0, 1, channel])
    v = torch.tensor([1.0, 0.0]).reshape(1, 1, 2, 1).to(dtype)
    bias, at = SlopeBias(torch.tensor([slope], dtype=torch.float64)), torch.tensor([0.0, apart], dtype=torch.float64)
    out = attention(q, k, v, mask=CAUSAL, bias=bias, positions=at, scale=1.0, backend="channels")
    # ten float32 sums near slope * apart move a score, a quarter of which moves a weight near 1/2, rounded twice
    limit = 10 * 2**-24 * slope * apart / 4 + torch.finfo(dtype).eps / 2
    assert abs(float(out[0, 0, 1, 0]) - 1 / (1 + exp(rest))) <= limit


@half
def test_infinite_key_values_hide_their_keys(dtype: torch.dtype) -> None:
    q, k, v = qkv(4, 2, dtype=dtype)
    values = gates(4, N)
    values[:, 5:9] = values[1, N // 2 :] = float("-inf")
    bias = KeyBias(values)
    exact, plain = exact_and_plain(q, k, v, bias, torch.arange(N))
    out = attention(q, k, v, mask=CAUSAL, bias=bias, backend="channels")
    assert float((out - exact).abs().max()) <= budget(plain, exact)


@half
def test_what_all_keys_share_does_not_matter(dtype: torch.dtype) -> None:
    q, k, v = qkv(4, 2, dtype=dtype)
    values = (gates(4, N) * 256).round() / 256  # exact in float32 beside 2^12, which is too large for scores in float16
    near, far = (attention(q, k, v, mask=CAUSAL, bias=KeyBias(values + by), backend="channels") for by in (0, 2**12))
    assert torch.equal(near, far)


# ------------------------------------------------------------------------------------------------ gradients


def gradients(dtype: torch.dtype, leaves: list[Tensor], bias: Callable[[Tensor], ScoreBias], up: Tensor, backend: str):
    leaves = [leaf.to(dtype) if index < 3 else leaf.clone() for index, leaf in enumerate(leaves)]
    for leaf in leaves:
        leaf.requires_grad_()
    out = attention(*leaves[:3], mask=CAUSAL, bias=bias(leaves[3]), backend=backend)
    return torch.autograd.grad(out, leaves, up.to(dtype))


def weights_and_slopes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, up: Tensor) -> Tensor:
    """|∂/∂score| before rows are centred: what a half-precision backward rounds."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(share, 1) for x in (k, v))
    scores = q.double() @ k.mT * q.shape[-1] ** -0.5 + bias
    weights = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    toward = up.double() @ v.mT
    return weights * (toward.abs() + (weights * toward).sum(-1, keepdim=True).abs())


@half
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_learned_slopes_get_their_gradient(kv_heads: int, dtype: torch.dtype) -> None:
    """Positions reach 256 while a steep slope sees a few keys: rounding must not count by position, only by distance."""
    n = 512
    q, k, v = qkv(4, kv_heads, n, dtype=dtype, batch=1)
    slopes, up = torch.tensor([0.003, 0.06, 0.3, 1.1]), torch.randn(1, 4, n, 16).to(dtype)
    exact = gradients(torch.float64, [q, k, v, slopes.double()], SlopeBias, up, "reference")
    found = gradients(dtype, [q, k, v, slopes], SlopeBias, up, "channels")
    distance = (torch.arange(n)[:, None] - torch.arange(n)).double()
    size = weights_and_slopes(q, k, v, -slopes[:, None, None].double() * distance, up)
    # The roundings of one row may all agree; those of different rows do not: six deviations of their sum. Positions
    # enter squared roundings: of what a row's rounded weights lack, once more rounded.
    eps = torch.finfo(dtype).eps
    by_row = eps * (size * distance.abs()).sum(-1) + eps**2 * n * size.sum(-1)
    assert found[3].dtype == torch.float32
    assert bool(((found[3] - exact[3]).abs() <= 6 * by_row.square().sum(-1).sqrt()[0]).all())
    assert bool((found[3].sign() == exact[3].sign()).all())


@half
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("learned", ["slopes", "keys", "nothing"])
def test_gradients_are_as_exact_as_plain_ones(learned: str, kv_heads: int, dtype: torch.dtype) -> None:
    n = 96
    q, k, v = qkv(4, kv_heads, n, dtype=dtype, batch=1)
    make = KeyBias if learned == "keys" else SlopeBias
    values, up = gates(4, n) if learned == "keys" else torch.linspace(0.05, 0.6, 4), torch.randn(1, 4, n, 16).to(dtype)
    exact = gradients(torch.float64, [q, k, v, values.double()], make, up, "reference")

    def plain(which: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, values)]
        bias = materialize(make(leaves[3]), torch.arange(n)).to(which)
        out = plain_attention(*leaves[:3], allowed=torch.ones(n, n, dtype=torch.bool).tril(), bias=bias)
        return torch.autograd.grad(out, leaves, up)

    if learned == "nothing":
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mask=CAUSAL, bias=make(values), backend="channels")
        found = torch.autograd.grad(out, leaves, up)
    else:
        found = gradients(dtype, [q, k, v, values], make, up, "channels")
    for ours, plainly, truth in zip(found[:3], plain(torch.float32)[:3], exact[:3], strict=False):
        assert float((ours - truth).abs().max()) <= 2 * budget(plainly, truth)
    if learned == "keys":
        # Each entry sums the roundings of the rows that see it, and of the row's own weights, once.
        size = weights_and_slopes(q, k, v, values[:, None].double(), up)
        limit = 6 * torch.finfo(dtype).eps * size.square().sum(-2).sqrt()[0] + torch.finfo(dtype).eps * exact[3].abs()
        limit = limit + n * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert bool(((found[3] - exact[3]).abs() <= limit).all())


def test_real_positions_get_their_gradient() -> None:
    q, k, v = qkv(2, 2, batch=1)
    up, slope = torch.randn(1, 2, N, 16), torch.tensor([0.4, 0.1])

    def run(dtype: torch.dtype, backend: str) -> Tensor:
        at = (torch.arange(N, dtype=torch.float64) * 0.7).requires_grad_()
        leaves = [x.to(dtype) for x in (q, k, v)]
        out = attention(*leaves, mask=CAUSAL, bias=SlopeBias(slope), positions=at, backend=backend)
        return torch.autograd.grad(out, at, up.to(dtype))[0]

    exact, found = run(torch.float64, "reference"), run(torch.bfloat16, "channels")
    size = weights_and_slopes(q, k, v, materialize(SlopeBias(slope), torch.arange(N) * 0.7).double(), up)
    limit = 6 * torch.finfo(torch.bfloat16).eps * (slope[:, None, None] * size).square().sum(-2).sum(-2).sqrt()
    assert bool(((found - exact).abs() <= limit.amax(0) + torch.finfo(torch.bfloat16).eps * exact.abs()).all())
    assert bool(exact.abs().max() > limit.max())


def test_deterministic_mode_changes_nothing() -> None:
    def run() -> tuple[Tensor, ...]:
        return gradients(
            torch.bfloat16, [*qkv(4, 2), torch.linspace(0.1, 0.6, 4)], SlopeBias, torch.ones(2, 4, N, 16), "channels"
        )

    free = run()
    torch.use_deterministic_algorithms(True)
    try:
        bound = run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(free, bound, strict=True))


# ------------------------------------------------------------------------------------------------ what stays hidden


@pytest.mark.parametrize("name", ["contiguous", "backward", "repeated"])
@pytest.mark.parametrize("bias", [ALiBi(4)(), ALiBi(4)() + KeyBias(gates(4, N))], ids=["slopes", "slopes and keys"])
def test_the_future_is_not_seen(bias: ScoreBias, name: str) -> None:
    q, k, v = qkv(4, 2, batch=1)

    def run(k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=CAUSAL, bias=bias, positions=POSITIONS[name], backend="channels")

    if name == "contiguous":  # where the bias is steep enough that weights vanish in bfloat16, rows need not move
        assert_hidden(run, k, v, standing(N, N), (N - 3, N - 1))
    before = run(k, v)
    for j in (0, 17, N - 1):
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, j:], other_v[:, :, j:] = -30 * k[:, :, j:], 1e4
        after = run(other_k, other_v)
        assert torch.equal(after[:, :, :j], before[:, :, :j])
        assert not torch.equal(after[:, :, j], before[:, :, j])


@pytest.mark.parametrize("n", [N, 600])
def test_nan_in_one_query_stays_in_its_row(n: int) -> None:
    q, k, v = qkv(4, 2, n)
    broken = q.clone()
    broken[:, :, 3] = float("nan")
    clean, dirty = (attention(x, k, v, mask=CAUSAL, bias=ALiBi(4)(), backend="channels") for x in (q, broken))
    others = torch.arange(n) != 3
    assert torch.equal(clean[:, :, others], dirty[:, :, others])
    assert bool(dirty[:, :, 3].isnan().all())


def test_nan_in_one_key_value_stays_in_the_rows_that_see_it() -> None:
    q, k, v = qkv(4, 4)
    values = gates(4, N)
    values[2, N // 2] = float("nan")  # the origin, too
    out = attention(q, k, v, mask=CAUSAL, bias=KeyBias(values), backend="channels")
    assert bool(out[:, 2, N // 2 :].isnan().all())
    assert bool(out[:, :, : N // 2].isfinite().all())
    assert bool(out[:, [0, 1, 3]].isfinite().all())


# ------------------------------------------------------------------------------------------------ which calls, and how


def verdict(**changes: object) -> str:
    q, k, v = changes.pop("qkv", qkv(4, 2))
    call = {"mask": CAUSAL, "bias": ALiBi(4)(), **changes}
    (said,) = [one for one in explain(attention, q, k, v, **call) if one.backend == "channels"]
    return said.reason


@half
def test_auto_takes_it_for_half_precision(dtype: torch.dtype) -> None:
    assert "first in the order of 'auto'" in verdict(qkv=qkv(4, 2, dtype=dtype))
    q, k, v = qkv(4, 2, dtype=dtype)
    named = attention(q, k, v, mask=CAUSAL, bias=ALiBi(4)(), backend="channels")
    assert torch.equal(attention(q, k, v, mask=CAUSAL, bias=ALiBi(4)()), named)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bias": None}, "there is no bias to put into channels"),
        ({"mask": FULL}, "CAUSAL alone, with as many queries as keys"),
        ({"mask": CAUSAL & window(8)}, "CAUSAL alone"),
        ({"qkv": [x[:, :, -length:] for x, length in zip(qkv(4, 2), (1, N, N), strict=True)]}, "with as many queries as keys"),
        ({"qkv": [x[:, :, -length:] for x, length in zip(qkv(4, 2), (3, N, N), strict=True)]}, "with as many queries as keys"),
        ({"bias": ALiBi(4, form="symmetric")()}, "slopes of their own for the future"),
        ({"bias": SlopeBias(torch.ones(4), -torch.ones(4))}, "signed ones have future=None"),
        ({"bias": T5Bias(4)()}, "TableBias is no term of the key alone"),
        ({"bias": ALiBi(4)() + DenseBias(torch.zeros(4, N, N))}, "DenseBias is no term of the key alone"),
        ({"qkv": qkv(4, 2, dtype=torch.float32)}, "torch.float32 sums q·k and slope · position in the precision of the result"),
        ({"qkv": qkv(4, 2, dtype=torch.float64)}, "torch.float64 sums"),
        ({"dropout_p": 0.1}, "fused kernel for the CPU has no dropout"),
        ({"scale": 0.0}, "scale = 0 is too far from 1"),
        ({"scale": 1e-5}, "scale = 1e-05 is too far from 1"),
        ({"qkv": qkv(12, 1), "bias": KeyBias(gates(12, N))}, "it takes 36 extra channels, and more than 32 cost"),
        ({"qkv": [torch.zeros((), dtype=torch.half).expand(1, 4, 2**17, 8)] * 3}, "too coarse for torch.float16 past 8192 tokens"),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    changes = dict(changes)
    assert verdict(**changes).startswith("refuses: ")
    assert reason in verdict(**changes)
    q, k, v = changes.pop("qkv", qkv(4, 2))
    with pytest.raises(BackendRefused, match="backend = 'channels' refuses"):
        attention(q, k, v, **{"mask": CAUSAL, "bias": ALiBi(4)(), **changes}, backend="channels")


@pytest.mark.parametrize(
    ("bias", "positions", "message"),
    [
        (KeyBias(gates(4, N - 1)), None, rf"a KeyBias of {N - 1} keys for {N} queries and {N} keys"),
        (KeyBias(gates(3, 4, N)), None, r"the bias has the batch \(3,\). Expected \(2,\)"),
        (ALiBi(4)(), torch.zeros(3, N), r"the bias has the batch \(3,\). Expected \(2,\)"),
    ],
)
def test_biases_that_do_not_fit_are_refused(bias: ScoreBias, positions: Tensor | None, message: str) -> None:
    for backend in ("auto", "channels"):
        with pytest.raises(ShapeError, match=message):
            attention(*qkv(4, 2), mask=CAUSAL, bias=bias, positions=positions, backend=backend)


@half
def test_positions_too_far_apart_for_float32_sums_go_to_who_forms_distances(dtype: torch.dtype) -> None:
    at = torch.arange(N) + 10**7 * (torch.arange(N) // 20)
    inputs, call = qkv(4, 2, dtype=dtype), {"mask": CAUSAL, "bias": ALiBi(4)(), "positions": at}
    with pytest.raises(ValueError, match=r"slope · position reaches 2.5e\+06 .* Expected less .* Name another backend"):
        attention(*inputs, backend="channels", **call)
    assert torch.equal(attention(*inputs, **call), attention(*inputs, backend="sdpa", **call))
    said = {verdict.backend: verdict.reason for verdict in explain(attention, *inputs, **call)}
    assert "only by name: slope · position reaches" in said["channels"]


def test_a_prompt_with_a_cache_may_be_named() -> None:
    q, k, v = qkv(4, 2)
    cache = GrowingCache()
    out = positional_attention(q, k, v, encodings=[ALiBi(4)], positions=0, mask=CAUSAL, cache=cache, backend="channels")
    assert torch.equal(out, attention(q, k, v, mask=CAUSAL, bias=ALiBi(4)(), backend="channels"))
    with pytest.raises(BackendRefused, match="as many queries as keys"):
        positional_attention(
            q[:, :, :1],
            k[:, :, :1],
            v[:, :, :1],
            encodings=[ALiBi(4)],
            positions=N,
            mask=CAUSAL,
            cache=cache,
            backend="channels",
        )
    assert cache.length == N  # refused before it was appended to


def test_autocast_keeps_slopes_and_positions_wide() -> None:
    q, k, v = (x.float() for x in qkv(4, 2))
    at = torch.arange(N) + 5000  # bfloat16 holds every 32nd integer there
    narrow = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask=CAUSAL, bias=ALiBi(4)(), positions=at, backend="channels")
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, mask=CAUSAL, bias=ALiBi(4)(), positions=at)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, narrow)


def test_a_captured_graph_serves_all_lengths() -> None:
    torch._dynamo.reset()
    counters.clear()
    slopes = torch.linspace(0.1, 0.6, 4).requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return attention(q, k, v, mask=CAUSAL, bias=SlopeBias(slopes), backend="channels")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for n in (8, 33):
        leaves = [*(x.requires_grad_() for x in qkv(4, 2, n)), slopes]
        for leaf in leaves[:3]:
            torch._dynamo.mark_dynamic(leaf, 2)
        ours, eager = (torch.autograd.grad(run(*leaves).square().sum(), leaves) for run in (compiled, call))
        for a, b in zip(ours, eager, strict=True):  # the same operations, except that sums may be ordered otherwise
            torch.testing.assert_close(a, b, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_no_value_is_read() -> None:
    shape = (2, 4, N, 16)
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    biases = (ALiBi(4)(), KeyBias(torch.empty(4, N, device="meta")))
    for bias in biases:
        assert attention(q, q, q, mask=CAUSAL, bias=bias, backend="channels").shape == shape
    with FakeTensorMode():
        q = torch.empty(shape, dtype=torch.bfloat16)
        assert attention(q, q, q, mask=CAUSAL, bias=ALiBi(4)() + KeyBias(torch.empty(4, N))).shape == shape


@torch.no_grad()
def test_a_half_precision_model_takes_it_for_whole_sequences_and_not_for_steps() -> None:
    torch.manual_seed(0)
    ids = torch.arange(24).reshape(1, 24) % 7
    model = Transformer(7, dim=32, layers=2, heads=4, kv_heads=2, encodings=[ALiBi(4)]).eval()
    narrow = Transformer(7, dim=32, layers=2, heads=4, kv_heads=2, encodings=[ALiBi(4)], backend="sdpa").eval()
    narrow.load_state_dict(model.state_dict())
    exact = model(ids, 0)
    ours, dense = (float((m.bfloat16()(ids, 0) - exact).abs().max()) for m in (model, narrow))
    assert ours <= 2 * dense
    cache = model.new_cache()
    steps = torch.cat([model(ids[:, i : i + 1], i, cache=cache) for i in range(24)], 1)
    assert float((steps - exact).abs().max()) <= 2 * dense


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (4, 1)])
def test_halves_of_the_heads_make_the_whole(monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int) -> None:
    inputs, call = qkv(heads, kv_heads), {"mask": CAUSAL, "bias": ALiBi(heads)(), "backend": "channels"}
    whole = attention(*inputs, **call)
    monkeypatch.setattr(channels, "_LARGE", 0)
    assert torch.equal(attention(*inputs, **call), whole)
