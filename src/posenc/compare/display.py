"""Progress on stderr, and the report as tables."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


class _Times(ProgressColumn):
    """``0:00:12, 0:01:30 left``"""

    def render(self, task: Task) -> Text:
        return Text.assemble(TimeElapsedColumn().render(task), ", ", TimeRemainingColumn().render(task), " left")


class _TwoLines(Progress):
    """What is being done, cut to the width of the terminal, above a bar that so keeps its room."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            yield Text(task.description, no_wrap=True, overflow="ellipsis")
        yield self.make_tasks_table(self.tasks)


class ProgressDisplay:
    """Bars on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._title = ""

    def note(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def begin(self, title: str, total: int) -> None:
        if not self._console.is_terminal:
            self.note(f"{title} …")
            return
        columns = BarColumn(), TextColumn("{task.percentage:>3.0f} %"), _Times()
        self._progress = _TwoLines(*columns, console=self._console, transient=True)
        self._progress.start()
        self._title = title
        self._task = self._progress.add_task(title, total=total)

    def advance(self, done: int, text: str = "") -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done)
            if text:
                self._progress.update(self._task, description=f"{self._title}: {text}")
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
        _print_table(console, *_task_table(task, cells))
        if len(cells[0]["seeds"]) > 1:
            _print_table(console, *_seeds_table(task, cells))
        if any(curve["measure"] == "recall" for curve in cells[0]["curves"]):
            _print_table(console, *_recall_table(task, cells))
    if report["over_tasks"]:
        _print_table(console, *_over_tasks_table(report))
    if report["speed"]:
        _print_table(console, *_speed_table(report))
    for text in _remarks(report):
        indent = " " * (len(text) - len(text.lstrip()))
        lines = wrap(text, console.width, subsequent_indent=indent + "  ") or [""]
        console.print(escape("\n".join(lines)), highlight=False)


def _print_table(console: Console, title: str, table: Table, caption: str) -> None:
    console.print(f"[bold]{escape(title)}[/bold]", highlight=False)
    console.print(table)
    console.print(f"[dim]{escape(caption)}[/dim]\n", highlight=False)


def _columns(names: list[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("encoding", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _task_table(task: dict[str, Any], cells: list[dict[str, Any]]) -> tuple[str, Table, str]:
    exact = task["measure"] == "exact match"
    bands = [name for name in cells[0]["bands"] if name != "(0, 1]" and any(c["bands"][name] is not None for c in cells)]
    table = _columns(["in range", *map(_up_to, bands), *(["≥ 0.9 to"] if exact else []), "params"])
    for cell in cells:
        values = [_number(cell["bands"][band]) if cell["fit"] else "no fit" for band in bands]
        if exact:
            values.append(_reach(cell) if cell["fit"] else "")
        raised = " ×2" if cell["steps"] > task["steps"] else ""
        name = escape(cell["label"] + raised)
        style = None if cell["fit"] else "dim"
        table.add_row(name, _number(cell["in_range"]), *values, f"{cell['encoding_parameters']:,}", style=style)
    better = "higher is better" if exact else "nats, lower is better"
    caption = (
        f"{task['measure']} ({better}); bands up to multiples of the trained {task['trained_size']}; {task['steps']} steps"
    )
    if corpus := task.get("corpus"):
        caption += f"\n{corpus['source']}, {corpus['bytes']:,} bytes, sha256 {corpus['sha256'][:16]}…"
    if not all(cell["fit"] for cell in cells):
        caption += f"\nno fit: {'below 0.95' if exact else 'over 0.05 nats behind the best'} in range, so it takes no rank"
    if any(cell["steps"] > task["steps"] for cell in cells):
        caption += "\n×2: trained for twice the steps, since it did not fit before"
    return f"{task['name']}: {task['summary']}", table, caption


def _seeds_table(task: dict[str, Any], cells: list[dict[str, Any]]) -> tuple[str, Table, str]:
    """What ranks are taken by: best first, those that take none left out."""
    table = _columns(["mean", "95 %", *(str(seed) for seed in cells[0]["seeds"])])
    ranked = [cell for cell in cells if cell["fit"] and cell["primary"] is not None]
    for cell in sorted(ranked, key=lambda cell: cell["primary"], reverse=cells[0]["higher_is_better"]):
        interval = "–".join(_number(bound) for bound in cell["interval"])
        table.add_row(escape(cell["label"]), _number(cell["primary"]), interval, *map(_number, cell["primary_per_seed"]))
    items = max(curve["items"] for curve in cells[0]["curves"] if curve["measure"] == task["measure"])
    caption = f"95 %: by drawing seeds, then their items ({items} a length), again; the numbers are seeds"
    return f"{task['name']}: mean over (1, 1.5] ×, by seed", table, caption


def _recall_table(task: dict[str, Any], cells: list[dict[str, Any]]) -> tuple[str, Table, str]:
    lags = [curve["size"] for curve in cells[0]["curves"] if curve["measure"] == "recall"]
    table = _columns([str(lag) for lag in lags])
    for cell in cells:
        recalled = [curve["values"] for curve in cell["curves"] if curve["measure"] == "recall"]
        table.add_row(escape(cell["label"]), *(_number(None if None in v else sum(v) / len(v)) for v in recalled))
    guesses = [curve.get("guess") for curve in cells[0]["curves"] if curve["measure"] == "recall"]
    if None not in guesses:
        table.add_row("guessing", *map(_number, guesses), style="dim")
    caption = (
        f"share recalled, by tokens since it was shown; guessing: among the values shown; trained up to {task['trained_size']}"
    )
    return "recall of a planted value", table, caption


def _over_tasks_table(report: dict[str, Any]) -> tuple[str, Table, str]:
    labels = {cell["row"]: cell["label"] for cell in report["cells"]}
    table = _columns(["interquartile mean"])
    for line in report["over_tasks"]:
        value = line["interquartile_mean"]
        table.add_row(escape(labels[line["row"]]), "no rank" if value is None else f"{value:.2f}")
    caption = f"of the mean over (1, 1.5] ×, over the seeds of {' and '.join(report['over_tasks'][0]['tasks'])}"
    return "over tasks", table, f"{caption}; no rank: undefined, or did not fit one"


def _speed_table(report: dict[str, Any]) -> tuple[str, Table, str]:
    table = _columns(["time", "peak memory", "attention"])
    labels = {cell["row"]: cell["label"] for cell in report["cells"]}
    for line in report["speed"]:
        ratios = f"{line['ratio']:.2f}", f"{line['memory_ratio']:.2f}"
        table.add_row(escape(labels[line["row"]]), *ratios, line["implementation"])
    threads = report["environment"]["threads"]
    caption = f"forward and backward of this model on 4 × 512 tokens, {threads} threads, median of 20, measured alone"
    return "speed and memory as ratios to NoPE", table, caption


def _remarks(report: dict[str, Any]) -> list[str]:
    seeds = len(report["protocol"]["seeds"])
    lines = [
        "One seed ranks nothing: read differences as hints, and use --preset standard for tests over seeds."
        if seeds == 1
        else f"Means over {seeds} seeds. {_edges(report)}"
    ]
    lines += [f"  {line['task']}: {_shown_tiers(line['tiers'])}" for line in report["tiers"] if seeds > 1 and line["tiers"]]
    if undefined := sorted({cell["label"] for cell in report["cells"] if cell["undefined"]}):
        lines.append(f"undef.: {', '.join(undefined)} has no code past the trained length, and says so.")
    if report["anchors"]:
        lines += ["", "Self-check, against what the literature lets one expect:", *map(_anchor, report["anchors"])]
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
    edges = [f"{_shown_edge(c, report)} on {c['task']} (p = {c['p_holm']:.3f})" for c in report["contrasts"] if c["edge"]]
    if not report["contrasts"]:
        return "No declared contrast could be tested."
    return f"Differences that survive Holm's correction: {'; '.join(edges) or 'none'}. Everything else is a tie."


def _shown_edge(contrast: dict[str, Any], report: dict[str, Any]) -> str:
    """The better row of a contrast first, with the chance that one of its seeds is the better one."""
    pair = {contrast["a"], contrast["b"]}
    found = next(s for s in report["superiority"] if s["task"] == contrast["task"] and {s["a"], s["b"]} == pair)
    return f"{found['a']} > {found['b']} in {found['probability']:.0%} of pairs of seeds"


def _shown_tiers(tiers: list[list[str]]) -> str:
    return "tiers " + " > ".join("{" + ", ".join(tier) + "}" for tier in tiers)


def _anchor(anchor: dict[str, Any]) -> str:
    numbers = ", ".join(f"{name} {_measured(value)}" for name, value in anchor["measured"].items())
    verdict = "fails: disagrees with the literature" if anchor["verdict"] == "fails" else anchor["verdict"]
    why = f" ({anchor['why']})" if anchor["why"] else ""
    return f"  {anchor['anchor']}. {verdict}{why}: {anchor['expected']}. Measured: {numbers or 'nothing'}."


def _measured(value: float | int | None) -> str:
    return "–" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"


def _up_to(band: str) -> str:
    return f"{band.split(', ')[1].rstrip(']')} ×"


def _number(value: float | None) -> str:
    return "undef." if value is None else f"{value:.2f}"


def _reach(cell: dict[str, Any]) -> str:
    reach = cell["holds_90"]
    return f"{reach['ratio']:.2f} ×" if reach["reached"] else f"≥ {reach['ratio']:.2f} ×"
