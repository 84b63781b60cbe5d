"""posenc: the position toolkit for Transformers in PyTorch.

Names are imported when first used, so that ``import posenc`` costs nothing beyond what is touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "posenc.errors": ["BackendRefused", "ConfigError", "ShapeError"],
    "posenc.core.tokens": [
        "Tokens", "contiguous", "decode", "follow", "grid", "packed", "padded", "seconds", "shard",
    ],
    "posenc.core.multimodal": ["multimodal", "next_positions", "on_axes", "patch_centres"],
    "posenc.core.mask": ["CAUSAL", "FULL", "Mask", "causal", "same_segment", "visible", "window"],
    "posenc.core.distance": ["pairwise_distance", "t5_bucket"],
    "posenc.core.apply": ["apply_rotary", "apply_rotary_", "apply_rotary_pair"],
    "posenc.core.rotary": [
        "Frequencies", "Pairing", "RotaryTable", "Schedule", "inverse", "rotary_table", "rotary_table_nd", "transpose",
    ],
    "posenc.core.rerotate": ["rerotate", "rerotation_error"],
    "posenc.core.sinusoid": ["sinusoid"],
    "posenc.core.temperature": ["LogN", "LogRatio", "LogTemperature", "Temperature"],
    "posenc.core.bias": [
        "DenseBias", "FormulaBias", "KeyBias", "KeyTableBias", "QueryTableBias", "ScoreBias", "SlopeBias", "SumBias",
        "TableBias", "materialize", "score_mod", "slice_heads",
    ],
    "posenc.core.sites": [
        "ContentScoreEncoding", "Encoding", "InputEncoding", "PositionTransform", "QKEncoding", "RotaryEncoding",
        "ScoreEncoding",
    ],
    "posenc.core.value_table": ["ValueTable"],
    "posenc.core.spec": ["EncodingSpec", "ModelShape", "Reference"],
    "posenc.schedules.base": ["AtLength", "LengthRule"],
    "posenc.schedules.geometric": ["Geometric"],
    "posenc.schedules.explicit": ["Explicit"],
    "posenc.schedules.hertz": ["Hertz"],
    "posenc.schedules.linear": ["Linear"],
    "posenc.schedules.ntk": ["NTK"],
    "posenc.schedules.dynamic_ntk": ["DynamicNTK"],
    "posenc.schedules.yarn": ["YaRN"],
    "posenc.schedules.llama3": ["Llama3"],
    "posenc.schedules.longrope": ["LongRoPE"],
    "posenc.schedules.proportional": ["Proportional"],
    "posenc.encodings.nope": ["NoPE"],
    "posenc.encodings.sinusoidal": ["Sinusoidal"],
    "posenc.encodings.learned": ["Learned"],
    "posenc.encodings.hybrid": ["Hybrid"],
    "posenc.encodings.grid_sinusoidal": ["GridSinusoidal"],
    "posenc.encodings.learned_grid": ["LearnedGrid"],
    "posenc.encodings.time2vec": ["Time2Vec"],
    "posenc.encodings.fourier": ["FourierFeatures"],
    "posenc.encodings.rope": ["RoPE"],
    "posenc.encodings.axial": ["AxialRoPE"],
    "posenc.encodings.mrope": ["MRoPE", "axis_of_pair"],
    "posenc.encodings.mixed": ["MixedRoPE"],
    "posenc.encodings.xpos": ["XPos"],
    "posenc.encodings.pope": ["PoPE"],
    "posenc.encodings.alibi": ["ALiBi", "alibi_slopes"],
    "posenc.encodings.t5": ["T5Bias"],
    "posenc.encodings.learned_alibi": ["LearnedALiBi"],
    "posenc.encodings.kerple": ["KERPLE"],
    "posenc.encodings.fire": ["FIRE"],
    "posenc.encodings.sandwich": ["Sandwich"],
    "posenc.encodings.swin": ["SwinBias"],
    "posenc.encodings.swin_v2": ["SwinV2Bias"],
    "posenc.encodings.shaw": ["ShawRelative"],
    "posenc.encodings.transformer_xl": ["TransformerXL"],
    "posenc.encodings.deberta": ["DeBERTa"],
    "posenc.encodings.inkling": ["ContentProfile"],
    "posenc.encodings.cope": ["CoPE"],
    "posenc.encodings.fox": ["FoX"],
    "posenc.encodings.temperature": ["LogitTemperature"],
    "posenc.encodings.augmented": ["Augmented"],
    "posenc.encodings.randomized": ["Randomized"],
    "posenc.attn.attention": ["attention"],
    "posenc.attn.positional": ["positional_attention"],
    "posenc.attn.prepared": ["Prepared", "prepare"],
    "posenc.attn.cache": ["GrowingCache", "StaticCache"],
    "posenc.attn.explain": ["explain"],
    "posenc.transformer": ["Transformer"],
    "posenc.catalog": ["CATALOG", "load_encoding"],
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'posenc' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from posenc.attn.attention import attention as attention
    from posenc.attn.cache import GrowingCache as GrowingCache
    from posenc.attn.cache import StaticCache as StaticCache
    from posenc.attn.explain import explain as explain
    from posenc.attn.positional import positional_attention as positional_attention
    from posenc.attn.prepared import Prepared as Prepared
    from posenc.attn.prepared import prepare as prepare
    from posenc.catalog import CATALOG as CATALOG
    from posenc.catalog import load_encoding as load_encoding
    from posenc.core.apply import apply_rotary as apply_rotary
    from posenc.core.apply import apply_rotary_ as apply_rotary_
    from posenc.core.apply import apply_rotary_pair as apply_rotary_pair
    from posenc.core.bias import DenseBias as DenseBias
    from posenc.core.bias import FormulaBias as FormulaBias
    from posenc.core.bias import KeyBias as KeyBias
    from posenc.core.bias import KeyTableBias as KeyTableBias
    from posenc.core.bias import QueryTableBias as QueryTableBias
    from posenc.core.bias import ScoreBias as ScoreBias
    from posenc.core.bias import SlopeBias as SlopeBias
    from posenc.core.bias import SumBias as SumBias
    from posenc.core.bias import TableBias as TableBias
    from posenc.core.bias import materialize as materialize
    from posenc.core.bias import score_mod as score_mod
    from posenc.core.bias import slice_heads as slice_heads
    from posenc.core.distance import pairwise_distance as pairwise_distance
    from posenc.core.distance import t5_bucket as t5_bucket
    from posenc.core.mask import CAUSAL as CAUSAL
    from posenc.core.mask import FULL as FULL
    from posenc.core.mask import Mask as Mask
    from posenc.core.mask import causal as causal
    from posenc.core.mask import same_segment as same_segment
    from posenc.core.mask import visible as visible
    from posenc.core.mask import window as window
    from posenc.core.multimodal import multimodal as multimodal
    from posenc.core.multimodal import next_positions as next_positions
    from posenc.core.multimodal import on_axes as on_axes
    from posenc.core.multimodal import patch_centres as patch_centres
    from posenc.core.rerotate import rerotate as rerotate
    from posenc.core.rerotate import rerotation_error as rerotation_error
    from posenc.core.rotary import Frequencies as Frequencies
    from posenc.core.rotary import Pairing as Pairing
    from posenc.core.rotary import RotaryTable as RotaryTable
    from posenc.core.rotary import Schedule as Schedule
    from posenc.core.rotary import inverse as inverse
    from posenc.core.rotary import rotary_table as rotary_table
    from posenc.core.rotary import rotary_table_nd as rotary_table_nd
    from posenc.core.rotary import transpose as transpose
    from posenc.core.sinusoid import sinusoid as sinusoid
    from posenc.core.sites import ContentScoreEncoding as ContentScoreEncoding
    from posenc.core.sites import Encoding as Encoding
    from posenc.core.sites import InputEncoding as InputEncoding
    from posenc.core.sites import PositionTransform as PositionTransform
    from posenc.core.sites import QKEncoding as QKEncoding
    from posenc.core.sites import RotaryEncoding as RotaryEncoding
    from posenc.core.sites import ScoreEncoding as ScoreEncoding
    from posenc.core.spec import EncodingSpec as EncodingSpec
    from posenc.core.spec import ModelShape as ModelShape
    from posenc.core.spec import Reference as Reference
    from posenc.core.temperature import LogN as LogN
    from posenc.core.temperature import LogRatio as LogRatio
    from posenc.core.temperature import LogTemperature as LogTemperature
    from posenc.core.temperature import Temperature as Temperature
    from posenc.core.tokens import Tokens as Tokens
    from posenc.core.tokens import contiguous as contiguous
    from posenc.core.tokens import decode as decode
    from posenc.core.tokens import follow as follow
    from posenc.core.tokens import grid as grid
    from posenc.core.tokens import packed as packed
    from posenc.core.tokens import padded as padded
    from posenc.core.tokens import seconds as seconds
    from posenc.core.tokens import shard as shard
    from posenc.core.value_table import ValueTable as ValueTable
    from posenc.encodings.alibi import ALiBi as ALiBi
    from posenc.encodings.alibi import alibi_slopes as alibi_slopes
    from posenc.encodings.augmented import Augmented as Augmented
    from posenc.encodings.axial import AxialRoPE as AxialRoPE
    from posenc.encodings.cope import CoPE as CoPE
    from posenc.encodings.deberta import DeBERTa as DeBERTa
    from posenc.encodings.fire import FIRE as FIRE
    from posenc.encodings.fourier import FourierFeatures as FourierFeatures
    from posenc.encodings.fox import FoX as FoX
    from posenc.encodings.grid_sinusoidal import GridSinusoidal as GridSinusoidal
    from posenc.encodings.hybrid import Hybrid as Hybrid
    from posenc.encodings.inkling import ContentProfile as ContentProfile
    from posenc.encodings.kerple import KERPLE as KERPLE
    from posenc.encodings.learned import Learned as Learned
    from posenc.encodings.learned_alibi import LearnedALiBi as LearnedALiBi
    from posenc.encodings.learned_grid import LearnedGrid as LearnedGrid
    from posenc.encodings.mixed import MixedRoPE as MixedRoPE
    from posenc.encodings.mrope import MRoPE as MRoPE
    from posenc.encodings.mrope import axis_of_pair as axis_of_pair
    from posenc.encodings.nope import NoPE as NoPE
    from posenc.encodings.pope import PoPE as PoPE
    from posenc.encodings.randomized import Randomized as Randomized
    from posenc.encodings.rope import RoPE as RoPE
    from posenc.encodings.sandwich import Sandwich as Sandwich
    from posenc.encodings.shaw import ShawRelative as ShawRelative
    from posenc.encodings.sinusoidal import Sinusoidal as Sinusoidal
    from posenc.encodings.swin import SwinBias as SwinBias
    from posenc.encodings.swin_v2 import SwinV2Bias as SwinV2Bias
    from posenc.encodings.t5 import T5Bias as T5Bias
    from posenc.encodings.temperature import LogitTemperature as LogitTemperature
    from posenc.encodings.time2vec import Time2Vec as Time2Vec
    from posenc.encodings.transformer_xl import TransformerXL as TransformerXL
    from posenc.encodings.xpos import XPos as XPos
    from posenc.errors import BackendRefused as BackendRefused
    from posenc.errors import ConfigError as ConfigError
    from posenc.errors import ShapeError as ShapeError
    from posenc.schedules.base import AtLength as AtLength
    from posenc.schedules.base import LengthRule as LengthRule
    from posenc.schedules.dynamic_ntk import DynamicNTK as DynamicNTK
    from posenc.schedules.explicit import Explicit as Explicit
    from posenc.schedules.geometric import Geometric as Geometric
    from posenc.schedules.hertz import Hertz as Hertz
    from posenc.schedules.linear import Linear as Linear
    from posenc.schedules.llama3 import Llama3 as Llama3
    from posenc.schedules.longrope import LongRoPE as LongRoPE
    from posenc.schedules.ntk import NTK as NTK
    from posenc.schedules.proportional import Proportional as Proportional
    from posenc.schedules.yarn import YaRN as YaRN
    from posenc.transformer import Transformer as Transformer
