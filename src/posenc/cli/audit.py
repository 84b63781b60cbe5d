"""``posenc audit``"""

from __future__ import annotations

import os
import sys

import click

from posenc.cli.findings import exit_code, report_options, show


@click.command("audit")
@click.argument("target", metavar="PATH|MODULE:NAME")
@report_options
@click.pass_context
def audit_model(ctx: click.Context, target: str, fail_on: str, as_json: bool) -> None:
    """Look for silent position bugs in a model.

    PATH is a model's folder as save_pretrained writes it, loaded by the installed transformers without running any code
    from it; pickled weights are refused. MODULE:NAME is a torch module of yours, or a function without arguments that
    returns one: it is imported and run.

    The exit code is 1 if something at or above --fail-on was found, 2 if the model cannot be looked at.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from posenc.audit import Report, audit
    from posenc.audit.behaviour.runner import RAISES
    from posenc.audit.loading import load_model
    from posenc.cli.main import printable

    if ":" in target and not os.path.exists(target):
        sys.path.insert(0, os.getcwd())
        click.echo(f"importing and running your code: {printable(target)}", err=True)
    columns = (TextColumn("[progress.description]{task.description}"), BarColumn(pulse_style="cyan"), TimeElapsedColumn())
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        bar = progress.add_task("loading", total=None)
        loaded = load_model(target)
        found = audit(
            loaded.model,
            behaviour="run" if loaded.runs else "skip",
            progress=lambda text: progress.update(bar, description=printable(text)),
        )
    report = Report.of(loaded.subject, described=loaded.notes) + found
    show(report, json=as_json)
    reason = report.skipped.get("behaviour", "")
    if reason.startswith(RAISES):
        raise ValueError(
            f"audit: {target!r}: {reason}. Expected a forward that takes ids, [batch, seq], and answers a row for each. Only its "
            "tables were read; run it on your own inputs first."
        )
    ctx.exit(exit_code(report, fail_on))
