"""Presets, and the trials that they ask for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from posenc.compare.rows import DECLARED, blaming
from posenc.compare.tasks.base import Kind
from posenc.compare.tasks.registry import TASKS, find_task
from posenc.compare.trial import Cell, build_model


@dataclass(frozen=True)
class Preset:
    """A named size of the comparison.

    Args:
        tasks: in the order in which they are reported.
        seeds: how many reporting seeds, 1 … seeds.
        contrasts: pairs of rows whose difference is tested, declared before anything is measured.
        raises_budget: whether a row that nearly fits is trained again with twice the steps.
        advises: whether the report ends with advice.
        extras: cells besides rows × tasks, trained only because an anchor needs them, on the first `EXTRA_SEEDS` seeds.
    """

    name: str
    summary: str
    tasks: tuple[str, ...]
    seeds: int
    contrasts: tuple[tuple[str, str], ...] = ()
    raises_budget: bool = False
    advises: bool = False
    extras: tuple[Cell, ...] = ()


EXTRA_SEEDS = 2
_ENCODERS_ON_LAST_K = tuple(Cell(row, "last-k", "encoder") for row in ("nope", "sinusoidal"))

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("quick", "copy-constant, one seed; at most 5 minutes on two cores", ("copy-constant",), 1),
        Preset(
            "standard",
            "three tasks, five seeds; at most 75 minutes on two cores",
            ("copy-constant", "copy-random", "recall-lm"),
            5,
            contrasts=(
                ("nope", "alibi"),
                ("alibi", "rope"),
                ("t5", "alibi"),
                ("rope", "rope-25"),
                ("sinusoidal-randomized", "sinusoidal"),
                ("nope", "t5"),
            ),
            raises_budget=True,
            advises=True,
            extras=_ENCODERS_ON_LAST_K,
        ),
        Preset(
            "full",
            "three tasks, seven seeds, every pair of rows; overnight",
            ("copy-constant", "copy-random", "recall-lm"),
            7,
            contrasts=tuple(itertools.combinations(DECLARED, 2)),
            raises_budget=True,
            advises=True,
            extras=_ENCODERS_ON_LAST_K,
        ),
    )
}


@dataclass(frozen=True)
class Plan:
    """What one run compares."""

    preset: Preset
    rows: tuple[str, ...]
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int | None
    """Training steps of every task; ``None`` for each task's own."""
    kind: Kind = "decoder"
    extras: tuple[Cell, ...] = ()

    @property
    def cells(self) -> list[Cell]:
        """Every row on every task."""
        return [Cell(row, task, self.kind) for task in self.tasks for row in self.rows]

    def seeds_of(self, cell: Cell) -> tuple[int, ...]:
        return self.seeds[:EXTRA_SEEDS] if cell in self.extras else self.seeds

    def steps_of(self, task: str) -> int:
        return find_task(task).steps if self.steps is None else self.steps


def make_plan(
    preset: str,
    *,
    rows: Sequence[str] = (),
    tasks: Sequence[str] = (),
    seeds: int | None = None,
    steps: int | None = None,
    extra_rows: Sequence[str] = (),
    kind: str = "decoder",
    text: Path | None = None,
) -> Plan:
    """A preset, cut down or widened.

    Args:
        tasks: the preset's own by default; every task that an encoder can be asked for ``kind="encoder"``; the text task
            for a text.
        text: the file of the text task, which is added when it is not named.

    Raises:
        ValueError: unknown names, rows that cannot be built or run, counts below 1, a task that needs a decoder.
        OSError, ValueError: a file that is no text.
    """
    if preset not in PRESETS:
        raise ValueError(f"compare: there is no preset {preset!r}. Expected one of {', '.join(PRESETS)}. Name one.")
    base = PRESETS[preset]
    for name, value in (("--seeds", seeds), ("--steps", steps)):
        if value is not None and value < 1:
            raise ValueError(f"compare: {name} {value}. Expected 1 or more. Leave it away for the preset's own.")
    if kind not in get_args(Kind):
        raise ValueError(f"compare: --kind {kind!r}. Expected one of {', '.join(get_args(Kind))}. Name one.")
    asked: Kind = "encoder" if kind == "encoder" else "decoder"
    chosen = tuple(dict.fromkeys([*(rows or DECLARED), *extra_rows]))
    chosen_tasks = _tasks(base, tasks, asked, text)
    extras = base.extras if not tasks and asked == "decoder" and text is None else ()
    _try_out([Cell(row, task, asked) for row in chosen for task in chosen_tasks])
    declared = tuple(pair for pair in base.contrasts if set(pair) <= set(chosen))
    every_seed = tuple(range(1, (seeds or base.seeds) + 1))
    return Plan(replace(base, contrasts=declared), chosen, chosen_tasks, every_seed, steps, asked, extras)


def _tasks(preset: Preset, named: Sequence[str], kind: Kind, text: Path | None) -> tuple[str, ...]:
    serving = [name for name, task in TASKS.items() if kind in task.kinds]
    default = ("text",) if text is not None else preset.tasks if kind == "decoder" else serving
    names = dict.fromkeys([*(named or default), *(["text"] if text is not None else [])])
    found = tuple(name if name != "text" or text is None else f"text:{text.absolute()}" for name in names)
    for name in found:
        if kind not in (task := find_task(name)).kinds:
            raise ValueError(
                f"compare: {task.name} with --kind {kind}. Expected a task that an {kind} can be asked ({', '.join(serving)}): it "
                "sees every token, so it would read what it is to predict. Name one of those, or leave --kind away."
            )
    return found


def _try_out(cells: Sequence[Cell]) -> None:
    """Build each row and show it two sequences, so that its code fails here rather than in the middle of a run."""
    for cell in cells:
        task = find_task(cell.task)
        model, _ = build_model(cell.row, task, 0, cell.kind)
        batch = task.train_batch(2, torch.Generator().manual_seed(0))
        with blaming(cell.row, f"being tried on {cell.asked}"), torch.no_grad():
            model(batch.ids, 0, generator=torch.Generator().manual_seed(0))
