"""Kinds of findings: functions that turn queries and keys, and functions that reorder their projections."""

from __future__ import annotations

from posenc.audit.findings import Kind

PAIRING = Kind(
    "rotary-pairing",
    "error",
    "channels pair in the other way than the weights were trained with",
    "Every shape fits, and the scores of trained weights become noise: fluent nonsense.",
    "Rotate with the pairing of the weights, or reorder the projections of queries and keys (posenc.convert.reorder_pairs).",
)
LAYOUT = Kind(
    "rotary-layout",
    "error",
    "the table is laid out for other pairs than those that turn",
    "The two channels of a pair turn by different angles, or a frequency serves two pairs: scores no longer depend on distance alone.",
    'Write the table in the order of the pairs: cat(f, f) for "half", repeat_interleave(2) for "interleaved", half width for kernels that split.',
)
SPAN = Kind(
    "rotary-span",
    "error",
    "other channels turn than should",
    "Channels that carry content are turned, or the frequencies of all pairs are those of another width.",
    "Turn rotary_dim channels from the right end of the head and make the frequencies for that width.",
)
SIGN = Kind(
    "rotary-sign",
    "error",
    "the rotation runs backwards or misses its minus sign",
    "Weights trained with the usual sense see every distance mirrored; without the minus sign nothing is rotated at all.",
    "Use (a·cos − b·sin, b·cos + a·sin); for halves, rotate_half is cat(−second, first).",
)
OPPOSITE = Kind(
    "rotary-opposite",
    "error",
    "queries and keys turn in opposite directions",
    "Scores depend on the sum of the two positions instead of their difference.",
    "Turn both by the same table; the sign comes from the dot product.",
)
ONE_SIDED = Kind(
    "rotary-one-sided",
    "error",
    "only one of queries and keys turns",
    "Scores depend on one absolute position; distance is not encoded.",
    "Turn queries and keys, each by its own positions.",
)
AMPLITUDE = Kind(
    "rotary-amplitude",
    "error",
    "queries and keys have different gains",
    "The gain of a long-context rule enters the score once, or three times, instead of twice: the softmax has another temperature.",
    "Multiply cosine and sine by the amplitude once, in the table that queries and keys share.",
)
VALUES = Kind(
    "rotary-values",
    "error",
    "values are changed",
    "The output of attention then depends on absolute positions, which nothing undoes.",
    "Turn queries and keys only.",
)
UNTOUCHED = Kind(
    "rotary-untouched",
    "error",
    "channels outside the rotation change",
    "Channels that should carry content only are scaled or rounded.",
    "Split them off before the rotation and join them unchanged.",
)
TWICE = Kind(
    "rotary-twice",
    "error",
    "the rotation is applied twice",
    "Every distance counts double, so the model sees a text of twice the length.",
    "Let one place rotate: the model or the attention call.",
)
AXIS = Kind(
    "rotary-axis",
    "error",
    "the angle follows the wrong axis",
    "Heads or sequences of the batch turn instead of tokens, so tokens have no order; shapes agree whenever the lengths do.",
    "Say where the sequence axis is: unsqueeze the table at the head axis, and take lengths from the sequence axis.",
)
NORM = Kind(
    "rotary-norm",
    "error",
    "the rotation changes lengths",
    "A turned vector must keep its norm, up to one amplitude; here the size of a score depends on the absolute position.",
    "Form cosine and sine of the same angle, and multiply both by the same amplitude.",
)
NOT_RELATIVE = Kind(
    "rotary-not-relative",
    "error",
    "scores do not depend on distance alone",
    "Moving a whole text changes its scores, so what was learned at the start of a text does not hold later.",
    "Make every angle position · frequency, with the same frequencies for queries and keys at all positions.",
)
OFFSET = Kind(
    "rotary-offset",
    "note",
    "position 0 is already turned",
    "Harmless while queries and keys share the offset; with mixed code, such as another kernel for decoding, distances are off.",
    "Start positions at 0, and add offsets only where the positions are made.",
)
POSITIONS_IGNORED = Kind(
    "rotary-positions-ignored",
    "error",
    "the positions that are passed have no effect",
    "Decoding with a cache, left padding and packed documents all turn by the place in the call instead of the position.",
    "Index the table by the positions that the caller passes.",
)
POSITION_ROUNDING = Kind(
    "rotary-position-rounding",
    "error",
    "positions are rounded to half precision",
    "Bfloat16 has 8 bits: of the positions near 8,000 only every 32nd is left, so neighbours become equal.",
    "Keep positions as integers or float32 up to the product with the frequencies, also under autocast.",
)
PRECISION = Kind(
    "rotary-precision",
    "error",
    "angles are formed in half precision",
    "An error of the frequency is multiplied by the position; after some hundred tokens the fast pairs point anywhere.",
    "Form angles in float32 or float64 whatever the model's dtype, with autocast off, and round cosine and sine only.",
)
TABLE_PRECISION = Kind(
    "rotary-table-precision",
    "warning",
    "cosine and sine are rounded further than queries and keys",
    "Each score of a float32 model carries the error of a half-precision one.",
    "Keep the table in float32 and round it to the dtype of queries and keys at use.",
)
DTYPE = Kind(
    "rotary-dtype",
    "error",
    "the result has another dtype than its input",
    "An integer result truncates the rotation to −1, 0 and 1; a narrower one loses digits, a wider one costs memory and can leave the fast path of attention.",
    "Return the result in the dtype of the input.",
)
BATCH = Kind(
    "rotary-batch",
    "error",
    "a sequence turns otherwise beside another one",
    "Results depend on what else is in the batch, so serving does not repeat evaluation.",
    "Take lengths and positions of each sequence, never of the whole batch.",
)
ROWS = Kind(
    "rotary-rows",
    "error",
    "positions are not honoured token by token",
    "Left-padded, packed and cached sequences have positions that differ by row or jump; here they turn by others.",
    "Index the table by every entry of positions [batch, seq], not by the first row or by a start and a length.",
)
CALL_ORDER = Kind(
    "rotary-call-order",
    "error",
    "the result depends on earlier calls",
    "A table kept from another call (other offset, length or dtype) is used again: evaluation passes, serving does not.",
    "Key the cache by everything that the table depends on, or make the table anew.",
)
LENGTH = Kind(
    "rotary-length",
    "warning",
    "frequencies depend on the longest position of the call",
    "Keys already in a cache were turned by the frequencies of a shorter call, so old and new tokens are compared wrongly.",
    "Fix the length for the whole sequence, or keep keys unrotated and turn them anew when the frequencies change.",
)
COMPILED = Kind(
    "rotary-compiled",
    "error",
    "the compiled function gives another result",
    "Training and serving, or two machines, then disagree.",
    "Keep positions, not values read from them, in the graph; compare with torch.compile(…, backend='aot_eager') in a test.",
)
GRADIENT = Kind(
    "rotary-gradient",
    "error",
    "the gradient is not that of the rotation",
    "The forward is right and tests of it pass; training follows another function's slope.",
    "Turn the incoming gradient by minus the angle, with the same amplitude; compare with torch.autograd.gradcheck in float64.",
)
REORDERING_HEADS = Kind(
    "reordering-heads",
    "error",
    "rows are reordered with the head count of the other projection",
    "In a grouped-query model keys have fewer heads; with the number of query heads every shape fits and the text is noise.",
    "Pass the number of key heads for the key projection.",
)
REORDERING_DIRECTION = Kind(
    "reordering-direction",
    "error",
    "rows are reordered the other way round, or not at all",
    "The weights then fit neither pairing.",
    "Interleaved to half takes channels 0 2 4 … 1 3 5 …; half to interleaved 0 h 1 h+1 ….",
)
REORDERING_SPAN = Kind(
    "reordering-span",
    "error",
    "rows of other channels move than those that turn",
    "With partial rotation the remaining channels stay where they are, and the pairs are those of the rotary width.",
    "Reorder the rotary slice of each head only.",
)
REORDERING_ROWS = Kind(
    "reordering-rows",
    "error",
    "rows are lost, mixed or in an unknown order",
    "A reordering must keep each row of the weight whole and once.",
    "View the rows as [heads, head_dim], index the channels, flatten again.",
)
REORDERING_BIAS = Kind(
    "reordering-bias",
    "error",
    "a bias is reordered otherwise than its weight",
    "Row and bias of a channel belong together; Qwen2-like models have biases on queries and keys.",
    "Apply the same order to the bias, and to per-channel norms of queries and keys.",
)
REORDERING_ROUND_TRIP = Kind(
    "reordering-round-trip",
    "error",
    "there and back is not the identity",
    "A checkpoint converted twice is another model.",
    "The inverse of new[i] = old[order[i]] is new[order[i]] = old[i].",
)
