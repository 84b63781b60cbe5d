"""How exact the angles are: against position · frequency, in the dtypes a model runs in and under autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from posenc.audit.findings import Finding
from posenc.audit.kinds import rotary as kinds
from posenc.audit.rotary.call import RotaryFunction, unit
from posenc.audit.rotary.planes import Planes, wrap
from posenc.audit.rotary.probe import angles

FLOAT32 = 2.0**-24
_SAMPLE = 512
_HALVES = (torch.bfloat16, torch.float16)


def sample(call: RotaryFunction, up_to: int, generator: torch.Generator) -> list[int]:
    """Some hundred positions up to the last; for a function that takes a start, a run from 0 and one to the end."""
    if up_to <= _SAMPLE:
        return list(range(up_to))
    half = _SAMPLE // 2
    if call.positions == "start":
        return [*range(half), *range(up_to - half, up_to)]
    some = torch.randint(half, up_to - 1, (half,), generator=generator).tolist()
    return sorted({*range(half), *some, up_to - 1})


def check_precision(
    call: RotaryFunction, planes: tuple[Planes, Planes], dtype: torch.dtype, up_to: int, where: str, generator: torch.Generator
) -> list[Finding]:
    """The angles of queries and keys of this dtype."""
    positions = sample(call, up_to, generator)
    name = str(dtype).removeprefix("torch.")
    return _judge_both(angles(call, planes, positions, dtype), planes, positions, unit(dtype), where, f"in {name}")


def check_autocast(
    call: RotaryFunction, planes: tuple[Planes, Planes], up_to: int, where: str, generator: torch.Generator
) -> list[Finding]:
    """Float32 queries and keys under autocast: matrix products become bfloat16, and angles must not be among them."""
    positions = sample(call, up_to, generator)
    with torch.autocast(call.device.type, torch.bfloat16):
        both = angles(call, planes, positions, torch.float32)
    return _judge_both(both, planes, positions, unit(torch.bfloat16), where, "under autocast")


def _judge_both(
    both: tuple[Tensor, Tensor], planes: tuple[Planes, Planes], positions: list[int], rounding: float, where: str, how: str
) -> list[Finding]:
    """Each side's finding; one for both when they share the kind."""
    q, k = (
        _judge(measured, planed, positions, rounding, f"{where}, {side} {how}")
        for side, measured, planed in zip(("queries", "keys"), both, planes, strict=True)
    )
    if q is not None and k is not None and q.kind == k.kind:
        return [replace(q, where=f"{where}, queries and keys {how}")]
    return [finding for finding in (q, k) if finding is not None]


def angle_error(
    call: RotaryFunction,
    planes: tuple[Planes, Planes],
    frequencies: Tensor,
    up_to: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> float:
    """The largest error of an angle of queries against exact frequencies of the turning pairs, in radians."""
    positions = sample(call, up_to, generator)
    measured, _ = angles(call, planes, positions, dtype)
    return float(wrap(measured - torch.tensor(positions, dtype=torch.float64)[:, None] * frequencies).abs().max())


def check_frequencies(planes: Planes, where: str) -> list[Finding]:
    """Frequencies that are half-precision numbers, which those of no rule are."""
    turning = planes.turning.abs()
    if len(turning) < 4:
        return []
    for half in _HALVES:
        rounded = turning.to(half).double()
        plain = torch.log2(turning)
        if ((rounded - turning).abs() <= 2.0**-20 * turning).all() and (plain != plain.round()).any():
            name = str(half).removeprefix("torch.")
            return [
                kinds.PRECISION.at(
                    where,
                    measured=f"each frequency is a {name} number: {', '.join(f'{f:.7g}' for f in turning[1:4].tolist())} …",
                    expected="frequencies in float32 or float64",
                    mend="Make the frequencies in float32 at use, from numbers that casts of the module do not touch.",
                )
            ]
    return []


def _judge(measured: Tensor, planes: Planes, positions: list[int], rounding: float, where: str) -> Finding | None:
    at = torch.tensor(positions, dtype=torch.float64)[:, None]
    frequencies = planes.turning
    off = wrap(measured - at * frequencies).abs()
    # cosine and sine are rounded in the table, after the product and after the sum; a float32 angle carries the roundings
    # of the frequency, of its power and of the product, each 2⁻²⁴ of the position
    bound = 4 * rounding + 4 * FLOAT32 * at * max(1.0, float(frequencies.abs().max()))
    worst = float(off.max())
    if (off <= bound).all():
        return None
    row, pair = divmod(int((off - bound).argmax()), off.shape[1])
    error = f"pair {pair} at position {positions[row]} is off by {float(off[row, pair]):.3g} rad"
    expected = f"position · frequency, off by {float(bound[row, 0]):.2g} at most"
    near = float(off[at[:, 0] <= 16].max())
    if near > 4 * rounding + 64 * FLOAT32 and worst < 2.0**-6:  # as wrong at the start as at the end: not the angle
        return kinds.TABLE_PRECISION.at(where, measured=f"{error}, and as much at the first positions", expected=expected)
    for half in _HALVES:
        name = str(half).removeprefix("torch.")
        if _explains(measured, at.to(half).double() * frequencies):
            return kinds.POSITION_ROUNDING.at(where, measured=f"{error}: positions are {name}", expected=expected)
        for what, made in _ROUNDED.items():
            if _explains(measured, made(at, frequencies, half)):
                return kinds.PRECISION.at(where, measured=f"{error}: {what} are {name}", expected=expected)
    last = measured[-1:]
    stuck = wrap(measured - last).abs().amax(1) < 2.0**-10
    if stuck.sum() > 2 and stuck[int(stuck.int().argmax()) :].all():
        end = positions[int(stuck.int().argmax())]
        return kinds.NOT_RELATIVE.at(where, measured=f"from position {end} on all turn alike", expected="position · frequency")
    grows = off.amax(1) <= 2.0**-6 * (1 + at[:, 0])  # an error in proportion to the position is one of precision
    kind = kinds.PRECISION if grows.all() else kinds.NOT_RELATIVE
    return kind.at(where, measured=error, expected=expected)


def _explains(measured: Tensor, angle: Tensor) -> bool:
    """Whether these angles are the measured ones, up to cosines in half precision."""
    return bool((wrap(measured - angle).abs() <= 2.0**-5).all())


_ROUNDED: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
    "frequencies": lambda at, frequencies, half: at * frequencies.to(half).double(),
    "positions and frequencies": lambda at, frequencies, half: at.to(half).double() * frequencies.to(half).double(),
    "angles": lambda at, frequencies, half: (at * frequencies).to(half).double(),
    "positions, frequencies and angles": lambda at, frequencies, half: (at.to(half) * frequencies.to(half)).double(),
}
"""What may have been rounded, and the angles that it makes."""
