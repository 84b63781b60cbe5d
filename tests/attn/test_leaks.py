"""Nothing hidden may reach a result, on any backend: keys and values that a query must not see are replaced, and its row
is compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention

from posenc import (
    CAUSAL,
    ALiBi,
    BackendRefused,
    Encoding,
    GrowingCache,
    Mask,
    RoPE,
    StaticCache,
    T5Bias,
    Tokens,
    attention,
    causal,
    contiguous,
    decode,
    packed,
    padded,
    positional_attention,
    same_segment,
    seconds,
    shard,
    visible,
    window,
)
from posenc.attn.select import BACKENDS as EVERY

from .oracle import Sees

BACKENDS = tuple(backend.name for backend in EVERY)
PARTIAL = ("channels", "varlen")
"""Made for one kind of mask each; what they must serve is asked of them below, and the others serve everything."""
HEADS, KV_HEADS, DIM = 4, 2, 8
ENCODINGS: dict[str, list[Encoding]] = {"none": [], "rope": [RoPE(DIM)], "alibi": [ALiBi(HEADS)], "t5": [T5Bias(HEADS)]}
backends = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(scope="module", autouse=True)
def _plain() -> Iterator[None]:
    """flex_attention without the graph that torch captures of each eager call; `test_flex` has some with it. Without
    gradients, which it has on CUDA alone."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


@contextmanager
def where_served() -> Iterator[None]:
    try:
        yield
    except BackendRefused as refused:
        if not refused.refusals.keys() <= set(PARTIAL):
            raise


def qkv(q: int, k: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = (batch, HEADS, q, DIM), (batch, KV_HEADS, k, DIM), (batch, KV_HEADS, k, DIM)
    first, second, third = (torch.randn(*shape, generator=random) for shape in shapes)
    return first, second, third


def assert_hidden(run: Callable[[Tensor, Tensor], Tensor], k: Tensor, v: Tensor, sees: Sees, keys: Iterable[int]) -> None:
    """Replace each of some keys and values: only the rows that see it move, and those do move."""
    with where_served():
        assert_served_and_hidden(run, k, v, sees, keys)


def assert_served_and_hidden(
    run: Callable[[Tensor, Tensor], Tensor], k: Tensor, v: Tensor, sees: Sees, keys: Iterable[int]
) -> None:
    before = run(k, v)
    for j in keys:
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, j], other_v[:, :, j] = -30 * k[:, :, j], 1e4
        after = run(other_k, other_v)
        moved = (after != before).any(-1).any(1)
        for b in range(moved.shape[0]):
            for i in range(moved.shape[1]):
                assert bool(moved[b, i]) == sees(b, i, j), f"row {b}, query {i}, key {j}: {'leak' if moved[b, i] else 'blind'}"


def test_what_is_made_for_one_mask_serves_it_and_hides() -> None:
    q, k, v = (tensor.bfloat16() for tensor in qkv(6, 6))
    document = [0, 0, 0, 1, 1, 1]
    packed_up = CAUSAL & same_segment(torch.tensor(document))

    def run(backend: str, mask: Mask) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda k, v: attention(q, k, v, mask=mask, bias=ALiBi(HEADS)(), backend=backend)

    assert_served_and_hidden(run("channels", CAUSAL), k, v, standing(6, 6), range(6))
    assert_served_and_hidden(run("varlen", packed_up), k, v, lambda b, i, j: j <= i and document[i] == document[j], range(6))


@pytest.mark.parametrize("name", ["causal", "sliding", "documents", "window", "order"])
@backends
def test_nothing_leaks_across_the_edges_of_blocks(backend: str, name: str) -> None:
    n, edges = 150, (0, 63, 64, 127, 128)
    document, order = [i // 70 for i in range(n)], [(7 * i) % n for i in range(n)]
    mask, sees = {
        "causal": (CAUSAL, standing(n, n)),
        "sliding": (CAUSAL & window(40), lambda b, i, j: 0 <= i - j < 40),
        "documents": (
            CAUSAL & same_segment(torch.tensor(document)), lambda b, i, j: j <= i and document[i] == document[j]
        ),
        "window": (window(30, after=2), lambda b, i, j: -2 <= i - j < 30),
        "order": (visible(torch.tensor(order), torch.tensor(order)), lambda b, i, j: order[j] <= order[i]),
    }[name]  # fmt: skip
    q, k, v = qkv(n, n)
    for bias in (None, T5Bias(HEADS)()):
        assert_hidden(lambda k, v, bias=bias: attention(q, k, v, mask=mask, bias=bias, backend=backend), k, v, sees, edges)


def standing(q: int, k: int) -> Sees:
    return lambda b, i, j: j <= i + k - q


@backends
@pytest.mark.parametrize(("q", "k"), [(1, 6), (3, 6), (6, 6), (6, 3)])
def test_causal_hides_the_future_at_every_length(q: int, k: int, backend: str) -> None:
    queries, keys, values = qkv(q, k)
    for bias in (None, ALiBi(HEADS)()):
        assert_hidden(
            lambda k, v, bias=bias: attention(queries, k, v, mask=CAUSAL, bias=bias, backend=backend),
            keys, values, standing(q, k), range(k),
        )  # fmt: skip


@backends
def test_a_window_hides_what_is_further(backend: str) -> None:
    queries, keys, values = qkv(4, 7)
    assert_hidden(
        lambda k, v: attention(queries, k, v, mask=window(2, after=1), backend=backend),
        keys, values, lambda b, i, j: -1 <= i + 3 - j < 2, range(7),
    )  # fmt: skip


def self_attention(tokens: Tokens, backend: str, encodings: list[Encoding], mask: Mask | None = None, **more: int | None):
    queries, keys, values = qkv(tokens.length, tokens.length, **more)
    chosen = causal(tokens) if mask is None else mask

    def run(k: Tensor, v: Tensor) -> Tensor:
        return positional_attention(queries, k, v, encodings=encodings, positions=tokens, mask=chosen, backend=backend)

    return run, keys, values


@backends
@pytest.mark.parametrize("encodings", ENCODINGS.values(), ids=ENCODINGS)
def test_packed_documents_do_not_see_each_other(encodings: list[Encoding], backend: str) -> None:
    document = [0, 0, 0, 2, 2, 2, 2, 2, None]  # an empty document 1, and one token of padding
    run, k, v = self_attention(packed(torch.tensor([0, 3, 3, 8]), 9), backend, encodings)
    assert_hidden(run, k, v, lambda b, i, j: j <= i and document[i] is not None and document[i] == document[j], range(9))


@backends
@pytest.mark.parametrize("encodings", ENCODINGS.values(), ids=ENCODINGS)
def test_padding_is_not_seen(encodings: list[Encoding], backend: str) -> None:
    real = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    run, k, v = self_attention(padded(torch.tensor(real)), backend, encodings, batch=3)
    assert_hidden(run, k, v, lambda b, i, j: j <= i and bool(real[b][i] and real[b][j]), range(5))
    with where_served():
        assert not run(k, v)[0, :, :2].any()


@backends
@pytest.mark.parametrize("encodings", ENCODINGS.values(), ids=ENCODINGS)
def test_padding_is_not_seen_in_an_encoder(encodings: list[Encoding], backend: str) -> None:
    real = [[0, 1, 1], [1, 1, 0]]
    tokens = padded(torch.tensor(real))
    assert tokens.segments is not None
    run, k, v = self_attention(tokens, backend, encodings, mask=same_segment(tokens.segments), batch=2)
    assert_hidden(run, k, v, lambda b, i, j: bool(real[b][i] and real[b][j]), range(3))


IMAGE = [0, 1, 2, 3, *[4] * 256, 20, 21, 22, 23]
"""The temporal position of a 16 × 16 image inside text, which all of its patches share."""


def test_an_image_inside_text_has_as_many_visible_pairs_as_text() -> None:
    n = len(IMAGE)
    allowed = causal(Tokens(torch.tensor(IMAGE))).allowed(n, n, device="cpu")
    assert int(allowed.sum()) == n * (n + 1) // 2
    by_position = torch.tensor(IMAGE)[:, None] >= torch.tensor(IMAGE)
    assert int((by_position & ~allowed).sum()) == 256 * 255 // 2  # what a causal rule on positions would leak


@backends
@pytest.mark.parametrize(
    "positions",
    [
        torch.tensor(IMAGE),
        torch.tensor([0.0, 0.5, 0.5, 0.5, 1.25, 1.25]),
        torch.arange(8).flip(0),
        torch.tensor([0, 1, 2, 0, 1, 2]),
        seconds(5, 160, 16_000).positions * 0,
    ],
    ids=["image", "equal time stamps", "backwards", "restarting", "one instant"],
)
def test_positions_decide_nothing_about_visibility(positions: Tensor, backend: str) -> None:
    n = len(positions)
    names = ["none", "rope", "alibi"] + ([] if positions.is_floating_point() else ["t5"])
    for name in names:
        run, k, v = self_attention(Tokens(positions), backend, ENCODINGS[name])
        assert_hidden(run, k, v, standing(n, n), range(n) if n < 10 else (0, 3, 4, 131, 259, n - 1))


@backends
@pytest.mark.parametrize("rank", [0, 1])
def test_shards_see_by_order(rank: int, backend: str) -> None:
    everything = contiguous(8)
    shards = [shard(everything, r, 2, layout="head_tail") for r in range(2)]
    orders = [[int(o) for o in s.order] for s in shards if s.order is not None]
    assert orders == [[0, 1, 6, 7], [2, 3, 4, 5]]
    gathered = orders[0] + orders[1]  # keys as an all-gather lays them out
    queries, keys, values = qkv(4, 8)
    mine = Tokens(shards[rank].positions, shards[rank].order)
    mask = causal(mine, Tokens(torch.tensor(gathered), torch.tensor(gathered)))
    for name in ENCODINGS:

        def run(k: Tensor, v: Tensor, name: str = name) -> Tensor:
            return positional_attention(
                queries, k, v, encodings=ENCODINGS[name], positions=mine, k_positions=torch.tensor(gathered), mask=mask,
                backend=backend,
            )  # fmt: skip

        assert_hidden(run, keys, values, lambda b, i, j: gathered[j] <= orders[rank][i], range(8))


@backends
@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_shards_together_are_the_whole(layout: str, backend: str) -> None:
    queries, keys, values = qkv(8, 8)
    for encodings in ENCODINGS.values():
        with where_served():
            whole = positional_attention(queries, keys, values, encodings=encodings, positions=0, mask=CAUSAL, backend=backend)
            for rank in range(2):
                mine = shard(contiguous(8), rank, 2, layout=layout)  # type: ignore[arg-type]
                assert mine.order is not None
                part = positional_attention(
                    queries[:, :, mine.order], keys, values, encodings=encodings, positions=mine, k_positions=0,
                    mask=causal(mine, contiguous(8)), backend=backend,
                )  # fmt: skip
                torch.testing.assert_close(part, whole[:, :, mine.order], rtol=0, atol=2e-6)


small = st.integers(0, 3)


@backends
@given(data=st.data())
def test_no_mask_leaks(backend: str, data: st.DataObject) -> None:
    q, k = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    orders = [data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)) for n in (q, k)]
    documents = [data.draw(st.lists(st.integers(-1, 1), min_size=n, max_size=n)) for n in (q, k)]
    back, after = data.draw(st.integers(1, 4)), data.draw(small)
    rules: dict[str, tuple[Mask, Sees]] = {
        "causal": (CAUSAL, standing(q, k)),
        "window": (window(back, after), lambda b, i, j: -after <= i + k - q - j < back),
        "order": (
            visible(torch.tensor(orders[0]), torch.tensor(orders[1]), back),
            lambda b, i, j: 0 <= orders[0][i] - orders[1][j] < back,
        ),
        "document": (
            same_segment(torch.tensor(documents[0]), torch.tensor(documents[1])),
            lambda b, i, j: documents[0][i] == documents[1][j] != -1,
        ),
    }
    names = data.draw(st.lists(st.sampled_from(sorted(rules)), min_size=1, max_size=3))
    every = data.draw(st.booleans())
    mask = rules[names[0]][0]
    for name in names[1:]:
        mask = mask & rules[name][0] if every else mask | rules[name][0]

    def seen(b: int, i: int, j: int) -> bool:
        answers = [rules[name][1](b, i, j) for name in names]
        return all(answers) if every else any(answers)

    queries, keys, values = qkv(q, k)
    bias = data.draw(st.sampled_from([None, ALiBi(HEADS)(), T5Bias(HEADS)()]))
    assert_hidden(lambda k, v: attention(queries, k, v, mask=mask, bias=bias, backend=backend), keys, values, seen, range(k))


@backends
@pytest.mark.parametrize("garbage", [1e4, -1e4, 3e30])
@pytest.mark.parametrize("encodings", ENCODINGS.values(), ids=ENCODINGS)
def test_unfilled_slots_do_not_leak(encodings: list[Encoding], garbage: float, backend: str) -> None:
    q, k, v = qkv(5, 5, batch=2)

    def last_row(garbage: float | None) -> Tensor:
        cache = StaticCache(2, KV_HEADS, 9, DIM)
        out = q.new_empty(0)
        for step in range(5):
            if garbage is not None:
                for tensor in (cache.k, cache.v):
                    tensor[:, :, step:] = garbage
                cache.positions[:, step:] = 10**6
            tokens = decode(torch.tensor([step, step]))
            now = slice(step, step + 1)
            out = positional_attention(
                q[:, :, now], k[:, :, now], v[:, :, now], encodings=encodings, positions=tokens, cache=cache,
                mask=causal(*cache.place(tokens)), backend=backend,
            )  # fmt: skip
        return out

    with where_served():
        assert torch.equal(last_row(garbage), last_row(None))


def test_order_alone_hides_unfilled_slots() -> None:
    _, k, v = qkv(3, 3)
    cache = StaticCache(1, KV_HEADS, 6, DIM)
    for start in (0, 3):
        new, every = cache.place(contiguous(3, start))
        assert new.order is not None
        assert every.order is not None
        allowed = visible(new.order, every.order).allowed(3, 6, device="cpu")
        assert allowed.tolist() == [[j <= start + i for j in range(6)] for i in range(3)]
        cache.append(k, v, contiguous(3, start))


def test_unfilled_slots_hold_zeros_so_that_not_even_a_product_with_nan_can_leak() -> None:
    _, k, v = qkv(3, 3)
    hoard = [torch.full((1, KV_HEADS, 8, DIM), float("nan")) for _ in range(8)]
    del hoard  # memory that an uninitialised cache would get
    cache = StaticCache(1, KV_HEADS, 8, DIM)
    for start in (0, 3):
        cache.append(k, v, contiguous(3, start))
        assert not cache.k[:, :, start + 3 :].any()
        assert not cache.v[:, :, start + 3 :].any()
    assert bool(cache.k[:, :, :6].any(-1).all())


@backends
@pytest.mark.parametrize("length", [5, 600])
def test_nan_in_one_query_stays_in_its_row(length: int, backend: str) -> None:
    q, k, v = qkv(length, length)
    broken = q.clone()
    broken[:, :, 3] = float("nan")
    for mask in (CAUSAL, window(3)):
        for bias in (None, ALiBi(HEADS)()):
            with where_served():
                clean, dirty = (attention(x, k, v, mask=mask, bias=bias, backend=backend) for x in (q, broken))
                others = torch.arange(length) != 3
                assert torch.equal(clean[:, :, others], dirty[:, :, others])


@backends
def test_batch_mates_and_order_of_calls_do_not_matter(backend: str) -> None:
    q, k, v = qkv(6, 6, batch=3)
    for encodings in ENCODINGS.values():
        with where_served():

            def run(rows: slice, start: int = 0, encodings: list[Encoding] = encodings) -> Tensor:
                return positional_attention(
                    q[rows], k[rows], v[rows], encodings=encodings, positions=start, mask=CAUSAL, backend=backend
                )

            first = run(slice(None))
            run(slice(None), 7)
            assert torch.equal(run(slice(None)), first)
            for row in range(3):
                torch.testing.assert_close(run(slice(row, row + 1)), first[row : row + 1], rtol=0, atol=2e-6)


@backends
def test_a_cache_is_not_shared_between_sequences(backend: str) -> None:
    q, k, v = qkv(4, 4)
    for encodings in ENCODINGS.values():
        with where_served():
            caches = [GrowingCache(), GrowingCache()]
            outs = []
            for start in range(2):
                for cache, sign in zip(caches, (1, -1), strict=True):
                    now = slice(2 * start, 2 * start + 2)
                    outs.append(
                        positional_attention(
                            sign * q[:, :, now], sign * k[:, :, now], sign * v[:, :, now], encodings=encodings,
                            positions=2 * start, cache=cache, mask=CAUSAL, backend=backend,
                        )
                    )  # fmt: skip
            for out, negated in (outs[:2], outs[2:]):
                torch.testing.assert_close(out, -negated, rtol=0, atol=2e-6)
