"""One layer after another: does it turn, how, and what else it does with positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.core.rotary import Pairing
from posenc.core.temperature import LogTemperature
from posenc.errors import ConfigError
from posenc.hf.axes import axes_of
from posenc.hf.blocks import Blocks
from posenc.hf.defaults import model_defaults
from posenc.hf.families import NO_ATTENTION, READ_BY_FEW, READS_SHARE, Family
from posenc.hf.parameters import rope_type, schedule_of
from posenc.hf.position_plan import LayerPlan
from posenc.hf.rotation import Rotation
from posenc.hf.rules import BiasRule
from posenc.hf.source import MAX_LAYERS, Keys
from posenc.schedules.yarn import YaRN

MAX_WIDTH = 2**16
MAX_DIFFERENT = 1000
WIDTH = ("hidden_size", "d_model", "n_embd")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_num_attention_heads", "encoder_num_attention_heads")
DEPTH = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")
WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size")
LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "model_max_length")

COMPRESSION = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""DeepSeek-V4's older files name a kind of layer by how many tokens it folds into one."""


def layer_kinds(keys: Keys, defaults: Mapping[str, Any]) -> list[str]:
    """The kind of every layer, from the list that the file holds or the rule that its class has."""
    listed = keys.items("layer_types", of=str)
    if listed is None:
        listed = keys.items("layers_block_type", of=str)
    depth = _depth(keys)
    rule = defaults.get("layer_types")
    if depth is None and listed is not None:
        depth = len(listed)
    elif depth is None and rule and "list" in rule:
        depth = len(rule["list"])
    if depth is None:
        keys.note("the number of layers is not given: one layer stands for all")
        depth = 1
    if listed is not None:
        if keys.model_type == "dory" and "mlp" in listed:  # its files count attention and MLP as a layer each
            listed, depth = listed[::2], depth // 2
        if len(listed) < depth:
            keys.fail(
                "layer_types",
                f"{len(listed)} entries",
                f"one per layer, {depth}",
                "Add the missing kinds or mend num_hidden_layers.",
            )
        return listed[:depth]
    return _kinds_by_rule(keys, rule, depth)


def _depth(keys: Keys) -> int | None:
    """How many layers there are: of the decoder where there are two towers, of all stages where there are several."""
    stages = keys.get("depths") or keys.get(*DEPTH)
    if isinstance(stages, list):
        counts = keys.items("depths", of=int) or keys.items(*DEPTH, of=int) or []
        total: int = sum(counts)
        if any(count < 0 for count in counts) or total > MAX_LAYERS:
            keys.fail(("depths", *DEPTH), stages, f"whole numbers that sum to {MAX_LAYERS} or less")
        return total
    towers = "encoder_layers" in keys and "decoder_layers" in keys
    depth = None if towers else keys.integer(*DEPTH, least=0, most=MAX_LAYERS)
    for name in ("decoder_layers", "encoder_layers"):
        if depth is None:
            depth = keys.integer(name, least=0, most=MAX_LAYERS)
    return depth


def _kinds_by_rule(keys: Keys, rule: Mapping[str, Any] | None, depth: int) -> list[str]:
    attends = keys.items("attn_layer_indices", of=int)
    if attends is not None:  # Bamba
        chosen = frozenset(attends)
        return ["full_attention" if index in chosen else "linear_attention" for index in range(depth)]
    ratios = keys.items("compress_ratios", of=int)
    if ratios and {*ratios} <= COMPRESSION.keys():
        return [COMPRESSION[ratio] for ratio in ratios[:depth]]
    repeated = keys.items("block_types", of=str)
    if repeated:  # RecurrentGemma
        rule = {"cycle": ["linear_attention" if kind == "recurrent" else "sliding_attention" for kind in repeated]}
    if rule is None:
        window = keys.get(*WINDOW) and keys.flag("use_sliding_window") is not False
        return ["sliding_attention" if window else "full_attention"] * depth
    if "list" in rule:
        cycle = list(rule["list"])
    else:
        cycle = list(rule.get("prefix", ())) + list(rule["cycle"]) * (depth // len(rule["cycle"]) + 1)
    period = keys.integer(rule["period"], most=MAX_LAYERS) if "period" in rule else None
    special = [i for i, kind in enumerate(rule.get("cycle", ())) if kind == "full_attention"]
    if period and len(special) == 1 and len(rule["cycle"]) > 1:  # the first or the last layer of each period attends to all
        other = rule["cycle"][-1 if special == [0] else 0]
        one = ["full_attention"] + [other] * (period - 1)
        cycle = (one if special == [0] else one[::-1]) * (depth // period + 1)
    if keys.flag("use_sliding_window"):
        start = keys.integer("max_window_layers", least=0) or 0
        cycle = ["full_attention" if i < start else "sliding_attention" for i in range(depth)]
    flags = keys.items("no_rope_layers", of=(int, bool)) if "chunked_attention" in cycle else None
    if flags:  # Llama 4
        cycle = ["chunked_attention" if flag else "full_attention" for flag in flags]
    dense = keys.integer("first_k_dense_replace", least=0, most=MAX_LAYERS) if keys.model_type == "cohere2_moe" else None
    if dense:
        period = keys.integer("prefix_dense_sliding_window_pattern", most=MAX_LAYERS) or 1
        cycle = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(min(dense, depth))] + cycle
    kinds = (cycle + ["full_attention"] * depth)[:depth]
    if rule.get("from_end"):
        kinds.reverse()
    if rule.get("last") and depth:
        kinds[-1] = rule["last"]
    if len(set(kinds)) > 1:
        keys.note(f"layer_types is not given: the rule of {keys.model_type!r} is taken")
    return kinds


class LayerReader:
    """Makes the plan of one layer after another."""

    def __init__(self, keys: Keys, family: Family, blocks: Blocks, max_length: int | None) -> None:
        self.keys, self.family, self.blocks, self.max_length = keys, family, blocks, max_length
        self.rotations: dict[tuple[str | None, int, float | None, bool], Rotation] = {}
        self.made: dict[tuple[object, ...], LayerPlan] = {}
        self.flags = keys.items("no_rope_layers", of=(int, bool)) if family.turns == "flags" else None
        self.interval = (keys.integer("no_rope_layer_interval", most=MAX_LAYERS) or 4) if family.turns == "flags" else None
        self.bases = keys.items("layer_rope_theta", of=(int, float))
        scaled = keys.items("rope_scaling_layers", of=int)
        self.scaled = None if scaled is None else frozenset(scaled)  # Molmo 2: the others keep the plain ladder
        plain = keys.integer(*WINDOW, least=0)
        self.window = self._tokens(keys.integer("local_attention", least=0) or plain)  # ModernBERT files hold both
        if keys.flag("use_sliding_window") is False:
            self.window = None
        self.chunk = keys.integer("attention_chunk_size")
        self.dense = self._dense() if family.turns == "windowed or dense" else frozenset()
        self.overrides = self._overrides()
        self.bias = self._bias()
        self.temperature = self._temperature()
        self.global_head_dim = (keys.integer("global_head_dim") or family.global_head_dim) if family.global_head_dim else None

    def layer(self, index: int, kind: str) -> LayerPlan:
        """The plan of a layer; equal layers share one."""
        turns = self._turns(index, kind)
        own = index if index in self.overrides else None
        base = self.bases[index] if self.bases and index < len(self.bases) else None
        plain = self.scaled is not None and index not in self.scaled
        sort = (kind, turns, own, base, plain)
        if sort not in self.made:
            if len(self.made) == MAX_DIFFERENT:
                raise ConfigError(
                    f"plan: more than {MAX_DIFFERENT} layers that differ from all others. Expected a model whose layers repeat. Look at "
                    "layer_types, layer_rope_theta and per_layer_config."
                )
            self.made[sort] = self._layer(index, kind, turns)
        return self.made[sort]

    def _layer(self, index: int, kind: str, turns: bool) -> LayerPlan:
        label = self._label(kind)
        rotation = self._rotation(label, index, kind) if turns else None
        sliding = kind in ("sliding_attention", "hybrid_sliding", "local_attention")
        own = self.overrides.get(index, {})
        window = (self._tokens(own["sliding_window"]) if "sliding_window" in own else self.window) if sliding else None
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

    def _tokens(self, window: int | None) -> int | None:
        """How many tokens a query sees, itself included, from the number that the configuration holds."""
        if not window:
            return None
        both_ways = self.keys.get("use_bidirectional_attention") in (True, "all")  # Gemma 3 and its kin
        match "both sides" if both_ways else self.family.window:
            case "each side":
                return 2 * window + 1
            case "both sides":
                return 2 * (window // 2) + 1
            case "half":
                return window // 2 or None
        return window

    def _turns(self, index: int, kind: str) -> bool:
        keys = self.keys
        if not self.blocks or kind in NO_ATTENTION or self.family.turns == "none":
            return False
        if self.bases is not None:
            if index >= len(self.bases):
                keys.fail("layer_rope_theta", f"{len(self.bases)} entries", "one per layer, 0 where nothing turns")
            return bool(self.bases[index])
        match self.family.turns:
            case "flags":
                if self.flags:
                    if index >= len(self.flags):
                        keys.fail("no_rope_layers", f"{len(self.flags)} entries", "one per layer, 1 where it turns")
                    return bool(self.flags[index])
                return not self.interval or (index + 1) % self.interval != 0
            case "sliding":
                return kind == "sliding_attention"
            case "windowed":
                return kind == "sliding_attention" and self.window is not None
            case "windowed or dense":
                return (kind == "sliding_attention" and self.window is not None) or index in self.dense
            case "sliding unless no window":
                return kind == "sliding_attention" or self.window is None
            case "if rope":
                return keys.text("position_embedding_type", "position_embeddings_type") in ("rope", "rotary")
            case "if rotary":
                return bool(keys.flag("use_rotary_embedding", "use_mem_rope"))
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
        plain = self.scaled is not None and index not in self.scaled
        if (label, head_dim, base, plain) not in self.rotations:
            read = block.read
            if base is not None:
                block = Keys({**block.data, "rope_theta": base}, block.where, notes=block.notes)
            if plain:
                block = Keys({"rope_theta": block.data.get("rope_theta")}, block.where, notes=block.notes)
            block.read = read
            self.rotations[label, head_dim, base, plain] = self._make(block, head_dim, nested=label is not None)
        return self.rotations[label, head_dim, base, plain]

    def _make(self, block: Keys, head_dim: int, *, nested: bool) -> Rotation:
        family, keys = self.family, self.keys
        kind = rope_type(block)
        if keys.model_type in ("phi3", "phi4_multimodal", "phi4mm") and kind == "yarn":
            kind = "longrope"
        rotary_dim, start = self._span(block, head_dim, kind)
        axes = None
        style = family.axes
        sections = block.items("mrope_section", "xdrope_section", of=int, most=16)
        if sections and keys.model_type in ("hunyuan_vl", "hunyuan_vl_text"):
            raise ConfigError(
                f"plan: {block.path('mrope_section')} = {sections} for {keys.model_type!r}, which gives the two channels of a pair "
                "different angles. Expected a rotation. Use the model's own code for its positions."
            )
        flag = block.flag("mrope_interleaved")
        if style is None and sections:
            style = "mrope interleaved" if flag else "mrope chunked"
        if style is None and kind == "axial":
            style = "axial"
        if style is not None:
            axes = axes_of(style, rotary_dim, tuple(sections or family.sections), block.where, given=bool(sections))
            if style == "mrope interleaved" and not sections:
                block.note(f"mrope_section is not given: {list(family.sections)}, the default of {keys.model_type!r}")
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
            ignored=self._ignored(),
        )
        if family.remark:
            block.note(family.remark)
        original = getattr(schedule, "original_length", None)
        if kind in ("linear", "proportional"):  # which do not need it
            name = "original_max_position_embeddings"
            original = block.integer(name) or keys.integer(name)
        original = original or self.max_length
        width = start + rotary_dim if family.where == "separate" else head_dim
        made = Rotation(schedule, width, rotary_dim, start, self._pairing(), axes, original)
        try:
            made.frequencies(device="cpu")
        except ValueError as error:  # numbers that are each possible and together are not
            raise ConfigError(f"plan: {block.where or 'rope_parameters'} cannot be used. {error}") from None
        return made

    def _pairing(self) -> Pairing:
        if self.family.pairing_flag:
            return "interleaved" if self.keys.flag(self.family.pairing_flag) else "half"
        return self.family.pairing

    def _span(self, block: Keys, head_dim: int, kind: str) -> tuple[int, int]:
        """How many channels turn and the first that does."""
        keys, family = self.keys, self.family
        share = block.number("partial_rotary_factor", least=0.0)
        unread = kind in ("default", "axial") and keys.model_type in model_defaults() and keys.model_type not in READS_SHARE
        if unread and share not in (None, 1.0) and family.where != "separate":
            block.note(
                f"{block.path('partial_rotary_factor')} = {share:g} is not read by {keys.model_type!r} where rope_type is {kind!r}: "
                "the whole head turns"
            )
            share = None
        if family.where == "separate":
            return self._even("qk_rope_head_dim", self._rope_head_dim(), head_dim), keys.integer(
                "qk_nope_head_dim", least=0
            ) or 0
        if kind == "proportional" or family.width == "hidden":
            return self._even("head_dim", head_dim, head_dim), 0
        if family.width == "clvp":
            share_of_projection = (keys.integer("projection_dim") or 0) // (2 * (keys.integer(*HEADS) or 1))
            return self._even("projection_dim", max(share_of_projection, 32), head_dim), 0
        explicit = keys.integer("rotary_dim") if self._reads_rotary_dim() else None
        if explicit is not None and "partial_rotary_factor" not in block:
            rotary_dim, name = explicit, "rotary_dim"
        else:
            rotary_dim, name = int(head_dim * (1.0 if share is None else share)), "partial_rotary_factor"
        self._even(name, rotary_dim, head_dim)
        return rotary_dim, head_dim - rotary_dim if family.where == "trailing" else 0

    def _reads_rotary_dim(self) -> bool:
        model_type = self.keys.model_type
        return self.family.base is not None or model_type == "minimax_m2" or model_type not in model_defaults()

    def _ignored(self) -> frozenset[str]:
        model_type = self.keys.model_type
        return frozenset(
            name for name, readers in READ_BY_FEW.items() if model_type in model_defaults() and model_type not in readers
        )

    def _rope_head_dim(self) -> int:
        width = self.keys.integer("qk_rope_head_dim", most=MAX_WIDTH)
        if width is None:
            raise ConfigError("plan: qk_rope_head_dim is missing. Expected the width of the channels that turn. Add it.")
        return width

    def _even(self, name: str, rotary_dim: int, head_dim: int) -> int:
        if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > min(max(head_dim, 2), MAX_WIDTH):
            raise ConfigError(
                f"plan: {name} leaves {rotary_dim} rotating channels of head_dim = {head_dim}. Expected an even number from 2 to "
                "head_dim: channels turn in pairs. Look at head_dim and partial_rotary_factor."
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
            keys.get("head_dim")
            return self._rope_head_dim()
        if family.width == "memory":
            hidden = keys.integer("memory_attention_hidden_size") or 0
            rate = keys.integer("memory_attention_downsample_rate") or 1
            return hidden // (rate * (keys.integer("memory_attention_num_attention_heads") or 1))
        given = keys.integer(*dict.fromkeys((family.head_key, "head_dim")), most=MAX_WIDTH) if family.width == "head" else None
        if given is not None:
            return given
        names = (family.hidden_key,) if family.hidden_key and keys.get(family.hidden_key) is not None else WIDTH
        width = keys.integer(*names, most=2**24)
        if family.width == "hidden" and width:
            return width
        heads = keys.integer(*HEADS, "encoder_attention_heads", "speech_encoder_attention_heads", most=2**20)
        if width is None or heads is None:
            raise ConfigError(
                f"plan: head_dim cannot be derived: hidden_size = {width}, num_attention_heads = {heads}. Expected head_dim, or both of "
                "these. Add head_dim."
            )
        if width < heads:
            raise ConfigError(
                f"plan: hidden_size = {width} for num_attention_heads = {heads}. Expected at least one channel per head. Look at both."
            )
        if width % heads:
            keys.note(
                f"hidden_size = {width} does not divide over {heads} heads: head_dim = {width // heads}, as transformers computes it"
            )
        return width // heads

    def _dense(self) -> frozenset[int]:
        """Cohere 2 MoE: the layers without experts, which turn whatever their kind unless they have a window rule."""
        period = self.keys.integer("prefix_dense_sliding_window_pattern")
        kinds = self.keys.items("mlp_layer_types", of=str) or ["dense"] * (
            self.keys.integer("first_k_dense_replace", least=0, most=MAX_LAYERS) or 0
        )
        return frozenset(i for i, kind in enumerate(kinds) if kind == "dense" and period in (None, 1))

    def _overrides(self) -> dict[int, dict[str, Any]]:
        per_layer = self.keys.mapping("per_layer_config")
        if per_layer is None:
            return {}
        if len(per_layer.data) > MAX_DIFFERENT:
            self.keys.fail("per_layer_config", f"{len(per_layer.data)} entries", f"at most {MAX_DIFFERENT}")
        result = {}
        for name in per_layer.data:
            inner = per_layer.mapping(name)
            if inner is None or not name.isdecimal() or len(name) > 6:
                per_layer.fail(name, per_layer.data[name], "an object under the number of a layer")
            entry: dict[str, Any] = {"head_dim": inner.integer("head_dim", most=MAX_WIDTH)}
            if "sliding_window" in inner.data:
                entry["sliding_window"] = inner.integer("sliding_window")
            result[int(name)] = {k: v for k, v in entry.items() if v is not None or k == "sliding_window"}
        return result

    def _bias(self) -> BiasRule | None:
        keys = self.keys
        heads = None  # of each stage, where there are several
        if not isinstance(keys.get(*HEADS, "decoder_attention_heads"), list):
            heads = keys.integer(*HEADS, "decoder_attention_heads", most=2**20)
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
                keys.note(
                    "scores are not divided by √head_dim, which T5 absorbs in its initialisation; all layers share one bias table"
                )
                return BiasRule("t5", heads, (("buckets", buckets), ("farthest", reach)))
            case "deberta":
                if not keys.flag("relative_attention"):
                    return None
                farthest, share = keys.integer("max_relative_positions", least=-1), keys.integer("position_buckets", least=-1)
                details: list[tuple[str, object]] = [
                    ("farthest", farthest if farthest and farthest > 0 else keys.integer(*LENGTH))
                ]
                if share and share > 0:
                    details.append(("buckets", share))
                terms = keys.get("pos_att_type")
                details.append(("terms", "|".join(terms) if isinstance(terms, list) else terms or "none"))
                return BiasRule("deberta", heads, tuple(details))
            case "swin":
                window = keys.get("window_size")
                return BiasRule("swin", None, (("window", window),) if isinstance(window, int) else ())
            case "transformer-xl":
                return BiasRule("transformer-xl", heads)
            case "relative states":
                floor = keys.number("log_scaling_n_floor")
                if floor is not None:
                    keys.note(
                        f"full-attention layers scale queries and their bias by 1 + {keys.number('log_scaling_alpha') or 0.1:g}·ln of "
                        f"(position + 1) / {floor:g} beyond {floor:g} tokens"
                    )
                farthest = keys.integer("rel_extent")
                return BiasRule("relative states", heads, (("farthest", farthest),) if farthest else ())
        kind = keys.text("position_embedding_type")
        if kind in ("relative_key", "relative_key_query"):
            return BiasRule(
                "shaw", heads, (("farthest", keys.integer(*LENGTH)), ("terms", "q·k" if kind.endswith("query") else "q"))
            )
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
