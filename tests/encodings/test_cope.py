"""Positions counted from content: the paper's listing, what the mask hides, caches, packing, grouped heads."""

from __future__ import annotations

from math import ceil, exp, floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import (
    CAUSAL,
    FULL,
    NoPE,
    RoPE,
    ShapeError,
    Transformer,
    causal,
    contiguous,
    grid,
    packed,
    padded,
    positional_attention,
    same_segment,
    shard,
    visible,
    window,
)
from posenc.attn.cache import GrowingCache, StaticCache
from posenc.encodings.cope import CoPE
from posenc.testing import SHAPE, conform

F64 = torch.float64


def oracle(encoding, q, k, x, positions, k_positions, allowed=None):
    """Golovneva et al. 2024, §3: gates, their sum over the keys from j on that are seen, interpolated q · e."""
    groups, length = len(q) // len(k), k.shape[1]
    e = encoding.pos_emb.detach().double()[0].T.tolist()
    bias = torch.zeros(len(q), q.shape[1], length, dtype=F64)
    for head, queries in enumerate(q.tolist()):
        keys = k[head // groups].tolist()
        for i, query in enumerate(queries):
            count = 0.0
            for j in reversed(range(length)):
                if allowed is None or allowed[i, j]:
                    score = sum(a * b for a, b in zip(query, keys[j], strict=True)) * encoding.scale
                    count += 1 / (1 + exp(-score))
                p = min(count, encoding.npos_max - 1)
                low, high = (sum(a * b for a, b in zip(query, e[row], strict=True)) for row in (floor(p), ceil(p)))
                bias[head, i, j] = (p - floor(p)) * high + (1 - p + floor(p)) * low
    return bias


def trained(head_dim, npos_max, std=1.0, **settings):
    """One whose rows are not the zeros that training starts from."""
    encoding = CoPE(head_dim, npos_max, **settings)
    torch.nn.init.normal_(encoding.pos_emb, std=std)
    return encoding


def test_conforms():
    # rows of a step small enough that a rounding of the count, at most ten keys' worth, is below one of the result
    conform(
        lambda shape: trained(shape.head_dim, 5, std=0.02),
        oracle,
        claims=CoPE.spec.claims,
        other=lambda shape: trained(shape.head_dim, 3, std=0.02, scale=1.0),
    )


def test_the_spec_builds_rows_for_the_length():
    (made,) = CoPE.spec.build(SHAPE)
    assert made.npos_max == SHAPE.max_length == 64
    assert {name: tuple(value.shape) for name, value in made.state_dict().items()} == {"pos_emb": (1, SHAPE.head_dim, 64)}
    assert not bool(made.pos_emb.any())


def counted(logits, mask=CAUSAL, npos_max=9):
    """The positions of keys under gates of these logits: a row whose value is its number."""
    encoding = CoPE(1, npos_max, scale=1.0, dtype=F64)
    with torch.no_grad():
        encoding.pos_emb.copy_(torch.arange(npos_max))
    keys = torch.tensor(logits, dtype=F64)[None, :, None]
    bias, state = encoding(torch.ones_like(keys), keys, torch.arange(len(logits)), mask=mask)
    assert state is None
    return bias.bias[0]


def test_worked_positions():
    gates = [0.8807970780, 0.5, 0.1192029220, 0.7310585786]
    expected = torch.tensor([2.231058579, 1.350261501, 0.8502615007, 0.7310585786], dtype=F64)
    rows = counted([2.0, 0.0, -2.0, 1.0])
    torch.testing.assert_close(rows[-1], expected, rtol=0.0, atol=5e-10)
    # the first query sees one key, and later keys stand where nothing was counted
    torch.testing.assert_close(rows[0], torch.tensor([gates[0], 0, 0, 0], dtype=F64), rtol=0.0, atol=5e-10)
    everything = counted([2.0, 0.0, -2.0, 1.0], FULL)
    torch.testing.assert_close(everything, expected.expand(4, 4), rtol=0.0, atol=5e-10)
    clamped = counted([2.0, 0.0, -2.0, 1.0], npos_max=2)
    torch.testing.assert_close(clamped[-1], expected.clamp(max=1), rtol=0.0, atol=5e-10)
    windowed = counted([2.0, 0.0, -2.0, 1.0], CAUSAL & window(2))
    assert windowed[3, 0] == windowed[3, 1] == windowed[3, 2]


def test_open_gates_count_tokens():
    rows = counted([60.0] * 6, npos_max=4)  # a gate of 1 - 1e-26 is 1
    assert rows[-1].tolist() == [3, 3, 3, 3, 2, 1]
    assert counted([-800.0] * 3).tolist() == [[0.0] * 3] * 3


def parts(length, heads=4, kv_heads=2, dim=8):
    q = torch.randn(2, heads, length, dim, dtype=F64)
    k, v = torch.randn(2, 2, kv_heads, length, dim, dtype=F64).unbind()
    return q, k, v


def listing(encoding, q, k, v, allowed, scale=None):
    """Attention as the paper's listing has it: masked scaled scores, their gates, the unscaled product with e."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    rows = [oracle(encoding, *pair, None, None, None, allowed) for pair in zip(q.detach(), k.detach(), strict=True)]
    return (scores + torch.stack(rows)).masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def near(actual, expected):
    # scores of 8 products near 8 and biases near 8 with a count of a dozen gates, exponentials and sums: some hundred
    # roundings of numbers near 8, and slopes of e near 8 on the count
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=256 * 2**-53 * 64)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_that_of_the_listing(backend, kv_heads):
    encoding, (q, k, v) = trained(8, 4).double(), parts(10, kv_heads=kv_heads)
    result = positional_attention(q, k, v, encodings=[encoding], positions=0, mask=CAUSAL, backend=backend)
    near(result, listing(encoding, q, k, v, torch.ones(10, 10, dtype=torch.bool).tril()))


def test_another_softmax_scale_is_given_to_both():
    encoding, (q, k, v) = trained(8, 4, scale=0.5).double(), parts(6)
    result = positional_attention(q, k, v, encodings=[encoding], positions=0, scale=0.5)
    near(result, listing(encoding, q, k, v, torch.ones(6, 6, dtype=torch.bool), scale=0.5))


def test_gates_see_turned_queries_and_keys():
    encoding, (q, k, v) = trained(8, 4).double(), parts(6)
    result = positional_attention(q, k, v, encodings=[RoPE(8), encoding], positions=0, mask=CAUSAL)
    near(result, listing(encoding, *RoPE(8)(q, k, 0), v, torch.ones(6, 6, dtype=torch.bool).tril()))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([None, 3]))
def test_any_split_over_a_cache_gives_the_whole(steps, width):
    encoding, length = trained(8, 4).double(), sum(steps)
    q, k, v = parts(length)
    mask = causal(contiguous(length), window=width)
    whole = positional_attention(q, k, v, encodings=[NoPE(), encoding], positions=0, mask=mask)
    growing, fixed = GrowingCache(), StaticCache(2, 2, length + 3, 8, dtype=F64)
    for cache in (growing, fixed):
        results, start = [], 0
        for n in steps:
            tokens, new = contiguous(n, start), slice(start, start + n)
            call = {"encodings": [NoPE(), encoding], "positions": tokens, "cache": cache}
            call["mask"] = causal(*cache.place(tokens), window=width)
            results.append(positional_attention(q[:, :, new], k[:, :, new], v[:, :, new], **call))
            start += n
        near(torch.cat(results, 2), whole)


def test_packed_documents_are_what_they_are_apart():
    encoding, (q, k, v) = trained(8, 4).double(), parts(9)
    tokens = packed(torch.tensor([0, 5, 9]), 9)
    together = positional_attention(q, k, v, encodings=[encoding], positions=tokens, mask=causal(tokens))
    for document in (slice(0, 5), slice(5, 9)):
        q_part, k_part, v_part = (t[:, :, document] for t in (q, k, v))
        alone = positional_attention(q_part, k_part, v_part, encodings=[encoding], positions=0, mask=CAUSAL)
        near(together[:, :, document], alone)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_padding_does_not_count(side, kind):
    encoding, (q, k, v) = trained(8, 4).double(), parts(7)
    real = torch.tensor([0, 0, 1, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 1, 0, 0])
    tokens, kept = padded(real[None].expand(2, -1)), real.bool()
    hidden, seen = (causal(tokens), CAUSAL) if kind == "decoder" else (same_segment(tokens.segments), FULL)
    result = positional_attention(q, k, v, encodings=[encoding], positions=tokens, mask=hidden)
    alone = positional_attention(q[:, :, kept], k[:, :, kept], v[:, :, kept], encodings=[encoding], positions=0, mask=seen)
    near(result[:, :, kept], alone)
    assert not bool(result[:, :, ~kept].any())


def test_the_future_does_not_leak_through_the_count():
    encoding, (q, k, v) = trained(8, 4).double(), parts(6)
    call = {"encodings": [encoding], "positions": 0, "mask": CAUSAL}
    changed = k.clone()
    changed[:, :, 4:] = 50.0
    before = positional_attention(q, k, v, **call)
    after = positional_attention(q, changed, v, **call)
    assert torch.equal(before[:, :, :4], after[:, :, :4])
    assert not torch.equal(before[:, :, 4:], after[:, :, 4:])


def test_fewer_queries_than_keys_and_queries_of_other_tokens():
    encoding, (q, k, v) = trained(8, 4).double(), parts(6)
    whole = encoding(q, k, torch.arange(6), mask=CAUSAL)[0].bias
    torch.testing.assert_close(
        encoding(q[:, :, 4:], k, torch.arange(2), mask=CAUSAL)[0].bias, whole[:, :, 4:], rtol=0.0, atol=64 * 2**-53 * 64
    )
    # the last query sees every key, so a step of decoding needs no mask
    step = encoding(q[:, :, 5:], k, torch.arange(1))[0].bias
    torch.testing.assert_close(step, whole[:, :, 5:], rtol=0.0, atol=64 * 2**-53 * 64)
    result = positional_attention(
        q[:, :, :2], k, v, encodings=[encoding], positions=torch.tensor([7, 70]), k_positions=torch.arange(6)
    )
    near(result, listing(encoding, q[:, :, :2], k, v, torch.ones(2, 6, dtype=torch.bool)))


def test_positions_of_any_number_of_axes_change_nothing():
    encoding, (q, k, v) = trained(8, 4).double(), parts(6)
    plain = positional_attention(q, k, v, encodings=[encoding], positions=0)
    assert torch.equal(positional_attention(q, k, v, encodings=[encoding], positions=grid(2, 3)), plain)


def test_gradients_reach_rows_queries_and_keys():
    encoding, (q, k, v) = trained(4, 3).double(), parts(4, 2, 1, 4)
    allowed = same_segment(torch.tensor([-1, 0, 0, 0])) & CAUSAL  # one row that sees nothing

    def call(q, k, v, _):
        return positional_attention(q, k, v, encodings=[encoding], positions=0, mask=allowed, backend="reference")

    assert torch.autograd.gradcheck(call, (*(t.requires_grad_() for t in (q, k, v)), encoding.pos_emb), fast_mode=True)


def test_nan_stays_in_its_row():
    encoding, (q, k, v) = trained(8, 4).double(), parts(5)
    q[0, 0, 2] = torch.nan
    result = positional_attention(q, k, v, encodings=[encoding], positions=0, mask=CAUSAL)
    assert bool(result[0, 0, 2].isnan().all())
    assert int(result.isnan().sum()) == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_the_term(dtype):
    encoding, q = trained(8, 4), torch.randn(2, 5, 8)
    with torch.autocast("cpu", dtype=dtype):
        inside = encoding(q, q, torch.arange(5))[0].bias
    assert torch.equal(inside, encoding(q, q, torch.arange(5))[0].bias)
    assert encoding.to(dtype)(q.to(dtype), q, torch.arange(5))[0].bias.dtype == torch.float32


def decoder():
    return Transformer(11, dim=16, layers=2, heads=4, kv_heads=2, encodings=lambda layer: [trained(4, 5)])


def test_a_decoder_trains():
    model, ids = decoder(), torch.randint(0, 11, (2, 9))
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.02), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(torch.nn.functional.cross_entropy(model(ids, 0)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
        losses[-1].backward()
        assert all(bool((cope.pos_emb.grad != 0).all()) for cope in model.encodings)
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("length", [None, 12])
def test_a_decoder_generates_the_same_with_and_without_a_cache(length):
    model, ids = decoder().double().eval(), torch.randint(0, 11, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    cache = None if length is None else model.new_cache(2, length)
    new = model.generate(ids, 4, attention_mask=mask, cache=cache)
    alone = torch.cat([ids[:1, 2:], new[:1]], 1)  # without padding, without a cache
    assert torch.equal(model(alone, 0)[:, 3:-1].argmax(-1), new[:1])
    assert torch.equal(model(torch.cat([ids[1:], new[1:]], 1), 0)[:, 5:-1].argmax(-1), new[1:])


def test_a_compiled_call_sees_the_mask():
    encoding, (q, k, _) = trained(8, 4).double(), parts(6)
    order = torch.arange(6)

    def call(q, k, order):
        return encoding(q, k, order, mask=visible(order, order) & same_segment(order // 3))[0].bias

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, order), call(q, k, order), rtol=0.0, atol=64 * 2**-53 * 64)
    with pytest.raises(RuntimeError, match="a value check failed"):
        compiled(q, k, order.flip(0))


@pytest.mark.parametrize(
    ("arguments", "rest", "error", "message"),
    [
        ((0, 4), {}, ValueError, "head_dim = 0. Expected an integer of 1 or more"),
        ((8, 0), {}, ValueError, "npos_max = 0. Expected an integer of 1 or more"),
        ((8, 4.0), {}, TypeError, "npos_max = 4.0"),
        ((8, 4), {"scale": 0}, ValueError, "scale = 0. Expected a finite number above 0"),
        ((8, 4), {"scale": "auto"}, ValueError, "scale = 'auto'"),
    ],
)
def test_impossible_settings_are_refused(arguments, rest, error, message):
    with pytest.raises(error, match=f"CoPE: {message}"):
        CoPE(*arguments, **rest)


def test_impossible_inputs_are_refused():
    encoding, x = CoPE(8, 4), torch.zeros(1, 4, 4, 8)
    with pytest.raises(ShapeError, match="CoPE: q of width 6 and k of width 6. Expected 8, the head width"):
        encoding(x[..., :6], x[..., :6], torch.arange(4))
    with pytest.raises(ShapeError, match="CoPE: q of 4 heads and k of 3. Expected the query heads to be a multiple"):
        encoding(x, x[:, :3], torch.arange(4))
    tokens = shard(contiguous(8), 0, 2, layout="head_tail")
    with pytest.raises(ValueError, match=r"CoPE: keys in the order \[6, 7, 0, 1\]. Expected orders that never fall"):
        encoding(x, x, torch.arange(4), mask=visible(tokens.order, tokens.order.flip(0).view(2, 2).flip(1).flatten()))
