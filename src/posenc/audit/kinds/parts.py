"""Kinds of findings: parts of a live model, against each other and against the configuration."""

from __future__ import annotations

from posenc.audit.findings import Kind

TABLE_VALUES = Kind(
    "table-values",
    "error",
    "the rotary table is not the promised one",
    "queries and keys turn by other angles than in training: the text stays fluent and gets worse",
    "build the rotary module again from the model's configuration, or put posenc's tables in with posenc.hf.patch(model)",
)
TABLE_HALF_ANGLES = Kind(
    "table-half-angles",
    "error",
    "angles are formed in half precision",
    "the product of position and frequency is rounded to 8 or 11 bits, so far positions get another token's angle",
    "form angles in float32 or wider and round cosine and sine only; posenc.hf.patch(model) does so",
)
TABLE_OUT_OF_STEP = Kind(
    "table-out-of-step",
    "warning",
    "the copy that the model returns to is not the promised table",
    "rules that depend on the length put original_inv_freq back when a short text follows a long one",
    "restore original_inv_freq together with inv_freq, or build the rotary module again",
)
TABLE_GARBAGE = Kind(
    "table-garbage",
    "error",
    "a position table holds what is no position table",
    "buffers that no checkpoint holds keep whatever stood in the memory after to_empty",
    "fill the table again from its rule after to_empty, before the weights are loaded",
)
TABLE_ON_META = Kind(
    "table-on-meta",
    "error",
    "a position table was left on the meta device",
    "it has a shape and no values; the forward raises or reads whatever a later to_empty leaves there",
    "build the table on a real device, or fill it after to_empty",
)
TABLE_NOT_BUFFER = Kind(
    "table-not-buffer",
    "warning",
    "a position table is kept as a plain attribute",
    "model.to(device) and model.half() do not reach it, and each forward mixes devices or dtypes or copies it",
    'register it: self.register_buffer("name", table, persistent=False)',
)
TABLE_ROWS = Kind(
    "table-rows",
    "error",
    "the position table is shorter than promised",
    "a text of the promised length indexes past the last row",
    "build the table with max_position_embeddings rows and those before the first token, or lower the promise",
)
TABLE_PADDING_ROWS = Kind(
    "table-padding-rows",
    "note",
    "fewer tokens fit than the table has rows",
    "the first rows belong to padding, so the largest position stops short of max_position_embeddings",
    "cut texts at the length that fits",
)
TABLE_UNTRAINED = Kind(
    "table-untrained",
    "warning",
    "rows of a position table are empty",
    "tokens there get no position at all, and the model never saw rows like these",
    "train the new rows or interpolate the table: posenc.convert.resize; or cut texts before them",
)
TABLE_REPEATS = Kind(
    "table-repeats",
    "warning",
    "positions share one code",
    "tokens at these positions cannot be told apart by where they stand",
    "interpolate a table to more rows instead of repeating it, or train it on",
)
LAYER_BASE = Kind(
    "layer-base",
    "error",
    "a kind of layer turns at another kind's frequencies",
    "sliding layers need fast frequencies and full ones slow ones; exchanged, both read distances that they never saw",
    "build each kind's table from its own block of rope_parameters",
)
LAYER_PLAN = Kind(
    "layer-plan",
    "error",
    "layers turn that should not, or the other way round",
    "a layer trained without rotation compares content at any distance; turned, it loses what is far",
    "give rotation to the layers that the configuration names, no_rope_layers or layer_types, and to no other",
)
LAYER_WINDOW = Kind(
    "layer-window",
    "warning",
    "a layer's window is not the promised one",
    "the layer sees farther or less far than in training wherever attention takes the window from the layer",
    "set the layer's sliding_window from the configuration",
)
BIAS_TABLE_SIZE = Kind(
    "bias-table-size",
    "error",
    "the relative bias table has another size",
    "buckets or heads index other rows than those that were trained, or past the last",
    "build it with relative_attention_num_buckets rows and a column per head",
)
MASK_NOT_REGISTERED = Kind(
    "mask-not-registered",
    "error",
    "attention is registered without its mask",
    "transformers then makes no mask at all: padding is seen, and in a decoder the future too",
    "register a mask function under the same name with AttentionMaskInterface.register",
)
UPSTREAM_DEVIATION = Kind(
    "upstream-deviation",
    "note",
    "transformers itself deviates from the configuration here",
    "the library's own class does the same with this configuration, so weights trained with it expect it",
    "nothing, where the weights were trained with transformers; mind it when they move to another runtime",
)
