"""A copy of a model with one way to call it, whatever library it is from."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LARGEST = 200_000_000
"""A copy of a model with more numbers than this is not made."""


RAISES = "the model raises"
"""How the reason begins when a forward raises."""


class Undrivable(Exception):
    """Why a model cannot be called, or a check cannot be made with it."""


class Call(NamedTuple):
    """What a model is asked.

    Shape:
        ids: ``[batch, seq]``; mask: ``[batch, start + seq]``, 1 for real tokens; positions, segments: ``[batch, seq]``.

    Args:
        cache: of ``start`` earlier tokens.
        keep: whether to answer with a cache.
    """

    ids: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None
    segments: Tensor | None = None
    cache: Any = None
    start: int = 0
    keep: bool = False


class Answer(NamedTuple):
    """What a model answers.

    Shape:
        scores: ``[batch, seq, width]``: logits or hidden states.
    """

    scores: Tensor
    cache: Any = None


class Runner(ABC):
    """A copy of a model, in evaluation mode and at least float32, with one way to call it.

    Attributes:
        takes: which of ``mask``, ``positions``, ``segments``, ``cache`` it can be called with.
        vocabulary: ids are below it.
        reserved: ids that mean something of their own: padding, images.
        pad: the id of padding.
        promises_causal: whether its kind says that no token sees a later one; ``None`` when nothing does.
        causal: whether none does, once that is known; masks of documents need it.
    """

    takes: frozenset[str]
    vocabulary: int
    reserved: frozenset[int]
    pad: int
    promises_causal: bool | None
    causal = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._width: int | None = None

    def __call__(
        self,
        ids: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Any = None,
        start: int = 0,
        keep: bool = False,
    ) -> Answer:
        """The model's answer; see `Call`.

        Raises:
            Undrivable: the model raises, or does not answer with one row per token.
        """
        with warnings.catch_warnings(), torch.no_grad():  # inference tensors could stay behind in caches shared with the model
            warnings.simplefilter("ignore")
            try:
                answer = self.call(Call(ids, mask, positions, segments, cache, start, keep))
            except Undrivable:
                raise
            except Exception as error:  # whatever a user's model raises
                raise Undrivable(f"{RAISES} {type(error).__name__}: {first_line(error)}") from error
        scores = answer.scores
        if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.ndim < 3 or scores.shape[:2] != ids.shape:
            shape = f"{tuple(scores.shape)} of {scores.dtype}" if isinstance(scores, Tensor) else type(scores).__name__
            raise Undrivable(
                f"the model answers {shape} for ids of shape {tuple(ids.shape)}, not one row of real numbers per token"
            )
        scores = scores.flatten(2)
        if self._width not in (None, scores.shape[-1]):
            raise Undrivable(f"the width of its answers changes with the input: {self._width} and {scores.shape[-1]}")
        self._width = scores.shape[-1]
        return Answer(scores, answer.cache)

    def doubled(self) -> Runner:
        """The same with a copy of the model in float64."""
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model).double()
        return twin

    @abstractmethod
    def call(self, asked: Call) -> Answer:
        """One forward."""


def twin_of(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode and at least float32."""
    tensors = (*model.parameters(), *model.buffers())
    if any(tensor.is_meta for tensor in tensors):
        raise Undrivable("its weights are on the meta device")
    if (numbers := sum(tensor.numel() for tensor in tensors)) > LARGEST:
        raise Undrivable(f"{numbers:,} numbers: copies are made of models up to {LARGEST:,}")
    try:
        twin = copy.deepcopy(model).eval()
    except Exception as error:  # a model may hold anything: locks, graphs, files
        raise Undrivable(f"the model cannot be copied ({type(error).__name__}: {first_line(error)})") from error
    twin.zero_grad(set_to_none=True)
    if any(tensor.is_floating_point() and tensor.element_size() < 4 for tensor in twin.parameters()):
        twin = twin.float()  # half precision would drown what is looked for
    return twin


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut where it would fill the page."""
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else "no message"
