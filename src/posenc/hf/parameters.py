"""Schedules from and to the keys of transformers' ``rope_parameters``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.errors import ConfigError
from posenc.hf.source import Keys
from posenc.schedules.base import AtLength, LengthRule, Schedule
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.geometric import Geometric
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.ntk import NTK
from posenc.schedules.proportional import Proportional
from posenc.schedules.yarn import YaRN

ROPE_TYPES = ("default", "axial", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
ALIASES = {"su": "longrope", "xdrope": "dynamic", "mrope": "default"}


def rope_type(parameters: Keys, default: str = "default") -> str:
    """The canonical type of a block, old names included."""
    given = parameters.text("rope_type", "type") if _agree(parameters) else parameters.text("rope_type")
    name = ALIASES.get(given or default, given or default)
    if name not in ROPE_TYPES:
        raise ConfigError(
            f"plan: {parameters.path('rope_type')} = {given!r}. Expected one of {', '.join((*ROPE_TYPES, *ALIASES))}. "
            "Convert the block to one of these, or plan the model without it."
        )
    return name


def _agree(parameters: Keys) -> bool:
    """Whether the two names of the type say the same, an alias counted as its meaning: files keep both."""
    old, new = parameters.data.get("type"), parameters.data.get("rope_type")
    parameters.read.update(("type", "rope_type"))
    if isinstance(old, str) and isinstance(new, str) and old != new:
        if ALIASES.get(old, old) != ALIASES.get(new, new):
            parameters.get("rope_type", "type")  # raises the conflict
        return False
    return True


def schedule_of(
    parameters: Keys,
    *,
    kind: str,
    max_length: int | None,
    original_length: int | None,
    pairs: int,
    rounds: bool | None = None,
    ignored: frozenset[str] = frozenset(),
) -> Schedule | LengthRule:
    """The schedule that a checked block of ``rope_parameters`` stands for.

    Args:
        kind: its canonical type.
        max_length: the model's ``max_position_embeddings``.
        original_length: the length before extension where the model says it outside the block.
        pairs: how many pairs turn, for the length of factor lists.
        rounds: YaRN's ``truncate`` where the reader decides it outside the block.
        ignored: keys that the architecture does not read.

    Raises:
        ConfigError: a missing or impossible value, naming the key and the rule.
    """
    ladder = Geometric(_needed(parameters, parameters.number("rope_theta"), "rope_theta", kind))
    try:
        return _rule(parameters, ladder, kind, max_length, original_length, pairs, rounds, ignored)
    except ConfigError:
        raise
    except ValueError as error:  # a schedule's own check: say which block it came from
        raise ConfigError(f"plan: {parameters.where or 'rope_parameters'} cannot be used. {error}") from None


def _rule(
    parameters: Keys,
    ladder: Geometric,
    kind: str,
    max_length: int | None,
    original_length: int | None,
    pairs: int,
    rounds: bool | None,
    ignored: frozenset[str],
) -> Schedule | LengthRule:
    match kind:
        case "default" | "axial":
            return ladder
        case "linear":
            return Linear(ladder, _factor(parameters, kind))
        case "proportional":
            proportion = parameters.number("partial_rotary_factor", least=0.0)
            return Proportional(ladder, 1.0 if proportion is None else proportion, parameters.number("factor") or 1.0)
        case "dynamic":
            alpha = None if "alpha" in ignored else parameters.number("alpha")
            if alpha is not None:
                parameters.read.add("factor")
                return NTK(ladder, alpha)
            return DynamicNTK(
                ladder, _factor(parameters, kind), _needed(parameters, max_length, "max_position_embeddings", kind)
            )
    original = _original(parameters, kind, max_length, original_length)
    match kind:
        case "llama3":
            low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
            return Llama3(
                ladder,
                _factor(parameters, kind),
                original,
                low_freq_factor=_needed(parameters, low, "low_freq_factor", kind),
                high_freq_factor=_needed(parameters, high, "high_freq_factor", kind),
            )
        case "yarn":
            truncate = parameters.flag("truncate") if rounds is None else rounds
            return YaRN(
                ladder,
                _factor(parameters, kind, max_length, original),
                original,
                beta_fast=parameters.number("beta_fast", least=0.0) or 32.0,
                beta_slow=parameters.number("beta_slow", least=0.0) or 1.0,
                amplitude=parameters.number("attention_factor"),
                mscale=parameters.number("mscale", least=0.0) or None,
                mscale_all_dim=parameters.number("mscale_all_dim", least=0.0) or None,
                rounding="none" if truncate is False else "outward",
            )
        case "longrope":
            lists = {}
            for name in ("short_factor", "long_factor"):
                values = parameters.items(name, of=(int, float))
                lists[name] = tuple(float(v) for v in _needed(parameters, values, name, kind))
                if len(lists[name]) != pairs:
                    parameters.fail(name, values, f"one factor per pair, {pairs}", f"It has {len(lists[name])}.")
            return LongRoPE(
                ladder,
                lists["short_factor"],
                lists["long_factor"],
                original,
                factor=_factor(parameters, kind, max_length, original),
                amplitude=parameters.number("attention_factor"),
                short_amplitude=None if "short_mscale" in ignored else parameters.number("short_mscale"),
                long_amplitude=None if "long_mscale" in ignored else parameters.number("long_mscale"),
            )
    raise AssertionError(kind)


def schedule_from(parameters: Mapping[str, Any], *, rotary_dim: int, max_length: int | None = None) -> Schedule | LengthRule:
    """The schedule of a ``rope_parameters`` or ``rope_scaling`` block on its own; `plan` reads whole configurations.

    Args:
        rotary_dim: how many channels turn, for the length of factor lists.
        max_length: ``max_position_embeddings``, which some rules count from.

    Raises:
        ConfigError: as `plan`.

    Example:
        >>> schedule_from({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, rotary_dim=64)
        Linear(schedule=Geometric(base=10000.0), factor=4.0)
    """
    block = Keys(dict(parameters), "rope_parameters")
    return schedule_of(block, kind=rope_type(block), max_length=max_length, original_length=None, pairs=rotary_dim // 2)


def parameters_of(schedule: Schedule | LengthRule) -> dict[str, Any]:
    """The ``rope_parameters`` block of a schedule.

    Raises:
        ConfigError: a schedule that transformers has no type for.
    """
    match schedule:
        case AtLength():
            return parameters_of(schedule.rule)
        case Geometric():
            return {"rope_type": "default", "rope_theta": schedule.base}
        case Linear(schedule=Geometric() as ladder):
            return {"rope_type": "linear", "rope_theta": ladder.base, "factor": schedule.factor}
        case NTK(schedule=Geometric() as ladder):
            return {"rope_type": "dynamic", "rope_theta": ladder.base, "alpha": schedule.factor}
        case DynamicNTK(schedule=Geometric() as ladder):
            return {"rope_type": "dynamic", "rope_theta": ladder.base, "factor": schedule.factor}
        case Proportional(schedule=Geometric() as ladder):
            block = {"rope_type": "proportional", "rope_theta": ladder.base, "partial_rotary_factor": schedule.proportion}
            return block if schedule.factor == 1 else {**block, "factor": schedule.factor}
        case Llama3(schedule=Geometric() as ladder):
            return {
                "rope_type": "llama3",
                "rope_theta": ladder.base,
                "factor": schedule.factor,
                "original_max_position_embeddings": schedule.original_length,
                "low_freq_factor": schedule.low_freq_factor,
                "high_freq_factor": schedule.high_freq_factor,
            }
        case YaRN(schedule=Geometric() as ladder):
            block = {
                "rope_type": "yarn",
                "rope_theta": ladder.base,
                "factor": schedule.factor,
                "original_max_position_embeddings": schedule.original_length,
                "beta_fast": schedule.beta_fast,
                "beta_slow": schedule.beta_slow,
                "truncate": schedule.rounding == "outward",
                "attention_factor": schedule.amplitude,
                "mscale": schedule.mscale,
                "mscale_all_dim": schedule.mscale_all_dim,
            }
            return {key: value for key, value in block.items() if value is not None}
        case LongRoPE(schedule=Geometric() as ladder):
            block = {
                "rope_type": "longrope",
                "rope_theta": ladder.base,
                "short_factor": list(schedule.short_factor),
                "long_factor": list(schedule.long_factor),
                "original_max_position_embeddings": schedule.original_length,
                "factor": schedule.factor,
                "attention_factor": schedule.amplitude,
                "short_mscale": schedule.short_amplitude,
                "long_mscale": schedule.long_amplitude,
            }
            return {key: value for key, value in block.items() if value is not None}
    raise ConfigError(
        f"parameters_of: transformers has no rope_type for {schedule!r}. Expected one of the registry's rules over a Geometric "
        "ladder. Patch the model with posenc instead of writing its config."
    )


def _needed(parameters: Keys, value: Any, name: str, kind: str) -> Any:
    if value is None:
        raise ConfigError(
            f"plan: {parameters.path(name)} is missing. Expected it for rope_type {kind!r}. Add the value that the model was trained with."
        )
    return value


def _factor(parameters: Keys, kind: str, max_length: int | None = None, original: int | None = None) -> float:
    factor = parameters.number("factor", least=1.0)
    if original is None or max_length is None:
        return float(_needed(parameters, factor, "factor", kind))
    implied = max_length / original
    if factor is None:
        parameters.note(
            f"{parameters.path('factor')} is not given: {implied:g}, the ratio of the lengths {max_length} and {original}"
        )
        return implied if implied > 1 else 1.0
    if implied not in (1.0, factor):
        parameters.note(
            f"{parameters.path('factor')} = {factor:g}, but the lengths {max_length} and {original} imply {implied:g}: the explicit factor counts"
        )
    return float(factor)


def _original(parameters: Keys, kind: str, max_length: int | None, outside: int | None) -> int:
    inside = parameters.integer("original_max_position_embeddings")
    if outside and inside and outside != inside:
        parameters.note(
            f"original_max_position_embeddings = {outside} beside the block counts, not {inside} in {parameters.where or 'it'}"
        )
    if not outside and not inside and max_length:
        parameters.note(
            f"{parameters.path('original_max_position_embeddings')} is not given: max_position_embeddings = {max_length} is taken, as "
            "transformers does"
        )
    return int(_needed(parameters, outside or inside or max_length, "original_max_position_embeddings", kind))
