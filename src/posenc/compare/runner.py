"""Trials in worker processes of one thread each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import Queue
from types import TracebackType
from typing import Any, Self

from posenc.compare.rows import RowFailed
from posenc.compare.trial import Trial, run_trial

_steps_done: Queue[tuple[str, int]] | None = None
_REPORT_EVERY = 10


class Workers:
    """A pool of spawned processes. Leaving it early (Ctrl-C, an error) stops them at once."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._queue: Queue[tuple[str, int]] = context.Queue()
        self._pool = ProcessPoolExecutor(
            count, mp_context=context, initializer=_start_worker, initargs=(self._queue, list(sys.path))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._pool.shutdown()
            return
        for process in list((self._pool._processes or {}).values()):
            process.terminate()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def run(
        self,
        trials: Iterable[Trial],
        *,
        finished: Callable[[dict[str, Any]], None],
        stepped: Callable[[str, int], None] = lambda key, steps: None,
    ) -> None:
        """Run every trial, calling ``finished`` with each record as it comes and ``stepped(key, steps)`` in between.

        Raises:
            ValueError: a row's code failed or ended its worker process.
        """
        rows = {}
        try:
            for trial in trials:
                rows[self._pool.submit(_work, trial)] = trial.row
            self._collect(set(rows), finished, stepped)
        except BrokenProcessPool as error:
            died = [row for future, row in rows.items() if isinstance(future.exception(timeout=60), BrokenProcessPool)]
            suspects = [row for row in dict.fromkeys(died) if ":" in row] or list(dict.fromkeys(died))
            raise RowFailed(
                f"compare: a worker process died while training; it may have been {', '.join(map(repr, suspects))}. Expected "
                "an encoding that never ends its process, and enough memory for --workers processes. Try --workers 1."
            ) from error

    def _collect(
        self,
        waiting: set[Future[dict[str, Any]]],
        finished: Callable[[dict[str, Any]], None],
        stepped: Callable[[str, int], None],
    ) -> None:
        while waiting:
            done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            while not self._queue.empty():
                stepped(*self._queue.get())
            for future in done:
                finished(future.result())


def _start_worker(queue: Queue[tuple[str, int]], path: list[str]) -> None:
    import torch

    global _steps_done  # the one thing that a spawned worker can only be given here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:] = path
    torch.set_num_threads(1)
    _steps_done = queue


def _end_with_parent() -> None:
    """A parent that was killed cannot end its workers, so each watches it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(trial: Trial) -> dict[str, Any]:
    def report(steps: int) -> None:
        if _steps_done is not None and (steps % _REPORT_EVERY == 0 or steps == trial.steps):
            _steps_done.put((trial.key, steps))

    return run_trial(trial, report)
