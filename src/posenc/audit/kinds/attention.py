"""Kinds of findings: what an attention module or function does."""

from __future__ import annotations

from posenc.audit.findings import Kind as Kind

CAUSAL_ALIGNMENT = Kind(
    "causal-alignment",
    "error",
    "with fewer queries than keys the causal rule is aligned with the first key",
    "With a cache, new tokens see only the start of the text, or tokens after themselves.",
    "Align the last query with the last key: query i sees key j if j ≤ i + keys - queries. is_causal=True does not.",
)
CAUSAL_ON_POSITIONS = Kind(
    "causal-on-positions",
    "error",
    "the causal rule compares positions instead of order",
    "Positions repeat and run backwards (pictures, packing, time stamps), and then later tokens are seen.",
    "Compare the order of tokens, key index ≤ query index; leave positions to the encoding.",
)
MASK_DROPPED = Kind(
    "mask-dropped",
    "error",
    "hidden keys are attended to",
    "Padding, other documents or the future get weight, as if no mask had been given.",
    "Add the mask to the scores before the softmax, -inf where hidden; register a custom attention together with its mask.",
)
ATTENTION_LEAK = Kind(
    "attention-leak",
    "warning",
    "hidden keys keep a little weight",
    "A finite penalty hides keys only while scores are small; padding leaks in when they grow.",
    "Fill hidden scores with -inf or torch.finfo(dtype).min, not with -1, -100 or 0.",
)
ATTENTION_FUTURE = Kind(
    "attention-future",
    "error",
    "a query sees later keys",
    "The model reads what it should predict.",
    "Hide key j from query i where j > i + keys - queries.",
)
ATTENTION_SCALE = Kind(
    "attention-scale",
    "warning",
    "the softmax scale is not the expected one",
    "Scores are too sharp or too flat; trained weights answer in a slightly different voice.",
    "Multiply q·k by 1/√head_dim once (or by the model's own scale), and not inside the kernel a second time.",
)
ATTENTION_BIAS_ORDER = Kind(
    "attention-bias-order",
    "error",
    "the bias is multiplied by the softmax scale",
    "A bias added before the scale is too weak by √head_dim: distance hardly counts.",
    "Add the bias after scaling: q·k · scale + bias.",
)
ATTENTION_BIAS = Kind(
    "attention-bias",
    "error",
    "the bias on the scores is not the expected one",
    "Distances weigh more, less or the other way than in training.",
    "Compare sign, slopes and count of additions: score + bias, once.",
)
ATTENTION_WINDOW = Kind(
    "attention-window",
    "warning",
    "the sliding window has another size",
    "One token more or less than trained with, in every layer; caches of window size then lack or keep a key.",
    "Count the token itself: a window of w sees i - w < j ≤ i.",
)
ATTENTION_HEADS = Kind(
    "attention-heads",
    "error",
    "query heads read the wrong key-value heads",
    "Grouped heads are paired in another order than in training: the weights fit no more.",
    "Query head h reads key-value head h // (heads // kv_heads): repeat_interleave, not repeat.",
)
ATTENTION_VALUES = Kind(
    "attention-values",
    "warning",
    "values are changed by positions",
    "Attention should move values, not turn them: equal values must come out as they went in.",
    "Rotate queries and keys only; let weights sum to one.",
)
ATTENTION_PRECISION = Kind(
    "attention-precision",
    "note",
    "scores or weights are rounded to half precision",
    "Neighbouring distances and close scores become equal: bfloat16 knows no odd number above 256.",
    "Form scores, biases and the softmax in float32 and round the result.",
)
