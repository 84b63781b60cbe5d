"""``posenc list``: the catalogue."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posenc import __version__
from posenc.catalog import CATALOG, load_encoding
from posenc.core.sites import Encoding
from posenc.core.spec import Claim, EncodingSpec, Reference

SCHEMA = "posenc.list/1"


class Mark(NamedTuple):
    """How a claim is shown: a letter in the table, and what it means below."""

    letter: str
    meaning: str


MARKS: dict[Claim, Mark] = {
    "shift-invariant": Mark("S", "scores depend on the distance between tokens alone"),
    "norm-preserving": Mark("N", "queries and keys keep their norms"),
    "composes": Mark("C", "moving by m and then by n is moving by m + n"),
    "invertible": Mark("I", "the transform can be undone"),
    "monotone": Mark("M", "the bias never rises with distance into the past"),
    "toeplitz": Mark("T", "the bias is constant along diagonals"),
    "parameter-free": Mark("P", "nothing is learned"),
    "any-length": Mark("L", "defined past the trained length, well or badly"),
    "real-positions": Mark("R", "positions need not be integers"),
}
"""In the order of the table, where each has its own place, so that the eye can run down it."""


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}) instead of a table.")
def list_encodings(as_json: bool) -> None:
    """List the encodings: where they act, what they claim, their papers.

    What an encoding claims, the tests check: a claim is a property of the code, not a promise about trained models.
    """
    encodings = [load_encoding(name) for name in CATALOG]
    if as_json:
        click.echo(json.dumps(as_data(encodings), indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    console.print(as_table(encodings))
    console.print()
    console.print(_legend())


def as_data(encodings: list[type[Encoding]]) -> dict[str, Any]:
    """The catalogue as plain data; fields are added to it, never renamed, while the schema keeps its number."""
    return {
        "schema": SCHEMA,
        "posenc": __version__,
        "encodings": [
            {
                "name": encoding.spec.name,
                "class": f"{encoding.__module__}:{encoding.__qualname__}",
                "acts_on": encoding.acts_on,
                "summary": encoding.spec.summary,
                "claims": sorted(encoding.spec.claims),
                "references": [
                    {"authors": reference.authors, "title": reference.title, "arxiv": reference.arxiv}
                    for reference in encoding.spec.references
                ],
            }
            for encoding in encodings
        ],
    }


def as_table(encodings: list[type[Encoding]]) -> Table:
    """The catalogue to look at. The papers stand under the summary, so that 80 columns are enough."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("Name", style="bold cyan", no_wrap=True)
    table.add_column("Acts on", max_width=9)
    table.add_column("Claims", no_wrap=True)
    table.add_column("What it does, and where it comes from")
    for encoding in encodings:
        spec = encoding.spec
        about = Text("\n").join([Text(spec.summary), *map(_reference, spec.references)])
        table.add_row(Text(spec.name), Text(encoding.acts_on.removeprefix("the ")), _marks(spec), about)
    return table


def _marks(spec: EncodingSpec) -> Text:
    has = [(mark.letter, "green") if claim in spec.claims else ("·", "dim") for claim, mark in MARKS.items()]
    return Text.assemble(*has)


def _reference(reference: Reference) -> Text:
    link = f"link https://arxiv.org/abs/{reference.arxiv}"
    return Text.assemble(reference.authors, " ", (f"arXiv:{reference.arxiv}", link), style="dim")


def _legend() -> Table:
    legend = Table.grid(padding=(0, 2, 0, 0))
    for claim, mark in MARKS.items():
        legend.add_row(Text(f" {mark.letter}", "green"), Text(claim), Text(mark.meaning, "dim"))
    return legend
