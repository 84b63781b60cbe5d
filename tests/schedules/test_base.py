"""What all rules share: they are values, defaults of the process change nothing, and length rules need a length."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from posenc import Explicit, Geometric, RoPE
from posenc.schedules.base import AtLength, LengthRule
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.ntk import NTK
from posenc.schedules.proportional import Proportional
from posenc.schedules.yarn import YaRN

DIM = 16
RULES = {
    "dynamic": lambda g, n: DynamicNTK(g, n, 2048),
    "longrope": lambda g, n: LongRoPE(g, [n] * 8, [n + 1] * 8, 4096, short_amplitude=n, long_amplitude=n + 1),
}
SCHEDULES = {
    "explicit": lambda g, n: Explicit([n] * 8, n),
    "linear": lambda g, n: Linear(g, n),
    "ntk": lambda g, n: NTK(g, n),
    "yarn": lambda g, n: YaRN(g, n, 4096, beta_fast=n + 1, beta_slow=n, amplitude=n, mscale=n, mscale_all_dim=n),
    "llama3": lambda g, n: Llama3(g, n, 8192, low_freq_factor=n, high_freq_factor=n + 1),
    "proportional": lambda g, n: Proportional(g, 1, n),
    "wrapped": lambda g, n: Linear(Llama3(YaRN(g, n, 4096), n, 4096), n),
    "pinned": lambda g, n: DynamicNTK(g, n, 2048).at(5000),
}
ALL = SCHEDULES | RULES
NAMES = {value.__name__: value for value in (
    AtLength, DynamicNTK, Explicit, Geometric, Linear, Llama3, LongRoPE, NTK, Proportional, YaRN
)}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_rules_are_values(name):
    one, same, other = ALL[name](Geometric(), 2), ALL[name](Geometric(), 2.0), ALL[name](Geometric(), 3)
    assert one == same
    assert hash(one) == hash(same)
    assert repr(one) == repr(same)
    assert one != other
    assert eval(repr(other), dict(NAMES)) == other
    assert len({one, same, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.factor = 8.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SCHEDULES)
def test_defaults_of_the_process_change_nothing(name, dtype):
    schedule = SCHEDULES[name](Geometric(), 2)
    right = schedule.frequencies(DIM, dtype=dtype)
    assert right.inv_freq.dtype == dtype
    torch.set_default_dtype(torch.bfloat16)
    try:
        result = schedule.frequencies(DIM, dtype=dtype)
        assert torch.equal(result.inv_freq, right.inv_freq)
        assert result.inv_freq.dtype == dtype
        with torch.device("meta"):
            assert torch.equal(schedule.frequencies(DIM, dtype=dtype, device="cpu").inv_freq, right.inv_freq)
            assert schedule.frequencies(DIM, dtype=dtype).inv_freq.is_meta
    finally:
        torch.set_default_dtype(torch.float32)
    described = schedule.frequencies(DIM, dtype=dtype, device="meta")
    assert described.inv_freq.is_meta
    assert described.inv_freq.shape == (DIM // 2,)
    assert described.inv_freq.dtype == dtype
    assert described.amplitude == right.amplitude


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RULES)
def test_defaults_of_the_process_change_no_length_rule(name, dtype):
    rule, lengths = RULES[name](Geometric(), 2), torch.tensor([[10, 5000, 9000]], dtype=torch.int32)
    right = rule.frequencies_at(DIM, lengths, dtype=dtype)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            result = rule.frequencies_at(DIM, lengths, dtype=dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    for actual, expected in zip(result, right, strict=True):
        assert actual == expected if isinstance(expected, float) else torch.equal(actual, expected)
        assert isinstance(expected, float) or actual.dtype == expected.dtype == dtype
    for described in (
        rule.frequencies_at(DIM, lengths, dtype=dtype, device="meta"),
        rule.frequencies_at(DIM, lengths.to("meta"), dtype=dtype),
    ):
        assert described.inv_freq.is_meta
        assert described.inv_freq.shape == (1, 3, DIM // 2)
        assert described.inv_freq.dtype == dtype


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("wrap", [lambda r: RoPE(DIM, r), lambda r: Linear(r, 2.0), lambda r: Llama3(r, 8.0, 8192)])
def test_a_length_rule_without_a_length_is_refused(name, wrap):
    rule = RULES[name](Geometric(), 2)
    message = (
        r"(RoPE|Linear|Llama3): schedule = .*, whose frequencies depend on the length, while keys already cached do not "
        r"follow. Expected a schedule. Fix the length, rule\.at\(length\); or .*"
        r"prepare\(…, frequencies=rule\.frequencies_at\(rotary_dim, lengths\)\)"
    )
    with pytest.raises(TypeError, match=message):
        wrap(rule)
    assert wrap(rule.at(100)) is not None
    assert not hasattr(rule, "frequencies")


@pytest.mark.parametrize("schedule", [10000.0, None, Geometric, DynamicNTK])
def test_what_is_no_schedule_is_refused(schedule):
    with pytest.raises(TypeError, match=r"RoPE: schedule = .* Expected a schedule such as Geometric"):
        RoPE(DIM, schedule)


def test_a_pinned_rule_holds_what_it_was_made_of():
    rule = DynamicNTK(Geometric(), 2.0, 2048)
    pinned = rule.at(5000)
    assert pinned == AtLength(rule, 5000)
    assert (pinned.rule, pinned.length) == (rule, 5000)
    assert pinned != rule.at(5001)
    assert torch.equal(pinned.frequencies(DIM).inv_freq, rule.frequencies_at(DIM, torch.tensor(5000)).inv_freq)


def test_impossible_pins_are_refused():
    rule = DynamicNTK(Geometric(), 2.0, 2048)
    with pytest.raises(ValueError, match=r"AtLength: length = 0. Expected an integer of 1 or more"):
        rule.at(0)
    with pytest.raises(TypeError, match=r"AtLength: length = 5000.0. Expected an integer of 1 or more"):
        rule.at(5000.0)
    with pytest.raises(TypeError, match=r"AtLength: length = tensor\(5\). Expected an integer of 1 or more"):
        rule.at(torch.tensor(5))
    with pytest.raises(
        TypeError, match=r"AtLength: rule = Geometric\(base=10000.0\). Expected a LengthRule such as DynamicNTK"
    ):
        AtLength(Geometric(), 5)


def test_anyone_can_write_a_length_rule():
    @dataclasses.dataclass(frozen=True)
    class Halving(LengthRule):
        def frequencies_at(self, rotary_dim, lengths, *, dtype=torch.float64, device=None):
            return Geometric().frequencies(rotary_dim, dtype=dtype, device=device)

    assert torch.equal(RoPE(DIM, Halving().at(3)).prepare(torch.arange(3))[0].cos, RoPE(DIM).prepare(torch.arange(3))[0].cos)
    with pytest.raises(TypeError, match="abstract"):
        LengthRule()


def test_every_rule_turns_queries_in_one_graph():
    x = torch.randn(1, 2, 5, DIM)
    schedule = SCHEDULES["wrapped"](Geometric(), 2)
    compiled = torch.compile(RoPE(DIM, schedule), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, x, 3)[0], RoPE(DIM, schedule)(x, x, 3)[0])
