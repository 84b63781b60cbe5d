"""Layers of plans against transformers' own models, run without values on the meta device.

`observe` builds a model of eight layers, calls it, and writes down what each attention layer does: whether it turns
its queries, which channels make a plane, which table it takes, what its mask lets a query see, its softmax scale. None
of that is listed here, so a new release of transformers is read anew.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.24.0")

from posenc.errors import ConfigError  # noqa: E402
from posenc.hf import LogTemperature, plan  # noqa: E402
from posenc.hf.defaults import model_defaults  # noqa: E402
from posenc.hf.families import FAMILIES  # noqa: E402

LAYERS = 8
SEQ = 6


@dataclass
class Seen:
    """One attention layer, as it ran."""

    turns: bool = False
    planes: frozenset[frozenset[int]] | None = None
    backwards: bool = False
    width: int = 0
    table: int = 0
    window: int | None = None
    scale: float | None = None
    notes: list[str] = field(default_factory=list)


def needed(model_type: str) -> dict[str, Any]:
    """What a default configuration lacks before a model can be built from it."""
    return {
        **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 128}),
        "glm4v_moe_text": {"head_dim": 128, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        **dict.fromkeys(
            ("glm4v_text", "glm_image_text"), {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
        ),
        "glm4_moe": {"head_dim": 128},
        "nemotron": {"num_key_value_heads": 8},
        "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
        "gemma3n_text": {"num_kv_shared_layers": 2},
        "qwen3_omni_moe_text": {"head_dim": 128},
        "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 4},
        "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 4},
        "bamba": {"attn_layer_indices": [1, 4]},
        "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1},
        "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] * LAYERS},
        "falcon": {"new_decoder_architecture": True},
    }.get(model_type, {})


def config_of(model_type: str, **changes: Any) -> Any:
    """A fresh configuration of eight layers."""
    return transformers.CONFIG_MAPPING[model_type](num_hidden_layers=LAYERS, **{**copy.deepcopy(needed(model_type)), **changes})


def model_class(config: Any) -> type[nn.Module]:
    """The barest model of a configuration class."""
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, transformers.PreTrainedModel)
        and value.__module__ == module.__name__
        and getattr(value, "config_class", None) is type(config)
        and not value.__name__.endswith("PreTrainedModel")
    ]
    return min(found, key=lambda cls: ("For" in cls.__name__, not cls.__name__.endswith("Model"), len(cls.__name__)))


def build(config: Any) -> nn.Module:
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)  # grouped matrix products of experts take nothing else
        with torch.device("meta"):
            return model_class(config)(config).eval()
    finally:
        torch.set_default_dtype(before)


def observe(config: Any) -> dict[int, Seen]:
    """What every attention layer of a model does, by its number."""
    model = build(config)
    seen: dict[int, Seen] = defaultdict(Seen)
    within: list[int] = []

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        within.pop()

    order = 0
    for module in model.modules():
        if re.search(r"Attention|Attn|Mixer|RecurrentBlock|MLA$", type(module).__name__):
            index = getattr(module, "layer_idx", None)
            if not isinstance(index, int):
                index, order = order, order + 1
            module.register_forward_pre_hook(lambda module, args, index=index: within.append(index))
            module.register_forward_hook(leave)
        if re.search(r"Experts$|LongcatFlashMoE$", type(module).__name__):  # experts choose by value, and there are none
            module.forward = lambda hidden, *rest, **more: hidden
    sources = [sys.modules[name] for name in {type(module).__module__ for module in model.modules()}]
    with watched([source for source in sources if source.__name__.startswith("transformers.models")], seen, within):
        parameters = inspect.signature(model.forward).parameters
        inputs = {"input_ids": torch.zeros(1, SEQ, dtype=torch.int64, device="meta")}
        if "use_cache" in parameters:
            inputs["use_cache"] = False
        with torch.no_grad():
            model(**inputs)
    return dict(seen)


@contextmanager
def watched(sources: list[ModuleType], seen: dict[int, Seen], within: list[int]) -> Iterator[None]:
    """The functions of modeling modules replaced by ones that write down how they are called."""
    masks: dict[int, int | None] = {}
    kept: list[Tensor] = []

    def turning(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if within:
                layer = seen[within[-1]]
                if not layer.turns:
                    layer.turns = True
                    layer.planes, layer.backwards, layer.width, layer.table = planes(function, args, kwargs)
            return function(*args, **kwargs)

        return called

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, scaling: Any = None, **more: Any
    ) -> Any:
        if within:
            layer = seen[within[-1]]
            layer.window = masks.get(id(attention_mask), more.get("sliding_window"))
            layer.scale = scaling * math.sqrt(query.shape[-1]) if isinstance(scaling, float) else None
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def masking(name: str) -> Callable[..., Any]:
        def made(config: Any = None, *args: Any, **kwargs: Any) -> Tensor | None:
            if "recurrent" in name:
                return None
            mask = torch.empty(1, 1, SEQ, SEQ, device="meta")
            width = getattr(config, "sliding_window", None) if "sliding" in name else None
            both = "bidirectional" in name
            masks[id(mask)] = (2 * width + 1 if both else 2 * width - 1 if kwargs.get("or_mask_function") else width) if width else None
            kept.append(mask)  # an id is only good while its object lives
            return mask

        return made

    with pytest.MonkeyPatch.context() as patched:
        for source in sources:
            for name, value in list(vars(source).items()):
                if not inspect.isfunction(value):
                    continue
                if re.search(r"apply_\w*(rotary|rope)", name):
                    patched.setattr(source, name, turning(value))
                elif name == "eager_attention_forward":
                    patched.setattr(source, name, attend)
                elif re.match(r"create_\w*mask", name):
                    patched.setattr(source, name, masking(name))
        yield


def planes(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[frozenset[frozenset[int]] | None, bool, int, int]:
    """Which channels a function turns together, from what it does to 1, 2, 3 … at a quarter turn and at none."""
    call = inspect.signature(function).bind(*args, **kwargs)
    table = 0

    def at(angle: float) -> Tensor:
        nonlocal table
        cos, sin = math.cos(angle), math.sin(angle)
        given = {}
        for name, value in call.arguments.items():
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                if "cos" in name or "sin" in name or value.is_complex() or "freq" in name:
                    table = table or id(value)
                    number = complex(cos, sin) if value.is_complex() else cos if "cos" in name else sin
                    value = torch.full(value.shape, number, dtype=torch.complex64 if value.is_complex() else torch.float32)
                else:
                    value = torch.arange(1.0, value.shape[-1] + 1).expand(value.shape).clone()
            elif isinstance(value, Tensor):
                value = torch.zeros(value.shape, dtype=value.dtype)
            given[name] = value
        call_again = inspect.BoundArguments(call.signature, given)
        out = function(*call_again.args, **call_again.kwargs)
        return (out[0] if isinstance(out, tuple) else out).flatten(0, -2)[0]

    still, turned = at(0.0), at(math.pi / 2)
    width = still.shape[0]
    here = still.round().long() - 1
    there = turned.abs().round().long() - 1
    pairs = frozenset(frozenset((a, b)) for a, b in zip(here.tolist(), there.tolist(), strict=True) if a != b)
    first = [i for i in range(width) if here[i] != there[i]]
    backwards = bool(first) and here[first[0]] == 0 and turned[first[0]] > 0
    return pairs, backwards, width, table


def expected_planes(pairing: str, first: int, rotary_dim: int, blocks: int = 1) -> frozenset[frozenset[int]]:
    size, found = rotary_dim // blocks, []
    for block in range(blocks):
        at = first + block * size
        if pairing == "half":
            found += [{at + i, at + i + size // 2} for i in range(size // 2)]
        else:
            found += [{at + 2 * i, at + 2 * i + 1} for i in range(size // 2)]
    return frozenset(map(frozenset, found))


def differences(config: Any, source: object | None = None) -> list[str]:
    """Where the plan and the model disagree."""
    found = plan(config if source is None else source)
    layers = found.layers
    seen = observe(config)
    assert seen, "no attention layer was seen"
    wrong, tables = [], {}
    for index, theirs in sorted(seen.items()):
        if index >= len(layers):
            wrong.append(f"layer {index}: the plan has {len(layers)} layers")
            continue
        ours = layers[index]
        rotation = ours.rotation
        if theirs.turns != (rotation is not None):
            wrong.append(f"layer {index} ({ours.kind}): turns {theirs.turns}, the plan says {rotation is not None}")
        elif rotation is not None:
            inside = theirs.width >= rotation.head_dim and theirs.width != rotation.rotary_dim
            first = rotation.start if inside else 0
            if theirs.planes != expected_planes(rotation.pairing, first, rotation.rotary_dim):
                wrong.append(f"layer {index}: planes {sorted(map(sorted, theirs.planes or ()))[:2]}, the plan says {rotation.pairing}")
            if tables.setdefault(theirs.table, rotation) != rotation:
                wrong.append(f"layer {index}: the same table as a layer with another rotation in the plan")
        if theirs.window != ours.window:
            wrong.append(f"layer {index} ({ours.kind}): window {theirs.window}, the plan says {ours.window}")
    return wrong
