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
}  # fmt: skip
"""Set wherever a configuration class has the key."""

Kind = Literal["decoder", "encoder", "picture"]


@dataclass(frozen=True)
class Tiny:
    """One architecture.

    Args:
        model_type: the architecture, or a part of a larger one, as transformers names it.
        changes: keys of its configuration beside `SIZES`.
        kind: what the model is called with and whether it generates.
        model: the class, where the automatic one would not do.
    """

    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind = "decoder"
    model: str = ""

    def config(self, **changes: Any) -> Any:
        """A fresh configuration."""
        cls = transformers.CONFIG_MAPPING[self.model_type]
        known = cls()
        sizes = {key: value for key, value in SIZES.items() if hasattr(known, key)}
        return cls(**{**sizes, **copy.deepcopy(dict(self.changes)), **changes})

    def build(self, config: Any = None) -> nn.Module:
        """The model with weights that are the same every time."""
        config = self.config() if config is None else config
        torch.manual_seed(0)
        if self.model:
            cls: Any = getattr(transformers, self.model, None)
            if cls is None:  # a class that is not public
                module = type(config).__module__.replace("configuration", "modeling")
                cls = getattr(importlib.import_module(module), self.model)
            return cls(config).eval()
        auto = transformers.AutoModelForCausalLM if self.kind == "decoder" else transformers.AutoModel
        return auto.from_config(config).eval()

SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
