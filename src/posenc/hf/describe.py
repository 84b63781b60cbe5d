"""A plan in words, for a terminal of a hundred columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from posenc.core.rotary import Pairing
from posenc.hf.rotation import Rotation
from posenc.schedules.base import AtLength, LengthRule, Schedule
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.geometric import Geometric
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.ntk import NTK
from posenc.schedules.proportional import Proportional
from posenc.schedules.yarn import YaRN

if TYPE_CHECKING:
    from posenc.hf.position_plan import LayerPlan, PositionPlan

COLUMNS = 100
PAIRS: dict[Pairing, str] = {"half": "channel i with i + half", "interleaved": "neighbouring channels"}


def describe(plan: PositionPlan, indent: str = "") -> str:
    """The plan, its parts and its notes."""
    total = sum(count for _, count in plan.runs)
    lengths = []
    if plan.trained_length:
        lengths.append(f"trained on {_count(plan.trained_length)}")
    if plan.max_length and plan.max_length != plan.trained_length:
        lengths.append(f"promises {_count(plan.max_length)}")
    head = f"{indent}{plan.model_type or 'a model without a type'}: {total} layer{'s' * (total != 1)}"
    lines = [head + (f", {', '.join(lengths)} tokens" if lengths else "")]
    if plan.input is not None:
        lines += _wrap(f"{indent}  input   ", str(plan.input))
    for layer, where in _grouped(plan):
        lines += _wrap(f"{indent}  {where}", "", "")
        for title, text in _facts(layer):
            lines += _wrap(f"{indent}    {title:<12}", text)
    for name, part in plan.parts.items():
        lines += [f"{indent}  {name}", describe(part, indent + "    ")]
    if plan.notes:
        lines.append(f"{indent}  notes")
        for note in plan.notes:
            lines += _wrap(f"{indent}    - ", note)
    return "\n".join(line.rstrip() for line in lines)


def _count(tokens: int) -> str:
    return f"{tokens:,}"


def _wrap(lead: str, text: str, hang: str | None = None) -> list[str]:
    if not text:
        return textwrap.wrap(lead, COLUMNS, subsequent_indent=" " * (len(lead) - len(lead.lstrip()) + 2)) or [lead]
    return textwrap.wrap(text, COLUMNS, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False)


def _grouped(plan: PositionPlan) -> list[tuple[LayerPlan, str]]:
    """Equal layers together, wherever they stand, with their numbers."""
    spans: dict[LayerPlan, list[tuple[int, int]]] = {}
    start = 0
    for layer, count in plan.runs:
        spans.setdefault(layer, []).append((start, start + count - 1))
        start += count
    return [(layer, _numbers(found, layer.kind)) for layer, found in spans.items()]


def _numbers(spans: list[tuple[int, int]], kind: str) -> str:
    total = sum(last - first + 1 for first, last in spans)
    shown = [f"{first}" if first == last else f"{first}–{last}" for first, last in spans]
    if len(shown) > 8:
        shown = [*shown[:4], "…", shown[-1]]
    numbers = ", ".join(shown)
    kind = kind.replace("_", " ")
    return f"layer {numbers} ({kind})" if total == 1 else f"layers {numbers} ({total}, {kind})"


def _facts(layer: LayerPlan) -> list[tuple[str, str]]:
    facts = []
    if layer.rotation is None:
        facts.append(("turns", "nothing"))
    else:
        facts += _turning(layer.rotation)
    if layer.bias is not None:
        facts.append(("scores", str(layer.bias)))
    if layer.window is not None:
        facts.append(("window", f"{layer.window:,} tokens, the query's own included"))
    if layer.chunk is not None:
        facts.append(("chunks", f"of {layer.chunk:,} tokens; attention stays inside one"))
    if layer.temperature is not None:
        facts.append(("temperature", str(layer.temperature)))
    if layer.score_factor != 1:
        facts.append(("softmax", f"scale × {layer.score_factor:.6g}, beside 1/√head_dim"))
    return facts


def _turning(rotation: Rotation) -> list[tuple[str, str]]:
    turning = rotation.rotary_dim
    span = (
        f"all {turning} channels"
        if turning == rotation.head_dim
        else f"channels {rotation.start}–{rotation.start + turning - 1} of {rotation.head_dim}"
    )
    facts = [("turns", f"{span} of queries and keys, {PAIRS[rotation.pairing]}"), ("frequencies", words(rotation.schedule))]
    if rotation.axes is not None:
        facts.append(("axes", f"{', '.join(rotation.axes.names)}: {rotation.axes.style}"))
    return facts


def _gains(schedule: LongRoPE) -> tuple[float, float]:
    """The amplitude up to the original length, and beyond it."""
    width, length = 2 * len(schedule.short_factor), schedule.original_length
    return (
        float(schedule.frequencies_at(width, length).amplitude),
        float(schedule.frequencies_at(width, length + 1).amplitude),
    )


def words(schedule: Schedule | LengthRule) -> str:
    """A schedule in words."""
    match schedule:
        case Geometric():
            return f"base {schedule.base:,.10g}"
        case Linear():
            return f"{words(schedule.schedule)}, all divided by {schedule.factor:g} (linear)"
        case NTK():
            return f"{words(schedule.schedule)}, raised for {schedule.factor:g} times the length (NTK)"
        case DynamicNTK():
            return (
                f"{words(schedule.schedule)}, raised once the length passes {schedule.original_length:,}, factor {schedule.factor:g} "
                "(dynamic NTK: cached keys do not follow)"
            )
        case YaRN():
            text = (
                f"{words(schedule.schedule)}, YaRN ×{schedule.factor:g} from {schedule.original_length or 0:,}: pairs of more than "
                f"{schedule.beta_fast:g} turns kept, of less than {schedule.beta_slow:g} divided"
            )
            text += "" if schedule.rounding == "outward" else ", bounds not rounded"
            gain = schedule.resolved_amplitude
            return text + ("" if gain == 1 else f"; amplitude {gain:.6g}")
        case Llama3():
            return (
                f"{words(schedule.schedule)}, Llama 3 ×{schedule.factor:g} from {schedule.original_length:,}: wavelengths under "
                f"{(schedule.original_length or 0) / schedule.high_freq_factor:,.6g} kept, over "
                f"{(schedule.original_length or 0) / schedule.low_freq_factor:,.6g} divided"
            )
        case LongRoPE():
            text = (
                f"{words(schedule.schedule)}, LongRoPE: short factors up to {schedule.original_length:,} tokens, long ones after (cached keys "
                "do not follow)"
            )
            gains = dict.fromkeys(f"{gain:.6g}" for gain in _gains(schedule))
            return text + ("" if list(gains) == ["1"] else f"; amplitude {', then '.join(gains)}")
        case Proportional():
            text = f"{words(schedule.schedule)} over the whole head, the first {schedule.proportion:g} of the pairs turn, the rest stand still"
            return text + ("" if schedule.factor == 1 else f", all divided by {schedule.factor:g}")
        case AtLength():
            return f"{words(schedule.rule)}, at {schedule.length:,} tokens"
    return repr(schedule)
