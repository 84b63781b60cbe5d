"""The tables that rotary modules return, against float64 angles of what is promised."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from posenc.audit.findings import Finding
from posenc.audit.kinds.parts import TABLE_HALF_ANGLES, TABLE_ROWS, TABLE_VALUES
from posenc.audit.live.parts import ladders
from posenc.audit.live.promises import Promise
from posenc.errors import ConfigError
from posenc.hf.describe import words
from posenc.hf.patching import PatchedRotary
from posenc.hf.rotation import Rotation

_ROUNDOFF = 2.0**-24  # float32
_ROUNDINGS = 8  # of an angle on its way: the exponent, the power (2), the quotient, a rescaling rule (3), the product


def table_findings(
    name: str, module: nn.Module, promise: Promise, rotations: list[Rotation], label: str | None
) -> tuple[Finding | None, list[str], str | None]:
    """The table that a module returns, at small positions and at the promised end, against float64 angles.

    Returns:
        What is wrong, what was seen in words, and why nothing could be.
    """
    where = name if label is None else f"{name} ({label})"
    fresh = fresh_module(module, promise)
    if fresh is None:
        return None, [], f"{type(module).__name__} is not built from a configuration alone"
    try:
        writer = PatchedRotary(fresh, promise.config, torch.float64).writers.get(label)
    except ConfigError as error:
        return None, [], str(error)
    if writer is None or writer.rotation not in rotations:
        return None, [], "its form is not known for this rotation"
    described = []
    longest = max((ladder.longest or 0 for ladder in ladders(name, module)), default=0)
    for steps in _steps(writer.rotation, promise, longest):
        at = _as_called(writer.rotation, steps)
        try:
            live = _call(module, at, () if label is None else (label,))
        except IndexError as error:
            last = f"position {int(steps[-1]):,} raises IndexError: {error}"
            return TABLE_ROWS.at(where, measured=last, expected="a table as long as the configuration promises"), [], None
        except Exception as error:  # the module's own code
            return None, [], f"{type(module).__name__} raised {type(error).__name__}: {error}"
        promised = _tensors(writer(torch.zeros(1), at, torch.float64))
        finding = _differing(where, steps, live, promised, writer.rotation)
        if finding is not None:
            return finding, [], None
        described.append(_precision(where, steps, live, promised))
    return None, described, None


def fresh_module(module: nn.Module, promise: Promise) -> nn.Module | None:
    """A new module of the same class, from the model's configuration."""
    build: Any = type(module)
    try:
        with torch.device("cpu"):
            made = build(config=promise.config)
    except Exception:  # a class of the user's, built otherwise
        return None
    return made if isinstance(made, nn.Module) else None


def _call(module: nn.Module, at: Tensor, rest: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The table of a copy: modules with rules of the length remember their longest call."""
    config = getattr(module, "config", None)
    twin = copy.deepcopy(module, {id(config): config})
    device = next((buffer.device for buffer in twin.buffers()), torch.device("cpu"))
    with torch.no_grad():
        made = twin(torch.zeros(1, device=device), at.to(device), *rest)
    return tuple(table.detach().cpu() for table in _tensors(made))


def _tensors(table: Any) -> tuple[Tensor, ...]:
    """The parts of a table, real, tokens in the last axis but one."""
    tables = (table,) if isinstance(table, Tensor) else tuple(table)
    return tuple(torch.cat((t.real, t.imag), dim=-1) if t.is_complex() else t for t in tables)


def _steps(rotation: Rotation, promise: Promise, longest: int) -> list[Tensor]:
    """Positions to compare at, ascending; for rules that depend on the length, on both sides of its switch.

    A module that remembers its longest call forgets it within the original length, and makes a new table beyond both.
    """
    if rotation.axes is not None and not rotation.axes.text:  # a small picture: tables of patches end soon
        return [torch.tensor([0, 1, 2, 3])]
    last = max(promise.plan.max_length or 4096, 2) - 1
    if not rotation.depends_on_length:
        return [_up_to(last)]
    original = rotation.original_length or 1
    return [_up_to(max(original - 2, 0)), _up_to(max(last, 2 * original, longest))]


def _up_to(last: int) -> Tensor:
    steps = [0, 1, 2, 7, 23, last // 2, last]
    return torch.tensor(sorted({min(step, last) for step in steps}))


def _as_called(rotation: Rotation, steps: Tensor) -> Tensor:
    """Positions in the shape that the module takes, the axes unlike each other."""
    axes = rotation.axes
    if axes is None:
        return steps[None]
    if axes.text:  # each axis at its own pace, none beyond the last position
        return torch.stack([steps // (axis + 1) for axis in range(len(axes.names))])[:, None]
    spread = _picture(rotation, steps)
    return spread[None] if axes.blocks > 1 else spread


def _picture(rotation: Rotation, steps: Tensor) -> Tensor:
    assert rotation.axes is not None
    return torch.stack([steps.roll(axis) for axis in range(len(rotation.axes.names))], dim=-1)


def _farthest(rotation: Rotation, steps: Tensor) -> Tensor:
    """The largest coordinate of each position."""
    if rotation.axes is None or rotation.axes.text:
        return steps.double()
    return _picture(rotation, steps).amax(-1).double() + rotation.axes.origin


def _differing(
    where: str, steps: Tensor, live: tuple[Tensor, ...], promised: tuple[Tensor, ...], rotation: Rotation
) -> Finding | None:
    if [t.shape for t in live] != [t.shape for t in promised]:
        shapes = " and ".join(str(tuple(t.shape)) for t in live)
        return TABLE_VALUES.at(
            where, measured=f"tables of shape {shapes}", expected=" and ".join(str(tuple(t.shape)) for t in promised)
        )
    errors = _errors(live, promised)
    gain = max(1.0, *(float(t.abs().max()) for t in promised))
    rounding = max(torch.finfo(t.dtype).eps for t in live) / 2
    positions = _farthest(rotation, steps)
    fastest = float(rotation.frequencies().inv_freq.abs().max())
    allowed = gain * (positions * fastest * _ROUNDINGS * _ROUNDOFF + 2 * rounding)  # the angle's, the cosine's and the gain's
    if not bool((errors > allowed).any()):
        return None
    worst = int(errors.argmax())
    measured = f"cosine or sine off by {float(errors[worst]):.3g} at position {int(steps[worst])}"
    # bfloat16 keeps 8 bits of the frequency, the position and their product: three halves of a unit, and one of the cosine
    coarse = gain * 2.0**-8 * (3 * positions * fastest + 1) + allowed
    grows = bool((errors <= coarse).all()) and bool((errors[-2:] > allowed[-2:]).all()) and worst >= len(steps) - 2
    kind = TABLE_HALF_ANGLES if grows else TABLE_VALUES
    expected = f"at most {float(allowed[worst]):.2g}, which float32 angles are off: {words(rotation.schedule)}"
    return kind.at(where, measured=measured, expected=expected)


def _errors(live: tuple[Tensor, ...], promised: tuple[Tensor, ...]) -> Tensor:
    """The largest difference at each position; infinite where there is no number."""
    apart = [(a.double() - b.double()).abs().nan_to_num(nan=torch.inf) for a, b in zip(live, promised, strict=True)]
    return torch.stack([error.movedim(-2, 0).flatten(1).amax(-1) for error in apart]).amax(0)


def _precision(where: str, steps: Tensor, live: tuple[Tensor, ...], promised: tuple[Tensor, ...]) -> str:
    error = float(_errors(live, promised).max())
    return f"{where}: the returned table is off by at most {error:.1e} up to position {int(steps[-1])}"
