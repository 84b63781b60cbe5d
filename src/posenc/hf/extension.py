"""`extend`: a longer context, written in the keys that transformers reads by itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from posenc.errors import ConfigError
from posenc.hf.families import family_of
from posenc.hf.parameters import parameters_of
from posenc.hf.patching import rotary_modules
from posenc.hf.position_plan import PositionPlan, plan
from posenc.hf.source import read_config
from posenc.hf.write import home_of, write_config
from posenc.schedules.base import LengthRule, Schedule
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.geometric import Geometric
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.yarn import YaRN

BY_NAME = {"linear": Linear, "dynamic": DynamicNTK, "yarn": YaRN, "llama3": Llama3}
OWN_KEYS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
"""Keys of a block that belong to the model, not to the rule that extends it."""


def extend(target: Any, rule: Schedule | LengthRule | str, *, factor: float | None = None) -> Any:
    """Extend the context of a model or a configuration.

    The thing people get wrong: the length that the factor counts from. It is the length of *training*, so a model that
    is extended already keeps its original length and has its rule replaced, not stacked.

    The base, the rotating share and the sections stay the model's own. Where layers have blocks of their own, the
    full-attention layers are extended and those with a window, which see no further than before, are not.

    Args:
        target: a transformers model (changed in place), a transformers configuration, a mapping, or a path to one.
        rule: a schedule, whose ladder and original length may be left out (``YaRN(factor=4)``), or the name of one:
            ``"linear"``, ``"dynamic"``, ``"yarn"``, ``"llama3"``.
        factor: with a name.

    Returns:
        The same model; for the others a new configuration of the same kind, for a path a mapping. What is saved from
        it loads without posenc. ``max_position_embeddings`` becomes factor times the original length, except for
        dynamic NTK, which counts from it.

    Raises:
        ConfigError: a model in which nothing turns, a rule that transformers has no keys for, a live model whose softmax
            scale would have to change too.

    Example:
        >>> config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        ...           "max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
        >>> longer = extend(config, YaRN(factor=4))
        >>> longer["max_position_embeddings"], longer["rope_parameters"]["original_max_position_embeddings"]
        (16384, 4096)

    References:
        Peng et al. 2023, "YaRN", arXiv:2309.00071; Chen et al. 2023, "Position Interpolation", arXiv:2306.15595.
    """
    if isinstance(target, nn.Module):
        return _extend_model(target, rule, factor)
    if isinstance(target, (str, Path, Mapping)):
        data = read_config(target)
        return _extend_data(data, rule, factor)[0]
    if hasattr(target, "to_dict"):
        config = copy.deepcopy(target)
        _write_into(config, rule, factor)
        return config
    raise ConfigError(
        f"extend: a {type(target).__name__}. Expected a model, a configuration, a mapping or a path. Load it first."
    )


def _extend_data(
    data: dict[str, Any], rule: Schedule | LengthRule | str, factor: float | None
) -> tuple[dict[str, Any], PositionPlan]:
    before = plan(data)
    block, length = _extended(before, rule, factor)
    text = home_of(data)
    version = (
        4
        if "rope_parameters" not in text and any(key in text for key in ("rope_scaling", "rope_theta", "rotary_emb_base"))
        else 5
    )
    result = write_config(replace(before, rope_parameters=block), version)
    home = home_of(result)
    home.pop("original_max_position_embeddings", None)
    if length is not None:
        name = next(
            (n for n in ("max_position_embeddings", "n_positions", "max_seq_len") if n in home), "max_position_embeddings"
        )
        home[name] = length
    return result, plan(result)


def _extended(
    before: PositionPlan, rule: Schedule | LengthRule | str, factor: float | None
) -> tuple[dict[str, Any], int | None]:
    """The new block of rotary parameters and the new ``max_position_embeddings``."""
    if before.rope_parameters is None or not any(layer.rotation for layer, _ in before.runs):
        raise ConfigError(
            f"extend: nothing turns in {before.model_type!r}. Expected a rotary model. Learned tables are resized, ALiBi and T5 need no rule."
        )
    original = before.trained_length
    if original is None:
        raise ConfigError(
            "extend: max_position_embeddings is missing. Expected the length that the model was trained on. Add it."
        )
    nested = any(isinstance(value, dict) for value in before.rope_parameters.values())
    old = before.rope_parameters.get("full_attention") if nested else before.rope_parameters
    if not isinstance(old, dict):
        raise ConfigError(
            f"extend: rope_parameters has blocks for {', '.join(before.rope_parameters)}. Expected one for full_attention. Extend the "
            "block of your choice by hand."
        )
    made = parameters_of(_complete(rule, factor, float(old["rope_theta"]), original))
    kept = {key: old[key] for key in OWN_KEYS if key in old}
    new = {**made, **kept}
    block = {**before.rope_parameters, "full_attention": new} if nested else new
    if made["rope_type"] == "dynamic":
        return block, original
    return block, round(made["factor"] * original) if "factor" in made else None


def _complete(rule: Schedule | LengthRule | str, factor: float | None, base: float, original: int) -> Schedule | LengthRule:
    """The rule over the model's own ladder, from the model's own length."""
    if isinstance(rule, str):
        if rule not in BY_NAME:
            raise ConfigError(f"extend: rule = {rule!r}. Expected one of {', '.join(BY_NAME)}, or a schedule. Name one.")
        if factor is None:
            raise ConfigError(f"extend: {rule!r} without a factor. Expected factor=…, how many times the length. Pass it.")
        settings: dict[str, Any] = {"factor": factor} if rule == "linear" else {"factor": factor, "original_length": original}
        made: Schedule | LengthRule = BY_NAME[rule](Geometric(base), **settings)
        return made
    if factor is not None:
        raise ConfigError(f"extend: factor = {factor} beside {rule!r}. Expected it in the schedule. Leave it out here.")
    changes: dict[str, Any] = {}
    if isinstance(getattr(rule, "schedule", None), Geometric):
        changes["schedule"] = Geometric(base)
    if hasattr(rule, "original_length"):
        changes["original_length"] = original
    return replace(rule, **changes) if changes else rule  # type: ignore[type-var]


def _write_into(config: Any, rule: Schedule | LengthRule | str, factor: float | None) -> None:
    """Set the new keys on a transformers configuration object."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    block, length = _extended(plan(text), rule, factor)
    text.rope_parameters = block
    if hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = block.get(
            "original_max_position_embeddings", text.original_max_position_embeddings
        )
    if length is not None:
        text.max_position_embeddings = length


def _extend_model(model: nn.Module, rule: Schedule | LengthRule | str, factor: float | None) -> nn.Module:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise ConfigError(
            f"extend: {type(model).__name__} keeps no transformers configuration. Expected model.config. Pass the configuration."
        )
    trial = copy.deepcopy(config)
    _write_into(trial, rule, factor)
    before, after = plan(config), plan(trial)
    if family_of(before.model_type, None).mscale and [layer.score_factor for layer, _ in before.runs] != [
        layer.score_factor for layer, _ in after.runs
    ]:
        raise ConfigError(
            f"extend: the softmax scale of {before.model_type!r} depends on the factor, and its layers hold it already. Expected a "
            "configuration. Extend model.config, save it and load the model with it."
        )
    _write_into(config, rule, factor)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name, module in list(rotary_modules(model)):
        own = getattr(module, "config", None)
        if own is None or (own is not text and getattr(own, "model_type", "") != text.model_type):
            continue
        device = next((buffer.device for buffer in module.buffers()), None)
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], type(module)(config=text).to(device).train(module.training))
    return model
