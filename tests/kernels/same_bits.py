"""What the tests of the compiled kernel share: tensors of every kind, and equality of bits."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc import Frequencies, RotaryTable, apply_rotary, apply_rotary_pair, rotary_table
from posenc.core.rotary_checks import overlaps

F64, F32, BF16, F16 = DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
PAIRINGS = ["half", "interleaved"]
AMPLITUDE = 1.3


def table_of(positions, pairs, dtype=F32, amplitude=AMPLITUDE) -> RotaryTable:
    """Angles that differ from pair to pair and are never near a multiple of π/2 but at position 0."""
    inv_freq = torch.tensor([1.7**-i for i in range(pairs)], dtype=F64)
    return rotary_table(torch.as_tensor(positions), Frequencies(inv_freq, amplitude), dtype=dtype)


def bits(x: Tensor) -> Tensor:
    """The bits of every number; all NaN alike, since which of two a sum hands on is nowhere defined."""
    x = torch.where(x.isnan(), torch.nan, x.detach()).contiguous()
    return x.view(INTEGERS[x.element_size()])


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def steps(x: Tensor) -> list[int]:
    """The strides that mean something."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def check_pair(q: Tensor, k: Tensor, table: RotaryTable, k_table: RotaryTable | None = None, **settings) -> None:
    """One call of everything that turns q and k, against the arithmetic in torch."""
    expected = apply_rotary_pair(q, k, table, k_table, backend="reference", **settings)
    for backend in ("auto", "native"):
        turned = apply_rotary_pair(q, k, table, k_table, backend=backend, **settings)
        for x, mine, true in zip((q, k), turned, expected, strict=True):
            assert same(mine, true)
            if x.stride(-1) == 1 and x.numel() and not overlaps(x):  # otherwise there is no order to keep
                assert steps(mine) == steps(true)
        assert same(apply_rotary(k, table if k_table is None else k_table, backend=backend, **settings), expected[1])
