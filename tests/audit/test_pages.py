"""Every kind of finding has a page, and every page a kind."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from posenc.audit import KINDS
from posenc.audit.kinds import AREAS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "findings"


def test_no_id_is_used_twice():
    assert len(KINDS) == sum(len(kinds) for kinds in AREAS.values())


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.id)
def test_a_kind_has_a_page_with_the_wrong_thing_how_it_looks_and_the_mend(kind):
    text = (ROOT / kind.page).read_text(encoding="utf-8")
    assert text.startswith("# ")
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[:3] == ["## The wrong thing", "## How it looks", "## The mend"]


def test_a_page_has_a_kind_and_the_index_is_up_to_date():
    assert {path.stem for path in PAGES.glob("*.md")} == {*KINDS, "README"}
    spec = importlib.util.spec_from_file_location("findings_index", ROOT / "tools" / "findings_index.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (PAGES / "README.md").read_text(encoding="utf-8") == module.index(), "run python tools/findings_index.py"


def test_what_the_audit_page_shows_runs(capsys):
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "audit.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    probe, readings = (block for block in blocks if "model" not in block)
    exec(probe, {})
    assert "[rotary-precision]" in capsys.readouterr().out
    exec(readings, {})
    assert capsys.readouterr().out.startswith("base 500,000, Llama 3 ×8 from 8,192")
