"""From records to a report: gate, bands, literature, schema, tables, pictures."""

from __future__ import annotations

import copy
import io
import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from posenc.compare import session
from posenc.compare.display import ProgressDisplay, print_report
from posenc.compare.plan import EXTRA_SEEDS, PRESETS, Plan, make_plan
from posenc.compare.rates import GRID, TUNING_SEEDS, choose, committed, committed_rate
from posenc.compare.report import make_report
from posenc.compare.results import Results
from posenc.compare.rows import DECLARED, find_row, known_rows
from posenc.compare.session import Agenda, Session
from posenc.compare.tasks import lookup
from posenc.compare.tasks import text as text_task
from posenc.compare.tasks.registry import TASKS
from posenc.compare.trial import Cell, model_shape
from posenc.plots.curves import curves_picture

SCHEMA = json.loads((files("posenc.compare") / "report.schema.json").read_text())
RATE = {"rate": 1e-3, "losses": {"0.001": 0.5}}


def record(row: str, seed: int, past: float | None, in_range: float = 1.0) -> dict[str, Any]:
    probes = [
        {
            "measure": "exact match", "size": n, "ratio": n / 16, "items": 16,
            "value": in_range if n <= 16 else past, "spread": 0.1, "error": None if n <= 16 or past is not None else "no rows elsewhere",
            "guess": None,
        }
        for n in range(1, 33)
    ]  # fmt: skip
    return {
        "key": f"{row}{seed}", "row": row, "task": "copy-constant", "seed": seed, "steps": 1500, "probes": probes,
        "kind": "decoder", "corpus": "", "steps_to_fit": 300, "validation_loss": 0.01, "parameters": 100, "encoding_parameters": 0, "train_seconds": 1.0,
    }  # fmt: skip


def report_of(past: dict[str, list[float | None]], in_range: dict[str, float] | None = None, preset: str = "standard") -> dict:
    """A report on copy-constant."""
    return copy.deepcopy(_made(json.dumps([past, in_range, preset])))


@cache
def _made(settings: str) -> dict[str, Any]:
    past, in_range, preset = json.loads(settings)
    seeds = len(next(iter(past.values())))
    plan = make_plan(preset, rows=list(past), tasks=["copy-constant"], seeds=seeds)
    records = {
        Cell(row, "copy-constant"): [record(row, s + 1, v, (in_range or {}).get(row, 1.0)) for s, v in enumerate(values)]
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


def test_every_field_of_the_schema_is_in_a_new_report():
    report = report_of(FIVE)
    assert set(report) == set(SCHEMA["properties"]), "only earlier reports may lack what was added"
    assert set(report["cells"][0]) == set(SCHEMA["$defs"]["cell"]["properties"])


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
    report = report_of(FIVE)
    assert report["tiers"] == [{"task": "copy-constant", "tiers": [["nope"], ["alibi"], ["rope"]]}], "no code, no rank"
    beaten = {(s["a"], s["b"]): s["probability"] for s in report["superiority"]}
    assert beaten == {("nope", "alibi"): 1.0, ("nope", "rope"): 1.0, ("alibi", "rope"): 1.0}
    intervals = {cell["row"]: cell["interval"] for cell in report["cells"]}
    assert intervals["learned"] is None
    assert intervals["rope"] == [0.0, 0.0]
    assert 0.2 < intervals["alibi"][0] < 0.4 < intervals["alibi"][1] < 0.6
    three = report_of({row: values[:3] for row, values in FIVE.items()})
    assert three["tiers"][0]["tiers"] == [["nope", "alibi", "rope"]]
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
    said = " ".join(out.split())
    assert "tiers {nope} > {alibi, sinusoidal-randomized, rope}" in said
    assert "nope > alibi in 100% of pairs of seeds on copy-constant (p = 0.0" in said
    assert "1. holds: a learned table has no value past its trained length. Measured: tests past" in said
    assert "4. cannot say (rope-25 on copy-constant was not trained)" in said
    one = io.StringIO()
    print_report(report_of({"nope": [1.0]}, preset="quick"), Console(file=one, width=width))
    assert "One seed ranks nothing" in one.getvalue()


def test_progress_keeps_its_bar_on_a_narrow_terminal():
    text = io.StringIO()
    display = ProgressDisplay(Console(file=text, width=80, force_terminal=True, color_system=None))
    display.begin("raising the budget of what nearly fits", 10)
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

    assert " 8 ×" in shown(0.5)
    assert " 8 ×" not in shown(None)


def test_markup_in_names_is_shown_not_obeyed():
    report = report_of({"nope": [1.0]}, preset="quick")
    report["cells"][0]["label"] = "[bold]x[/bold]"
    text = io.StringIO()
    print_report(report, Console(file=text, width=100))
    assert "[bold]x[/bold]" in text.getvalue()


@pytest.mark.parametrize(("kind", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures(kind, magic):
    assert curves_picture(report_of(FIVE), kind).startswith(magic)


def test_a_failed_anchor_is_printed_as_a_disagreement():
    text = io.StringIO()
    print_report(report_of({"nope": [0.1], "alibi": [0.9], "rope-25": [0.5]}), Console(file=text, width=100))
    assert "4. fails: disagrees with the literature: copy-constant in (1, 1.5]" in " ".join(text.getvalue().split())


def test_over_tasks_takes_the_rows_that_fit_all_of_them():
    plan = make_plan("standard", rows=["nope", "alibi"], tasks=["copy-constant", "copy-random", "recall-lm"], seeds=1)
    past = {("nope", "copy-constant"): 0.8, ("nope", "copy-random"): 0.4, ("alibi", "copy-constant"): 0.5}
    records = {
        cell: [record(cell.row, 1, past.get(cell[:2], 0.1), 0.5 if cell[:2] == ("alibi", "copy-random") else 1.0)]
        for cell in plan.cells
        if cell.task != "recall-lm"
    }
    losses = record("nope", 1, 1.0)
    for probe in losses["probes"]:
        probe["measure"] = "suffix loss"
    records |= {cell: [losses] for cell in plan.cells if cell.task == "recall-lm"}
    report = make_report(plan, records, dict.fromkeys(records, RATE), [], [], 1.0)
    jsonschema.validate(report, SCHEMA)
    tasks = ["copy-constant", "copy-random"]
    assert report["over_tasks"] == [
        {"row": "nope", "tasks": tasks, "interquartile_mean": pytest.approx(0.6)},
        {"row": "alibi", "tasks": tasks, "interquartile_mean": None},
    ]
    text = io.StringIO()
    print_report(report, Console(file=text, width=80))
    assert "no rank" in text.getvalue()


class Notes:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, title: str, total: int) -> None: ...

    def advance(self, done: int, text: str = "") -> None: ...

    def end(self) -> None: ...


def run_plan(plan: Plan, folder: Path) -> tuple[dict[str, Any], list[str]]:
    display = Notes()
    return Session(Agenda(plan), Results(folder), display, workers=1).run(["posenc"], speed=False), display.notes


@pytest.mark.usefixtures("inline")
def test_encoders_and_texts_from_a_plan_to_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(lookup, "_ITEMS", 2)
    monkeypatch.setattr(text_task, "_MOST_ITEMS", 2)
    path = tmp_path / "mine.txt"
    path.write_text("some words\n" * 3_500)
    plan = make_plan("quick", rows=["nope"], text=path, seeds=1, steps=1)
    assert [cell.asked for cell in plan.cells] == ["text"]
    report, _ = run_plan(plan, tmp_path / "out")
    jsonschema.validate(report, SCHEMA)
    assert report["protocol"]["tasks"][0]["corpus"]["source"] == "mine.txt"
    assert str(tmp_path) not in json.dumps(report), "a report names the file, not the folder"
    assert str(tmp_path) not in (tmp_path / "out" / "trials.jsonl").read_text()
    text = io.StringIO()
    print_report(report, Console(file=text, width=100))
    assert "mine.txt, 38,500 bytes, sha256" in text.getvalue()
    assert curves_picture(report, "svg")

    plan = make_plan("quick", rows=["nope"], tasks=["last-k"], kind="encoder", seeds=1, steps=2)
    report, _ = run_plan(plan, tmp_path / "out")
    jsonschema.validate(report, SCHEMA)
    assert report["protocol"]["kind"] == report["cells"][0]["kind"] == "encoder"
    assert report["literature"] == [], "found for decoders"


@pytest.mark.usefixtures("inline")
def test_the_forecast_counts_what_is_left(tmp_path):
    plan = make_plan("standard", rows=["nope"], tasks=["copy-constant"], seeds=2, steps=2)
    _, notes = run_plan(plan, tmp_path)
    said = next(note for note in notes if note.startswith("forecast"))
    trials = len(GRID) * len(TUNING_SEEDS) + 2
    assert re.fullmatch(
        rf"forecast: about \d+\.\d minutes \(± 30%\) of training for {trials} trials; up to .* if everything nearly fits .*",
        said,
    )
    _, again = run_plan(plan, tmp_path)
    assert any("nothing is left to train" in note for note in again)
    assert any("training: 2 of 2 trials are in the results folder already" in note for note in again)


@pytest.mark.parametrize(
    ("in_range", "raised"),
    [((0.94,), True), ((0.5,), True), ((0.49,), False), ((0.95,), False), ((1.0, 0.89), True), ((1.0, 0.9), False)],
)
def test_what_nearly_fits_is_trained_again_with_twice_the_steps(tmp_path, monkeypatch, in_range, raised):
    plan = make_plan("standard", rows=["nope"], tasks=["copy-constant"], seeds=len(in_range))
    agenda, results, asked = Agenda(plan), Results(tmp_path), []
    (cell,) = agenda.cells
    for trial, value in zip(agenda.reporting(cell), in_range, strict=True):
        results.records[trial.key] = record("nope", trial.seed, 0.0, value)
    session = Session(agenda, results, Notes(), workers=1)
    monkeypatch.setattr(session, "_train", lambda workers, title, trials: asked.extend(trials))
    assert session._raise_budgets(None) == {cell: 2 if raised else 1}
    assert [(trial.seed, trial.steps) for trial in asked] == [(seed, 3000) for seed in plan.seeds if raised]


@pytest.mark.parametrize(("exact", "expected"), [(True, 1000 * 0.02 + 5 * 0.3 + 4.0), (False, 1000 * 0.02 + 4.0)])
def test_a_forecast_is_steps_checks_and_tests(exact, expected):
    timed = {
        "probes": [{"measure": "exact match" if exact else "suffix loss"}],
        "step_seconds": 0.02, "check_seconds": 0.3, "total_seconds": 5.0, "train_seconds": 1.0,
    }  # fmt: skip
    assert session._seconds(1000, timed) == pytest.approx(expected)


def test_extras_are_trained_but_never_raised():
    plan = make_plan("standard", rows=["nope"])
    agenda = Agenda(plan)
    assert [cell for cell in agenda.cells if cell not in plan.cells] == list(PRESETS["standard"].extras)
    assert not any(agenda.may_be_raised(cell) for cell in plan.extras)
    assert [agenda.may_be_raised(cell) for cell in plan.cells] == [True, True, False], "a loss is judged against the best row"
    assert all(len(agenda.reporting(cell)) == EXTRA_SEEDS for cell in plan.extras)
    lines = agenda.lines()
    assert sum(line.startswith("extra") for line in lines) == 2 * EXTRA_SEEDS
    assert "extra   sinusoidal on last-k, encoder, seed 2" in "\n".join(lines)
    trials = sum(line.startswith(("tune", "report", "extra")) for line in lines)
    assert lines[0] == "1 row on copy-constant, copy-random, recall-lm; decoder, seeds 1, 2, 3, 4, 5"
    assert lines[-1] == f"{trials} trials on decoder models; at most 10 more, of twice the steps, for what nearly fits"
    assert make_plan("standard", rows=["nope"], tasks=["recall-lm"]).extras == ()
    two = Agenda(make_plan("standard", rows=["nope", "alibi"])).lines()
    assert two[-1].endswith("with Holm's correction: nope and alibi")


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
        ({"preset": "quick", "kind": "both"}, "--kind 'both'. Expected one of decoder, encoder"),
        (
            {"preset": "quick", "kind": "encoder", "tasks": ["recall-lm"]},
            r"recall-lm with --kind encoder. Expected .*\(last-k,",
        ),
        ({"preset": "quick", "kind": "encoder", "tasks": ["text"]}, "text with --kind encoder"),
        ({"preset": "quick", "text": Path("/nowhere/x.txt")}, "x.txt' cannot be read"),
    ],
)
def test_bad_plans(arguments, message):
    with pytest.raises((ValueError, OSError), match=message):
        make_plan(**arguments)


def test_every_row_runs_as_decoder_and_an_encoder_takes_the_tasks_that_it_can_be_asked():
    make_plan("quick", rows=known_rows(), tasks=["last-k"])
    assert make_plan("standard", rows=["nope"], kind="encoder").tasks == ("last-k", "first-token")
    assert make_plan("quick", rows=["nope"], tasks=["last-k", "text"]).tasks == ("last-k", "text")


def test_committed_rates_cover_the_quick_preset_and_follow_the_rule():
    rates = committed()
    assert rates["made"].keys() == rates["rates"].keys()
    assert all(
        "posenc compare" in made["command"] and set(made["seeds"]) <= set(TUNING_SEEDS) for made in rates["made"].values()
    )
    for row in DECLARED:
        entry = rates["rates"]["copy-constant"][row]
        assert f"{entry['rate']:g}" == min(entry["losses"], key=entry["losses"].__getitem__)
    named = {*TASKS, "text", *(f"{name}, encoder" for name in TASKS)}
    assert set(rates["rates"]) <= named
    assert committed_rate(Cell("nope", "copy-constant")) == rates["rates"]["copy-constant"]["nope"]
    assert committed_rate(Cell("nope", "copy-constant", "encoder")) is None


def test_the_rate_of_least_mean_loss_is_chosen():
    records = [{"learning_rate": r, "validation_loss": v} for r, v in [(1e-3, 0.5), (1e-3, 0.1), (3e-3, 0.4), (3e-4, 0.9)]]
    assert choose(records) == {"rate": 1e-3, "losses": {"0.0003": 0.9, "0.001": 0.3, "0.003": 0.4}}


DOCS = Path(__file__).parents[2] / "docs" / "results"


REPORTS = [path for path in sorted(DOCS.glob("*.json")) if json.loads(path.read_text()).get("schema") == "posenc.compare/1"]


def test_the_second_settings_are_rows(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    shape = model_shape(TASKS["recall-lm"])
    turning = {name: find_row(f"second_settings:{name}").build(shape)[0] for name in ("rope_half", "rope_three_quarters")}
    assert [encoding.rotary_dim for encoding in turning.values()] == [8, 12]


def test_there_are_committed_reports():
    assert {"quick", "standard", "copy-constant-three-seeds", "copy-constant-shares"} <= {path.stem for path in REPORTS}


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_committed_reports_fit_the_schema(path):
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)


def test_what_is_said_of_the_standard_run_is_in_its_report():
    report = json.loads((DOCS / "standard.json").read_text())
    verdicts = {anchor["anchor"]: anchor["verdict"] for anchor in report["anchors"]}
    assert [number for number, verdict in verdicts.items() if verdict == "holds"] == [1, 2, 3, 6, 7, 8]
    assert [number for number, verdict in verdicts.items() if verdict == "fails"] == [4]
    rises = next(anchor["measured"] for anchor in report["anchors"] if anchor["anchor"] == 2)
    page = (DOCS / "README.md").read_text()
    assert "2.71 nats for sinusoidal, 0.37 for RoPE and 0.001 for ALiBi" in page
    assert [f"{value:.3g}" for value in rises.values()] == ["2.71", "0.373", "0.00107"]
    assert f"It took {report['minutes']:.1f} minutes" in page


def test_the_table_of_shares_is_what_was_measured():
    report = json.loads((DOCS / "copy-constant-shares.json").read_text())
    shares = {
        "nope": "none (NoPE) | 0 of 8", "rope-25": "25 % | 2", "second_settings:rope_half": "50 % | 4",
        "second_settings:rope_three_quarters": "75 % | 6", "rope": "all | 8",
    }  # fmt: skip
    page = (DOCS / "README.md").read_text()
    cells = {cell["row"]: cell for cell in report["cells"]}
    assert all(cell["fit"] for cell in cells.values())
    for row, share in shares.items():
        shown = [cells[row]["bands"][band] for band in ("(1, 1.25]", "(1.25, 1.5]", "(1.5, 2]")]
        assert f"| {share} | " + " | ".join(f"{value:.2f}" for value in shown) + " |" in page
    nope, alibi, half = (cells[row]["primary_per_seed"] for row in ("nope", "alibi", "second_settings:rope_half"))
    assert all(a > b > c for a, b, c in zip(nope, alibi, half, strict=True)), "the anchor's order, in every seed"


def test_the_table_of_three_seeds_is_what_was_measured():
    report = json.loads((DOCS / "copy-constant-three-seeds.json").read_text())
    names = {"nope": "NoPE", "rope-25": "RoPE, 25 % of each head", "alibi": "ALiBi", "t5": "T5 bias", "rope": "RoPE"}
    page = (DOCS / "README.md").read_text()
    for cell in report["cells"]:
        shown = [cell["in_range"], *(cell["bands"][band] for band in ("(1, 1.25]", "(1.25, 1.5]", "(1.5, 2]"))]
        assert f"| {names[cell['row']]} | " + " | ".join(f"{value:.2f}" for value in shown) + " |" in page
    past = {cell["row"]: cell["bands"]["(1, 1.25]"] for cell in report["cells"]}
    assert past["nope"] > past["alibi"] > past["rope"]
