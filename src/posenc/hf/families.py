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
        window: what the number of a window counts: all that a query sees, the tokens on each side, or both sides together;
            ``"half"`` for ModernBERT's decoder, which takes half of it.
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
    turns: Literal[
        "all", "flags", "sliding", "windowed", "windowed or dense", "sliding unless no window", "none", "if rope", "if rotary"
    ] = "all"
    entry: tuple[tuple[str, str], ...] = ()
    local: str | None = None
    everywhere: bool = False
    global_head_dim: int | None = None
    window: Literal["all", "each side", "both sides", "half"] = "all"
    temperature: Literal["", "llama4", "ministral"] = ""
    mscale: bool = False
    bias: Literal["", "alibi", "alibi if asked", "t5", "deberta", "swin", "transformer-xl", "relative states"] = ""
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
         "blt_global_transformer", "blt_patcher", "moonshine", "moonshine_streaming", "pe_audio_encoder",
         "pe_audio_video_encoder", "pe_video_encoder"),
        Family(pairing="interleaved"),
    ),
    **dict.fromkeys(("gptj", "codegen", "roformer"), Family(pairing="interleaved", base=10_000.0)),
    "clvp_encoder": Family(base=10_000.0, width="clvp", turns="if rotary"),
    "jetmoe": Family(head_key="kv_channels"),
    "zamba2": Family(head_key="attention_head_dim", turns="if rotary"),
    **dict.fromkeys(("qwen2_vl_vision", "qwen2_vl"), Family(hidden_key="embed_dim")),
    "nanochat": Family(remark="turns the other way: sine enters with the opposite sign, so its weights fit no other kernel as they are"),
    "cohere2": Family(pairing="interleaved", turns="windowed"),
    "cohere2_moe": Family(pairing="interleaved", turns="windowed or dense"),
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
    "minicpm3": Family(where="separate", mscale=True),
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
    # windows that reach both ways
    "openai_privacy_filter": Family(pairing="interleaved", window="each side"),
    "ultrabert": Family(window="each side"),
    # layers that do not turn
    **dict.fromkeys(("afmoe", "flint", "lara_mini", "muse_glimmer_text", "muse_spark_text"), _SLIDING_TURNS),
    "smollm3": Family(turns="flags"),
    **dict.fromkeys(("exaone4", "exaone_moe", "kolibri1"), Family(turns="sliding unless no window")),
    "granitemoehybrid": Family(turns="if rope"),
    **dict.fromkeys(
        ("wav2vec2-conformer", "wav2vec2-bert", "seamless_m4t"),
        Family(turns="if rope", remark="hidden states turn, before they are projected to queries and keys"),
    ),
    "phimoe": Family(
        remark="its long factors count here beyond the original length; transformers 5.24 keeps the short ones and changes only the amplitude"
    ),
    "esm": Family(turns="if rope", input="learned", offset="pad"),
    **dict.fromkeys(("nemotron_h", "jamba"), Family(turns="none")),
    "ministral3": Family(temperature="ministral"),
    # a base per kind of layer under old names
    **dict.fromkeys(("gemma3_text", "gemma3n_text", "t5gemma2_text", "t5gemma2_decoder"), _GEMMA3),
    "modernbert": Family(local="local_rope_theta", everywhere=True, window="both sides"),
    "modernbert-decoder": Family(local="local_rope_theta", everywhere=True, window="half"),
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
    "neomme": Family(axes="mrope pairwise", window="each side"),
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
    **dict.fromkeys(("gpt2", "gpt-sw3", "gpt_bigcode", "openai-gpt", "imagegpt", "decision_transformer", "clip_text_model", "clip_vision_model", "siglip_vision_model",
                     "dinov2", "vit", "deit",
                     "gpt_neo", "git", "xlm", "flaubert", "whisper"), _LEARNED),
    **dict.fromkeys(("bert", "distilbert", "electra", "albert", "ernie", "layoutlm", "bert-generation", "big_bird", "bros", "convbert", "fnet",
                     "layoutlmv2", "megatron-bert", "mobilebert", "rembert", "roc_bert", "splinter", "squeezebert", "tapas",
                     "tvp", "vilt", "visual_bert", "blenderbot", "blenderbot-small", "bigbird_pegasus"), _LEARNED),
    **dict.fromkeys(("aimv2_text_model", "align_text_model", "blip_text_model", "chinese_clip_text_model", "clipseg_text_model",
                     "flava_text_model", "groupvit_text_model", "metaclip_2_text_model", "owlvit_text_model", "owlv2_text_model",
                     "sam3_lite_text_text_model", "siglip_text_model", "siglip2_text_model", "xclip_text_model"), _LEARNED),
    **dict.fromkeys(("opt", "bart", "mbart", "plbart", "mvp", "biogpt", "trocr", "pp_formulanet_text", "nystromformer", "yoso", "mra"),
                    replace(_LEARNED, offset=2)),
    **dict.fromkeys(("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "data2vec-text",
                     "roberta-prelayernorm", "xmod", "ibert", "lilt", "luke", "layoutlmv3", "markuplm", "altclip_text_model",
                     "clap_text_model", "bridgetower_text_model"),
                    replace(_LEARNED, offset="pad")),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text"), Family(global_head_dim=512)),
    "embedding_gemma2_text": Family(global_head_dim=512, window="each side"),
    **dict.fromkeys(("marian", "pegasus", "ctrl"), Family(turns="none", input="sinusoidal concatenated")),
    **dict.fromkeys(("m2m_100", "nllb-moe", "speech_to_text", "xglm", "fsmt", "kosmos_2_text_model", "kosmos_2_5_text_model"),
                    Family(turns="none", input="sinusoidal concatenated", offset="pad")),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    "falcon": Family(bias="alibi if asked"),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers", "udop", "pop2piano", "blip_2_t5"), _T5),
    **dict.fromkeys(("deberta", "deberta-v2"), Family(turns="none", bias="deberta", input="learned")),
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin", "swin2sr"), Family(turns="none", bias="swin")),
    "xlnet": Family(turns="none", bias="transformer-xl"),
    **dict.fromkeys(
        ("inkling_text", "inkling2_text", "inkling2_loop_text"), Family(turns="none", bias="relative states")
    ),
}  # fmt: skip

READS_SHARE = frozenset({
    "bamba", "deepseek_v4", "diffusion_gemma_text", "dots3_note_audio_encoder", "efficientloftr", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm4v_text", "glm4v_moe_text", "glm_image_text", "glm_ocr_text", "glmasr_encoder", "gpt_neox",
    "gpt_neox_japanese", "laguna", "mellum", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "moonshine",
    "moonshine_streaming", "musicflamingo", "nemotron", "nemotron3_5_transcribe_asr_audio",
    "nemotron3_5_transcribe_word_timestamp", "nemotron3_diarization_audio", "neomme", "persimmon", "phi", "phi3",
    "phi4_multimodal", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "solar_open",
    "stablelm", "step3p5", "zaya",
})  # fmt: skip
"""Where a plain block's ``partial_rotary_factor`` counts. In the other architectures only scaled blocks read it."""

WHOLE_DEFAULTS = frozenset({
    "deepseek_v4", "diffusion_gemma_text", "gemma4_text", "gemma4_unified_text", "laguna", "lfm3", "moonshine_streaming",
    "nemotron3_5_transcribe_asr_audio", "nemotron3_5_transcribe_word_timestamp", "zaya",
})  # fmt: skip
"""Where the class's own block stands in for a missing one only: it lends its ``partial_rotary_factor`` to no other."""

READ_BY_FEW = {
    "alpha": frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"}),
    "short_mscale": frozenset({"phimoe"}),
    "long_mscale": frozenset({"phimoe"}),
}
"""Keys of a block that the other architectures ignore."""

UNLISTED = Family()
NO_ATTENTION = frozenset({"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp", "convolution", "short_conv"})
"""Kinds of layers in which nothing turns, because nothing attends."""


def family_of(model_type: str, rope_type: str | None) -> Family:
    """The habits of an architecture; an unlisted one with an axial block reads rows and columns."""
    return FAMILIES.get(model_type) or (_AXIAL if rope_type == "axial" else UNLISTED)
