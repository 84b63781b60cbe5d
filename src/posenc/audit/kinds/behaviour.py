"""Kinds of findings: what a model does with padding, packing, caches and lengths."""

from __future__ import annotations

from posenc.audit.findings import Kind as Kind

LEFT_PADDING = Kind(
    "left-padding",
    "warning",
    "a left-padded row answers otherwise than the same tokens without padding",
    "In a batch the shorter rows are read at shifted positions, or with padding in view; only the longest row is right.",
    "Count positions per row from the mask, (mask.cumsum(-1) - 1).clamp(min=0), and hide padded keys.",
)
RIGHT_PADDING = Kind(
    "right-padding",
    "warning",
    "a right-padded row answers otherwise than the same tokens without padding",
    "Padding behind the text changes its tokens: it is attended to, or counted into a length.",
    "Hide padded keys with the mask, and take lengths from the mask, not from the width of the batch.",
)
PACKING = Kind(
    "packing",
    "warning",
    "documents packed into one row answer otherwise than apart",
    "Every document but the first is read at positions that it never has alone, or sees the one before.",
    "Start positions again at each document and let no token see another document.",
)
DECODE_OFFSET = Kind(
    "decode-offset",
    "error",
    "decoding with a cache differs from one full pass",
    "Generated tokens stand at other positions than in training, usually all at 0: the text derails after the prompt.",
    "Number new tokens from the length of the cache on, and key cached tables by this offset too.",
)
CHUNKED_PREFILL = Kind(
    "chunked-prefill",
    "error",
    "a prompt read in chunks differs from the prompt in one pass",
    "Long prompts are read in chunks: from the second chunk on, positions or the causal rule ignore what is cached.",
    "Number the tokens of a chunk from the length of the cache on, and align the causal rule with the last key.",
)
CALL_ORDER = Kind(
    "call-order",
    "error",
    "an answer depends on the calls before it",
    "Tables that grow with the longest input stay as they are for the short inputs after it, so results depend on history.",
    "Make tables from the call's own length and positions; a cache of tables is keyed by all that changes them.",
)
BATCH_DEPENDENCE = Kind(
    "batch-dependence",
    "warning",
    "a row's answer depends on the other rows of the batch",
    "A length taken over the batch scales positions or frequencies of all rows, so answers change with the neighbours.",
    "Take lengths per row, or fix one for the model.",
)
LENGTH_RULE_CACHE = Kind(
    "length-rule-cache",
    "warning",
    "keys cached before the length rule switches do not follow it",
    "Past the switch, queries are turned with new frequencies and cached keys with old ones: their angles do not match.",
    "Fix one length for the whole sequence (rule.at(length)), cache keys unrotated, or start over when the rule switches.",
)
FUTURE_LEAK = Kind(
    "future-leak",
    "error",
    "a later token changes an earlier answer",
    "In training the model reads what it should predict; at generation that is missing, and quality collapses.",
    "Mask by the order of tokens in every layer; check that a custom attention gets its mask.",
)
POSITIONS_IGNORED = Kind(
    "positions-ignored",
    "error",
    "positions do not reach the outputs",
    "Whatever positions are given, the answer is the same: word order is lost, or the caller's padding and packing are ignored.",
    "Pass positions on to the encoding; index one row of the table per token.",
)
SHIFT_DEPENDENCE = Kind(
    "shift-dependence",
    "note",
    "a shift of all positions changes the answer of a model that encodes distances",
    "Rotary and bias encodings read distances alone, so padding and cropping are free. Here an absolute position gets in.",
    "Turn queries and keys by the same positions, and neither by a table that is centred, clamped or sized by the call.",
)
PAST_THE_END = Kind(
    "past-the-end",
    "warning",
    "positions outside the table are answered in silence, or ones inside are refused",
    "A clamped or wrapped index gives distant tokens the code of another place; a table too short fails at the full length.",
    "Check positions against the rows: 0 ≤ position + offset < rows, with rows = length + offset.",
)
