"""Every test starts from the same random state; property tests draw few examples, the same ones each time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("posenc", max_examples=25, deadline=None, derandomize=True, database=None)
settings.load_profile("posenc")


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)
