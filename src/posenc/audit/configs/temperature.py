"""Temperatures: in one place, and not squared by mistake."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose, log

from posenc.audit.configs.sheet import Block, Sheet, number
from posenc.audit.findings import Finding
from posenc.audit.kinds.configs import TEMPERATURE, UNREAD
from posenc.schedules.yarn import YaRN

SCORES = frozenset({"ministral3", "mistral4"})
"""Architectures of transformers 5.24 that read ``llama_4_scaling_beta``."""


def temperature(sheet: Sheet) -> Iterator[Finding]:
    """Amplitudes, softmax factors and factors that grow with the position."""
    for block in sheet.blocks:
        if block.kind == "yarn":
            yield from _amplitude(sheet, block)
        beta = number(block.data, "llama_4_scaling_beta")
        if beta and sheet.known and not SCORES & {*sheet.types}:
            yield UNREAD.at(
                f"{block.where}.llama_4_scaling_beta",
                measured=f"{beta:g} for {sheet.model_type!r}, which does not read it in transformers 5.24",
                expected=f"one of {', '.join(sorted(SCORES))}, whose queries it scales",
            )


def _amplitude(sheet: Sheet, block: Block) -> Iterator[Finding]:
    given = number(block.data, "attention_factor")
    scale, everywhere = number(block.data, "mscale"), number(block.data, "mscale_all_dim")
    factor = number(block.data, "factor") or 1.0
    plain = 0.1 * log(factor) + 1 if factor > 1 else 1.0
    if given is not None and scale and everywhere:
        ratio = _gain(factor, scale) / _gain(factor, everywhere)
        if not isclose(given, ratio, rel_tol=1e-6):  # files carry six digits or more
            yield TEMPERATURE.at(
                f"{block.where}.attention_factor",
                measured=f"{given:g} beside mscale = {scale:g} and mscale_all_dim = {everywhere:g}, which make {ratio:g}",
                expected="one of the two: attention_factor counts and the ratio of the mscales is not used",
            )
            return
    if given is not None and factor > 1 and given != 1:
        meant = {"the factor itself": factor, "the square of 0.1·ln(factor) + 1": plain**2}
        for name, value in meant.items():
            if isclose(given, value, rel_tol=1e-6):
                yield TEMPERATURE.at(
                    f"{block.where}.attention_factor",
                    measured=f"{given:g}, {name}: scores scale by {given**2:g}",
                    expected=f"{plain:.10g} for a factor of {factor:g}: it multiplies queries and keys, so scores scale by its square",
                )
                return
    if scale and not everywhere and scale != 1 and given is None:
        yield TEMPERATURE.at(
            f"{block.where}.mscale",
            measured=f"{scale:g} without mscale_all_dim: it is not used, the amplitude is {plain:.6g}",
            expected="both, or attention_factor",
        )
    yield from _on_both(sheet, block, given)


def _on_both(sheet: Sheet, block: Block, given: float | None) -> Iterator[Finding]:
    """An amplitude on queries and keys, and a factor on the softmax scale for the same purpose."""
    scale, everywhere = number(block.data, "mscale"), number(block.data, "mscale_all_dim")
    if not everywhere or (scale and given is None):
        return
    for layer, _ in () if sheet.plan is None else sheet.plan.runs:
        rule = None if layer.rotation is None else layer.rotation.schedule
        if isinstance(rule, YaRN) and layer.score_factor != 1 and rule.resolved_amplitude != 1:
            yield TEMPERATURE.at(
                f"{block.where}.mscale_all_dim",
                measured=f"softmax scale × {layer.score_factor:.6g}, and amplitude {rule.resolved_amplitude:.6g} on queries and keys: "
                f"scores of turned channels × {layer.score_factor * rule.resolved_amplitude**2:.6g}",
                expected="the temperature once: mscale equal to mscale_all_dim leaves the amplitude at 1",
            )
            return


def _gain(factor: float, scale: float) -> float:
    return 0.1 * scale * log(factor) + 1 if factor > 1 else 1.0
