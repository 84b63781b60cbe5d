"""Random inputs for one model, and what all checks of its behaviour ask of the answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from posenc.audit.behaviour.runner import Runner, Undrivable
from posenc.audit.behaviour.runners import of_positions
from posenc.audit.findings import Finding
from posenc.hf.position_plan import PositionPlan

TOKENS = 12
"""Tokens of a probe, where the model takes as many."""

Outcome = Iterator[Finding | str]
"""What a check yields: findings, and descriptions in words."""


@dataclass(eq=False)
class Probe:
    """A model, the inputs it is asked with, and how far equal answers may differ.

    Args:
        ids: ``[3, n]``; ``others`` has another id at every place.
    """

    name: str
    runner: Runner
    plan: PositionPlan | None
    ids: Tensor
    others: Tensor

    @cached_property
    def tolerance(self) -> float:
        return rounding(self.runner.model)

    @property
    def n(self) -> int:
        return self.ids.shape[1]

    @property
    def short(self) -> int:
        """Tokens of the shorter row: the rest is padding."""
        return self.n - self.n // 3 - 1

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def takes(self, *what: str) -> None:
        """Go on only with a model that can be called with all of these."""
        missing = [name for name in what if name not in self.runner.takes]
        if missing:
            names = {"mask": "mask of padding", "segments": "documents", "cache": "cache", "positions": "positions"}
            raise Undrivable(f"its forward takes no {' and no '.join(names[name] for name in missing)}")

    def counted(self, start: int, rows: int = 1, length: int | None = None) -> Tensor:
        """Positions of tokens ``start, start + 1, …``, as the model numbers them: ``[rows, length]``."""
        start += self.first
        return torch.arange(start, start + (self.n if length is None else length), device=self.device).repeat(rows, 1)

    def counted_in(self, mask: Tensor) -> Tensor:
        """Positions of the real tokens of each row, as the model numbers them."""
        return (mask.cumsum(-1) - 1).clamp(min=0) + self.first

    @cached_property
    def first(self) -> int:
        """The position of the first token: that which gives the model's own answers. 0, but behind the padding in RoBERTa."""
        if "positions" not in self.runner.takes:
            return 0
        own = self.runner(self.ids[:1]).scores
        offset = 0 if self.plan is None or self.plan.input is None else self.plan.input.offset
        for first in dict.fromkeys((0, self.runner.pad + 1, offset, 1, 2)):
            at = torch.arange(first, first + self.n, device=self.device)[None]
            try:
                if apart(self.runner(self.ids[:1], positions=at).scores, own) <= self.tolerance:
                    return first
            except Undrivable:  # a table too short for this guess
                continue
        raise Undrivable("no positions were found that give the model's own answers")

    @cached_property
    def answer(self) -> Tensor:
        """The answer to the first row alone."""
        scores = self.runner(self.ids[:1]).scores
        if not scores.isfinite().all():
            raise Undrivable("its answers are not finite")
        if not scores.any():
            raise Undrivable("its answers are all zero")
        return scores

    @cached_property
    def rules(self) -> list[tuple[str, int]]:
        """The length rules of the plan, by name, with the length at which they switch."""
        found = {
            (type(layer.rotation.schedule).__name__, layer.rotation.original_length)
            for layer, _ in (() if self.plan is None else self.plan.runs)
            if layer.rotation is not None and layer.rotation.depends_on_length
        }
        return sorted((name, length) for name, length in found if length is not None)

    @cached_property
    def kinds(self) -> set[str]:
        """The kinds of layers, as the plan names them."""
        return set() if self.plan is None else {layer.kind for layer, _ in self.plan.runs}

    @cached_property
    def recurrent(self) -> bool:
        """Whether some layers carry a state from token to token."""
        return any("attention" not in kind or "linear" in kind for kind in self.kinds)

    @cached_property
    def narrowest(self) -> int | None:
        """The narrowest window or chunk of the plan."""
        sizes = [size for layer, _ in (() if self.plan is None else self.plan.runs) for size in (layer.window, layer.chunk)]
        return min((size for size in sizes if size is not None), default=None)

    @cached_property
    def rows(self) -> int | None:
        """Positions that the model's learned table holds, as far as its plan or the table's name tells."""
        if self.plan is not None and self.plan.input is not None:
            return self.plan.input.length
        return None if self.plan is not None else next((len(table) for table in tables(self.runner.model)), None)

    @cached_property
    def sees(self) -> tuple[float, float]:
        """How far earlier answers move when a later token changes, and later ones when an earlier token does."""
        mid, rows = self.n // 2, self.ids[:1].repeat(3, 1)
        rows[1, mid], rows[2, -1] = self.others[0, mid], self.others[0, -1]
        out = torch.cat([self.runner(row[None]).scores for row in rows])  # apart: rows that meet are another finding
        leak = max(apart(out[1, :mid], out[0, :mid]), apart(out[2, :-1], out[0, :-1]))
        return leak, apart(out[1, mid + 1 :], out[0, mid + 1 :])

    @cached_property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return self.sees[0] <= self.tolerance

    @cached_property
    def exact(self) -> Runner:
        """The same model in float64, where a small effect stands out from rounding."""
        return self.runner.doubled()

    @cached_property
    def effect(self) -> float:
        """How far the answers move when positions are shuffled."""
        at = self.counted(0)
        base = self.runner(self.ids[:1], positions=at).scores
        shuffled = (at - self.first) * 5 % self.n + self.first
        return apart(self.runner(self.ids[:1], positions=shuffled).scores, base)

    @cached_property
    def shift(self) -> float:
        """How far the answers move when all positions are shifted."""
        by = 5 if self.rows is None else min(5, self.rows - self.n)
        if by < 1:
            raise Undrivable(f"no room to shift {self.n} tokens in {self.rows} positions")
        base = self.runner(self.ids[:1], positions=self.counted(0)).scores
        return apart(self.runner(self.ids[:1], positions=self.counted(by)).scores, base)


def apart(answer: Tensor, reference: Tensor) -> float:
    """The largest difference of a token's answer, relative to the norm of the answers; infinite where one is not finite."""
    if not reference.numel():
        return 0.0
    scale = reference.double().norm(dim=-1).mean()
    largest = float((answer.double() - reference.double()).norm(dim=-1).max() / scale)
    return largest if largest == largest else float("inf")


def percent(difference: float) -> str:
    """A difference in words."""
    return "not finite" if difference == float("inf") else f"{100 * difference:.2g} % of their norm"


def tables(model: nn.Module) -> list[Tensor]:
    """Tensors of a model that look like tables added to embeddings: rows by the width of the model, named by positions."""
    widths = {m.embedding_dim for n, m in model.named_modules() if isinstance(m, nn.Embedding) and not of_positions(n)}
    named = (*model.named_parameters(), *model.named_buffers())
    found = [tensor for name, tensor in named if of_positions(name) and tensor.is_floating_point() and tensor.ndim >= 2]
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in found if tensor.numel() == tensor.shape[-2] * tensor.shape[-1]]
    return [tensor for tensor in flat if tensor.shape[-1] in widths and len(tensor) > 1]


def width_and_depth(model: nn.Module) -> tuple[int, int]:
    """The widest sum that a matrix makes, and how many layers follow each other: lists inside layers are experts."""
    widths = [p.shape[-1] for name, p in model.named_parameters() if p.ndim >= 2 and "embed" not in name]
    lists = {f"{name}.": len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [count for name, count in lists.items() if not any(name != other and name.startswith(other) for other in lists)]
    return max(widths, default=1), max(outer, default=1)


def rounding(model: nn.Module) -> float:
    """How far two ways of computing the same outputs may differ, relative to their norm.

    A sum of n numbers in another order moves by about √n unit roundoffs of its norm. A layer makes some eight of them one
    after another (queries, keys, values, scores, the mix, the output, the two halves of its network), and each carries
    the errors of those before it; 4 is left for what norms and softmax enlarge. Models of float64 keep parts in float32.
    """
    width, depth = width_and_depth(model)
    return 2.0**-24 * math.sqrt(width) * 8 * (depth + 1) * 4
