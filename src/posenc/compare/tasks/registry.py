"""The tasks by name."""

from __future__ import annotations

from posenc.compare.tasks.base import Task
from posenc.compare.tasks.copying import CopyConstant, CopyRandom
from posenc.compare.tasks.lookup import FirstToken, LastK
from posenc.compare.tasks.recall import RecallLM
from posenc.compare.tasks.text import open_text

TASKS: dict[str, Task] = {task.name: task for task in (CopyConstant(), CopyRandom(), RecallLM(), LastK(), FirstToken())}
"""The generated ones; ``text`` is made from a file."""


def find_task(name: str) -> Task:
    """The task of a name; ``text:PATH`` is the text task on a file, ``text`` alone on the standard library's sources.

    Raises:
        ValueError: an unknown name.
        OSError, ValueError: a file that is no text.
    """
    kind, _, path = name.partition(":")
    if kind == "text":
        return open_text(path)
    if name not in TASKS:
        raise ValueError(f"compare: there is no task {name!r}. Expected one of {', '.join([*TASKS, 'text'])}. Name one.")
    return TASKS[name]
