"""What the checks look at: the keys of one model of a configuration, its rotary blocks and its plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from posenc.hf.blocks import BLOCK_KEYS
from posenc.hf.defaults import model_defaults
from posenc.hf.families import FAMILIES, UNLISTED, Family
from posenc.hf.parameters import ALIASES, ROPE_TYPES
from posenc.hf.position_plan import PositionPlan
from posenc.hf.reader import TEXT_PARTS
from posenc.hf.rotation import Rotation
from posenc.hf.write import home_of

ORIGINAL = "original_max_position_embeddings"


@final
@dataclass(frozen=True)
class Block:
    """A block of rotary parameters, flat or of one kind of layer.

    Args:
        where: its path in the file.
        data: its keys.
        kind: its rope_type in today's words; ``None`` for one that nobody has.
        nested: whether it stands under a kind of layer.
    """

    where: str
    data: Mapping[str, Any]
    kind: str | None
    nested: bool

    @property
    def scales(self) -> bool:
        return self.kind not in (None, "default", "axial")


@final
@dataclass(frozen=True)
class Sheet:
    """One model of a configuration: the text model, or another tower.

    Args:
        keys: its own keys.
        where: the path of the object that holds them; empty for the file itself.
        types: its model types, the most specific first.
        plan: what it does with positions; ``None`` when the configuration is refused.
        loaded: whether it comes from an object of transformers, which has already read the file.
    """

    keys: Mapping[str, Any]
    where: str
    types: tuple[str, ...]
    plan: PositionPlan | None
    loaded: bool = False

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    @property
    def model_type(self) -> str:
        return next(iter(self.types), "")

    @property
    def known(self) -> bool:
        """Whether transformers 5.24 has the architecture."""
        return any(name in model_defaults() for name in self.types)

    @property
    def own_code(self) -> bool:
        """Whether code outside transformers reads the file, keys that nobody else knows included."""
        return not self.known and bool(self.keys.get("auto_map"))

    @property
    def family(self) -> Family:
        return next((FAMILIES[name] for name in self.types if name in FAMILIES), UNLISTED)

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """The rotations of all layers, each once."""
        if self.plan is None:
            return ()
        return tuple(dict.fromkeys(layer.rotation for layer, _ in self.plan.runs if layer.rotation is not None))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that the file holds."""
        return tuple(self._blocks())

    def _blocks(self) -> Iterator[Block]:
        for name in ("rope_parameters", "rope_scaling"):
            given = self.keys.get(name)
            if not isinstance(given, Mapping) or not given:
                continue
            inner = {key: value for key, value in given.items() if isinstance(value, Mapping) and key not in BLOCK_KEYS}
            if not inner:
                yield Block(self.path(name), given, kind_of(given), nested=False)
            for key, value in inner.items():
                yield Block(f"{self.path(name)}.{key}", value, kind_of(value), nested=True)


def sheet_of(config: dict[str, Any], plan: PositionPlan | None, *, where: str = "", loaded: bool = False) -> Sheet:
    """The sheet of a configuration's text model."""
    home = home_of(config)
    inside = _path_to(home, config) or ""
    whole = config.get("model_type")
    parts = model_defaults().get(whole, {}).get("parts", {}) if isinstance(whole, str) else {}
    named = [home.get("model_type"), *(parts[name] for name in TEXT_PARTS if name in parts), whole]
    types = tuple(dict.fromkeys(name for name in named if isinstance(name, str) and name))
    return Sheet(home, ".".join(filter(None, (where, inside))), types, plan, loaded)


def _path_to(home: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    if config is home:
        return ""
    for name in TEXT_PARTS:
        inner = config.get(name)
        found = _path_to(home, inner) if isinstance(inner, Mapping) else None
        if found is not None:
            return f"{name}.{found}" if found else name
    return None


def kind_of(block: Mapping[str, Any]) -> str | None:
    """The rope_type of a block in today's words."""
    named = block.get("rope_type", block.get("type")) or "default"
    kind = ALIASES.get(named, named) if isinstance(named, str) else None
    return kind if kind in ROPE_TYPES else None


def number(keys: Mapping[str, Any], *names: str) -> float | None:
    """The first of these that is a number, as a check can use it; whatever else stands there is the plan's to refuse."""
    for name in names:
        value = keys.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value):
            return value
    return None


def neutral(value: object) -> bool:
    """Whether a value changes nothing wherever it is read: off, absent, or a factor of one."""
    if isinstance(value, bool):
        return not value
    return value is None or value == 1 or value in ("", "none", "default") or value == [] or value == {}
