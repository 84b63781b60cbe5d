"""The README's Python runs, and what it says is here is here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import posenc
import posenc.convert
import posenc.hf
from posenc.attn.select import BACKENDS

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
SHOWN = re.findall(r"^```text\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_there_is_an_example():
    assert BLOCKS


def test_first_example_runs():
    names: dict[str, object] = {}
    exec(BLOCKS[0], names)
    assert tuple(names["logits"].shape) == (2, 16, 1000)
    assert tuple(names["more"].shape) == (2, 8)


def test_the_plan_that_is_shown_is_the_plan_that_is_printed(capsys):
    exec(BLOCKS[2], {})
    assert capsys.readouterr().out.strip() == SHOWN[1].strip()


def test_the_finding_that_is_shown_is_printed(capsys):
    pytest.importorskip("transformers")
    exec(BLOCKS[1], {})
    assert SHOWN[0].strip() in capsys.readouterr().out


def test_the_counts_of_the_audit_are_right():
    from tests.audit.bugs import gallery

    from posenc.audit import KINDS

    assert f"There are {len(KINDS)} kinds of findings" in README
    assert f"A gallery of {len(gallery())} seeded bugs" in README


def test_the_bias_in_a_loaded_model_runs():
    pytest.importorskip("transformers")
    exec(BLOCKS[3], {})


def test_every_encoding_and_backend_is_named():
    classes = {posenc.load_encoding(name).__name__ for name in posenc.CATALOG}
    for name in classes | {backend.name for backend in BACKENDS}:
        assert f"`{name}`" in README


def test_public_names_in_the_inventory_exist():
    inventory = README.partition("## What is here")[2].partition("\n## ")[0]
    for name in re.findall(r"`([A-Za-z]\w*)`", inventory):
        known = {*posenc.__all__, *posenc.hf.__all__, *posenc.convert.__all__, *(backend.name for backend in BACKENDS)}
        assert name in known, name


def test_links_inside_the_repository_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
