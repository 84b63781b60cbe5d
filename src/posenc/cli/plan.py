"""``posenc plan``"""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("plan")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--to-config", "version", type=click.Choice(["4", "5"]), help="Print the config in this transformers version's keys."
)
def plan_config(config: Path, version: str | None) -> None:
    """Say what a model's CONFIG does with positions, layer by layer.

    CONFIG is a config.json or the folder that holds one. Nothing is downloaded, transformers is not needed, and no code
    of the model runs.
    """
    from posenc.cli.main import printable
    from posenc.hf import plan

    found = plan(config)
    if version is not None:
        click.echo(json.dumps(found.to_config(int(version)), indent=2, ensure_ascii=False))
        return
    click.echo(printable(str(found)))
