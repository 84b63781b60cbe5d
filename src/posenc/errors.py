"""The exceptions that posenc raises beside ValueError and TypeError.

    ValueError
    ├── ShapeError          a tensor has the wrong shape
    └── ConfigError         a model's configuration cannot be read
    RuntimeError
    └── BackendRefused      no backend, or not the named one, can do this; says why for each
    ImportError             from `require`: an optional package is not installed

Every message reads: ``<public name>: <what is wrong, with the value>. Expected <rule>. <What to do>.``
"""

from __future__ import annotations

import importlib
from types import ModuleType


class ShapeError(ValueError):
    """A tensor's shape does not fit the others or the module."""


class ConfigError(ValueError):
    """A model's configuration is missing something, contradicts itself or cannot be read."""


class BackendRefused(RuntimeError):
    """A named backend cannot do what was asked, or none can.

    Attributes:
        refusals: backend name -> the reason it gave.
    """

    def __init__(self, message: str, refusals: dict[str, str]) -> None:
        super().__init__(message)
        self.refusals = refusals


def require(package: str, extra: str) -> ModuleType:
    """Import an optional package, or say which pip line installs it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"posenc: the package {package!r} is not installed. Expected it for this feature. "
            f"Run: pip install 'posenc[{extra}]'."
        ) from error
