"""The tasks by name."""

from __future__ import annotations

from posenc.compare.tasks.base import Task
from posenc.compare.tasks.copying import CopyConstant, CopyRandom
from posenc.compare.tasks.recall import RecallLM

TASKS: dict[str, Task] = {task.name: task for task in (CopyConstant(), CopyRandom(), RecallLM())}


def find_task(name: str) -> Task:
    """The task of a name.

    Raises:
        ValueError: an unknown name.
    """
    if name not in TASKS:
        raise ValueError(f"compare: there is no task {name!r}. Expected one of {', '.join(TASKS)}. Name one.")
    return TASKS[name]
