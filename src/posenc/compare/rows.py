"""The rows of the comparison: named ways to give a model its positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import pi
from typing import Any, cast

from posenc.catalog import CATALOG, load_encoding
from posenc.core.sites import Encoding
from posenc.core.spec import EncodingSpec, ModelShape
from posenc.encodings.learned import Learned
from posenc.encodings.randomized import Randomized
from posenc.encodings.rope import RoPE
from posenc.encodings.sinusoidal import Sinusoidal
from posenc.schedules.geometric import Geometric
from posenc.schedules.proportional import Proportional
from posenc.user_code import UnknownName, import_name, in_one_line

Build = Callable[[ModelShape], Sequence[Encoding]]


class RowFailed(ValueError):
    """A row's own code failed: what it raised and when, in one message."""


@contextmanager
def blaming(key: str, when: str) -> Iterator[None]:
    """Whatever is raised inside becomes `RowFailed` with the row's name; ``when`` follows "while"."""
    try:
        yield
    except RowFailed:
        raise
    except (Exception, SystemExit) as error:
        raise RowFailed(
            f"compare: {key!r} raised {in_one_line(error)} while {when}. Expected an encoding that is imported, built for a ModelShape "
            "and trained without an error. Run posenc --traceback compare ... to see where."
        ) from error


@dataclass(frozen=True)
class Row:
    """One line of the result table.

    Args:
        key: its name on the command line and in results.
        label: its name in tables and pictures.
        build: makes the encodings for a model.
    """

    key: str
    label: str
    build: Build


def _quarter_rope(shape: ModelShape) -> list[Encoding]:
    return [RoPE(shape.head_dim, rotary_dim=max(2, shape.head_dim // 8 * 2))]


def _short_rope(shape: ModelShape) -> list[Encoding]:
    """The base at which the slowest pair of channels completes one turn within the trained length."""
    base = (shape.max_length / (2 * pi)) ** (shape.head_dim / (shape.head_dim - 2))
    return [RoPE(shape.head_dim, Geometric(base))]


def _partial_rope(shape: ModelShape) -> list[Encoding]:
    return [RoPE(shape.head_dim, Proportional(Geometric(), 0.75))]


def _randomized_rope(shape: ModelShape) -> list[Encoding]:
    return [Randomized(8 * shape.max_length), RoPE(shape.head_dim)]


def _randomized_sinusoidal(shape: ModelShape) -> list[Encoding]:
    return [Randomized(8 * shape.max_length), Sinusoidal(shape.dim)]


def _clamped_learned(shape: ModelShape) -> list[Encoding]:
    return [Learned(shape.max_length, shape.dim, past_end="clamp")]


_VARIANTS = {
    row.key: row
    for row in (
        Row("sinusoidal-randomized", "Sinusoidal, randomised", _randomized_sinusoidal),
        Row("learned-clamp", "Learned, clamped", _clamped_learned),
        Row("rope-25", "RoPE, 25 %", _quarter_rope),
        Row("rope-randomized", "RoPE, randomised", _randomized_rope),
        Row("rope-short-base", "RoPE, short base", _short_rope),
        Row("p-rope", "p-RoPE, 75 %", _partial_rope),
    )
}

_NOT_ALONE = {
    "randomized", "augmented",  # change positions for other encodings
    "temperature",  # scales the queries of other encodings
    "axial", "mixed", "mrope", "grid-sinusoidal", "learned-grid", "swin", "swin-v2",  # read positions of several axes; tokens of text have one
}  # fmt: skip
DECLARED = ("nope", "sinusoidal", "sinusoidal-randomized", "learned", "rope", "rope-25", "alibi", "t5")
"""The rows that every preset compares unless told otherwise."""


def known_rows() -> list[str]:
    """The names that `find_row` takes besides ``module:NAME``."""
    others = (name for name in [*_VARIANTS, *CATALOG] if name not in DECLARED and name not in _NOT_ALONE)
    return [*DECLARED, *others]


def find_row(key: str) -> Row:
    """The row of a name, or of ``module:NAME``: a class with a ``spec``, or a callable ``ModelShape -> list``.

    ``module:NAME`` imports and runs the user's code.

    Raises:
        ValueError: an unknown name, or something that cannot build encodings.
    """
    if ":" in key:
        return _custom_row(key)
    if key in _VARIANTS:
        return _VARIANTS[key]
    if key not in known_rows():
        raise ValueError(
            f"compare: there is no encoding {key!r}. Expected one of {', '.join(known_rows())}. "
            "Give your own as --encoding module:NAME."
        )
    encoding = load_encoding(key)
    return Row(key, encoding.__name__, encoding.spec.build)


def build_encodings(key: str, shape: ModelShape) -> list[Encoding]:
    """The encodings of a row for a model.

    Raises:
        ValueError: the row fails or builds something else; the message names it.
    """
    row = find_row(key)
    with blaming(key, "being built"):
        built = row.build(shape)
    wrong = [e for e in built if not isinstance(e, Encoding)] if isinstance(built, (list, tuple)) else [built]
    if wrong:
        inside = "" if wrong[0] is built else f"a {type(built).__name__} with "
        raise RowFailed(
            f"compare: {key!r} built {inside}{_described(wrong[0])}. Expected a list of posenc.Encoding instances, such as "
            "[ALiBi(8)]. Return that from the callable or the spec's build."
        )
    return list(built)


def _described(thing: object) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"an object of type {type(thing).__name__}"


def _custom_row(key: str) -> Row:
    try:
        with blaming(key, "being imported"):
            found: Any = import_name("compare", key, what="encoding", example="mine:Recency for Recency in mine.py")
    except RowFailed as error:
        if isinstance(error.__cause__, UnknownName):  # nothing of the user's failed
            raise error.__cause__ from None
        raise
    name = key.partition(":")[2]
    spec = getattr(found, "spec", None)
    if isinstance(spec, EncodingSpec):
        return Row(key, name, spec.build)
    if not callable(found):
        raise ValueError(
            f"compare: {key!r} is a {type(found).__name__}. Expected a class with a spec, or a callable that takes a "
            "ModelShape and returns a list of encodings. See posenc.EncodingSpec."
        )
    return Row(key, name, cast(Build, found))
