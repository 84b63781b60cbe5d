"""``posenc list``: a table that fits 80 columns, and JSON that keeps its promise."""

from __future__ import annotations

import json
from typing import get_args

import jsonschema
import pytest
from click.testing import CliRunner

from posenc import CATALOG, __version__, load_encoding
from posenc.cli.list import MARKS
from posenc.cli.main import main
from posenc.core.spec import Claim

TEXT = {"type": "string", "minLength": 1}
REFERENCE = {
    "type": "object",
    "required": ["authors", "title", "arxiv"],
    "properties": {"authors": TEXT, "title": TEXT, "arxiv": {"type": "string", "pattern": r"^\d{4}\.\d{4,5}$"}},
}
ENCODING = {
    "type": "object",
    "required": ["name", "class", "acts_on", "summary", "claims", "references"],
    "properties": {
        "name": TEXT,
        "class": {"type": "string", "pattern": r"^[\w.]+:\w+$"},
        "acts_on": TEXT,
        "summary": TEXT,
        "claims": {"type": "array", "items": {"enum": list(get_args(Claim))}, "uniqueItems": True},
        "references": {"type": "array", "items": REFERENCE},
    },
}
SCHEMA = {
    "type": "object",
    "required": ["schema", "posenc", "encodings"],
    "properties": {"schema": {"const": "posenc.list/1"}, "posenc": TEXT, "encodings": {"type": "array", "items": ENCODING}},
}


def run_list(*options: str, **env: str) -> str:
    result = CliRunner().invoke(main, ["list", *options], env={"COLUMNS": "80", **env})
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_json_keeps_its_schema():
    data = json.loads(run_list("--json"))
    jsonschema.validate(data, SCHEMA)
    assert data["posenc"] == __version__
    assert [encoding["name"] for encoding in data["encodings"]] == list(CATALOG)


def test_json_names_the_classes():
    for encoding in json.loads(run_list("--json"))["encodings"]:
        assert encoding["class"] == CATALOG[encoding["name"]]
        assert set(encoding["claims"]) == load_encoding(encoding["name"]).spec.claims


@pytest.mark.parametrize("width", ["80", "120"])
def test_table_fits_and_cuts_nothing_off(width):
    table = run_list(COLUMNS=width)
    assert max(map(len, table.splitlines())) <= int(width)
    assert "…" not in table
    for name in CATALOG:
        assert f" {name} " in table
        for reference in load_encoding(name).spec.references:
            assert reference.authors in table
            assert f"arXiv:{reference.arxiv}" in table


def test_every_claim_has_a_mark_of_its_own_and_a_meaning():
    assert set(MARKS) == set(get_args(Claim))
    assert len({mark.letter for mark in MARKS.values()}) == len(MARKS)
    table = run_list()
    for claim, mark in MARKS.items():
        assert f" {mark.letter}  {claim}" in table
        assert mark.meaning in table


def test_marks_of_one_encoding():
    row = next(line for line in run_list().splitlines() if line.startswith(" alibi "))
    assert "S···MTPLR" in row


def test_no_color_is_respected():
    green = "\x1b[32m"
    assert green in run_list(FORCE_COLOR="1", TERM="xterm-256color", COLORTERM="", NO_COLOR="")
    assert green not in run_list(FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1")
    assert "\x1b" not in run_list()
