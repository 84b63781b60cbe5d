"""What architectures do that their configurations do not say: pairing, axes, which layers turn, old names of keys.

Only exceptions stand here; a model type that is not listed turns like Llama. Facts read from transformers 5.24.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, final

from posenc.core.rotary import Pairing

AxesStyle = Literal[
    "mrope chunked",  # t, h and w in blocks of pairs
    "mrope interleaved",  # t h w t h w …, the rest t
    "mrope alternating",  # h w h w …, then t
    "mrope pairwise",  # row, column, row, column …
    "axial",  # rows in the first pairs, columns in the rest, a ladder each
    "axial columns first",
    "axial pairwise",  # column, row, column, row …
    "axial pairwise from one",  # row, column, row, column …; whole numbers from 1
    "axial shared ladder",  # one ladder: even rungs for rows, odd ones for columns
    "axial blocks",  # each axis turns channels of its own
    "axial t h w",  # three axes
    "patch centres",  # coordinates in [-1, 1] times 2π
    "columns first from one",  # whole numbers from 1
]


@final
@dataclass(frozen=True)
class Family:
    """One architecture's habits.

    Args:
        pairing: of the rotation.
        pairing_flag: a key that says whether pairs are interleaved.
        where: which channels of a head turn: the first, the last, or channels of their own beside unturned ones (MLA).
        base: of models that rotate without a key for it.
        head_key: the key that holds the head width.
        hidden_key: the key that holds the model width, where several could.
        width: what turns where that is not a head: all channels before the heads part, or CLVP's rule.
        axes: how pairs share several axes.
        sections: pairs per axis where the configuration names none.
        turns: which layers turn.
        entry: which block of ``rope_parameters`` a kind of layer reads, where not the one of its name.
        local: the old key that holds the base of sliding layers.
        everywhere: whether an old ``rope_scaling`` belongs to sliding layers too.
        global_head_dim: the head width of full-attention layers where no key says it.
        temperature: which rule scales queries.
        mscale: whether ``mscale_all_dim`` also enters the softmax scale.
        bias: of the scores.
        input: of the embeddings.
        offset: the row of the first token in a learned table; ``"pad"`` for ``pad_token_id + 1``.
        remark: what else a user must know.
    """

    pairing: Pairing = "half"
    pairing_flag: str | None = None
    where: Literal["leading", "trailing", "separate"] = "leading"
    base: float | None = None
    head_key: str = "head_dim"
    hidden_key: str | None = None
    width: Literal["head", "hidden", "clvp", "memory"] = "head"
    axes: AxesStyle | None = None
    sections: tuple[int, ...] = ()
    turns: Literal["all", "flags", "sliding", "sliding unless no window", "none", "if rope", "if rotary"] = "all"
    entry: tuple[tuple[str, str], ...] = ()
    local: str | None = None
    everywhere: bool = False
    global_head_dim: int | None = None
    temperature: Literal["", "llama4", "ministral"] = ""
    mscale: bool = False
    bias: Literal["", "alibi", "alibi if asked", "t5", "deberta", "swin", "transformer-xl"] = ""
    input: Literal["", "learned", "sinusoidal interleaved", "sinusoidal concatenated"] = ""
    offset: int | Literal["pad"] = 0
    remark: str = ""


_MLA = Family(where="separate", pairing_flag="rope_interleave", mscale=True)
_MLA_NEIGHBOURS = Family(where="separate", pairing="interleaved", mscale=True)
_LEARNED = Family(turns="none", input="learned")
_ALIBI = Family(turns="none", bias="alibi")
_T5 = Family(turns="none", bias="t5")
_AXIAL = Family(axes="axial")
_PAIRWISE_VISION = Family(axes="axial", pairing="interleaved")
_QWEN_VL = Family(axes="mrope chunked", sections=(16, 24, 24))
_QWEN3_VL = Family(axes="mrope interleaved", sections=(24, 20, 20))
_QWEN35 = replace(_QWEN3_VL, sections=(11, 11, 10))
_SLIDING_TURNS = Family(turns="sliding")
_GEMMA3 = Family(local="rope_local_base_freq")

FAMILIES: dict[str, Family] = {
    # pairs of neighbours
    **dict.fromkeys(
        ("cohere", "glm", "glm4", "helium", "ernie4_5", "ernie4_5_moe", "blt_local_encoder", "blt_local_decoder",
         "blt_global_transformer", "blt_patcher", "openai_privacy_filter", "moonshine", "moonshine_streaming", "pe_audio_encoder",
         "pe_audio_video_encoder", "pe_video_encoder"),
        Family(pairing="interleaved"),
    ),
    **dict.fromkeys(("gptj", "codegen", "roformer"), Family(pairing="interleaved", base=10_000.0)),
    "clvp_encoder": Family(base=10_000.0, width="clvp", turns="if rotary"),
    "jetmoe": Family(head_key="kv_channels"),
    "zamba2": Family(head_key="attention_head_dim", turns="if rotary"),
    **dict.fromkeys(("qwen2_vl_vision", "qwen2_vl"), Family(hidden_key="embed_dim")),
    "nanochat": Family(remark="turns the other way: sine enters with the opposite sign, so its weights fit no other kernel as they are"),
    **dict.fromkeys(("cohere2", "cohere2_moe"), Family(pairing="interleaved", turns="sliding")),
    "llama4_text": Family(pairing="interleaved", turns="flags", temperature="llama4"),
    # rotation in channels of its own, beside channels that do not turn
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe_lite", "axk1", "youtu", "sarvam_mla"),
        _MLA,
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v32", "glm_moe_dsa", "axk2", "bailing_hybrid", "longcat_flash"), _MLA_NEIGHBOURS
    ),
    "hy_v4": Family(where="separate", mscale=True),
    "minicpm3": Family(where="separate"),
    "mistral4": replace(_MLA, temperature="ministral"),
    "mistral_large4_text": replace(
        _MLA_NEIGHBOURS, turns="flags", remark="its frequencies are learned: the table here is the one before training"
    ),
    "hy_v4_vl_text": replace(_MLA_NEIGHBOURS, axes="mrope interleaved", sections=(12, 10, 10)),
    "dots3_note_text": replace(_MLA_NEIGHBOURS, mscale=False),
    "deepseek_v4": Family(
        pairing="interleaved",
        where="trailing",
        entry=(("sliding_attention", "main"), ("compressed_sparse_attention", "compress"), ("heavily_compressed_attention", "compress")),
    ),
    "kimi_linear": Family(turns="none"),
    # layers that do not turn
    **dict.fromkeys(("afmoe", "flint"), _SLIDING_TURNS),
    "smollm3": Family(turns="flags"),
    **dict.fromkeys(("exaone4", "exaone_moe"), Family(turns="sliding unless no window")),
    "granitemoehybrid": Family(turns="if rope"),
    **dict.fromkeys(("nemotron_h", "jamba"), Family(turns="none")),
    "ministral3": Family(temperature="ministral"),
    # a base per kind of layer under old names
    **dict.fromkeys(("gemma3_text", "gemma3n_text", "t5gemma2_text", "t5gemma2_decoder"), _GEMMA3),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), Family(local="local_rope_theta", everywhere=True)),
    "olmo3": Family(local="rope_theta"),
    # several axes: text with images
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_omni_talker"), _QWEN_VL
    ),
    **dict.fromkeys(
        ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "qwen3_omni_moe_talker_text", "cosmos3_edge_text",
         "cohere_compass_text"),
        _QWEN3_VL,
    ),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), _QWEN35),
    **dict.fromkeys(
        ("glm4v_text", "glm_ocr_text"), Family(axes="mrope chunked", sections=(8, 12, 12), pairing="interleaved")
    ),
    **dict.fromkeys(("glm4v_moe_text", "glm_image_text"), Family(axes="mrope chunked", sections=(8, 12, 12))),
    "ernie4_5_vl_moe_text": Family(axes="mrope alternating", sections=(22, 22, 20), pairing="interleaved"),
    "neomme": Family(axes="mrope pairwise"),
    # several axes: pictures
    "sam3_vit_model": _PAIRWISE_VISION,
    **dict.fromkeys(("edgetam_video", "sam2_video", "sam3_tracker_video"), replace(_PAIRWISE_VISION, width="memory")),
    "efficientloftr": Family(axes="axial pairwise from one", pairing="interleaved", width="hidden"),
    "inkling2_vision": Family(axes="axial columns first", pairing="interleaved"),
    "step3p5_vision": Family(axes="axial columns first"),
    "kimi_k25_vision": Family(axes="axial pairwise"),
    "pixtral": Family(axes="axial shared ladder"),
    "gemma4_vision": Family(axes="axial blocks"),
    "minimax_m3_vl_vision": Family(axes="axial t h w"),
    **dict.fromkeys(("dinov3_vit", "sapiens2", "eomt_dinov3"), Family(axes="patch centres")),
    "llama4_vision_model": Family(axes="columns first from one", pairing="interleaved"),
    # no rotation
    **dict.fromkeys(("gpt2", "gpt_bigcode", "openai-gpt", "ctrl", "clip_text_model", "vit", "deit", "gpt_neo", "biogpt"), _LEARNED),
    **dict.fromkeys(("bert", "distilbert", "electra", "albert", "ernie", "layoutlm", "bert-generation"), _LEARNED),
    **dict.fromkeys(("opt", "bart", "mbart", "plbart"), replace(_LEARNED, offset=2)),
    **dict.fromkeys(("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "data2vec-text"),
                    replace(_LEARNED, offset="pad")),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text", "embedding_gemma2_text"), Family(global_head_dim=512)),
    **dict.fromkeys(("marian", "pegasus", "m2m_100", "whisper", "speech_to_text"), Family(turns="none", input="sinusoidal concatenated")),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    "falcon": Family(bias="alibi if asked"),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers", "udop", "pop2piano", "blip_2_t5"), _T5),
    **dict.fromkeys(("deberta", "deberta-v2"), Family(turns="none", bias="deberta", input="learned")),
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin", "swin2sr"), Family(turns="none", bias="swin")),
    "xlnet": Family(turns="none", bias="transformer-xl"),
}  # fmt: skip

UNLISTED = Family()
NO_ATTENTION = frozenset({"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp", "convolution", "short_conv"})
"""Kinds of layers in which nothing turns, because nothing attends."""


def family_of(model_type: str, rope_type: str | None) -> Family:
    """The habits of an architecture; an unlisted one with an axial block reads rows and columns."""
    return FAMILIES.get(model_type) or (_AXIAL if rope_type == "axial" else UNLISTED)
