"""One trial: train one small model with one encoding on one task, then measure it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import cos, isfinite, pi
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from posenc.compare.rows import RowFailed, blaming, build_encodings
from posenc.compare.tasks.base import IGNORED, Batch, Task
from posenc.compare.tasks.registry import find_task
from posenc.core.spec import ModelShape
from posenc.transformer import Transformer

PROTOCOL = 1
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
    protocol: int = PROTOCOL

    @property
    def key(self) -> str:
        settings = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(settings.encode()).hexdigest()[:16]


def run_trial(trial: Trial, progress: Callable[[int], None] = lambda steps: None) -> dict[str, Any]:
    """Train and measure; the record is plain JSON.

    The same weights and the same batches for every encoding of a (task, seed): encodings are built before the model's
    own weights are drawn, and data come from a generator of their own.

    Raises:
        ValueError: the row's code failed or its loss is not finite; the message names the row.
    """
    with blaming(trial.row, f"training on {trial.task}, seed {trial.seed}"):
        return _train_and_measure(trial, find_task(trial.task), progress)


def _train_and_measure(trial: Trial, task: Task, progress: Callable[[int], None]) -> dict[str, Any]:
    model, encoding_parameters = build_model(trial.row, task, trial.seed)
    batches = torch.Generator().manual_seed(trial.seed)
    draws = torch.Generator().manual_seed(trial.seed)
    fit_at, step_seconds = None, []
    began = last = time.perf_counter()
    for step in training(model, task, trial, batches, draws):
        step_seconds.append(time.perf_counter() - last)
        progress(step)
        if task.score == "exact" and fit_at is None and step % CHECK_EVERY == 0:
            fit_at = step if _score(model, task.validation(), "exact match") >= FIT_ACCURACY else None
        last = time.perf_counter()
    trained = time.perf_counter() - began
    measured = {"validation_loss": _score(model, task.validation(), "loss"), "probes": _probe(model, task)}
    return {
        "key": trial.key,
        **asdict(trial),
        **measured,
        "steps_to_fit": fit_at,
        "parameters": sum(p.numel() for p in model.parameters()),
        "encoding_parameters": encoding_parameters,
        "train_seconds": round(trained, 2),
        "step_seconds": round(median(step_seconds), 5),
        "total_seconds": round(time.perf_counter() - began, 2),
    }


def model_shape(task: Task) -> ModelShape:
    """The small decoder of the comparison, as encodings see it."""
    head_dim = DIM // HEADS
    return ModelShape(DIM, HEADS, HEADS, head_dim, LAYERS, max_length=task.trained_length, causal=True)


def build_model(row: str, task: Task, seed: int) -> tuple[Transformer, int]:
    """The model of a row and the number of its encodings' parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1_000_003 + seed)
        encodings = build_encodings(row, model_shape(task))
        torch.manual_seed(seed)
        with blaming(row, "being built"):
            model = Transformer(task.vocabulary, dim=DIM, layers=LAYERS, heads=HEADS, encodings=encodings)
    return model, sum(p.numel() for p in model.encodings.parameters())


def training(model: Transformer, task: Task, trial: Trial, batches: torch.Generator, draws: torch.Generator) -> Iterator[int]:
    """Train, yielding the number of steps done: AdamW, warm-up and cosine, gradients clipped, no decay on encodings."""
    optimizer = torch.optim.AdamW(_parameter_groups(model), lr=trial.learning_rate, betas=(0.9, 0.98))
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
            entry |= {"value": _score(model, probe.batch, probe.measure), "error": None}
        except ValueError as error:  # an encoding that is not defined past the trained length says so; that is its result
            if probe.batch.ids.shape[1] <= task.trained_length:
                raise
            entry |= {"value": None, "error": str(error)}
        found.append(entry)
    return found


@torch.no_grad()
def _score(model: Transformer, batch: Batch, measure: str) -> float:
    """Mean loss of the scored tokens, or the share of sequences with every scored token right."""
    model.eval()
    rows = max(1, _EVALUATION_TOKENS // batch.ids.shape[1])
    total, count = 0.0, 0
    for ids, targets in zip(batch.ids.split(rows), batch.targets.split(rows), strict=True):
        logits = model(ids, 0)
        scored = targets != IGNORED
        if not logits[scored].isfinite().all():
            raise FloatingPointError(f"the logits over {ids.shape[1]} tokens are not finite")
        if measure.endswith("loss"):
            total += float(nn.functional.cross_entropy(logits[scored], targets[scored], reduction="sum"))
            count += int(scored.sum())
        else:
            total += float(((logits.argmax(-1) == targets) | ~scored).all(-1).sum())
            count += ids.shape[0]
    return total / max(count, 1)
