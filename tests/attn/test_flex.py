"""flex_attention against the definition: every bias and mask called eagerly, some compiled; CUDA where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

from posenc import (
    CAUSAL,
    FULL,
    ALiBi,
    BackendRefused,
    DenseBias,
    FormulaBias,
    KeyBias,
    Mask,
    QueryTableBias,
    RoPE,
    ScoreBias,
    ShapeError,
    SlopeBias,
    SumBias,
    T5Bias,
    TableBias,
    attention,
    causal,
    explain,
    grid,
    materialize,
    padded,
    positional_attention,
    same_segment,
    score_mod,
    slice_heads,
    visible,
    window,
)
from posenc.attn.backends.flex import Flex
from posenc.attn.request import Request, make_request
from posenc.catalog import CATALOG, load_encoding
from posenc.core.bias import KeyTableBias
from posenc.core.sites import ContentScoreEncoding, ScoreEncoding
from posenc.core.spec import ModelShape

from .oracle import attention_oracle, budget, plain_attention
from .test_precision import far_biases
from .test_values import BATCH, DIM, HEADS, V_DIM, biases, draw, masks, positions_for

F64 = torch.float64
unfused = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the graph that torch captures even of an eager call: half a second for each kind of bias and mask."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def inputs(q: int, k: int, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return draw(BATCH, HEADS, q, DIM), draw(BATCH, kv_heads, k, DIM, seed=1), draw(BATCH, kv_heads, k, V_DIM, seed=2)


def check(
    q: int, k: int, kv_heads: int, mask_name: str, bias_name: str | None, dtypes: tuple[torch.dtype, ...],
    run: Callable[..., Tensor] = attention,
) -> None:  # fmt: skip
    """Twice the error of a plain implementation, and zeros where a query sees nothing."""
    mask = masks(q, k)[mask_name][0]
    allowed = mask.allowed(q, k, device="cpu").expand(BATCH, q, k)[:, None]
    given, bias, parameter, dense, at = inputs(q, k, kv_heads), None, torch.zeros(()), None, {}
    if bias_name is not None:
        bias, (q_at, k_at) = biases(q, k)[bias_name], positions_for(bias_name, q, k)
        parameter, at = draw(*bias.shape, seed=3), {"positions": q_at, "k_positions": k_at}
        dense = materialize(bias.value(parameter), q_at, k_at, dtype=F64)

    def call(function: Callable[..., Tensor], backend: str, dtype: torch.dtype) -> Tensor:
        value = None if bias is None else bias.value(parameter.to(torch.promote_types(dtype, torch.float32)))
        return function(*(tensor.to(dtype) for tensor in given), mask=mask, bias=value, backend=backend, **at)

    truth = call(attention, "reference", F64)
    for dtype in dtypes:
        got = call(run, "flex", dtype)
        assert got.dtype == dtype
        most = budget(plain_attention(*(tensor.to(dtype) for tensor in given), allowed=allowed, bias=dense), truth)
        error = float((got - truth).abs().max())
        assert error <= most, f"{mask_name}, {bias_name}, {dtype}: {error} above {most}"
        assert not got[~allowed.any(-1).expand(BATCH, HEADS, q)].any()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("bias", [None, *biases(5, 7)])
def test_every_mask_and_bias_follows_the_definition(bias: str | None) -> None:
    for mask in masks(5, 7):
        check(5, 7, 2, mask, bias, (torch.float32, torch.bfloat16))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_every_grouping_follows_the_definition(kv_heads: int) -> None:
    for bias in biases(5, 7):
        check(5, 7, kv_heads, "causal & segments", bias, (torch.float32,))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("q", "k"), [(1, 7), (7, 7), (7, 4), (1, 1)])
def test_every_length_follows_the_definition(q: int, k: int) -> None:
    for mask in masks(q, k):
        for bias in (None, "slope"):
            check(q, k, 2, mask, bias, (torch.float32,))


@unfused
def test_the_graph_of_an_eager_call_follows_the_definition() -> None:
    check(5, 7, 2, "causal & segments", "sum", (torch.float64,))
    check(5, 7, 2, "visible by row", "query table", (torch.float32,))


def everything(q: int, k: int) -> dict[str, ScoreBias]:
    """Each value in its hardest form: per row of a batch, strided, several heads or one."""
    slopes, table = draw(HEADS, 2), draw(6, HEADS, seed=1).T
    return {
        "key table": KeyTableBias(draw(BATCH, HEADS, k, 5, seed=8), 1),
        "slope": SlopeBias(slopes[:, 0].abs(), slopes[:, 1]),
        "formula": FormulaBias(log_kernel, (slopes[:, 1].abs(),), torch.arange(HEADS)),
        "table": TableBias(table, (2,)),
        "key": KeyBias(draw(BATCH, HEADS, k, seed=2)),
        "query table": QueryTableBias(draw(BATCH, 1, q, 5, seed=3).expand(-1, HEADS, -1, -1), 1),
        "query table of one head": QueryTableBias(draw(1, 1, q, 5, seed=4), 1),
        "dense": DenseBias(draw(BATCH, HEADS, q, k, seed=5)),
        "dense of one row": DenseBias(draw(1, 1, k, seed=6)),
        "sum": SumBias((TableBias(table, (2,)), KeyBias(draw(1, k, seed=7)), SlopeBias(slopes[:, 0], -slopes[:, 0]))),
    }


def log_kernel(q: Tensor, k: Tensor, head: Tensor, rate: Tensor) -> Tensor:
    return -rate[head] * ((q - k).abs() + 1).log()


def with_biases_written_out(q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias, q_at: Tensor, k_at: Tensor) -> Tensor:
    return ((q @ k.mT) * q.shape[-1] ** -0.5 + materialize(bias, q_at, k_at, dtype=F64)).softmax(-1) @ v


PLACES = {
    "shared": (torch.tensor([3, 4, 5, 6]), torch.tensor([0, 9, 2, 5, 1])),
    "per row": (torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]]), torch.tensor([[2, 7, 1, 8, 2], [8, 1, 8, 2, 8]])),
}


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
def test_score_mod_is_the_written_out_bias(at: tuple[Tensor, Tensor]) -> None:
    q, k, v = draw(BATCH, HEADS, 4, DIM), draw(BATCH, HEADS, 5, DIM, seed=1), draw(BATCH, HEADS, 5, V_DIM, seed=2)
    for name, bias in everything(4, 5).items():
        got = torch_flex.flex_attention(q, k, v, score_mod=score_mod(bias, *at))
        assert isinstance(got, Tensor)
        # at most five products of eight and a bias below 64 behind an exponential: some hundred roundings
        torch.testing.assert_close(got, with_biases_written_out(q, k, v, bias, *at), rtol=0, atol=2**-53 * 1e4, msg=name)


@unfused
def test_score_mod_in_a_captured_graph_is_the_written_out_bias() -> None:
    at, every = PLACES["per row"], everything(4, 5)
    bias = SumBias(tuple(value for name, value in every.items() if name != "sum"))
    q, k, v = draw(BATCH, HEADS, 4, DIM), draw(BATCH, HEADS, 5, DIM, seed=1), draw(BATCH, HEADS, 5, V_DIM, seed=2)
    got = torch_flex.flex_attention(q, k, v, score_mod=score_mod(bias, *at))
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, with_biases_written_out(q, k, v, bias, *at), rtol=0, atol=2**-53 * 1e4)


@pytest.mark.usefixtures("plain")
def test_tables_of_two_axes() -> None:
    at, bias = grid(2, 3).positions, TableBias(draw(HEADS, 3, 5), (1, 2))
    q, k, v = inputs(6, 6)
    mine, theirs = (attention(q, k, v, bias=bias, positions=at, backend=name) for name in ("flex", "reference"))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2**-53 * 1e4)


@pytest.mark.usefixtures("plain")
def test_a_slice_of_heads_keeps_its_global_numbers() -> None:
    q, k, v = inputs(5, 7, HEADS)
    at = {"positions": torch.arange(2, 7), "k_positions": torch.arange(7)}
    for name, bias in everything(5, 7).items():
        whole = attention(q, k, v, bias=bias, backend="flex", **at)
        for heads in (slice(0, 1), slice(1, 3), slice(3, 4)):
            part = bias if bias.heads == 1 else slice_heads(bias, heads)
            some = attention(q[:, heads], k[:, heads], v[:, heads], bias=part, backend="flex", **at)
            torch.testing.assert_close(some, whole[:, heads], rtol=0, atol=2**-53 * 1e4, msg=name)


@unfused
@pytest.mark.parametrize("name", list(far_biases()))
def test_half_precision_does_not_round_biases(name: str) -> None:
    """flex_attention traces score_mod with a score of the queries' dtype, in which neighbours near 1000 are alike."""
    q, k = torch.zeros(1, 1, 6, DIM).bfloat16(), torch.zeros(1, 1, 4, DIM).bfloat16()
    v = torch.tensor([0.0, 1.0, 2.0, 4.0]).reshape(1, 1, 4, 1).bfloat16()
    at = {"positions": torch.arange(1000, 1006), "k_positions": torch.arange(4)}
    dense = materialize(far_biases()[name], *at.values(), dtype=F64)[None]
    exact = attention_oracle(q, k, v, sees=lambda b, i, j: True, bias=dense)
    out = attention(q, k, v, bias=far_biases()[name], backend="flex", **at)
    assert float((out - exact).abs().max()) <= 4 * torch.finfo(torch.bfloat16).eps * float(exact.abs().max())


def blocks(mask: Mask, length: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The blocks of 128 × 128 that a call hands to torch's kernel: how many in each row of blocks."""
    seen: list[Any] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, **_: Any) -> Tensor:
        seen.append(block_mask)
        return q

    monkeypatch.setattr(torch_flex, "flex_attention", spy)
    q = torch.zeros(1, 1, length, DIM)
    attention(q, q, q, mask=mask, backend="flex")
    if seen[0] is None:
        return None
    partial, full = seen[0].kv_num_blocks, seen[0].full_kv_num_blocks
    return (partial + full)[0, 0].tolist()


def test_blocks_that_nobody_sees_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = torch.arange(1024) // 300
    assert blocks(FULL, 1024, monkeypatch) is None
    assert blocks(CAUSAL, 1024, monkeypatch) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert blocks(CAUSAL & window(100), 1024, monkeypatch) == [1, 2, 2, 2, 2, 2, 2, 2]
    assert blocks(window(1, after=0), 1024, monkeypatch) == [1] * 8
    # documents begin at 0, 300, 600 and 900, in blocks 0, 2, 4 and 7
    assert blocks(CAUSAL & same_segment(documents), 1024, monkeypatch) == [1, 2, 3, 2, 3, 2, 3, 4]


@pytest.mark.usefixtures("plain")
def test_nothing_seen_gives_zeros_and_nan_stays_in_its_row() -> None:
    q, k, v = inputs(5, 7)
    q[:, :, 2] = float("nan")
    nobody = visible(torch.full((5,), -1), torch.arange(7))
    assert not attention(q, k, v, mask=nobody, backend="flex").any()
    out = attention(q, k, v, mask=CAUSAL, bias=ALiBi(HEADS)(), backend="flex")
    assert out.isnan().any(-1)[0, 0].tolist() == [False, False, True, False, False]


def refusal(request: Request, **changes: Any) -> str | None:
    return Flex().refusal(replace(request, **changes))


def a_request(dtype: torch.dtype = torch.float32, **more: Any) -> Request:
    settings = dict.fromkeys(("bias", "positions", "k_positions", "scale")) | {"mask": CAUSAL, "dropout_p": 0.0}
    q, k, v = (tensor.to(dtype) for tensor in inputs(5, 7))
    return make_request(q, k, v, **settings | more)


def test_what_it_cannot_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    request, slope = a_request(), torch.ones(HEADS)
    assert refusal(request) is None
    assert refusal(request, dropout_p=0.1) == "it has no dropout"
    network = FormulaBias(log_kernel, (slope,), torch.arange(HEADS), pointwise=False)
    for bias in (network, SumBias((KeyBias(torch.zeros(1, 7)), SumBias((network, network))))):
        assert "not pointwise" in str(refusal(request, bias=bias))
    meta = {name: getattr(request, name).to("meta") for name in "qkv"}
    assert refusal(request, **meta) == "it is used on cpu and cuda, not on meta"
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(request.q, request.q)
        assert refusal(request, q=dual) == "it has no forward-mode derivative"
    said: list[str | None] = []
    torch.vmap(lambda q: said.append(refusal(request, q=q)) or q)(request.q[None])
    assert said == ["torch.func cannot transform it"]
    real = torch.zeros(5, requires_grad=True)
    assert refusal(request, positions=real) == "it gives positions no gradient"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert refusal(request) is None
    assert "the inputs are float64" in str(refusal(a_request(F64)))


def test_gradients_on_the_cpu_are_refused_by_name() -> None:
    learned = torch.ones(HEADS, requires_grad=True)
    request = a_request(bias=SlopeBias(learned))
    with pytest.raises(BackendRefused, match="flex: it has no backward on the CPU, and a gradient is needed"):
        attention(request.q, request.k, request.v, bias=request.bias, backend="flex")
    for name in "qkv":
        assert "no backward" in str(refusal(a_request(), **{name: getattr(request, name).clone().requires_grad_()}))


@pytest.mark.usefixtures("plain")
def test_without_gradients_learned_things_pass() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in inputs(5, 7))
    t5 = T5Bias(HEADS).double()
    with torch.no_grad():
        mine, theirs = (attention(q, k, v, mask=CAUSAL, bias=t5(), backend=name) for name in ("flex", "reference"))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2**-53 * 1e4)


def test_refusals_on_cuda_are_static() -> None:
    """Read from fake tensors, since no kernel runs for a verdict."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, HEADS, 5, 8, device="cuda", requires_grad=True) for _ in range(3))
        slopes = torch.empty(HEADS, device="cuda", requires_grad=True)
        request = Request(q, k, v, CAUSAL, SlopeBias(slopes), None, None, None, 1.0, 0.0)
        assert refusal(request) is None
        assert refusal(request, bias=SlopeBias(slopes, slopes)) == (
            "its backward reads a learned tensor once, and this bias holds one twice"
        )
        torch.use_deterministic_algorithms(True)
        try:
            assert refusal(request, bias=None) is None
            assert "no fixed order" in str(refusal(request))
            with torch.no_grad():
                assert refusal(request) is None
        finally:
            torch.use_deterministic_algorithms(False)


def test_narrow_heads_are_refused_on_cuda_when_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with FakeTensorMode():
        narrow, wide = (torch.empty(2, HEADS, 5, width, device="cuda") for width in (8, 16))
        for q, v in ((narrow, wide), (wide, narrow)):
            assert "16 channels or more" in str(Flex().refusal(Request(q, q, v, CAUSAL, None, None, None, None, 1.0, 0.0)))


@pytest.mark.usefixtures("plain")
def test_shapes_that_do_not_fit_are_refused_as_everywhere() -> None:
    q, k, v = inputs(5, 7)
    wrong: dict[str, tuple[Mask, ScoreBias | None]] = {
        "for 5 queries and 7 keys": (FULL, KeyBias(torch.zeros(HEADS, 6))),
        "the bias has the batch \\(3,\\)": (FULL, DenseBias(torch.zeros(3, HEADS, 5, 7))),
        "the mask has the batch \\(3,\\)": (same_segment(torch.zeros(3, 5).long(), torch.zeros(3, 7).long()), None),
        "same_segment: k_segments": (same_segment(torch.zeros(5).long()), None),
    }
    for message, (mask, bias) in wrong.items():
        for backend in ("reference", "flex"):
            with pytest.raises(ShapeError, match=message):
                attention(q, k, v, mask=mask, bias=bias, backend=backend)


@pytest.mark.usefixtures("plain")
def test_deterministic_mode_and_empty_inputs() -> None:
    q, k, v = inputs(5, 7)
    first = attention(q, k, v, mask=CAUSAL, bias=ALiBi(HEADS)(), backend="flex")
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(attention(q, k, v, mask=CAUSAL, bias=ALiBi(HEADS)(), backend="flex"), first)
    finally:
        torch.use_deterministic_algorithms(False)
    assert attention(q[:, :, :0], k, v, backend="flex").shape == (BATCH, HEADS, 0, V_DIM)
    assert not attention(q, k[:, :, :0], v[:, :, :0], backend="flex").any()


def test_auto_never_takes_it() -> None:
    q, k, v = inputs(5, 7)
    (verdict,) = (said for said in explain(attention, q, k, v) if said.backend == "flex")
    assert not verdict.chosen
    assert verdict.reason == "only by name: torch calls it a prototype, and it is slow where the call is not compiled"


SHAPE = ModelShape(dim=32, heads=HEADS, kv_heads=2, head_dim=DIM, layers=1, max_length=32)


REFUSED = ("fire", "sandwich")
"""Their formulas are no elementwise arithmetic: a small network, a sum over frequencies."""


def score_encodings() -> list[str]:
    return [name for name in CATALOG if issubclass(load_encoding(name), (ScoreEncoding, ContentScoreEncoding))]


def call_of(name: str, length: int = 9) -> Callable[[str], Tensor]:
    """Attention with the encoding that a small model would get, by the name of a backend."""
    torch.manual_seed(0)
    encodings = [each for each in load_encoding(name).spec.build(SHAPE) if each.acts_on.startswith("the score")]
    axes = next((each.axes for each in encodings if each.axes is not None), None)
    at = torch.arange(length) if axes is None else grid(3, 3).positions
    q, k, v, x = torch.randn(1, HEADS, length, DIM), *torch.randn(2, 1, 2, length, DIM), torch.randn(1, length, 32)
    return torch.no_grad()(
        lambda backend: positional_attention(q, k, v, encodings=encodings, positions=at, x=x, mask=CAUSAL, backend=backend)
    )


def agrees(call: Callable[[str], Tensor], exact: Tensor) -> None:
    # nine scores of eight products near 8 and a bias near 8: some hundred roundings of numbers near 16
    torch.testing.assert_close(call("flex"), exact, rtol=0, atol=256 * 2**-24 * 16)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("name", score_encodings())
def test_every_encoding_of_the_score(name: str) -> None:
    call = call_of(name)
    if name in REFUSED:
        with pytest.raises(BackendRefused, match="not pointwise"):
            call("flex")
    else:
        agrees(call, call("reference"))


@torch.no_grad()
def test_compiled() -> None:
    """One, with all that the CPU's compiler stumbles over: captures made in the graph, arithmetic after it, rows that see
    nothing, NaN, and narrow heads with eight keys in the last tile, whose scores it takes from behind the end."""
    q, k, v = (tensor.float() for tensor in inputs(8, 8))
    q[:, :, 4] = float("nan")
    behind = torch.full((BATCH, 2, 16, DIM), float("nan"))
    behind[:, :, :8] = k
    slopes, real = torch.tensor([0.5, 0.25, 0.125, 2.0]), torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])

    def call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, real: Tensor, backend: str) -> Tensor:
        tokens, bias = padded(real), SlopeBias(slopes * 2)
        return attention(q, k, v, mask=causal(tokens), bias=bias, positions=tokens.positions, backend=backend) * 2

    got = torch.compile(call, fullgraph=True)(q, behind[:, :, :8], v, slopes, real, "flex")
    torch.testing.assert_close(got, call(q, k, v, slopes, real, "reference"), rtol=0, atol=16 * 2**-24 * 16, equal_nan=True)
    assert not got[0, :, 0].any()
    assert bool(got[:, :, 4].isnan().all())


def compiled(*args: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        out = torch.compile(attention, fullgraph=True, dynamic=False)(*args, **kwargs)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("bias", [None, *biases(5, 7)])
def test_every_bias_compiled_follows_the_definition(bias: str | None) -> None:
    check(5, 7, 2, "causal & segments", bias, (torch.float32, torch.bfloat16), compiled)


@pytest.mark.slow
@pytest.mark.parametrize("mask", list(masks(5, 7)))
def test_every_mask_compiled_follows_the_definition(mask: str) -> None:
    check(5, 7, 4, mask, "slope", (torch.float32,), compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in score_encodings() if name not in REFUSED])
def test_every_encoding_of_the_score_compiled(name: str) -> None:
    call = call_of(name)
    agrees(torch.compile(call, fullgraph=True), call("reference"))


@pytest.mark.slow
@torch.no_grad()
def test_a_skipped_block_is_not_even_read() -> None:
    """NaN in values of a block that the rows of another block cannot see: weight 0 times NaN would be NaN."""
    q, k, v = torch.randn(3, 1, 2, 512, 16).unbind()
    v[:, :, 300] = float("nan")
    out = compiled(q, k, v, mask=CAUSAL & window(64), backend="flex")
    assert not out[:, :, :256].isnan().any()
    assert bool(out[:, :, 300:364].isnan().all())


@pytest.mark.slow
@torch.no_grad()
def test_one_compiled_query_over_many_keys() -> None:
    """torch's kernel for decoding, which divides by zero in a row that sees nothing."""
    q, k, v = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 4096, 16), torch.randn(2, 2, 4096, 16)
    mask = same_segment(torch.tensor([[0], [-1]]), torch.zeros(2, 4096, dtype=torch.int64))
    call = {"mask": mask, "bias": ALiBi(2)()}
    mine, theirs = compiled(q, k, v, **call, backend="flex"), attention(q, k, v, **call, backend="reference")
    # 4096 scores near 8 in float32, summed in blocks: some hundred roundings
    torch.testing.assert_close(mine, theirs, rtol=0, atol=256 * 2**-24 * 8)
    assert not mine[1].any()


@pytest.mark.slow
@torch.no_grad()
def test_compiled_nan_is_not_silent() -> None:
    """torch's kernel takes scores of NaN for hidden ones where the keys do not fill a vector, and gives zeros."""
    q, k, v = (tensor.float() for tensor in inputs(5, 5))
    run = torch.compile(attention, fullgraph=True)
    for broken in (float("nan"), float("inf")):
        one, key = q.clone(), k.clone()
        one[:, :, 2], key[:, :, 2] = broken, broken
        out = run(one, k, v, mask=CAUSAL, backend="flex")
        assert out.isnan().any(-1)[0, 0].tolist() == [False, False, True, False, False]
        assert bool(run(q, key, v, mask=CAUSAL, backend="flex")[:, :, 2:].isnan().any(-1).all())


@pytest.mark.slow
@torch.no_grad()
def test_compiled_lengths_are_dynamic() -> None:
    encodings = [RoPE(16), ALiBi(HEADS), T5Bias(HEADS)]

    def call(q: Tensor, k: Tensor, v: Tensor, real: Tensor, backend: str) -> Tensor:
        tokens = padded(real)
        return positional_attention(q, k, v, encodings=encodings, positions=tokens, mask=causal(tokens), backend=backend)

    fast = torch.compile(call, fullgraph=True)
    for length in (40, 50, 300):
        q, (k, v) = torch.randn(2, HEADS, length, 16), torch.randn(2, 2, 2, length, 16).unbind()
        real = torch.ones(2, length, dtype=torch.int64)
        real[0, :7] = 0
        # 300 scores near 16 in float32
        torch.testing.assert_close(
            fast(q, k, v, real, "flex"), call(q, k, v, real, "reference"), rtol=0, atol=256 * 2**-24 * 16
        )


def gradients(call: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = call(*leaves)
    out.float().square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.cuda
@pytest.mark.parametrize("mask", list(masks(5, 7)))
@pytest.mark.parametrize("bias", [None, *biases(5, 7)])
def test_cuda_forward_and_backward(bias: str | None, mask: str) -> None:
    q, k, v = draw(BATCH, HEADS, 5, 16), draw(BATCH, 2, 7, 16, seed=1), draw(BATCH, 2, 7, 32, seed=2)
    parameter = [] if bias is None else [draw(*biases(5, 7)[bias].shape, seed=3)]
    rule = masks(5, 7)[mask][0]

    def call(backend: str, function: Callable[..., Tensor] = attention) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, *parameter: Tensor) -> Tensor:
            if bias is None:
                return function(q, k, v, mask=rule, backend=backend)
            q_at, k_at = (at.to(q.device) for at in positions_for(bias, 5, 7))
            value = biases(5, 7)[bias].value(*parameter)
            return function(q, k, v, mask=rule, bias=value, positions=q_at, k_positions=k_at, backend=backend)

        return run

    exact = gradients(call("reference"), [q, k, v, *parameter])
    narrow = [tensor.cuda().float() for tensor in (q, k, v, *parameter)]
    mine = gradients(call("flex", torch.compile(attention, fullgraph=True, dynamic=False)), narrow)
    dense = gradients(call("reference"), narrow)
    for ours, other, truth in zip(mine, dense, exact, strict=True):
        assert float((ours.double().cpu() - truth).abs().max()) <= budget(other.cpu(), truth)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "shaw", "deberta", "fox"])
def test_cuda_trains_every_kind_of_encoding(name: str) -> None:
    (encoding,) = (
        each.cuda()
        for each in load_encoding(name).spec.build(replace(SHAPE, head_dim=16))
        if each.acts_on.startswith("the score")
    )
    q, (k, v), x = torch.randn(1, HEADS, 300, 16), torch.randn(2, 1, 2, 300, 16).unbind(), torch.randn(1, 300, 32)
    inputs = [tensor.cuda() for tensor in (q, k, v)]

    def run(backend: str) -> list[Tensor]:
        call = torch.compile(positional_attention, fullgraph=True) if backend == "flex" else positional_attention
        encoding.zero_grad()
        found = gradients(
            lambda q, k, v: call(
                q, k, v, encodings=[encoding], positions=0, x=x.cuda(), mask=CAUSAL, backend=backend
            ),
            inputs,
        )  # fmt: skip
        return [*found, *(p.grad.clone() for p in encoding.parameters() if p.grad is not None)]

    for mine, theirs in zip(run("flex"), run("reference"), strict=True):
        # float32 sums over 300 keys, and over all pairs for the parameters; TF32 is off by default
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=300 * 2**-24 * float(theirs.abs().max()))
