"""`assert_positions_ok` in a test suite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from posenc import RoPE, Transformer
from posenc.testing import assert_positions_ok


class _Ladder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, 16, 2) / 16))


def test_a_good_model_passes_and_gives_its_report() -> None:
    report = assert_positions_ok(Transformer(16, dim=16, layers=1, heads=2, encodings=[RoPE(8)]))
    assert report.checked


def test_a_bug_fails_with_its_finding() -> None:
    with pytest.raises(AssertionError, match=r"(?s)frequency-rounded.*mend"):
        assert_positions_ok(_Ladder().bfloat16())


def test_what_is_known_can_be_allowed() -> None:
    report = assert_positions_ok(_Ladder().bfloat16(), allow={"frequency-rounded"})
    assert "frequency-rounded" in report.ids


def test_an_unknown_id_is_refused() -> None:
    with pytest.raises(ValueError, match="allow = 'frequencies'. Expected ids of findings"):
        assert_positions_ok(_Ladder(), allow=["frequencies"])
