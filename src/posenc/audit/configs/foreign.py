"""Names that other stacks and older code have for position keys."""

from __future__ import annotations

from typing import Literal, NamedTuple, final


@final
class Foreign(NamedTuple):
    """A key of another convention.

    Args:
        whose: who reads it.
        means: what it stands for.
        instead: how transformers says it.
    """

    whose: str
    means: Literal["base", "share", "scaling", "other"]
    instead: str


_LINEAR = "rope_parameters with rope_type 'linear' and a factor"
_DYNAMIC = "rope_parameters with rope_type 'dynamic' and a factor: a switch says no factor"
_YARN = "rope_parameters with rope_type 'yarn'"

FOREIGN: dict[str, Foreign] = {
    "use_dynamic_ntk": Foreign("older code of Qwen and LMDeploy", "scaling", _DYNAMIC),
    "use_logn_attn": Foreign("older code of Qwen", "other", "no key: queries beyond the trained length are not scaled"),
    "ntk_alpha": Foreign("older code of Qwen and vLLM", "scaling", "rope_parameters with rope_type 'dynamic'"),
    "rope_ratio": Foreign("code of ChatGLM", "base", "rope_theta, multiplied by the ratio"),
    "rope_base": Foreign("other stacks", "base", "rope_theta"),
    "rotary_base": Foreign("Megatron", "base", "rope_theta"),
    "rope_freq_base": Foreign("GGUF's readers", "base", "rope_theta"),
    "freq_base": Foreign("GGUF's readers", "base", "rope_theta"),
    "rotary_percent": Foreign("Megatron", "share", "partial_rotary_factor"),
    "rotary_percentage": Foreign("LitGPT", "share", "partial_rotary_factor"),
    "seq_len_interpolation_factor": Foreign("Megatron", "scaling", _LINEAR),
    "rope_scaling_factor": Foreign("Megatron", "scaling", "rope_parameters with a factor"),
    "rope_scale": Foreign("other stacks", "scaling", _LINEAR),
    "rope_condense_ratio": Foreign("LitGPT", "scaling", _LINEAR),
    "rope_adjustments": Foreign("LitGPT", "scaling", "rope_parameters with rope_type 'llama3'"),
    "yarn_rotary_scaling_factor": Foreign("Megatron", "scaling", _YARN),
    "yarn_original_max_position_embeddings": Foreign("Megatron", "scaling", _YARN),
    "scaling_config": Foreign("mlx", "scaling", "rope_parameters"),
    "rope_factor": Foreign("torchtitan", "scaling", _YARN),
    "original_seq_len": Foreign("torchtitan", "scaling", "original_max_position_embeddings in rope_parameters"),
    "dual_chunk_attention_config": Foreign("vLLM", "other", "no key"),
}
