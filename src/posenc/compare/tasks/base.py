"""What a task is, and the tasks by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["decoder", "encoder"]
IGNORED = -100
"""The target of a token that is not scored."""


class Batch(NamedTuple):
    """Token ids and what should follow each: ``[batch, seq]`` both; `IGNORED` targets are not scored."""

    ids: Tensor
    targets: Tensor


class Probe(NamedTuple):
    """A test at one size: what is scored at this length, the same for every encoding and seed.

    Args:
        measure: what the number means, such as "exact match".
        size: the length that the curve is drawn over.
        ratio: size over the trained size.
        items: how many sequences.
        guess: what picking among the answers that the context shows would score, where that is not near zero.
    """

    measure: str
    size: int
    ratio: float
    items: int
    batch: Batch
    guess: float | None = None


class Corpus(NamedTuple):
    """The text that a task is made from."""

    source: str
    bytes: int
    sha256: str


class Task(ABC):
    """A source of training batches and of probes.

    ``score``: "exact" counts sequences in which every scored token is right; "loss" is the mean loss of scored tokens in
    nats. Teacher forcing gives the same exact match as greedy decoding: the first error is the same event in both.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    vocabulary: ClassVar[int]
    trained_size: ClassVar[int]
    """The largest size seen in training."""
    trained_length: ClassVar[int]
    """The longest training sequence, in tokens."""
    steps: ClassVar[int]
    """Training steps of the standard preset."""
    score: ClassVar[str]
    kinds: ClassVar[tuple[Kind, ...]] = ("decoder",)
    """Which models can be asked: an encoder sees what a language model is to predict."""
    corpus: Corpus | None = None
    """``None`` for what is generated."""

    @abstractmethod
    def train_batch(self, size: int, generator: torch.Generator) -> Batch:
        """``size`` fresh training sequences."""

    @abstractmethod
    def validation(self) -> Batch:
        """A fixed in-range batch, for choosing learning rates: never looks past the trained length."""

    @abstractmethod
    def probes(self) -> list[Probe]:
        """The tests, in range first, by growing size."""
