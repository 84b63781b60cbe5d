"""Every rotary table that the installed transformers can make, found in its modules and never listed.

``cases()`` has one `Case` for each rotary class, each config that its models build it from, and each layer type with
frequencies of its own. Classes that make no table from a default config are there as well, with the reason.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Form = Literal["tiled", "repeated", "blocks", "half", "complex", "unpaired"]
"""How a module writes one angle per pair. ``tiled``: cat(f, f). ``repeated``: each column twice. ``blocks``: cat(f, f)
for each axis. ``half``: one column per pair. ``complex``: cos + i·sin per pair. ``unpaired``: full width, and the two
columns of a pair differ, whichever way channels pair up; no half width says it, so the table stays full."""

Layout = Literal["positions", "axes first", "tokens", "axes last", "length", "grid", "fixed grid", "atoms", "seconds"]
"""What a module is called with. ``positions`` [batch, seq]; ``axes first`` [axes, batch, seq]; ``tokens`` [seq, axes];
``axes last`` [batch, seq, axes]; ``length``: a sequence of some length; ``grid``: an image of some size;
``fixed grid``: nothing, the config says it; ``atoms``: coordinates and a number; ``seconds``: [batch, seq] and seq."""

_CLASS = re.compile(r"^class (\w*(?:Rotary|RoPE|Rope)\w*)\(", re.MULTILINE)


NEEDED: dict[str, dict[str, Any]] = {
    "Glm4MoeConfig": {"head_dim": 128},  # 4096 / 96 gives 42, of which an odd half would turn; checkpoints say 128
    "Qwen3OmniMoeTextConfig": {"head_dim": 128},  # 2048 / 28 gives 73
    "BambaConfig": {"attn_layer_indices": [0]},  # no layer attends by default
    "GraniteMoeHybridConfig": {"position_embedding_type": "rope", "layer_types": ["full_attention"] * 32},
    "Zamba2Config": {"use_mem_rope": True},  # off by default, as in the next four
    "EsmConfig": {"position_embedding_type": "rotary"},
    "SeamlessM4TConfig": {"position_embeddings_type": "rotary"},
    "Wav2Vec2BertConfig": {"position_embeddings_type": "rotary"},
    "Wav2Vec2ConformerConfig": {"position_embeddings_type": "rotary"},
    "DeepseekV4Config": {"layer_types": ["sliding_attention", "compressed_sparse_attention"] * 21 + ["sliding_attention"]},
}
"""Default configs whose table no model could use, and what checkpoints set instead."""


class Table(NamedTuple):
    """Cosine and sine, one column per pair: float32 ``[batch, seq, pairs]``."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Case:
    """One rotary class, built from one config, for one layer type.

    ``reason`` says why it does not build; then ``layout``, ``form``, ``axes`` and ``width`` say nothing.
    """

    cls: type[nn.Module]
    config_class: type[Any] | None
    layer_type: str | None = None
    changes: tuple[tuple[str, Any], ...] = field(default=(), hash=False)
    """What the default config needs changed before the class gives a table; almost always nothing."""
    reason: str = ""
    layout: Layout = "positions"
    form: Form = "tiled"
    axes: int = 1
    width: int = 0
    """Columns of cos as the module returns it."""
    sine_first: bool = False

    @property
    def id(self) -> str:
        """A name for pytest."""
        parts = [self.cls.__name__, self.config_class.__name__ if self.config_class else "?", self.layer_type]
        return "-".join(part for part in parts if part)

    @property
    def module_name(self) -> str:
        """The modeling module that defines the class."""
        return self.cls.__module__

    @property
    def builds(self) -> bool:
        """Whether a default config gives a table."""
        return not self.reason

    @property
    def signature(self) -> tuple[str, ...]:
        """The parameters of the class's forward."""
        return _signature(self.cls)

    @property
    def reads_registry(self) -> bool:
        """Whether the class takes other rope types from ROPE_INIT_FUNCTIONS."""
        return "ROPE_INIT_FUNCTIONS" in self.cls.__init__.__code__.co_names

    def config(self, **changes: Any) -> Any:
        """A fresh default config, with the changes that the class needs and those given."""
        assert self.config_class is not None
        return self.config_class(**copy.deepcopy(dict(self.changes)), **changes)

    def module(self, config: Any = None) -> nn.Module:
        """A fresh module, from a fresh default config or from the one given; a learned scale keeps its first value."""
        return _build(self.cls, self.config() if config is None else config)

    def positions(self, seq: int = 7) -> Tensor:
        """Positions that the class accepts: ``[2, seq]`` or ``[2, seq, axes]``, or the tokens of a whole grid, once."""
        if self.layout == "length":
            return torch.arange(seq)[None]
        if self.layout == "fixed grid":
            rows = self.config().image_size // self.config().patch_size
            return _grid(rows, rows)
        if self.layout == "grid":
            return _grid(3, 4)
        if self.axes == 1:
            return torch.arange(2 * seq).reshape(2, seq) * 3 + 1
        steps = torch.tensor([1, 3, 7, 11, 13, 17, 19, 23][: self.axes])
        return torch.arange(2 * seq).reshape(2, seq, 1) * steps + steps

    def table(self, module: nn.Module, positions: Tensor) -> Table:
        """The module's table of these positions, half width, whatever way it is called and written.

        One call of the module: those that follow the longest length seen keep what this call did to them.

        Shape:
            positions: ``[batch, seq]``, or ``[batch, seq, axes]`` where the class has axes. Classes that count for
            themselves (``length``, ``grid``, ``fixed grid``) refuse positions other than those they would count.
        """
        with torch.no_grad():
            cos, sin = _call(module, positions, self.layout, self.layer_type)
        if self.sine_first:
            cos, sin = sin, cos
        batch, seq = positions.shape[:2]
        if cos.is_complex():
            cos, sin = cos.real, sin.imag
        return Table(*(_half(table.reshape(batch, seq, -1), self.form, self.axes) for table in (cos, sin)))


@cache
def cases() -> tuple[Case, ...]:
    """All cases, in the order of modules and of classes in them."""
    return tuple(case for cls, module, source in _classes() for case in _cases(cls, module, source))


@cache
def unloadable() -> dict[str, str]:
    """Modules with a rotary class that do not import here, and why."""
    list(_classes())
    return dict(_UNLOADABLE)


_UNLOADABLE: dict[str, str] = {}


def _classes() -> Iterator[tuple[type[nn.Module], ModuleType, str]]:
    import transformers

    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        names = _CLASS.findall(source)
        if not names:
            continue
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        try:
            module = importlib.import_module(name)
        except Exception as error:  # an optional package that is not here
            _UNLOADABLE[name] = f"{type(error).__name__}: {error}"
            continue
        for cls in (getattr(module, name, None) for name in names):
            if isinstance(cls, type) and issubclass(cls, nn.Module):
                yield cls, module, source


def _signature(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(cls.forward).parameters if name != "self")


def _cases(cls: type[nn.Module], module: ModuleType, source: str) -> Iterator[Case]:
    if _signature(cls) not in _CALLS:
        yield Case(cls, None, reason=f"forward({', '.join(_signature(cls))}) makes no table")
        return
    reasons: list[str] = []
    groups = _config_classes(cls, module, source)
    for group in groups:
        built = False
        for config_class in group:
            for changes in _changes(config_class):
                try:
                    layer_types = _layer_types(_build(cls, config_class(**copy.deepcopy(changes))))
                    found = [_probe(cls, config_class, layer_type, changes) for layer_type in layer_types]
                except Exception as error:
                    if not changes:
                        reasons.append(f"{config_class.__name__}: {type(error).__name__}: {error}")
                    continue
                built = True
                yield from found
                break
        if built:
            return
    first = next((config_class for group in groups for config_class in group), None)
    yield Case(cls, first, reason="; ".join(dict.fromkeys(reasons)) or "no config class found")


def _changes(config_class: type[Any]) -> Iterator[dict[str, Any]]:
    """What is `NEEDED`, mostly nothing; then what checkpoints set where a default config does not fit its own sections."""
    yield NEEDED.get(config_class.__name__, {})
    config = config_class()
    if not hasattr(config, "rope_parameters"):
        return
    rope = config.rope_parameters or {"rope_type": "default", "rope_theta": config.default_theta}
    layer_types = sorted(set(getattr(config, "layer_types", None) or ()))
    if layer_types and not isinstance(next(iter(rope.values())), dict):
        yield {"rope_parameters": {layer_type: dict(rope) for layer_type in layer_types}}
    yield {"rope_parameters": {**rope, "partial_rotary_factor": 0.5}}
    yield {"rope_parameters": {**rope, "partial_rotary_factor": 0.5}, "head_dim": 128}
    pairs = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) // 2
    yield {"rope_parameters": {**rope, "mrope_section": [pairs // 4] * 4}}


def _config_classes(cls: type[nn.Module], module: ModuleType, source: str) -> list[list[type[Any]]]:
    """Groups of config classes, the surest first: what owners pass, what __init__ says, their parts, the module's."""
    from transformers import PreTrainedConfig

    def real(candidate: Any) -> bool:
        return isinstance(candidate, type) and issubclass(candidate, PreTrainedConfig) and candidate is not PreTrainedConfig

    passed: list[type[Any]] = []
    for owner, argument in _owners(cls.__name__, source):
        names = argument.removeprefix("self.").split(".")
        owner_class = getattr(module, owner)
        found = _hints(owner_class).get(names[0])
        if found is None and names[0] == "config":
            found = getattr(owner_class, "config_class", None)
        for name in names[1:]:
            found = (getattr(found, "sub_configs", None) or {}).get(name)
        if real(found):
            passed.append(found)
    said = [hint for hint in _hints(cls).values() if real(hint)]
    parts = [part for config in passed + said for part in (getattr(config, "sub_configs", None) or {}).values() if real(part)]
    package = module.__name__.rsplit(".", 1)[0]
    rest = [value for value in vars(module).values() if real(value) and value.__module__.startswith(package)]
    return [list(dict.fromkeys(group)) for group in (passed, said, parts, rest)]


def _owners(name: str, source: str) -> Iterator[tuple[str, str]]:
    owner = ""
    for match in re.finditer(rf"^class (\w+)|\b{name}\(\s*(?:\w*config=)?([\w.]*config)\b", source, re.MULTILINE):
        if match[1]:
            owner = match[1]
        elif match[2]:
            yield owner, match[2]


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls.__init__)
    except Exception:  # a name that only a type checker sees
        return {}


def _build(cls: type[nn.Module], config: Any) -> nn.Module:
    return cls(config).eval()


def _layer_types(module: nn.Module) -> list[str | None]:
    rope_type = getattr(module, "rope_type", None)
    return list(rope_type) if isinstance(rope_type, dict) and rope_type else [None]


def _probe(cls: type[nn.Module], config_class: type[Any], layer_type: str | None, changes: dict[str, Any]) -> Case:
    """Find out how the class is called and how it writes its table, by calling it."""
    case = Case(cls, config_class, layer_type, tuple(changes.items()))
    module = case.module()
    layout, axes = _CALLS[_signature(cls)](module, layer_type)
    case = replace(case, layout=layout, axes=axes)
    positions = case.positions()
    if layout == "positions" and not _call(module, torch.zeros_like(positions), layout, layer_type)[0].any():
        case = replace(case, sine_first=True)
    cos, sin = _call(case.module(), positions, layout, layer_type)
    cos = (sin if case.sine_first else cos).reshape(*positions.shape[:2], -1)
    form = "complex" if cos.is_complex() else _form(cos, axes, module, layer_type)
    return replace(case, form=form, width=cos.shape[-1])


def _by_positions(module: nn.Module, layer_type: str | None) -> tuple[Layout, int]:
    """Classes without recomposition have one axis; the others tell by what they accept."""
    recompose = getattr(module, "recomposition_frequencies", None)
    if recompose is None:
        return "positions", 1
    if not hasattr(module, "compute_axial_rope_parameters"):
        seen: list[int] = []

        def spy(freq: Tensor, *rest: Any) -> Tensor:
            seen.append(freq.shape[0])
            return recompose(freq, *rest)

        module.recomposition_frequencies = spy
        _forward(module, torch.arange(5)[None], layer_type)
        del module.recomposition_frequencies
        return "axes first", seen[0]
    if _forward(module, torch.ones(1, 5, 2, dtype=torch.int64), layer_type)[0].shape[:-1] == (1, 5):
        return "axes last", 2
    widths = [_forward(module, torch.ones(5, axes, dtype=torch.int64), layer_type)[0].shape[-1] for axes in (2, 3)]
    config = module.config
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // getattr(
        config, "num_attention_heads", 1
    )
    return "tokens", 3 if widths[0] < widths[1] <= head_dim else 2


def _by_states(module: nn.Module, layer_type: str | None) -> tuple[Layout, int]:
    counts = [torch.as_tensor(module(torch.zeros(1, length, 8))).numel() for length in (5, 6)]
    return ("fixed grid", 2) if counts[0] == counts[1] else ("length", 1)


_CALLS: dict[tuple[str, ...], Callable[[nn.Module, str | None], tuple[Layout, int]]] = {
    ("x", "position_ids"): _by_positions,
    ("x", "position_ids", "layer_type"): _by_positions,
    ("hidden_states",): _by_states,
    ("pixel_values",): lambda module, layer_type: ("grid", 2),
    ("x",): lambda module, layer_type: ("grid", 2),
    ("ref_pos", "ref_space_uid", "dtype"): lambda module, layer_type: ("atoms", 4),
    ("timestamps", "seq_len"): lambda module, layer_type: ("seconds", 1),
}


def _call(module: nn.Module, positions: Tensor, layout: Layout, layer_type: str | None) -> tuple[Tensor, Tensor]:
    """The module's own cos and sin, or its complex table twice."""
    seq = positions.shape[1]
    if layout == "positions" or layout == "axes last":
        return _forward(module, positions, layer_type)
    if layout == "axes first":
        return _forward(module, positions.movedim(-1, 0), layer_type)
    if layout == "tokens":
        return _forward(module, positions.flatten(0, 1), layer_type)
    if layout == "atoms":
        return module(positions[..., :3].float(), positions[..., 3], torch.float32)
    if layout == "seconds":
        return module(positions.float(), seq)
    if layout == "length":
        _same(module, positions, torch.arange(seq)[None])
        out = module(torch.zeros(1, seq, 8))
        return (out.cos(), out.sin()) if len(out) == 1 else (out[0].movedim(0, -2), out[1].movedim(0, -2))
    if layout == "fixed grid":
        rows = module.config.image_size // module.config.patch_size
        _same(module, positions, _grid(rows, rows))
        out = module(torch.zeros(1))[: rows * rows]  # the class token comes last
        return out, out
    rows, columns = (int(positions[..., axis].max()) + 1 for axis in (0, 1))
    _same(module, positions, _grid(rows, columns))
    if _signature(type(module)) == ("pixel_values",):
        patch = module.config.patch_size
        height, width = patch if isinstance(patch, (tuple, list)) else (patch, patch)
        return module(torch.zeros(1, 1, rows * height, columns * width))
    kernel, stride = module.config.q_aggregation_kernel_size, module.config.q_aggregation_stride
    return module(torch.zeros(1, 1, (rows - 1) * stride + kernel, (columns - 1) * stride + kernel))


def _forward(module: nn.Module, position_ids: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
    rest = () if layer_type is None else (layer_type,)
    x = torch.zeros(1)
    out = module(x, position_ids, *rest)
    return (out, out) if isinstance(out, Tensor) else out


def _same(module: nn.Module, positions: Tensor, own: Tensor) -> None:
    if not torch.equal(positions, own.to(positions.dtype)):
        raise ValueError(
            f"{type(module).__name__} counts for itself. Expected {tuple(own.shape)}, in order. Use Case.positions()."
        )


def _grid(rows: int, columns: int) -> Tensor:
    """``[1, rows · columns, 2]``: row and column of each token, row after row."""
    axes = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack(axes, dim=-1).reshape(1, rows * columns, 2)


def _form(cos: Tensor, axes: int, module: nn.Module, layer_type: str | None) -> Form:
    width = cos.shape[-1]
    inv_freq = getattr(module, f"{layer_type}_inv_freq" if layer_type else "inv_freq", None)
    if width % 2 or (axes == 1 and inv_freq is not None and width == inv_freq.numel()):
        return "half"
    for form in ("tiled", "repeated", "blocks"):
        half = _half(cos, form, axes)
        if half.shape[-1] * 2 == width and torch.equal(_full(half, form, axes), cos):
            return form
    return "half" if inv_freq is None else "unpaired"


def _half(table: Tensor, form: Form, axes: int) -> Tensor:
    width = table.shape[-1]
    if form == "tiled":
        return table[..., : width // 2]
    if form == "repeated":
        return table[..., 0::2]
    if form == "blocks":
        return table.unflatten(-1, (axes, 2, -1))[..., 0, :].flatten(-2)
    return table


def _full(half: Tensor, form: Form, axes: int) -> Tensor:
    if form == "tiled":
        return torch.cat([half, half], dim=-1)
    if form == "repeated":
        return half.repeat_interleave(2, dim=-1)
    blocks = half.unflatten(-1, (axes, 1, -1))
    return torch.cat([blocks, blocks], dim=-2).flatten(-3)
