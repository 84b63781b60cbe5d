"""The results folder survives crashes, full disks and strangers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from posenc.compare import results as results_module
from posenc.compare.results import Results, check_file, write_file

PROBE = {
    "measure": "exact match", "size": 1, "ratio": 0.1, "items": 16, "value": None, "spread": None, "error": "no rows elsewhere", "guess": None,
}  # fmt: skip


def record(key: str) -> dict[str, Any]:
    return {
        "key": key, "row": "nope", "task": "copy-constant", "seed": 1, "learning_rate": 1e-3, "steps": 9, "kind": "decoder",
        "corpus": "", "probes": [PROBE],
        "steps_to_fit": None, "validation_loss": 0.1, "parameters": 9, "encoding_parameters": 0, "train_seconds": 1.0,
    }  # fmt: skip


def test_records_come_back(tmp_path):
    Results(tmp_path / "deep" / "er").add(record("a"))
    again = Results(tmp_path / "deep" / "er")
    assert again.records == {"a": record("a")}
    assert "a" in again
    assert "b" not in again


def test_a_line_cut_short_by_a_crash_is_skipped_and_costs_nothing_else(tmp_path):
    Results(tmp_path).add(record("a"))
    path = tmp_path / "trials.jsonl"
    path.write_bytes(path.read_bytes() + b'{"key": "b", "val\xc3')
    resumed = Results(tmp_path)
    assert set(resumed.records) == {"a"}
    resumed.add(record("c"))
    assert set(Results(tmp_path).records) == {"a", "c"}


def test_lines_that_are_no_records_are_ignored(tmp_path):
    lines = ["[]", "3", '{"other": 1}', "null", '{"key": "b"}', "[" * 100_000, json.dumps(record("a"))]
    (tmp_path / "trials.jsonl").write_text("\n".join(lines) + "\n")
    assert set(Results(tmp_path).records) == {"a"}


@pytest.mark.parametrize(
    "damage",
    [
        {"key": 3},
        {"row": None},
        {"steps": "9"},
        {"seed": True},
        {"probes": 3},
        {"probes": []},
        {"probes": [PROBE, 3]},
        {"probes": [PROBE | {"value": "high"}]},
        {"probes": [{"measure": "exact match"}]},
        {"validation_loss": float("nan")},
        {"parameters": 10**400},
    ],
)
def test_damaged_records_are_skipped(tmp_path, damage):
    (tmp_path / "trials.jsonl").write_text(json.dumps(record("b") | damage) + "\n" + json.dumps(record("a")) + "\n")
    assert set(Results(tmp_path).records) == {"a"}


@pytest.mark.parametrize("field", sorted(record("a")))
def test_records_that_lost_a_field_are_skipped(tmp_path, field):
    damaged = record("a")
    del damaged[field]
    (tmp_path / "trials.jsonl").write_text(json.dumps(damaged))
    assert Results(tmp_path).records == {}


def test_a_results_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="--out .*file' is a file. Expected a folder"):
        Results(tmp_path / "file")


def test_files_that_could_not_be_written_are_refused_before(tmp_path, monkeypatch):
    check_file(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == [], "looking leaves nothing"
    with pytest.raises(OSError, match="is a folder. Expected a place for a file"):
        check_file(tmp_path)

    def refuse(dir: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(results_module.tempfile, "TemporaryFile", refuse)
    with pytest.raises(OSError, match=r"new\.json' cannot be written \(Read-only file system\)"):
        check_file(tmp_path / "new.json")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="results folder .*file.* cannot be written.*--out"):
        Results(tmp_path / "file" / "folder")


def test_a_full_disk_says_what_is_kept(tmp_path, monkeypatch):
    kept = Results(tmp_path)
    kept.add(record("a"))

    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results_module.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left on device.*1 finished trials are kept"):
        kept.add(record("b"))
    assert "a" in Results(tmp_path)


def test_nan_never_enters_a_file(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        Results(tmp_path).add({"key": "a", "value": float("nan")})
    assert (tmp_path / "trials.jsonl").read_text() == ""


def test_write_file_replaces_whole_files_only(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_file(path, json.dumps({"old": 1}))

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results_module.os, "replace", fail)
    with pytest.raises(OSError, match=r"report\.json.*No space left"):
        write_file(path, "half a")
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"], "no temporary file stays"
