"""Objects of the user's own code, named on the command line as ``MODULE:NAME``."""

from __future__ import annotations

import importlib
import sys


class UnknownName(ValueError):
    """No object has this name; the user's code raised nothing."""


def in_one_line(error: BaseException) -> str:
    """What the user's code raised, for a message."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def import_name(command: str, target: str, *, what: str, example: str) -> object:
    """Import what ``module:NAME`` names. This runs the module.

    Args:
        command: the command that asks, for messages.
        what: the thing that is expected, in a word or two.
        example: a name and where it would stand, for messages.

    Raises:
        UnknownName: not of that form, no such module on the import path, or no such name in it.
        Exception: whatever the module raises.
    """
    module_name, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise UnknownName(
            f"{command}: {target!r} names no {what}. Expected module:NAME as in an import, such as {example}. "
            "Leave folders and .py away and run from the folder that holds the module."
        )
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        if not _is_missing(error, module_name, name):
            raise
        raise UnknownName(
            f"{command}: {target!r} cannot be imported ({error}). Expected module:NAME with the module on the import "
            "path. Run from the folder that holds it, or install it."
        ) from error


def _is_missing(error: ImportError | AttributeError, module: str, name: str) -> bool:
    """Whether there is no such module, or no such name in it, as against an error from inside it."""
    if isinstance(error, ModuleNotFoundError):
        return error.name is not None and f"{module}.".startswith(f"{error.name}.")
    return isinstance(error, AttributeError) and error.name == name and error.obj is sys.modules.get(module)
