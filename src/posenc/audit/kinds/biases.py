"""What can be wrong with a bias on attention scores."""

from __future__ import annotations

from posenc.audit.findings import Kind

SIGN = Kind(
    "bias-sign",
    "error",
    "far keys are favoured",
    "attention goes to the most distant tokens instead of the nearest",
    "subtract slope · distance, with distance = query - key and slopes above 0",
)
FUTURE = Kind(
    "bias-future",
    "error",
    "keys in the future are favoured without a causal mask",
    "the signed form -slope · (query - key) grows with every step into the future, so an encoder attends to the last tokens",
    "use |query - key| where both directions are seen",
)
SLOPES = Kind(
    "bias-slopes",
    "error",
    "the slopes of the heads follow another rule",
    "each head looks back over another span than the weights were trained with",
    "posenc.encodings.alibi.alibi_slopes(heads): 2^(-8j/heads) from j = 1 for powers of two; else those of the lower power of "
    "two, then every other slope of its double",
)
HEAD_ORDER = Kind(
    "bias-head-order",
    "error",
    "the slopes are right and the heads are in another order",
    "every head has the span of another one",
    "keep the order of the checkpoint; do not sort slopes, and give each shard the slopes of its own heads",
)
HEADS = Kind(
    "bias-heads",
    "error",
    "other heads carry the bias than promised",
    "heads that should see everything alike prefer near tokens, or the reverse",
    "give slope 0 to the heads without a bias, after the slopes of the others",
)
FORMULA = Kind(
    "bias-formula",
    "error",
    "the bias is another function of the distance than promised",
    "scores are shifted in a way that the weights were not trained with",
    "build it with the encoding that was promised and compare posenc.materialize of it",
)
NOT_RELATIVE = Kind(
    "bias-not-relative",
    "error",
    "equal distances get different biases",
    "the same words attend differently at another place in the text",
    "make each entry depend on query - key alone",
)
SHIFT = Kind(
    "bias-shift",
    "error",
    "above the diagonal the bias belongs to other rows",
    "the relative shift of a table with as many rows as tokens is right for past keys only; future keys get other queries' values",
    "use a table of 2 · length - 1 distances, or gather by distance",
)
POSITIONS_IGNORED = Kind(
    "bias-positions-ignored",
    "error",
    "the bias follows the place in the call, not the positions",
    "packed documents, shards of a sequence and left padding get the distances of other tokens",
    "form distances from the positions given, not from arange(length)",
)
CALL_DEPENDENT = Kind(
    "bias-call-dependent",
    "error",
    "the bias of two tokens changes with the length of the call",
    "the same words attend differently in a longer text, and a cached token differently from step to step",
    "make an entry depend on its two positions alone: no division by the length; a rule that follows the length must say so",
)
ALIGNMENT = Kind(
    "bias-alignment",
    "error",
    "fewer queries than keys are aligned at the top left",
    "in cached decoding the new token is taken for the first one",
    "the last query stands at the last key: query positions start at keys - queries",
)
BUCKETS = Kind(
    "bias-buckets",
    "error",
    "the distances fall into other buckets",
    "tokens read the learned bias of another distance",
    "posenc's t5_bucket has the edges in exact integers; in logarithms keep float32 or wider",
)
BUCKET_SIDES = Kind(
    "bias-bucket-sides",
    "error",
    "past and future keys read each other's buckets",
    "the relative position is key - query in T5: a flipped sign gives past tokens the biases learned for future ones",
    "pass key - query to T5's own function, query - key to posenc's t5_bucket",
)
PRECISION = Kind(
    "bias-precision",
    "warning",
    "the bias was rounded to half precision",
    "far distances share one value, and heads with steep slopes cannot tell them apart",
    "form the bias in float32 and add it to float32 scores",
)
NOT_FINITE = Kind(
    "bias-not-finite",
    "error",
    "the bias holds numbers that are not finite",
    "one NaN in a row makes the whole row NaN after the softmax",
    "guard the logarithm or power at distance 0; mask by -inf only what is hidden",
)
COLLISION = Kind(
    "bias-index-collision",
    "error",
    "different offsets in a window share a row",
    "windows that are not square mix up neighbours in different directions",
    "row = (rows + height - 1) · (2 · width - 1) + columns + width - 1: the stride has the width in it",
)
SCALE_ORDER = Kind(
    "bias-scale-order",
    "error",
    "the bias is divided by √head_dim as well",
    "all slopes shrink by that factor, and the bias hardly acts",
    "scores · scale + bias: add the bias after the scale",
)
