"""The results folder: one JSON line per finished trial, so that an interrupted run resumes and loses nothing."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

_NUMBER: tuple[type, ...] = (int, float)
_NONE = type(None)
_FIELDS: dict[str, tuple[type, ...]] = {
    "key": (str,),
    "row": (str,),
    "task": (str,),
    "seed": (int,),
    "learning_rate": _NUMBER,
    "steps": (int,),
    "kind": (str,),
    "corpus": (str,),
    "validation_loss": _NUMBER,
    "probes": (list,),
    "steps_to_fit": (int, _NONE),
    "parameters": (int,),
    "encoding_parameters": (int,),
    "train_seconds": _NUMBER,
}
_PROBE_FIELDS: dict[str, tuple[type, ...]] = {
    "measure": (str,),
    "size": (int,),
    "ratio": _NUMBER,
    "items": (int,),
    "value": (*_NUMBER, _NONE),
    "spread": (*_NUMBER, _NONE),
    "error": (str, _NONE),
    "guess": (*_NUMBER, _NONE),
}


def _has(record: object, fields: dict[str, tuple[type, ...]]) -> bool:
    """Whether something is an object with these fields of these types, every number finite."""
    return isinstance(record, dict) and all(
        name in record and type(record[name]) in types and (type(record[name]) not in _NUMBER or abs(record[name]) < 1e300)
        for name, types in fields.items()
    )


class Results:
    """Finished trials in ``trials.jsonl`` of a folder, by key.

    A line is written in one call and flushed to the disk. A line that a crash cut short or that lost a field is skipped on
    reading, and the next one starts on a line of its own.

    Raises:
        OSError: a folder that cannot be written; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trials.jsonl"
        if folder.exists() and not folder.is_dir():
            raise OSError(f"compare: --out {str(folder)!r} is a file. Expected a folder. Choose another with --out.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b"):
                pass
        except OSError as error:
            raise OSError(
                f"compare: the results folder {str(folder)!r} cannot be written ({error.strerror or error}). Expected a folder "
                "that this user may write. Choose one with --out."
            ) from error
        self.records = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        records = {}
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if _has(record, _FIELDS) and record["probes"] and all(_has(probe, _PROBE_FIELDS) for probe in record["probes"]):
                records[record["key"]] = record
        return records

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record, on disk first."""
        line = json.dumps(record, allow_nan=False) + "\n"
        try:
            with self.path.open("r+b") as file:
                end = file.seek(0, os.SEEK_END)
                if end:
                    file.seek(end - 1)
                    line = line if file.read(1) == b"\n" else "\n" + line
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                f"compare: {str(self.path)!r} cannot be written ({error.strerror or error}). Expected room on the disk. "
                f"{len(self.records)} finished trials are kept; make room and run the same command again to go on."
            ) from error
        self.records[record["key"]] = record


def check_file(path: Path) -> None:
    """Refuse, before any work, a file that `write_file` could not write later.

    Raises:
        OSError: the message names the file.
    """
    if path.is_dir():
        raise OSError(f"compare: {str(path)!r} is a folder. Expected a place for a file. Choose another, or move the folder.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OSError(
            f"compare: {str(path)!r} cannot be written ({error.strerror or error}). Expected a folder that this user may "
            "write. Choose another path."
        ) from error


def write_file(path: Path, content: str | bytes) -> None:
    """Write under a temporary name, then rename, so that a reader never meets half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"compare: {str(path)!r} cannot be written ({error.strerror or error}). Expected a writable place with room. "
            "Choose another path."
        ) from error
