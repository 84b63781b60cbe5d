"""Every rule × settings × base × width, read back from its frequencies.

``python -m tests.audit.ladder_sweep`` in the repository writes ``docs/results/audit-inference.json``. One core, about
ten minutes.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tests.schedules import oracle

import posenc
from posenc.audit.ladders.explaining import explain
from posenc.schedules.base import AtLength
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.explicit import Explicit
from posenc.schedules.geometric import Geometric
from posenc.schedules.hertz import Hertz
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.ntk import NTK
from posenc.schedules.proportional import Proportional
from posenc.schedules.yarn import YaRN

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "audit-inference.json"
WIDTHS = (2, 4, 8, 32, 64, 128, 256)
BASES = (1e4, 5e5, 1e6, 1.5e5, 51_234.8, 7_777_777.0)
FACTORS = (2.0, 8.0, 40.0)
LENGTHS = (2048, 8192, 131_072, 5000)


def schedules(base: float, width: int) -> Iterator[Any]:
    """All that are tried on one ladder."""
    ladder = Geometric(base)
    yield ladder
    yield from (Linear(ladder, factor) for factor in FACTORS)
    for proportion, factor in product((0.0, 0.25, 0.5, 0.3), (1.0, 8.0)):
        yield Proportional(ladder, proportion, factor)
    if width > 2:
        yield from (NTK(ladder, factor) for factor in FACTORS)
        yield from (DynamicNTK(ladder, factor, 4096).at(10_000) for factor in FACTORS)
        yield from (Hertz(slowest, 50.0) for slowest in (0.1, 1 / 30))
    for factor, length in product(FACTORS, LENGTHS):
        for low, high in ((1.0, 4.0), (1.0, 1.0), (2.0, 5.0)):
            yield Llama3(ladder, factor, length, low_freq_factor=low, high_freq_factor=high)
        for fast, slow, rounding in ((32.0, 1.0, "outward"), (32.0, 1.0, "none"), (4.0, 1.0, "outward"), (16.0, 2.0, "none")):
            yield YaRN(ladder, factor, length, beta_fast=fast, beta_slow=slow, rounding=rounding)
    yield YaRN(ladder, 40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    yield YaRN(ladder, 1.0, 4096, amplitude=1.25)
    yield Linear(YaRN(ladder, 8.0, 4096), 2.0)
    yield Linear(Llama3(ladder, 8.0, 8192), 2.0)
    lists = ([1.05 + 0.01 * pair for pair in range(width // 2)], [1.0 + 0.37 * pair for pair in range(width // 2)])
    yield LongRoPE(Geometric(1e4), *lists, 4096, factor=32.0).at(4097)


def formula(schedule: Any, width: int) -> list[float]:
    """The frequencies of a schedule, one number at a time, from the rule's paper or released code."""
    match schedule:
        case Geometric(base=base):
            return oracle.ladder(base, width)
        case Linear(schedule=inner, factor=factor):
            return [value / factor for value in formula(inner, width)]
        case NTK(schedule=Geometric(base=base), factor=factor):
            return oracle.ntk(base, width, factor)
        case Hertz(slowest=slow, fastest=fast):
            return [2 * torch.pi * fast * (slow / fast) ** (i / (width // 2 - 1)) for i in range(width // 2)]
        case Proportional(schedule=Geometric(base=base), proportion=proportion, factor=factor):
            return oracle.proportional(base, width, proportion, factor)
        case Llama3(schedule=Geometric(base=base)) as rule:
            low, high = rule.low_freq_factor, rule.high_freq_factor
            return oracle.llama3(base, width, rule.factor, rule.original_length, low, high)
        case YaRN(schedule=Geometric(base=base)) as rule:
            rounded = rule.rounding == "outward"
            return oracle.yarn(base, width, rule.factor, rule.original_length, rule.beta_fast, rule.beta_slow, rounded)
        case AtLength(rule=LongRoPE() as rule, length=length):
            factors = rule.long_factor if length > rule.original_length else rule.short_factor
            return oracle.longrope(rule.schedule.base, width, factors)
        case AtLength(rule=DynamicNTK() as rule, length=length):
            return oracle.dynamic(rule.schedule.base, width, rule.factor, rule.original_length, length)
        case Explicit(inv_freq=values):
            return list(values)
    raise AssertionError(schedule)


def rank(schedule: Any) -> int:
    """The place in the documented order of simplicity."""
    order = (Geometric, Linear, NTK, Hertz, Proportional)
    match schedule:
        case Linear(schedule=Llama3() | YaRN() as inner):
            return 5 + rank(inner)
        case Llama3() | YaRN():
            settings = {Llama3: ("low_freq_factor", "high_freq_factor"), YaRN: ("beta_slow", "beta_fast")}[type(schedule)]
            usual = tuple(getattr(schedule, key) for key in settings) == {Llama3: (1, 4), YaRN: (1, 32)}[type(schedule)]
            return 5 + isinstance(schedule, YaRN) + 2 * (not usual)
        case AtLength(rule=DynamicNTK()):
            return 0
        case AtLength():
            return 14
        case Explicit():
            return 15
    return order.index(type(schedule))


def difference(one: list[float], other: list[float]) -> float:
    """The largest relative difference of two ladders."""
    return max(0.0 if a == b else abs(a - b) / abs(b) if b else float("inf") for a, b in zip(one, other, strict=True))


def kind(schedule: Any) -> str:
    match schedule:
        case AtLength(rule=rule):
            return f"{type(rule).__name__} at a length"
        case Linear(schedule=Llama3() | YaRN() as inner):
            return f"Linear of {type(inner).__name__}"
    return type(schedule).__name__


def sweep(widths: tuple[int, ...] = WIDTHS, bases: tuple[float, ...] = BASES) -> dict[str, Any]:
    """By rule: how many ladders, how many read back simply enough, and how closely."""
    tally: dict[str, Any] = {}
    for width, base in product(widths, bases):
        for schedule in schedules(base, width):
            try:
                made = schedule.frequencies(width)
            except ValueError:  # a ramp that would fall
                continue
            row = tally.setdefault(kind(schedule), {"ladders": 0, "simple": 0, "simple_float32": 0, "largest_difference": 0.0})
            row["ladders"] += 1
            exact = explain(made.inv_freq, float(made.amplitude))[0].schedule
            row["simple"] += rank(exact) <= rank(schedule)
            row["largest_difference"] = max(
                row["largest_difference"], difference(formula(exact, width), formula(schedule, width))
            )
            single = schedule.frequencies(width, dtype=torch.float32)
            row["simple_float32"] += rank(explain(single.inv_freq, float(single.amplitude))[0].schedule) <= rank(schedule)
        print(f"{width} channels, base {base:g}", file=sys.stderr)
    for row in tally.values():
        row["largest_difference"] = float(f"{row['largest_difference']:.1e}")
    return tally


def main() -> None:
    torch.set_num_threads(1)
    report = {
        "schema": "posenc.audit-inference/1",
        "command": "python -m tests.audit.ladder_sweep",
        "environment": {
            "posenc": posenc.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "widths": WIDTHS,
        "bases": BASES,
        "rules": sweep(),
    }
    RESULTS.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
