"""Configurations with one mistake each."""

from __future__ import annotations

from typing import Any

from tests.audit.bugs.bug import Bug

from posenc.audit.configs import lint

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
QWEN3: dict[str, Any] = {**LLAMA, "model_type": "qwen3", "head_dim": 128, "rope_theta": 1e6}
QWEN3_VL: dict[str, Any] = {**QWEN3, "model_type": "qwen3_vl_text"}
DEEPSEEK: dict[str, Any] = {
    **LLAMA, "model_type": "deepseek_v3", "rope_theta": 1e4, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "max_position_embeddings": 163840,
}  # fmt: skip
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PHI3: dict[str, Any] = {
    "model_type": "phi3", "hidden_size": 256, "num_attention_heads": 32, "num_hidden_layers": 4, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "rope_theta": 1e4,
}  # fmt: skip
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.5, 4.0, 16.0, 48.0]
GEMMA2: dict[str, Any] = {**LLAMA, "model_type": "gemma2", "num_hidden_layers": 4, "head_dim": 128, "sliding_window": 4096}
ALTERNATE = ["sliding_attention", "full_attention"] * 2


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in names}


def seeded(name: str, finding: str, source: str, broken: dict[str, Any], mended: dict[str, Any]) -> Bug:
    return Bug(name, finding, source, lambda: lint(broken), lambda: lint(mended))


BUGS = [
    seeded(
        "base only inside rope_parameters", "config-reader", "deepspeedai/DeepSpeed#8345, InternLM/lmdeploy#4303, sgl-project/sglang#14745",
        {**without(LLAMA, "rope_theta"), "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    seeded(
        "base left out beside a Llama 3 block", "config-defaulted", "deepspeedai/DeepSpeed#8345",
        {**without(LLAMA, "rope_theta"), "rope_scaling": LLAMA3},
        {**LLAMA, "rope_scaling": LLAMA3},
    ),
    seeded(
        "two bases", "config-conflict", "sgl-project/sglang#14745",
        {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    seeded(
        "factor against lengths", "config-factor", "huggingface/transformers#38224",
        {**QWEN3, "max_position_embeddings": 40960, "rope_scaling": YARN},
        {**QWEN3, "max_position_embeddings": 131072, "rope_scaling": YARN},
    ),
    seeded(
        "length not multiplied", "config-lengths", "huggingface/transformers#38224",
        {**QWEN3, "max_position_embeddings": 32768, "rope_scaling": YARN},
        {**QWEN3, "max_position_embeddings": 131072, "rope_scaling": YARN},
    ),
    seeded(
        "dynamic NTK counts from the extended length", "config-lengths", "transformers' dynamic rule counts from max_position_embeddings",
        {**LLAMA, "max_position_embeddings": 8192, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 2048}},
        {**LLAMA, "max_position_embeddings": 2048, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 2048}},
    ),
    seeded(
        "factor below one", "config-factor", "ml-explore/mlx#261",
        {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 0.25}},
        {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    seeded(
        "linear without a factor", "config-missing", "modelscope/ms-swift#5233",
        {**LLAMA, "rope_scaling": {"type": "linear"}},
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    seeded(
        "yarn without its original length", "config-missing", "NVIDIA-NeMo/Automodel#2652, ROCm/aiter#4742, sgl-project/sglang#14772",
        {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536}},
    ),
    seeded(
        "a text where a block belongs", "config-type", "runpod-workers/worker-vllm#257",
        {**LLAMA, "rope_scaling": '{"type": "linear", "factor": 4.0}'},
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    seeded(
        "a switch for dynamic NTK", "config-legacy", "InternLM/lmdeploy#846",
        {**LLAMA, "use_dynamic_ntk": True},
        {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ),
    seeded(
        "a switch for dynamic NTK beside linear scaling", "config-scaling-twice", "InternLM/lmdeploy#846",
        {**LLAMA, "use_dynamic_ntk": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    seeded(
        "llama3 block without its type", "config-scaling-dropped", "unslothai/unsloth#6197, felafax/felafax#59",
        {**LLAMA, "rope_scaling": without(LLAMA3, "rope_type")},
        {**LLAMA, "rope_scaling": LLAMA3},
    ),
    seeded(
        "scaling beside the text model", "config-scaling-dropped", "lablup/mlxcel#1355",
        {"model_type": "llava", "text_config": LLAMA, "rope_scaling": LLAMA3},
        {"model_type": "llava", "text_config": {**LLAMA, "rope_scaling": LLAMA3}},
    ),
    seeded(
        "an unknown key in the block", "config-unread", "vllm-project/vllm#27722",
        {**QWEN3, "rope_scaling": {**YARN, "trunc": False}},
        {**QWEN3, "rope_scaling": {**YARN, "truncate": False}},
    ),
    seeded(
        "a share that only some architectures read", "config-unread", "huggingface/transformers#48652",
        {**LLAMA, "partial_rotary_factor": 0.5},
        LLAMA,
    ),
    seeded(
        "sections that do not sum to the pairs", "config-sections", "ml-explore/mlx-lm#1768, kekzl/imp#1172",
        {**QWEN3_VL, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 19], "mrope_interleaved": True}},
        {**QWEN3_VL, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}},
    ),
    seeded(
        "sections in blocks where the model interleaves", "config-sections", "alibaba/MNN#4133, ollama/ollama#12807, InternLM/lmdeploy#4644",
        {**QWEN3_VL, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": False}},
        {**QWEN3_VL, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}},
    ),
    seeded(
        "sections that cannot be interleaved", "config-sections", "alibaba/MNN#4133",
        {**QWEN3_VL, "rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24], "mrope_interleaved": True}},
        {**QWEN3_VL, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}},
    ),
    seeded(
        "amplitude beside the softmax factor", "config-temperature", "the YaRN temperature on cosine and sine and on the softmax scale",
        {**DEEPSEEK, "rope_scaling": {**DEEPSEEK_YARN, "attention_factor": 1.3688879454113936}},
        {**DEEPSEEK, "rope_scaling": DEEPSEEK_YARN},
    ),
    seeded(
        "amplitude squared", "config-temperature", "ml-explore/mlx-lm#1507",
        {**QWEN3, "rope_scaling": {**YARN, "attention_factor": 1.138629436111989**2}},
        {**QWEN3, "rope_scaling": {**YARN, "attention_factor": 1.138629436111989}},
    ),
    seeded(
        "betas swapped", "config-swapped", "GaijinEntertainment/daScript#3479, antonellof/ferrox#226",
        {**QWEN3, "rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 4.0}},
        {**QWEN3, "rope_scaling": {**YARN, "beta_fast": 4.0, "beta_slow": 1.0}},
    ),
    seeded(
        "low and high factors swapped", "config-swapped", "transformers checks high_freq_factor > low_freq_factor and warns",
        {**LLAMA, "rope_scaling": {**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        {**LLAMA, "rope_scaling": LLAMA3},
    ),
    seeded(
        "longrope lists swapped", "config-swapped", "unslothai/unsloth#10681",
        {**PHI3, "rope_scaling": {"type": "longrope", "short_factor": LONG, "long_factor": SHORT}},
        {**PHI3, "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}},
    ),
    seeded(
        "longrope lists for the whole head", "config-lists", "transformers checks the length of short_factor and warns",
        {**PHI3, "rope_scaling": {"type": "longrope", "short_factor": SHORT * 2, "long_factor": LONG * 2}},
        {**PHI3, "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}},
    ),
    seeded(
        "a rope_type that nobody has", "config-rope-type", "transformers warns, then fails with KeyError at load",
        {**QWEN3, "rope_scaling": {**YARN, "rope_type": "yarn_scaling"}},
        {**QWEN3, "rope_scaling": YARN},
    ),
    seeded(
        "a width that does not divide over the heads", "config-head-dim", "hidden_size // num_attention_heads in transformers rounds down",
        {**LLAMA, "hidden_size": 4100},
        {**LLAMA, "hidden_size": 4100, "head_dim": 128},
    ),
    seeded(
        "more kinds of layers than layers", "config-layers", "transformers checks layer_types against num_hidden_layers",
        {**GEMMA2, "layer_types": ALTERNATE + ALTERNATE[:1]},
        {**GEMMA2, "layer_types": ALTERNATE},
    ),
    seeded(
        "layers that slide without a window", "config-layers", "docs/findings/config-layers.md",
        {**GEMMA2, "layer_types": ALTERNATE, "sliding_window": None},
        {**GEMMA2, "layer_types": ALTERNATE},
    ),
]  # fmt: skip
