"""Forget gates: the paper's sum, its order and documents, caches of both kinds, and the released names."""

from __future__ import annotations

from math import exp, log, log1p

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posenc import (
    CAUSAL,
    FULL,
    ALiBi,
    NoPE,
    ShapeError,
    Tokens,
    Transformer,
    causal,
    contiguous,
    decode,
    materialize,
    packed,
    padded,
    positional_attention,
    visible,
    window,
)
from posenc.attn.cache import GrowingCache, StaticCache
from posenc.core.mask import UNFILLED
from posenc.encodings.fox import FoX, Gates
from posenc.testing import conform
from posenc.testing.checks import against_oracle

F64 = torch.float64
DIM, HEADS, HEAD_DIM = 6, 4, 8


def log_sigmoid(logit):
    return -log1p(exp(-logit)) if logit > 0 else logit - log1p(exp(logit))


def log_gates(encoding, x):
    """Lin et al. 2025, §3: log f_t = log σ(w · x_t + b), head by head, token by token."""
    weight, bias = encoding.fgate_proj.weight.double().tolist(), encoding.fgate_proj.bias.double().tolist()
    tokens = x.double().tolist()
    return [
        [log_sigmoid(sum(w * c for w, c in zip(row, token, strict=True)) + b) for token in tokens]
        for row, b in zip(weight, bias, strict=True)
    ]


def oracle(encoding, q, k, x, positions, k_positions):
    """D_ij = Σ_{l = j+1}^{i} log f_l, up to what is the same for all keys: here i is the newest token for every query."""
    gates = log_gates(encoding, x)
    bias = torch.zeros(len(q), q.shape[1], k.shape[1], dtype=F64)
    for head in range(len(q)):
        for key in range(k.shape[1]):
            bias[head, :, key] = sum(gates[head][key + 1 :])
    return bias


def test_conforms():
    def own_values(subject):
        against_oracle(subject, subject.fresh(), torch.arange(7) + 3)

    conform(
        lambda shape: FoX(shape.dim, shape.heads),
        oracle,
        claims=FoX.spec.claims,
        more={"own values": own_values},
        skip={"values"},  # which asks for keys without hidden states too
    )


def test_check_values():
    encoding = FoX(1, 1).double()
    with torch.no_grad():
        encoding.fgate_proj.weight.fill_(1.0)
    logits = torch.tensor([5.0, 0.0, 2.0, 5.0], dtype=F64)[:, None]
    q = torch.zeros(1, 4, 2, dtype=F64)
    bias = materialize(encoding(q, q, torch.arange(4), x=logits)[0], torch.arange(4), dtype=F64)[0, -1]
    assert bias.tolist() == pytest.approx([-0.8267905401, -0.1336433595, -0.006715348489, 0], rel=1e-9)


def parts(length, kv_heads=2, batch=2):
    """Hidden states with gates of every strength, queries, keys and values."""
    x, q = 40 * torch.randn(batch, length, DIM, dtype=F64), torch.randn(batch, HEADS, length, HEAD_DIM, dtype=F64)
    k, v = torch.randn(2, batch, kv_heads, length, HEAD_DIM, dtype=F64).unbind()
    return x, q, k, v


def paper_attention(encoding, x, q, k, v, allowed, *, order=None, documents=None):
    """Softmax of the scores plus D, whose sum runs over the tokens of the document between the key and the query."""
    batch, length = x.shape[:2]
    order = list(range(length)) if order is None else order
    documents = [[0] * length] * batch if documents is None else documents
    bias = torch.zeros(batch, HEADS, length, length, dtype=F64)
    for row in range(batch):
        gates = torch.tensor(log_gates(encoding, x[row]), dtype=F64)
        for query in range(length):
            for key in range(length):
                document = documents[row][query]
                between = [t for t in range(length) if order[key] < order[t] <= order[query] and documents[row][t] == document]
                bias[row, :, query, key] = gates[:, between].sum(-1)
    k, v = (t.repeat_interleave(HEADS // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT / HEAD_DIM**0.5 + bias
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num() @ v


def near(actual, expected):
    # scores below 10³ (the gates' sums) of float64 numbers: that much of 2⁻⁵³ reaches a weight, then sums of near 10
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=32 * 1e3 * 2**-53)


TRIANGLE = torch.ones(12, 12, dtype=torch.bool).tril()


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_that_of_the_paper(backend, kv_heads):
    encoding, (x, q, k, v) = FoX(DIM, HEADS).double(), parts(12, kv_heads)
    call = {"encodings": [encoding], "positions": 0, "x": x, "backend": backend}
    near(positional_attention(q, k, v, mask=CAUSAL, **call), paper_attention(encoding, x, q, k, v, TRIANGLE))
    within = TRIANGLE & ~TRIANGLE.tril(-4)
    near(positional_attention(q, k, v, mask=CAUSAL & window(4), **call), paper_attention(encoding, x, q, k, v, within))


def test_a_constant_gate_is_alibi():
    fox, (x, q, k, v), alibi = FoX(DIM, HEADS).double(), parts(9), ALiBi(HEADS)
    with torch.no_grad():
        fox.fgate_proj.weight.zero_()
        fox.fgate_proj.bias.copy_(torch.tensor([-log(exp(slope) - 1) for slope in alibi.slopes], dtype=F64))
    call = {"positions": 0, "x": x, "mask": CAUSAL}
    near(
        positional_attention(q, k, v, encodings=[fox], **call),
        positional_attention(q, k, v, encodings=[alibi], **call),
    )


def test_a_sum_runs_inside_its_document():
    """Packed, interleaved (as when packed documents are continued in turn), and with padding in between."""
    encoding, (x, q, k, v) = FoX(DIM, HEADS).double(), parts(9)
    rows = [[0, 0, 0, 0, 0, 1, 1, 1, 1], [2, 0, -1, 2, 0, 0, 1, -1, 0]]
    tokens = Tokens(torch.arange(9), segments=torch.tensor(rows))
    mask = causal(tokens)
    result = positional_attention(q, k, v, encodings=[encoding], positions=tokens, x=x, mask=mask)
    allowed = mask.allowed(9, 9, device="cpu")[:, None]
    near(result, paper_attention(encoding, x, q, k, v, allowed, documents=rows))


def test_a_sum_runs_in_the_order_of_the_tokens():
    encoding, (x, q, k, v) = FoX(DIM, HEADS).double(), parts(9)
    order = torch.tensor([4, 0, 7, 2, 8, 1, 3, 6, 5])
    shuffled = Tokens(order, order=order)
    inputs = [t[..., order, :] for t in (x, q, k, v)]
    x_there, *rest = inputs
    there = positional_attention(*rest, encodings=[encoding], positions=shuffled, x=x_there, mask=causal(shuffled))
    here = positional_attention(q, k, v, encodings=[encoding], positions=0, x=x, mask=CAUSAL)
    near(there, here[:, :, order])
    allowed = causal(shuffled).allowed(9, 9, device="cpu")
    near(there, paper_attention(encoding, *inputs, allowed, order=order.tolist()))


def test_order_and_documents_together():
    encoding, (x, q, k, v) = FoX(DIM, HEADS).double(), parts(8)
    order, rows = torch.tensor([3, 1, 0, 2, 7, 5, 6, 4]), [[0, 1, 0, 1, 0, -1, 0, 1], [0] * 8]
    tokens = Tokens(torch.arange(8), order, torch.tensor(rows))
    mask = causal(tokens)
    result = positional_attention(q, k, v, encodings=[encoding], positions=tokens, x=x, mask=mask)
    allowed = mask.allowed(8, 8, device="cpu")[:, None]
    near(result, paper_attention(encoding, x, q, k, v, allowed, order=order.tolist(), documents=rows))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_matter(side):
    encoding, (x, q, k, v) = FoX(DIM, HEADS).double(), parts(7)
    real = torch.tensor([0, 0, 1, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 1, 0, 0])
    tokens, kept = padded(real[None].expand(2, -1)), real.bool()
    result = positional_attention(q, k, v, encodings=[encoding], positions=tokens, x=x, mask=causal(tokens))
    alone = positional_attention(
        *(t[:, :, kept] for t in (q, k, v)), encodings=[encoding], positions=0, x=x[:, kept], mask=CAUSAL
    )
    near(result[:, :, kept], alone)


def in_steps(encoding, content, steps, cache, place=contiguous):
    """The results of a sequence given piece by piece; ``place(n, start)`` makes the tokens."""
    x, q, k, v = content
    results, start = [], 0
    for n in steps:
        tokens, new = place(n, start), slice(start, start + n)
        plain = isinstance(cache, GrowingCache) and tokens.segments is None and cache.place(tokens)[1].segments is None
        mask = CAUSAL if plain else causal(*cache.place(tokens))
        results.append(
            positional_attention(
                q[:, :, new], k[:, :, new], v[:, :, new],
                encodings=[NoPE(), encoding], positions=tokens, cache=cache, x=x[:, new], mask=mask,
            )
        )  # fmt: skip
        start += n
    return torch.cat(results, 2)


def caches(length):
    return GrowingCache(), StaticCache(2, 2, length + 3, HEAD_DIM, dtype=F64), StaticCache(2, 2, length, HEAD_DIM, dtype=F64)


@settings(max_examples=10)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_split_over_a_cache_gives_the_whole(steps):
    encoding, length = FoX(DIM, HEADS).double(), sum(steps)
    x, q, k, v = parts(length)
    whole = positional_attention(q, k, v, encodings=[NoPE(), encoding], positions=0, x=x, mask=CAUSAL)
    for cache in caches(length):
        near(in_steps(encoding, (x, q, k, v), steps, cache), whole)


@pytest.mark.parametrize("side", ["left", "right"])
def test_decoding_after_a_padded_prompt(side):
    """Padding on the right of a prompt ends up between its tokens and the next ones."""
    encoding, content, lengths = FoX(DIM, HEADS).double(), parts(8), (3, 5)
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    real = real if side == "right" else real.flip(1)

    def place(n, start):
        return padded(real) if start == 0 else decode(torch.tensor(lengths) + start - 5, n)

    for cache in caches(8):
        result = in_steps(encoding, content, [5, 1, 2], cache, place)
        for row, kept in enumerate(torch.cat([real.bool(), torch.ones(2, 3, dtype=torch.bool)], 1)):
            x, q, k, v = (t[row : row + 1, ..., kept, :] for t in content)
            alone = positional_attention(q, k, v, encodings=[encoding], positions=0, x=x, mask=CAUSAL)
            near(result[row : row + 1, :, kept], alone)


def test_packed_documents_continued_in_turn():
    encoding, content = FoX(DIM, HEADS).double(), parts(7)
    prompt, turns = packed(torch.tensor([0, 2, 5]), 5), Tokens(torch.tensor([2, 3]), segments=torch.tensor([0, 1]))
    for cache in caches(7):
        result = in_steps(encoding, content, [5, 2], cache, lambda n, start: turns if start else prompt)
        for document in ([0, 1, 5], [2, 3, 4, 6]):
            x, q, k, v = (t[..., document, :] for t in content)
            alone = positional_attention(q, k, v, encodings=[encoding], positions=0, x=x, mask=CAUSAL)
            near(result[:, :, document], alone)


def test_fixed_slots_keep_one_shape_and_are_left_as_they_were():
    encoding, (x, q, k, v) = FoX(DIM, HEADS).double(), parts(6)
    cache = StaticCache(2, 2, 9, HEAD_DIM, dtype=F64)
    in_steps(encoding, [t[..., :3, :] for t in (x, q, k, v)], [3], cache)
    before = cache.states[1]
    kept = before.log_gates.clone()
    assert before.log_gates.shape == (2, HEADS, 9)
    assert bool((before.log_gates[..., 3:] == 0).all())
    tokens = contiguous(1, 3)
    positional_attention(
        *(t[:, :, 3:4] for t in (q, k, v)), encodings=[NoPE(), encoding], positions=tokens, cache=cache, x=x[:, 3:4],
        mask=causal(*cache.place(tokens)),
    )  # fmt: skip
    after = cache.states[1]
    assert torch.equal(before.log_gates, kept)
    assert int(before.filled) == 3
    assert int(after.filled) == 4
    assert torch.equal(after.log_gates[..., :3], kept[..., :3])
    assert (after.log_gates.shape, after.log_gates.dtype) == (kept.shape, kept.dtype)


def test_decoding_over_fixed_slots_compiles_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    encoding, counter = FoX(DIM, HEADS).eval(), CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()

    def step(q, k, x, log_gates, filled, order):
        mask = visible(filled[None], order)
        bias, state = encoding(q, k, filled[None], x=x, state=Gates(log_gates, filled), mask=mask)
        return bias.values, state

    compiled = torch.compile(torch.no_grad(step), fullgraph=True, backend=counter)
    k, state = torch.zeros(1, 2, 12, HEAD_DIM), Gates(torch.zeros(1, HEADS, 12), torch.zeros((), dtype=torch.int64))
    for n in range(4):
        x, q = torch.randn(1, 1, DIM), torch.randn(1, HEADS, 1, HEAD_DIM)
        order = torch.full((12,), UNFILLED)
        order[: n + 1] = torch.arange(n + 1)
        values, following = compiled(q, k, x, *state, order)
        with torch.no_grad():
            expected, state = step(q, k, x, *state, order)
        # log-sigmoids near log 2, summed four at a time, each with a few float32 roundings
        torch.testing.assert_close(values, expected, rtol=0.0, atol=16 * 2**-24)
        assert torch.equal(following.filled, state.filled)
    assert counter.frame_count == 1


def test_sums_of_a_long_sequence_do_not_drift():
    """Differences of a running float32 sum are off by 5·10⁻⁴ at the end, where decoding happens, of sums below 1."""
    length = 20_000
    encoding, x = FoX(1, 1), torch.randn(1, length, 1)
    q = torch.zeros(1, 1, length, 2)
    bias, state = encoding(q, q, torch.arange(length), x=x)
    exact = state.log_gates.double().flip(-1).cumsum(-1).flip(-1) - state.log_gates.double()
    written = materialize(bias, torch.arange(1), torch.arange(length))[:, 0].double()
    # rounded once to float32, and 2⁻⁵³ of the whole sum for each of the sums
    assert bool(((written - exact).abs() <= exact.abs() * 2**-24 + length * 2**-53 * exact.abs().max()).all())
    assert exact.abs().max() > 10_000
    running = state.log_gates.cumsum(-1)
    assert ((running[..., -1:] - running).double() - exact)[..., -3:].abs().max() > 1e-4
    documents = torch.arange(length) // 100
    bias, _ = encoding(q, q, torch.arange(length), x=x, mask=causal(Tokens(torch.arange(length), segments=documents)))
    assert bias.values.abs().max() < 200


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_half_models_do_not_round_the_gates(dtype):
    encoding, x, q = FoX(DIM, HEADS), torch.randn(1, 5, DIM), torch.randn(1, HEADS, 5, HEAD_DIM)
    plain = encoding(q, q, torch.arange(5), x=x)[0].values
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(encoding(q, q, torch.arange(5), x=x)[0].values, plain)
    half, state = encoding.to(dtype)(q.to(dtype), q.to(dtype), torch.arange(5), x=x.to(dtype))
    assert state.log_gates.dtype == torch.float32
    assert half.values.dtype == F64
    x64 = encoding.double()(q, q, torch.arange(5), x=x.to(dtype))[0].values
    # float32 products of the same half-precision numbers
    torch.testing.assert_close(half.values, x64, rtol=0.0, atol=64 * 2**-24)


def test_gradients_reach_gates_and_hidden_states():
    encoding, (x, q, k, v) = FoX(DIM, HEADS).double(), parts(4, batch=1)
    weight, bias = encoding.fgate_proj.weight, encoding.fgate_proj.bias
    tokens = Tokens(torch.arange(4), segments=torch.tensor([[0, 1, 0, 0]]))

    def call(x, q, k, v, *_):
        return positional_attention(
            q, k, v, encodings=[encoding], positions=tokens, x=x, mask=causal(tokens), backend="reference"
        )

    inputs = (*((t / 40 if t is x else t).requires_grad_() for t in (x, q, k, v)), weight, bias)
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_names_and_start_are_the_released_ones():
    encoding = FoX(256, 64)
    assert {name: tuple(p.shape) for name, p in encoding.named_parameters()} == {
        "fgate_proj.weight": (64, 256),
        "fgate_proj.bias": (64,),
    }
    assert bool((encoding.fgate_proj.bias == 0).all())
    # the deviation of 16,384 draws is itself off by 0.02 / √(2 · 16,384) in the root mean square: five of those
    assert abs(encoding.fgate_proj.weight.std().item() - 0.02) < 5 * 0.02 / (2 * 16_384) ** 0.5


@pytest.mark.parametrize("slots", [None, 12])
@pytest.mark.parametrize("shared", [True, False])
def test_a_decoder_trains_and_generates_the_same_with_a_cache(slots, shared):
    one = FoX(16, 4)
    encodings = [one] if shared else (lambda layer: [FoX(16, 4)])
    model = Transformer(11, dim=16, layers=2, heads=4, kv_heads=2, encodings=encodings).double()
    ids = torch.randint(0, 11, (2, 9))
    torch.nn.functional.cross_entropy(model(ids, 0)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert all(bool((gate.fgate_proj.weight.grad != 0).all()) for gate in model.encodings)
    model.eval()
    whole, cache = model(ids, 0), model.new_cache(*(() if slots is None else (2, slots)))
    steps = [
        model(ids[:, first:last], contiguous(last - first, first), cache=cache) for first, last in ((0, 4), (4, 5), (5, 9))
    ]
    # two layers of some hundred float64 roundings of logits below 10
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0.0, atol=1e4 * 2**-53)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    cache = model.new_cache(*(() if slots is None else (2, slots)))
    together = model.generate(ids[:, :5], 4, attention_mask=mask, cache=cache)
    for row, first in ((0, 2), (1, 0)):
        alone = model.generate(ids[row : row + 1, first:5], 4)
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 4), ValueError, "dim = 0. Expected an integer of 1 or more"),
        ((8, 0), ValueError, "heads = 0. Expected an integer of 1 or more"),
        ((8, 4.0), TypeError, "heads = 4.0"),
    ],
)
def test_impossible_settings_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"FoX: {message}"):
        FoX(*arguments)


def test_missing_and_other_hidden_states_are_refused():
    encoding, (x, q, k, v) = FoX(DIM, HEADS).double(), parts(5)
    call = {"encodings": [encoding], "positions": 0}
    with pytest.raises(TypeError, match="FoX: x is None. Expected the hidden states of the new tokens"):
        positional_attention(q, k, v, **call)
    for wrong in (x[..., :-1], x[:, :-1]):
        with pytest.raises(ShapeError, match=r"FoX: x of shape .* Expected \[\*batch, seq, 6\]"):
            positional_attention(q, k, v, x=wrong, **call)
    with pytest.raises(ShapeError, match=r"Expected .* \[\*batch, 4, seq, head_dim\]"):
        positional_attention(q[:, :2], k, v, x=x, **call)


def test_keys_without_gates_are_refused():
    encoding, (x, q, k, v) = FoX(DIM, HEADS).double(), parts(5)
    at = torch.arange(5)
    with pytest.raises(ShapeError, match="FoX: 5 keys, and gates of 0 cached and 2 new tokens. Expected a gate for every key"):
        positional_attention(q[:, :, :2], k, v, encodings=[encoding], positions=at[:2], k_positions=at, x=x[:, :2])
    with pytest.raises(ShapeError, match="FoX: 5 keys, and gates of 4 cached and 5 new tokens"):
        encoding(q, k, at, x=x, state=encoding(q[:, :, :4], k[:, :, :4], at[:4], x=x[:, :4])[1])
    with pytest.raises(ShapeError, match="FoX: 2 keys, and gates of 0 cached and 5 new tokens"):
        encoding(q, k[:, :, :2], at, x=x, mask=FULL)


def test_a_cache_that_was_filled_without_it_is_refused():
    encoding, (x, q, k, v) = FoX(DIM, HEADS).double(), parts(4)
    cache = StaticCache(2, 2, 9, HEAD_DIM, dtype=F64)
    in_steps(NoPE(), (x, q, k, v), [3], cache)
    content = [t[..., 3:, :] for t in (x, q, k, v)]
    with pytest.raises(ValueError, match="FoX: 9 keys, of which 4 are filled, and gates of 1 tokens. Expected an empty cache"):
        in_steps(encoding, content, [1], cache, lambda n, start: contiguous(n, 3))
