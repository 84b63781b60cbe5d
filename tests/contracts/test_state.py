"""Nothing fixed is stored, and no default of the process changes a number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from posenc import (
    CATALOG,
    Explicit,
    RoPE,
    Sinusoidal,
    SlopeBias,
    TableBias,
    causal,
    contiguous,
    decode,
    follow,
    grid,
    load_encoding,
    materialize,
    packed,
    padded,
    seconds,
    shard,
)
from posenc.core.sites import ScoreEncoding
from posenc.testing import SHAPE
from posenc.testing.subject import content_for, run

each_encoding = pytest.mark.parametrize("name", CATALOG)


def make(name):
    cls = load_encoding(name)
    return next(made for made in cls.spec.build(SHAPE) if isinstance(made, cls)).eval()


def tensors_of(module):
    return [value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]


@each_encoding
def test_fixed_encodings_store_nothing(name):
    # okoge-kaz/llm-recipes#6, huggingface/transformers#48892, lyuwenyu/RT-DETR#677
    encoding = make(name)
    assert not list(encoding.buffers())
    assert not tensors_of(encoding)
    if "parameter-free" in encoding.spec.claims:
        assert not encoding.state_dict()
    else:
        assert list(encoding.state_dict()) == [n for n, _ in encoding.named_parameters()]


@each_encoding
def test_calling_an_encoding_leaves_nothing_behind(name):
    # lucidrains/rotary-embedding-torch#38
    encoding = make(name).train()
    before = {key: value for key, value in vars(encoding).items() if not key.startswith("_")}
    run(encoding, content_for(encoding, SHAPE, 6), torch.arange(6))
    assert {key: value for key, value in vars(encoding).items() if not key.startswith("_")} == before
    assert not tensors_of(encoding)


@contextmanager
def foreign_defaults() -> Iterator[None]:
    """A process whose default dtype is bfloat16 and whose default device holds no data."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)


@each_encoding
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_defaults_of_the_process_do_not_matter(name, dtype):
    encoding = make(name)
    content, at = content_for(encoding, SHAPE, 6, dtype=dtype), torch.tensor([0, 1, 5, 40, 41, 63])
    expected = run(encoding, content, at, dtype=dtype)
    with foreign_defaults():
        results = run(encoding, content, at, dtype=dtype)
        if not isinstance(encoding, ScoreEncoding) and "parameter-free" in encoding.spec.claims:
            results += run(make(name), content, at)
            expected += expected
    for actual, right in zip(results, expected, strict=True):
        assert actual.dtype == right.dtype
        assert torch.equal(actual, right)


def builders():
    yield packed(CU_SEQLENS, 6)
    yield padded(MASK)
    yield decode(CU_SEQLENS)
    yield grid(2, 3, prefix=1, device="cpu")
    yield seconds(3, 160, 16_000, device="cpu")
    yield shard(contiguous(8, device="cpu"), 1, 2, layout="head_tail")
    yield follow(padded(MASK), decode(CU_SEQLENS[:1]))


CU_SEQLENS, MASK = torch.tensor([0, 2, 5]), torch.tensor([[0, 1, 1, 1]])


def values():
    """Everything that is made of tensors on the CPU, or for the CPU, outside of modules."""
    for tokens in builders():
        yield from (part for part in tokens if isinstance(part, torch.Tensor))
    yield causal(padded(MASK), window=2).allowed(4, 4, device="cpu")
    yield causal(contiguous(4, device="cpu")).allowed(4, 4, device="cpu")
    yield Explicit((1.0, 0.5)).frequencies(4, device="cpu").inv_freq
    yield Sinusoidal(8).table(MASK)
    yield from RoPE(8).prepare(MASK)[0]
    yield materialize(SlopeBias(SLOPES, SLOPES), MASK)
    yield materialize(TableBias(SLOPES[:, None], (0,)), MASK)


SLOPES = torch.tensor([0.5, 0.25])


def test_values_are_made_on_the_device_of_what_they_are_made_from():
    expected = list(values())
    with foreign_defaults():
        results = list(values())
    for actual, right in zip(results, expected, strict=True):
        assert actual.device.type == "cpu"
        assert actual.dtype == right.dtype
        assert torch.equal(actual, right)


def test_alibi_and_t5_keep_their_numbers_under_foreign_defaults():
    for name in ("alibi", "t5"):
        encoding = make(name)
        expected = encoding().tensors()
        with foreign_defaults():
            results = encoding().tensors()
        for actual, right in zip(results, expected, strict=True):
            assert torch.equal(actual, right)
            assert actual.dtype == right.dtype
