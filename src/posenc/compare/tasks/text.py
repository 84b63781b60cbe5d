"""Text: byte-level language modelling on a file of the user's, or on the Python standard library's sources."""

from __future__ import annotations

import hashlib
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from posenc.compare.tasks.base import IGNORED, Batch, Corpus, Probe, Task

BOS = 256
SUFFIX = 32
_CONTEXTS = (64, 128, 160, 192, 256, 512)
_MOST_ITEMS = 128
LEAST_BYTES, MOST_BYTES = 32 * 1024, 256 * 1024 * 1024


@final
class Text(Task):
    """Predict the next byte of a text.

    The first nine tenths are trained on, in windows from random places; the next twentieth chooses learning rates; the last
    twentieth is tested on, by *sliding fixed-suffix scoring*: the same 32 bytes at a time, under every context length, so
    that a longer context can only help by being used.
    """

    name = "text"
    summary = "predict the next byte of a text"
    vocabulary = 257
    trained_size = 128
    trained_length = trained_size
    steps = 1500
    score = "loss"

    def __init__(self, source: str, content: bytes) -> None:
        self.corpus = Corpus(source, len(content), hashlib.sha256(content).hexdigest())
        every = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        chosen, tested = len(content) * 90 // 100, len(content) * 95 // 100
        self._trained, self._choosing, self._tested = every[:chosen], every[chosen:tested], every[tested:]

    def train_batch(self, size: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(0, len(self._trained) - self.trained_size + 1, (size,), generator=generator)
        return _next_byte(_windows(self._trained, starts, self.trained_size))

    def validation(self) -> Batch:
        last = len(self._choosing) - self.trained_size
        return _next_byte(_windows(self._choosing, torch.linspace(0, last, 128).long(), self.trained_size))

    def probes(self) -> list[Probe]:
        longest = max(_CONTEXTS)
        last = len(self._tested) - longest
        items = min(_MOST_ITEMS, last // SUFFIX + 1)  # so that no two suffixes overlap
        windows = _windows(self._tested, torch.linspace(0, last, items, dtype=torch.float64).long(), longest)
        probes = []
        for context in _CONTEXTS:
            ids, targets = _next_byte(windows[:, -context:])
            targets[:, :-SUFFIX] = IGNORED
            probes.append(Probe("suffix loss", context, context / self.trained_size, items, Batch(ids, targets)))
        return probes


def _windows(data: Tensor, starts: Tensor, length: int) -> Tensor:
    return data[starts[:, None] + torch.arange(length)].long()


def _next_byte(windows: Tensor) -> Batch:
    begin = torch.full((windows.shape[0], 1), BOS)
    return Batch(torch.cat([begin, windows[:, :-1]], dim=1), windows.clone())


@lru_cache(maxsize=4)
def open_text(path: str) -> Text:
    """The task on a file; on the standard library's sources when the path is empty.

    Raises:
        OSError: a file that is missing or cannot be read.
        ValueError: one that is empty, too short, too long or no text.
    """
    if not path:
        return Text("the Python standard library's sources", _library())
    return Text(Path(path).name, _read(Path(path)))


def _library() -> bytes:
    """The modules at the top of the standard library, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    content = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    if len(content) < LEAST_BYTES:
        raise ValueError(
            f"compare: the standard library in {str(folder)!r} has {len(content)} bytes of sources. Expected at least "
            f"{LEAST_BYTES}. Give a text of yours with --text FILE."
        )
    return content


def _read(path: Path) -> bytes:
    shown = f"compare: --text {str(path)!r}"
    try:
        if path.exists() and not path.is_file():
            what = "is a folder" if path.is_dir() else "is no regular file"
            raise OSError(f"{shown} {what}. Expected a text file. Name one, or join several into one.")
        size = path.stat().st_size
        if not LEAST_BYTES <= size <= MOST_BYTES:
            what = "is empty" if size == 0 else f"has {size} bytes"
            raise ValueError(
                f"{shown} {what}. Expected {LEAST_BYTES} to {MOST_BYTES}: a twentieth of it is tested with contexts of 512 "
                "bytes. Give a longer text, or a part of it."
            )
        content = path.read_bytes()
    except OSError as error:
        if error.strerror is None:
            raise
        raise OSError(
            f"{shown} cannot be read ({error.strerror}). Expected a text file that this user may read. Name another."
        ) from error
    if (at := content.find(0)) >= 0:
        raise ValueError(f"{shown} has a NUL at byte {at}. Expected text, not a binary file. Name another.")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{shown} is not UTF-8 at byte {error.start}. Expected text in UTF-8. Convert it, or name another."
        ) from error
    return content
