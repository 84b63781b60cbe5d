"""Names that docstring examples may use without importing them."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

import posenc

collect_ignore = [] if find_spec("triton") else ["src/posenc/kernels/triton_rotary.py"]  # Linux with CUDA has it

torch.set_num_threads(1)  # small tensors: more threads only wait for each other on a busy machine


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update({name: getattr(posenc, name) for name in posenc.__all__ if name != "__version__"}, torch=torch)
