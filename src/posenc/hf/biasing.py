"""`add_bias`: score biases in a loaded transformers model, through its attention interface, never without its mask."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from posenc.attn.positional import positional_attention
from posenc.attn.select import BACKENDS
from posenc.core.mask import CAUSAL, FULL, Mask
from posenc.core.sites import ContentScoreEncoding, Encoding, ScoreEncoding
from posenc.errors import ConfigError, ShapeError, require

NAME = "posenc"
"""What the attention and its mask are called in transformers' two interfaces."""

CHANGE_SCORES = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices", "head_mask")
"""Arguments by which architectures change scores in a way of their own."""


@final
class Bias:
    """What `add_bias` did; as a context manager it undoes it at the end.

    Attributes:
        encodings: the module that holds them, ``model.posenc_bias``: for an optimiser, or to save and load.
    """

    def __init__(self, model: nn.Module, encodings: nn.ModuleList) -> None:
        self._model, self.encodings = model, encodings

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        remove_bias(self._model)

    def __repr__(self) -> str:
        return f"Bias({self.encodings})"


def add_bias(model: nn.Module, encodings: Sequence[Encoding] | Sequence[Sequence[Encoding]], *, backend: str = "auto") -> Bias:
    """Add score encodings to the attention of a loaded transformers model: ALiBi, T5's, any posenc bias.

    The thing people get wrong: attention registered without its mask. transformers then makes none, and padding and
    causality are gone in silence. Here both are always registered together. The second thing: a rotary model keeps its
    rotation; the bias comes on top, after the softmax scale.

    The encodings become ``model.posenc_bias``, so that ``parameters()`` and ``state_dict()`` see what they learn. Files of
    the whole model hold it too, and transformers' loading leaves it out: load the model, add the bias again, then
    ``model.posenc_bias.load_state_dict(…)`` from a file of its own.

    Works with padding, packed documents, sliding windows, grouped heads and every cache whose tokens are numbered as
    ``generate`` numbers them; documents are told apart where transformers does so, without ``attention_mask`` and cache.
    The model gets a configuration of its own, a copy, so that others built from the same one stay as they are.
    `remove_bias` undoes it. Encodings that read hidden states or keep a state of their own do not fit in.

    Args:
        model: a model of the transformers library, or the part of one that has a single configuration; changed in place.
        encodings: a list of score encodings for all layers, or one list per layer.
        backend: of posenc's attention.

    Raises:
        ConfigError: an architecture that does not compute attention through the interface, has several configurations or
            attends to another sequence; when called, one that does not hand ``position_ids`` to attention or changes
            scores itself (soft caps, sinks).
        ShapeError: a bias of another head count, or lists for another number of layers.
        TypeError: no encodings of the score.
        ValueError: a model that has a bias already; an unknown backend; when called with a cache, positions that do not
            tell those of the cached tokens.

    Example:
        >>> from posenc import ALiBi
        >>> from transformers import LlamaConfig, LlamaModel
        >>> model = LlamaModel(LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                                num_attention_heads=2))
        >>> with add_bias(model, [ALiBi(2)]) as bias:
        ...     bias.encodings
        ModuleList(
          (0): ALiBi(2, form='causal')
        )

    Differs from:
        transformers' sdpa: padding that sees nothing gets zeros, not the mean of all values. Attention weights are not
        returned, as there.
    """
    config = _checked_config(model)
    _check_backend(backend)
    held = _held(encodings, config)
    shared = not any(isinstance(part, nn.ModuleList) for part in held)
    before, own = config._attn_implementation, copy.copy(config)
    added = Added(type(model).__name__, held, shared, backend, before)
    _register()
    for module in _users(model, config):
        module.config = own
        module._posenc = added
        if hasattr(module, "set_attn_implementation"):
            added.hooks.append(module.register_forward_pre_hook(_check_interface))
    model.add_module("posenc_bias", _like(model, held))
    try:
        model.set_attn_implementation(NAME)  # type: ignore[operator]
        if own._attn_implementation != NAME:
            raise ConfigError(
                f"add_bias: {type(model).__name__} does not compute attention through transformers' attention interface. Expected "
                "an architecture that does. Use one of these, or posenc.Transformer."
            )
    except BaseException:
        remove_bias(model)
        raise
    return Bias(model, held)


def remove_bias(model: nn.Module) -> None:
    """Give a model its own attention back. A model without a bias stays as it is."""
    module: Any
    for module in model.modules():
        added = module.__dict__.get("_posenc")
        if added is None:
            continue
        del module._posenc
        module.config._attn_implementation_internal = added.before
        for hook in added.hooks:
            hook.remove()
    if "posenc_bias" in model._modules:
        del model.posenc_bias


@dataclass(eq=False)
class Added:
    """What the attention modules of a model with a bias know; copied with the model."""

    architecture: str
    encodings: nn.ModuleList
    shared: bool
    backend: str
    before: str | None
    hooks: list[Any] = field(default_factory=list)

    def of(self, module: nn.Module) -> list[Any]:
        """The encodings of one layer."""
        if self.shared:
            return list(self.encodings)
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise ConfigError(
                f"add_bias: {type(module).__name__} of {self.architecture} does not know its layer. Expected layer_idx on it, since every "
                "layer has encodings of its own. Give one list for all layers."
            )
        return list(self.encodings[layer])


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: ``[batch, heads, q, dim]`` to ``[batch, q, heads, dim]``."""
    added = module.__dict__.get("_posenc")
    if added is None:
        raise ConfigError(
            f"add_bias: {type(module).__name__} is set to {NAME!r} attention but has no bias. Expected a model that add_bias was called "
            "on. Call it, or set another attention implementation."
        )
    _check_call(added, module, position_ids, rest)
    assert position_ids is not None
    mask, k_positions = _mask_and_keys(added, attention_mask, query, key, position_ids, _is_causal(module, is_causal))
    out = positional_attention(
        query,
        key,
        value,
        encodings=added.of(module),
        positions=position_ids,
        k_positions=k_positions,
        mask=mask,
        scale=scaling,
        dropout_p=dropout,
        backend=added.backend,
    )
    return out.transpose(1, 2).contiguous(), None


def _mask_and_keys(
    added: Added, given: Any, query: Tensor, key: Tensor, position_ids: Tensor, is_causal: bool
) -> tuple[Mask, Tensor | None]:
    from posenc.hf.seen import Seen, Written

    q_length, kv_length = query.shape[-2], key.shape[-2]
    if isinstance(given, Seen):
        if given.lengths[1:] != (q_length, kv_length):
            raise ShapeError(
                f"add_bias: a mask of {' × '.join(map(str, given.lengths[1:]))} for {q_length} queries and {kv_length} keys of "
                f"{added.architecture}. Expected one entry for each. Look at attention_mask and at the kind of cache."
            )
        return given.mask, given.key_positions(position_ids)
    if q_length != kv_length:
        raise ConfigError(
            f"add_bias: {added.architecture} gives attention {q_length} queries, {kv_length} keys and a mask that did not come from "
            "transformers' mask interface. Expected one that did, since only that tells where cached keys are. Pass a mask of two "
            "axes, or call the model without a cache."
        )
    if given is None:
        return CAUSAL if is_causal else FULL, None
    if not isinstance(given, Tensor) or given.dtype != torch.bool or given.ndim != 4 or given.shape[1] != 1:
        kind = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(
            f"add_bias: attention_mask is {kind}. Expected booleans [batch, 1, {q_length}, {kv_length}], true where the query sees the "
            "key, or a mask of two axes. Compare it with 0."
        )
    return Written(given[:, 0]), None


def _is_causal(module: nn.Module, said: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if said is None else said)


def _check_call(added: Added, module: nn.Module, position_ids: Tensor | None, rest: dict[str, Any]) -> None:
    changed = [name for name in CHANGE_SCORES if rest.get(name) is not None]
    if changed:
        raise ConfigError(
            f"add_bias: {added.architecture} changes its scores by {', '.join(changed)}. Expected plain softmax attention. Use another "
            "architecture."
        )
    if position_ids is None:
        raise ConfigError(
            f"add_bias: {added.architecture} does not hand position_ids to {type(module).__name__}. Expected an architecture that does, "
            "since nobody should guess positions. Use one such as Llama, Qwen2 or GPT-NeoX."
        )
    if position_ids.ndim != 2:
        raise ConfigError(
            f"add_bias: {added.architecture} hands position_ids of shape {tuple(position_ids.shape)} to {type(module).__name__}. Expected "
            "[batch, seq], one number per token. Use an architecture whose positions have one axis."
        )


def _check_interface(module: Any, args: Any) -> None:
    """A bias that another attention implementation has displaced would be missing in silence."""
    if module.config._attn_implementation != NAME:
        raise ValueError(
            f"add_bias: the attention implementation of {type(module).__name__} was set to {module.config._attn_implementation!r}, "
            f"which knows no bias. Expected {NAME!r} while the model has one. Call posenc.hf.remove_bias(model) first."
        )


def _register() -> None:
    """Attention and its mask, always the two together."""
    transformers = require("transformers", "hf")
    from posenc.hf.seen import make_mask

    transformers.AttentionInterface.register(NAME, attention_function)
    transformers.AttentionMaskInterface.register(NAME, make_mask)


def _users(model: nn.Module, config: Any) -> Iterator[Any]:
    """The modules that read a configuration, and with it the name of the attention implementation."""
    return (module for module in list(model.modules()) if module.__dict__.get("config") is config)


def _checked_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(model, "set_attn_implementation") or not hasattr(config, "to_dict"):
        raise TypeError(f"add_bias: a {type(model).__name__}. Expected a model of the transformers library. Load it first.")
    if any("_posenc" in module.__dict__ for module in model.modules()):
        raise ValueError(
            "add_bias: the model has a bias already. Expected one without. Call posenc.hf.remove_bias(model) first."
        )
    assert config is not None
    parts = [name for name, m in model.named_modules() if hasattr(m, "set_attn_implementation") and m.config is not config]
    if parts:
        raise ConfigError(
            f"add_bias: {type(model).__name__} has the parts {', '.join(parts)} with configurations of their own. Expected a model of one "
            "configuration. Pass the part whose attention is meant, such as model.language_model."
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ConfigError(
            f"add_bias: {type(model).__name__} attends to another sequence. Expected an encoder or a decoder alone, since keys of another "
            "sequence have no distance. Pass its encoder."
        )
    return config


def _check_backend(backend: str) -> None:
    names = [candidate.name for candidate in BACKENDS]
    if backend != "auto" and backend not in names:
        raise ValueError(f"add_bias: backend = {backend!r}. Expected 'auto' or one of {', '.join(names)}. Name one.")


def _held(encodings: Any, config: Any) -> nn.ModuleList:
    """One list for all layers, or one per layer, as modules."""
    if not isinstance(encodings, Iterable) or isinstance(encodings, (str, nn.Module)):
        raise TypeError(
            f"add_bias: encodings = {_named(encodings)}. Expected a list of score encodings, such as [ALiBi(8)]. Put it in a list."
        )
    parts = list(encodings)
    heads = getattr(config, "num_attention_heads", None)
    if parts and all(isinstance(part, (list, tuple)) for part in parts):
        layers = getattr(config, "num_hidden_layers", len(parts))
        if len(parts) != layers:
            raise ShapeError(
                f"add_bias: {len(parts)} lists of encodings for {layers} layers. Expected one per layer. Add [] for none."
            )
        return nn.ModuleList(nn.ModuleList(_checked(part, heads) for part in layer) for layer in parts)
    if not parts:
        raise TypeError("add_bias: encodings = []. Expected at least one score encoding, such as [ALiBi(8)]. Add one.")
    return nn.ModuleList(_checked(part, heads) for part in parts)


def _checked(encoding: Any, heads: int | None) -> Encoding:
    if not isinstance(encoding, (ScoreEncoding, ContentScoreEncoding)):
        where = f"acts on {encoding.acts_on}" if isinstance(encoding, Encoding) else "is no encoding"
        raise TypeError(
            f"add_bias: {_named(encoding)} {where}. Expected encodings of the score. For rotary tables use posenc.hf.patch or extend."
        )
    if encoding.axes not in (None, 1):
        raise ShapeError(
            f"add_bias: {_named(encoding)} reads positions of {encoding.axes} axes. Expected one, as text has. Use another encoding."
        )
    if isinstance(encoding, ScoreEncoding) and isinstance(heads, int) and (own := encoding().heads) not in (1, heads):
        raise ShapeError(
            f"add_bias: {_named(encoding)} has {own} heads for the model's {heads}. Expected as many, or 1. Build it with {heads}."
        )
    return encoding


def _named(value: object) -> str:
    return type(value).__name__ if isinstance(value, nn.Module) else repr(value)


def _like(model: nn.Module, held: nn.ModuleList) -> nn.ModuleList:
    """On the model's device, in the dtype that they have."""
    device = next((parameter.device for parameter in model.parameters()), None)
    return held if device is None or device.type == "meta" else held.to(device)
