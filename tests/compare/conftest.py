"""Trials in this process, on one thread like those of real workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from posenc.compare import session
from posenc.compare.trial import run_trial


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take minutes for tiny models when something else keeps the cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Inline:
    """Workers that work here."""

    def __init__(self, count: int) -> None: ...

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *error: object) -> None: ...

    def run(self, trials, *, finished, stepped=lambda key, steps: None) -> None:
        for trial in trials:
            finished(run_trial(trial))


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Runs train here instead of in worker processes."""
    monkeypatch.setattr(session, "Workers", Inline)
    return monkeypatch
