"""Graph capture: no breaks, one recompilation over lengths, none while decoding; exported models take other lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from posenc import (
    CAUSAL,
    ALiBi,
    Encoding,
    Learned,
    NoPE,
    Randomized,
    RoPE,
    Sinusoidal,
    T5Bias,
    Transformer,
    causal,
    decode,
    packed,
    padded,
    positional_attention,
)

ENCODINGS: dict[str, Callable[[], list[Encoding]]] = {
    "nope": lambda: [NoPE()],
    "randomized, sinusoidal": lambda: [Randomized(64), Sinusoidal(32)],
    "learned": lambda: [Learned(64, 32)],
    "rope": lambda: [RoPE(8)],
    "alibi": lambda: [ALiBi(4)],
    "t5": lambda: [T5Bias(4)],
}


def every() -> list[Encoding]:
    """Each at once: captures are slow and do not disturb each other."""
    return [encoding for build in ENCODINGS.values() for encoding in build()]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def ids(length: int) -> Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(length))


def transformer(encodings: list[Encoding], layers: int = 1) -> Transformer:
    torch.manual_seed(0)
    return Transformer(50, dim=32, layers=layers, heads=4, kv_heads=2, encodings=encodings).eval()


@pytest.mark.parametrize("name", list(ENCODINGS))
@torch.no_grad()
def test_one_recompilation_serves_all_lengths(name: str) -> None:
    model = transformer(ENCODINGS[name]())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (8, 16, 32, 33):
        torch.testing.assert_close(compiled(ids(length), 0), model(ids(length), 0), rtol=0, atol=1e-5)
    assert graphs() <= 2


def test_compiled_gradients_are_the_eager_ones() -> None:
    model = transformer(every())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def gradients(run: Callable[..., Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        run(ids(8), 0).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    ours, eager = gradients(compiled), gradients(model)
    assert ours.keys() == eager.keys()
    for name in eager:
        torch.testing.assert_close(ours[name], eager[name], rtol=1e-4, atol=1e-6)
        assert bool(eager[name].any())


def test_padding_and_packing_are_captured() -> None:
    rope, alibi = RoPE(8), ALiBi(4)
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)

    def pad(mask: Tensor) -> Tensor:
        tokens = padded(mask)
        return positional_attention(q, k, v, encodings=[rope, alibi], positions=tokens, mask=causal(tokens))

    def pack(edges: Tensor) -> Tensor:
        tokens = packed(edges, 6)
        return positional_attention(q, k, v, encodings=[rope, alibi], positions=tokens, mask=causal(tokens))

    mask, edges = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]), torch.tensor([0, 2, 6])
    for call, given in ((pad, mask), (pack, edges)):
        compiled = torch.compile(call, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(given), call(given))


@torch.no_grad()
def test_decoding_with_fixed_slots_never_recompiles() -> None:
    model = transformer(every())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    cache, prompt = model.new_cache(2, 16), ids(12)
    compiled(prompt[:, :5], 0, cache=cache)
    assert graphs() == 1
    steps = [compiled(prompt[:, at : at + 1], decode(torch.tensor([at, at])), cache=cache) for at in range(5, 12)]
    assert graphs() == 2  # one for the prompt, one for every token
    whole = model(prompt, 0)[:, 5:]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_inductor_agrees_with_eager() -> None:
    rope, alibi = RoPE(8), ALiBi(4)
    q, k, v = torch.randn(3, 1, 4, 6, 8, generator=torch.Generator().manual_seed(0)).unbind(0)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return positional_attention(q, k, v, encodings=[rope, alibi], positions=5000, mask=CAUSAL)

    torch.testing.assert_close(torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v), rtol=0, atol=2e-6)


class AtZero(nn.Module):
    """Whole sequences from position 0."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, 0)


@torch.no_grad()
def test_an_exported_model_takes_other_lengths() -> None:  # pytorch/pytorch#110347
    model = transformer(every())
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(AtZero(model), (ids(4),), dynamic_shapes={"ids": {1: length}}).module()
    for n in (4, 9, 50):
        torch.testing.assert_close(exported(ids(n)), model(ids(n), 0), rtol=0, atol=1e-5)
