"""ALiBi slopes in memory: which rule makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.audit.findings import Finding
from posenc.audit.kinds.biases import SLOPES
from posenc.audit.live.learned import is_learned
from posenc.audit.live.parts import Part
from posenc.audit.live.promises import Promises
from posenc.encodings.alibi import alibi_slopes


def check_slopes(parts: list[Part], promises: Promises) -> tuple[list[str], list[Finding]]:
    """Buffers of one slope per head, against the released rule.

    Without a promise of a configuration only the known mistake is a warning: exponents that start at 0.
    """
    described: list[str] = []
    findings: list[Finding] = []
    for part in parts:
        slopes = _slopes(part)
        if slopes is None:
            continue
        heads = len(slopes)
        rule = _rule(slopes, 2 * torch.finfo(part.tensor.dtype).eps)
        described.append(f"{part.name}: ALiBi slopes of {heads} heads, {rule or 'of a rule not known here'}")
        promise = promises.of(part.name)
        promised = promise is not None and any(
            layer.bias is not None and layer.bias.kind == "alibi" and not layer.bias.details for layer, _ in promise.plan.runs
        )
        if rule == "released" or not (promised or rule == FROM_ZERO):
            continue
        measured = f"{heads} slopes from {float(slopes[0]):.6g} to {float(slopes[-1]):.6g}" + (f": {rule}" if rule else "")
        right = alibi_slopes(heads)
        expected = f"from {right[0]:.6g} to {right[-1]:.6g}"
        findings.append(SLOPES.at(part.name, measured=measured, expected=expected, severity=None if promised else "warning"))
    return described, findings


FROM_ZERO = "every exponent one step too small"
_RULES = {
    "released": lambda right, series: right,
    "released, the heads in another order": lambda right, series: right.sort(descending=True).values,
    "one geometric series": lambda right, series: series,
    FROM_ZERO: lambda right, series: series * series[0] ** -1,
}


def _rule(slopes: Tensor, tolerance: float) -> str | None:
    heads = len(slopes)
    right = torch.tensor(alibi_slopes(heads), dtype=torch.float64)
    series = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    for name, made in _RULES.items():
        live = slopes.sort(descending=True).values if "another order" in name else slopes
        if bool(((live - made(right, series)).abs() <= tolerance * live).all()):
            return name
    return None


def _slopes(part: Part) -> Tensor | None:
    """One number per head, signs left out."""
    tensor = part.tensor.detach()
    if "slope" not in part.attribute or is_learned(part) or tensor.is_meta or not tensor.is_floating_point():
        return None
    flat = tensor.flatten().cpu().double().abs()
    return flat if len(flat) >= 2 and max(tensor.shape) == len(flat) and bool(flat.isfinite().all()) else None
