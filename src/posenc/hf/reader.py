"""From a configuration to a plan: its parts, its rotary blocks, its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from posenc.errors import ConfigError
from posenc.hf.blocks import Blocks, canonical, read_blocks
from posenc.hf.defaults import model_defaults
from posenc.hf.families import FAMILIES, Family, family_of
from posenc.hf.layers import DEPTH, HEADS, LENGTH, WIDTH, LayerReader, layer_kinds
from posenc.hf.position_plan import LayerPlan, PositionPlan
from posenc.hf.rules import InputTable
from posenc.hf.source import MAX_LAYERS, Keys, read_config, short

TEXT_PARTS = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "thinker_config",
    "decoder_config",
    "decoder",
)


def read(source: object) -> PositionPlan:
    """The plan of a configuration: of its text model first, with the other towers as parts."""
    data = read_config(source)
    return _read(data, None)


def _read(data: dict[str, Any], assumed_type: str | None) -> PositionPlan:
    top = Keys(data)
    model_type = assumed_type or top.text("model_type") or ""  # Qwen's towers bear the name of the whole
    known = model_defaults().get(model_type, {}).get("parts", {})
    inside = next((name for name in TEXT_PARTS if isinstance(data.get(name), dict)), None)
    own_layers = any(name in top for name in (*DEPTH, *WIDTH))
    if inside is None and not own_layers:  # a file without its text model has the class's
        inside = next((name for name in TEXT_PARTS if name in known), None)
    if inside and not own_layers:
        text = _read(data.get(inside) or {}, known.get(inside))
    else:
        text_type = next((known[name] for name in TEXT_PARTS if name in known), model_type) if own_layers else model_type
        if not own_layers and not known and model_type in model_defaults():
            text_type = model_type
        text = _read_one(data, text_type if model_type not in FAMILIES else model_type)
        inside = None
    parts = dict(text.parts) if inside is None else {f"{inside}.{name}": part for name, part in text.parts.items()}
    notes = list(text.notes if inside is None else (f"{inside}: {note}" for note in text.notes))
    if inside is not None:  # what stands beside the text model is not the text model's
        top.read.update(TEXT_PARTS)
        notes += [f"{name} = {short(value)} beside {inside} is read by nothing here" for name, value in top.unread()]
    for name, value in data.items():
        if name != inside and name.endswith("_config") and isinstance(value, dict) and value:
            try:
                part = _read(value, known.get(name))
            except ConfigError as error:
                if known.get(name) in FAMILIES or str(value.get("model_type")) in FAMILIES:
                    raise
                notes.append(f"{name} is not planned: {error}")
                continue
            if part.input or any(layer != LayerPlan(layer.kind) for layer, _ in part.runs):
                parts[name] = part
    return replace(text, model_type=model_type or text.model_type, parts=parts, notes=tuple(notes), config=data)


def _read_one(data: dict[str, Any], model_type: str) -> PositionPlan:
    defaults = model_defaults().get(model_type, {})
    assumed = {k: v for k, v in defaults.items() if k not in ("rope_parameters", "layer_types", "parts")}
    keys = Keys(data, defaults=assumed, model_type=model_type)
    keys.read.update(
        (
            "model_type",
            "rope_parameters",
            "rope_scaling",
            "mlp_layer_types",
            "rotary",
            "position_biased_input",
            "position_id_per_seconds",
        )
    )
    if model_type and model_type not in model_defaults():
        keys.note(
            f"model_type {model_type!r} is not one that transformers 5.24 has: read like Llama, as far as its keys say so"
        )
    if not model_type:
        keys.note("no model_type: read like Llama, as far as the keys say so")
    family = family_of(model_type, _declared_type(data, defaults))
    kinds = layer_kinds(keys, defaults)
    max_length = keys.integer(*LENGTH)
    blocks = read_blocks(keys, family, defaults, kinds)
    reader = LayerReader(keys, family, blocks, max_length)
    layers = [reader.layer(index, kind) for index, kind in enumerate(kinds)]
    runs = tuple((layer, len(list(run))) for layer, run in groupby(layers))
    table, trained = _input(keys, family, max_length)
    rotations = [layer.rotation for layer, _ in runs if layer.rotation]
    lengths = [r.original_length for r in rotations if r.original_length]
    encoder = _encoder(keys, family, model_type)
    _leftovers(keys, blocks)
    if not blocks and table is None and model_type not in FAMILIES:
        keys.note(
            f"nothing here says how positions enter {model_type or 'the model'}: it holds no rotary keys, and no table or bias of it is known"
        )
    return PositionPlan(
        model_type=model_type,
        runs=runs,
        input=table,
        trained_length=min(lengths) if lengths else trained or max_length,
        max_length=max_length or (table.length if table else None),
        parts=encoder,
        notes=tuple(keys.notes),
        config=data,
        rope_parameters=canonical(blocks),
    )


def _declared_type(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> str | None:
    block = data.get("rope_parameters") or data.get("rope_scaling") or defaults.get("rope_parameters")
    kind = block.get("rope_type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else None


def _input(keys: Keys, family: Family, max_length: int | None) -> tuple[InputTable | None, int | None]:
    """The table that is added to the embeddings, and how many tokens it was trained for."""
    if keys.data.get("position_biased_input") is False or keys.data.get("position_embedding_type") in ("rope", "rotary"):
        keys.read.add("position_biased_input")
        return None, max_length
    if not family.input:
        return None, None
    offset = family.offset
    if offset == "pad":
        pad = keys.integer("pad_token_id", least=0)
        offset = 2 if pad is None else pad + 1
    if family.input != "learned":
        layout: Any = family.input.split()[1]
        return InputTable("sinusoidal", None, offset, layout), max_length
    rows = keys.integer("max_target_positions") or max_length
    if family.offset != "pad" and offset and rows:  # OPT and BART keep extra rows beyond max_position_embeddings
        rows += offset
    return InputTable("learned", rows, offset), rows - offset if rows else None


def _encoder(keys: Keys, family: Family, model_type: str) -> dict[str, PositionPlan]:
    """The encoder of an encoder-decoder whose configuration is flat."""
    depth = keys.integer("encoder_layers", least=0, most=MAX_LAYERS)
    rows = keys.integer("max_source_positions")
    keys.read.add("encoder_attention_heads")
    if depth is None or not family.input:
        return {}
    table = InputTable("sinusoidal", rows, layout="concatenated") if rows else None
    if table is None:
        table = _input(keys, family, keys.integer(*LENGTH))[0]
    return {"encoder": PositionPlan(model_type, ((LayerPlan("full_attention"), depth),), table, rows, rows)}


def _leftovers(keys: Keys, blocks: Blocks) -> None:
    for name, value in keys.assumed.items():
        if name in ("head_dim", *DEPTH, *WIDTH, *HEADS, *LENGTH):
            keys.note(f"{name} is not given: {value}, the default of {keys.model_type!r}")
    if "layer_types" in keys or "layers_block_type" in keys:  # the list counts, not the number that makes one
        keys.read.update(
            ("sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers")
        )
    for block in blocks.values():
        if block and "rope_theta" not in block.read:
            keys.note(f"{block.where or 'the rotary block'} is used by no layer")
    used = [block for block in blocks.values() if block and "rope_theta" in block.read]
    for path, value in (*keys.unread(), *(item for block in used for item in _unread_in(block))):
        keys.note(f"{path} = {short(value)} is read by nothing here")


def _unread_in(block: Keys) -> list[tuple[str, Any]]:
    ignored = (
        "rope_theta",
        "partial_rotary_factor",
        "max_position_embeddings",
        "finetuned",
        "llama_4_scaling_beta",
        "mrope_interleaved",
    )
    return [(block.path(k), v) for k, v in block.data.items() if k not in block.read and v is not None and k not in ignored]
