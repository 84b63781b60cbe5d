"""One run of the comparison, from a plan to a report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from posenc.compare import rates
from posenc.compare.plan import Plan
from posenc.compare.report import make_report
from posenc.compare.results import Results
from posenc.compare.runner import Workers
from posenc.compare.speed import REPEATS, measure_speed
from posenc.compare.statistics import BANDS, band_mean
from posenc.compare.trial import FIT_ACCURACY, Trial

_CALIBRATION_STEPS = 15
_CALIBRATION_SEED = 999

Cell = tuple[str, str]


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
        committed = {} if tune or plan.steps is not None else rates.committed()["rates"]
        self.rates: dict[Cell, dict[str, Any]] = {
            (row, task): committed[task][row] for row, task in self.cells if row in committed.get(task, {})
        }

    @property
    def cells(self) -> list[Cell]:
        """Every (row, task) of the plan."""
        return [(row, task) for task in self.plan.tasks for row in self.plan.rows]

    @property
    def unrated(self) -> list[Cell]:
        """The cells whose learning rate is still to be chosen."""
        return [cell for cell in self.cells if cell not in self.rates]

    def grid(self, cell: Cell) -> list[Trial]:
        """The trials that choose a cell's learning rate."""
        row, task = cell
        return rates.tuning_trials(row, task, self.plan.steps_of(task))

    def reporting(self, cell: Cell, factor: int = 1) -> list[Trial]:
        """The reporting trials of a cell, one per seed, with ``factor`` times the steps.

        Before a rate is chosen they stand for themselves, with rate 0, so that a forecast can count them.
        """
        row, task = cell
        rate = self.rates[cell]["rate"] if cell in self.rates else 0.0
        return [Trial(row, task, seed, rate, factor * self.plan.steps_of(task)) for seed in self.plan.seeds]

    def lines(self) -> list[str]:
        """All trials, a line each."""
        tuning = [
            f"tune    {trial.row} on {trial.task}, seed {trial.seed}, rate {trial.learning_rate:g}, {trial.steps} steps"
            for cell in self.unrated
            for trial in self.grid(cell)
        ]
        reporting = [
            f"report  {trial.row} on {trial.task}, seed {trial.seed}, {trial.steps} steps"
            for cell in self.cells
            for trial in self.reporting(cell)
        ]
        return tuning + reporting


class Session:
    """An agenda being carried out: every finished trial is kept in the results folder at once."""

    def __init__(self, agenda: Agenda, results: Results, display: Display, *, workers: int) -> None:
        self._agenda, self._plan = agenda, agenda.plan
        self._results, self._display, self._workers = results, display, workers

    def run(self, command: Sequence[str], *, speed: bool = True) -> dict[str, Any]:
        """Measure speed alone, then train everything that is not yet in the results folder; return the report."""
        began = time.perf_counter()
        measured = self._speed() if speed else []
        with Workers(self._workers) as workers:
            self._forecast(workers)
            self._choose_rates(workers)
            agenda = self._agenda
            self._train(workers, "training", [t for cell in agenda.cells for t in agenda.reporting(cell)])
            factors = self._raise_budgets(workers)
        records = {cell: [self._results.records[t.key] for t in agenda.reporting(cell, factors[cell])] for cell in agenda.cells}
        minutes = (time.perf_counter() - began) / 60
        return make_report(self._plan, records, agenda.rates, measured, command, minutes)

    def _speed(self) -> list[dict[str, Any]]:
        self._display.begin("measuring speed and memory", REPEATS)
        try:
            return measure_speed(self._plan.rows, lambda repeats: self._display.advance(repeats))
        finally:
            self._display.end()

    def _forecast(self, workers: Workers) -> None:
        """Time a few steps of two rows per task, as busy as the run will be, and say how long it will take."""
        rows = dict.fromkeys([self._plan.rows[0], self._plan.rows[-1]])
        timed: dict[str, list[dict[str, Any]]] = {task: [] for task in self._plan.tasks}
        probes = [
            Trial(row, task, _CALIBRATION_SEED, 1e-3, min(_CALIBRATION_STEPS, self._plan.steps_of(task)))
            for task in self._plan.tasks
            for row in rows
        ]
        self._display.begin("timing a few steps", len(probes))
        try:
            workers.run(probes, finished=lambda record: timed[record["task"]].append(record))
        finally:
            self._display.end()
        seconds = sum(_forecast_trial(trial, timed[trial.task]) for trial in self._open(self._sure_trials()))
        self._display.note(f"forecast: about {max(seconds / self._workers / 60, 0.1):.1f} minutes of training")

    def _sure_trials(self) -> list[Trial]:
        agenda = self._agenda
        tuning = [trial for cell in agenda.unrated for trial in agenda.grid(cell)]
        return tuning + [trial for cell in agenda.cells for trial in agenda.reporting(cell)]

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
            advance(f"{done}/{len(todo)} trials, last {record['row']} on {record['task']}, seed {record['seed']}")

        self._display.begin(title, sum(trial.steps for trial in todo))
        try:
            workers.run(todo, finished=finished, stepped=stepped)
        finally:
            self._display.end()

    def _choose_rates(self, workers: Workers) -> None:
        agenda = self._agenda
        unrated = agenda.unrated
        self._train(workers, "choosing learning rates", [trial for cell in unrated for trial in agenda.grid(cell)])
        for cell in unrated:
            agenda.rates[cell] = rates.choose(self._results.records[trial.key] for trial in agenda.grid(cell))

    def _raise_budgets(self, workers: Workers) -> dict[Cell, int]:
        """Train again, with twice the steps, what did not fit in range; the factor of each cell."""
        factors = dict.fromkeys(self._agenda.cells, 1)
        if not self._plan.preset.raises_budget:
            return factors
        short = [cell for cell in self._agenda.cells if not self._fits(cell)]
        self._train(
            workers, "raising the budget of what did not fit", [t for cell in short for t in self._agenda.reporting(cell, 2)]
        )
        return factors | dict.fromkeys(short, 2)

    def _fits(self, cell: Cell) -> bool:
        """Whether exact-match tasks fit; a loss is judged against the best row and its budget stays."""
        for trial in self._agenda.reporting(cell):
            points = [
                (p["ratio"], p["value"]) for p in self._results.records[trial.key]["probes"] if p["measure"] == "exact match"
            ]
            value = band_mean(points, BANDS[0])
            if value is not None and value < FIT_ACCURACY:
                return False
        return True


def _forecast_trial(trial: Trial, timed: Sequence[dict[str, Any]]) -> float:
    per_step = sum(float(record["step_seconds"]) for record in timed) / len(timed)
    testing = sum(float(record["total_seconds"] - record["train_seconds"]) for record in timed) / len(timed)
    return trial.steps * per_step + testing
