"""An encoding under test, driven the same way wherever it acts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posenc.core.bias import materialize
from posenc.core.sites import ContentScoreEncoding, Encoding, InputEncoding, PositionTransform, QKEncoding, ScoreEncoding
from posenc.core.spec import Claim, ModelShape

Factory = Callable[[ModelShape], Encoding]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Subject:
    """How to make an encoding, what it should compute and what it claims.

    Args:
        make: an encoding for a model shape.
        oracle: what it should compute, in float64 on one sequence; see `posenc.testing.oracles`.
        angle_dtype: the precision in which it forms its angles, which decides what is owed at far positions.
        other: makes an encoding with other settings for the same shapes.
    """

    make: Factory
    oracle: Callable[..., Any]
    claims: frozenset[Claim]
    shape: ModelShape
    angle_dtype: torch.dtype = torch.float64
    other: Factory | None = None

    def fresh(self, make: Factory | None = None, shape: ModelShape | None = None) -> Encoding:
        """An encoding that was never used; the same parameters each time, in evaluation."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return (make or self.make)(shape or self.shape).eval()


def content_for(
    encoding: Encoding,
    shape: ModelShape,
    length: int,
    k_length: int | None = None,
    *,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Outputs:
    """What the encoding reads: ``(x,)``, ``(q, k)``, ``(q, k, x)`` or nothing; the same numbers for the same sizes."""
    draw = torch.Generator().manual_seed(length)

    def normal(*size: int) -> Tensor:
        return torch.randn(*batch, *size, generator=draw, dtype=torch.float64, device="cpu").to(dtype)

    if isinstance(encoding, InputEncoding):
        return (normal(length, shape.dim),)
    if isinstance(encoding, QKEncoding):
        k_length = length if k_length is None else k_length
        q, k = normal(shape.heads, length, shape.head_dim), normal(shape.kv_heads, k_length, shape.head_dim)
        return _by_sequence_axis(encoding, (q, k))
    if isinstance(encoding, ContentScoreEncoding):
        k_length = length if k_length is None else k_length
        q, k = normal(shape.heads, length, shape.head_dim), normal(shape.kv_heads, k_length, shape.head_dim)
        return q, k, normal(length, shape.dim)
    return ()


def run(
    encoding: Encoding,
    content: Outputs,
    positions: Tensor,
    k_positions: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Outputs:
    """The encoding's result. ``dtype`` is that of a bias; everything else keeps its content's."""
    if isinstance(encoding, PositionTransform):
        return (encoding(positions),)
    if isinstance(encoding, InputEncoding):
        (x,) = content
        return (encoding(x, on_a_line(encoding, positions)),)
    if isinstance(encoding, QKEncoding):
        q, k = content
        return encoding(q, k, on_a_line(encoding, positions), None if k_positions is None else on_a_line(encoding, k_positions))
    if isinstance(encoding, ScoreEncoding):
        keys = None if k_positions is None else on_a_line(encoding, k_positions)
        return (materialize(encoding(), on_a_line(encoding, positions), keys, dtype=dtype),)
    if isinstance(encoding, ContentScoreEncoding):
        q, k, x = content
        bias, _ = encoding(q, k, positions, k_positions, x=x)
        return (materialize(bias, positions, k_positions, dtype=dtype),)
    raise TypeError(
        f"conform: {type(encoding).__name__} acts on {encoding.acts_on}. Expected an encoding that acts on the positions, the "
        "input, queries and keys, or the score. Test others by hand."
    )


def truth(
    subject: Subject, encoding: Encoding, content: Outputs, positions: Tensor, k_positions: Tensor | None = None
) -> Outputs:
    """The oracle's result for one sequence, in the layout that the encoding uses."""
    wide = tuple(c.double() for c in content)
    keys = positions if k_positions is None else k_positions
    if isinstance(encoding, QKEncoding):
        q, k = subject.oracle(
            encoding, *_by_sequence_axis(encoding, wide), on_a_line(encoding, positions), on_a_line(encoding, keys)
        )
        return _by_sequence_axis(encoding, (q, k))
    if isinstance(encoding, ScoreEncoding):
        return (subject.oracle(encoding, on_a_line(encoding, positions), on_a_line(encoding, keys)),)
    if isinstance(encoding, ContentScoreEncoding):
        return (subject.oracle(encoding, *wide, positions, keys),)
    return (subject.oracle(encoding, *wide, on_a_line(encoding, positions)),)


def allowance(
    expected: Tensor,
    encoding: Encoding,
    content: Outputs,
    positions: Tensor,
    *,
    dtype: torch.dtype,
    angle_dtype: torch.dtype | None = None,
) -> Tensor:
    """How far a result may be from the truth, entry by entry.

    With u the unit roundoff: a result is made of a few operations on numbers no larger than itself and ``reach``, so
    ``4u · (|truth| + reach)``; an angle, at up to one radian per position, is off by at most ``4u · position``
    (frequency, power, quotient and product each round once).
    """
    reach = max([float(c.abs().max()) for c in content], default=0.0)
    if isinstance(encoding, InputEncoding):
        reach += 1.0
    elif isinstance(encoding, QKEncoding):
        reach *= 2.0
    rounding = torch.finfo(dtype).eps / 2
    phase = 0.0 if angle_dtype is None else 2 * torch.finfo(angle_dtype).eps * float(positions.abs().max())
    return 4 * rounding * (expected.abs() + reach) + phase * reach


def assert_within(actual: Tensor, expected: Tensor, allowed: Tensor | float, what: str) -> None:
    """Raise AssertionError, saying what differs and by how much, unless the results are as close as allowed."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not actual.numel():
        return
    actual, expected = actual.detach().double(), expected.detach().double()
    allowed = torch.as_tensor(allowed, dtype=torch.float64).expand_as(actual)
    error = (actual - expected).abs().nan_to_num(nan=torch.inf)
    excess = error - allowed
    if not bool((excess <= 0).all()):
        place = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{what}: off by {error[place]:.3g} at {place}: {actual[place]:.9g}, expected {expected[place]:.9g} "
            f"within {allowed[place]:.3g}"
        )


def assert_same(actual: Outputs, expected: Outputs, what: str) -> None:
    """Raise AssertionError unless all results are equal, number for number."""
    for one, other in zip(actual, expected, strict=True):
        assert_within(one, other, 0.0, what)


def on_a_line(encoding: Encoding, positions: Tensor) -> Tensor:
    """Plain positions for an encoding of several axes: tokens on a line on which neighbouring axes run against each other.

    For input encodings, some of which have rows for positions from 0 only, on stairs: ``p, p // 2, p // 3, …``.
    """
    if encoding.axes is None:
        return positions
    if isinstance(encoding, InputEncoding):
        places = [positions.div(axis + 1, rounding_mode="floor") for axis in range(encoding.axes)]
        return torch.stack(places, dim=-1).to(positions.dtype)
    return torch.stack([positions if axis % 2 == 0 else -positions for axis in range(encoding.axes)], dim=-1)


def _by_sequence_axis(encoding: QKEncoding, tensors: Outputs) -> Outputs:
    """Between ``[heads, seq, head_dim]`` and the encoding's own layout; the same in both directions."""
    return tensors if encoding.sequence_axis == -2 else tuple(t.transpose(-2, -3).contiguous() for t in tensors)
