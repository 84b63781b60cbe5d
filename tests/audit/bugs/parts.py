"""Bugs in the parts of live models: tables that are lost, rounded, rebuilt from the wrong place or too short."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tests.audit.bugs.bug import Bug
from tests.hf.tiny_models import Tiny, tiny
from torch import Tensor, nn

from posenc.audit import Report
from posenc.audit.live.auditing import audit

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
BASE = {"rope_type": "default", "rope_theta": 5e5}
WIDE = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 65536}
"""A head of 32 pairs, as long as a real one."""
STACKS = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 0,
}  # fmt: skip


def model_bug(name: str, finding: str, source: str, build: Callable[[], Any], break_it: Callable[[Any], Any]) -> Bug:
    """A model with one defect, and the same model without."""

    def broken() -> Report:
        net = build()
        return audit(break_it(net) or net, behaviour="skip")

    return Bug(name, finding, source, broken, lambda: audit(build(), behaviour="skip"))


def llama(**changes: Any) -> Callable[[], Any]:
    return lambda: tiny("llama").build(tiny("llama").config(**{**WIDE, **changes}))


def _is(name: str, **changes: Any) -> Callable[[], Any]:
    model = tiny(name)
    return lambda: model.build(model.config(**changes))


def _other(name: str, **changes: Any) -> Callable[[], Any]:
    """An architecture that does not rotate."""
    model = Tiny(name, changes)
    return lambda: model.build()


# frequencies


def cast_whole(net: Any) -> Any:
    return net.to(torch.bfloat16)


def cast_but_tables() -> Any:
    net = llama()().to(torch.bfloat16)
    net.model.rotary_emb = type(net.model.rotary_emb)(net.config)
    return net


def _emptied(fill: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """What a model from the meta device has in its buffers, made the same every time."""

    def to_empty(net: Any) -> None:
        for module in net.modules():
            for key, buffer in module.named_buffers(recurse=False):
                if key.endswith("inv_freq"):
                    buffer.copy_(fill(buffer))

    return to_empty


def finite_garbage(right: Tensor) -> Tensor:
    """A block of memory that held the right table, half of it written over."""
    kept = torch.arange(right.numel()) < right.numel() // 2
    return torch.where(kept, right, right.flip(0) * 0.37)


def rebuilt_from(**changes: Any) -> Callable[[Any], Any]:
    """The rotary module built again, from a configuration that lacks something."""

    def rebuild(net: Any) -> None:
        config = copy.deepcopy(net.config)
        for key, value in changes.items():
            setattr(config, key, value)
        net.model.rotary_emb = type(net.model.rotary_emb)(config)

    return rebuild


def no_gain(net: Any) -> None:
    net.model.rotary_emb.attention_scaling = 1.0


def one_base(net: Any) -> None:
    rotary = net.model.rotary_emb
    rotary.full_attention_inv_freq.copy_(rotary.sliding_attention_inv_freq)


def half_angles(net: Any) -> None:
    """The table of GPT-J with its angles formed in half precision."""
    table = net.transformer.rotary_emb.embed_positions
    pairs = table.shape[1] // 2
    inv_freq = (1e4 ** -(torch.arange(pairs) / pairs)).half()
    angle = (torch.arange(table.shape[0]).half()[:, None] * inv_freq).float()
    table.copy_(torch.cat((angle.sin(), angle.cos()), dim=-1))


def one_row_late(net: Any) -> None:
    """The table of GPT-J with its rows counted from one."""
    table = net.transformer.rotary_emb.embed_positions
    table.copy_(table.roll(-1, 0))


def stale_copy(net: Any) -> None:
    """Loading mended ``inv_freq`` and forgot the copy that short texts return to."""
    rotary = net.model.rotary_emb
    rotary.original_inv_freq.copy_(rotary.original_inv_freq.flip(0))


def left_on_meta(net: Any) -> None:
    net.model.rotary_emb.to("meta")


# layers


def all_layers_turn(net: Any) -> None:
    for layer in net.model.layers:
        layer.self_attn.use_rope = 1


def no_window(net: Any) -> None:
    net.model.layers[0].self_attn.sliding_window = None


def own_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **rest: Any) -> Any:
    out = nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    return out.transpose(1, 2), None


def _registered(name: str, *, mask: bool) -> Report:
    """A model on an attention of the user's own, registered with or without a mask."""
    transformers.AttentionInterface.register(name, own_attention)
    try:
        if mask:
            transformers.AttentionMaskInterface.register(name, transformers.masking_utils.eager_mask)
        net = tiny("llama").build()
        net.set_attn_implementation(name)
        return audit(net, behaviour="skip")
    finally:
        transformers.AttentionInterface._global_mapping.pop(name)
        transformers.AttentionMaskInterface._global_mapping.pop(name, None)


# learned tables


def shorter(net: Any) -> None:
    """OPT's table without the two rows before the first token."""
    embed = net.model.decoder.embed_positions
    embed.weight = nn.Parameter(embed.weight[:-2].detach().clone())
    embed.num_embeddings -= 2


def _grown(fill: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """GPT-2's table with its second half as ``fill`` makes it of the first."""

    def grow(net: Any) -> None:
        table = net.transformer.wpe.weight.data
        half = table.shape[0] // 2
        table[half:] = fill(table[:half])

    return grow


def other_buckets(net: Any) -> None:
    first = net.encoder.block[0].layer[0].SelfAttention
    first.relative_attention_bias = nn.Embedding(16, first.n_heads)


def other_sections(net: Any) -> None:
    """Time, height and width over other pairs than the model was trained with."""
    config = copy.deepcopy(net.config)
    config.rope_parameters = {**config.rope_parameters, "mrope_section": [2, 1, 1]}
    net.rotary_emb = type(net.rotary_emb)(config)


def sinusoids_lost(net: Any) -> None:
    """``to_empty`` reached the sinusoids of M2M-100, which are in no checkpoint."""
    dice = torch.Generator().manual_seed(0)
    for stack in (net.encoder, net.decoder):
        stack.embed_positions.weights.uniform_(-1, 1, generator=dice)


# plain PyTorch


class PlainSlopes(nn.Module):
    def __init__(self, first: int = 1, heads: int = 8) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(first, first + heads))


class PlainTables(nn.Module):
    """Cosines and sines made once, of angles formed in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        inv_freq = (1e4 ** -(torch.arange(32) / 32)).to(dtype)
        angle = (torch.arange(4096).to(dtype)[:, None] * inv_freq).float()
        self.register_buffer("cos_cached", torch.cat((angle, angle), dim=-1).cos().bfloat16(), persistent=False)
        self.register_buffer("sin_cached", torch.cat((angle, angle), dim=-1).sin().bfloat16(), persistent=False)


class PlainRotary(nn.Module):
    """A rotary module as people write it."""

    def __init__(self, pairs: int = 32, base: float = 1e4) -> None:
        super().__init__()
        self.register_buffer("inv_freq", base ** -(torch.arange(pairs) / pairs), persistent=False)


class PlainModel(nn.Module):
    def __init__(self, *, registered: bool = True) -> None:
        super().__init__()
        self.embed, self.rope = nn.Embedding(16, 32), PlainRotary()
        table = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
        if registered:
            self.register_buffer("pos_table", table, persistent=False)
        else:
            self.pos_table = table


def lost(net: PlainModel) -> None:
    net.rope.inv_freq.fill_(torch.nan)


def halved(net: PlainModel) -> Any:
    return net.half()


def halved_but_tables() -> PlainModel:
    net = PlainModel().half()
    net.rope = PlainRotary()
    return net


def _partial(net: Any) -> None:
    config = copy.deepcopy(net.config)
    config.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": 1.0}
    net.model.rotary_emb = type(net.model.rotary_emb)(config)


BUGS: list[Bug] = [
    Bug(
        "the whole model cast to bfloat16",
        "frequency-rounded",
        "EleutherAI/gpt-neox#1003, huggingface/transformers#29496",
        lambda: audit(cast_whole(llama()()), behaviour="skip"),
        lambda: audit(cast_but_tables(), behaviour="skip"),
    ),
    model_bug(
        "to_empty left huge numbers in inv_freq",
        "frequency-garbage",
        "huggingface/transformers#48892",
        llama(),
        _emptied(lambda right: torch.full_like(right, 9e21)),
    ),
    model_bug(
        "to_empty left half of the right table",
        "frequency-garbage",
        "huggingface/transformers#45902, Synthyra/FastPLMs#47",
        llama(),
        _emptied(finite_garbage),
    ),
    model_bug(
        "rotary module built without the llama3 block",
        "frequency-scaling-dropped",
        "unslothai/unsloth#6197",
        llama(rope_parameters=LLAMA3),
        rebuilt_from(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    ),
    model_bug(
        "base read from where it no longer stands",
        "frequency-base",
        "deepspeedai/DeepSpeed#8345, InternLM/lmdeploy#4303",
        llama(rope_parameters=BASE),
        rebuilt_from(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    ),
    model_bug(
        "attention_scaling lost in a rebuilt rotary module",
        "amplitude-missing",
        "GaijinEntertainment/daScript#3479",
        llama(rope_parameters=YARN, max_position_embeddings=16384),
        no_gain,
    ),
    model_bug(
        "all channels turn where half should",
        "frequency-width",
        "ml-explore/mlx-lm#1698",
        _is("glm", head_dim=16, partial_rotary_factor=0.5),
        _partial,
    ),
    model_bug("local base used in global layers", "layer-base", "ml-explore/mlx-lm#1768", _is("gemma3_text"), one_base),
    model_bug(
        "table made of angles in half precision", "table-half-angles", "EleutherAI/gpt-neox#1003",
        _is("gptj", max_position_embeddings=2048, rotary_dim=8), half_angles,
    ),
    model_bug("rotary table one row late", "table-values", "keras-team/keras-hub#1544", _is("gptj"), one_row_late),
    model_bug(
        "copy of the short table not restored", "table-out-of-step", "huggingface/transformers#45902", _is("phi3"), stale_copy
    ),
    model_bug("rotary module left on meta", "table-on-meta", "huggingface/transformers#34234", llama(), left_on_meta),
    model_bug(
        "layers without rotation are rotated",
        "layer-plan",
        "pytorch/executorch#22043, timtoole02/Camelid#535",
        _is("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0]),
        all_layers_turn,
    ),
    model_bug(
        "sliding window lost on a layer", "layer-window", "docs/findings/layer-window.md", _is("gemma3_text"), no_window
    ),
    Bug(
        "attention registered without its mask",
        "mask-not-registered",
        "huggingface/transformers#45811",
        lambda: _registered("attention_without_mask", mask=False),
        lambda: _registered("attention_with_mask", mask=True),
    ),
    model_bug(
        "table without the rows before the first token",
        "table-rows",
        "huggingface/transformers#11242, rinnakk/japanese-pretrained-models#3",
        _other("opt", ffn_dim=48, word_embed_proj_dim=32),
        shorter,
    ),
    model_bug(
        "table grown by empty rows", "table-untrained", "docs/findings/table-untrained.md", _other("gpt2"), _grown(torch.zeros_like)
    ),
    model_bug("table grown by its own rows", "table-repeats", "docs/findings/table-repeats.md", _other("gpt2"), _grown(torch.clone)),
    model_bug(
        "relative bias of another bucket count", "bias-table-size", "huggingface/candle#727",
        lambda: Tiny("t5", {"d_kv": 8, "d_ff": 48, "num_layers": 2, "decoder_start_token_id": 0}, "encoder").build(), other_buckets,
    ),
    model_bug(
        "sections of the axes read from another place", "table-values", "alibaba/MNN#4133, ml-explore/mlx-lm#1768",
        _is("qwen2_vl_text"), other_sections,
    ),
    model_bug(
        "sinusoids lost in memory", "table-formula", "huggingface/transformers#48892",
        lambda: Tiny("m2m_100", {**STACKS, "pad_token_id": 1}, "encoder").build(), sinusoids_lost,
    ),
    Bug(
        "slopes in a buffer one exponent off",
        "bias-slopes",
        "paiml/aprender#2143",
        lambda: audit(PlainSlopes(0), behaviour="skip"),
        lambda: audit(PlainSlopes(1), behaviour="skip"),
    ),
    Bug(
        "cosines cached from angles in bfloat16",
        "table-half-angles",
        "Modalities/modalities#462, huggingface/candle#3520",
        lambda: audit(PlainTables(torch.bfloat16), behaviour="skip"),
        lambda: audit(PlainTables(torch.float32), behaviour="skip"),
    ),
    Bug(
        "position table kept as a plain attribute",
        "table-not-buffer",
        "lyuwenyu/RT-DETR#677, facebookresearch/fairseq#4420",
        lambda: audit(PlainModel(registered=False), behaviour="skip"),
        lambda: audit(PlainModel(), behaviour="skip"),
    ),
    model_bug("plain inv_freq lost in memory", "table-garbage", "huggingface/transformers#48892", PlainModel, lost),
    Bug(
        "plain model cast to half",
        "frequency-rounded",
        "InternLM/InternLM#237, NVIDIA/Megatron-LM#744",
        lambda: audit(halved(PlainModel()), behaviour="skip"),
        lambda: audit(halved_but_tables(), behaviour="skip"),
    ),
]  # fmt: skip
