"""Every line of docs/coming-from.md gives what the other library gives.

Both cells of a table row are code. The right one runs as it stands; the left one runs on stand-ins, written here in
float64 from each library's documented convention, and on the library itself where it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posenc

PAGE = (Path(__file__).parent.parent / "docs" / "coming-from.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0].strip(): part for part in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]}
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|", flags=re.MULTILINE)
ROWS = [
    pytest.param(section, *match.groups(), id=f"{section.strip('`')}-{number}")
    for section, text in SECTIONS.items()
    for number, match in enumerate(ROW.finditer(text), start=1)
]
TABLE_LINES = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| there")]
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)

BATCH, HEADS, SEQ, HEAD_DIM = 2, 4, 16, 64
POSENC = {name: getattr(posenc, name) for name in posenc.__all__}

EPS = 2.0**-24  # half an ulp of 1 in float32
# a·cos - b·sin: each cosine is rounded (≤ 2⁻²⁵), each product, the sum; relative to |a| + |b| ≤ 2·max|result|
ARITHMETIC = 2 * 3 * EPS
# Their angles: the power (its exponent's rounding times ln base ≤ 14, and its own), the reciprocal, a scale or two and
# the product round a frequency of at most 1 by 18 roundings; positions here are below 32, picture angles below 16.
FLOAT32_ANGLES = ARITHMETIC + 2 * 18 * 32 * EPS


# The conventions, from each library's documentation, in float64.


def ladder(base: float, dim: int) -> Tensor:
    return torch.tensor([base ** (-2 * pair / dim) for pair in range(dim // 2)], dtype=torch.float64)


def ntk(base: float, dim: int, factor: float) -> Tensor:
    return ladder(base * factor ** (dim / (dim - 2)), dim)


def llama3(plain: Tensor, factor: float, low: float, high: float, original: int) -> Tensor:
    scaled = []
    for frequency in plain.tolist():
        turns = original * frequency / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)  # 0: slow, divided; 1: fast, kept
        scaled.append(frequency * (share + (1 - share) / factor))
    return torch.tensor(scaled, dtype=torch.float64)


def yarn(base: float, dim: int, factor: float, original: int) -> Tensor:
    def pair(turns: float) -> float:
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dim - 1)
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2)]
    return torch.tensor([base ** (-2 * i / dim) * (1 - r + r / factor) for i, r in enumerate(ramp)], dtype=torch.float64)


def temperature(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1


def angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    return positions.double()[..., None] * inv_freq


def turned(x: Tensor, cos: Tensor, sin: Tensor, style: str, *, heads: int = -3, start: int = 0) -> Tensor:
    """x with pair after pair rotated; ``heads`` is where x has its heads, tables have none; 0 if they broadcast as they are."""
    out, pairs = x.double().clone(), cos.shape[-1]
    where = {-3: (-2,), -2: (-1,), 0: ()}[heads]  # of the head axis, once the channel axis is gone
    for pair in range(pairs):
        first, second = (start + pair, start + pair + pairs) if style == "half" else (start + 2 * pair, start + 2 * pair + 1)
        a, b = x[..., first].double(), x[..., second].double()
        c, s = cos[..., pair], sin[..., pair]
        for axis in where:
            c, s = c.unsqueeze(axis), s.unsqueeze(axis)
        out[..., first], out[..., second] = a * c - b * s, a * s + b * c
    return out


def by_angle(x: Tensor, angle: Tensor, style: str, *, gain: Tensor | float = 1.0, **place: int) -> Tensor:
    return turned(x, angle.cos() * gain, angle.sin() * gain, style, **place)


def xpos_gain(positions: Tensor, dim: int, scale_base: float) -> Tensor:
    """Of queries; keys have its reciprocal. Counted from the middle of the call."""
    scale = torch.tensor([(2 * i + 0.4 * dim) / (1.4 * dim) for i in range(dim // 2)], dtype=torch.float64)
    return scale ** ((positions.double() - len(positions) // 2) / scale_base)[:, None]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def q_and_k() -> tuple[Tensor, Tensor]:
    q, k = randn(2, BATCH, HEADS, SEQ, HEAD_DIM)
    return q, k


class Section:
    """What a section's cells refer to; `call` turns a module of the library into rotated queries and keys."""

    heads = -3

    def __init__(self) -> None:
        self.q, self.k = q_and_k()
        if self.heads == -2:
            self.q, self.k = (t.transpose(1, 2).contiguous() for t in (self.q, self.k))

    def shared(self, there: str, library: dict[str, Any]) -> dict[str, Any]:
        """Tensors and tables that both cells use."""
        return {"q": self.q, "k": self.k, "torch": torch, "pi": math.pi}

    def stand_ins(self) -> dict[str, Any]:
        raise NotImplementedError

    def library(self) -> dict[str, Any]:
        raise NotImplementedError

    def call(self, module: Any) -> Any:
        return module(self.q), module(self.k)

    def call_posenc(self, encoding: Any) -> Any:
        other = encoding.head_axis != (-2 if self.heads == -2 else -3)
        q, k = (t.transpose(1, 2) if other else t for t in (self.q, self.k))
        return encoding(q, k, 0)


# transformers


class Transformers(Section):
    base = 5e5

    def __init__(self) -> None:
        super().__init__()
        self.position_ids = torch.arange(SEQ) + torch.tensor([[3], [8]])
        self.axes_ids = torch.stack([self.position_ids, self.position_ids // 2, 15 - torch.arange(SEQ).expand(BATCH, SEQ)])
        self.patch_ids = torch.stack([torch.arange(SEQ) // 4, torch.arange(SEQ) % 4])

    def shared(self, there, library):
        family = there.partition(".")[0]
        ids = self.axes_ids if family in ("qwen2_vl", "qwen3_vl") else self.position_ids
        names = super().shared(there, library) | {
            "q_bshd": self.q.transpose(1, 2), "k_bshd": self.k.transpose(1, 2),
            "q_shd": self.q[0].transpose(0, 1), "k_shd": self.k[0].transpose(0, 1), "position_ids": ids,
        }  # fmt: skip
        if "vision" in there:
            names["position_ids"] = self.patch_ids
            names["cos"], names["sin"] = library["vision_emb"](self.q, self.patch_ids)
        elif family == "llama4":
            names["freqs_cis"] = library["rotary_embs"]["llama4"](self.q, ids)
        else:
            key = "version4" if "multimodal" in there else family
            names["cos"], names["sin"] = library["rotary_embs"][key](self.q, ids)
        return names

    def stand_ins(self):
        plain = ladder(self.base, HEAD_DIM)

        def tiled(angle: Tensor) -> tuple[Tensor, Tensor]:
            return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

        def half(q, k, cos, sin, unsqueeze_dim=1):
            table = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
            return tuple(turned(x, *table, "half", heads=-3 if unsqueeze_dim == 1 else -2) for x in (q, k))

        def interleaved(q, k, cos, sin):
            return tuple(turned(x, cos[..., ::2], sin[..., ::2], "interleaved") for x in (q, k))

        def pairs_in_halves_out(q, k, cos, sin):
            turn = (turned(x, cos[..., :32], sin[..., :32], "interleaved") for x in (q, k))
            return tuple(torch.cat([x[..., ::2], x[..., 1::2]], -1) for x in turn)

        def complex_pairs(q, k, freqs_cis):
            return tuple(turned(x, freqs_cis.real, freqs_cis.imag, "interleaved", heads=-2) for x in (q, k))

        def dealt(angle: Tensor, owner: list[int]) -> Tensor:
            return torch.stack([angle[axis, ..., pair] for pair, axis in enumerate(owner)], -1)

        chunked = [0] * 8 + [1] * 12 + [2] * 12
        taking_turns = [pair % 3 if pair < 30 else 0 for pair in range(32)]

        def version4(q, k, cos, sin, mrope_section):  # tables of all three axes, [3, batch, seq, head_dim]
            owner = [axis for axis, pairs in enumerate(mrope_section) for _ in range(pairs)]
            return tuple(turned(x, dealt(cos[..., :32], owner), dealt(sin[..., :32], owner), "half") for x in (q, k))

        def vision(q, k, cos, sin):
            return tuple(turned(x, cos[..., :32], sin[..., :32], "half", heads=-2) for x in (q, k))

        return {
            "llama": SimpleNamespace(apply_rotary_pos_emb=half),
            "gpt_neox": SimpleNamespace(apply_rotary_pos_emb=half),
            "cohere": SimpleNamespace(apply_rotary_pos_emb=interleaved),
            "deepseek_v3": SimpleNamespace(apply_rotary_pos_emb_interleave=pairs_in_halves_out),
            "llama4": SimpleNamespace(apply_rotary_emb=complex_pairs),
            "qwen2_vl": SimpleNamespace(
                apply_rotary_pos_emb=half, apply_multimodal_rotary_pos_emb=version4, apply_rotary_pos_emb_vision=vision
            ),
            "qwen3_vl": SimpleNamespace(apply_rotary_pos_emb=half),
            "rotary_embs": {
                "llama": lambda x, ids: tiled(angles(ids, plain)),
                "deepseek_v3": lambda x, ids: tiled(angles(ids, plain)),
                "gpt_neox": lambda x, ids: tiled(angles(ids, ladder(self.base, 16))),
                "cohere": lambda x, ids: tuple(f(angles(ids, plain)).repeat_interleave(2, -1) for f in (torch.cos, torch.sin)),
                "llama4": lambda x, ids: torch.complex(angles(ids, plain).cos(), angles(ids, plain).sin()),
                "qwen2_vl": lambda x, ids: tiled(dealt(angles(ids, plain), chunked)),
                "qwen3_vl": lambda x, ids: tiled(dealt(angles(ids, plain), taking_turns)),
                "version4": lambda x, ids: tiled(angles(ids, plain)),
            },
            "vision_emb": lambda x, ids: tiled(torch.cat(tuple(angles(ids, ladder(1e4, 32))), -1)),
        }

    def library(self):
        pytest.importorskip("transformers")
        families = {
            "llama": ("LlamaConfig", "LlamaRotaryEmbedding", {}),
            "gpt_neox": ("GPTNeoXConfig", "GPTNeoXRotaryEmbedding", {"partial_rotary_factor": 0.25}),
            "cohere": ("CohereConfig", "CohereRotaryEmbedding", {}),
            "deepseek_v3": ("DeepseekV3Config", "DeepseekV3RotaryEmbedding", {}),
            "llama4": ("Llama4TextConfig", "Llama4TextRotaryEmbedding", {}),
            "qwen2_vl": ("Qwen2VLTextConfig", "Qwen2VLRotaryEmbedding", {"mrope_section": [8, 12, 12]}),
            "qwen3_vl": ("Qwen3VLTextConfig", "Qwen3VLTextRotaryEmbedding", {"mrope_section": [12, 10, 10]}),
        }
        names: dict[str, Any] = {"rotary_embs": {}}
        for family, (config_name, module_name, more) in families.items():
            modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
            config = getattr(configuration, config_name)(
                hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, head_dim=HEAD_DIM, qk_rope_head_dim=HEAD_DIM,
                rope_parameters={"rope_type": "default", "rope_theta": self.base, **more},
            )  # fmt: skip
            names[family], names["rotary_embs"][family] = modeling, getattr(modeling, module_name)(config)
        if not hasattr(names["qwen2_vl"], "apply_multimodal_rotary_pos_emb"):
            names["rotary_embs"]["version4"] = lambda x, ids: pytest.skip("a function of version 4")
        vision = names["qwen2_vl"].Qwen2VLVisionConfig(embed_dim=HEADS * HEAD_DIM, num_heads=HEADS)
        emb = names["qwen2_vl"].Qwen2VLVisionRotaryEmbedding(vision)
        names["vision_emb"] = lambda x, ids: emb(x, ids.T)
        return names


class RopeParameters(Section):
    """The left cells are configurations, the right ones schedules: both become frequencies and an amplitude."""

    def shared(self, there, library):
        short, long = ([1.0 + pair / slope for pair in range(32)] for slope in (32, 4))
        return {"short": short, "long": long, "read": library["read"]}

    def stand_ins(self):
        def read(rule: dict[str, Any]) -> tuple[Tensor, float]:
            plain, factor = ladder(1e4, 64), rule.get("factor", 1.0)
            original = rule.get("original_max_position_embeddings", 2048)
            if rule["rope_type"] == "dynamic":
                return ntk(1e4, 64, rule.get("alpha", factor * 6000 / original - (factor - 1))), 1.0
            if rule["rope_type"] == "yarn":
                gain = temperature(factor)
                if "mscale" in rule:
                    gain = temperature(factor, rule["mscale"]) / temperature(factor, rule["mscale_all_dim"])
                return yarn(1e4, 64, factor, original), gain
            if rule["rope_type"] == "llama3":
                return llama3(plain, factor, rule["low_freq_factor"], rule["high_freq_factor"], original), 1.0
            if rule["rope_type"] == "longrope":
                gain = math.sqrt(1 + math.log(factor) / math.log(original))
                return plain / torch.tensor(rule["long_factor"], dtype=torch.float64), gain
            if rule["rope_type"] == "proportional":
                return torch.where(torch.arange(32) < 8, plain, 0.0), 1.0
            assert rule["rope_type"] in ("default", "linear")
            return plain / factor, 1.0

        return {"read": read}

    def library(self):
        transformers = pytest.importorskip("transformers")
        functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
        hunyuan = pytest.importorskip("transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense")

        def read(rule: dict[str, Any]) -> tuple[Tensor, float]:
            sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 2048}
            if rule["rope_type"] == "longrope":
                sizes["max_position_embeddings"] = 4 * 2048
            rule = {"rope_theta": 1e4, **rule}
            if "alpha" in rule:
                module = hunyuan.HunYuanDenseV1RotaryEmbedding(
                    transformers.HunYuanDenseV1Config(**sizes, rope_parameters=rule | {"factor": 1.0})
                )
                return module.inv_freq, module.attention_scaling
            config = transformers.LlamaConfig(**sizes, rope_parameters=rule)
            if rule["rope_type"] == "default":
                module = importlib.import_module("transformers.models.llama.modeling_llama").LlamaRotaryEmbedding(config)
                return module.inv_freq, module.attention_scaling
            length = 6000 if rule["rope_type"] in ("dynamic", "longrope") else None
            return functions[rule["rope_type"]](config, torch.device("cpu"), seq_len=length)

        return {"read": read}


# rotary-embedding-torch


class StandInLucid:
    """dim turning channels, neighbours in pairs, at 0, 1, … / interpolate_factor."""

    def __init__(
        self, dim, custom_freqs=None, freqs_for="lang", theta=1e4, max_freq=10, num_freqs=1, learned_freq=False,
        use_xpos=False, xpos_scale_base=512, interpolate_factor=1.0, theta_rescale_factor=1.0, seq_before_head_dim=False,
    ):  # fmt: skip
        steps = [math.pi * (1 + (max_freq / 2 - 1) * i / (dim // 2 - 1)) for i in range(dim // 2)]
        by_kind = {
            "lang": ntk(theta, dim, theta_rescale_factor),
            "pixel": torch.tensor(steps, dtype=torch.float64),
            "constant": torch.ones(num_freqs, dtype=torch.float64),
        }
        self.freqs = by_kind[freqs_for] if custom_freqs is None else custom_freqs.double()
        self.freqs_for, self.dim, self.factor = freqs_for, dim, interpolate_factor
        self.use_xpos, self.scale_base, self.seq_before_head_dim = use_xpos, xpos_scale_base, seq_before_head_dim

    def __call__(self, positions):
        return angles(positions, self.freqs).repeat_interleave(2, -1)

    def rotate_queries_or_keys(self, t, offset=0):
        heads = -2 if self.seq_before_head_dim else -3
        at = (torch.arange(t.shape[-3 if self.seq_before_head_dim else -2]) + offset).double() / self.factor
        return by_angle(t, angles(at, self.freqs), "interleaved", heads=heads)

    def rotate_queries_and_keys(self, q, k):
        at = torch.arange(q.shape[-2])
        gain = xpos_gain(at, self.dim, self.scale_base)
        return tuple(by_angle(x, angles(at, self.freqs), "interleaved", gain=g) for x, g in ((q, gain), (k, 1 / gain)))

    def rotate_queries_with_cached_keys(self, q, k):
        return self.rotate_queries_or_keys(q, offset=k.shape[-2] - q.shape[-2]), self.rotate_queries_or_keys(k)

    def get_axial_freqs(self, *sizes):
        tables = []
        for axis, size in enumerate(sizes):
            steps = [2 * i / (size - 1) - 1 for i in range(size)] if self.freqs_for == "pixel" else list(range(size))
            shape = [size if other == axis else 1 for other in range(len(sizes))]
            tables.append(self(torch.tensor(steps, dtype=torch.float64)).reshape(*shape, self.dim).expand(*sizes, self.dim))
        return torch.cat(tables, -1)


class RotaryEmbeddingTorch(Section):
    def shared(self, there, library):
        freqs = torch.tensor([1 / (1 + pair) for pair in range(16)])
        if "learned" in there:
            freqs = nn.Parameter(ladder(1e4, 32).float())
        return super().shared(there, library) | {
            "freqs": freqs,
            "rotations": 3 * randn(SEQ, 32),
            "rotary": library["RotaryEmbedding"](dim=32),
            "pixel": library["RotaryEmbedding"](dim=32, freqs_for="pixel", max_freq=10),
            "q_grid": self.q.unflatten(2, (4, 4)),
        }

    def stand_ins(self):
        def apply_rotary_emb(freqs, t, start_index=0):
            table = freqs[..., ::2].double()
            return turned(t, table.cos(), table.sin(), "interleaved", heads=-3 if freqs.ndim == 2 else 0, start=start_index)

        def apply_learned_rotations(rotations, t):
            return by_angle(t, rotations.double(), "interleaved")

        return {
            "RotaryEmbedding": StandInLucid,
            "apply_rotary_emb": apply_rotary_emb,
            "apply_learned_rotations": apply_learned_rotations,
        }

    def library(self):
        return vars(imported("rotary_embedding_torch.rotary_embedding_torch"))

    def call(self, module):
        q, k = self.q, self.k
        if module.seq_before_head_dim:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if module.use_xpos:
            return module.rotate_queries_and_keys(q, k)
        return module.rotate_queries_or_keys(q), module.rotate_queries_or_keys(k)


# x-transformers


class StandInX:
    """Angles of [1, seq, dim], each twice, and the magnitude of queries."""

    def __init__(self, dim, use_xpos=False, scale_base=512, interpolation_factor=1.0, base=10000, base_rescale_factor=1.0):
        self.freqs, self.factor = ntk(base, dim, base_rescale_factor), interpolation_factor
        self.dim, self.scale_base = dim, scale_base if use_xpos else None

    def __call__(self, positions):
        scale = 1.0
        if self.scale_base is not None:
            scale = xpos_gain(positions, self.dim, self.scale_base).repeat_interleave(2, -1)[None]
        return angles(positions / self.factor, self.freqs).repeat_interleave(2, -1)[None], scale


class XTransformers(Section):
    def shared(self, there, library):
        freqs, _ = library["RotaryEmbedding"](HEAD_DIM)(torch.arange(SEQ))
        return super().shared(there, library) | {"freqs": freqs}

    def stand_ins(self):
        def apply_rotary_pos_emb(t, freqs, scale=1.0):
            table = freqs[0, -t.shape[-2] :, ::2]
            gain = scale[0, :, ::2] if isinstance(scale, Tensor) else scale
            return by_angle(t, table, "interleaved", gain=gain)

        def encoder(dim, depth, heads, rotary_pos_emb, dim_head=64):
            return SimpleNamespace(rotary_pos_emb=StandInX(dim_head // 2))

        return {"RotaryEmbedding": StandInX, "apply_rotary_pos_emb": apply_rotary_pos_emb, "Encoder": encoder}

    def library(self):
        return vars(imported("x_transformers.x_transformers"))

    def call(self, module):
        freqs, scale = module(torch.arange(SEQ))
        apply = self.stand_ins() if isinstance(module, StandInX) else self.library()
        return tuple(apply["apply_rotary_pos_emb"](x, freqs, s) for x, s in ((self.q, scale), (self.k, scale**-1)))


# flash-attention


class FlashAttention(Section):
    heads = -2

    def shared(self, there, library):
        at, inv_freq = torch.arange(32), ladder(1e4, 32)
        return super().shared(there, library) | {
            "x": self.q.clone(),
            "cos": angles(at, inv_freq).cos().float(),
            "sin": angles(at, inv_freq).sin().float(),
            "offsets": torch.tensor([2, 9]),
            "cu_seqlens": torch.tensor([0, 5, 14, 16], dtype=torch.int32),
            "x_packed": self.q[0],
            "qkv": torch.stack([self.q, self.k, self.q], 2),
            "rotary": library["RotaryEmbedding"](32),
        }

    def stand_ins(self):
        def apply_rotary(x, cos, sin, interleaved=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, conjugate=False,
                         inplace=False):  # fmt: skip
            style = "interleaved" if interleaved else "half"
            at = torch.arange(x.shape[-3])
            if cu_seqlens is not None:
                at = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])
            at = at + (seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets)
            return turned(x, cos[at].double(), (-1 if conjugate else 1) * sin[at].double(), style, heads=-2)

        class RotaryEmbedding:
            def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None):
                self.dim, self.freqs, self.scale_base = dim, ladder(base, dim), scale_base
                self.style = "interleaved" if interleaved else "half"

            def __call__(self, qkv, seqlen_offset=0):
                at = torch.arange(qkv.shape[1]) + seqlen_offset
                gain = 1.0 if self.scale_base is None else xpos_gain(at, self.dim, self.scale_base)
                angle = angles(at, self.freqs)
                q = by_angle(qkv[:, :, 0], angle, self.style, gain=gain, heads=-2)
                k = by_angle(qkv[:, :, 1], angle, self.style, gain=1 / gain, heads=-2)
                return torch.stack([q, k, qkv[:, :, 2].double()], 2)

        return {"apply_rotary": apply_rotary, "apply_rotary_emb": apply_rotary, "RotaryEmbedding": RotaryEmbedding}

    def call(self, module):
        return module(torch.stack([self.q, self.k, self.q], 2))[:, :, :2].unbind(2)


# torchtune


class Torchtune(Section):
    heads = -2

    def shared(self, there, library):
        return super().shared(there, library) | {
            "input_pos": torch.arange(SEQ) + torch.tensor([[3], [8]]),
            "rotary": library["RotaryPositionalEmbeddings"](dim=HEAD_DIM),
            "x_tiles": randn(BATCH, 20, HEADS, HEAD_DIM),
        }

    def stand_ins(self):
        def rotation(inv_freq: Tensor, style: str):
            def call(x, input_pos=None):
                at = torch.arange(x.shape[1]) if input_pos is None else input_pos
                return by_angle(x, angles(at, inv_freq), style, heads=-2)

            return call

        def scaled(dim, base=10_000, scale_factor=8, low_freq_factor=1, high_freq_factor=4, old_context_len=8192):
            inv_freq = llama3(ladder(base, dim), scale_factor, low_freq_factor, high_freq_factor, old_context_len)
            return rotation(inv_freq, "interleaved")

        def picture(patch_size, tile_size, max_num_tiles, dim):
            side = tile_size // patch_size
            places = [(i % side + 1, i // side + 1) for i in range(side**2)] + [(0, 0)]  # x, y; the class token stands still
            at = torch.tensor(places * max_num_tiles)
            angle = torch.cat([angles(at[:, axis], ladder(1e4, dim)) for axis in (0, 1)], -1)
            return lambda x: by_angle(x, angle, "interleaved", heads=-2)

        return {
            "RotaryPositionalEmbeddings": lambda dim, max_seq_len=4096, base=1e4: rotation(ladder(base, dim), "interleaved"),
            "Llama3ScaledRoPE": scaled,
            "Qwen2RotaryPositionalEmbeddings": lambda dim, base=1e6: rotation(ladder(base, dim), "half"),
            "VisionRotaryPositionalEmbeddings": picture,
        }

    def library(self):
        names: dict[str, Any] = {}
        for file in (
            "modules/position_embeddings.py",
            "models/llama3_1/_position_embeddings.py",
            "models/qwen2/_positional_embeddings.py",
        ):
            names |= vars(single_file("torchtune", file))
        return names


# Meta's Llama code


class Meta(Section):
    heads = -2

    def shared(self, there, library):
        return super().shared(there, library) | {
            "xq": self.q, "xk": self.k, "freqs_cis": library["precompute_freqs_cis"](64, 32, 5e5).to(torch.complex64),
            "start_pos": 5, "freqs": ladder(5e5, 64),
        }  # fmt: skip

    def stand_ins(self):
        def precompute_freqs_cis(dim, end, theta=10000.0):
            return torch.polar(torch.ones(end, dim // 2, dtype=torch.float64), angles(torch.arange(end), ladder(theta, dim)))

        def apply_rotary_emb(xq, xk, freqs_cis):
            return tuple(turned(x, freqs_cis.real.double(), freqs_cis.imag.double(), "interleaved", heads=-2) for x in (xq, xk))

        return {
            "precompute_freqs_cis": precompute_freqs_cis,
            "apply_rotary_emb": apply_rotary_emb,
            "apply_scaling": lambda freqs: llama3(freqs, 8, 1, 4, 8192),
        }


# vLLM


class VLLM(Section):
    """Twelve tokens of two requests in one row, heads side by side in the channels."""

    heads = -2

    def __init__(self) -> None:
        self.positions = torch.tensor([0, 1, 2, 3, 4, 9, 10, 11, 12, 13, 14, 15])
        self.query, self.key = randn(12, HEADS * HEAD_DIM), randn(12, 2 * HEAD_DIM)

    def shared(self, there, library):
        axes = torch.stack([self.positions, self.positions // 2, self.positions % 5])
        return {
            "positions": self.positions, "positions_3": axes, "query": self.query, "key": self.key,
            "rotary_emb": library["get_rope"](64, max_position=4096),
        }  # fmt: skip

    def stand_ins(self):
        def get_rope(head_size, max_position, is_neox_style=True, rope_parameters=None):
            rule = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **(rope_parameters or {})}
            dim, base, factor = int(head_size * rule["partial_rotary_factor"]), rule["rope_theta"], rule.get("factor", 1.0)
            inv_freq, gain, kind = ladder(base, dim), 1.0, rule["rope_type"]
            if kind == "linear":
                inv_freq = inv_freq / factor
            elif kind == "ntk":
                inv_freq = ladder(base * factor, dim) / factor ** (2 / dim)
            elif kind == "dynamic":
                # without alpha the length is max_position · factor
                inv_freq = ntk(base, dim, rule.get("alpha", factor * factor - (factor - 1)))
            elif kind == "yarn":
                inv_freq, gain = yarn(base, dim, factor, rule["original_max_position_embeddings"]), temperature(factor)
            elif kind == "llama3":
                ends = rule["low_freq_factor"], rule["high_freq_factor"], rule["original_max_position_embeddings"]
                inv_freq = llama3(inv_freq, factor, *ends)

            def rotary_emb(positions, query, key):
                angle = angles(positions, inv_freq)
                if "mrope_section" in rule:
                    owner = [axis for axis, pairs in enumerate(rule["mrope_section"]) for _ in range(pairs)]
                    angle = torch.stack([angle[axis, :, pair] for pair, axis in enumerate(owner)], -1)
                style = "half" if is_neox_style else "interleaved"
                split = (x.unflatten(-1, (-1, head_size)) for x in (query, key))
                return tuple(by_angle(x, angle, style, gain=gain, heads=-2).flatten(-2) for x in split)

            return rotary_emb

        return {"get_rope": get_rope}

    def call(self, module):
        return module(self.positions, self.query, self.key)

    def call_posenc(self, encoding):
        return encoding(self.query.unflatten(-1, (-1, 64)), self.key.unflatten(-1, (-1, 64)), self.positions)


TESTED = {
    "transformers": Transformers,
    "`rope_parameters`": RopeParameters,
    "rotary-embedding-torch": RotaryEmbeddingTorch,
    "x-transformers": XTransformers,
    "flash-attention": FlashAttention,
    "torchtune": Torchtune,
    "Meta's Llama code": Meta,
    "vLLM": VLLM,
}

NO_PACKAGE = {"flash-attention", "Meta's Llama code", "vLLM"}
"""Those that need CUDA to be imported, and code that is no package: for them the convention has to do."""


def imported(name: str) -> ModuleType:
    """A library that may warn while it is imported, which is not ours to answer for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def single_file(package: str, file: str) -> ModuleType:
    """One file of a package, without importing all that the package needs."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    spec = importlib.util.spec_from_file_location(f"{package}_{Path(file).stem}", Path(found.origin).parent / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome(section: Section, value: Any, shared: dict[str, Any]) -> list[Tensor]:
    """A cell's value as tensors: results as they are, modules called, schedules as frequencies and amplitude."""
    if isinstance(value, dict):
        value = shared["read"](value)
    elif hasattr(value, "frequencies"):
        value = tuple(value.frequencies(64 if not isinstance(value, posenc.Explicit) else 2 * len(value.inv_freq)))
        value = value if isinstance(section, RopeParameters) else value[:1]
    elif isinstance(value, posenc.QKEncoding):
        value = section.call_posenc(value)
    elif not isinstance(value, (Tensor, tuple, list)):
        value = section.call(value)
    parts = [value] if isinstance(value, Tensor) else list(value)
    parts = [part if isinstance(part, Tensor) else torch.tensor(part, dtype=torch.float64) for part in parts]
    return [torch.view_as_real(part) if part.is_complex() else part for part in parts]


def both(name: str, there: str, here: str, *, real: bool) -> tuple[list[Tensor], list[Tensor]]:
    section = TESTED[name]()
    library = section.library() if real else section.stand_ins()
    shared = section.shared(there, library)
    theirs = outcome(section, eval(there, {**library, **shared}), shared)
    ours = outcome(section, eval(here, {**POSENC, **shared, "torch": torch, "pi": math.pi}), shared)
    if "_interleave(" in there:  # channels in another order, for q and k alike
        ours = [torch.cat([x[..., ::2], x[..., 1::2]], -1) for x in ours]
    assert len(ours) == len(theirs)
    return [mine.reshape(other.shape) for mine, other in zip(ours, theirs, strict=True)], theirs


def worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, in units of the largest entry."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a.double() - b.double()).abs().max() / b.double().abs().max()).item() for a, b in pairs)


def test_every_row_of_every_table_is_tested():
    assert len(ROWS) == len(TABLE_LINES) >= 50
    assert {row.values[0] for row in ROWS} == set(TESTED)


@pytest.mark.parametrize(("section", "there", "here"), ROWS)
def test_line_follows_the_convention(section, there, here):
    ours, theirs = both(section, there, here, real=False)
    assert worst(ours, theirs) <= ARITHMETIC


@pytest.mark.parametrize(("section", "there", "here"), [row for row in ROWS if row.values[0] not in NO_PACKAGE])
def test_line_equals_the_library(section, there, here):
    ours, theirs = both(section, there, here, real=True)
    assert worst(ours, theirs) <= FLOAT32_ANGLES


@pytest.mark.parametrize(("section", "there", "here"), [row for row in ROWS if 'pairing="interleaved"' in row.values[2]])
def test_the_other_pairing_is_far_off(section, there, here):
    ours, theirs = both(section, there, here.replace('pairing="interleaved"', 'pairing="half"'), real=False)
    assert worst(ours, theirs) > 0.1


@pytest.mark.parametrize(("section", "there", "here"), [row for row in ROWS if row.values[0] == "`rope_parameters`"])
def test_schedules_equal_transformers_bit_for_bit(section, there, here):
    parameters = RopeParameters()
    shared = parameters.shared(there, parameters.library())
    expected, amplitude = shared["read"](eval(there, dict(shared)))
    frequencies = eval(here, {**POSENC, **shared}).frequencies(64, dtype=torch.float32)
    assert torch.equal(frequencies.inv_freq, expected)
    assert frequencies.amplitude == amplitude


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block, capsys):
    if "transformers" in block:
        pytest.importorskip("transformers")
    exec(block, {})


def test_learned_frequencies_get_a_gradient():
    (here,) = (row.values[2] for row in ROWS if "learned_freq" in row.values[1])
    q, k = q_and_k()
    freqs = nn.Parameter(ladder(1e4, 32))
    out, _ = eval(here, {**POSENC, "torch": torch, "q": q.double(), "k": k.double(), "freqs": freqs})
    weight = randn(*out.shape).double()
    (out * weight).sum().backward()

    def loss(frequencies: Tensor) -> float:
        return (by_angle(q, angles(torch.arange(SEQ), frequencies), "interleaved") * weight).sum().item()

    step = torch.zeros_like(freqs).index_fill_(0, torch.tensor([3]), 1e-5)
    slope = (loss(freqs.detach() + step) - loss(freqs.detach() - step)) / 2e-5
    assert freqs.grad is not None
    # the table is float32, which rounds every term of the gradient; they are BATCH · HEADS · SEQ · 2 with angles' weight ≤ SEQ
    assert abs(freqs.grad[3].item() - slope) <= 2 * BATCH * HEADS * SEQ * SEQ * 16 * EPS


def test_what_the_page_says_of_precision():
    position = torch.arange(130_000, 130_064)
    exact = angles(position, ladder(5e5, 128))
    single = position.float()[:, None] * (1 / 5e5 ** (torch.arange(0, 128, 2).float() / 128))
    assert 1e-3 < (single.double() - exact).abs().max() < 2e-2
    table = posenc.rotary_table(position, posenc.Geometric(5e5).frequencies(128))
    assert (table.cos.double() - exact.cos()).abs().max() < 2.0**-24

    x = randn(1, 1, 64, 128).bfloat16()
    rounded = posenc.RoPE(128, posenc.Geometric(5e5))(x, x, 130_000)[0]
    wide = posenc.RoPE(128, posenc.Geometric(5e5))(x.float(), x.float(), 130_000)[0]
    assert torch.equal(rounded, wide.bfloat16())


def test_nothing_is_stored():
    assert not posenc.RoPE(64).state_dict()
    assert not list(posenc.RoPE(64).buffers())


@pytest.mark.parametrize(("section", "keys"), [(XTransformers, {"inv_freq", "scale"}), (RotaryEmbeddingTorch, {"freqs"})])
def test_keys_to_drop_are_all_that_their_checkpoints_have(section, keys):
    assert set(section().library()["RotaryEmbedding"](32, use_xpos=True).state_dict()) == keys


def test_positions_collide_in_rotary_embedding_torch():
    rotary = RotaryEmbeddingTorch().library()["RotaryEmbedding"](dim=32)
    q = torch.ones(1, 1, 300, 64, dtype=torch.bfloat16)
    theirs = rotary.rotate_queries_or_keys(q)
    assert torch.equal(theirs[..., 257, :], theirs[..., 256, :])
    ours, _ = posenc.RoPE(64, rotary_dim=32, pairing="interleaved")(q, q, 0)
    assert not torch.equal(ours[..., 257, :], ours[..., 256, :])


def test_links_on_the_page_lead_somewhere():
    anchors = {re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in SECTIONS}
    targets = re.findall(r"\]\(#([^)]+)\)", PAGE)
    assert targets
    assert set(targets) <= anchors
