"""From finished trials to a report: a plain JSON value that tables and pictures are made from."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations
from statistics import fmean
from typing import Any

import torch

import posenc
from posenc.compare.anchors import check_anchors
from posenc.compare.literature import judge
from posenc.compare.plan import Plan
from posenc.compare.rows import find_row
from posenc.compare.statistics import (
    BANDS,
    DRAWS,
    PRIMARY,
    Measured,
    band_mean,
    beats,
    holds_until,
    holm,
    interquartile_mean,
    interval,
    rank_test,
    tiers,
)
from posenc.compare.tasks.registry import find_task
from posenc.compare.trial import BATCH_SIZE, DIM, FIT_ACCURACY, HEADS, LAYERS, WEIGHT_DECAY, Cell

SCHEMA = "posenc.compare/1"
LOSS_MARGIN = 0.05
"""A loss task fits when its in-range loss is within this many nats of the best row's."""
_MAIN_MEASURE = {"exact": "exact match", "loss": "suffix loss"}


def make_report(
    plan: Plan,
    records: Mapping[Cell, Sequence[dict[str, Any]]],
    rates: Mapping[Cell, dict[str, Any]],
    speed: Sequence[dict[str, Any]],
    command: Sequence[str],
    minutes: float,
) -> dict[str, Any]:
    """The whole report.

    Args:
        records: the reporting trials of each cell of the plan and of its extras, one per seed.
        rates: the learning rate of each cell and how it was chosen.
        speed: from `posenc.compare.speed.measure_speed`.
    """
    every = {cell: _cell(cell, trials, rates[cell]) for cell, trials in records.items()}
    for _, group in _by_task(every):
        _gate(list(group.values()))
    planned = {cell: every[cell] for cell in plan.cells}
    by_name = {(cell["row"], cell["task"]): cell for (_, _, kind), cell in planned.items() if kind == "decoder"}
    literature = judge(by_name)
    contrasts = _contrasts(plan, planned)
    return {
        "schema": SCHEMA,
        "preset": plan.preset.name,
        "command": list(command),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "minutes": round(minutes, 2),
        "environment": environment(),
        "protocol": _protocol(plan),
        "cells": list(planned.values()),
        "extras": [every[cell] for cell in plan.extras],
        "speed": list(speed),
        "contrasts": contrasts,
        "superiority": _superiority(planned),
        "tiers": _tiers(planned, contrasts),
        "over_tasks": _over_tasks(plan, planned),
        "anchors": check_anchors(_by_name(every)) if plan.preset.advises else [],
        "literature": literature,
        "advice": _advice(planned, literature) if plan.preset.advises else [],
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
        "kind": plan.kind,
        "model": f"pre-norm {plan.kind}, {LAYERS} layers, width {DIM}, {HEADS} heads of {DIM // HEADS}, GELU network of four times the width",
        "batch_size": BATCH_SIZE,
        "optimizer": f"AdamW, weight decay {WEIGHT_DECAY} (none on encodings), warm-up and cosine, gradients clipped at 1",
        "rows": list(plan.rows),
        "tasks": [
            {
                "name": task.name,
                "summary": task.summary,
                "trained_size": task.trained_size,
                "steps": plan.steps_of(name),
                "measure": _MAIN_MEASURE[task.score],
                "corpus": None if task.corpus is None else task.corpus._asdict(),
            }
            for name, task in ((name, find_task(name)) for name in plan.tasks)
        ],
        "seeds": list(plan.seeds),
        "gate": f"exact match of at least {FIT_ACCURACY} in range; loss within {LOSS_MARGIN} nats of the best in range",
        "primary": f"mean over ({PRIMARY[0]:g}, {PRIMARY[1]:g}] times the trained size",
        "interval": f"95 %, hierarchical bootstrap over seeds, then items; {DRAWS} draws",
    }


def _cell(cell: Cell, trials: Sequence[dict[str, Any]], rate: dict[str, Any]) -> dict[str, Any]:
    task = find_task(cell.task)
    measure = _MAIN_MEASURE[task.score]
    curves = [[(p["ratio"], p["value"]) for p in trial["probes"] if p["measure"] == measure] for trial in trials]
    per_seed = [band_mean(curve, PRIMARY) for curve in curves]
    errors = sorted({p["error"] for trial in trials for p in trial["probes"] if p["error"]})
    exact = task.score == "exact"
    return {
        "row": cell.row,
        "label": find_row(cell.row).label,
        "task": task.name,
        "kind": cell.kind,
        "higher_is_better": exact,
        "steps": trials[0]["steps"],
        "learning_rate": rate["rate"],
        "learning_rate_losses": rate["losses"],
        "seeds": [trial["seed"] for trial in trials],
        "in_range": _mean([band_mean(curve, BANDS[0]) for curve in curves]),
        "bands": {_band_name(band): _mean([band_mean(curve, band) for curve in curves]) for band in BANDS},
        "primary": _mean(per_seed),
        "primary_per_seed": per_seed,
        "interval": _interval(trials, measure, exact=exact),
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


def _interval(trials: Sequence[dict[str, Any]], measure: str, *, exact: bool) -> list[float] | None:
    """The 95 % interval of the primary number; ``None`` where that is undefined."""
    seeds = [
        [p for p in trial["probes"] if p["measure"] == measure and PRIMARY[0] < p["ratio"] <= PRIMARY[1]] for trial in trials
    ]
    if not all(seeds) or any(p["value"] is None for seed in seeds for p in seed):
        return None
    return list(interval([[Measured(p["value"], p["items"], None if exact else p["spread"]) for p in seed] for seed in seeds]))


def _by_name(cells: Mapping[Cell, dict[str, Any]]) -> dict[Cell, dict[str, Any]]:
    """By the name of the task, without the file of a text."""
    return {cell._replace(task=found["task"]): found for cell, found in cells.items()}


def _by_task(cells: Mapping[Cell, dict[str, Any]]) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """The cells of each task and kind of model, by row."""
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for cell, found in cells.items():
        groups.setdefault((found["task"], cell.kind), {})[cell.row] = found
    return [(task, group) for (task, _), group in groups.items()]


def _curves(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each probe with the values of all seeds."""
    return [
        {
            "measure": probe["measure"],
            "size": probe["size"],
            "ratio": probe["ratio"],
            "items": probe["items"],
            "guess": probe["guess"],
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


def _ranked(group: Mapping[str, dict[str, Any]]) -> dict[str, list[float]]:
    """The primary number of each seed of the rows that take a rank, best row first."""
    cells = [cell for cell in group.values() if cell["fit"] and cell["primary"] is not None]
    cells.sort(key=lambda cell: -cell["primary"] if cell["higher_is_better"] else cell["primary"])
    return {cell["row"]: cell["primary_per_seed"] for cell in cells}


def _contrasts(plan: Plan, cells: Mapping[Cell, dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for task, group in _by_task(cells):
        ranked = _ranked(group)
        declared = [(a, b) for a, b in plan.preset.contrasts if a in ranked and b in ranked]
        p_values = [rank_test(ranked[a], ranked[b]) for a, b in declared]
        for (a, b), p, corrected in zip(declared, p_values, holm(p_values), strict=True):
            found.append({"task": task, "a": a, "b": b, "p": p, "p_holm": corrected, "edge": corrected < 0.05})
    return found


def _superiority(cells: Mapping[Cell, dict[str, Any]]) -> list[dict[str, Any]]:
    """For each pair of rows that take a rank: the probability that a random seed of the first beats one of the second."""
    found = []
    for task, group in _by_task(cells):
        higher = next(iter(group.values()))["higher_is_better"]
        for (a, first), (b, second) in combinations(_ranked(group).items(), 2):
            found.append(
                {"task": task, "a": a, "b": b, "probability": beats(first, second) if higher else beats(second, first)}
            )
    return found


def _tiers(cells: Mapping[Cell, dict[str, Any]], contrasts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for task, group in _by_task(cells):
        edges = [(c["a"], c["b"]) for c in contrasts if c["task"] == task and c["edge"]]
        found.append({"task": task, "tiers": tiers(list(_ranked(group)), edges)})
    return found


def _over_tasks(plan: Plan, cells: Mapping[Cell, dict[str, Any]]) -> list[dict[str, Any]]:
    """The interquartile mean of the primary number over the seeds of all exact-match tasks; losses have other units."""
    exact = [task for task in plan.tasks if find_task(task).score == "exact"]
    if len(exact) < 2:
        return []
    found = []
    for row in plan.rows:
        of_row = [cells[Cell(row, task, plan.kind)] for task in exact]
        ranked = all(cell["fit"] and cell["primary"] is not None for cell in of_row)
        value = interquartile_mean([v for cell in of_row for v in cell["primary_per_seed"]]) if ranked else None
        found.append({"row": row, "tasks": [cell["task"] for cell in of_row], "interquartile_mean": value})
    return found


def _advice(cells: Mapping[Cell, dict[str, Any]], literature: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for task, group in _by_task(cells):
        fitted = [cell for cell in group.values() if cell["fit"] and cell["primary"] is not None]
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
