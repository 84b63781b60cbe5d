"""What `plan` refuses, as a finding of the right kind."""

from __future__ import annotations

import re

from posenc.audit.findings import Finding, Kind
from posenc.audit.kinds.configs import (
    CONFLICT,
    FACTOR,
    HEAD_DIM,
    LAYERS,
    LISTS,
    MISSING,
    REFUSED,
    ROPE_TYPE,
    SECTIONS,
    SWAPPED,
    TYPE,
)
from posenc.errors import ConfigError

UNSUPPORTED = "gives the two channels of a pair different angles"
"""A refusal that blames the architecture, and not the file."""

KINDS: tuple[tuple[str, Kind], ...] = (
    (r"mrope_section|xdrope_section", SECTIONS),
    (r"beta_fast = .+, beta_slow = |low_freq_factor = .+, high_freq_factor = ", SWAPPED),
    (r"(short|long)_factor = .+Expected (one factor per pair|a list of|finite numbers)|LongRoPE: ", LISTS),
    (r" disagree\.| but .+Expected the same ", CONFLICT),
    (r"\.rope_type = .+Expected one of ", ROPE_TYPE),
    (r"head_dim cannot be derived|num_attention_heads = .+at least one channel| rotating channels of head_dim", HEAD_DIM),
    (r"(layer_types|no_rope_layers|layer_rope_theta|per_layer_config)\b.* = |have no block in rope_parameters", LAYERS),
    (r" is missing\.", MISSING),
    (r"factor = -?[\d.e+]+\. Expected a number of 1\.0 or more", FACTOR),
    (r"Expected (an object|a number|a whole number|a list|true or false|a short text|finite numbers|names)", TYPE),
)
"""Words of a refusal and the kind that they mean; the first that fits."""


def refusal(error: ConfigError) -> Finding:
    """The finding of a configuration that `plan` refused."""
    said = str(error).removeprefix("plan: ")
    measured, _, rest = said.partition(". Expected ")
    rule, _, mend = rest.partition(". ")
    named = re.match(r"[\w.-]+", measured)
    if UNSUPPORTED in said:
        return REFUSED.at("model_type", measured=measured, expected=rule, severity="note", mend=mend)
    kind = next((kind for words, kind in KINDS if re.search(words, said, re.DOTALL)), REFUSED)
    return kind.at(
        named[0] if named else "the configuration",
        measured=measured,
        expected=rule.removesuffix(".") or "a configuration that can be read",
        severity="error",
        mend=mend or None,
    )
