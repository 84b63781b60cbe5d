"""A report on a terminal or as JSON, and the exit code that it comes to."""

from __future__ import annotations

import json as json_format
import shutil
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

import click

from posenc.audit.findings import SEVERITIES, Finding, Report, Severity
from posenc.cli.main import printable

COLUMNS = 100
COLOURS: dict[Severity, str] = {"error": "red", "warning": "yellow", "note": "cyan"}
Command = TypeVar("Command", bound=Callable[..., Any])


def report_options(command: Command) -> Command:
    """``--json`` and ``--fail-on``, as the arguments ``as_json`` and ``fail_on``."""
    command = click.option(
        "--fail-on",
        type=click.Choice([*SEVERITIES, "never"]),
        default="warning",
        show_default=True,
        help="Exit with 1 when a finding is as grave as this, or graver.",
    )(command)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(command)


def exit_code(report: Report, fail_on: str) -> int:
    """1 when a finding is as grave as ``fail_on``, 0 when none is or it is ``"never"``."""
    return int(fail_on in SEVERITIES and bool(report.at_least(fail_on)))


def show(report: Report, *, json: bool = False) -> None:
    """Print a report; names from outside cannot steer the terminal, and colours appear on a terminal only."""
    if json:
        click.echo("".join(c if c.isprintable() or c == "\n" else json_format.dumps(c)[1:-1] for c in report.to_json()))
        return
    columns = max(40, min(COLUMNS, shutil.get_terminal_size((COLUMNS, 24)).columns))
    click.echo(click.style(printable(report.subject), bold=True))
    for line in report.described:
        click.echo(_wrapped("  ", line, columns, hang="    "))
    click.echo(f"  {_counted(report)}")
    for finding in report.findings:
        click.echo()
        _show(finding, columns)
    for name, reason in report.skipped.items():
        click.echo(_wrapped("  ", f"skipped {name}: {reason}", columns, hang="    "))


def _show(finding: Finding, columns: int) -> None:
    severity = click.style(finding.severity, fg=COLOURS[finding.severity], bold=True)
    click.echo(f"{severity}: {click.style(finding.kind.title, bold=True)} [{finding.id}]")
    facts = [("where", finding.where), ("measured", finding.measured), ("expected", finding.expected)]
    if finding.severity != "note":
        facts += [("why", finding.kind.why), ("mend", finding.mend)]
    for title, text in [*facts, ("see", finding.kind.page)]:
        click.echo(_wrapped(f"  {title:<10}", text, columns))


def _counted(report: Report) -> str:
    counts = {severity: len([f for f in report.findings if f.severity == severity]) for severity in reversed(SEVERITIES)}
    said = [f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts.items() if count]
    return f"{', '.join(said) or 'nothing found'}; {len(report.checked)} checks" + (
        f", {len(report.skipped)} skipped" if report.skipped else ""
    )


def _wrapped(lead: str, text: str, columns: int, hang: str | None = None) -> str:
    indent = " " * len(lead) if hang is None else hang
    lines = textwrap.wrap(printable(text), columns, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines) or lead.rstrip()
