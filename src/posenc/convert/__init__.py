"""Weights from one convention to another."""

from posenc.convert.pairing import pair_order, reorder_pairs
from posenc.convert.resize import resize_table

__all__ = ["pair_order", "reorder_pairs", "resize_table"]
