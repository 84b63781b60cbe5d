"""Recall LM: language modelling with planted key-value pairs that are asked again later."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from posenc.compare.tasks.base import IGNORED, Batch, Probe, Task

WORDS, KEYS, VALUES = 12, 16, 16
BOS = WORDS + KEYS + VALUES
SUFFIX = 32
PAIRS_PER_64 = 4
_SHARES = (0.55, 0.25, 0.15, 0.05)
"""How likely each of the four successors of two words is."""


@final
class RecallLM(Task):
    """An order-2 Markov stream in which ``key value`` comes twice: the second value can be recalled.

    Two questions that a single perplexity mixes: does the loss stay flat past the trained length (*suffix loss*: the
    stream's own tokens among the last 32, the same ones under every context length), and is far context used
    (*recall*: the planted value, by the lag since it was shown)?
    """

    name = "recall-lm"
    summary = "predict a Markov stream; recall a value shown earlier"
    vocabulary = WORDS + KEYS + VALUES + 1
    trained_size = 64
    trained_length = trained_size + 1
    steps = 1200
    score = "loss"

    def train_batch(self, size: int, generator: torch.Generator) -> Batch:
        stream, recalled = _plant(_stream(size, self.trained_size, generator), generator)
        ids = torch.cat([torch.full((size, 1), BOS), stream], dim=1)
        return Batch(ids[:, :-1], torch.where(_predictable(stream) | recalled, stream, IGNORED))

    def validation(self) -> Batch:
        return self.train_batch(256, torch.Generator().manual_seed(7_002))

    def probes(self) -> list[Probe]:
        lengths = (64, 96, 128, 256, 512)
        probes = [self._suffix_probe(length, max(lengths)) for length in lengths]
        return probes + [self._recall_probe(lag) for lag in (8, 16, 32, 48, 64, 96, 128, 192)]

    def _suffix_probe(self, length: int, longest: int) -> Probe:
        generator = torch.Generator().manual_seed(9_100)
        stream, _ = _plant(_stream(128, longest, generator), generator)
        scored = _predictable(stream)
        scored[:, :-SUFFIX] = False
        ids = torch.cat([torch.full((128, 1), BOS), stream[:, -length:]], dim=1)
        targets = torch.where(scored, stream, IGNORED)[:, -length:]
        return Probe("suffix loss", length, length / self.trained_size, 128, Batch(ids[:, :-1], targets))

    def _recall_probe(self, lag: int) -> Probe:
        generator = torch.Generator().manual_seed(9_200 + lag)
        count, length = 256, max(self.trained_size, lag + 8)
        asked = (length - 2 - lag, length - 2)
        key, value = _pairs(count, KEYS, generator)
        others = PAIRS_PER_64 * length // 64 - 1  # as many pairs as in training, so that only the key tells which value
        stream = _stream(count, length, generator)
        stream, _ = _put(stream, key[:, 1 : others + 1], value[:, 1 : others + 1], generator, taken=asked)
        for at in asked:
            stream[:, at], stream[:, at + 1] = key[:, 0], value[:, 0]
        ids = torch.cat([torch.full((count, 1), BOS), stream], dim=1)
        targets = torch.full_like(stream, IGNORED)
        targets[:, -1] = stream[:, -1]
        guess = (1 + others / VALUES) / (others + 1)  # the right pair, or another that happens to have its value
        return Probe("recall", lag, lag / self.trained_size, count, Batch(ids[:, :-1], targets), guess)


@cache
def _successors() -> Tensor:
    """The words that may follow two words, likeliest first: ``[words · words · successors]``, flat to be read fast."""
    weights = torch.rand(WORDS, WORDS, WORDS, generator=torch.Generator().manual_seed(4_242))
    return weights.topk(len(_SHARES), dim=-1).indices.flatten()


def _stream(count: int, length: int, generator: torch.Generator) -> Tensor:
    successors = _successors()
    words = list(torch.randint(0, WORDS, (length, count), generator=generator))
    edges = torch.tensor(list(accumulate(_SHARES[:-1])))
    picks = torch.bucketize(torch.rand(length, count, generator=generator), edges)
    for at in range(2, length):
        words[at] = successors[(words[at - 2] * WORDS + words[at - 1]) * len(_SHARES) + picks[at]]
    return torch.stack(words, dim=1)


def _pairs(count: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Distinct keys and free values per row, ``[count, pairs]`` token ids each."""
    key = torch.rand(count, KEYS, generator=generator).argsort(-1)[:, :pairs]
    value = torch.randint(0, VALUES, (count, pairs), generator=generator)
    return WORDS + key, WORDS + KEYS + value


def _plant(stream: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Plant new pairs, as densely at any length; true where a value can be recalled."""
    count, length = stream.shape
    return _put(stream, *_pairs(count, min(KEYS, PAIRS_PER_64 * length // 64), generator), generator)


def _put(
    stream: Tensor, key: Tensor, value: Tensor, generator: torch.Generator, taken: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Put each pair into two random two-token slots of its row, none of them taken."""
    count, length = stream.shape
    draw = torch.rand(count, length // 2, generator=generator)
    draw[:, [at // 2 for at in taken]] = -1.0  # sorted to the front, and left out
    free = draw.argsort(-1)[:, len(taken) :]
    slots = free[:, : 2 * key.shape[1]].unflatten(1, (-1, 2))
    first, second = (2 * slots).sort(-1).values.unbind(-1)
    for at in (first, second):
        stream = stream.scatter(1, at, key).scatter(1, at + 1, value)
    return stream, torch.zeros(stream.shape, dtype=torch.bool).scatter(1, second + 1, True)


def _predictable(stream: Tensor) -> Tensor:
    """Where a stream token follows two stream tokens, so that the Markov rule holds."""
    word = stream < WORDS
    before = torch.nn.functional.pad(word, (2, 0))
    return word & before[:, 1:-1] & before[:, :-2]
