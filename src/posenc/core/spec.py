"""What an encoding says of itself: its name, how to build it for a model, what it claims, where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Claim = Literal[
    "shift-invariant",  # scores depend on the distance between tokens alone
    "norm-preserving",  # transformed queries and keys keep their norms
    "composes",  # R(m) R(n) = R(m + n)
    "invertible",  # the inverse table undoes the transform
    "monotone",  # bias never rises with distance into the past
    "toeplitz",  # bias is constant along diagonals
    "parameter-free",  # nothing is learned
    "any-length",  # defined past the trained length
    "real-positions",  # takes positions that are not integers
]


@dataclass(frozen=True)
class Reference:
    """A paper: ``Reference("Su et al. 2021", "RoFormer: …", "2104.09864")``."""

    authors: str
    title: str
    arxiv: str


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model, from which `EncodingSpec.build` makes encodings.

    Args:
        max_length: the longest sequence in training, in tokens.
        causal: whether the model attends causally (a decoder).
    """

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    max_length: int
    causal: bool = True


@dataclass(frozen=True)
class EncodingSpec:
    """The one description of an encoding that the catalogue, the conformance tests and the comparison use.

    Args:
        name: the key in the catalogue.
        summary: one line for tables.
        build: makes the encoding, with what it usually needs beside it, for a model.
        claims: what the conformance tests then check.
        references: the papers.
    """

    name: str
    summary: str
    build: Callable[[ModelShape], list[Any]]
    claims: frozenset[Claim] = frozenset()
    references: tuple[Reference, ...] = ()
