"""Lookup: name an earlier token by its place, counted from here or from the start."""

from __future__ import annotations

from abc import abstractmethod
from typing import final

import torch
from torch import Tensor

from posenc.compare.tasks.base import IGNORED, Batch, Probe, Task

SYMBOLS = 16
BOS = SYMBOLS
BACK = 3
SHORTEST = 8
_SIZES = (8, 16, 24, 32, 36, 40, 48, 64, 96, 128, 192, 256)
_ITEMS = 256


class Lookup(Task):
    """``BOS x₁ … x_n`` of random tokens; one earlier token is asked for at every token that has it.

    The sequences of a batch have one length, from `SHORTEST` to the trained size, so that nothing is padded and an encoder
    can be asked the same. Tests score the last token only.
    """

    vocabulary = SYMBOLS + 1
    trained_size = 32
    trained_length = trained_size + 1
    kinds = ("decoder", "encoder")
    steps = 1000
    score = "exact"

    @abstractmethod
    def answers(self, words: Tensor) -> Tensor:
        """What each token is asked for, `IGNORED` where nothing: ``[count, n]`` from words of that shape."""

    def train_batch(self, size: int, generator: torch.Generator) -> Batch:
        length = int(torch.randint(SHORTEST, self.trained_size + 1, (), generator=generator))
        return self._asked(size, length, generator)

    def validation(self) -> Batch:
        return self._asked(256, self.trained_size, torch.Generator().manual_seed(7_003))

    def probes(self) -> list[Probe]:
        probes = []
        for size in _SIZES:
            ids, targets = self._asked(_ITEMS, size, torch.Generator().manual_seed(9_300 + size))
            targets[:, :-1] = IGNORED
            probes.append(Probe("exact match", size, size / self.trained_size, _ITEMS, Batch(ids, targets)))
        return probes

    def _asked(self, count: int, length: int, generator: torch.Generator) -> Batch:
        words = torch.randint(0, SYMBOLS, (count, length), generator=generator)
        before = torch.full((count, 1), BOS), torch.full((count, 1), IGNORED)
        return Batch(torch.cat([before[0], words], dim=1), torch.cat([before[1], self.answers(words)], dim=1))


@final
class LastK(Lookup):
    """The token `BACK` places before this one: addressing relative to here."""

    name = "last-k"
    summary = f"name the token {BACK} places before (local addressing)"

    def answers(self, words: Tensor) -> Tensor:
        return torch.nn.functional.pad(words, (BACK, 0), value=IGNORED)[:, : words.shape[1]]


@final
class FirstToken(Lookup):
    """The first token: addressing relative to the start."""

    name = "first-token"
    summary = "name the first token (global addressing)"

    def answers(self, words: Tensor) -> Tensor:
        asked = words[:, :1].repeat(1, words.shape[1])
        asked[:, 0] = IGNORED
        return asked
