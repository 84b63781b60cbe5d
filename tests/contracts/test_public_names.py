"""The public surface is deliberate: it changes together with a committed list."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import posenc

LIST = Path(__file__).with_name("public_names.txt")


def test_public_names_are_the_committed_ones():
    committed = LIST.read_text(encoding="utf-8").split()
    assert posenc.__all__ == committed, (
        f"added {sorted(set(posenc.__all__) - set(committed))}, gone {sorted(set(committed) - set(posenc.__all__))}. "
        f"If that is meant, write the list anew: python -c \"import posenc; print(*posenc.__all__, sep='\\n')\" "
        f"> tests/contracts/{LIST.name}"
    )


def test_every_public_name_resolves_to_what_its_module_defines():
    for name in posenc.__all__:
        value = getattr(posenc, name)
        if name != "__version__":
            assert getattr(importlib.import_module(posenc._MODULE_OF[name]), name) is value
    assert set(posenc.__all__) <= set(dir(posenc))


def test_public_classes_and_functions_are_documented():
    values = {name: getattr(posenc, name) for name in posenc.__all__}
    assert not [n for n, v in values.items() if (inspect.isclass(v) or inspect.isfunction(v)) and not inspect.getdoc(v)]
