"""A gallery of position bugs: each a small model, function or configuration with one mistake that people have made."""

from __future__ import annotations

import importlib
import pkgutil

from tests.audit.bugs.bug import Bug as Bug


def gallery() -> list[Bug]:
    """Every bug of every file here."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "bug")
    return [bug for name in names for bug in importlib.import_module(f"{__name__}.{name}").BUGS]
