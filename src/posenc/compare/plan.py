"""Presets, and the trials that they ask for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from posenc.compare.rows import DECLARED
from posenc.compare.tasks.registry import find_task
from posenc.compare.trial import build_model


@dataclass(frozen=True)
class Preset:
    """A named size of the comparison.

    Args:
        tasks: in the order in which they are reported.
        seeds: how many reporting seeds, 1 … seeds.
        contrasts: pairs of rows whose difference is tested, declared before anything is measured.
        raises_budget: whether a row that does not fit is trained again with twice the steps.
        advises: whether the report ends with advice.
    """

    name: str
    summary: str
    tasks: tuple[str, ...]
    seeds: int
    contrasts: tuple[tuple[str, str], ...] = ()
    raises_budget: bool = False
    advises: bool = False


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
        ),
        Preset(
            "full",
            "three tasks, seven seeds, every pair of rows; overnight",
            ("copy-constant", "copy-random", "recall-lm"),
            7,
            contrasts=tuple(itertools.combinations(DECLARED, 2)),
            raises_budget=True,
            advises=True,
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
) -> Plan:
    """A preset, cut down or widened.

    Raises:
        ValueError: unknown names, rows that cannot be built, or counts below 1.
    """
    if preset not in PRESETS:
        raise ValueError(f"compare: there is no preset {preset!r}. Expected one of {', '.join(PRESETS)}. Name one.")
    base = PRESETS[preset]
    for name, value in (("--seeds", seeds), ("--steps", steps)):
        if value is not None and value < 1:
            raise ValueError(f"compare: {name} {value}. Expected 1 or more. Leave it away for the preset's own.")
    chosen = tuple(dict.fromkeys([*(rows or DECLARED), *extra_rows]))
    chosen_tasks = [find_task(task) for task in tasks or base.tasks]
    for row in chosen:
        for task in chosen_tasks:
            build_model(row, task, seed=0)  # each row's code fails here rather than in the middle of a run
    declared = tuple(pair for pair in base.contrasts if set(pair) <= set(chosen))
    return Plan(
        replace(base, contrasts=declared), chosen, tuple(tasks) or base.tasks, tuple(range(1, (seeds or base.seeds) + 1)), steps
    )
