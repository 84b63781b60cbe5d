"""``posenc compare``"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
from rich.console import Console

PRESETS = ("quick", "standard", "full")


def _names(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    if value is None:
        return ()
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if not names:
        raise ValueError(
            f"compare: {option.opts[0]} {value!r}: no {str(option.name).removesuffix('s')} named. Expected names with commas "
            "between. Leave the option away for the preset's own."
        )
    return names


@click.command(name="compare")
@click.option("--preset", default="quick", show_default=True, help=f"One of {', '.join(PRESETS)}.")
@click.option("--rows", callback=_names, help="Encodings, with commas between: nope,alibi,rope-25.")
@click.option(
    "--tasks", callback=_names, help="Tasks, with commas between: copy-constant,copy-random,recall-lm,last-k,first-token,text."
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Train the text task on this file (UTF-8) instead of the Python standard library's sources; alone unless --tasks adds to it.",
)
@click.option(
    "--kind", default="decoder", show_default=True, help="The model: decoder, or encoder on tasks that it can be asked."
)
@click.option("--seeds", type=int, help="How many seeds.")
@click.option("--steps", type=int, help="Training steps of every task (rates are then chosen afresh).")
@click.option("--encoding", "own", multiple=True, metavar="MODULE:NAME", help="An encoding of yours as a row; runs your code.")
@click.option("--tune", is_flag=True, help="Choose learning rates afresh instead of taking the committed ones.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes of one thread each.  [default: one per core]")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("posenc-results"), show_default=True, help="Results folder."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write the curves as a picture (.png, .svg or .pdf)."
)
@click.option("--no-speed", is_flag=True, help="Skip the speed and memory table.")
@click.option("--dry-run", is_flag=True, help="List every trial and stop.")
def compare(
    preset: str,
    rows: tuple[str, ...],
    tasks: tuple[str, ...],
    text: Path | None,
    kind: str,
    seeds: int | None,
    steps: int | None,
    own: tuple[str, ...],
    tune: bool,
    workers: int | None,
    out: Path,
    as_json: bool,
    plot: Path | None,
    no_speed: bool,
    dry_run: bool,
) -> None:
    """Train the same small Transformer with each encoding and report what was measured.

    Every finished trial is kept in the results folder: an interrupted run goes on where it stopped.
    """
    from posenc.compare.display import ProgressDisplay, print_report
    from posenc.compare.plan import make_plan
    from posenc.compare.results import Results, check_file, write_file
    from posenc.compare.session import Agenda, Session

    sys.path.insert(0, os.getcwd())  # where --encoding module:NAME is looked for first
    if plot is not None:
        from posenc.plots.curves import check_picture_path

        check_picture_path(plot.with_suffix(plot.suffix.lower()))
        check_file(plot)
    for name in dict.fromkeys(name for name in (*rows, *own) if ":" in name):
        click.echo(f"importing and running your code: {name}", err=True)
    plan = make_plan(preset, rows=rows, tasks=tasks, seeds=seeds, steps=steps, extra_rows=own, kind=kind, text=text)
    agenda = Agenda(plan, tune=tune)
    display = ProgressDisplay(Console(stderr=True))
    if dry_run:
        click.echo("\n".join(agenda.lines()))
        return
    display.note(f"preset {preset}: {agenda.summary}")
    results = Results(out)
    check_file(out / "report.json")
    session = Session(agenda, results, display, workers=workers or os.cpu_count() or 1)
    report = session.run(["posenc", *sys.argv[1:]], speed=not no_speed)
    write_file(out / "report.json", json.dumps(report, indent=1) + "\n")
    if plot is not None:
        from posenc.plots.curves import curves_picture

        write_file(plot, curves_picture(report, plot.suffix[1:].lower()))
    if as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        print_report(report, Console())
    display.note(f"results: {out / 'report.json'}{f', picture: {plot}' if plot else ''}")
