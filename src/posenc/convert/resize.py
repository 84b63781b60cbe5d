"""Learned position tables at another size; the computation is in `posenc.core.resize`, where encodings can use it."""

from posenc.core.resize import resize_table as resize_table
