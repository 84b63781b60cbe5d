"""The rows of the comparison: named ways to give a model its positions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from posenc.catalog import CATALOG, load_encoding
from posenc.core.sites import Encoding
from posenc.core.spec import EncodingSpec, ModelShape
from posenc.encodings.randomized import Randomized
from posenc.encodings.rope import RoPE
from posenc.encodings.sinusoidal import Sinusoidal

Build = Callable[[ModelShape], Sequence[Encoding]]


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


def _randomized_sinusoidal(shape: ModelShape) -> list[Encoding]:
    return [Randomized(8 * shape.max_length), Sinusoidal(shape.dim)]


_VARIANTS = {
    "rope-25": Row("rope-25", "RoPE, 25 %", _quarter_rope),
    "sinusoidal-randomized": Row("sinusoidal-randomized", "Sinusoidal, randomised", _randomized_sinusoidal),
}

DECLARED = ("nope", "sinusoidal", "sinusoidal-randomized", "learned", "rope", "rope-25", "alibi", "t5")
"""The rows that every preset compares unless told otherwise."""


def known_rows() -> list[str]:
    """The names that `find_row` takes besides ``module:NAME``."""
    return [*DECLARED, *(name for name in CATALOG if name not in DECLARED and name != "randomized")]


def find_row(key: str) -> Row:
    """The row of a name, or of ``module:NAME``: a class with a ``spec``, or a callable ``ModelShape -> list``.

    ``module:NAME`` imports and runs the user's code.

    Raises:
        ValueError: an unknown name, or something that builds no encodings.
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


def _custom_row(key: str) -> Row:
    module_name, _, name = key.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"compare: {key!r} cannot be imported ({error}). Expected module:NAME with the module on the import path. "
            "Run from the folder that holds it, or install it."
        ) from error
    spec = getattr(found, "spec", None)
    if isinstance(spec, EncodingSpec):
        return Row(key, name, spec.build)
    if not callable(found):
        raise ValueError(
            f"compare: {key!r} is a {type(found).__name__}. Expected a class with a spec, or a callable that takes a "
            "ModelShape and returns a list of encodings. See posenc.EncodingSpec."
        )
    return Row(key, name, cast(Build, found))
