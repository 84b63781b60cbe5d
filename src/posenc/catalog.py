"""The catalogue: every encoding, one line each. The description of an encoding stands on its class."""

from __future__ import annotations

import importlib

from posenc.core.sites import Encoding

CATALOG = {
    "nope": "posenc.encodings.nope:NoPE",
    "sinusoidal": "posenc.encodings.sinusoidal:Sinusoidal",
    "learned": "posenc.encodings.learned:Learned",
    "hybrid": "posenc.encodings.hybrid:Hybrid",
    "grid-sinusoidal": "posenc.encodings.grid_sinusoidal:GridSinusoidal",
    "learned-grid": "posenc.encodings.learned_grid:LearnedGrid",
    "time2vec": "posenc.encodings.time2vec:Time2Vec",
    "fourier": "posenc.encodings.fourier:FourierFeatures",
    "rope": "posenc.encodings.rope:RoPE",
    "xpos": "posenc.encodings.xpos:XPos",
    "pope": "posenc.encodings.pope:PoPE",
    "axial": "posenc.encodings.axial:AxialRoPE",
    "mrope": "posenc.encodings.mrope:MRoPE",
    "mixed": "posenc.encodings.mixed:MixedRoPE",
    "temperature": "posenc.encodings.temperature:LogitTemperature",
    "alibi": "posenc.encodings.alibi:ALiBi",
    "t5": "posenc.encodings.t5:T5Bias",
    "learned-alibi": "posenc.encodings.learned_alibi:LearnedALiBi",
    "kerple": "posenc.encodings.kerple:KERPLE",
    "fire": "posenc.encodings.fire:FIRE",
    "sandwich": "posenc.encodings.sandwich:Sandwich",
    "swin": "posenc.encodings.swin:SwinBias",
    "swin-v2": "posenc.encodings.swin_v2:SwinV2Bias",
    "shaw": "posenc.encodings.shaw:ShawRelative",
    "transformer-xl": "posenc.encodings.transformer_xl:TransformerXL",
    "deberta": "posenc.encodings.deberta:DeBERTa",
    "content-profile": "posenc.encodings.inkling:ContentProfile",
    "cope": "posenc.encodings.cope:CoPE",
    "fox": "posenc.encodings.fox:FoX",
    "augmented": "posenc.encodings.augmented:Augmented",
    "randomized": "posenc.encodings.randomized:Randomized",
}


def load_encoding(name: str) -> type[Encoding]:
    """The class of a catalogued encoding.

    Raises:
        ValueError: a name that is not in `CATALOG`.

    Example:
        >>> load_encoding("rope").spec.name
        'rope'
    """
    if name not in CATALOG:
        raise ValueError(f"load_encoding: {name!r} is not in the catalogue. Expected one of {', '.join(CATALOG)}. Name one.")
    module, _, attribute = CATALOG[name].partition(":")
    encoding: type[Encoding] = getattr(importlib.import_module(module), attribute)
    return encoding
