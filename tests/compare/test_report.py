"""From records to a report: gate, bands, literature, schema, tables, pictures."""

from __future__ import annotations

import copy
import io
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from posenc.compare.display import ProgressDisplay, print_report
from posenc.compare.plan import PRESETS, make_plan
from posenc.compare.rates import choose, committed
from posenc.compare.report import make_report
from posenc.compare.rows import DECLARED
from posenc.compare.tasks.registry import TASKS
from posenc.plots.curves import curves_picture

SCHEMA = json.loads((files("posenc.compare") / "report.schema.json").read_text())
RATE = {"rate": 1e-3, "losses": {"0.001": 0.5}}


def record(row: str, seed: int, past: float | None, in_range: float = 1.0) -> dict[str, Any]:
    probes = [
        {
            "measure": "exact match", "size": n, "ratio": n / 16, "items": 16,
            "value": in_range if n <= 16 else past, "error": None if n <= 16 or past is not None else "no rows elsewhere",
        }
        for n in range(1, 33)
    ]  # fmt: skip
    return {
        "key": f"{row}{seed}", "row": row, "task": "copy-constant", "seed": seed, "steps": 1500, "probes": probes,
        "steps_to_fit": 300, "validation_loss": 0.01, "parameters": 100, "encoding_parameters": 0, "train_seconds": 1.0,
    }  # fmt: skip


def report_of(past: dict[str, list[float | None]], in_range: dict[str, float] | None = None, preset: str = "standard") -> dict:
    seeds = len(next(iter(past.values())))
    plan = make_plan(preset, rows=list(past), tasks=["copy-constant"], seeds=seeds)
    records = {
        (row, "copy-constant"): [record(row, s + 1, v, (in_range or {}).get(row, 1.0)) for s, v in enumerate(values)]
        for row, values in past.items()
    }
    rates = dict.fromkeys(records, RATE)
    speed = [
        {"row": row, "implementation": "sdpa", "seconds": 0.1, "ratio": 1.0, "peak_bytes": 1, "memory_ratio": 1.0}
        for row in past
    ]
    return make_report(plan, records, rates, speed, ["posenc", "compare"], 1.0)


FIVE = {"nope": [0.99, 1.0, 1.0, 0.98, 1.0], "alibi": [0.5, 0.4, 0.6, 0.3, 0.2], "rope": [0.0] * 5, "learned": [None] * 5}


def test_a_report_fits_its_schema_and_is_plain_json():
    report = json.loads(json.dumps(report_of(FIVE), allow_nan=False))
    jsonschema.validate(report, SCHEMA)


@pytest.mark.parametrize("damage", ["cells", "environment", "schema", "literature"])
def test_the_schema_can_fail(damage):
    report = report_of(FIVE)
    del report[damage]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, SCHEMA)
    broken = copy.deepcopy(report_of(FIVE))
    broken["cells"][0]["primary"] = "high"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_the_gate_and_the_undefined():
    report = report_of(FIVE | {"sinusoidal": [0.0] * 5}, {"sinusoidal": 0.94})
    by_row = {cell["row"]: cell for cell in report["cells"]}
    assert by_row["nope"]["fit"]
    assert not by_row["sinusoidal"]["fit"]
    assert by_row["learned"]["fit"]
    assert by_row["learned"]["primary"] is None
    assert by_row["learned"]["undefined"] == "no rows elsewhere"
    verdicts = {(p["better"], p["worse"]): p["verdict"] for p in report["literature"][0]["pairs"]}
    assert verdicts["nope", "alibi"] == "agrees"
    assert verdicts["alibi", "sinusoidal"] == "cannot say: did not fit"


def test_edges_need_seeds():
    five = {(c["a"], c["b"]): c["edge"] for c in report_of(FIVE)["contrasts"]}
    assert five["nope", "alibi"]
    assert five["alibi", "rope"]
    three = report_of({row: values[:3] for row, values in FIVE.items()})
    assert not any(c["edge"] for c in three["contrasts"]), "three seeds a side can never support one"


def test_a_disagreement_is_said_and_advised():
    report = report_of({"nope": [0.1], "alibi": [0.9]})
    assert report["literature"][0]["pairs"] == [{"better": "nope", "worse": "alibi", "verdict": "disagrees"}]
    assert any("disagrees with the literature on nope > alibi" in line for line in report["advice"])
    assert any("ALiBi holds best" in line for line in report["advice"])
    assert report_of({"nope": [0.1], "alibi": [0.9]}, preset="quick")["advice"] == []


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal(width):
    text = io.StringIO()
    report = report_of(FIVE | {"sinusoidal": [0.0] * 5, "sinusoidal-randomized": [0.1] * 5}, {"sinusoidal": 0.5})
    print_report(report, Console(file=text, width=width))
    out = text.getvalue()
    assert "…" not in out, "nothing is cut"
    assert "no fit" in out
    assert "undef." in out
    assert "Sinusoidal, randomised" in out
    one = io.StringIO()
    print_report(report_of({"nope": [1.0]}, preset="quick"), Console(file=one, width=width))
    assert "One seed ranks nothing" in one.getvalue()


def test_progress_keeps_its_bar_on_a_narrow_terminal():
    text = io.StringIO()
    display = ProgressDisplay(Console(file=text, width=80, force_terminal=True, color_system=None))
    display.begin("raising the budget of what did not fit", 10)
    display.advance(5, "[b]5[/b]/24 trials, last sinusoidal-randomized on copy-constant, seed 5")
    display.end()
    last = [line.split("\r")[-1] for line in text.getvalue().splitlines()]
    assert any("[b]5[/b]/24 trials" in line and "…" in line for line in last)
    assert any(re.search(r"━{20,}.* 50 % 0:00:0\d, .* left", line) for line in last)


def test_a_band_past_four_times_is_shown_where_it_holds_values():
    def shown(past: float | None) -> str:
        report = report_of({"nope": [1.0]}, preset="quick")
        report["cells"][0]["bands"]["(4, 8]"] = past
        text = io.StringIO()
        print_report(report, Console(file=text, width=80))
        return text.getvalue()

    assert "to 8 ×" in shown(0.5)
    assert "to 8 ×" not in shown(None)


def test_markup_in_names_is_shown_not_obeyed():
    report = report_of({"nope": [1.0]}, preset="quick")
    report["cells"][0]["label"] = "[bold]x[/bold]"
    text = io.StringIO()
    print_report(report, Console(file=text, width=100))
    assert "[bold]x[/bold]" in text.getvalue()


@pytest.mark.parametrize(("kind", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures(kind, magic):
    assert curves_picture(report_of(FIVE), kind).startswith(magic)


def test_presets_are_as_declared():
    assert set(PRESETS) == {"quick", "standard", "full"}
    assert PRESETS["quick"].seeds == 1
    assert PRESETS["standard"].seeds == 5
    assert len(PRESETS["standard"].contrasts) <= 6, "five seeds support at most six contrasts"
    assert PRESETS["full"].seeds >= 7
    assert len(PRESETS["full"].contrasts) == len(DECLARED) * (len(DECLARED) - 1) // 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "slow"}, "no preset 'slow'.*quick"),
        ({"preset": "quick", "rows": ["x"]}, "no encoding 'x'"),
        ({"preset": "quick", "tasks": ["x"]}, "no task 'x'"),
        ({"preset": "quick", "seeds": 0}, "--seeds 0"),
        ({"preset": "quick", "steps": -1}, "--steps -1"),
    ],
)
def test_bad_plans(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_plan(**arguments)


def test_committed_rates_cover_the_quick_preset_and_follow_the_rule():
    rates = committed()
    assert "posenc compare" in rates["command"]
    for row in DECLARED:
        entry = rates["rates"]["copy-constant"][row]
        assert f"{entry['rate']:g}" == min(entry["losses"], key=entry["losses"].__getitem__)
    assert set(rates["rates"]) <= set(TASKS)


def test_the_rate_of_least_mean_loss_is_chosen():
    records = [{"learning_rate": r, "validation_loss": v} for r, v in [(1e-3, 0.5), (1e-3, 0.1), (3e-3, 0.4), (3e-4, 0.9)]]
    assert choose(records) == {"rate": 1e-3, "losses": {"0.0003": 0.9, "0.001": 0.3, "0.003": 0.4}}


DOCS = Path(__file__).parents[2] / "docs" / "results"


REPORTS = [path for path in sorted(DOCS.glob("*.json")) if json.loads(path.read_text()).get("schema") == "posenc.compare/1"]


def test_there_are_committed_reports():
    assert {"quick", "copy-constant-three-seeds"} <= {path.stem for path in REPORTS}


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_committed_reports_fit_the_schema(path):
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)


def test_the_table_of_three_seeds_is_what_was_measured():
    report = json.loads((DOCS / "copy-constant-three-seeds.json").read_text())
    names = {"nope": "NoPE", "rope-25": "RoPE, 25 % of each head", "alibi": "ALiBi", "t5": "T5 bias", "rope": "RoPE"}
    page = (DOCS / "README.md").read_text()
    for cell in report["cells"]:
        shown = [cell["in_range"], *(cell["bands"][band] for band in ("(1, 1.25]", "(1.25, 1.5]", "(1.5, 2]"))]
        assert f"| {names[cell['row']]} | " + " | ".join(f"{value:.2f}" for value in shown) + " |" in page
    past = {cell["row"]: cell["bands"]["(1, 1.25]"] for cell in report["cells"]}
    assert past["nope"] > past["alibi"] > past["rope"]
