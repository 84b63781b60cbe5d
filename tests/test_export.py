"""torch.export: the public values travel through it, with a dynamic length."""

from __future__ import annotations

import io
import logging
import warnings

import pytest
import torch
from torch.export import Dim

from posenc import (
    Frequencies,
    Geometric,
    RoPE,
    RotaryTable,
    Tokens,
    Transformer,
    apply_rotary,
    contiguous,
    rotary_table,
)


class Rotate(torch.nn.Module):
    def forward(self, x: torch.Tensor, table: RotaryTable) -> torch.Tensor:
        return apply_rotary(x, table, pairing="half")


class Table(torch.nn.Module):
    def forward(self, tokens: Tokens, frequencies: Frequencies) -> RotaryTable:
        return rotary_table(tokens.positions, frequencies)


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.nn.Module:
    kept = io.BytesIO()
    torch.export.save(program, kept)
    kept.seek(0)
    logging.disable(logging.CRITICAL)  # torch 2.13's loader logs with a broken format string
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(kept).module()
    finally:
        logging.disable(logging.NOTSET)


def test_values_travel_through_save_and_load():
    frequencies = Geometric().frequencies(8)
    table = rotary_table(torch.arange(5), frequencies)
    x = torch.randn(1, 2, 5, 8)
    seq = Dim("seq")
    shapes = {"x": {2: seq}, "table": RotaryTable({0: seq}, {0: seq})}
    rotate = saved_and_loaded(torch.export.export(Rotate(), (x, table), dynamic_shapes=shapes))
    longer, longer_table = torch.randn(1, 2, 9, 8), rotary_table(torch.arange(9), frequencies)
    assert torch.equal(rotate(longer, longer_table), Rotate()(longer, longer_table))
    given = Tokens(torch.arange(5)), Frequencies(frequencies.inv_freq)
    made = saved_and_loaded(torch.export.export(Table(), given))(*given)
    assert torch.equal(made.cos, table.cos)


@pytest.mark.parametrize("length", [1, 13])
def test_a_model_exported_at_one_length_runs_at_others(length):
    model = Transformer(50, dim=32, layers=2, heads=4, encodings=[RoPE(8)]).eval()
    seq = Dim("seq", min=1, max=512)
    ids = torch.randint(0, 50, (2, 8))
    program = torch.export.export(model, (ids, contiguous(8).positions), dynamic_shapes=({1: seq}, {0: seq}))
    other = torch.randint(0, 50, (2, length))
    torch.testing.assert_close(program.module()(other, contiguous(length).positions), model(other, 0), rtol=0, atol=1e-6)
