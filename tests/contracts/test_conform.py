"""`conform` passes what is right, by third parties too, and catches each kind of mistake."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posenc import (
    DenseBias,
    EncodingSpec,
    Frequencies,
    InputEncoding,
    Learned,
    ModelShape,
    QKEncoding,
    ScoreBias,
    ScoreEncoding,
    Sinusoidal,
    SlopeBias,
    T5Bias,
    apply_rotary,
    rotary_table,
)
from posenc.core.bias import FormulaBias
from posenc.core.tokens import resolve_positions
from posenc.testing import CHECKS, CLAIMS, SHAPE, Subject, conform, oracles


class Wave(InputEncoding):
    """An encoding as a third party would write it: adds ``sin(rate · position)`` to every channel."""

    spec: EncodingSpec

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x, positions):
        at = resolve_positions(positions, x.shape[-2], name="Wave", device=x.device)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return (x + self.code(at, wide)[..., None]).to(x.dtype)

    def code(self, at: Tensor, dtype: torch.dtype) -> Tensor:
        return (at.double() * self.rate).sin().to(dtype)


Wave.spec = EncodingSpec(
    name="wave",
    summary="one sine for all channels",
    build=lambda shape: [Sinusoidal(shape.dim), Wave()],
    claims=frozenset({"parameter-free", "any-length", "real-positions"}),
)


def wave(encoding, x, positions):
    code = [math.sin(encoding.rate * p) for p in positions.tolist()]
    return x.double() + torch.tensor(code, dtype=torch.float64)[:, None]


def test_a_third_party_encoding_conforms_by_class_spec_or_function():
    conform(Wave, wave, other=lambda shape: Wave(0.2))
    conform(Wave.spec, wave, skip={"graph capture"})
    conform(lambda shape: Wave(), wave, skip={"graph capture"}, shape=ModelShape(8, 2, 2, 4, 1, 32))


class OffByOne(Wave):
    def code(self, at, dtype):
        return super().code(at + 1, dtype)


class Float32Phase(Wave):
    def code(self, at, dtype):
        return (at.float() * self.rate).sin().to(dtype)


class HalfPhase(Wave):
    def forward(self, x, positions):
        at = resolve_positions(positions, x.shape[-2], name="Wave", device=x.device)
        return super().forward(x, at.to(x.dtype).double() if x.dtype.itemsize == 2 else at)


class KeepsItsDtype(Wave):
    def forward(self, x, positions):
        return super().forward(x.to(torch.promote_types(x.dtype, torch.float32)), positions)


class InPlace(Wave):
    def forward(self, x, positions):
        return x.copy_(super().forward(x, positions))


class Unstrided(Wave):
    def forward(self, x, positions):
        plain = x.as_strided(x.shape, torch.empty(x.shape).stride())
        return super().forward(plain, positions)


class NoGradient(Wave):
    def forward(self, x, positions):
        return super().forward(x.detach() + 0 * x, positions)


class GraphBreak(Wave):
    def code(self, at, dtype):
        return super().code(at, dtype) * (1.0 if at.max().item() >= 0 else 0.0)


class SharedCache(Wave):
    tables: dict[int, Tensor] = {}  # noqa: RUF012

    def code(self, at, dtype):
        key = (at.shape, int(at.sum()), dtype)
        return self.tables.setdefault(key, super().code(at, dtype))


class CachedByLength(Wave):
    def __init__(self, rate=0.3):
        super().__init__(rate)
        self.tables = {}

    def code(self, at, dtype):
        return self.tables.setdefault(at.shape[-1], super().code(at, torch.float64)).to(dtype)


class GrowsAndStays(Wave):
    longest = 0

    def code(self, at, dtype):
        self.longest = max(self.longest, at.shape[-1])
        return super().code(at / (1 if self.longest <= 16 else 2), dtype)


class Buffer(Wave):
    def __init__(self, rate=0.3):
        super().__init__(rate)
        self.register_buffer("inv_freq", torch.tensor([rate], dtype=torch.float64), persistent=False)

    def code(self, at, dtype):
        return (at.double() * self.inv_freq.double()).sin().to(dtype)


class Autocast(Wave):
    def code(self, at, dtype):
        angle = at.to(dtype)[..., None] @ torch.tensor([[self.rate]], dtype=dtype)
        return angle[..., 0].sin()


class Unpicklable(Wave):
    def __init__(self, rate=0.3):
        super().__init__(rate)
        self.wave = lambda angle: angle.sin()


class AlongTheBatch(Wave):
    def forward(self, x, positions):
        if x.ndim == 2:
            return super().forward(x, positions)
        return super().forward(x.transpose(0, 1), torch.arange(x.shape[0])).transpose(0, 1)


class NeedsATokens(Wave):
    def code(self, at, dtype):
        return super().code(at - at.min() + at.min(), dtype)


WAVES = {
    OffByOne: "values",
    Float32Phase: "far positions",
    HalfPhase: "dtypes",
    KeepsItsDtype: "dtypes",
    InPlace: "strides",
    Unstrided: "strides",
    NoGradient: "gradients",
    GraphBreak: "graph capture",
    SharedCache: "two instances",
    CachedByLength: "history",
    GrowsAndStays: "history",
    Buffer: "casts",
    Autocast: "casts",
    Unpicklable: "copies",
    AlongTheBatch: "batches",
    NeedsATokens: "no tokens",
}
SLOW = {"graph capture"}


def first_failure(make, oracle, **arguments):
    with pytest.raises(AssertionError) as caught:
        conform(make, oracle, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("wrong", WAVES, ids=lambda wrong: wrong.__name__)
def test_mistakes_are_caught_by_the_check_that_is_meant_for_them(wrong):
    check = WAVES[wrong]
    message = first_failure(
        lambda shape: wrong(),
        wave,
        claims=("parameter-free", "any-length"),
        angle_dtype=torch.float32 if wrong is Autocast else torch.float64,
        other=lambda shape: wrong(0.25),
        skip=SLOW - {check},
    )
    assert f"conform: {wrong.__name__}() fails {check!r}" in message


def test_a_table_that_only_a_constructor_fills_is_lost_on_meta():
    message = first_failure(lambda shape: Buffer(), wave, claims=(), skip={"casts", *SLOW})
    assert "fails 'meta init': meta-device init loses something: off by" in message


class EveryLength(Wave):
    def code(self, at, dtype):
        return super().code(at, dtype) + 0.0 * len([None for _ in range(at.shape[-1])])


def test_recompiling_for_each_length_is_caught():
    message = first_failure(lambda shape: EveryLength(), wave, claims=(), skip=set(CHECKS) - SLOW)
    assert "recompiled after the second length" in message


class WrongSense(QKEncoding):
    """Turns queries forward and keys backward: scores depend on the sum of positions."""

    spec = Wave.spec
    sense = -1

    def prepare(self, positions, k_positions=None, *, dtype=torch.float32):
        ladder = Frequencies(torch.logspace(0, -3, 4, dtype=torch.float64))
        keys = positions if k_positions is None else k_positions
        return rotary_table(positions, ladder, dtype=dtype), rotary_table(self.sense * keys, ladder, dtype=dtype)

    def transform(self, q, k, prepared):
        return tuple(apply_rotary(x, table, pairing="half") for x, table in zip((q, k), prepared, strict=True))


class Grows(WrongSense):
    sense = 1

    def transform(self, q, k, prepared):
        return tuple(1.01 * x for x in super().transform(q, k, prepared))


class Rising(ScoreEncoding):
    spec = Wave.spec

    def forward(self) -> ScoreBias:
        slopes = torch.full((6,), -0.5, dtype=torch.float64)
        return SlopeBias(slopes, slopes)


def absolute(q, k, head):
    return torch.zeros_like(head) * q * k + 0.1 * k


class Absolute(ScoreEncoding):
    spec = Wave.spec

    def forward(self) -> ScoreBias:
        return FormulaBias(absolute, (), torch.arange(6))


FALSE_CLAIMS = [
    (lambda shape: Sinusoidal(shape.dim), "shift-invariant", "scores change when all tokens move by 1"),
    (lambda shape: WrongSense(), "shift-invariant", "scores change when all tokens move by 1"),
    (lambda shape: Absolute(), "shift-invariant", "scores change"),
    (lambda shape: Grows(), "norm-preserving", "changes norms"),
    (lambda shape: Sinusoidal(shape.dim), "norm-preserving", "only an encoding of queries and keys can claim this"),
    (lambda shape: Grows(), "composes", "turning by m, then n"),
    (lambda shape: Grows(), "invertible", "minus the positions does not undo"),
    (lambda shape: Rising(), "monotone", "the bias rises by 0.5"),
    (lambda shape: Absolute(), "toeplitz", "changes along a diagonal"),
    (lambda shape: Sinusoidal(shape.dim), "toeplitz", "only an encoding of the score can claim this"),
    (lambda shape: T5Bias(shape.heads), "parameter-free", "relative_attention_bias.weight"),
    (lambda shape: Learned(shape.max_length, shape.dim), "any-length", "no rows elsewhere"),
    (lambda shape: T5Bias(shape.heads), "real-positions", "it looks distances up"),
]


@pytest.mark.parametrize(
    ("make", "claim", "reason"), FALSE_CLAIMS, ids=[f"{claim}-{n}" for n, (_, claim, _) in enumerate(FALSE_CLAIMS)]
)
def test_false_claims_are_caught(make, claim, reason):
    message = first_failure(make, oracles.nope, claims=(claim,), skip=CHECKS)
    assert f"fails {claim!r}: " in message
    assert reason in message


def test_every_claim_has_its_check_and_its_counterexample():
    assert {claim for _, claim, _ in FALSE_CLAIMS} == set(CLAIMS)
    assert set(WAVES.values()) == set(CHECKS) - {"meta init"}


def test_gradients_of_parameters_are_checked():
    class HalfTrained(Learned):  # type: ignore[misc]
        def forward(self, x, positions):
            return super().forward(x, positions) + (self.weight.detach() - self.weight)[0]

    subject = Subject(lambda shape: HalfTrained(16, shape.dim), oracles.learned, frozenset(), SHAPE)
    CHECKS["values"](subject)
    with pytest.raises(Exception, match="Jacobian mismatch"):
        CHECKS["gradients"](subject)


def test_more_checks_are_asked_and_unknown_names_refused():
    def never(subject):
        raise AssertionError("asked")

    assert "fails 'own rule': asked" in first_failure(Wave, wave, more={"own rule": never}, skip=CHECKS)
    with pytest.raises(ValueError, match=r"conform: skip = \['speed'\]. Expected names of checks: values"):
        conform(Wave, wave, skip={"speed"})


def test_a_dense_bias_of_other_tokens_is_caught():
    class Dense(ScoreEncoding):
        spec = Wave.spec

        def forward(self):
            return DenseBias(torch.zeros(6, 7, 7))

    message = first_failure(lambda shape: Dense(), lambda encoding, q, k: torch.zeros(6, len(q), len(k)), claims=())
    assert "fails 'values'" in message
