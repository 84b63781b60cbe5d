"""One learning-rate rule for all: the rate of least in-range loss on tuning seeds, which are never reported."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from statistics import fmean
from typing import Any

from posenc.compare.trial import Cell, Trial

GRID = (1e-3, 3e-3, 1e-2)
TUNING_SEEDS = (101, 102)
"""Disjoint from reporting seeds, which count from 1."""


def committed() -> dict[str, dict[str, Any]]:
    """The rates that ship with posenc, ``rates`` as ``{task: {row: {"rate": …, "losses": {…}}}}``, and how each task's were ``made``.

    A task of encoders stands under ``"task, encoder"``.
    """
    rates: dict[str, dict[str, Any]] = json.loads((files("posenc.compare") / "learning_rates.json").read_text())
    return rates


def committed_rate(cell: Cell) -> dict[str, Any] | None:
    """The rate of a cell that ships with posenc, if one does."""
    rate: dict[str, Any] | None = committed()["rates"].get(cell.asked, {}).get(cell.row)
    return rate


def tuning_trials(cell: Cell, steps: int) -> list[Trial]:
    """The grid of one cell."""
    return [cell.trial(seed, rate, steps) for seed in TUNING_SEEDS for rate in GRID]


def choose(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The rate with the least mean in-range loss, and the whole grid beside it."""
    losses: dict[float, list[float]] = {}
    for record in records:
        losses.setdefault(record["learning_rate"], []).append(record["validation_loss"])
    means = {rate: fmean(values) for rate, values in sorted(losses.items())}
    return {"rate": min(means, key=means.__getitem__), "losses": {f"{rate:g}": round(loss, 6) for rate, loss in means.items()}}
