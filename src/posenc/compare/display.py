"""Progress on stderr, and the report as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


class ProgressDisplay:
    """Bars on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def note(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def begin(self, title: str, total: int) -> None:
        if not self._console.is_terminal:
            self.note(f"{title} …")
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
                   TextColumn("of"), TimeRemainingColumn(), TextColumn("left"), TextColumn("{task.fields[text]}"))  # fmt: skip
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._progress.start()
        self._task = self._progress.add_task(escape(title), total=total, text="")

    def advance(self, done: int, text: str = "") -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, **({"text": escape(text)} if text else {}))
        elif text:
            self.note(f"  {text}")

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None


def print_report(report: dict[str, Any], console: Console) -> None:
    """The report for a reader: one table per task, speed, literature, advice."""
    for task in report["protocol"]["tasks"]:
        cells = [cell for cell in report["cells"] if cell["task"] == task["name"]]
        console.print(_task_table(task, cells))
        if recall := _recall_table(cells):
            console.print(recall)
    if report["speed"]:
        console.print(_speed_table(report))
    for text in _remarks(report):
        console.print(escape(text), highlight=False, soft_wrap=False)


def _task_table(task: dict[str, Any], cells: list[dict[str, Any]]) -> Table:
    exact = task["measure"] == "exact match"
    bands = [name for name in cells[0]["bands"] if name != "(0, 1]" and any(c["bands"][name] is not None for c in cells)]
    better = "higher is better" if exact else "in nats, lower is better"
    table = Table(
        title=f"{task['name']}: {task['summary']}",
        caption=f"{task['measure']} ({better}) by length in multiples of the trained {task['trained_size']}",
        title_justify="left", caption_justify="left", title_style="bold", caption_style="dim",
    )  # fmt: skip
    table.add_column("encoding", no_wrap=True)
    table.add_column("in range", justify="right")
    for band in bands:
        table.add_column(band, justify="right", no_wrap=True)
    if exact:
        table.add_column("≥ 0.9 up to", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("own parameters", justify="right")
    for cell in cells:
        if cell["fit"]:
            values = [_number(cell["bands"][band]) for band in bands]
        else:
            values = ["did not fit" if index == 0 else "" for index, _ in enumerate(bands)]
        row = [escape(cell["label"]), _number(cell["in_range"]), *values]
        if exact:
            row.append(_reach(cell) if cell["fit"] else "")
        table.add_row(*row, f"{cell['steps']}", f"{cell['encoding_parameters']:,}", style=None if cell["fit"] else "dim")
    return table


def _recall_table(cells: list[dict[str, Any]]) -> Table | None:
    lags = [curve["size"] for curve in cells[0]["curves"] if curve["measure"] == "recall"]
    if not lags:
        return None
    table = Table(title="recall of a planted value by lag in tokens (chance 0.06)", title_justify="left", title_style="bold")
    table.add_column("encoding", no_wrap=True)
    for lag in lags:
        table.add_column(str(lag), justify="right")
    for cell in cells:
        recalled = [curve["values"] for curve in cell["curves"] if curve["measure"] == "recall"]
        table.add_row(escape(cell["label"]), *(_number(None if None in v else sum(v) / len(v)) for v in recalled))
    return table


def _speed_table(report: dict[str, Any]) -> Table:
    threads = report["environment"]["threads"]
    table = Table(
        title="speed and memory, forward and backward, as ratios to NoPE",
        caption=f"this model, 4 × 512 tokens, {threads} threads, median of 20; measured alone",
        title_justify="left", caption_justify="left", title_style="bold", caption_style="dim",
    )  # fmt: skip
    labels = {cell["row"]: cell["label"] for cell in report["cells"]}
    for name, justify in (("encoding", "left"), ("time", "right"), ("peak memory", "right"), ("attention", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for line in report["speed"]:
        label = escape(labels[line["row"]])
        table.add_row(label, f"{line['ratio']:.2f}", f"{line['memory_ratio']:.2f}", line["implementation"])
    return table


def _remarks(report: dict[str, Any]) -> list[str]:
    seeds = len(report["protocol"]["seeds"])
    lines = [
        "One seed ranks nothing: read differences as hints, and use --preset standard for tests over seeds."
        if seeds == 1
        else f"Means over {seeds} seeds. {_edges(report)}"
    ]
    if undefined := sorted({cell["label"] for cell in report["cells"] if cell["undefined"]}):
        lines.append(f"undefined: {', '.join(undefined)} has no code past the trained length, and says so.")
    for claim in report["literature"]:
        lines += ["", f"The literature on {claim['task']}: {claim['tiers']}", f"  {claim['source']}."]
        by_verdict: dict[str, list[str]] = {}
        for pair in claim["pairs"]:
            by_verdict.setdefault(pair["verdict"], []).append(f"{pair['better']} > {pair['worse']}")
        lines += [f"  this run {verdict}: {', '.join(pairs)}" for verdict, pairs in sorted(by_verdict.items())]
    if report["advice"]:
        lines += ["", "Advice, from what was measured here:", *(f"  {line}" for line in report["advice"])]
    environment = report["environment"]
    return [
        *lines,
        "",
        f"posenc {environment['posenc']}, torch {environment['torch']}, {environment['processor']}; "
        f"{report['minutes']:.1f} minutes; {' '.join(report['command'])}",
    ]


def _edges(report: dict[str, Any]) -> str:
    edges = [f"{c['a']} and {c['b']} on {c['task']} (p = {c['p_holm']:.3f})" for c in report["contrasts"] if c["edge"]]
    if not report["contrasts"]:
        return "No declared contrast could be tested."
    return f"Differences that survive Holm's correction: {'; '.join(edges) or 'none'}. Everything else is a tie."


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f}"


def _reach(cell: dict[str, Any]) -> str:
    reach = cell["below_90"]
    return f"{'<' if reach['reached'] else '≥'} {reach['ratio']:.2f} ×"
