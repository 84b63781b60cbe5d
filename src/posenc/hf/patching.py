"""`patch`: posenc's rotary tables in a loaded transformers model, its arithmetic untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import TracebackType
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn

from posenc.core.rotary import RotaryTable
from posenc.errors import ConfigError
from posenc.hf.position_plan import PositionPlan, plan
from posenc.hf.rotation import Rotation

Form = Literal["tiled", "repeated", "half", "blocks", "complex"]
"""How a module writes one column per pair: cat(f, f); each column twice; as it is; cat(f, f) per axis; cos + i·sin."""

_CLOSE = 2.0**-22  # a table formed in another order may differ by an ulp of 1


@final
class Patch:
    """What `patch` did; as a context manager it undoes it at the end.

    Attributes:
        replaced: names of the modules whose tables are posenc's now.
        left: names of rotary modules that were left alone, with the reason.
    """

    def __init__(self, model: nn.Module, replaced: tuple[str, ...], left: dict[str, str]) -> None:
        self._model, self.replaced, self.left = model, replaced, left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        unpatch(self._model)

    def __repr__(self) -> str:
        left = "".join(f"; left {name}: {reason}" for name, reason in self.left.items())
        return f"Patch({', '.join(self.replaced)}{left})"


def patch(model: nn.Module, *, angle_dtype: torch.dtype = torch.float64) -> Patch:
    """Swap the rotary tables of a loaded transformers model for posenc's; only cosine and sine change, never the rotation.

    The thing people get wrong: a table that looks right at the start of a text. Angles formed in float32 lose 10⁻²
    radians at position 130,000; those of posenc do not. With ``angle_dtype=torch.float32`` the model's logits stay
    bit-equal, which shows that nothing else changed. Files saved from a patched model are those of the model.

    A module is replaced only if posenc's float32 table equals that of a fresh one of its class and configuration, on
    both sides of a length at which the rule changes.

    Rules that depend on the length keep the model's own switch: the length is the largest position of the batch plus
    one, at every call.

    Args:
        model: a model of the transformers library; changed in place.
        angle_dtype: float64 is exact; float32 reproduces transformers.

    Returns:
        A `Patch`: what was replaced, what was left and why. Use it with ``with`` to undo the change at the end.

    Raises:
        ConfigError: no rotary module whose table posenc reproduces; the reasons are in the message.
        ValueError: a model that is patched already.
        TypeError: not a module, or another ``angle_dtype``.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> model = LlamaModel(LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                                num_attention_heads=2))
        >>> with patch(model) as done:
        ...     done.replaced
        ('rotary_emb',)

    Differs from:
        transformers: dynamic NTK there remembers the longest call until a short one; here a table depends on the call
        alone. In generation from a fresh model the two are the same. ``model.to(torch.bfloat16)`` rounds the
        frequencies there, though loading with ``dtype=torch.bfloat16`` does not; here nothing does.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: a {type(model).__name__}. Expected a model of the transformers library. Load it first.")
    if angle_dtype not in (torch.float32, torch.float64):
        raise TypeError(f"patch: angle_dtype = {angle_dtype}. Expected torch.float64 or torch.float32. Use float64.")
    if any(isinstance(module, PatchedRotary) for module in model.modules()):
        raise ValueError("patch: the model is patched already. Expected its own rotary modules. Call unpatch(model) first.")
    swaps: dict[str, tuple[nn.Module, str, PatchedRotary]] = {}
    left: dict[str, str] = {}
    for name, parent, attribute, module in _rotary_modules(model):
        try:
            swaps[name] = parent, attribute, PatchedRotary(module, getattr(parent, "config", None), angle_dtype)
        except ConfigError as error:
            left[name] = str(error)
    if not swaps:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left.items()) or "none of its modules makes a rotary table"
        raise ConfigError(
            f"patch: nothing in {type(model).__name__} can be replaced ({reasons}). Expected a transformers model with a module that makes "
            "the rotary table. Print posenc.hf.plan(model.config) to see what it does with positions."
        )
    for parent, attribute, swapped in swaps.values():
        setattr(parent, attribute, swapped)
    return Patch(model, tuple(swaps), left)


def unpatch(model: nn.Module) -> None:
    """Put the model's own rotary modules back. A model that is not patched stays as it is."""
    for parent in list(model.modules()):
        for attribute, module in list(parent.named_children()):
            if isinstance(module, PatchedRotary):
                setattr(parent, attribute, module.original)


def rotary_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a transformers model that make rotary tables, by name."""
    for name, _, _, module in _rotary_modules(model):
        yield name, module


def _rotary_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    for prefix, parent in model.named_modules():
        for attribute, module in parent.named_children():
            kind = type(module).__name__
            if ("Rotary" in kind or "RopePosition" in kind) and not isinstance(module, PatchedRotary):
                yield f"{prefix}.{attribute}" if prefix else attribute, parent, attribute, module


@final
class PatchedRotary(nn.Module):
    """A rotary module of transformers whose tables posenc makes; called and answering like the original."""

    def __init__(self, original: nn.Module, owners: Any, angle_dtype: torch.dtype) -> None:
        super().__init__()
        config = getattr(original, "config", owners)  # GPT-J's module forgets what it was built from
        if not hasattr(config, "to_dict"):
            raise ConfigError(f"{type(original).__name__} keeps no configuration")
        if any(True for _ in original.parameters()):
            raise ConfigError(f"{type(original).__name__} learns its frequencies")
        self.angle_dtype = angle_dtype
        self.writers: dict[str | None, _Writer] = {}
        positions = plan(config)
        labels = getattr(original, "rope_type", None)
        with torch.device("cpu"):
            fresh = _fresh(original, config)
            for label in labels if isinstance(labels, dict) and labels else [None]:
                rotations = _rotations(positions, label)
                if rotations:
                    self.writers[label] = _Writer.probe(fresh, rotations, label)
        if not self.writers:
            raise ConfigError(f"no layer of {positions.model_type!r} uses it")
        self.original = original

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # what else models read from the module: inv_freq, rope_type, attention_scaling …
            return getattr(super().__getattr__("original"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.state_dict(*args, **kwargs)  # under the names that it has in the model's files

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}original.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        writer = self.writers.get(layer_type)
        if writer is None:  # a block that no layer uses
            return self.original(x, position_ids, layer_type)
        return writer(x, position_ids, self.angle_dtype)


class _Writer:
    """Makes one layer type's table in the module's own form."""

    def __init__(self, rotation: Rotation, form: Form, sine_first: bool, leading: bool, keeps_dtype: bool) -> None:
        self.rotation, self.form, self.sine_first = rotation, form, sine_first
        self.leading, self.keeps_dtype = leading, keeps_dtype

    @classmethod
    def probe(cls, fresh: nn.Module, rotations: list[Rotation], label: str | None) -> _Writer:
        """Find the rotation and the form by comparing posenc's float32 tables with a freshly built module's."""
        rest = () if label is None else (label,)
        for rotation in rotations:
            calls = _probe_positions(rotation)
            try:
                theirs = [_parts(fresh(torch.zeros(1), at, *rest)) for at in calls]
                narrow = _parts(fresh(torch.zeros(1, dtype=torch.bfloat16), calls[0], *rest))
            except (TypeError, IndexError, RuntimeError, AttributeError, ValueError) as error:
                raise ConfigError(f"{type(fresh).__name__} is not called with positions ({error})") from None
            forms: tuple[Form, ...] = ("complex",) if theirs[0][0].is_complex() else ("tiled", "repeated", "half", "blocks")
            for form, sine_first, leading in product(forms, (False, True), (False, True)):
                writer = cls(rotation, form, sine_first, leading, narrow[0].dtype == torch.bfloat16)
                if all(
                    _close(_parts(writer(torch.zeros(1), at, torch.float32)), table)
                    for at, table in zip(calls, theirs, strict=True)
                ):
                    return writer
        raise ConfigError(f"the table of {type(fresh).__name__} is not the one that its configuration stands for")

    def __call__(self, x: Tensor, position_ids: Tensor, angle_dtype: torch.dtype) -> Any:
        positions = _as_axes(self.rotation, position_ids)
        length = position_ids.max() + 1 if self.rotation.depends_on_length else None
        if self.form == "complex":
            return self._complex(positions, length, angle_dtype)
        table = self.rotation.table(positions, length=length, angle_dtype=angle_dtype)
        cos, sin = _written(table, self.form, self.rotation)
        if self.leading:
            cos, sin = cos[None], sin[None]
        if self.keeps_dtype:
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return (sin, cos) if self.sine_first else (cos, sin)

    def _complex(self, positions: Tensor, length: Tensor | None, angle_dtype: torch.dtype) -> Tensor:
        """By polar, which rounds otherwise than cosine and sine do."""
        inv_freq, amplitude = self.rotation.frequencies(length=length, dtype=angle_dtype, device=positions.device)
        angle = positions[..., None].to(angle_dtype) * inv_freq
        return (torch.polar(torch.ones_like(angle), angle) * amplitude).to(torch.complex64)


def _parts(table: Any) -> tuple[Tensor, ...]:
    return (table,) if isinstance(table, Tensor) else tuple(table)


def _close(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return [t.shape for t in ours] == [t.shape for t in theirs] and all(
        bool((a - b).abs().max() <= _CLOSE) for a, b in zip(ours, theirs, strict=True)
    )


def _written(table: RotaryTable, form: Form, rotation: Rotation) -> tuple[Tensor, Tensor]:
    def write(half: Tensor) -> Tensor:
        match form:
            case "tiled":
                return torch.cat((half, half), dim=-1)
            case "repeated":
                return half.repeat_interleave(2, dim=-1)
            case "blocks":
                count = 1 if rotation.axes is None else rotation.axes.blocks
                return torch.cat([part for block in half.chunk(count, dim=-1) for part in (block, block)], dim=-1)
        return half

    return write(table.cos), write(table.sin)


def _as_axes(rotation: Rotation, position_ids: Tensor) -> Tensor:
    """Positions with the axes last: transformers puts those of text with images first."""
    if rotation.axes is not None and rotation.axes.text and position_ids.ndim == 3:
        return position_ids.movedim(0, -1)
    return position_ids


def _probe_positions(rotation: Rotation) -> list[Tensor]:
    """Positions to compare at, as the module takes them; for rules that depend on the length, beyond it as well."""
    steps = torch.tensor([[0, 1, 7, 23, 5]])
    starts = (0, rotation.original_length or 0) if rotation.depends_on_length else (0,)
    if rotation.axes is None:
        return [steps + start for start in starts]
    spread = steps[0, :, None] * torch.arange(1, len(rotation.axes.names) + 1)
    if rotation.axes.text:
        return [spread.T[:, None] + start for start in starts]
    return [spread[None] if rotation.axes.blocks > 1 else spread]


def _rotations(positions: PositionPlan, label: str | None) -> list[Rotation]:
    """The different rotations of the layers that read a block."""
    found = (layer.rotation for layer, _ in positions.runs if label is None or layer.entry == label)
    return list(dict.fromkeys(rotation for rotation in found if rotation is not None))


def _fresh(original: nn.Module, config: Any) -> nn.Module:
    build: Callable[..., nn.Module] = type(original)
    try:
        return build(config=config)
    except TypeError:
        raise ConfigError(f"{type(original).__name__} is not built from a configuration alone") from None
