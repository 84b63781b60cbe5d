"""Public reports about attention masks, graph capture and gradients: each asked of every backend, and of its kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

from posenc import (
    CAUSAL,
    ALiBi,
    Encoding,
    GrowingCache,
    RoPE,
    T5Bias,
    attention,
    causal,
    contiguous,
    packed,
    padded,
    positional_attention,
)
from posenc.attn.select import BACKENDS as EVERY

HEADS, DIM = 4, 16
GENERAL = tuple(backend.name for backend in EVERY if backend.name not in ("channels", "varlen"))
"""Without those that are made for one kind of mask or bias."""
general = pytest.mark.parametrize("backend", GENERAL)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def qkv(length: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, batch, HEADS, length, DIM, generator=torch.Generator().manual_seed(length), dtype=dtype).unbind()
    return q, k, v


def near(actual: Tensor, expected: Tensor) -> None:
    # sums of some dozen products and weights near 4 at most in float32: some hundred roundings
    torch.testing.assert_close(actual, expected, rtol=0, atol=128 * 2**-24 * 4)


@general
def test_a_cached_step_sees_every_key(backend: str) -> None:
    """pytorch/pytorch#103082: a causal rule that aligns the first query with the first key sees one value, 0."""
    q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 4, 8), torch.arange(4.0).reshape(1, 1, 4, 1)
    assert attention(q, k, v, mask=CAUSAL, backend=backend).item() == 1.5
    two = attention(q.expand(1, 1, 2, 8), k, v, mask=CAUSAL, backend=backend)
    near(two.flatten(), torch.tensor([1.0, 1.5]))  # the means of the first three and of all four


@general
@pytest.mark.parametrize("encodings", [[], [ALiBi(HEADS)], [RoPE(DIM), T5Bias(HEADS)]], ids=["none", "alibi", "rope, t5"])
@torch.no_grad()
def test_any_chunks_give_what_the_whole_gives(backend: str, encodings: list[Encoding]) -> None:
    """The same kind: a prompt in chunks, then single tokens, against all at once."""
    (q, k, v), cache = qkv(9), GrowingCache()
    rows = [
        positional_attention(
            q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop],
            encodings=encodings, positions=start, mask=CAUSAL, cache=cache, backend=backend,
        )
        for start, stop in ((0, 4), (4, 7), (7, 8), (8, 9))
    ]  # fmt: skip
    near(torch.cat(rows, 2), positional_attention(q, k, v, encodings=encodings, positions=0, mask=CAUSAL))


@pytest.mark.parametrize("backend", [*GENERAL, "varlen"])
@torch.no_grad()
def test_packed_documents_need_the_mask_as_well_as_the_positions(backend: str) -> None:
    """OpenRLHF/OpenRLHF#377: positions alone let the second document see the first."""
    (q, k, v), tokens = qkv(9), packed(torch.tensor([0, 5, 9]), 9)
    assert tokens.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    out = positional_attention(q, k, v, encodings=[RoPE(DIM)], positions=tokens, mask=causal(tokens), backend=backend)
    for part in (slice(0, 5), slice(5, 9)):
        alone = positional_attention(
            q[:, :, part], k[:, :, part], v[:, :, part], encodings=[RoPE(DIM)], positions=0, mask=CAUSAL, backend="reference"
        )
        near(out[:, :, part], alone)
    leaky = positional_attention(q, k, v, encodings=[RoPE(DIM)], positions=tokens, mask=CAUSAL, backend="reference")
    assert float((leaky - out)[:, :, 5:].abs().max()) > 0.1


@general
@torch.no_grad()
def test_left_padded_rows_are_what_they_are_alone(backend: str) -> None:
    """unslothai/unsloth#3699: one row of positions for a padded batch spoils the shorter rows."""
    q, k, v = qkv(5, batch=2)
    tokens, encodings = padded(torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])), [RoPE(DIM), ALiBi(HEADS)]
    out = positional_attention(q, k, v, encodings=encodings, positions=tokens, mask=causal(tokens), backend=backend)
    for row, real in enumerate((slice(2, 5), slice(0, 5))):
        some = slice(row, row + 1)
        alone = positional_attention(
            q[some, :, real], k[some, :, real], v[some, :, real], encodings=encodings, positions=0, mask=CAUSAL
        )
        near(out[some, :, real], alone)


@pytest.mark.parametrize("backend", ["auto", "reference", pytest.param("flex", marks=pytest.mark.slow)])
@torch.no_grad()
def test_one_graph_without_breaks_serves_all_lengths(backend: str) -> None:
    """lucidrains/rotary-embedding-torch#38: a break for each call, a recompilation for each length."""
    encodings = [RoPE(DIM), T5Bias(HEADS)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return positional_attention(q, k, v, encodings=encodings, positions=0, mask=CAUSAL, backend=backend)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for length in (8, 16, 32):
        near(compiled(*qkv(length)), call(*qkv(length)))
    assert int(counters["stats"]["unique_graphs"]) <= 2


class Attend(nn.Module):
    """Attention with a mask of the input, a rotation and two biases, one of them learned."""

    def __init__(self) -> None:
        super().__init__()
        self.encodings = nn.ModuleList([RoPE(DIM), ALiBi(HEADS), T5Bias(HEADS)])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = contiguous(q.shape[-2])
        return positional_attention(q, k, v, encodings=list(self.encodings), positions=tokens, mask=causal(tokens))


@torch.no_grad()
def test_an_exported_call_takes_other_lengths_and_holds_no_complex_numbers() -> None:
    """pytorch/pytorch#110347: the traced length became a constant. onnx/onnx#6480: complex numbers do not export."""
    model, length = Attend(), torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(model, qkv(4), dynamic_shapes=[{2: length}] * 3)
    for n in (9, 50):
        near(program.module()(*qkv(n)), model(*qkv(n)))
    values = [node.meta["val"] for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert values
    assert not any(value.is_complex() for value in values)


@pytest.mark.parametrize("backend", [name for name in GENERAL if name != "flex"])
def test_learned_biases_train_for_more_than_one_step(backend: str) -> None:
    """lucidrains/rotary-embedding-torch#18: a graph kept from the first step made the second backward fail."""
    t5, (q, k, v), sizes = T5Bias(HEADS), qkv(6), []
    optimizer = torch.optim.SGD(t5.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        attention(q, k, v, mask=CAUSAL, bias=t5(), backend=backend).square().sum().backward()
        gradient = t5.relative_attention_bias.weight.grad
        assert gradient is not None
        sizes.append(float(gradient.abs().sum()))
        optimizer.step()
    assert min(sizes) > 0
    assert len(set(sizes)) == 3
