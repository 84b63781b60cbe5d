"""Hypothesis strategies for positions, widths and encodings. Needs the package hypothesis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc.core.sites import Encoding
from posenc.core.spec import ModelShape
from posenc.encodings.alibi import ALiBi
from posenc.encodings.learned import Learned
from posenc.encodings.nope import NoPE
from posenc.encodings.rope import RoPE
from posenc.encodings.sinusoidal import Sinusoidal
from posenc.encodings.t5 import T5Bias
from posenc.errors import require
from posenc.schedules.geometric import Geometric

st: Any = require("hypothesis", "dev").strategies


def positions(length: int | None = None, *, least: int = 0, most: int = 100_000, real: bool = False) -> Any:
    """Position tensors ``[seq]`` in no order, repetitions included: int64, or float64 with ``real``."""
    one = st.floats(least, most, allow_subnormal=False) if real else st.integers(least, most)
    sizes = {"min_size": length or 0, "max_size": 12 if length is None else length}
    dtype = torch.float64 if real else torch.int64

    def as_tensor(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu")

    return st.lists(one, **sizes).map(as_tensor)


def widths(*, even: bool = True, most: int = 64) -> Any:
    """Channel counts: even ones for rotation, any from 1 otherwise."""
    return st.integers(1, most // 2).map(lambda n: 2 * n) if even else st.integers(1, most)


@st.composite  # type: ignore[untyped-decorator]
def encodings(draw: Any, shape: ModelShape) -> Encoding:
    """One of posenc's encodings for a model shape, with settings at random."""
    pick: str = draw(st.sampled_from(["nope", "sinusoidal", "learned", "rope", "alibi", "t5"]))
    made: Encoding = draw(_SETTINGS[pick](shape))
    return made


def _ropes(shape: ModelShape) -> Any:
    def make(pairs: int, first: int, pairing: Any, base: float) -> Encoding:
        start = first % (shape.head_dim - 2 * pairs + 1)
        return RoPE(shape.head_dim, Geometric(base), rotary_dim=2 * pairs, start=start, pairing=pairing)

    pairs = st.integers(1, shape.head_dim // 2)
    return st.builds(make, pairs, st.integers(0, shape.head_dim), st.sampled_from(["half", "interleaved"]), st.floats(2, 1e7))


def _sinusoids(shape: ModelShape) -> Any:
    layouts, rules = st.sampled_from(["interleaved", "concatenated"]), st.sampled_from(["paper", "tensor2tensor"])
    return st.builds(Sinusoidal, st.just(shape.dim), layout=layouts, frequency_rule=rules, base=st.floats(2, 1e7))


def _learned(shape: ModelShape) -> Any:
    offsets, policies = st.integers(0, 3), st.sampled_from(["raise", "clamp"])
    return st.builds(Learned, st.just(shape.max_length), st.just(shape.dim), past_end=policies, offset=offsets)


def _t5_biases(shape: ModelShape) -> Any:
    half, directions = st.integers(2, 20), st.sampled_from(["causal", "bidirectional"])
    return st.builds(lambda n, d: T5Bias(shape.heads, buckets=2 * n, max_distance=4 * n, direction=d), half, directions)


_SETTINGS: dict[str, Any] = {
    "nope": lambda shape: st.just(NoPE()),
    "sinusoidal": _sinusoids,
    "learned": _learned,
    "rope": _ropes,
    "alibi": lambda shape: st.builds(ALiBi, st.just(shape.heads), form=st.sampled_from(["causal", "symmetric"])),
    "t5": _t5_biases,
}
