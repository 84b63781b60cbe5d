"""`extend`: a longer context, written in the keys that transformers reads by itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posenc.errors import ConfigError
from posenc.hf.parameters import parameters_of
from posenc.hf.patching import PatchedRotary, rotary_modules
from posenc.hf.position_plan import LayerPlan, PositionPlan, plan
from posenc.hf.source import read_config
from posenc.hf.write import LEGACY, home_of, write_config
from posenc.schedules.base import LengthRule, Schedule
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.geometric import Geometric
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.proportional import Proportional
from posenc.schedules.yarn import YaRN

Rule = Linear | DynamicNTK | YaRN | Llama3 | LongRoPE
BY_NAME: dict[str, Any] = {"linear": Linear, "dynamic": DynamicNTK, "yarn": YaRN, "llama3": Llama3}
OWN_KEYS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
"""Keys of a block that belong to the model, not to the rule that extends it."""

WITHOUT_RULES = frozenset({
    "gptj", "codegen", "roformer", "clvp_encoder", "esm", "recurrent_gemma", "ernie4_5_vl_moe_text", "seamless_m4t",
    "wav2vec2-bert", "wav2vec2-conformer", "cosmos3_edge_text",
})  # fmt: skip
"""Architectures that turn, but whose classes in transformers 5.24 read or accept no ``rope_type``."""

ONLY_LONGROPE = frozenset({"phi3", "phi4_multimodal", "phimoe"})
"""Architectures whose classes accept one rule."""


def extend(target: Any, rule: Schedule | LengthRule | str, *, factor: float | None = None) -> Any:
    """Extend the context of a model or a configuration.

    The thing people get wrong: the length that the factor counts from. It is the length of *training*, so a model that
    is extended already keeps its original length and has its rule replaced, not stacked.

    The base, the rotating share and the sections stay the model's own, and so do DeepSeek's ``mscale`` pair and, by
    name, the other settings of a rule that the model has already. Where layers have blocks of their own, the
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
        ConfigError: a model in which nothing turns, or whose class reads no rule; a rule that transformers has no keys
            for; an original length that nothing says; a live model whose softmax scale would have to change too.
        TypeError: a rule that is neither a schedule nor a name; a factor that is no number.
        ValueError: a factor below 1.

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
        return _extend_data(read_config(target), rule, factor)
    if hasattr(target, "to_dict"):
        config = copy.deepcopy(target)
        _write_into(config, rule, factor)
        return config
    raise ConfigError(
        f"extend: a {type(target).__name__}. Expected a model, a configuration, a mapping or a path. Load it first."
    )


def _extend_data(data: dict[str, Any], rule: object, factor: float | None) -> dict[str, Any]:
    before, text = plan(data), home_of(data)
    block, made = _extended(before, text.get("model_type"), rule, factor)
    version = 4 if "rope_parameters" not in text and any(key in text for key in LEGACY) else 5
    result = write_config(replace(before, rope_parameters=block), version)
    home = home_of(result)
    original = _original(before, made)
    if "original_max_position_embeddings" in home or isinstance(made, Linear):
        home["original_max_position_embeddings"] = original
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    home[next((name for name in names if name in home), names[0])] = _length(made, original)
    _check(before, result, made)
    return result


def _write_into(config: Any, rule: object, factor: float | None) -> None:
    """Set the new keys on a transformers configuration object."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    before = plan(text)
    block, made = _extended(before, before.model_type, rule, factor)
    original = _original(before, made)
    text.rope_parameters = block
    if hasattr(text, "original_max_position_embeddings") or isinstance(made, Linear):
        text.original_max_position_embeddings = original
    text.max_position_embeddings = _length(made, original)
    _check(before, text, made)


def _extend_model(model: nn.Module, rule: object, factor: float | None) -> nn.Module:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise ConfigError(
            f"extend: {type(model).__name__} keeps no transformers configuration. Expected model.config. Pass the configuration."
        )
    if any(isinstance(module, PatchedRotary) for module in model.modules()):
        raise ConfigError(
            "extend: the model is patched. Expected its own rotary modules. Call unpatch(model), extend, patch again."
        )
    trial = copy.deepcopy(config)
    _write_into(trial, rule, factor)
    if [layer.score_factor for layer, _ in plan(config).runs] != [layer.score_factor for layer, _ in plan(trial).runs]:
        raise ConfigError(
            f"extend: the softmax scale of {plan(config).model_type!r} depends on the factor, and its layers hold it already. Expected a "
            "configuration. Extend model.config, save it and load the model with it."
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    turning = [
        (name, module, module.config)
        for name, module in rotary_modules(model)
        if getattr(getattr(module, "config", None), "model_type", None) == text.model_type
    ]
    if not turning:
        raise ConfigError(
            f"extend: none of the modules of {type(model).__name__} makes a rotary table from its configuration. Expected one. Extend "
            "model.config, save it and load the model with it."
        )
    for _, module, own in turning:  # nothing is changed before everything is known to work
        trial = copy.deepcopy(own)
        _write_into(trial, rule, factor)
        PatchedRotary(type(module)(config=trial), None, torch.float32)
    _write_into(config, rule, factor)
    for name, module, own in turning:
        if own is not text:  # a copy with a base of its own
            _write_into(own, rule, factor)
        device = next((buffer.device for buffer in module.buffers()), None)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, type(module)(config=own).to(device).train(module.training))
    return model


def _extended(before: PositionPlan, model_type: str | None, rule: object, factor: float | None) -> tuple[dict[str, Any], Rule]:
    """The new rotary parameters, and the rule that they stand for."""
    kind = model_type or before.model_type
    if before.rope_parameters is None or not any(layer.rotation for layer, _ in before.runs):
        raise ConfigError(
            f"extend: nothing turns in {kind!r}. Expected a rotary model. Learned tables are resized, ALiBi and T5 need no rule."
        )
    if kind in WITHOUT_RULES:
        raise ConfigError(
            f"extend: transformers reads no rope_type for {kind!r}. Expected a model whose rotary class takes rules. Its base and its "
            "length are all that can change."
        )
    nested = any(isinstance(value, dict) for value in before.rope_parameters.values())
    old = before.rope_parameters.get("full_attention") if nested else before.rope_parameters
    if not isinstance(old, dict):
        raise ConfigError(
            f"extend: rope_parameters has blocks for {', '.join(before.rope_parameters)}. Expected one for full_attention. Extend the "
            "block of your choice by hand."
        )
    extended = (layer.rotation for layer, _ in before.runs if not nested or layer.entry == "full_attention")
    turned = next((rotation for rotation in extended if rotation is not None), None)
    if turned is None:
        raise ConfigError(f"extend: no layer of {kind!r} reads the block of full_attention. Expected one. Look at layer_types.")
    made = _complete(rule, factor, turned.schedule, float(old["rope_theta"]), _trained(before, old, turned.schedule))
    if kind in ONLY_LONGROPE and not isinstance(made, LongRoPE):
        raise ConfigError(
            f"extend: {made!r} for {kind!r}, whose class accepts one rule. Expected a LongRoPE. Pass its two lists."
        )
    if isinstance(turned.schedule, Proportional) and isinstance(made, Linear):  # which has a factor of its own
        new = {**old, "factor": made.factor}
    elif isinstance(turned.schedule, (Geometric, Rule)) and (turned.axes is None or turned.axes.text):
        new = {**parameters_of(made), **{key: old[key] for key in OWN_KEYS if key in old}}
        if isinstance(turned.schedule, Geometric) and turned.rotary_dim == turned.head_dim and not turned.start:
            new.pop("partial_rotary_factor", None)  # some classes read it in scaled blocks only
        if "llama_4_scaling_beta" in new:
            new["original_max_position_embeddings"] = _original(before, made)
    else:
        raise ConfigError(
            f"extend: {kind!r} turns by {turned.schedule!r}, which transformers has no way to extend by {type(made).__name__}. Expected a "
            "geometric ladder over the positions of text, or a rule that can be replaced. Rotate with posenc's schedules instead."
        )
    return ({**before.rope_parameters, "full_attention": new} if nested else new), made


def _trained(before: PositionPlan, block: Mapping[str, Any], schedule: Schedule | LengthRule) -> int | None:
    """The original length, unless frequencies are divided already and nothing says from which length."""
    said = any(keys.get("original_max_position_embeddings") for keys in (home_of(dict(before.config)), block))
    return before.trained_length if said or not _divided(schedule) else None


def _divided(schedule: Schedule | LengthRule) -> bool:
    """Whether all frequencies are divided, by a rule whose block need not name the original length."""
    return isinstance(schedule, (Linear, Proportional)) and schedule.factor != 1


def _complete(rule: object, factor: float | None, old: Schedule | LengthRule, base: float, original: int | None) -> Rule:
    """The rule over the model's own ladder, from the model's own length."""
    if isinstance(rule, str):
        if rule not in BY_NAME:
            raise ConfigError(f"extend: rule = {rule!r}. Expected one of {', '.join(BY_NAME)}, or a schedule. Name one.")
        if factor is None:
            raise ConfigError(f"extend: {rule!r} without a factor. Expected factor=…, how many times the length. Pass it.")
        kind = BY_NAME[rule]
        if isinstance(old, kind):  # its other settings are the model's; an amplitude belongs to the old factor
            rule = replace(old, factor=factor, **({"amplitude": None} if isinstance(old, YaRN) else {}))
        else:
            rule = kind(factor=factor)
    elif factor is not None:
        raise ConfigError(f"extend: factor = {factor} beside {rule!r}. Expected it in the schedule. Leave it out here.")
    if not isinstance(rule, Rule) or not isinstance(rule.schedule, Geometric):
        error = ConfigError if callable(getattr(rule, "frequencies", getattr(rule, "frequencies_at", None))) else TypeError
        raise error(
            f"extend: rule = {rule!r}. Expected Linear, DynamicNTK, YaRN, Llama3 or LongRoPE over a Geometric ladder, or the name of one: "
            "transformers has keys for these. Rotate with posenc's schedules to use another."
        )
    if rule.schedule.base not in (Geometric().base, base):
        raise ConfigError(
            f"extend: base = {rule.schedule.base:g} in the rule, but the model's is {base:g}. Expected the model's own. Leave the ladder out."
        )
    if isinstance(rule, LongRoPE) and rule.factor is None:
        raise ConfigError(
            "extend: LongRoPE without a factor. Expected factor=…, how many times the original length. Pass it beside the amplitude."
        )
    length = getattr(rule, "original_length", None) or original
    if length is None:
        raise ConfigError(
            f"extend: the original length is unknown; the model turns by {old!r}. Expected original_max_position_embeddings in its "
            "configuration, the length that it was trained on. Add it."
            if _divided(old)
            else "extend: max_position_embeddings is missing. Expected the length that the model was trained on. Add it."
        )
    changes: dict[str, Any] = {"schedule": Geometric(base)}
    if not isinstance(rule, Linear):
        changes["original_length"] = length
    if isinstance(rule, YaRN) and isinstance(old, YaRN) and rule.amplitude is rule.mscale is rule.mscale_all_dim is None:
        changes.update(mscale=old.mscale, mscale_all_dim=old.mscale_all_dim)
    return replace(rule, **changes)


def _original(before: PositionPlan, made: Rule) -> int:
    length = before.trained_length if isinstance(made, Linear) else made.original_length
    assert length is not None
    return length


def _length(made: Rule, original: int) -> int:
    """``max_position_embeddings``: what the rule reaches, or what dynamic NTK counts from."""
    assert made.factor is not None
    return original if isinstance(made, DynamicNTK) else round(made.factor * original)


def _check(before: PositionPlan, config: Any, made: Rule) -> None:
    """Refuse what would be read back as something else.

    Raises:
        ConfigError: a layer that differs in more than its rule or in another way, or whose width the rule does not fit.
    """
    try:
        after = plan(config)
    except ConfigError as error:  # the rule's own check of the rotary width
        raise ConfigError(
            f"extend: {made!r} does not fit this model. {str(error).partition(' cannot be used. ')[2] or error}"
        ) from None
    for (wanted, _), (read, _) in zip(before.runs, after.runs, strict=True):
        if wanted.rotation is not None and wanted.entry in (None, "full_attention"):
            wanted = replace(wanted, rotation=replace(wanted.rotation, schedule=_over(wanted.rotation.schedule, made)))
        if _essence(wanted) != _essence(read):
            raise ConfigError(
                f"extend: the new keys would be read as {read!r}. Expected {wanted!r}. Use a rule whose settings the architecture reads."
            )


def _over(schedule: Any, made: Any) -> Any:
    """The rule over a layer's own ladder."""
    if isinstance(schedule, Proportional):
        return replace(schedule, factor=made.factor)
    return replace(made, schedule=schedule if isinstance(schedule, Geometric) else schedule.schedule)


def _essence(layer: LayerPlan) -> LayerPlan:
    rotation = None if layer.rotation is None else replace(layer.rotation, original_length=None)
    return replace(layer, rotation=rotation, score_factor=1.0)
