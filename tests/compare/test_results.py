"""The results folder survives crashes, full disks and strangers."""

from __future__ import annotations

import json

import pytest

from posenc.compare import results as results_module
from posenc.compare.results import Results, write_file


def test_records_come_back(tmp_path):
    Results(tmp_path / "deep" / "er").add({"key": "a", "value": 0.1})
    again = Results(tmp_path / "deep" / "er")
    assert again.records == {"a": {"key": "a", "value": 0.1}}
    assert "a" in again
    assert "b" not in again


def test_a_line_cut_short_by_a_crash_is_skipped_and_costs_nothing_else(tmp_path):
    Results(tmp_path).add({"key": "a"})
    path = tmp_path / "trials.jsonl"
    path.write_bytes(path.read_bytes() + b'{"key": "b", "val\xc3')
    resumed = Results(tmp_path)
    assert set(resumed.records) == {"a"}
    resumed.add({"key": "c"})
    assert set(Results(tmp_path).records) == {"a", "c"}


def test_lines_that_are_no_records_are_ignored(tmp_path):
    (tmp_path / "trials.jsonl").write_text('[]\n3\n{"other": 1}\nnull\n{"key": "a"}\n')
    assert set(Results(tmp_path).records) == {"a"}


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="results folder .*file.* cannot be written.*--out"):
        Results(tmp_path / "file" / "folder")


def test_a_full_disk_says_what_is_kept(tmp_path, monkeypatch):
    kept = Results(tmp_path)
    kept.add({"key": "a"})

    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results_module.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left on device.*1 finished trials are kept"):
        kept.add({"key": "b"})
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
