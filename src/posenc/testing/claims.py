"""What is asked of an encoding that claims it, one small function for each claim of `posenc.core.spec.Claim`."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.core.rotary import Frequencies, inverse
from posenc.core.sites import PositionTransform, QKEncoding, RotaryEncoding, ScoreEncoding
from posenc.testing.checks import Check, against_oracle
from posenc.testing.subject import Outputs, Subject, assert_same, assert_within, content_for, on_a_line, run

F64 = torch.float64
SHIFTS = (1, 1_000, 1_000_000)


def shift_invariant(subject: Subject) -> None:
    """Moving all tokens by the same distance leaves every score as it was."""
    encoding, at = subject.fresh(), torch.arange(7)
    content = content_for(encoding, subject.shape, 7, dtype=F64)
    expected = _scores(run(encoding, content, at, dtype=F64))
    for shift in SHIFTS:
        actual = _scores(run(encoding, content, at + shift, dtype=F64))
        # q and k turn by angles that are off by 4u · position each; 32 for the rounding of the sum itself
        reach = sum(float(c.square().sum()) for c in content) or float(expected.detach().abs().max())
        allowed = 4 * torch.finfo(subject.angle_dtype).eps * (shift + 32) * reach
        assert_within(actual, expected, allowed, f"scores change when all tokens move by {shift}")


def _scores(outputs: Outputs) -> Tensor:
    """Every product of two tokens; a bias or positions stand for themselves (positions by their distance)."""
    if len(outputs) == 2:
        q, k = (t.flatten(0, -2) for t in outputs)
        return q @ k.T
    (result,) = outputs
    if result.ndim == 1:
        return (result[:, None] - result).double()
    return result @ result.T if result.ndim == 2 else result


def norm_preserving(subject: Subject) -> None:
    """Queries and keys keep their norms, token by token."""
    for encoding, content, outputs in [_turned(subject, torch.tensor([0, 1, 77, 10_000, 10_000_000]))]:
        for given, turned in zip(content, outputs, strict=True):
            norm = given.norm(dim=-1)
            allowed = norm * 4 * given.shape[-1] * torch.finfo(subject.angle_dtype).eps
            assert_within(turned.norm(dim=-1), norm, allowed, f"{type(encoding).__name__} changes norms")


def composes(subject: Subject) -> None:
    """Turning by m, then by n, is turning by m + n."""
    m = torch.tensor([0, 3, 50, 100_000])
    n = torch.tensor([7, 0, -20, 1])
    encoding, content, once = _turned(subject, m)
    twice, whole = run(encoding, once, n), run(encoding, content, m + n)
    _all_within(subject, content, twice, whole, m, "turning by m, then n, is not turning by m + n")


def invertible(subject: Subject) -> None:
    """The inverse table, or minus the positions, brings queries and keys back; an amplitude is undone too."""
    at = torch.tensor([0, 3, 50, 100_000])
    encoding, content, turned = _turned(subject, at)
    _all_within(subject, content, run(encoding, turned, -at), content, at, "minus the positions does not undo the transform")
    if not isinstance(encoding, RotaryEncoding):
        return
    pairs = encoding.prepare(on_a_line(encoding, at))[0].cos.shape[-1]
    inv_freq = torch.logspace(0, -4, pairs, dtype=F64, device="cpu")
    for amplitude in (1.0, 1.37):
        table, _ = encoding.prepare(on_a_line(encoding, at), frequencies=Frequencies(inv_freq, amplitude), dtype=F64)
        there = encoding.transform(content[0], content[1], (table, table))
        back = encoding.transform(*there, (inverse(table), inverse(table)))
        _all_within(subject, content, back, content, at, f"the inverse table does not undo amplitude {amplitude}")


def _turned(subject: Subject, at: Tensor) -> tuple[QKEncoding, Outputs, Outputs]:
    encoding = subject.fresh()
    if not isinstance(encoding, QKEncoding):
        raise AssertionError(f"only an encoding of queries and keys can claim this, not one that acts on {encoding.acts_on}")
    content = content_for(encoding, subject.shape, len(at), dtype=F64)
    return encoding, content, run(encoding, content, at)


def _all_within(subject: Subject, content: Outputs, actual: Outputs, expected: Outputs, at: Tensor, what: str) -> None:
    # three angles, each off by 4u · position, turn pairs of numbers
    reach = max(float(c.abs().max()) for c in content)
    allowed = 16 * torch.finfo(subject.angle_dtype).eps * (float(at.abs().max()) + 1) * reach
    for one, other in zip(actual, expected, strict=True):
        assert_within(one, other, allowed, what)


def monotone(subject: Subject) -> None:
    """The bias never rises with distance into the past."""
    n = 300
    bias = _bias(subject, torch.tensor([n]), torch.arange(n + 1))[:, 0]
    rise = (bias[:, :-1] - bias[:, 1:]).max()
    assert rise <= 0, f"the bias rises by {float(rise):.3g} with distance into the past"


def toeplitz(subject: Subject) -> None:
    """The bias is constant along diagonals."""
    bias = _bias(subject, torch.arange(150))
    # none for an entry that is computed from its distance; a product of codes rounds each entry in its own way
    allowed = 256 * torch.finfo(F64).eps * float(bias.detach().abs().max())
    assert_within(bias[:, 1:, 1:], bias[:, :-1, :-1], allowed, "the bias changes along a diagonal")


def _bias(subject: Subject, at: Tensor, keys: Tensor | None = None) -> Tensor:
    encoding = subject.fresh()
    if not isinstance(encoding, ScoreEncoding):
        raise AssertionError(f"only an encoding of the score can claim this, not one that acts on {encoding.acts_on}")
    return run(encoding, (), at, keys, dtype=F64)[0]


def parameter_free(subject: Subject) -> None:
    """Nothing is learned."""
    learned = [name for name, parameter in subject.fresh().named_parameters() if parameter.requires_grad]
    assert not learned, f"has learned parameters {learned}"


def any_length(subject: Subject) -> None:
    """Defined, and finite, well past the trained length."""
    encoding, length = subject.fresh(), 4 * subject.shape.max_length + 1
    for at in (torch.arange(length), torch.arange(6) + 1000 * length):
        for result in run(encoding, content_for(encoding, subject.shape, len(at)), at):
            assert bool(result.isfinite().all()), f"not finite at positions up to {int(at.max())}"


def real_positions(subject: Subject) -> None:
    """Positions between the integers follow the oracle, and whole numbers do not depend on their dtype."""
    encoding, at = subject.fresh(), torch.arange(7)
    content = content_for(encoding, subject.shape, 7)
    for dtype in (torch.float32, F64):
        assert_same(run(encoding, content, at.to(dtype)), run(encoding, content, at), f"whole positions in {dtype} differ")
    keys = None if isinstance(encoding, PositionTransform) else torch.tensor([0.5, 3.25, -7.5])
    against_oracle(subject, encoding, at + 0.375, keys)


CLAIMS: dict[str, Check] = {
    "shift-invariant": shift_invariant,
    "norm-preserving": norm_preserving,
    "composes": composes,
    "invertible": invertible,
    "monotone": monotone,
    "toeplitz": toeplitz,
    "parameter-free": parameter_free,
    "any-length": any_length,
    "real-positions": real_positions,
}
"""The check behind each claim."""
