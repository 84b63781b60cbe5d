"""The parts of a model that hold positions, found by their class, their name or what they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from posenc.core.sites import Encoding
from posenc.hf.patching import PatchedRotary, rotary_modules

Held = Literal["parameter", "buffer", "attribute"]

FREQUENCIES = re.compile(r"inv_?freq|inv_?timescale|freqs_c|^freqs$|^div_term$")
"""Names of frequencies, in radians per position."""

TABLES = re.compile(
    r"(^|_)(pe|wpe|pos|position|positional|positions|rope|rotary|alibi|slopes|relative|sinusoids?|sinusoidal|sin|cos)(_|\d|$)"
)
"""Names of tables that positions index."""

CLASSES = re.compile(r"Position(?!wise)|Rotary|RoPE|Rope(?![a-z])|Alibi|ALiBi|Sinusoid")
"""Names of classes that make positions."""

RELATIVE = re.compile(r"rel|bias|alibi|slopes|mask")
"""Names among these of what depends on a distance, where −∞ can be meant."""


@final
@dataclass(frozen=True)
class Part:
    """A tensor that holds positions.

    Args:
        name: where it is in the model.
        tensor: what it holds.
        held: how its module keeps it.
        module: the module.
    """

    name: str
    tensor: Tensor
    held: Held
    module: nn.Module

    @property
    def attribute(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def owner(self) -> str:
        """The name of its module."""
        return self.name.rpartition(".")[0]


@final
@dataclass(frozen=True)
class Ladder:
    """Live frequencies of a rotary module.

    Args:
        where: their name in the model.
        label: the block of ``rope_parameters`` that they stand for, where a module has several.
        inv_freq: radians per position, one per pair.
        original: the copy that rules of the length return to.
        amplitude: the gain on cosine and sine; ``None`` where the module keeps none.
        longest: the length that the table was last made for.
    """

    where: str
    label: str | None
    inv_freq: Tensor
    original: Tensor | None
    amplitude: float | None
    longest: int | None


def rotary_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that make rotary tables: by their class, or because they hold a ladder of frequencies."""
    known = dict(rotary_modules(model))
    for name, module in walk(model):
        if name in known or any(key.endswith("inv_freq") for key in (*module._buffers, *vars(module))):
            yield name, module


def encodings(model: nn.Module) -> Iterator[tuple[str, Encoding]]:
    """posenc's own encodings, the outermost of each."""
    for name, module in _outermost(model):
        if isinstance(module, Encoding):
            yield name, module


def named_like_positions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose class says that they make positions, the outermost of each."""
    found: list[str] = []
    for name, module in walk(model):
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and CLASSES.search(type(module).__name__):
            found.append(name)
            yield name, module


def patched(model: nn.Module) -> list[str]:
    """Rotary modules whose tables posenc makes."""
    return [name for name, module in _outermost(model) if isinstance(module, PatchedRotary)]


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules but posenc's own, which make their numbers anew at each call."""
    for name, module in _outermost(model):
        if not isinstance(module, (Encoding, PatchedRotary)):
            yield name, module


def _outermost(model: nn.Module, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, those of posenc's own included, but not what is inside them."""
    seen = set() if seen is None else seen
    if id(model) in seen:
        return
    seen.add(id(model))
    yield name, model
    if isinstance(model, (Encoding, PatchedRotary)):
        return
    for child, module in model.named_children():
        yield from _outermost(module, f"{name}.{child}" if name else child, seen)


def ladders(name: str, module: nn.Module) -> list[Ladder]:
    """The live frequencies of a rotary module, one entry per block that it holds."""
    labels = getattr(module, "rope_type", None)
    found = []
    for label in labels if isinstance(labels, dict) and labels else (None,):
        lead = "" if label is None else f"{label}_"
        inv_freq = getattr(module, f"{lead}inv_freq", None)
        if not isinstance(inv_freq, Tensor) or inv_freq.ndim != 1 or inv_freq.is_complex():
            continue
        original = getattr(module, f"{lead}original_inv_freq", None)
        amplitude = getattr(module, f"{lead}attention_scaling", None)
        longest = getattr(module, f"{lead}max_seq_len_cached", getattr(module, "max_seq_len_cached", None))
        found.append(
            Ladder(
                f"{name}.{lead}inv_freq".lstrip("."),
                label,
                inv_freq,
                original if isinstance(original, Tensor) and original.ndim == 1 else None,
                float(amplitude) if isinstance(amplitude, (int, float)) else None,
                int(longest) if isinstance(longest, (int, Tensor)) else None,
            )
        )
    return found


def position_tensors(model: nn.Module) -> Iterator[Part]:
    """Tensors of numbers that are named like positions: parameters, buffers and plain attributes."""
    for name, module in walk(model):
        kept: list[tuple[str, Tensor | None, Held]] = [
            *((key, value, "parameter") for key, value in module._parameters.items()),
            *((key, value, "buffer") for key, value in module._buffers.items()),
            *((key, value, "attribute") for key, value in vars(module).items() if isinstance(value, Tensor)),
        ]
        own = name.rpartition(".")[2]
        for key, value, held in kept:
            plain = key == "weights" or (isinstance(module, nn.Embedding) and key == "weight")
            named = FREQUENCIES.search(key) or TABLES.search(key) or (plain and TABLES.search(own))
            if value is None or not named or is_lazy(value) or value.ndim == 0:
                continue
            if value.is_floating_point() or value.is_complex():
                yield Part(f"{name}.{key}".lstrip("."), value, held, module)


def layer_of(name: str) -> int | None:
    """The layer that a module stands in, from its name: 3 for ``model.layers.3.self_attn``."""
    numbers = re.findall(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)(?:\.|$)", name)
    return int(numbers[0]) if len(numbers) == 1 else None
