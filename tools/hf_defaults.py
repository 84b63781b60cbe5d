"""Write src/posenc/hf/defaults.json: what transformers assumes for keys that a config file does not hold.

    python tools/hf_defaults.py

A file on disk says only what its writer stored; the rest stands in the configuration classes. This reads those classes,
position-relevant keys only, so that a plan of a file needs no transformers.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

POSITION_KEYS = """
hidden_size d_model n_embd num_attention_heads n_head num_heads n_heads head_dim num_hidden_layers n_layer num_layers
n_layers max_position_embeddings n_positions max_seq_len original_max_position_embeddings partial_rotary_factor
rotary_dim qk_rope_head_dim qk_nope_head_dim sliding_window use_sliding_window max_window_layers
sliding_window_pattern no_rope_layers no_rope_layer_interval attention_chunk_size attn_temperature_tuning floor_scale
attn_scale relative_attention relative_attention_num_buckets relative_attention_max_distance position_buckets
max_relative_positions pos_att_type position_biased_input alibi attention_window position_embedding_type
max_source_positions max_target_positions pad_token_id rope_interleave d_kv local_attention depth encoder_layers
decoder_layers encoder_attention_heads decoder_attention_heads use_rotary_embedding memory_attention_hidden_size
memory_attention_downsample_rate memory_attention_num_attention_heads global_attn_every_n_layers layer_group_size
full_attention_interval image_size patch_size rotary rope_theta max_2d_position_embeddings sliding_window_size
attention_window_size use_mem_rope kv_channels attention_head_dim encoder_num_attention_heads decoder_num_attention_heads
window_size embed_dim depths use_bidirectional_attention rel_extent log_scaling_n_floor log_scaling_alpha
"""
PROBE_LAYERS = 61
PERIODS = ("sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers", "layer_group_size")


def main() -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    models = {model_type: entry for model_type in sorted(CONFIG_MAPPING) if (entry := describe(CONFIG_MAPPING[model_type]))}
    path = Path(__file__).parents[1] / "src/posenc/hf/defaults.json"
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in models.items())
    path.write_text(f'{{"transformers": "{transformers.__version__}", "models": {{\n{lines}\n}}}}\n')
    print(f"{len(models)} model types, {path.stat().st_size} bytes")


def describe(config_class: Any) -> dict[str, Any]:
    """The defaults of one configuration class, its layer pattern and its parts."""
    entry: dict[str, Any] = {}
    for key in POSITION_KEYS.split():
        value = getattr(config_class, key, None)
        if isinstance(value, (int, float, str, list, tuple)):
            entry[key] = list(value) if isinstance(value, tuple) else value
    try:
        instance = config_class()
    except Exception:  # a class that needs its parts given has no defaults of its own
        instance = None
    if "sliding_window" not in entry and isinstance(getattr(instance, "sliding_window", None), int):
        entry["sliding_window"] = instance.sliding_window
    rope = getattr(instance, "rope_parameters", None)
    if rope:
        entry["rope_parameters"] = rope
    pattern = layer_pattern(config_class, instance)
    if pattern:
        entry["layer_types"] = pattern
    parts = {
        name: part.model_type for name, part in (config_class.sub_configs or {}).items() if getattr(part, "model_type", "")
    }
    if parts:
        entry["parts"] = parts
    return entry


def layer_pattern(config_class: Any, instance: Any) -> dict[str, Any] | None:
    """The rule of default layer types: a prefix, then a cycle, then perhaps a fixed last layer; or a cycle from the end."""
    if not getattr(instance, "layer_types", None):
        return None
    try:
        types, more = (list(config_class(num_hidden_layers=count).layer_types) for count in (PROBE_LAYERS, PROBE_LAYERS + 1))
    except Exception:
        types, more = [], []
    if len(types) != PROBE_LAYERS:
        return {"list": list(instance.layer_types)}
    if types[:-4] != more[:-5] and types == more[1:]:
        period = next(n for n in range(1, 9) if types[n:] == types[:-n])
        return {"cycle": types[: -period - 1 : -1], "from_end": True}
    for fixed_last in (False, True):
        body = types[:-1] if fixed_last else types
        for prefix in range(4):
            for period in range(1, 9):
                rest = body[prefix:]
                if all(kind == rest[i % period] for i, kind in enumerate(rest)):
                    rule: dict[str, Any] = {
                        "prefix": types[:prefix],
                        "cycle": rest[:period],
                        "last": types[-1] if fixed_last else None,
                    }
                    rule["period"] = period_key(config_class, types) if len(set(types)) > 1 else None
                    return {key: value for key, value in rule.items() if value}
    return {"list": list(instance.layer_types)}


def period_key(config_class: Any, types: list[str]) -> str | None:
    """The key whose value is the length of the cycle, where one is read."""
    for key in PERIODS:
        try:
            if list(config_class(num_hidden_layers=PROBE_LAYERS, **{key: 5}).layer_types) != types:
                return key
        except Exception:  # a class that knows the key and refuses this value
            continue
    return None


if __name__ == "__main__":
    main()
