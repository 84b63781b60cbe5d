"""One call that asks of an encoding all that posenc asks of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch

from posenc.core.sites import Encoding
from posenc.core.spec import Claim, EncodingSpec, ModelShape
from posenc.testing.checks import CHECKS, Check
from posenc.testing.claims import CLAIMS
from posenc.testing.subject import Factory, Subject

SHAPE = ModelShape(dim=24, heads=6, kv_heads=2, head_dim=8, layers=1, max_length=64)
"""The model that encodings are made for unless the caller names another: small, and no count a power of two by chance."""


def conform(
    encoding: type[Encoding] | EncodingSpec | Factory,
    oracle: Callable[..., Any],
    *,
    shape: ModelShape = SHAPE,
    claims: Iterable[Claim] | None = None,
    angle_dtype: torch.dtype = torch.float64,
    other: Factory | None = None,
    more: Mapping[str, Check] | None = None,
    skip: Iterable[str] = (),
) -> None:
    """Raise AssertionError at the first thing that an encoding gets wrong.

    The checks are those of `posenc.testing.CHECKS` and, for each claim of its spec, the one of `posenc.testing.CLAIMS`.
    Your own encoding is tested by the same means as posenc's.

    Args:
        encoding: a class with a ``spec``, a spec, or a function from a `ModelShape` to an encoding.
        oracle: what it should compute, in float64 on one sequence; see `posenc.testing.oracles`.
        shape: the model to make it for.
        claims: instead of the spec's own.
        angle_dtype: the precision in which it forms its angles; float32 is owed less at far positions.
        other: makes one with other settings for the same shapes, used in turn with it.
        more: further checks by name, functions of a `Subject`.
        skip: names of checks to leave out.

    Raises:
        AssertionError: names the encoding and the check, what differs and by how much.
        ValueError: a name in ``skip`` that is no check.

    Example:
        >>> from posenc.testing import conform, oracles
        >>> conform(ALiBi, oracles.alibi, skip={"graph capture"})
    """
    make = _factory(encoding)
    made = make(shape)
    claimed = frozenset(type(made).spec.claims if claims is None else claims)
    subject = Subject(make, oracle, claimed, shape, angle_dtype, other)
    checks = CHECKS | {claim: CLAIMS[claim] for claim in sorted(claimed)} | dict(more or {})
    unknown = set(skip) - checks.keys()
    if unknown:
        raise ValueError(
            f"conform: skip = {sorted(unknown)}. Expected names of checks: {', '.join(checks)}. Leave out what does not apply."
        )
    for name, check in checks.items():
        if name not in skip:
            _ask(f"{type(made).__name__}({made.extra_repr()}) fails {name!r}", check, subject)


def _ask(what: str, check: Check, subject: Subject) -> None:
    try:
        check(subject)
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        raise AssertionError(f"conform: {what}: {kind}{error}") from error


def _factory(encoding: type[Encoding] | EncodingSpec | Factory) -> Factory:
    spec = encoding if isinstance(encoding, EncodingSpec) else getattr(encoding, "spec", None)
    if not isinstance(spec, EncodingSpec):
        return cast(Factory, encoding)

    def build(shape: ModelShape) -> Encoding:
        own: Encoding = next(made for made in spec.build(shape) if type(made).spec is spec)
        return own

    return build
