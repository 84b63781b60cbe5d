"""Speed and memory of each row, measured alone: forward and backward of the comparison's model, as ratios to NoPE."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from posenc.attn.request import Request
from posenc.attn.select import verdicts
from posenc.compare.rows import blaming, build_encodings
from posenc.compare.tasks.base import Kind
from posenc.compare.trial import DIM, HEADS, LAYERS
from posenc.core.bias import DenseBias
from posenc.core.spec import ModelShape
from posenc.transformer import Transformer

BATCH, LENGTH, VOCABULARY = 4, 512, 64
WARM_UPS, REPEATS = 2, 20
BASELINE = "nope"


def measure_speed(
    rows: Sequence[str], kind: Kind = "decoder", progress: Callable[[int], None] = lambda repeats: None
) -> list[dict[str, Any]]:
    """Seconds and peak bytes per row, in interleaved order so that a drifting machine touches all rows alike.

    Memory is the peak of what the forward and backward allocate beyond the model itself.
    """
    every = list(dict.fromkeys([BASELINE, *rows]))
    steps = {row: _one_step(row, kind) for row in every}
    for step in steps.values():
        for _ in range(WARM_UPS):
            step()
    seconds: dict[str, list[float]] = {row: [] for row in every}
    for repeat in range(REPEATS):
        for row, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[row].append(time.perf_counter() - began)
        progress(repeat + 1)
    peaks = {row: peak_bytes(_one_step(row, kind)) for row in every}
    base = seconds[BASELINE]
    return [
        {
            "row": row,
            "implementation": implementation(row, kind),
            "seconds": round(median(seconds[row]), 6),
            "ratio": round(median(a / b for a, b in zip(seconds[row], base, strict=True)), 3),
            "peak_bytes": peaks[row],
            "memory_ratio": round(peaks[row] / peaks[BASELINE], 3),
        }
        for row in rows
    ]


def implementation(row: str, kind: Kind = "decoder") -> str:
    """The backend that attention chooses for the calls of this row's model, and the form of the bias that it gets."""
    with _heard() as requests:
        _one_step(row, kind)()
    found = dict.fromkeys(f"{_chosen(request)}, {_form(request)}" for request in requests)
    return "; ".join(found)


def _chosen(request: Request) -> str:
    return next(verdict.backend for verdict in verdicts(request, "auto") if verdict.chosen)


def _form(request: Request) -> str:
    if request.bias is None:
        return "no bias"
    return "dense bias" if isinstance(request.bias, DenseBias) else "bias as a value"


@contextmanager
def _heard() -> Iterator[list[Request]]:
    """The attention calls made inside, as they were checked: a model shows them to nobody else."""
    module: Any = import_module("posenc.attn.attention")
    select, requests = module.select, list[Request]()

    def listening(request: Request, backend: str) -> Any:
        requests.append(request)
        return select(request, backend)

    module.select = listening
    try:
        yield requests
    finally:
        module.select = select


def _one_step(row: str, kind: Kind) -> Callable[[], None]:
    shape = ModelShape(DIM, HEADS, HEADS, DIM // HEADS, LAYERS, max_length=LENGTH, causal=kind == "decoder")
    encodings = build_encodings(row, shape)
    with blaming(row, "being built"):
        model = Transformer(VOCABULARY, dim=DIM, layers=LAYERS, heads=HEADS, encodings=encodings, kind=kind)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with blaming(row, "being timed"):
            model(ids, 0).square().mean().backward()

    return step


def peak_bytes(step: Callable[[], None]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler greets on stderr, through the progress bars
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak
