"""What the benchmark scripts share: contestants timed in turn, ratios inside rounds, targets, tables, result files.

Every round runs every contestant once, in a new order, so that whatever else the machine does falls on all of them;
each number is the median over rounds of a ratio taken inside a round.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

Run = Callable[[], Any]
Seconds = dict[str, list[float]]


@dataclass(frozen=True)
class Target:
    """A ratio that was asked for: contestant over reference, at most so much."""

    section: str
    contestant: str
    reference: str
    at_most: float


def measure(runs: Mapping[str, Run], rounds: int, repeats: int, warm_ups: int = 2) -> Seconds:
    """Seconds of each contestant in each round, of so many calls in a row."""
    for run in runs.values():
        for _ in range(warm_ups):
            run()  # compile, allocate

    def seconds_of(run: Run) -> float:
        gc.collect()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats

    gc.disable()
    seconds = in_turn(runs, rounds, seconds_of)
    gc.enable()
    return seconds


def in_turn(runs: Mapping[str, Run], rounds: int, seconds_of: Callable[[Run], float]) -> Seconds:
    """What a clock of your own says of each contestant in each round, orders drawn anew."""
    seconds: Seconds = {name: [] for name in runs}
    order, draw = list(runs), random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            seconds[name].append(seconds_of(runs[name]))
    return seconds


def ratio(seconds: Seconds, contestant: str, reference: str) -> float:
    """The median over rounds of one contestant's time over another's."""
    return statistics.median(a / b for a, b in zip(seconds[contestant], seconds[reference], strict=True))


def summary(seconds: Seconds) -> dict[str, Any]:
    """The median time of everyone, and the ratio to the first."""
    first = next(iter(seconds))
    return {
        name: {"seconds": statistics.median(taken), "ratio": ratio(seconds, name, first)} for name, taken in seconds.items()
    }


def judged(targets: Sequence[Target], sections: Mapping[str, Seconds]) -> list[dict[str, Any]]:
    """Every target with what was measured; ``None`` where a contestant was missing."""
    found = []
    for target in targets:
        seconds = sections.get(target.section, {})
        there = target.contestant in seconds and target.reference in seconds
        found.append(verdict(target, ratio(seconds, target.contestant, target.reference) if there else None))
    return found


def verdict(target: Target, measured: float | None) -> dict[str, Any]:
    return {**asdict(target), "measured": measured, "met": None if measured is None else measured <= target.at_most}


def imported(name: str, module: str, missing: dict[str, str]) -> Any:
    """Another library's module, or ``None`` and a line in ``missing``: importing it may fail in ways of its own."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except Exception as error:
        missing[name] = f"{type(error).__name__}: {error}"[:120]
        return None


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Of torch, these packages and posenc; ``None`` where one is not installed."""
    found: dict[str, str | None] = {}
    for package in ("torch", *packages, "posenc"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def environment(packages: Sequence[str]) -> dict[str, Any]:
    """Versions and hardware, enough to run it again."""
    cpu = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    variables = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD", "OMP_NUM_THREADS", "KMP_AFFINITY")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "allocator": {
            "libc": " ".join(platform.libc_ver()),
            **{name: os.environ[name] for name in variables if name in os.environ},
        },
        "versions": versions(packages),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def show(console: Console, title: str, rows: Mapping[str, Any]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("time", justify="right")
    table.add_column(f"/ {next(iter(rows))}", justify="right")
    for name, row in rows.items():
        table.add_row(name, readable(row["seconds"]), f"{row['ratio']:.2f}", style="bold" if name.startswith("posenc") else "")
    console.print(table)


def show_targets(console: Console, verdicts: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="Targets", title_justify="left")
    for column in ("where", "what", "at most", "measured", ""):
        table.add_column(column)
    for line in verdicts:
        measured = "not measured" if line["measured"] is None else f"{line['measured']:.3f}"
        mark = {True: "met", False: "missed", None: ""}[line["met"]]
        table.add_row(line["section"], f"{line['contestant']} / {line['reference']}", f"{line['at_most']:.3f}", measured, mark)
    console.print(table)


def readable(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def write(path: Path, schema: str, script: str, result: Mapping[str, Any]) -> None:
    """A result file with its command and date, under its name only once it is whole."""
    whole = {
        "schema": schema,
        "command": " ".join(["python", script, *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        **result,
    }
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
