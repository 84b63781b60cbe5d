"""From a configuration to a plan: its parts, its rotary blocks, its layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from posenc.core.rotary import Pairing
from posenc.errors import ConfigError
from posenc.hf.axes import axes_of
from posenc.hf.families import FAMILIES, NO_ATTENTION, Family, family_of
from posenc.hf.parameters import rope_type, schedule_of
from posenc.hf.plan import LayerPlan, PositionPlan
from posenc.hf.rotation import Rotation
from posenc.hf.rules import BiasRule, InputTable, LogTemperature
from posenc.hf.source import MAX_LAYERS, Keys, read_config
from posenc.schedules.yarn import YaRN

TEXT_PARTS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config", "decoder_config", "decoder")
WIDTH = ("hidden_size", "d_model", "n_embd", "embed_dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
DEPTH = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
FLAT_KEYS = ("rope_theta", "rotary_emb_base", "rotary_embedding_base")


@cache
def model_defaults() -> Mapping[str, Any]:
    """What transformers assumes, by model type; made by ``tools/hf_defaults.py``."""
    data: dict[str, Any] = json.loads((files("posenc.hf") / "defaults.json").read_text(encoding="utf-8"))
    models: dict[str, Any] = data["models"]
    return models


def read(source: object) -> PositionPlan:
    """The plan of a configuration: of its text model first, with the other towers as parts."""
    data = read_config(source)
    return _read(data, None)


def _read(data: dict[str, Any], assumed_type: str | None) -> PositionPlan:
    top = Keys(data)
    model_type = top.text("model_type") or assumed_type or ""
    known = model_defaults().get(model_type, {}).get("parts", {})
    inside = next((name for name in TEXT_PARTS if isinstance(data.get(name), dict)), None)
    own_layers = any(name in top for name in (*DEPTH, *WIDTH))
    if inside and not own_layers:
        text = _read(data[inside], known.get(inside))
    else:
        text_type = next((known[name] for name in TEXT_PARTS if name in known), model_type) if own_layers else model_type
        if not own_layers and not known and model_type in model_defaults():
            text_type = model_type
        text = _read_one(data, text_type if model_type not in FAMILIES else model_type)
        inside = None
    parts = dict(text.parts) if inside is None else {f"{inside}.{name}": part for name, part in text.parts.items()}
    notes = list(text.notes if inside is None else (f"{inside}: {note}" for note in text.notes))
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
    keys = Keys(data, defaults={k: v for k, v in defaults.items() if k not in ("rope_parameters", "layer_types", "parts")})
    keys.read.update(("model_type", "rope_parameters", "rope_scaling"))
    if model_type and model_type not in model_defaults():
        keys.note(f"model_type {model_type!r} is not one that transformers 5.24 has: read like Llama, as far as its keys say so")
    if not model_type:
        keys.note("no model_type: read like Llama, as far as the keys say so")
    family = family_of(model_type, _declared_type(data, defaults))
    kinds, depth = _layer_kinds(keys, defaults)
    max_length = keys.integer(*LENGTH)
    blocks = _blocks(keys, family, defaults, kinds)
    reader = _LayerReader(keys, family, blocks, max_length)
    layers = [reader.layer(index, kind) for index, kind in enumerate(kinds)]
    runs = tuple((layer, len(list(run))) for layer, run in groupby(layers))
    table, trained = _input(keys, family, max_length)
    rotations = [layer.rotation for layer, _ in runs if layer.rotation]
    lengths = [r.original_length for r in rotations if r.original_length]
    _leftovers(keys, blocks, depth)
    return PositionPlan(
        model_type=model_type,
        runs=runs,
        input=table,
        trained_length=min(lengths) if lengths else trained or max_length,
        max_length=max_length or (table.length if table else None),
        parts=_encoder(keys, family, model_type),
        notes=tuple(keys.notes),
        config=data,
        rope_parameters=_canonical(blocks),
    )


def _declared_type(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> str | None:
    block = data.get("rope_parameters") or data.get("rope_scaling") or defaults.get("rope_parameters")
    kind = block.get("rope_type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else None


def _layer_kinds(keys: Keys, defaults: Mapping[str, Any]) -> tuple[list[str], int]:
    """The kind of every layer, from the list that the file holds or the rule that its class has."""
    listed = keys.items("layer_types", of=str)
    if listed is None:
        listed = keys.items("layers_block_type", of=str)
    depth = keys.integer(*DEPTH, least=0, most=MAX_LAYERS)
    if depth is None:
        depth = keys.integer("decoder_layers", "encoder_layers", least=0, most=MAX_LAYERS) if listed is None else len(listed)
    if depth is None:
        keys.note("the number of layers is not given: one layer stands for all")
        depth = 1
    if listed is not None:
        if len(listed) < depth:
            keys.fail("layer_types", f"{len(listed)} entries", f"one per layer, {depth}", "Add the missing kinds or mend num_hidden_layers.")
        return listed[:depth], depth
    return _default_kinds(keys, defaults.get("layer_types"), depth), depth


def _default_kinds(keys: Keys, rule: Mapping[str, Any] | None, depth: int) -> list[str]:
    if rule is None:
        window = keys.data.get("sliding_window") is not None and keys.data.get("use_sliding_window") is not False
        return ["sliding_attention" if window else "full_attention"] * depth
    if "list" in rule:
        cycle = list(rule["list"])
    else:
        cycle = list(rule.get("prefix", ())) + list(rule["cycle"]) * (depth // len(rule["cycle"]) + 1)
    period = keys.integer("sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers", "layer_group_size", most=MAX_LAYERS)
    if period and len(rule.get("cycle", ())) > 1 and set(rule["cycle"][:-1]) != {rule["cycle"][-1]}:
        cycle = ([rule["cycle"][0]] * (period - 1) + [rule["cycle"][-1]]) * (depth // period + 1)
    if keys.flag("use_sliding_window"):
        start = keys.integer("max_window_layers", least=0) or 0
        cycle = ["full_attention" if i < start else "sliding_attention" for i in range(depth)]
    kinds = (cycle + ["full_attention"] * depth)[:depth]
    if rule.get("last") and depth:
        kinds[-1] = rule["last"]
    if len(set(kinds)) > 1:
        keys.note(f"layer_types is not given: the rule of {keys.data.get('model_type')!r} is taken")
    return kinds


Blocks = dict[str | None, Keys | None]


def _blocks(keys: Keys, family: Family, defaults: Mapping[str, Any], kinds: list[str]) -> Blocks:
    """The rotary parameters by label, old keys folded in; one block without a label where all layers share it."""
    new, old = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    if new is not None and old is not None and not _same_block(new.data, old.data):
        raise ConfigError(
            f"plan: {keys.path('rope_parameters')} and {keys.path('rope_scaling')} disagree. Expected one of them, or both alike. "
            "Remove rope_scaling, the older name."
        )
    given = new if new is not None else old
    base = keys.number(*FLAT_KEYS) if not isinstance(keys.data.get("rope_theta"), (list, dict)) else None
    fallback = defaults.get("rope_parameters")
    labels = _labels(given, kinds, fallback)
    if labels and given is not None:
        blocks: Blocks = {}
        for label in labels:
            inner = given.data.get(label)
            if inner is not None and not isinstance(inner, dict):
                given.fail(label, inner, "an object with keys, or null for layers that do not turn")
            given.read.add(label)
            blocks[label] = None if inner is None else _filled(keys, inner, given.path(label), base, family, fallback and fallback.get(label))
        return blocks
    if isinstance(fallback, dict) and _nested(fallback):
        return _old_nested(keys, family, fallback, given, base)
    if given is None and base is None and fallback is None:
        if family.base is None or family.turns == "none":
            return {}
        keys.note(f"the base is {family.base:g}, written in the code of {keys.data.get('model_type')!r}")
        return {None: Keys({"rope_theta": family.base}, notes=keys.notes)}
    where = "" if given is None else given.where
    return {None: _filled(keys, {} if given is None else given.data, where, base, family, fallback)}


def _same_block(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    def core(block: Mapping[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in block.items() if v is not None and k not in ("type", "rope_type", "rope_theta")}
        return {**kept, "kind": block.get("rope_type", block.get("type", "default"))}

    return core(a) == core(b)


def _nested(block: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in block.values())


def _labels(given: Keys | None, kinds: list[str], fallback: Mapping[str, Any] | None) -> list[str]:
    if given is None:
        return []
    expected = set(kinds) | (set(fallback) if isinstance(fallback, dict) and _nested(fallback) else set())
    return [key for key, value in given.data.items() if isinstance(value, dict) or (key in expected and value is None)]


def _filled(
    keys: Keys, block: Mapping[str, Any], where: str, base: float | None, family: Family, fallback: Mapping[str, Any] | None
) -> Keys:
    """A block with what stands beside it, and what its class assumes, written in."""
    data = dict(block)
    inner = data.get("rope_theta")
    if inner is None and base is not None:
        data["rope_theta"] = base
    elif base is not None and inner != base and "rope_theta" in keys:
        raise ConfigError(
            f"plan: {where or 'rope_parameters'}.rope_theta = {inner!r} but rope_theta = {base!r}. Expected the same base in both "
            "places. Remove the wrong one."
        )
    fallback = fallback or {}
    if data.get("rope_theta") is None and fallback.get("rope_theta") is not None:
        data["rope_theta"] = fallback["rope_theta"]
        keys.note(f"rope_theta is not given: {fallback['rope_theta']:g}, the default of {keys.data.get('model_type')!r}")
    if not block and fallback.get("rope_type", "default") not in ("default", "axial"):
        data = {**fallback, **data}
        keys.note(f"no rotary block is given: {fallback['rope_type']} as {keys.data.get('model_type')!r} assumes")
    share = keys.number("partial_rotary_factor", "rotary_pct", least=0.0)
    if data.get("partial_rotary_factor") is None:
        if share is not None:
            data["partial_rotary_factor"] = share
        elif fallback.get("partial_rotary_factor") is not None:
            data["partial_rotary_factor"] = fallback["partial_rotary_factor"]
            if fallback["partial_rotary_factor"] != 1:
                keys.note(
                    f"partial_rotary_factor is not given: {fallback['partial_rotary_factor']:g}, the default of {keys.data.get('model_type')!r}"
                )
    elif share is not None and share != data["partial_rotary_factor"] and ("partial_rotary_factor" in keys or "rotary_pct" in keys):
        raise ConfigError(
            f"plan: {where or 'rope_parameters'}.partial_rotary_factor = {data['partial_rotary_factor']!r} but {share!r} beside it. "
            "Expected the same share in both places. Remove the wrong one."
        )
    if data.get("rope_type") is None and data.get("type") is None and fallback.get("rope_type") == "axial":
        data["rope_type"] = "axial"
    return Keys(data, where, notes=keys.notes)


def _old_nested(keys: Keys, family: Family, fallback: Mapping[str, Any], given: Keys | None, base: float | None) -> Blocks:
    """One base per kind of layer, from the keys of before ``rope_parameters``."""
    blocks: Blocks = {}
    scaling = {} if given is None else {k: v for k, v in given.data.items() if v is not None}
    local = keys.number(family.local) if family.local and family.local != "rope_theta" else base
    outside = keys.number("global_rope_theta") if family.everywhere else base
    for label, assumed in fallback.items():
        if assumed is None:
            blocks[label] = None
            continue
        mine = local if label == "sliding_attention" else outside
        own = {**scaling} if label == "full_attention" or family.everywhere or label not in ("sliding_attention",) else {}
        data = {**assumed, **({"rope_theta": mine} if mine is not None else {}), **own}
        if mine is None and "rope_theta" not in own:
            keys.note(f"the base of {label} is not given: {assumed['rope_theta']:g}, the default of {keys.data.get('model_type')!r}")
        blocks[label] = Keys(data, "" if given is None or not own else given.where, notes=keys.notes)
    return blocks


def _canonical(blocks: Blocks) -> dict[str, Any] | None:
    if not blocks:
        return None
    plain = {label: None if block is None else {k: v for k, v in block.data.items() if v is not None} for label, block in blocks.items()}
    for block in plain.values():
        if block is not None:
            block.setdefault("rope_type", block.pop("type", "default"))
            block.pop("type", None)
    return plain[None] if None in plain else {str(label): block for label, block in plain.items()}


class _LayerReader:
    """Makes the plan of one layer after another."""

    def __init__(self, keys: Keys, family: Family, blocks: Blocks, max_length: int | None) -> None:
        self.keys, self.family, self.blocks, self.max_length = keys, family, blocks, max_length
        self.rotations: dict[tuple[str | None, int, float | None], Rotation] = {}
        self.flags = keys.items("no_rope_layers", of=(int, bool)) if family.turns == "flags" else None
        self.interval = keys.integer("no_rope_layer_interval", most=MAX_LAYERS) if family.turns == "flags" else None
        self.bases = keys.items("layer_rope_theta", of=(int, float))
        self.window = keys.integer("sliding_window", "sliding_window_size", least=0) or None
        if keys.flag("use_sliding_window") is False:
            self.window = None
        self.chunk = keys.integer("attention_chunk_size")
        self.overrides = self._overrides()
        self.bias = self._bias()
        self.temperature = self._temperature()
        self.global_head_dim = (keys.integer("global_head_dim") or family.global_head_dim) if family.global_head_dim else None

    def layer(self, index: int, kind: str) -> LayerPlan:
        turns = self._turns(index, kind)
        label = self._label(kind)
        rotation = self._rotation(label, index, kind) if turns else None
        sliding = kind in ("sliding_attention", "hybrid_sliding", "local_attention")
        own = self.overrides.get(index, {})
        window = own.get("sliding_window", self.window) if sliding else None
        temperature = self.temperature
        if self.family.temperature == "llama4" and turns:
            temperature = None
        factor = 1.0
        if self.family.mscale and rotation is not None and isinstance(rotation.schedule, YaRN):
            factor = rotation.schedule.scale_multiplier
        return LayerPlan(
            kind=kind,
            rotation=rotation,
            bias=None if kind in NO_ATTENTION else self.bias,
            window=window,
            chunk=self.chunk if kind == "chunked_attention" else None,
            temperature=temperature,
            score_factor=factor,
            entry=label if rotation is not None else None,
        )

    def _turns(self, index: int, kind: str) -> bool:
        keys = self.keys
        if not self.blocks or kind in NO_ATTENTION or self.family.turns == "none":
            return False
        if self.bases is not None and (index >= len(self.bases) or not self.bases[index]):
            return False
        match self.family.turns:
            case "flags":
                if self.flags:
                    if index >= len(self.flags):
                        keys.fail("no_rope_layers", f"{len(self.flags)} entries", "one per layer, 1 where it turns")
                    return bool(self.flags[index])
                return not self.interval or (index + 1) % self.interval != 0
            case "sliding":
                return kind == "sliding_attention"
            case "sliding unless no window":
                return kind == "sliding_attention" or self.window is None
            case "position_embedding_type":
                return keys.text("position_embedding_type") == "rope"
        if self.family.bias == "alibi if asked" and keys.flag("alibi"):
            return False
        return self.blocks.get(self._label(kind)) is not None

    def _label(self, kind: str) -> str | None:
        if None in self.blocks or not self.blocks:
            return None
        label = dict(self.family.entry).get(kind, kind)
        if label in self.blocks:
            return label
        if len(self.blocks) == 1:
            return next(iter(self.blocks))
        if kind in NO_ATTENTION:
            return None
        raise ConfigError(
            f"plan: layers of kind {kind!r} have no block in rope_parameters, which holds {', '.join(map(str, self.blocks))}. Expected one "
            "per kind of layer. Add it, or null for layers that do not turn."
        )

    def _rotation(self, label: str | None, index: int, kind: str) -> Rotation:
        block = self.blocks[label]
        assert block is not None
        base = self.bases[index] if self.bases is not None else None
        head_dim = self._head_dim(index, kind)
        if (label, head_dim, base) not in self.rotations:
            if base is not None:
                block = Keys({**block.data, "rope_theta": base}, block.where, notes=block.notes)
            self.rotations[label, head_dim, base] = self._make(block, head_dim, nested=label is not None)
        return self.rotations[label, head_dim, base]

    def _make(self, block: Keys, head_dim: int, *, nested: bool) -> Rotation:
        family, keys = self.family, self.keys
        kind = rope_type(block)
        if keys.data.get("model_type") in ("phi3", "phi4_multimodal", "phi4mm") and kind == "yarn":
            kind = "longrope"
        rotary_dim, start = self._span(block, head_dim, kind)
        axes = None
        style = family.axes
        sections = block.items("mrope_section", "xdrope_section", of=int, most=16)
        flag = block.flag("mrope_interleaved")
        if style is None and sections:
            style = "mrope interleaved" if flag else "mrope chunked"
        if style is None and kind == "axial":
            style = "axial"
        if style is not None:
            axes = axes_of(style, rotary_dim, tuple(sections or family.sections), block.where)
        rounds = None
        if kind == "yarn" and nested and block.flag("truncate") is False:
            block.note(
                f"{block.path('truncate')} = false is not honoured by transformers 5.24, which looks for it outside the nested block: "
                "bounds are rounded here too"
            )
            rounds = True
        schedule = schedule_of(
            block,
            kind=kind,
            max_length=self.max_length,
            original_length=None if nested else keys.integer("original_max_position_embeddings"),
            pairs=rotary_dim // 2,
            rounds=rounds,
        )
        if family.remark:
            block.note(family.remark)
        original = getattr(schedule, "original_length", None) or self.max_length
        width = start + rotary_dim if family.where == "separate" else head_dim
        return Rotation(schedule, width, rotary_dim, start, self._pairing(), axes, original)

    def _pairing(self) -> Pairing:
        if self.family.pairing_flag:
            return "interleaved" if self.keys.flag(self.family.pairing_flag) else "half"
        return self.family.pairing

    def _span(self, block: Keys, head_dim: int, kind: str) -> tuple[int, int]:
        """How many channels turn and the first that does."""
        keys, family = self.keys, self.family
        share = block.number("partial_rotary_factor", least=0.0)
        if family.where == "separate":
            rotary_dim = keys.integer("qk_rope_head_dim")
            if rotary_dim is None:
                keys.fail("qk_rope_head_dim", None, "the width of the rotating channels", "Add it.")
            still = keys.integer("qk_nope_head_dim", least=0) or 0
            return self._even(rotary_dim, "qk_rope_head_dim", head_dim), still
        explicit = keys.integer("rotary_dim")
        if kind == "proportional":
            return self._even(head_dim, "head_dim", head_dim), 0
        if explicit is not None and family.base is not None:
            rotary_dim = explicit
        elif explicit is not None and "rotary_dim" in keys and "partial_rotary_factor" not in block:
            rotary_dim = explicit
        else:
            rotary_dim = int(head_dim * (1.0 if share is None else share))
        if rotary_dim > head_dim:
            block.fail("partial_rotary_factor", share, f"a share that keeps {rotary_dim} channels within head_dim = {head_dim}")
        self._even(rotary_dim, "partial_rotary_factor", head_dim)
        return rotary_dim, head_dim - rotary_dim if family.where == "trailing" else 0

    def _even(self, rotary_dim: int, name: str, head_dim: int) -> int:
        if rotary_dim < 2 or rotary_dim % 2:
            raise ConfigError(
                f"plan: {name} leaves {rotary_dim} rotating channels of head_dim = {head_dim}. Expected an even number, 2 or more: channels "
                "turn in pairs. Look at head_dim and partial_rotary_factor."
            )
        return rotary_dim

    def _head_dim(self, index: int, kind: str) -> int:
        keys, family = self.keys, self.family
        own = self.overrides.get(index, {}).get("head_dim")
        if own is not None:
            return int(own)
        if self.global_head_dim and kind == "full_attention" and not self.overrides:
            return self.global_head_dim
        if family.where == "separate":
            keys.integer("head_dim")
            return keys.integer("qk_rope_head_dim") or 0
        given = keys.integer("head_dim", "attention_head_dim", "kv_channels", most=2**20)
        if given is not None:
            return given
        if keys.data.get("model_type") in ("edgetam_video", "sam2_video", "sam3_tracker_video"):
            width = keys.integer("memory_attention_hidden_size") or 0
            rate = keys.integer("memory_attention_downsample_rate") or 1
            return width // (rate * (keys.integer("memory_attention_num_attention_heads") or 1))
        width, heads = keys.integer(*WIDTH, most=2**24), keys.integer(*HEADS, "encoder_attention_heads", most=2**20)
        if width is None or heads is None:
            raise ConfigError(
                f"plan: head_dim cannot be derived: hidden_size = {width}, num_attention_heads = {heads}. Expected head_dim, or both of "
                "these. Add head_dim."
            )
        if width < heads:
            raise ConfigError(f"plan: hidden_size = {width} for num_attention_heads = {heads}. Expected at least one channel per head. Look at both.")
        if width % heads:
            keys.note(f"hidden_size = {width} does not divide over {heads} heads: head_dim = {width // heads}, as transformers computes it")
        return width // heads

    def _overrides(self) -> dict[int, dict[str, Any]]:
        per_layer = self.keys.mapping("per_layer_config")
        if per_layer is None:
            return {}
        result = {}
        for name in per_layer.data:
            inner = per_layer.mapping(name)
            if inner is None or not name.isdecimal() or len(name) > 6:
                per_layer.fail(name, per_layer.data[name], "an object under the number of a layer")
            entry: dict[str, Any] = {"head_dim": inner.integer("head_dim", most=2**20)}
            if "sliding_window" in inner.data:
                entry["sliding_window"] = inner.integer("sliding_window")
            result[int(name)] = {k: v for k, v in entry.items() if v is not None or k == "sliding_window"}
        return result

    def _bias(self) -> BiasRule | None:
        keys = self.keys
        heads = None if isinstance(keys.data.get("num_heads"), list) else keys.integer(*HEADS, "decoder_attention_heads", most=2**20)
        match self.family.bias:
            case "alibi":
                inner = keys.mapping("attn_config")
                if inner is not None and inner.flag("alibi") is False:
                    return None
                most = inner.integer("alibi_bias_max") if inner is not None else None
                return BiasRule("alibi", heads, (("largest_exponent", most),) if most and most != 8 else ())
            case "alibi if asked":
                if keys.flag("alibi"):
                    keys.note("the bias is added before the division by √head_dim: slopes act as slope / √head_dim")
                    return BiasRule("alibi", heads)
                return None
            case "t5":
                buckets = keys.integer("relative_attention_num_buckets") or 32
                reach = keys.integer("relative_attention_max_distance") or 128
                keys.note("scores are not divided by √head_dim, which T5 absorbs in its initialisation; all layers share one bias table")
                return BiasRule("t5", heads, (("buckets", buckets), ("farthest", reach)))
            case "deberta":
                if not keys.flag("relative_attention"):
                    return None
                buckets, reach = keys.integer("position_buckets", least=-1), keys.integer("max_relative_positions", least=-1)
                if reach is None or reach < 1:
                    reach = keys.integer(*LENGTH)
                details: list[tuple[str, object]] = [("farthest", reach)]
                if buckets and buckets > 0:
                    details.append(("buckets", buckets))
                terms = keys.get("pos_att_type")
                details.append(("terms", "|".join(terms) if isinstance(terms, list) else terms or "none"))
                return BiasRule("deberta", heads, tuple(details))
            case "swin":
                window = keys.get("window_size")
                return BiasRule("swin", None, (("window", window),) if isinstance(window, int) else ())
            case "transformer-xl":
                return BiasRule("transformer-xl", heads)
        return None

    def _temperature(self) -> LogTemperature | None:
        keys = self.keys
        if self.family.temperature == "llama4":
            if keys.flag("attn_temperature_tuning") is False:
                return None
            strength, floor = keys.number("attn_scale"), keys.integer("floor_scale")
            return LogTemperature(0.1 if strength is None else strength, floor or 8192, shift=1)
        block = self.blocks.get(None)
        strength = None if block is None else block.number("llama_4_scaling_beta", least=0.0)
        if not strength or block is None:
            return None
        original = block.integer("original_max_position_embeddings") or self.max_length
        return LogTemperature(strength, original) if original else None


def _input(keys: Keys, family: Family, max_length: int | None) -> tuple[InputTable | None, int | None]:
    """The table that is added to the embeddings, and how many tokens it was trained for."""
    if keys.data.get("position_biased_input") is False:
        keys.read.add("position_biased_input")
        return None, max_length
    match family.input:
        case "learned":
            rows = keys.integer("max_target_positions") or max_length
            offset = family.offset
            if offset == "pad":
                pad = keys.integer("pad_token_id", least=0)
                offset = 2 if pad is None else pad + 1
            elif offset and rows:  # OPT and BART keep extra rows beyond max_position_embeddings
                rows += offset
            return InputTable("learned", rows, offset), rows - offset if rows else None
        case "sinusoidal concatenated" | "sinusoidal interleaved":
            rows = keys.integer("max_target_positions")
            if rows is not None:  # Whisper's decoder learns its rows
                return InputTable("learned", rows), rows
            layout: Any = family.input.split()[1]
            return InputTable("sinusoidal", None, layout=layout), max_length
    return None, None


def _encoder(keys: Keys, family: Family, model_type: str) -> dict[str, PositionPlan]:
    """The encoder of an encoder-decoder whose configuration is flat."""
    depth = keys.integer("encoder_layers", least=0, most=MAX_LAYERS)
    rows = keys.integer("max_source_positions")
    if depth is None or not family.input:
        return {}
    table = InputTable("sinusoidal", rows, layout="concatenated") if rows else None
    if table is None:
        table = _input(keys, family, keys.integer(*LENGTH))[0]
    bias = keys.integer("encoder_attention_heads", most=2**20)
    del bias
    return {"encoder": PositionPlan(model_type, ((LayerPlan("full_attention"), depth),), table, rows, rows)}


def _leftovers(keys: Keys, blocks: Blocks, depth: int) -> None:
    for name, value in keys.assumed.items():
        if name in ("head_dim", *DEPTH, *WIDTH, *HEADS, *LENGTH):
            keys.note(f"{name} is not given: {value}, the default of {keys.data.get('model_type')!r}")
    for path, value in (*keys.unread(), *(item for block in blocks.values() if block for item in _unread_in(block))):
        text = repr(value)
        keys.note(f"{path} = {text if len(text) < 60 else text[:57] + '…'} is read by nothing here")


def _unread_in(block: Keys) -> list[tuple[str, Any]]:
    ignored = ("rope_theta", "partial_rotary_factor", "max_position_embeddings", "finetuned", "llama_4_scaling_beta", "mrope_interleaved")
    return [(block.path(k), v) for k, v in block.data.items() if k not in block.read and v is not None and k not in ignored]
