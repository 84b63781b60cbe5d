"""Rows for the second setting of the anchor that failed; its command stands in README.md, to be run in this folder."""

from __future__ import annotations

from posenc import Encoding, ModelShape, RoPE


def rope_half(shape: ModelShape) -> list[Encoding]:
    """Half of each head turns."""
    return [RoPE(shape.head_dim, rotary_dim=shape.head_dim // 2)]


def rope_three_quarters(shape: ModelShape) -> list[Encoding]:
    """Three quarters of each head turn."""
    return [RoPE(shape.head_dim, rotary_dim=shape.head_dim // 4 * 3)]
