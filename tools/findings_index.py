"""Write docs/findings/README.md: every kind of finding with its page.

python tools/findings_index.py
"""

from __future__ import annotations

from pathlib import Path

from posenc.audit.kinds import AREAS

INDEX = Path(__file__).parents[1] / "docs" / "findings" / "README.md"
TITLES = {
    "frequencies": "Frequencies and amplitude",
    "rotary": "Rotary functions",
    "tables": "Tables of position codes",
    "biases": "Biases on the scores",
    "parts": "Parts of a live model",
    "behaviour": "What a model does",
    "attention": "Attention",
    "configs": "Configurations",
}
HEAD = """# Findings

What `posenc audit`, `posenc lint` and the probes of `posenc.audit` can find, one page each: the wrong thing, how it looks, the
mend. `error`: wrong now. `warning`: wrong for some inputs, or likely to be. `note`: worth knowing. A check may grade a single
finding otherwise.
"""


def index() -> str:
    """The page."""
    parts = [HEAD]
    for area, kinds in AREAS.items():
        lines = [f"| [{kind.id}]({kind.id}.md) | {kind.severity} | {kind.title} |" for kind in kinds]
        parts.append("\n".join([f"## {TITLES[area]}", "", "| | | |", "|---|---|---|", *lines, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    INDEX.write_text(index(), encoding="utf-8")
