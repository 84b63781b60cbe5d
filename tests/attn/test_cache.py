"""Decoding with a cache equals the whole sequence at once, wherever it is cut; what a cache must not change, it does not."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from posenc import (
    FULL,
    ALiBi,
    ContentScoreEncoding,
    Encoding,
    GrowingCache,
    KeyBias,
    Mask,
    NoPE,
    QueryTableBias,
    RoPE,
    ScoreBias,
    StaticCache,
    T5Bias,
    Tokens,
    attention,
    causal,
    contiguous,
    positional_attention,
)
from posenc.attn.cache import Cache
from posenc.core.spec import EncodingSpec

HEADS, KV_HEADS, DIM, LENGTH = 4, 2, 8, 9
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-6}


class Forgetting(ContentScoreEncoding):
    """A forgetting gate: after the softmax, minus the sum of log gates up to the key. The state is those sums."""

    spec: ClassVar[EncodingSpec] = EncodingSpec(
        "forgetting", "a gate per token", lambda shape: [Forgetting(shape.heads, shape.dim)]
    )

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, heads)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        k_positions: Tensor | None = None,
        *,
        x: Tensor | None = None,
        state: Any = None,
        mask: Mask = FULL,
    ) -> tuple[ScoreBias, Any]:
        assert x is not None
        log_gates = nn.functional.logsigmoid(self.gate(x)).transpose(-1, -2)
        sums = log_gates.cumsum(-1) if state is None else torch.cat([state, state[..., -1:] + log_gates.cumsum(-1)], -1)
        return KeyBias(-nn.functional.pad(sums, (0, k.shape[-2] - sums.shape[-1]))), sums


class Shaw(ContentScoreEncoding):
    """A learned vector per clamped distance, read by the query."""

    spec: ClassVar[EncodingSpec] = EncodingSpec("shaw", "a vector per distance", lambda shape: [Shaw(shape.head_dim)])

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, head_dim))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        k_positions: Tensor | None = None,
        *,
        x: Tensor | None = None,
        state: Any = None,
        mask: Mask = FULL,
    ) -> tuple[ScoreBias, Any]:
        return QueryTableBias(q @ self.weight.to(q.dtype).T, 0), None


def encodings() -> dict[str, list[Encoding]]:
    torch.manual_seed(0)
    return {
        "nope": [NoPE()],
        "rope": [RoPE(DIM)],
        "alibi": [ALiBi(HEADS)],
        "t5": [T5Bias(HEADS)],
        "forgetting": [Forgetting(HEADS, DIM)],
        "shaw": [Shaw(DIM)],
        "all": [T5Bias(HEADS), RoPE(DIM), Forgetting(HEADS, DIM), ALiBi(HEADS), Shaw(DIM)],
    }


ENCODINGS = encodings()


def inputs(dtype: torch.dtype, batch: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    shapes = (batch, HEADS, LENGTH, DIM), (batch, KV_HEADS, LENGTH, DIM), (batch, KV_HEADS, LENGTH, DIM), (batch, LENGTH, DIM)
    q, k, v, x = (torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v, x


def new_cache(kind: str, dtype: torch.dtype, batch: int = 2) -> Cache:
    return GrowingCache() if kind == "growing" else StaticCache(batch, KV_HEADS, LENGTH + 3, DIM, dtype=dtype)


def in_pieces(
    chosen: list[Encoding], cuts: list[int], cache: Cache, dtype: torch.dtype, tokens: Tokens, window: int | None, backend: str
) -> Tensor:
    q, k, v, x = inputs(dtype)
    outs = []
    for first, last in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        segments = None if tokens.segments is None else tokens.segments[..., first:last]
        now = Tokens(tokens.positions[..., first:last], segments=segments)
        mask = causal(*cache.place(now), window)
        parts = (t[:, :, first:last] for t in (q, k, v))
        outs.append(
            positional_attention(
                *parts, encodings=chosen, positions=now, cache=cache, x=x[:, first:last], mask=mask, backend=backend
            )
        )
    return torch.cat(outs, dim=-2)


def at_once(chosen: list[Encoding], dtype: torch.dtype, tokens: Tokens, window: int | None, backend: str) -> Tensor:
    q, k, v, x = inputs(dtype)
    mask = causal(tokens, window=window)
    return positional_attention(q, k, v, encodings=chosen, positions=tokens, x=x, mask=mask, backend=backend)


ROWS = {
    "contiguous": contiguous(LENGTH),
    "from 1000": contiguous(LENGTH, 1000),
    "repeated": Tokens(torch.tensor([0, 1, 2, 2, 2, 2, 5, 6, 7])),
    "padded left": Tokens(
        torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8]]),
        segments=torch.tensor([[-1, -1, 0, 0, 0, 0, 0, 0, 0], [0] * 9]),
    ),
    "packed": Tokens(torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]), segments=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])),
}


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("name", list(ENCODINGS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@torch.no_grad()
def test_prefill_and_decode_are_the_whole(name: str, kind: str, dtype: torch.dtype) -> None:
    chosen = [encoding.to(dtype) for encoding in ENCODINGS[name]]
    for rows in ROWS.values():
        whole = at_once(chosen, dtype, rows, None, "auto")
        steps = in_pieces(chosen, [4, 5, 6, 7, 8], new_cache(kind, dtype), dtype, rows, None, "auto")
        torch.testing.assert_close(steps, whole, rtol=0, atol=TOLERANCE[dtype] * max(1.0, float(whole.abs().max())))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@given(data=st.data())
@settings(max_examples=40)
@torch.no_grad()
def test_any_cut_gives_the_whole(backend: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, LENGTH - 1))))
    rows = ROWS[data.draw(st.sampled_from(sorted(ROWS)))]
    chosen = [encoding.double() for encoding in ENCODINGS[data.draw(st.sampled_from(sorted(ENCODINGS)))]]
    kind, window = data.draw(st.sampled_from(["growing", "static"])), data.draw(st.sampled_from([None, 1, 3]))
    whole = at_once(chosen, torch.float64, rows, window, backend)
    pieces = in_pieces(chosen, cuts, new_cache(kind, torch.float64), torch.float64, rows, window, backend)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_a_decode_step_is_at_its_own_position(kind: str) -> None:
    """Four tokens, then one: at position 4, the definition's answer; at 0, as a forgotten offset has it, another."""
    q, k, v, _ = (t[:, :, :5] for t in inputs(torch.float64))
    rope = RoPE(DIM)

    def decoded(position: int) -> Tensor:
        cache = new_cache(kind, torch.float64)
        for start, end, at in ((0, 4, 0), (4, 5, position)):
            tokens = contiguous(end - start, at)
            parts = (t[:, :, start:end] for t in (q, k, v))
            out = positional_attention(
                *parts, encodings=[rope], positions=tokens, cache=cache, mask=causal(*cache.place(tokens))
            )
        return out

    turned_q, turned_k = rope(q, k, 0)
    expected = attention(turned_q[:, :, 4:], turned_k, v)
    torch.testing.assert_close(decoded(4), expected, rtol=0, atol=1e-11)
    assert not torch.allclose(decoded(0), expected, atol=1e-2)


@torch.no_grad()
def test_alibi_counts_from_each_rows_own_first_token() -> None:
    """Left padding, as BLOOM pads: the bias of a row is that of the row alone."""
    q, k, v, _ = inputs(torch.float64)
    tokens = ROWS["padded left"]
    out = positional_attention(q, k, v, encodings=[ALiBi(HEADS)], positions=tokens, mask=causal(tokens))
    alone = (t[:1, :, 2:] for t in (q, k, v))
    torch.testing.assert_close(
        out[:1, :, 2:], positional_attention(*alone, encodings=[ALiBi(HEADS)], positions=0, mask=causal(contiguous(7)))
    )
    assert not out[0, :, :2].any()


@torch.no_grad()
def test_packed_documents_are_as_alone() -> None:
    q, k, v, _ = inputs(torch.float64)
    tokens = ROWS["packed"]
    for name in ("nope", "rope", "alibi", "t5", "shaw"):
        chosen = [encoding.double() for encoding in ENCODINGS[name]]
        out = positional_attention(q, k, v, encodings=chosen, positions=tokens, mask=causal(tokens))
        for first, last in ((0, 4), (4, 9)):
            alone = (t[:, :, first:last] for t in (q, k, v))
            mask = causal(contiguous(last - first))
            separate = positional_attention(*alone, encodings=chosen, positions=0, mask=mask)
            torch.testing.assert_close(out[:, :, first:last], separate, rtol=0, atol=1e-11)


def test_caches_hold_what_was_appended() -> None:
    _, k, v, _ = inputs(torch.float32)
    growing, static = GrowingCache(), StaticCache(2, KV_HEADS, LENGTH, DIM)
    assert growing.length == 0
    for cache in (growing, static):
        cache.append(k[:, :, :4], v[:, :, :4], contiguous(4))
        keys, values, tokens = cache.append(k[:, :, 4:], v[:, :, 4:], contiguous(5, 4))
        assert torch.equal(keys, k)
        assert torch.equal(values, v)
        assert tokens.positions.expand(2, -1).tolist() == [list(range(9))] * 2
    assert growing.length == 9
    assert growing.tokens is not None
    assert growing.tokens.order is None  # still a static fact, so that fused kernels apply
    assert growing.tokens.segments is None


def test_a_static_cache_may_hold_another_dtype_and_width() -> None:
    _, k, _, _ = inputs(torch.float32)
    cache = StaticCache(2, KV_HEADS, LENGTH, DIM, v_dim=5, dtype=torch.bfloat16)
    keys, values, _ = cache.append(k, k[..., :5], contiguous(LENGTH))
    assert keys.dtype == torch.bfloat16
    assert values.shape == (2, KV_HEADS, LENGTH, 5)
    assert torch.equal(keys, k.bfloat16())
