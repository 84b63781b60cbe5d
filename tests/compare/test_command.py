"""``posenc compare`` as a person runs it: end to end, killed, interrupted, misused."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from posenc.cli.main import main
from posenc.compare import speed
from posenc.compare.rates import GRID, TUNING_SEEDS
from posenc.compare.results import Results
from posenc.compare.runner import Workers
from posenc.compare.trial import Trial

SCHEMA = json.loads((files("posenc.compare") / "report.schema.json").read_text())
OWN = """
import torch
from posenc import ScoreEncoding, SlopeBias, EncodingSpec

class Recency(ScoreEncoding):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads
    def forward(self):
        slopes = torch.ones(self.heads)
        return SlopeBias(slopes, -slopes)

Recency.spec = EncodingSpec("recency", "one slope", lambda shape: [Recency(shape.heads)])
"""
COMMAND = [sys.executable, "-m", "posenc"]


TRIALS = 2 * (len(GRID) * len(TUNING_SEEDS) + 1)  # two rows, whose rates are chosen at this number of steps
PLAN = [
    "--workers",
    "1",
    "--rows",
    "nope",
    "--encoding",
    "mine:Recency",
    "--seeds",
    "1",
    "--steps",
    "8",
    "--tasks",
    "copy-constant",
]


def workers_of(folder: Path) -> list[str]:
    """Processes that work in a folder, after a moment to end."""
    for _ in range(600):
        found = [p.parent.name for p in Path("/proc").glob("[0-9]*/cwd") if _cwd(p) == str(folder)]
        if not found:
            return []
        time.sleep(0.1)
    return found


def _cwd(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # ended meanwhile, or somebody else's
        return ""


def records_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out" / "trials.jsonl").read_text().splitlines()]


def start_and_kill(folder: Path) -> None:
    """Start a run and kill it as soon as it has kept a trial."""
    command = [*COMMAND, "compare", "--out", str(folder / "out"), *PLAN, "--no-speed"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, text=True)
    trials = folder / "out" / "trials.jsonl"
    deadline = time.monotonic() + 120
    while running.poll() is None and time.monotonic() < deadline and not (trials.exists() and trials.read_bytes().count(b"\n")):
        time.sleep(0.02)
    running.kill()
    running.communicate(timeout=60)


def interrupted_after_a_trial(monkeypatch: pytest.MonkeyPatch) -> Result:
    """A run that meets Ctrl-C once it has kept a trial of its own, with a worker at work."""
    add = Results.add

    def keep_and_interrupt(self: Results, record: dict) -> None:
        add(self, record)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Results, "add", keep_and_interrupt)
        return CliRunner().invoke(main, ["compare", "--out", "out", *PLAN, "--no-speed"])


def test_a_run_is_killed_then_interrupted_then_finished(tmp_path, monkeypatch, request):
    """One run from end to end, with an encoding of the user's own, stopped twice on the way."""
    (tmp_path / "mine.py").write_text(OWN)
    start_and_kill(tmp_path)
    assert workers_of(tmp_path) == [], "no worker outlives the run"
    killed = records_of(tmp_path)
    assert 1 <= len(killed) < TRIALS

    monkeypatch.chdir(tmp_path)
    stopped = interrupted_after_a_trial(monkeypatch)
    assert stopped.exit_code == 130, stopped.stderr
    deadline = time.monotonic() + 60
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.1)  # told to end; the pool's own thread may have taken its exit code and not yet noted it
    assert multiprocessing.active_children() == []
    assert "Traceback" not in stopped.stderr
    assert "are in the results folder already" in stopped.stderr
    interrupted = records_of(tmp_path)
    assert interrupted[:-1] == killed, "nothing is lost"

    monkeypatch.setattr(speed, "REPEATS", 1)
    monkeypatch.setattr(speed, "LENGTH", 32)
    request.getfixturevalue("inline")  # the real workers were stopped above
    done = CliRunner().invoke(main, ["compare", "--out", "out", *PLAN, "--json", "--plot", "p.png"])
    assert done.exit_code == 0, done.stderr
    finished = records_of(tmp_path)
    assert finished[: len(interrupted)] == interrupted
    assert len({record["key"] for record in finished}) == len(finished) == TRIALS, "nothing is done twice"
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    assert [cell["row"] for cell in report["cells"]] == ["nope", "mine:Recency"]
    assert report["speed"][0]["ratio"] == 1.0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert "running your code: mine:Recency" in done.stderr
    assert done.stderr.index("forecast: about") < done.stderr.index("training …")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "no preset 'huge'"),
        (["--rows", "nope,typo"], "no encoding 'typo'"),
        (["--tasks", "typo"], "no task 'typo'"),
        (["--seeds", "0"], "--seeds 0"),
        (["--steps", "many"], "not a valid integer"),
        (["--stepz", "3"], "--steps"),
        (["--encoding", "nowhere:X"], "cannot be imported"),
        (["--plot", "x.gif"], "Expected a name ending in .png"),
        (["--plot", "/nowhere/x.png"], "no folder"),
        (["--plot", "/proc/x.png"], "cannot be written"),
        (["--plot", "/"], "is a directory"),
        (["--out", "/dev/null/x"], "cannot be written"),
        (["--out", "/dev/null"], "is a file"),
        (["--rows", ""], "no row named"),
        (["--rows", ","], "no row named"),
        (["--tasks", ","], "no task named"),
        (["--rows", ":x"], "':x' names no encoding"),
        (["--encoding", "./mine.py:X"], "Leave folders and .py away"),
        (["--kind", "typo"], "--kind 'typo'"),
        (["--kind", "encoder", "--tasks", "copy-random"], "copy-random with --kind encoder"),
        (["--text", "/nowhere/x.txt"], "'/nowhere/x.txt' cannot be read"),
        (["--text", "/"], "'/' is a folder"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(arguments, message):
    done = CliRunner().invoke(main, ["compare", *arguments])
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output


BROKEN = """
from posenc import ALiBi

def builds_badly(shape): raise KeyError("heads")
def exits(shape): raise SystemExit(3)
def builds_one(shape): return ALiBi(4)
def builds_a_class(shape): return [ALiBi]
def builds_none(shape): return None
def builds_none_of_it(shape): return [ALiBi(0)]
"""


@pytest.mark.parametrize("option", ["--rows", "--encoding"])
@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("builds_badly", BROKEN, "raised KeyError: 'heads' while being built. Expected an encoding that"),
        ("exits", BROKEN, "raised SystemExit: 3 while being built"),
        ("builds_one", BROKEN, "built an object of type ALiBi. Expected a list of posenc.Encoding instances"),
        ("builds_a_class", BROKEN, "built a list with the class ALiBi"),
        ("builds_none", BROKEN, "built an object of type NoneType"),
        ("builds_none_of_it", BROKEN, "raised ValueError: "),
        ("X", "def f(:", "raised SyntaxError: invalid syntax"),
        ("X", "raise RuntimeError", "raised RuntimeError while being imported"),
        ("X", "raise SystemExit(0)", "raised SystemExit: 0 while being imported"),
        ("X", "import no_such_module", "raised ModuleNotFoundError: No module named 'no_such_module' while being imported"),
        ("X", "None.x", "raised AttributeError"),
    ],
)
def test_code_that_fails_is_one_message_before_anything_runs(tmp_path, monkeypatch, option, name, source, message):
    module = f"broken_{abs(hash((name, source)))}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(main, ["compare", "--dry-run", option, f"{module}:{name}"])
    assert done.exit_code == 2, done.output
    notice, told = done.stderr.strip().splitlines()
    assert notice == f"importing and running your code: {module}:{name}"
    assert told.startswith(f"Error: compare: '{module}:{name}' ")
    assert message in told
    assert done.stdout == ""


def test_pictures_may_end_in_capitals_and_reports_need_their_place(tmp_path):
    (tmp_path / "out" / "report.json").mkdir(parents=True)
    done = CliRunner().invoke(
        main, ["compare", "--rows", "nope", "--out", str(tmp_path / "out"), "--plot", str(tmp_path / "X.PNG")]
    )
    assert done.exit_code == 2, done.output
    assert "report.json' is a folder" in done.output


def test_a_row_that_kills_its_worker(tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text(
        "import multiprocessing, os\ndef Row(shape):\n    if multiprocessing.parent_process():\n        os._exit(7)\n    return []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with (
        pytest.raises(ValueError, match="a worker process died while training; it may have been 'deadly:Row'"),
        Workers(1) as w,
    ):
        w.run([Trial("deadly:Row", "copy-constant", 1, 1e-3, 1)], finished=lambda record: None)


def test_a_dry_run_lists_and_trains_nothing(tmp_path):
    out = tmp_path / "out"
    done = CliRunner().invoke(
        main, ["compare", "--dry-run", "--rows", "nope,t5", "--seeds", "2", "--steps", "9", "--out", str(out)]
    )
    assert done.exit_code == 0
    lines = done.output.strip().splitlines()
    assert sum(line.startswith("tune") for line in lines) == 2 * len(GRID) * len(TUNING_SEEDS)
    assert sum(line.startswith("report") for line in lines) == 4
    assert not out.exists()
