"""The pages that tell what was measured, against the files that hold it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PAGE = (RESULTS / "README.md").read_text(encoding="utf-8")


def rows(name: str) -> list[str]:
    """The table of a benchmark's targets, as the page has it."""
    targets = json.loads((RESULTS / name).read_text(encoding="utf-8"))["targets"]
    return [
        f"| {t['section']} | {t['contestant']} / {t['reference']} | {t['at_most']:.3g} | {t['measured']:.3g} | {'met' if t['met'] else '**missed**'} |"
        for t in targets
    ]


def section(name: str) -> str:
    return PAGE.split(f"## `{name}`\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", ["rotary.json", "attention.json"])
def test_the_tables_of_targets_are_those_of_the_files(name):
    body = [line for line in section(name).splitlines() if line.startswith("|")][2:]
    assert body == rows(name)


@pytest.mark.parametrize("name", ["rotary.json", "attention.json"])
def test_the_command_is_the_one_that_made_the_file(name):
    written = json.loads((RESULTS / name).read_text(encoding="utf-8"))["command"]
    assert f"`{written}`" in section(name)


def test_every_file_that_the_page_names_is_there():
    named = set(re.findall(r"`([\w-]+\.json)`", PAGE))
    assert named
    assert {name for name in named if not (RESULTS / name).exists()} == set()
    assert {path.name for path in RESULTS.glob("*.json")} - named == set()
