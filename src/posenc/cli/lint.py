"""``posenc lint``"""

from __future__ import annotations

from pathlib import Path

import click

from posenc.cli.findings import exit_code, report_options, show


@click.command("lint")
@click.argument("config", type=click.Path(path_type=Path))
@report_options
@click.pass_context
def lint_config(ctx: click.Context, config: Path, as_json: bool, fail_on: str) -> None:
    """Find position keys that are unread, missing or in conflict in a model's CONFIG.

    CONFIG is a config.json or the folder that holds one. Nothing is downloaded, transformers is not needed, and no code
    of the model runs. Exits with 0 when nothing is as grave as --fail-on, with 1 when something is, with 2 when the file
    cannot be read.
    """
    from posenc.audit.configs import lint

    report = lint(config)
    show(report, json=as_json)
    ctx.exit(exit_code(report, fail_on))
