"""Weights from one convention to another."""

from posenc.convert.pairing import pair_order, reorder_pairs

__all__ = ["pair_order", "reorder_pairs"]
