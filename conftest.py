"""Names that docstring examples may use without importing them."""

from typing import Any

import pytest
import torch

import posenc


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update({name: getattr(posenc, name) for name in posenc.__all__ if name != "__version__"}, torch=torch)
