"""One trial: train one small model with one encoding on one task, then measure it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import cos, isfinite, pi
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posenc.compare.rows import RowFailed, blaming, build_encodings
from posenc.compare.tasks.base import IGNORED, Batch, Kind, Task
from posenc.compare.tasks.registry import find_task
from posenc.core.spec import ModelShape
from posenc.transformer import Transformer

PROTOCOL = 3
"""Raised whenever a change makes earlier results incomparable."""

DIM, LAYERS, HEADS = 64, 2, 4
BATCH_SIZE, WARM_UP, WEIGHT_DECAY, CLIP = 32, 100, 0.01, 1.0
FIT_ACCURACY = 0.95
CHECK_EVERY = 100
_EVALUATION_TOKENS = 8192


@dataclass(frozen=True)
class Trial:
    """The settings of a trial; its results are kept under a key made of all of them."""

    row: str
    task: str
    seed: int
    learning_rate: float
    steps: int
    kind: Kind = "decoder"
    corpus: str = ""
    """The hash of the text that the task is made from."""
    protocol: int = PROTOCOL

    @property
    def key(self) -> str:
        settings = asdict(self) | {"task": self.task.partition(":")[0]}  # what a text says counts, not where it lies
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class Cell(NamedTuple):
    """A row on a task: what trials of several seeds and rates belong to."""

    row: str
    task: str
    kind: Kind = "decoder"

    @property
    def asked(self) -> str:
        """The task and the kind of model, in words."""
        name = self.task.partition(":")[0]
        return name if self.kind == "decoder" else f"{name}, {self.kind}"

    def trial(self, seed: int, learning_rate: float, steps: int) -> Trial:
        """A trial of this cell."""
        corpus = find_task(self.task).corpus
        return Trial(self.row, self.task, seed, learning_rate, steps, self.kind, "" if corpus is None else corpus.sha256)


def run_trial(trial: Trial, progress: Callable[[int], None] = lambda steps: None) -> dict[str, Any]:
    """Train and measure; the record is plain JSON.

    The same weights and the same batches for every encoding of a (task, seed): encodings are built before the model's
    own weights are drawn, and data come from a generator of their own.

    Raises:
        ValueError: the row's code failed or its loss is not finite; the message names the row. Or the text is another.
    """
    task = find_task(trial.task)
    if trial.corpus != ("" if task.corpus is None else task.corpus.sha256):
        raise ValueError(
            f"compare: the text of {trial.task!r} has changed since the run began. Expected it to stay. Run the command again."
        )
    with blaming(trial.row, f"training on {trial.task}, seed {trial.seed}"):
        return _train_and_measure(trial, task, progress)


def _train_and_measure(trial: Trial, task: Task, progress: Callable[[int], None]) -> dict[str, Any]:
    model, encoding_parameters = build_model(trial.row, task, trial.seed, trial.kind)
    batches = torch.Generator().manual_seed(trial.seed)
    draws = torch.Generator().manual_seed(trial.seed)
    fit_at, step_seconds = None, []
    began = last = time.perf_counter()
    for step in training(model, task, trial, batches, draws):
        step_seconds.append(time.perf_counter() - last)
        progress(step)
        if task.score == "exact" and fit_at is None and step % CHECK_EVERY == 0:
            fit_at = step if _score(model, task.validation(), "exact match").value >= FIT_ACCURACY else None
        last = time.perf_counter()
    trained, checking = time.perf_counter() - began, time.perf_counter()
    validation_loss = _score(model, task.validation(), "loss").value
    checked = time.perf_counter() - checking
    return {
        "key": trial.key,
        **asdict(trial),
        "task": task.name,
        "validation_loss": validation_loss,
        "probes": _probe(model, task),
        "steps_to_fit": fit_at,
        "parameters": sum(p.numel() for p in model.parameters()),
        "encoding_parameters": encoding_parameters,
        "train_seconds": round(trained, 2),
        "step_seconds": round(median(step_seconds), 5),
        "check_seconds": round(checked, 4),
        "total_seconds": round(time.perf_counter() - began, 2),
    }


def model_shape(task: Task, kind: Kind = "decoder") -> ModelShape:
    """The small model of the comparison, as encodings see it."""
    head_dim = DIM // HEADS
    return ModelShape(DIM, HEADS, HEADS, head_dim, LAYERS, max_length=task.trained_length, causal=kind == "decoder")


def build_model(row: str, task: Task, seed: int, kind: Kind = "decoder") -> tuple[Transformer, int]:
    """The model of a row and the number of its encodings' parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1_000_003 + seed)
        encodings = build_encodings(row, model_shape(task, kind))
        torch.manual_seed(seed)
        with blaming(row, "being built"):
            model = Transformer(task.vocabulary, dim=DIM, layers=LAYERS, heads=HEADS, encodings=encodings, kind=kind)
    return model, sum(p.numel() for p in model.encodings.parameters())


def training(model: Transformer, task: Task, trial: Trial, batches: torch.Generator, draws: torch.Generator) -> Iterator[int]:
    """Train, yielding the number of steps done: AdamW, warm-up and cosine, gradients clipped, no decay on encodings."""
    optimizer = torch.optim.AdamW(_parameter_groups(model), lr=trial.learning_rate, betas=(0.9, 0.98), fused=True)
    for step in range(trial.steps):
        model.train()
        share = min(1.0, (step + 1) / WARM_UP) * (1 + cos(pi * step / trial.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = trial.learning_rate * share
        batch = task.train_batch(BATCH_SIZE, batches)
        loss = _loss(model(batch.ids, 0, generator=draws), batch.targets)
        if not isfinite(loss.item()):
            raise RowFailed(
                f"compare: {trial.row!r} on {trial.task}, seed {trial.seed}, rate {trial.learning_rate:g}: the loss became "
                f"{loss.item()} at step {step + 1}. Expected finite numbers. Mend what the encoding computes, or leave it away."
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        yield step + 1


def _parameter_groups(model: Transformer) -> list[dict[str, Any]]:
    of_encodings = {id(p) for p in model.encodings.parameters()}
    decayed = [p for p in model.parameters() if p.ndim > 1 and id(p) not in of_encodings]
    chosen = {id(p) for p in decayed}
    plain = [p for p in model.parameters() if id(p) not in chosen]
    return [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def _probe(model: Transformer, task: Task) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for probe in task.probes():
        entry: dict[str, Any] = probe._asdict()
        del entry["batch"]
        try:
            entry |= {**_score(model, probe.batch, probe.measure)._asdict(), "error": None}
        except ValueError as error:  # an encoding that is not defined past the trained length says so; that is its result
            if probe.batch.ids.shape[1] <= task.trained_length:
                raise
            entry |= {"value": None, "spread": None, "error": str(error)}
        found.append(entry)
    return found


class _Score(NamedTuple):
    """A mean, and the standard deviation among sequences that its sampling error follows from."""

    value: float
    spread: float


@torch.no_grad()
def _score(model: Transformer, batch: Batch, measure: str) -> _Score:
    """Mean loss of the scored tokens, or the share of sequences with every scored token right."""
    model.eval()
    rows = max(1, _EVALUATION_TOKENS // batch.ids.shape[1])
    sums, counts = [], []
    for ids, targets in zip(batch.ids.split(rows), batch.targets.split(rows), strict=True):
        logits = model(ids, 0)
        scored = targets != IGNORED
        if not logits[scored].isfinite().all():
            raise FloatingPointError(f"the logits over {ids.shape[1]} tokens are not finite")
        if measure.endswith("loss"):
            losses = nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
            )
            sums.append(losses.view_as(targets).double().sum(-1))
            counts.append(scored.sum(-1).double())
        else:
            sums.append(((logits.argmax(-1) == targets) | ~scored).all(-1).double())
            counts.append(torch.ones_like(sums[-1]))
    summed, counted = torch.cat(sums), torch.cat(counts)
    value = summed.sum() / counted.sum().clamp(min=1)
    off = (summed - value * counted) / counted.mean().clamp(min=1)  # a ratio of two sums, to first order
    return _Score(float(value), float(off.square().mean().sqrt()))
