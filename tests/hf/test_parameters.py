"""Schedules to blocks of configuration and back."""

from __future__ import annotations

import pytest

from posenc import NTK, DynamicNTK, Geometric, Linear, Llama3, LongRoPE, Proportional, YaRN
from posenc.errors import ConfigError
from posenc.hf import parameters_of, schedule_from

SCHEDULES = [
    Geometric(5e5),
    Linear(Geometric(), 8.0),
    NTK(Geometric(), 1000.0),
    DynamicNTK(Geometric(), 2.0, 2048),
    YaRN(Geometric(1.5e5), 32.0, 4096, rounding="none"),
    YaRN(Geometric(), 40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    YaRN(Geometric(5e5), 8.0, 8192, amplitude=1.2079441541679836, beta_fast=4.0),
    Llama3(Geometric(5e5), 8.0, 8192),
    Llama3(Geometric(5e5), 32.0, 1024, low_freq_factor=0.125, high_freq_factor=0.5),
    LongRoPE(Geometric(), (1.0, 1.5), (2.0, 8.0), 4096, factor=32.0),
    Proportional(Geometric(1e6), 0.25),
    Proportional(Geometric(1e6), 0.25, 4.0),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_there_and_back_is_the_same_schedule(schedule):
    assert (
        schedule_from(parameters_of(schedule), rotary_dim=4, max_length=getattr(schedule, "original_length", None)) == schedule
    )


def test_a_rule_at_a_length_is_written_as_the_rule():
    rule = DynamicNTK(Geometric(), 2.0, 2048)
    assert parameters_of(rule.at(4096)) == parameters_of(rule)


def test_what_transformers_has_no_type_for_is_refused():
    with pytest.raises(ConfigError, match=r"transformers has no rope_type for Linear\(schedule=YaRN"):
        parameters_of(Linear(YaRN(Geometric(), 4.0, 64), 2.0))
