"""Kinds of findings: how fast each pair turns, and the gain on rotated channels."""

from __future__ import annotations

from posenc.audit.findings import Kind

FREQUENCY_DIVISOR = Kind(
    "frequency-divisor",
    "error",
    "frequencies with the wrong divisor in the exponent",
    "The exponent of pair i is 2i over the rotary width; with another divisor every pair but the first turns at another speed than in training.",
    "Make them as base ** -(torch.arange(0, rotary_dim, 2) / rotary_dim), with the width that rotates, not the head's.",
)
FREQUENCY_WIDTH = Kind(
    "frequency-width",
    "error",
    "another number of frequencies than the model rotates",
    "Too many channels turn, or too few: those beyond the rotary width were trained to stand still.",
    "Make rotary_dim / 2 frequencies, where rotary_dim is the head's width times its partial factor.",
)
FREQUENCY_BASE = Kind(
    "frequency-base",
    "error",
    "frequencies of another base",
    "Attention was trained at other speeds: nearby text stays fluent, distances are misjudged.",
    "Read the base from the configuration (rope_theta) instead of a default, per layer type where it differs.",
)
SCALING_DROPPED = Kind(
    "frequency-scaling-dropped",
    "error",
    "the scaling of the frequencies is left out",
    "Slow pairs turn faster than in training; short texts look right and long ones fall apart.",
    "Apply the rope_scaling (rope_parameters) block of the configuration; look for a renamed or unread key.",
)
SCALING = Kind(
    "frequency-scaling",
    "error",
    "frequencies scaled otherwise than promised",
    "Some pairs turn at another speed than in training, which shows on long texts first.",
    "Compare the rule and each of its numbers with the configuration.",
)
SCALING_INVERTED = Kind(
    "frequency-scaling-inverted",
    "error",
    "the scaling factor works the wrong way round",
    "A factor divides frequencies, so that a longer context fits; multiplied, positions run ahead of anything seen in training.",
    "Divide frequencies (or positions) by the factor; pass the inverse to a library whose scale multiplies.",
)
SCALING_TWICE = Kind(
    "frequency-scaling-twice",
    "error",
    "the scaling is applied twice",
    "Frequencies are divided by the factor squared: positions crowd together more than the model was trained for.",
    "Scale in one place: the frequencies or the positions, and not again when the table is rebuilt.",
)
FREQUENCY_ROUNDED = Kind(
    "frequency-rounded",
    "error",
    "frequencies rounded to half precision",
    "The rounding is multiplied by the position, so that the angle is wrong by whole turns on long texts.",
    "Keep inv_freq in float32 or wider through .to(), .half() and autocast, or make it anew after the cast; cast cos and sin only.",
)
FREQUENCY_ORDER = Kind(
    "frequency-order",
    "error",
    "frequencies in the wrong order",
    "Each pair of channels turns at another pair's speed.",
    "Put the fastest pair first: exponents rise from 0.",
)
FREQUENCY_GARBAGE = Kind(
    "frequency-garbage",
    "error",
    "frequencies that no rule makes",
    "The table holds uninitialised or overwritten memory, so positions mean nothing; it need not show as NaN.",
    "Make frequencies where they are used, or fill the buffer after to_empty() and after loading: it is in no checkpoint.",
)
AMPLITUDE_MISSING = Kind(
    "amplitude-missing",
    "error",
    "the amplitude on rotated channels is left out",
    "Scores lack the amplitude's square: attention is flatter or sharper than in training, at every length.",
    "Multiply cos and sin by the amplitude (attention_scaling), in every path that makes them.",
)
AMPLITUDE = Kind(
    "amplitude",
    "error",
    "another amplitude on rotated channels than promised",
    "Scores change by the square of the amplitude, at every length.",
    "Apply it once, on cos and sin of queries and keys alike, with the configuration's factor or attention_factor.",
)
