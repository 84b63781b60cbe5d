"""Rows for the second settings of failed anchors; the commands that use them stand in README.md, to be run in this folder."""

from __future__ import annotations

from posenc import ALiBi, Encoding, ModelShape, RoPE


def rope_half(shape: ModelShape) -> list[Encoding]:
    """Half of each head turns."""
    return [RoPE(shape.head_dim, rotary_dim=shape.head_dim // 2)]


def rope_three_quarters(shape: ModelShape) -> list[Encoding]:
    """Three quarters of each head turn."""
    return [RoPE(shape.head_dim, rotary_dim=shape.head_dim // 4 * 3)]


def alibi_as_at_1024(shape: ModelShape) -> list[Encoding]:
    """Slopes that take as much from a score over 64 tokens as the released ones do over 1024."""
    encoding = ALiBi(shape.heads)
    encoding.slopes = tuple(1024 / 64 * slope for slope in encoding.slopes)
    return [encoding]
