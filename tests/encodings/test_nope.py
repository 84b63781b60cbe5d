"""No positions: nothing happens, whatever the positions are."""

from __future__ import annotations

import torch

from posenc import NoPE
from posenc.testing import conform, oracles


def test_conforms():
    conform(NoPE, oracles.nope)


def test_queries_and_keys_pass_as_they_are():
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    out = NoPE()(q, k, 17)
    assert out[0] is q
    assert out[1] is k
