"""What a model's configurations promise: the plan that holds for each of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from posenc.errors import ConfigError
from posenc.hf.defaults import model_defaults
from posenc.hf.describe import words
from posenc.hf.families import FAMILIES, NO_ATTENTION
from posenc.hf.position_plan import LayerPlan, PositionPlan, plan
from posenc.hf.rotation import Rotation

NOTHING = "nothing turns"


@final
@dataclass(frozen=True)
class Promise:
    """A configuration and what it says of positions.

    Args:
        owner: the module that holds it, by name; ``""`` is the model itself.
        config: the configuration.
        plan: what it says.
    """

    owner: str
    config: Any
    plan: PositionPlan

    @property
    def guessed(self) -> bool:
        """Whether the architecture is not known and its keys are read as Llama reads them."""
        return self.plan.model_type not in model_defaults() and self.plan.model_type not in FAMILIES

    def rotations(self, label: str | None = None) -> list[Rotation]:
        """The different rotations of its layers, or of those that read one block."""
        found = (layer.rotation for layer, _ in self.plan.runs if label is None or layer.entry == label)
        return list(dict.fromkeys(rotation for rotation in found if rotation is not None))

    @property
    def lines(self) -> list[str]:
        """What is promised, one fact per line; none where positions do nothing."""
        lead = f"{self.owner}: " if self.owner else ""
        total, facts = len(self.plan.layers), Counter[str]()
        for layer, count in self.plan.runs:
            for fact in _facts(layer):
                facts[fact] += count
        if self.plan.input is None and set(facts) <= {NOTHING}:
            return []
        whole = [] if self.plan.input is None else [f"{lead}promised {self.plan.input}"]
        return whole + [f"{lead}{count} of {total} layers: {fact}" for fact, count in facts.items()]


@final
class Promises:
    """The promises of a model, by the module that they hold for.

    A transformers model is made of models: each holds a configuration, which counts for what is inside.

    Attributes:
        made: by the name of the module that holds the configuration.
        refused: the same for those that have no plan, with the reason.
    """

    def __init__(self, model: nn.Module) -> None:
        self.made: dict[str, Promise] = {}
        self.refused: dict[str, str] = {}
        plans: dict[int, PositionPlan | str] = {}
        for name, module in model.named_modules():
            config = getattr(module, "config", None)
            holds = not name or hasattr(module, "base_model_prefix")  # attention and rotary modules keep copies
            if not holds or not _is_configuration(config):
                continue
            if id(config) not in plans:
                plans[id(config)] = _planned(config)
            found = plans[id(config)]
            if isinstance(found, str):
                self.refused[name] = found
            else:
                self.made[name] = Promise(name, config, found)

    def of(self, name: str) -> Promise | None:
        """What holds for a module: the word of the nearest configuration around it."""
        owner = name
        while owner not in self.made and owner not in self.refused:
            if not owner:
                return None
            owner = owner.rpartition(".")[0]
        return self.made.get(owner)

    @property
    def distinct(self) -> list[Promise]:
        """Those that say something of their own; the outermost speaks for the like of it."""
        found: list[Promise] = []
        for promise in self.made.values():
            if all(promise.plan != other.plan for other in found):
                found.append(promise)
        return found

    @property
    def main(self) -> PositionPlan | None:
        """The whole model's plan."""
        return next(iter(self.made.values())).plan if self.made else None


def _facts(layer: LayerPlan) -> Iterator[str]:
    turning = layer.rotation
    if turning is not None:
        channels = f"{turning.rotary_dim} of {turning.head_dim} channels"
        axes = "" if turning.axes is None else f", axes {', '.join(turning.axes.names)}"
        yield f"{turning.pairing} pairing, {channels}{axes}, {words(turning.schedule)}"
    elif layer.kind not in NO_ATTENTION and layer.bias is None:
        yield NOTHING
    if layer.bias is not None:
        yield str(layer.bias)
    if layer.window is not None:
        yield f"a window of {layer.window:,} tokens"
    if layer.chunk is not None:
        yield f"chunks of {layer.chunk:,} tokens"


def _is_configuration(config: Any) -> bool:
    """Whether it names an architecture; other libraries call other things ``config``."""
    if isinstance(config, Mapping):
        return isinstance(config.get("model_type"), str)
    return callable(getattr(config, "to_dict", None)) and isinstance(getattr(config, "model_type", None), str)


def _planned(config: Any) -> PositionPlan | str:
    try:
        return plan(config)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # the configuration's own code
        return f"{type(config).__name__} cannot be read: {type(error).__name__}: {error}"
