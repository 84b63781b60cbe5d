"""Copying: ``BOS x₁ … x_n SEP x₁ … x_n EOS``, trained up to n = 16 and tested to twice that."""

from __future__ import annotations

from abc import abstractmethod
from typing import final

import torch
from torch import Tensor

from posenc.compare.tasks.base import IGNORED, Batch, Probe, Task

SYMBOLS = 16
BOS, SEP, EOS, PAD = range(SYMBOLS, SYMBOLS + 4)


class Copy(Task):
    """What the two copying tasks share."""

    vocabulary = SYMBOLS + 4
    trained_size = 16
    trained_length = 2 * trained_size + 2
    score = "exact"

    @abstractmethod
    def words(self, count: int, generator: torch.Generator) -> Tensor:
        """``count`` words of the longest trained size, ``[count, trained_size]``."""

    @abstractmethod
    def test_words(self, size: int) -> Tensor:
        """The fixed test words of one size, ``[items, size]``."""

    def train_batch(self, size: int, generator: torch.Generator) -> Batch:
        sizes = torch.randint(1, self.trained_size + 1, (size,), generator=generator)
        return _sequences(self.words(size, generator), sizes)

    def validation(self) -> Batch:
        return self.train_batch(512, torch.Generator().manual_seed(7_001))

    def probes(self) -> list[Probe]:
        probes = []
        for size in range(1, 2 * self.trained_size + 1):
            words = self.test_words(size)
            batch = _sequences(words, torch.full((words.shape[0],), size))
            probes.append(Probe("exact match", size, size / self.trained_size, words.shape[0], batch))
        return probes


@final
class CopyConstant(Copy):
    """One token repeated n times: the copy is a count."""

    name = "copy-constant"
    summary = "repeat one token as often as it came (counting)"
    steps = 1500

    def words(self, count: int, generator: torch.Generator) -> Tensor:
        token = torch.randint(0, SYMBOLS, (count, 1), generator=generator)
        return token.expand(count, self.trained_size)

    def test_words(self, size: int) -> Tensor:
        return torch.arange(SYMBOLS)[:, None].expand(SYMBOLS, size)  # all there are


@final
class CopyRandom(Copy):
    """n random tokens: the copy must find each one."""

    name = "copy-random"
    summary = "repeat random tokens in order (addressing)"
    steps = 2000

    def words(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, SYMBOLS, (count, self.trained_size), generator=generator)

    def test_words(self, size: int) -> Tensor:
        return torch.randint(0, SYMBOLS, (256, size), generator=torch.Generator().manual_seed(9_000 + size))


def _sequences(words: Tensor, sizes: Tensor) -> Batch:
    """The sequences of words cut to their sizes, padded at the end; the copy and EOS are scored."""
    count, longest = words.shape[0], int(sizes.max())
    place = torch.arange(2 * longest + 3)[None, :]
    n = sizes[:, None]
    within = torch.where(place <= n, place - 1, place - n - 2).clamp(0, words.shape[1] - 1)
    tokens = words.gather(1, within.expand(count, -1))
    for mark, at in ((BOS, torch.zeros_like(n)), (SEP, n + 1), (EOS, 2 * n + 2)):
        tokens = torch.where(place == at, mark, tokens)
    tokens = torch.where(place > 2 * n + 2, PAD, tokens)
    scored = (place > n + 1) & (place <= 2 * n + 2)
    return Batch(tokens[:, :-1], torch.where(scored, tokens, IGNORED)[:, 1:])
