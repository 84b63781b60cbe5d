"""Tiny random transformers models, built offline: a table of architectures, two layers or one of each kind."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 8,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_num_heads": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_head_dim": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
    "depth": 2, "num_heads": 4, "patch_size": 4, "image_size": 16, "in_channels": 3, "num_channels": 3,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
"""Set wherever a configuration class has the key."""

Kind = Literal["decoder", "encoder", "axes", "picture"]


@dataclass(frozen=True)
class Tiny:
    """One architecture.

    Args:
        model_type: the architecture, or a part of a larger one, as transformers names it.
        changes: keys of its configuration beside `SIZES`; ``None`` takes a key of `SIZES` out.
        kind: generates; reads tokens; reads tokens with positions of three axes; reads a picture.
        model: the class, where the automatic one would not do.
        picture: shapes of what a picture model is called with, or the tensors themselves.
    """

    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind = "decoder"
    model: str = ""
    picture: Mapping[str, Any] = field(default_factory=dict)

    def config(self, **changes: Any) -> Any:
        """A fresh configuration."""
        cls = transformers.CONFIG_MAPPING[self.model_type]
        known = {*cls().to_dict(), *cls.attribute_map}
        changes = {**self.changes, **changes}
        left_out = {key for key, value in changes.items() if value is None and SIZES.get(key) is not None}
        sizes = {key: value for key, value in SIZES.items() if key in known}
        keys = {**sizes, **copy.deepcopy(changes)}
        return cls(**{key: value for key, value in keys.items() if key not in left_out})

    def build(self, config: Any = None) -> nn.Module:
        """The model with weights that are the same every time."""
        config = self.config() if config is None else config
        torch.manual_seed(0)
        if self.model:
            module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
            return getattr(module, self.model)(config).eval()  # type: ignore[no-any-return]
        auto = transformers.AutoModelForCausalLM if self.kind == "decoder" else transformers.AutoModel
        return auto.from_config(config).eval()  # type: ignore[no-any-return]

    def inputs(self, seq: int = 12) -> dict[str, Any]:
        """What the model is called with: two sequences, or one picture."""
        dice = torch.Generator().manual_seed(1)
        if self.kind == "picture":
            return {
                name: torch.randn(shape, generator=dice) if isinstance(shape, tuple) else torch.tensor(shape)
                for name, shape in self.picture.items()
            }
        tokens = {"input_ids": torch.randint(2, 64, (2, seq), generator=dice)}
        if self.kind == "axes":
            tokens["position_ids"] = torch.randint(0, 2 * seq, (3, 2, seq), generator=dice).sort(-1).values
        return tokens

    def answer(self, model: nn.Module, **changes: Any) -> Tensor:
        """Logits, or the last hidden states."""
        with torch.no_grad():
            out = model(**{**self.inputs(), **changes})
        return out.logits if self.kind == "decoder" else out.last_hidden_state  # type: ignore[no-any-return]


def _layers(*kinds: str) -> dict[str, Any]:
    return {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}


_ALIKE: dict[str, Any] = {}
_ALTERNATE = _layers("sliding_attention", "full_attention")
_LINEAR = _layers("linear_attention", "full_attention")
_QUARTER = {**_LINEAR, "head_dim": 16}  # of which a quarter turns
_WIDE = {"hidden_size": 64}
_LATENT = {"num_key_value_heads": 4}  # the head counts of queries and keys agree there
_PATCHES = {"hidden_states": (16, 96), "grid_thw": [[1, 4, 4]]}  # patches of 3 · 2 · 4 · 4 numbers

_DECODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("llama", "apertus", "arcee", "bitnet", "cohere", "diffllama", "doge", "ernie4_5", "exaone", "flex_olmo", "gemma", "glm", "glm4",
         "gpt_neox_japanese", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense",
         "hunyuan_v1_moe", "jais2", "minimax_m2", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo",
         "olmo2", "olmoe", "persimmon", "phi", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
         "solar_open", "starcoder2", "internlm3", "cwm", "glm4_moe", "ernie4_5_moe", "hyperclovax"),
        _ALIKE,
    ),
    **dict.fromkeys(
        ("afmoe", "beam", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "gemma2", "gemma3_text", "gpt_oss",
         "granite_swa", "granitemoe_swa", "laguna", "mellum", "ministral", "olmo3",
         "vaultgemma"),
        _ALTERNATE,
    ),
    **dict.fromkeys(("minimax", "olmo_hybrid"), _LINEAR),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _QUARTER),
    **dict.fromkeys(("gpt_neox", "stablelm"), _WIDE),
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "sarvam_mla",
         "youtu"),
        _LATENT,
    ),
    "longcat_flash": {**_LATENT, "num_layers": 1, "zero_expert_num": 2, "moe_topk": 2},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"head_dim": None, "alibi": False},
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
             "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 8, "mamba_n_heads": 8},
    "gemma4_text": {**_ALTERNATE, "global_head_dim": 16, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    "jetmoe": {"kv_channels": 8},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**_layers("mamba", "attention"), "position_embedding_type": "rope"},
    "lfm2": _layers("conv", "full_attention"),
    "llama4_text": _layers("chunked_attention", "chunked_attention", "chunked_attention", "full_attention"),
    "mimo_v2_flash": {**_ALTERNATE, "head_dim": 12},
    "modernbert-decoder": {**_ALTERNATE, "sliding_window": None, "local_attention": 8},
    "phi3": {"max_position_embeddings": 32, "original_max_position_embeddings": 16, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.5, 3.0, 6.0]}},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 8},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 8, "mamba_ngroups": 1,
               "use_mem_rope": True},
}  # fmt: skip

MODELS: tuple[Tiny, ...] = (
    *(Tiny(model_type, changes) for model_type, changes in _DECODERS.items()),
    Tiny("mistral4", {**_LATENT, "head_dim": None}, "encoder"),
    Tiny("modernbert", _ALTERNATE, "encoder"),
    Tiny("eurobert", {}, "encoder"),
    Tiny("esm", {"position_embedding_type": "rotary"}, "encoder"),
    Tiny("nomic_bert", {}, "encoder"),
    Tiny("jina_embeddings_v3", {}, "encoder"),
    *(
        Tiny(model_type, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}, **changes}, "axes")
        for model_type, changes in {
            "qwen2_vl_text": {}, "qwen2_5_vl_text": {}, "qwen3_vl_text": {}, "qwen3_vl_moe_text": {}, "glm4v_text": {},
            "glm4v_moe_text": {"head_dim": 16}, "glm_ocr_text": {}, "cosmos3_edge_text": {},
        }.items()
    ),
    Tiny("qwen2_5_vl_vision", {"fullatt_block_indexes": [1], "window_size": 16}, "picture", picture=_PATCHES),
    Tiny("qwen3_vl_vision", {"deepstack_visual_indexes": [0]}, "picture", picture=_PATCHES),
    Tiny("qwen3_5_vision", {}, "picture", picture=_PATCHES),
    Tiny("glm4v_vision", {}, "picture", picture=_PATCHES),
    Tiny("glm4v_moe_vision", {}, "picture", picture=_PATCHES),
    Tiny("glm_ocr_vision", {}, "picture", picture=_PATCHES),
    Tiny("pixtral", {}, "picture", picture={"pixel_values": (1, 3, 16, 16), "image_sizes": [[16, 16]]}),
    Tiny("gemma4_vision", {"num_key_value_heads": 4, "position_embedding_size": 16}, "picture", picture={
        "pixel_values": (1, 36, 48), "pixel_position_ids": [[[x, y] for y in range(6) for x in range(6)]]}),
    Tiny("sam3_vit_model", {"window_size": 2, "pretrain_image_size": 16}, "picture", picture={"pixel_values": (1, 3, 16, 16)}),
    Tiny("mlcd_vision_model", {}, "picture", picture={"pixel_values": (1, 3, 16, 16)}),
    Tiny("qwen2_vl_vision", {"embed_dim": 32}, "picture", "Qwen2VisionTransformerPretrainedModel", picture=_PATCHES),
)  # fmt: skip
"""Rotary models whose tables `patch` makes."""

_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "xdrope_section": [1, 1, 1, 1]}
LEFT: tuple[tuple[Tiny, str], ...] = (
    *(
        (Tiny(name, {}, "encoder"), "none of its modules makes a rotary table")
        for name in ("gpt2", "bert", "bloom", "t5", "roformer")
    ),
    (Tiny("mistral_large4_text", _LATENT, "encoder"), "rotary_emb: MistralLarge4TextRotaryEmbedding learns its frequencies"),
    (Tiny("flint", {**_ALTERNATE, "layer_types": ["full_attention"] * 2}), "model.rotary_emb: no layer of 'flint' uses it"),
    (Tiny("hunyuan_vl_text", {"rope_parameters": _SECTIONS}, "axes"), "gives the two channels of a pair different angles"),
    (Tiny("dinov3_vit", {}, "picture"), "rope_embeddings: DINOv3ViTRopePositionEmbedding is not called with positions"),
)
"""Models that it refuses, and why."""

SEVERAL = (
    "llama", "gemma3_text", "gemma4_text", "qwen3_next", "gpt_neox", "gptj", "phi3", "deepseek_v2", "deepseek_v3", "llama4_text",
    "cohere2", "gpt_oss", "bamba", "glm4",
)  # fmt: skip
"""Decoders whose tables are written, applied or shared in different ways."""


def tiny(model_type: str) -> Tiny:
    """The entry of an architecture."""
    return next(model for model in MODELS if model.model_type == model_type)
