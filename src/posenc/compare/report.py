"""From finished trials to a report: a plain JSON value that tables and pictures are made from."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

import torch

import posenc
from posenc.compare.literature import judge
from posenc.compare.plan import Plan
from posenc.compare.rows import find_row
from posenc.compare.statistics import BANDS, PRIMARY, band_mean, holds_until, holm, rank_test
from posenc.compare.tasks.base import Task
from posenc.compare.tasks.registry import find_task
from posenc.compare.trial import BATCH_SIZE, DIM, FIT_ACCURACY, HEADS, LAYERS, WEIGHT_DECAY

SCHEMA = "posenc.compare/1"
LOSS_MARGIN = 0.05
"""A loss task fits when its in-range loss is within this many nats of the best row's."""
_MAIN_MEASURE = {"exact": "exact match", "loss": "suffix loss"}


def make_report(
    plan: Plan,
    records: Mapping[tuple[str, str], Sequence[dict[str, Any]]],
    rates: Mapping[tuple[str, str], dict[str, Any]],
    speed: Sequence[dict[str, Any]],
    command: Sequence[str],
    minutes: float,
) -> dict[str, Any]:
    """The whole report.

    Args:
        records: the reporting trials of each (row, task), one per seed.
        rates: the learning rate of each (row, task) and how it was chosen.
        speed: from `posenc.compare.speed.measure_speed`.
    """
    cells = {(row, task): _cell(row, find_task(task), trials, rates[row, task]) for (row, task), trials in records.items()}
    for task in plan.tasks:
        _gate([cell for (_, of), cell in cells.items() if of == task])
    literature = judge(cells)
    contrasts = _contrasts(plan, cells)
    return {
        "schema": SCHEMA,
        "preset": plan.preset.name,
        "command": list(command),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "minutes": round(minutes, 2),
        "environment": environment(),
        "protocol": _protocol(plan),
        "cells": list(cells.values()),
        "speed": list(speed),
        "contrasts": contrasts,
        "literature": literature,
        "advice": _advice(plan, cells, literature) if plan.preset.advises else [],
    }


def environment() -> dict[str, Any]:
    """Versions and hardware, enough to run it again."""
    return {
        "posenc": posenc.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "device": "cpu",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"


def _protocol(plan: Plan) -> dict[str, Any]:
    return {
        "model": f"pre-norm decoder, {LAYERS} layers, width {DIM}, {HEADS} heads of {DIM // HEADS}, GELU network of four times the width",
        "batch_size": BATCH_SIZE,
        "optimizer": f"AdamW, weight decay {WEIGHT_DECAY} (none on encodings), warm-up and cosine, gradients clipped at 1",
        "rows": list(plan.rows),
        "tasks": [
            {
                "name": task.name,
                "summary": task.summary,
                "trained_size": task.trained_size,
                "steps": plan.steps_of(task.name),
                "measure": _MAIN_MEASURE[task.score],
            }
            for task in map(find_task, plan.tasks)
        ],
        "seeds": list(plan.seeds),
        "gate": f"exact match of at least {FIT_ACCURACY} in range; loss within {LOSS_MARGIN} nats of the best in range",
        "primary": f"mean over ({PRIMARY[0]:g}, {PRIMARY[1]:g}] times the trained size",
    }


def _cell(row: str, task: Task, trials: Sequence[dict[str, Any]], rate: dict[str, Any]) -> dict[str, Any]:
    measure = _MAIN_MEASURE[task.score]
    curves = [[(p["ratio"], p["value"]) for p in trial["probes"] if p["measure"] == measure] for trial in trials]
    per_seed = [band_mean(curve, PRIMARY) for curve in curves]
    errors = sorted({p["error"] for trial in trials for p in trial["probes"] if p["error"]})
    exact = task.score == "exact"
    return {
        "row": row,
        "label": find_row(row).label,
        "task": task.name,
        "higher_is_better": exact,
        "steps": trials[0]["steps"],
        "learning_rate": rate["rate"],
        "learning_rate_losses": rate["losses"],
        "seeds": [trial["seed"] for trial in trials],
        "in_range": _mean([band_mean(curve, BANDS[0]) for curve in curves]),
        "bands": {_band_name(band): _mean([band_mean(curve, band) for curve in curves]) for band in BANDS},
        "primary": _mean(per_seed),
        "primary_per_seed": per_seed,
        "holds_90": _mean_reach(curves) if exact else None,
        "steps_to_fit": [trial["steps_to_fit"] for trial in trials],
        "validation_loss": _mean([trial["validation_loss"] for trial in trials]),
        "parameters": trials[0]["parameters"],
        "encoding_parameters": trials[0]["encoding_parameters"],
        "train_seconds": round(fmean(trial["train_seconds"] for trial in trials), 2),
        "undefined": errors[0] if errors else None,
        "fit": True,
        "curves": _curves(trials),
    }


def _curves(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each probe with the values of all seeds."""
    return [
        {
            "measure": probe["measure"],
            "size": probe["size"],
            "ratio": probe["ratio"],
            "items": probe["items"],
            "values": [trial["probes"][index]["value"] for trial in trials],
        }
        for index, probe in enumerate(trials[0]["probes"])
    ]


def _gate(cells: Sequence[dict[str, Any]]) -> None:
    losses = [cell["in_range"] for cell in cells if not cell["higher_is_better"] and cell["in_range"] is not None]
    for cell in cells:
        if cell["in_range"] is None:
            cell["fit"] = False
        elif cell["higher_is_better"]:
            cell["fit"] = cell["in_range"] >= FIT_ACCURACY
        else:
            cell["fit"] = cell["in_range"] <= min(losses) + LOSS_MARGIN


def _contrasts(plan: Plan, cells: Mapping[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for task in plan.tasks:
        tested = []
        for a, b in plan.preset.contrasts:
            first, second = (cells[row, task]["primary_per_seed"] for row in (a, b))
            fit = cells[a, task]["fit"] and cells[b, task]["fit"]
            if fit and None not in first and None not in second:
                tested.append((a, b, rank_test(first, second)))
        for (a, b, p), corrected in zip(tested, holm([p for _, _, p in tested]), strict=True):
            found.append({"task": task, "a": a, "b": b, "p": p, "p_holm": corrected, "edge": corrected < 0.05})
    return found


def _advice(plan: Plan, cells: Mapping[tuple[str, str], dict[str, Any]], literature: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for task in plan.tasks:
        fitted = [c for (_, of), c in cells.items() if of == task and c["fit"] and c["primary"] is not None]
        if not fitted:
            lines.append(f"{task}: no row fits at this budget, so nothing can be advised. Raise --steps.")
            continue
        best = (max if fitted[0]["higher_is_better"] else min)(fitted, key=lambda c: c["primary"])
        lines.append(
            f"{task}: {best['label']} holds best just past the trained length ({best['primary']:.2f}, "
            f"{len(best['seeds'])} seed{'s' if len(best['seeds']) > 1 else ''})."
        )
    for claim in literature:
        against = [f"{p['better']} > {p['worse']}" for p in claim["pairs"] if p["verdict"] == "disagrees"]
        if against:
            lines.append(
                f"{claim['task']}: disagrees with the literature on {', '.join(against)} ({claim['source'].split(':')[0]})."
            )
    return lines


def _band_name(band: tuple[float, float]) -> str:
    return f"({band[0]:g}, {band[1]:g}]"


def _mean(values: Sequence[float | None]) -> float | None:
    return None if not values or None in values else fmean(v for v in values if v is not None)


def _mean_reach(curves: Sequence[Sequence[tuple[float, float | None]]]) -> dict[str, Any]:
    found = [holds_until(curve, 0.9) for curve in curves]
    return {"ratio": fmean(ratio for ratio, _ in found), "reached": all(reached for _, reached in found)}
