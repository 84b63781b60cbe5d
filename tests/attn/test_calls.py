"""What a call of attention takes, refuses and says of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import (
    CAUSAL,
    FULL,
    ALiBi,
    BackendRefused,
    DenseBias,
    Encoding,
    FormulaBias,
    Frequencies,
    GrowingCache,
    KeyBias,
    Learned,
    NoPE,
    QueryTableBias,
    Randomized,
    RoPE,
    ScoreBias,
    ShapeError,
    Sinusoidal,
    SlopeBias,
    StaticCache,
    T5Bias,
    TableBias,
    Tokens,
    apply_rotary,
    attention,
    causal,
    contiguous,
    explain,
    positional_attention,
    prepare,
    rotary_table,
    same_segment,
    slice_heads,
    visible,
    window,
)
from posenc.attn import select
from posenc.attn.backends.base import Backend
from posenc.attn.request import Request

BACKENDS = ("reference", "sdpa", "blockwise", "auto")
backends = pytest.mark.parametrize("backend", BACKENDS)
HEADS, DIM = 4, 8


def qkv(q: int = 3, k: int = 5, heads: int = HEADS, kv_heads: int = HEADS, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = (2, heads, q, DIM), (2, kv_heads, k, DIM), (2, kv_heads, k, DIM)
    first, second, third = (torch.randn(*shape, **more) for shape in shapes)
    return first, second, third


def double(q: Tensor, k: Tensor, head: Tensor, w: Tensor) -> Tensor:
    return w[head] * (q * k)


def one_axis_biases() -> dict[str, ScoreBias]:
    torch.manual_seed(1)
    return {
        "slope": ALiBi(HEADS, form="symmetric")(),
        "table": TableBias(torch.randn(HEADS, 5), (1,)),
        "query table": QueryTableBias(torch.randn(2, HEADS, 3, 5), 1),
        "sum": ALiBi(HEADS)() + TableBias(torch.randn(HEADS, 5), (1,)),
    }


# ------------------------------------------------------------------------------------------------ alignment


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@backends
def test_one_query_sees_every_earlier_key(backend: str, dtype: torch.dtype) -> None:  # pytorch/pytorch#103082
    q, k = torch.zeros(1, 1, 1, 4, dtype=dtype), torch.zeros(1, 1, 4, 4, dtype=dtype)
    v = torch.arange(4.0).to(dtype).reshape(1, 1, 4, 1)
    for mask in (CAUSAL, CAUSAL & window(4), visible(torch.tensor([3]), torch.arange(4))):
        assert attention(q, k, v, mask=mask, backend=backend).item() == 1.5
    assert attention(q, k, v, mask=CAUSAL & window(2), backend=backend).item() == 2.5


@backends
def test_two_queries_are_level_with_the_last_two_keys(backend: str) -> None:
    q, k, v = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 4, 4), torch.arange(4.0).reshape(1, 1, 4, 1)
    torch.testing.assert_close(attention(q, k, v, mask=CAUSAL, backend=backend).flatten(), torch.tensor([1.0, 1.5]))


# ------------------------------------------------------------------------------------------------ positions


@pytest.mark.parametrize("name", list(one_axis_biases()))
@backends
def test_no_positions_mean_contiguous_and_level_at_the_end(backend: str, name: str) -> None:
    q, k, v = qkv()
    bias = one_axis_biases()[name]
    implied = attention(q, k, v, bias=bias, backend=backend)
    spelled = attention(q, k, v, bias=bias, positions=torch.tensor([2, 3, 4]), k_positions=torch.arange(5), backend=backend)
    level_at_start = attention(q, k, v, bias=bias, positions=0, k_positions=0, backend=backend)
    assert torch.equal(implied, spelled)
    assert not torch.allclose(implied, level_at_start, atol=1e-3)


def test_no_positions_with_more_queries_than_keys() -> None:
    q, k, v = qkv(5, 3)
    bias = ALiBi(HEADS)()
    spelled = attention(q, k, v, bias=bias, positions=torch.arange(-2, 3), k_positions=torch.arange(3))
    assert torch.equal(attention(q, k, v, bias=bias), spelled)


@backends
def test_int_positions_are_contiguous_from_there(backend: str) -> None:
    q, k, v = qkv()
    bias = ALiBi(HEADS, form="symmetric")()
    spelled = attention(
        q, k, v, bias=bias, positions=torch.tensor([7, 8, 9]), k_positions=torch.tensor([1, 2, 3, 4, 5]), backend=backend
    )
    assert torch.equal(attention(q, k, v, bias=bias, positions=7, k_positions=1, backend=backend), spelled)


def two_axes() -> TableBias:
    return TableBias(torch.randn(HEADS, 3, 3), (1, 1))


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (lambda: FormulaBias(double, (torch.ones(HEADS),), torch.arange(HEADS)), TypeError, "positions=None with FormulaBias"),
        (two_axes, TypeError, "positions=None with TableBias"),
        (lambda: ALiBi(HEADS)() + FormulaBias(double, (torch.ones(HEADS),), torch.arange(HEADS)), TypeError, "with SumBias"),
    ],
)
def test_biases_that_need_positions_refuse_to_guess_them(bias: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(*qkv(), bias=bias())


def test_k_positions_alone_are_refused() -> None:
    with pytest.raises(TypeError, match="Pass positions and k_positions"):
        attention(*qkv(), bias=ALiBi(HEADS)(), k_positions=0)


def test_unequal_lengths_need_k_positions() -> None:
    with pytest.raises(ShapeError, match="3 queries and 5 keys with positions but without k_positions"):
        attention(*qkv(), bias=ALiBi(HEADS)(), positions=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_positions_are_refused(dtype: torch.dtype) -> None:
    q, k, v = qkv(4, 4)
    positions = torch.arange(4).to(dtype)
    for bias in (None, ALiBi(HEADS)(), KeyBias(torch.ones(HEADS, 4))):
        with pytest.raises(TypeError, match=rf"positions are {dtype}. Expected integers, float32 or float64"):
            attention(q, k, v, bias=bias, positions=positions)
        with pytest.raises(TypeError, match="half precision"):
            attention(q, k, v, bias=bias, positions=0, k_positions=positions)
    with pytest.raises(TypeError, match="half precision"):
        positional_attention(q, k, v, encodings=[RoPE(DIM)], positions=positions)


@pytest.mark.parametrize("name", ["table", "query table", "sum"])
def test_tables_refuse_real_positions(name: str) -> None:
    q, k, v = qkv(3, 3)
    with pytest.raises(TypeError, match="looks distances up in a table"):
        attention(q, k, v, bias=one_axis_biases()[name], positions=torch.tensor([0.0, 0.5, 1.0]))


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (torch.arange(4), ShapeError, r"Expected \[\*batch, 3\]"),
        (torch.tensor([0.0, float("nan"), 1.0]), ValueError, "positions hold nan"),
        (torch.tensor([True, False, True]), TypeError, "positions are torch.bool"),
        (True, TypeError, "positions are bool"),
        ([0, 1, 2], TypeError, "positions are list"),
        (torch.zeros(3, 3, dtype=torch.int64), ShapeError, r"the bias has the batch \(3,\)"),
    ],
)
def test_positions_that_do_not_fit_are_refused(positions: Any, error: type[Exception], message: str) -> None:
    q, k, v = qkv(3, 3)
    for backend in BACKENDS:
        with pytest.raises(error, match=message):
            attention(q, k, v, bias=ALiBi(HEADS)(), positions=positions, backend=backend)


@backends
def test_biases_of_several_axes_take_grids(backend: str) -> None:
    """A written-out bias reads no positions, so it goes with positions of any number of axes."""
    q, k, v = qkv(4, 4)
    bias, at = two_axes(), torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    dense = torch.stack(
        [
            torch.stack([bias.table[:, at[i, 0] - at[j, 0] + 1, at[i, 1] - at[j, 1] + 1] for j in range(4)], -1)
            for i in range(4)
        ],
        -2,
    )
    from_grid = attention(q, k, v, bias=bias, positions=at, backend=backend)
    torch.testing.assert_close(from_grid, attention(q, k, v, bias=DenseBias(dense), positions=at, backend=backend))
    key = KeyBias(torch.randn(HEADS, 4))
    torch.testing.assert_close(
        attention(q, k, v, bias=key + bias, positions=at, backend=backend),
        attention(q, k, v, bias=DenseBias(dense + key.values[:, None]), backend=backend),
    )
    with pytest.raises(ShapeError, match=r"Expected \[\*batch, 4, 2\]"):
        attention(q, k, v, bias=bias, positions=torch.arange(4), backend=backend)


# ------------------------------------------------------------------------------------------------ shapes and types


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 3, 8), (4, 3, 8), (4, 3, 8)), r"Expected \[batch, heads, seq, head_dim\]"),
        (((1, 4, 3, 8), (1, 4, 3, 6), (1, 4, 3, 8)), "q and k of one width"),
        (((1, 4, 3, 8), (1, 4, 3, 8), (1, 4, 5, 8)), "k and v of one length"),
        (((1, 4, 3, 8), (1, 4, 3, 8), (1, 2, 3, 8)), "k and v of one length and head count"),
        (((1, 4, 3, 8), (2, 4, 3, 8), (2, 4, 3, 8)), "one batch"),
        (((1, 4, 3, 8), (1, 3, 3, 8), (1, 3, 3, 8)), "a multiple of the key heads"),
        (((1, 2, 3, 8), (1, 4, 3, 8), (1, 4, 3, 8)), "a multiple of the key heads"),
        (((1, 4, 3, 8), (1, 0, 3, 8), (1, 0, 3, 8)), "a multiple of the key heads"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        attention(*(torch.ones(shape) for shape in shapes))


def test_a_bias_of_other_heads_is_refused_and_slices_are_taken() -> None:
    q, k, v = qkv(3, 3)
    with pytest.raises(ShapeError, match="a bias of 8 heads for 4 query heads"):
        attention(q, k, v, bias=ALiBi(8)())
    with pytest.raises(ShapeError, match="a bias of 2 heads for 4 query heads"):
        attention(q, k, v, bias=T5Bias(2)())
    whole = attention(q, k, v, bias=ALiBi(HEADS)())
    for first in (0, 2):
        part = slice(first, first + 2)
        half = attention(q[:, part], k[:, part], v[:, part], bias=slice_heads(ALiBi(HEADS)(), part))
        torch.testing.assert_close(half, whole[:, part])


@pytest.mark.parametrize(
    "bias",
    [
        DenseBias(torch.zeros(HEADS, 3, 4)), DenseBias(torch.zeros(2, HEADS, 5, 3)), KeyBias(torch.zeros(HEADS, 3)),
        DenseBias(torch.zeros(3, HEADS, 3, 5)), KeyBias(torch.zeros(3, HEADS, 5)), DenseBias(torch.zeros(1, 2, HEADS, 3, 5)),
    ],
    ids=["keys", "transposed", "key", "batch", "key batch", "two batches"],
)  # fmt: skip
@backends
def test_written_out_biases_of_another_shape_are_refused(backend: str, bias: ScoreBias) -> None:
    with pytest.raises(ShapeError, match=r"for 3 queries and 5 keys|the bias has the batch"):
        attention(*qkv(), bias=bias, backend=backend)
    with pytest.raises(ShapeError, match="the bias has the batch"):  # no silent batch of three from a batch of one
        attention(*(t[:1] for t in qkv()), bias=DenseBias(torch.zeros(3, HEADS, 3, 5)), backend=backend)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_bias", [torch.float64, torch.bfloat16, torch.int64])
@backends
def test_written_out_biases_may_have_another_dtype(backend: str, of_bias: torch.dtype, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    entries = torch.arange(15).reshape(1, 3, 5) % 7
    wide = torch.promote_types(dtype, torch.float32)
    for mask in (FULL, CAUSAL):
        got = attention(q, k, v, mask=mask, bias=DenseBias(entries.to(of_bias)), backend=backend)
        assert torch.equal(got, attention(q, k, v, mask=mask, bias=DenseBias(entries.to(wide)), backend=backend))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (same_segment(torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)), r"q_segments has shape \(4,\)"),
        (visible(torch.arange(3), torch.arange(4)), r"k_order has shape \(4,\)"),
        (visible(torch.zeros(3, 3, dtype=torch.int64), torch.arange(5)), r"the mask has the batch \(3,\)"),
    ],
)
@backends
def test_masks_of_other_tokens_are_refused(backend: str, mask: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        attention(*qkv(), mask=mask, backend=backend)


def test_types_that_do_not_fit_are_refused() -> None:
    q, k, v = qkv(3, 3)
    with pytest.raises(TypeError, match=r"q is torch.float32, k torch.float64, v torch.float32"):
        attention(q, k.double(), v)
    with pytest.raises(TypeError, match="Expected one floating dtype"):
        attention(q.long(), k.long(), v.long())
    with pytest.raises(TypeError, match="mask is Tensor. Expected a mask value"):
        attention(q, k, v, mask=torch.ones(3, 3, dtype=torch.bool))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dropout_p = 1.5"):
        attention(q, k, v, dropout_p=1.5)
    with pytest.raises(ValueError, match="backend = 'fast'. Expected 'auto' or one of"):
        attention(q, k, v, backend="fast")


@backends
def test_empty_inputs_give_zeros(backend: str) -> None:
    for q_length, k_length in ((0, 5), (3, 0), (0, 0)):
        q, k, v = qkv(q_length, k_length, dtype=torch.bfloat16)
        for mask in (FULL, CAUSAL, window(2)):
            for bias in (None, ALiBi(HEADS)()):
                out = attention(q, k, v[..., :6], mask=mask, bias=bias, backend=backend)
                assert out.shape == (2, HEADS, q_length, 6)
                assert out.dtype == torch.bfloat16
                assert not out.any()


@backends
def test_the_scale_is_one_over_root_width_before_the_bias(backend: str) -> None:
    q, k, v = qkv()
    bias = ALiBi(HEADS)()
    named = attention(q, k, v, bias=bias, scale=DIM**-0.5, backend=backend)
    assert torch.equal(attention(q, k, v, bias=bias, backend=backend), named)
    torch.testing.assert_close(attention(2 * q, k, v, bias=bias, scale=0.5 * DIM**-0.5, backend=backend), named)


@backends
def test_dropout_drops_whole_weights_and_keeps_the_mean(backend: str) -> None:
    torch.manual_seed(0)
    k = torch.zeros(1, 1, 4, 8)
    v = torch.eye(4).reshape(1, 1, 4, 4)
    weights = attention(torch.zeros(1, 1, 4000, 8), k, v, dropout_p=0.5, backend=backend).flatten()
    assert set(weights.unique().tolist()) == {0.0, 0.5}
    share = float((weights > 0).float().mean())
    assert abs(share - 0.5) < 5 * (0.25 / weights.numel()) ** 0.5  # five standard deviations


# ------------------------------------------------------------------------------------------------ backends


class Refusing(Backend):
    name = "refusing"

    def refusal(self, request: Request) -> str | None:
        return "it serves nobody"

    def run(self, request: Request) -> Tensor:
        raise AssertionError("a backend that refuses was run")


@pytest.fixture
def with_refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "BACKENDS", (Refusing(), *select.BACKENDS))


@pytest.mark.usefixtures("with_refusing")
def test_a_named_backend_never_falls_back() -> None:
    q, k, v = qkv()
    with pytest.raises(BackendRefused, match="backend = 'refusing' refuses .refusing: it serves nobody.") as caught:
        attention(q, k, v, backend="refusing")
    assert caught.value.refusals == {"refusing": "it serves nobody"}
    with pytest.raises(BackendRefused):
        attention(q[:, :, :0], k, v, backend="refusing")
    assert torch.equal(attention(q, k, v), attention(q, k, v, backend="sdpa"))


def test_when_all_refuse_every_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "BACKENDS", (Refusing(),))
    with pytest.raises(BackendRefused, match="backend = 'auto' refuses .refusing: it serves nobody."):
        attention(*qkv())


@pytest.mark.usefixtures("with_refusing")
def test_explain_says_who_is_chosen_and_why() -> None:
    q, k, v = qkv()
    verdicts = {verdict.backend: verdict for verdict in explain(attention, q, k, v, mask=CAUSAL, bias=ALiBi(HEADS)())}
    assert [name for name, verdict in verdicts.items() if verdict.chosen] == ["sdpa"]
    assert verdicts["refusing"].reason == "refuses: it serves nobody"
    assert "first" in verdicts["sdpa"].reason
    assert "accepts" in verdicts["reference"].reason
    named = {verdict.backend: verdict for verdict in explain(attention, q, k, v, backend="reference")}
    assert [name for name, verdict in named.items() if verdict.chosen] == ["reference"]
    assert named["reference"].reason == "named"
    refused = {verdict.backend: verdict for verdict in explain(attention, q, k, v, backend="refusing")}
    assert not any(verdict.chosen for verdict in refused.values())
    assert refused["refusing"].reason == "refuses: it serves nobody"


def test_explain_takes_rotation_and_refuses_the_rest() -> None:
    x, table = torch.ones(1, 1, 3, 4), rotary_table(torch.arange(3), Frequencies(torch.ones(2)))
    said = {verdict.backend: verdict for verdict in explain(apply_rotary, x, table, pairing="half", backend="reference")}
    assert said["reference"].chosen
    assert said["native"].reason
    with pytest.raises(ValueError, match="'materialize_nothing' has no backends"):
        explain(materialize_nothing)
    with pytest.raises(ValueError, match="backend = 'fast'"):
        explain(attention, *qkv(), backend="fast")
    with pytest.raises(ShapeError, match="8 heads for 4"):
        explain(attention, *qkv(), bias=ALiBi(8)())


def materialize_nothing() -> None:
    """Something that has no backends."""


# ------------------------------------------------------------------------------------------------ positional_attention


@pytest.mark.parametrize("encoding", [Sinusoidal(DIM), Learned(8, DIM), Randomized(8)], ids=lambda e: type(e).__name__)
def test_encodings_that_act_elsewhere_are_refused_by_name(encoding: Encoding) -> None:
    name = type(encoding).__name__
    with pytest.raises(TypeError, match=f"positional_attention: {name} acts on the"):
        positional_attention(*qkv(3, 3), encodings=[RoPE(DIM), encoding], positions=0)
    with pytest.raises(TypeError, match=f"prepare: {name} acts on the"):
        prepare([encoding], torch.arange(3))


def test_what_is_no_encoding_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear.*is no encoding"):
        positional_attention(*qkv(3, 3), encodings=[torch.nn.Linear(1, 1)], positions=0)  # type: ignore[list-item]


@pytest.mark.parametrize("encodings", [[], [NoPE()], [RoPE(DIM)], [ALiBi(HEADS)]], ids=["none", "nope", "rope", "alibi"])
@pytest.mark.parametrize("cached", [False, True])
def test_as_many_tokens_as_queries(encodings: list[Encoding], cached: bool) -> None:
    """One token for five queries would spread silently, in the rotation or in the cache."""
    q, k, v = qkv(5, 5)
    for tokens in (contiguous(1), contiguous(7)):
        cache = GrowingCache() if cached else None
        with pytest.raises(ShapeError, match="for a sequence of 5"):
            positional_attention(q, k, v, encodings=encodings, positions=tokens, cache=cache)
        assert cache is None or cache.length == 0


def test_cross_attention_needs_k_positions() -> None:
    q, k, v = qkv(3, 5)
    with pytest.raises(ShapeError, match="3 queries and 5 keys without k_positions"):
        positional_attention(q, k, v, encodings=[RoPE(DIM)], positions=0)
    rope = RoPE(DIM)
    rotated_q, rotated_k = rope(q, k, 4, torch.tensor([9, 1, 2, 2, 0]))
    ours = positional_attention(q, k, v, encodings=[rope], positions=4, k_positions=torch.tensor([9, 1, 2, 2, 0]))
    assert torch.equal(ours, attention(rotated_q, rotated_k, v))


@backends
def test_encodings_of_both_kinds_act_together(backend: str) -> None:
    q, k, v = qkv(4, 4)
    rope, t5, alibi = RoPE(DIM), T5Bias(HEADS), ALiBi(HEADS)
    ours = positional_attention(q, k, v, encodings=[t5, rope, alibi], positions=3, mask=CAUSAL, backend=backend)
    rotated_q, rotated_k = rope(q, k, 3)
    spelled = attention(rotated_q, rotated_k, v, mask=CAUSAL, bias=t5() + alibi(), positions=3, backend=backend)
    assert torch.equal(ours, spelled)


def test_the_gradient_reaches_the_encoding() -> None:
    t5, grads = T5Bias(HEADS), []
    for backend in BACKENDS:
        t5.zero_grad()
        out = positional_attention(*qkv(4, 4), encodings=[t5], positions=0, mask=CAUSAL, backend=backend)
        out.square().sum().backward()
        grads.append(t5.relative_attention_bias.weight.grad.clone())
    assert bool(grads[0][:4].any(-1).all())
    assert not grads[0][4:].any()
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], rtol=1e-4, atol=1e-6)


def test_prepared_values_serve_the_encodings_they_were_made_for() -> None:
    rope, alibi = RoPE(DIM), ALiBi(HEADS)
    q, k, v = qkv(4, 4)
    at = torch.arange(4)
    prepared = prepare([rope, alibi, rope], at)
    assert len(prepared.encodings) == 2
    alone = positional_attention(q, k, v, encodings=[rope, alibi], positions=at)
    for values in (prepared, prepared.materialized(at, at)):
        assert torch.equal(positional_attention(q, k, v, encodings=[rope, alibi], positions=at, prepared=values), alone)
    with pytest.raises(ValueError, match="nothing for this RoPE"):
        positional_attention(q, k, v, encodings=[RoPE(DIM)], positions=at, prepared=prepared)


# ------------------------------------------------------------------------------------------------ static caches


def static(**more: Any) -> StaticCache:
    return StaticCache(2, HEADS, 6, DIM, **more)


def test_a_static_cache_refuses_masks_that_show_unfilled_slots() -> None:
    q, k, v = qkv(3, 3)
    cache = static()
    for mask in (FULL, CAUSAL, window(3), CAUSAL | visible(torch.arange(3), torch.arange(6))):
        with pytest.raises(ValueError, match="Expected a mask by order"):
            positional_attention(q, k, v, encodings=[], positions=0, cache=cache, mask=mask)
    assert not cache.filled
    assert not cache.k.any()


def test_a_static_cache_refuses_what_it_cannot_hold_and_stays_as_it_was() -> None:
    _, k, v = qkv(4, 4)
    cache = static()
    cache.append(k, v, contiguous(4))
    with pytest.raises(ValueError, match="4 of 6 slots are filled and 4 tokens come"):
        cache.append(k, v, contiguous(4, 4))
    assert int(cache.filled) == 4
    assert torch.equal(cache.k[:, :, :4], k)
    assert not cache.k[:, :, 4:].any()
    with pytest.raises(ShapeError, match="an explicit order"):
        cache.place(Tokens(torch.arange(2), order=torch.arange(2)))
    with pytest.raises(ShapeError, match="2 axes"):
        cache.place(Tokens(torch.zeros(2, 2, dtype=torch.int64), axes=2))
    with pytest.raises(ValueError, match="length = 0"):
        StaticCache(1, 1, 0, 4)


def test_a_static_cache_keeps_real_positions_or_refuses_them() -> None:
    _, k, v = qkv(3, 3)
    tokens = Tokens(torch.tensor([0.0, 0.25, 0.5]))
    with pytest.raises(TypeError, match=r"positions are torch.float32. Expected integers.*position_dtype=torch.float64"):
        static().append(k, v, tokens)
    cache = static(position_dtype=torch.float64)
    assert cache.append(k, v, tokens)[2].positions[0, :3].tolist() == [0.0, 0.25, 0.5]


def test_placing_tokens_changes_nothing() -> None:
    _, k, v = qkv(2, 2)
    for cache in (static(), GrowingCache()):
        cache.append(k, v, contiguous(2))
        new, every = cache.place(contiguous(2, 2))
        again, _ = cache.place(contiguous(2, 2))
        assert torch.equal(new.positions, again.positions)
        appended = cache.append(k, v, contiguous(2, 2))[2]
        assert torch.equal(appended.positions, every.positions)
        allowed = causal(new, every).allowed(2, every.length, device="cpu")
        assert allowed.sum(-1).unique(dim=0).flatten().tolist() == [3, 4]


def test_a_slope_may_need_a_gradient_on_every_backend() -> None:
    q, k, v = qkv(4, 4)
    grads = []
    for backend in BACKENDS:
        slope = torch.full((HEADS,), 0.5, requires_grad=True)
        attention(q, k, v, mask=CAUSAL, bias=SlopeBias(slope, -slope), backend=backend).square().sum().backward()
        grads.append(slope.grad)
    assert bool((grads[0] != 0).all())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grads[0], grads[2], rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------------- torch's fused kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_above_zero(scale: float, dtype: torch.dtype) -> None:
    """torch's causal kernel for the CPU hides before it scales, and minus infinity would change its sign."""
    q, k, v = (torch.randn(1, 2, 9, 8).to(dtype) for _ in range(3))
    for mask in (CAUSAL, FULL):
        exact = attention(*(x.double() for x in (q, k, v)), mask=mask, scale=scale, backend="reference")
        out = attention(q, k, v, mask=mask, scale=scale, backend="sdpa")
        assert float((out - exact).abs().max()) <= 4 * torch.finfo(dtype).eps * float(v.abs().max())


@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
def test_rows_whose_first_keys_are_all_hidden(backend: str) -> None:
    """Fused kernels walk over keys in blocks; the first blocks of these rows hold nothing."""
    q, k, v = (torch.randn(1, 2, 1300, 8, requires_grad=True) for _ in range(3))
    results = []
    for name in (backend, "reference"):
        out = attention(q, k, v, mask=CAUSAL & window(3), bias=ALiBi(2)(), backend=name)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for one, other in zip(*results, strict=True):  # three keys a row: a few dozen roundings of 2⁻²⁴
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_that_need_a_gradient_keep_their_dtype(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8).to(dtype).requires_grad_() for _ in range(3))
    for bias in (None, ALiBi(2)()):
        out = attention(q, k, v, mask=CAUSAL, bias=bias)
        assert out.dtype == dtype
        assert all(grad.dtype == dtype for grad in torch.autograd.grad(out.sum(), (q, k, v)))
