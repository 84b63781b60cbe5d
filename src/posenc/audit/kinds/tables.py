"""What can be wrong with a table of position codes that is added to the embeddings."""

from __future__ import annotations

from posenc.audit.findings import Kind

FORMULA = Kind(
    "table-formula",
    "error",
    "the table is not the code it should be",
    "shifting by k positions is no longer one rotation of each pair, and weights trained with the right code meet another one",
    "build the table with posenc.Sinusoidal, or form sine and cosine of a pair from one angle",
)
DIVISOR = Kind(
    "table-divisor",
    "error",
    "the exponent of the frequencies has another divisor",
    "wavelengths span another range: far positions look alike, or most channels hardly move",
    "paper: base^(-2i/width) with i counting pairs, that is arange(0, width, 2) / width; tensor2tensor: i / (width/2 - 1)",
)
BASE = Kind(
    "table-base",
    "error",
    "the frequencies have another base",
    "every channel but the first turns at another speed than the weights were trained with",
    "use the base of the checkpoint, 10000 unless it says otherwise",
)
LAYOUT = Kind(
    "table-layout",
    "error",
    "sines and cosines stand in other channels",
    "the numbers are right and the channels are permuted, so trained weights read the wrong ones",
    "interleave (sin, cos, sin, cos, …) or concatenate (all sines, then all cosines) as the checkpoint does",
)
SCALE = Kind(
    "table-scale",
    "error",
    "the code has another amplitude",
    "positions drown the tokens, or are drowned by them",
    "entries of a sinusoidal code lie between -1 and 1; scale the token embeddings by √width instead",
)
OFFSET = Kind(
    "table-offset",
    "error",
    "the first token reads another row",
    "every token has the code of a neighbour, and the last ones may read past the end",
    "add the offset of the checkpoint: 2 in OPT, padding_idx + 1 in RoBERTa and M2M-100, 0 elsewhere",
)
SAME_ROW = Kind(
    "table-same-row",
    "error",
    "all tokens get the same vector",
    "the model cannot tell positions apart at all",
    "slice the table, pe[:, :length]; pe[:, length] takes one row",
)
BATCH_AXIS = Kind(
    "table-batch-axis",
    "error",
    "the code depends on the place in the batch",
    "tokens get the number of their sequence in place of their own, and results change with the batch",
    "read the length from the sequence axis and add [1, length, width] to [batch, length, width]",
)
LENGTH_AXIS = Kind(
    "table-length-axis",
    "error",
    "the length is read from the wrong axis",
    "the number of positions is the width of the embeddings, so only sequences of that length pass",
    "read the length from axis 1 of [batch, length, width]",
)
INTEGER = Kind(
    "table-integer",
    "error",
    "the table holds integers",
    "sines and cosines are cut to -1, 0 and 1, and most positions share a row",
    "return a floating-point table; never cast it to the dtype of the positions",
)
NOT_FINITE = Kind(
    "table-not-finite",
    "error",
    "the table holds numbers that are not finite",
    "one such entry makes every output of its sequence NaN",
    "compute the table where it is used, or fill it after to_empty()",
)
PAST_END = Kind(
    "table-past-end",
    "error",
    "positions past the end are not refused, or the table ends too early",
    "tokens there get codes that belong to others, or the call fails at a length that was promised",
    "raise past the last row; give the table length + offset rows",
)
COLLIDE = Kind(
    "table-rows-collide",
    "error",
    "different positions share a row",
    "the model cannot tell those positions apart",
    "make positions and angles in float32 or wider and round the finished table only",
)
PRECISION = Kind(
    "table-precision",
    "warning",
    "angles were formed in too narrow a dtype",
    "the code is right near the start and noise farther on",
    "form positions · frequencies in float32 or wider and cast the finished table",
)
POSITIONS_IGNORED = Kind(
    "table-positions-ignored",
    "error",
    "rows belong to the place in the call, not to the position",
    "cached decoding gives every new token row 0, and left padding or packing shifts all codes",
    "index the table with the positions given; a cache of rows must be keyed by the positions, not by their number",
)
CALL_DEPENDENT = Kind(
    "table-call-dependent",
    "error",
    "the row of a position changes with the call",
    "the same token has another code in a longer batch, in a cache, or after another call",
    "make a row depend on its position alone: no division by the length, no state that earlier calls leave behind",
)
GRID_ORDER = Kind(
    "table-grid-order",
    "error",
    "the halves of the channels read the other axis",
    "the model sees every picture mirrored along its diagonal, which no test on square pictures shows",
    "MAE and its descendants fill the first half with the column (width first); name the order of the checkpoint",
)
GRID_TRANSPOSED = Kind(
    "table-grid-transposed",
    "error",
    "the grid is flattened column after column",
    "patches come row after row, so all but those on the diagonal get the code of another patch",
    "flatten with the column fastest: meshgrid(rows, columns, indexing='ij'), then flatten",
)
NEGATIVE = Kind(
    "table-negative",
    "note",
    "negative positions read rows from the end",
    "padding at position -1 silently gets the code of the last position",
    "refuse negative positions, or give padding a row of its own",
)
DTYPE = Kind(
    "table-dtype",
    "note",
    "adding the table changes the dtype of the embeddings",
    "the rest of the model runs in another dtype than it was cast to, or stops at the first matrix product",
    "cast the finished table to the dtype of the embeddings before adding it",
)
