"""Value checks: in full on the CPU, without a wait elsewhere, and inside compiled graphs."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from posenc.core.checks import check_values


def test_the_message_is_made_only_when_it_is_needed():
    check_values(torch.tensor([True, True]), lambda: 1 / 0)
    check_values(torch.tensor([], dtype=torch.bool), lambda: 1 / 0)
    with pytest.raises(ValueError, match="told you"):
        check_values(torch.tensor([True, False]), lambda: "told you")


def test_tensors_without_values_pass():
    check_values(torch.zeros(2, dtype=torch.bool, device="meta"), lambda: "never")
    with FakeTensorMode():
        check_values(torch.zeros(2, dtype=torch.bool), lambda: "never")


def test_batched_tensors_pass_under_vmap():
    def checked(x):
        check_values(x > 0, lambda: "never")
        return 2 * x

    assert torch.vmap(checked)(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_compiled_graphs_check_too():
    def checked(x):
        check_values(x > 0, lambda: "eager only")
        return 2 * x

    torch.compiler.reset()
    compiled = torch.compile(checked, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(RuntimeError, match="a value check failed"):
        compiled(-torch.ones(3))
