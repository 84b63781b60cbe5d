"""What the speed table says of attention is what attention does."""

from __future__ import annotations

from importlib import import_module

import pytest

from posenc.attn.select import BACKENDS
from posenc.compare import speed


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(speed, "LENGTH", 16)
    monkeypatch.setattr(speed, "REPEATS", 1)


def test_the_backend_is_the_one_that_ran(monkeypatch):
    """Each backend in turn is made the only one; the first order is asked too."""
    names = {backend.name for backend in BACKENDS}
    for row, biased in (("nope", False), ("rope", False), ("alibi", True), ("t5", True)):
        name, form = speed.implementation(row).split(", ")
        assert name in names
        assert (form == "no bias") != biased, row
    select = import_module("posenc.attn.select")
    reference = next(backend for backend in BACKENDS if backend.name == "reference")
    monkeypatch.setattr(select, "BACKENDS", (reference,))
    assert speed.implementation("nope") == "reference, no bias"


def test_listening_leaves_no_trace():
    module = import_module("posenc.attn.attention")
    before = module.select
    speed.implementation("nope", "encoder")
    assert module.select is before
    with pytest.raises(ValueError, match="there is no encoding 'typo'"):
        speed.implementation("typo")
    assert module.select is before


def test_ratios_are_to_no_positions():
    alone, other = speed.measure_speed(["nope", "t5"])
    assert (alone["ratio"], alone["memory_ratio"]) == (1.0, 1.0)
    assert other["ratio"] > 0
    assert other["peak_bytes"] > 0
