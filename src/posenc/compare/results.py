"""The results folder: one JSON line per finished trial, so that an interrupted run resumes and loses nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Results:
    """Finished trials in ``trials.jsonl`` of a folder, by key.

    A line is written in one call and flushed to the disk. A line that a crash cut short is skipped on reading, and the
    next one starts on a line of its own.

    Raises:
        OSError: a folder that cannot be written; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trials.jsonl"
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
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and "key" in record:
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
