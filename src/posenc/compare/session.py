"""One run of the comparison, from a plan to a report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Protocol

from posenc.compare import rates
from posenc.compare.plan import Plan
from posenc.compare.report import make_report
from posenc.compare.results import Results
from posenc.compare.runner import Workers
from posenc.compare.speed import REPEATS, measure_speed
from posenc.compare.statistics import BANDS, band_mean
from posenc.compare.tasks.registry import find_task
from posenc.compare.trial import CHECK_EVERY, FIT_ACCURACY, Cell, Trial

_CALIBRATION_STEPS = 25
_CALIBRATION_SEED = 999
_PRECISION = 0.3
"""Of the forecast."""
_NEAR = 0.5
"""The exact match in range from which twice the steps may be enough to fit."""


class Display(Protocol):
    """What a session tells whoever watches."""

    def note(self, text: str) -> None: ...

    def begin(self, title: str, total: int) -> None: ...

    def advance(self, done: int, text: str = "") -> None: ...

    def end(self) -> None: ...


class Agenda:
    """The trials that a plan asks for, and the learning rates that they use.

    Args:
        tune: choose learning rates afresh, on the tuning seeds, instead of taking the committed ones.
    """

    def __init__(self, plan: Plan, *, tune: bool = False) -> None:
        self.plan = plan
        fresh = tune or plan.steps is not None
        found = {cell: None if fresh else rates.committed_rate(cell) for cell in self.cells}
        self.rates: dict[Cell, dict[str, Any]] = {cell: rate for cell, rate in found.items() if rate is not None}

    @property
    def cells(self) -> list[Cell]:
        """Every cell of the plan, its extras last."""
        return [*self.plan.cells, *self.plan.extras]

    @property
    def unrated(self) -> list[Cell]:
        """The cells whose learning rate is still to be chosen."""
        return [cell for cell in self.cells if cell not in self.rates]

    def grid(self, cell: Cell) -> list[Trial]:
        """The trials that choose a cell's learning rate."""
        return rates.tuning_trials(cell, self.plan.steps_of(cell.task))

    def reporting(self, cell: Cell, factor: int = 1) -> list[Trial]:
        """The reporting trials of a cell, one per seed, with ``factor`` times the steps.

        Before a rate is chosen they stand for themselves, with rate 0, so that a forecast can count them.
        """
        rate = self.rates[cell]["rate"] if cell in self.rates else 0.0
        return [cell.trial(seed, rate, factor * self.plan.steps_of(cell.task)) for seed in self.plan.seeds_of(cell)]

    def may_be_raised(self, cell: Cell) -> bool:
        """Whether a cell that nearly fits is trained again with twice the steps: a loss is judged against the best row."""
        return self.plan.preset.raises_budget and cell not in self.plan.extras and find_task(cell.task).score == "exact"

    @property
    def summary(self) -> str:
        """What is compared, in one line."""
        plan = self.plan
        tasks = ", ".join(find_task(name).name for name in plan.tasks)
        return f"{len(plan.rows)} row{'s' if len(plan.rows) > 1 else ''} on {tasks}; {plan.kind}, seeds {', '.join(map(str, plan.seeds))}"

    def lines(self) -> list[str]:
        """All trials, a line each, what may come on top, and what is tested."""
        tuning = [
            f"tune    {cell.row} on {cell.asked}, seed {trial.seed}, rate {trial.learning_rate:g}, {trial.steps} steps"
            for cell in self.unrated
            for trial in self.grid(cell)
        ]
        reporting = [
            f"{'extra ' if cell in self.plan.extras else 'report'}  {cell.row} on {cell.asked}, seed {trial.seed}, "
            f"{f'rate {trial.learning_rate:g}' if trial.learning_rate else 'the rate so chosen'}, {trial.steps} steps"
            for cell in self.cells
            for trial in self.reporting(cell)
        ]
        corpora = [
            f"text    {task.corpus.source}, {task.corpus.bytes} bytes, sha256 {task.corpus.sha256[:16]}…"
            for task in map(find_task, self.plan.tasks)
            if task.corpus is not None
        ]
        raised = [cell for cell in self.cells if self.may_be_raised(cell)]
        total = f"{len(tuning) + len(reporting)} trials on {self.plan.kind} models"
        if raised:
            total += (
                f"; at most {sum(len(self.reporting(cell)) for cell in raised)} more, of twice the steps, for what nearly fits"
            )
        pairs = ", ".join(f"{a} and {b}" for a, b in self.plan.preset.contrasts)
        tested = [f"tested on each task, by a rank test with Holm's correction: {pairs}"] if pairs else []
        return [self.summary, *corpora, *tuning, *reporting, total, *tested]


class Session:
    """An agenda being carried out: every finished trial is kept in the results folder at once."""

    def __init__(self, agenda: Agenda, results: Results, display: Display, *, workers: int) -> None:
        self._agenda, self._plan = agenda, agenda.plan
        self._results, self._display, self._workers = results, display, workers

    def run(self, command: Sequence[str], *, speed: bool = True) -> dict[str, Any]:
        """Measure speed alone, then train everything that is not yet in the results folder; return the report."""
        began = time.perf_counter()
        measured = self._speed() if speed else []
        agenda = self._agenda
        self._take_rates()
        with Workers(self._workers) as workers:
            self._forecast(workers)
            self._choose_rates(workers)
            self._train(workers, "training", [t for cell in agenda.cells for t in agenda.reporting(cell)])
            factors = self._raise_budgets(workers)
        records = {cell: [self._results.records[t.key] for t in agenda.reporting(cell, factors[cell])] for cell in agenda.cells}
        minutes = (time.perf_counter() - began) / 60
        return make_report(self._plan, records, agenda.rates, measured, command, minutes)

    def _speed(self) -> list[dict[str, Any]]:
        self._display.begin("measuring speed and memory", REPEATS)
        try:
            return measure_speed(self._plan.rows, self._plan.kind, lambda repeats: self._display.advance(repeats))
        finally:
            self._display.end()

    def _forecast(self, workers: Workers) -> None:
        """Time a few steps and the tests of every cell with open trials, as busy as the run will be, and say how long it takes."""
        trials = {cell: self._open(self._sure_trials(cell)) for cell in self._agenda.cells}
        waiting = [cell for cell, open_trials in trials.items() if open_trials]
        if not waiting:
            self._display.note(
                "forecast: everything is in the results folder; nothing is left to train but what may nearly fit"
            )
            return
        probes = {
            cell.trial(_CALIBRATION_SEED, 1e-3, min(_CALIBRATION_STEPS, self._plan.steps_of(cell.task))): cell
            for cell in waiting
        }
        cells, timed = {probe.key: cell for probe, cell in probes.items()}, {}
        self._display.begin("timing a few steps", len(probes))

        def finished(record: dict[str, Any]) -> None:
            timed[cells[record["key"]]] = record
            self._display.advance(len(timed))

        try:
            workers.run(probes, finished=finished)
        finally:
            self._display.end()
        sure = sum(_seconds(trial.steps, timed[cell]) for cell in waiting for trial in trials[cell])
        raised = sum(
            _seconds(2 * trial.steps, timed[cell])
            for cell in waiting
            if self._agenda.may_be_raised(cell)
            for trial in self._agenda.reporting(cell)
        )
        expected = max(sure / self._workers / 60, 0.1)
        count = sum(map(len, trials.values()))
        text = f"forecast: about {expected:.1f} minutes (± {_PRECISION:.0%}) of training for {count} trials"
        if raised:
            most = (sure + raised) / self._workers / 60
            text += f"; up to {most:.1f} if everything nearly fits and is trained again with twice the steps"
        self._display.note(text)

    def _sure_trials(self, cell: Cell) -> list[Trial]:
        agenda = self._agenda
        return [*(agenda.grid(cell) if cell in agenda.unrated else []), *agenda.reporting(cell)]

    def _open(self, trials: Sequence[Trial]) -> list[Trial]:
        return [trial for trial in dict.fromkeys(trials) if trial.key not in self._results]

    def _train(self, workers: Workers, title: str, trials: Sequence[Trial]) -> None:
        todo = self._open(trials)
        if found := len(dict.fromkeys(trials)) - len(todo):
            self._display.note(f"{title}: {found} of {found + len(todo)} trials are in the results folder already")
        if not todo:
            return
        steps: dict[str, int] = {}
        done = 0

        def advance(text: str = "") -> None:
            self._display.advance(sum(steps.values()), text)

        def stepped(key: str, count: int) -> None:
            steps[key] = max(count, steps.get(key, 0))
            advance()

        def finished(record: dict[str, Any]) -> None:
            nonlocal done
            self._results.add(record)
            done += 1
            steps[record["key"]] = record["steps"]
            advance(
                f"{done}/{len(todo)} trials, last {record['row']} on {Cell(record['row'], record['task'], record['kind']).asked}, seed {record['seed']}"
            )

        self._display.begin(title, sum(trial.steps for trial in todo))
        try:
            workers.run(todo, finished=finished, stepped=stepped)
        finally:
            self._display.end()

    def _choose_rates(self, workers: Workers) -> None:
        grids = [trial for cell in self._agenda.unrated for trial in self._agenda.grid(cell)]
        self._train(workers, "choosing learning rates", grids)
        self._take_rates()

    def _take_rates(self) -> None:
        """The rates whose whole grid is in the results folder."""
        for cell in self._agenda.unrated:
            grid = self._agenda.grid(cell)
            if not self._open(grid):
                self._agenda.rates[cell] = rates.choose(self._results.records[trial.key] for trial in grid)

    def _raise_budgets(self, workers: Workers) -> dict[Cell, int]:
        """Train again, with twice the steps, what nearly fits in range; the factor of each cell."""
        factors = dict.fromkeys(self._agenda.cells, 1)
        near = [cell for cell in self._agenda.cells if self._agenda.may_be_raised(cell) and self._nearly_fits(cell)]
        self._train(workers, "raising the budget of what nearly fits", [t for c in near for t in self._agenda.reporting(c, 2)])
        return factors | dict.fromkeys(near, 2)

    def _nearly_fits(self, cell: Cell) -> bool:
        """Whether an exact-match cell stays below the gate, but is right on half of what it was trained for."""
        records = [self._results.records[trial.key] for trial in self._agenda.reporting(cell)]
        curves = [[(p["ratio"], p["value"]) for p in record["probes"] if p["measure"] == "exact match"] for record in records]
        in_range = [value for curve in curves if (value := band_mean(curve, BANDS[0])) is not None]
        return bool(in_range) and _NEAR <= fmean(in_range) < FIT_ACCURACY


def _seconds(steps: int, timed: dict[str, Any]) -> float:
    """How long a trial of so many steps takes: its steps, the checks on the way and the tests at its end."""
    exact = timed["probes"][0]["measure"] == "exact match"
    checks = steps / CHECK_EVERY / 2 if exact else 0.0  # they end when it fits: half of them, more or less
    testing: float = timed["total_seconds"] - timed["train_seconds"]
    return float(steps * timed["step_seconds"] + checks * timed["check_seconds"] + testing)
