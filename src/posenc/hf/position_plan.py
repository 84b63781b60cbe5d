"""`plan`: what a model's configuration says about its positions, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from posenc.core.rotary import RotaryTable
from posenc.core.temperature import LogTemperature
from posenc.core.tokens import Tokens
from posenc.errors import ConfigError
from posenc.hf.rotation import Rotation
from posenc.hf.rules import BiasRule, InputTable


@final
@dataclass(frozen=True)
class LayerPlan:
    """What acts on positions in one layer.

    Args:
        kind: the kind of layer, as configurations name it: ``full_attention``, ``sliding_attention``,
            ``linear_attention`` …
        rotation: of queries and keys; ``None`` where nothing turns.
        bias: on the scores.
        window: how many tokens a query sees, itself included; ``None`` for all.
        chunk: attention stays inside chunks of this many tokens.
        temperature: a factor on the queries that grows with the position.
        score_factor: multiplies the softmax scale (DeepSeek's ``mscale_all_dim``, squared).
        entry: the block of ``rope_parameters`` that the rotation comes from, where a model has several.
    """

    kind: str
    rotation: Rotation | None = None
    bias: BiasRule | None = None
    window: int | None = None
    chunk: int | None = None
    temperature: LogTemperature | None = None
    score_factor: float = 1.0
    entry: str | None = None


@final
@dataclass(frozen=True)
class PositionPlan:
    """A model's positions: what acts where, with which parameters.

    Args:
        model_type: the architecture, as transformers names it.
        runs: layers and how many like it follow each other.
        input: the table that is added to the embeddings, if one is.
        trained_length: tokens the model was trained on before any extension; ``None`` when nothing says so.
        max_length: tokens the configuration promises.
        parts: plans of the other towers (vision, audio, encoder), by the key of their configuration.
        notes: defaults used, keys that nothing reads, contradictions, deviations.
        config: the configuration that was read.
        rope_parameters: its rotary parameters in transformers 5 form.
    """

    model_type: str
    runs: tuple[tuple[LayerPlan, int], ...]
    input: InputTable | None = None
    trained_length: int | None = None
    max_length: int | None = None
    parts: Mapping[str, PositionPlan] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    rope_parameters: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    @property
    def layers(self) -> Layers:
        """One entry per layer; stored as runs of equal layers."""
        return Layers(self.runs)

    def rotary_table(
        self,
        positions: Tensor | Tokens,
        layer: int = 0,
        length: int | None = None,
        dtype: torch.dtype = torch.float32,
        angle_dtype: torch.dtype = torch.float64,
    ) -> RotaryTable:
        """Cosine and sine of a layer at these positions, half width, amplitude included.

        Shape:
            positions: ``[*batch, seq]`` of text positions; several axes ``[*batch, seq, axes]``. Models with several
            axes take text positions too, one number for all axes, as ``[seq]`` or ``[batch, seq]``.

        Args:
            length: for rules that depend on the length in use; ``None`` is the original length.
            dtype: of the table.
            angle_dtype: float32 gives transformers' table bit for bit.

        Raises:
            ConfigError: a layer that does not rotate.
            IndexError: a layer that the model does not have.

        Example:
            >>> from posenc.hf import plan
            >>> config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
            >>> plan(config).rotary_table(torch.arange(3)).cos.shape
            torch.Size([3, 8])
        """
        rotation = self.layers[layer].rotation
        if rotation is None:
            turning = self._first_that_turns()
            mend = "No layer of this model does." if turning is None else f"Layer {turning} is the first that does."
            raise ConfigError(
                f"rotary_table: layer {layer} of {self.model_type!r} does not rotate. Expected one that does. {mend}"
            )
        return rotation.table(positions, length=length, dtype=dtype, angle_dtype=angle_dtype)

    def _first_that_turns(self) -> int | None:
        before = 0
        for entry, count in self.runs:
            if entry.rotation is not None:
                return before
            before += count
        return None

    def to_config(self, version: int = 5) -> dict[str, Any]:
        """The configuration with its rotary keys written as transformers 4 or 5 writes them; other keys untouched.

        Raises:
            ConfigError: a rule that version 4 has no keys for.
        """
        from posenc.hf.write import write_config

        return write_config(self, version)

    def __str__(self) -> str:
        from posenc.hf.describe import describe

        return describe(self)


@final
class Layers:
    """The layers of a plan as a sequence, made of runs: a model of 10⁵ layers costs nothing."""

    def __init__(self, runs: tuple[tuple[LayerPlan, int], ...]) -> None:
        self._runs = runs

    def __len__(self) -> int:
        return sum(count for _, count in self._runs)

    def __getitem__(self, index: int) -> LayerPlan:
        total = len(self)
        if not isinstance(index, int) or not -total <= index < total:
            raise IndexError(f"plan.layers[{index}] of a model with {total} layers. Expected an index from 0 to {total - 1}.")
        index %= total
        for layer, count in self._runs:
            if index < count:
                return layer
            index -= count
        raise AssertionError

    def __repr__(self) -> str:
        return f"Layers({len(self)})"


def plan(config: str | Path | Mapping[str, Any] | object) -> PositionPlan:
    """Read a model's positions from its configuration.

    The thing people get wrong: a key that is absent is not a key that is 0. Every default that the architecture fills
    in is listed in the plan's notes, and so is every position-like key that nothing reads.

    Args:
        config: a path to ``config.json`` or its folder, its content as a mapping, or a transformers configuration.
            transformers itself is not needed for the first two. Nothing is downloaded and no code of the model runs.

    Returns:
        A `PositionPlan`; print it, index its ``layers``, make a ``rotary_table`` with it.

    Raises:
        ConfigError: a key that is missing, contradictory or impossible, named with its value and the rule.

    Example:
        >>> from posenc.hf import plan
        >>> llama = plan({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        ...               "rope_theta": 500000.0, "max_position_embeddings": 8192})
        >>> llama.layers[31].rotation.schedule
        Geometric(base=500000.0)

    Differs from:
        transformers: a factor below 1, an odd rotary width or a list of the wrong length are errors here, warnings or
        silence there.
    """
    from posenc.hf.reader import read

    return read(config)
