"""Whether a rotary function honours the positions of this call, whatever was called before or beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from posenc.audit.findings import Finding
from posenc.audit.kinds import rotary as kinds
from posenc.audit.rotary.call import RotaryFunction, Turned

_EXACT = 8  # roundings: the same arithmetic in another shape may differ by ulps of a vectorized cosine and of the products
_ENTRIES = 2**24
_LENGTH = 6
_OFFSET = 7


@final
class Recall:
    """Calls of different offsets and lengths; `check` makes them again, after everything else, and compares.

    Args:
        up_to: the longest call ends here.
        generator: of the content.
    """

    def __init__(self, call: RotaryFunction, up_to: int, where: str, generator: torch.Generator) -> None:
        self._call, self._where = call, where
        self._q = call.random(1, call.heads, _LENGTH, call.head_dim, generator=generator)
        self._k = call.random(1, call.kv_heads, _LENGTH, call.head_dim, generator=generator)
        self._first: list[tuple[int, Turned]] = []
        for start in (0, _OFFSET, up_to // 2 - _LENGTH, up_to - _LENGTH):  # short, offset, longer, longest
            self._first.append((start, self._turn(start, _LENGTH)))

    def _turn(self, start: int, length: int) -> Turned:
        return self._call(self._q[:, :, :length], self._k[:, :, :length], torch.arange(start, start + length)[None])

    def check_offset(self) -> list[Finding]:
        """Another offset gives another result; if not, whose fault it is."""
        (_, none), (_, seven) = self._first[:2]
        shorter = self._turn(_OFFSET, _LENGTH - 1)
        sides = (("queries", none.q, seven.q, shorter.q, self._q), ("keys", none.k, seven.k, shorter.k, self._k))
        for side, at_none, at_seven, cut, given in sides:
            if not torch.equal(at_none, at_seven) or torch.equal(at_none, given):  # what never turns is no matter of offsets
                continue
            where = f"{self._where}, {side}"
            if not torch.equal(cut, at_seven[:, :, :-1]):
                return [
                    kinds.CALL_ORDER.at(
                        where,
                        measured=f"a call from position {_OFFSET} returns the result of an earlier one from position 0, of the same length",
                        expected=f"tokens at positions {_OFFSET} … {_OFFSET + _LENGTH - 1}",
                    )
                ]
            return [
                kinds.POSITIONS_IGNORED.at(
                    where,
                    measured=f"positions {_OFFSET} … {_OFFSET + _LENGTH - 1} give the result of 0 … {_LENGTH - 1}",
                    expected="each token turns by its own position",
                )
            ]
        return []

    def check(self) -> list[Finding]:
        """The same calls give the same results after long ones, other offsets and other dtypes.

        The longest comes first: a rule that depends on the length may keep it for the next, and forget it after a short one.
        """
        for start, before in reversed(self._first):
            after = self._turn(start, _LENGTH)
            apart = _apart(before, after)
            if apart > _EXACT * self._call.rounding:
                return [
                    kinds.CALL_ORDER.at(
                        self._where,
                        measured=f"positions {start} … {start + _LENGTH - 1} come out different after longer calls and other dtypes, by {apart:.3g}",
                        expected="the result of the first such call",
                    )
                ]
        return []


def check_jumps(call: RotaryFunction, where: str, generator: torch.Generator) -> list[Finding]:
    """Positions that repeat and jump, as with left padding and packing, are those of each token."""
    vector = call.random(call.head_dim, generator=generator)
    jumps = torch.tensor([[0, 0, 3, 4, 9, 1]])
    length = int(jumps.max()) + 1
    plain = _turn_all(call, vector, torch.arange(length)[None])
    turned = _turn_all(call, vector, jumps)
    apart = _apart(turned, Turned(plain.q[:, :, jumps[0]], plain.k[:, :, jumps[0]], None))
    if apart <= _EXACT * call.rounding:
        return []
    consecutive = (
        _apart(turned, Turned(plain.q[:, :, : jumps.shape[1]], plain.k[:, :, : jumps.shape[1]], None)) <= _EXACT * call.rounding
    )
    as_what = (
        "turn as 0, 1, 2, 3, 4, 5" if consecutive else f"come out different from the same positions in a run, by {apart:.3g}"
    )
    return [
        kinds.ROWS.at(where, measured=f"positions 0, 0, 3, 4, 9, 1 {as_what}", expected="each token turns by its own position")
    ]


def check_rows(call: RotaryFunction, where: str, up_to: int, generator: torch.Generator) -> list[Finding]:
    """Each row of a batch turns by its own positions, as it does alone, beside a row that starts elsewhere or is longer."""
    vector = call.random(call.head_dim, generator=generator)
    steps = torch.arange(_LENGTH)
    found = []
    other = torch.stack((steps, steps + 5))
    row = _row(_turn_all(call, vector, other), 1)
    if _apart(row, _turn_all(call, vector, other[1:])) > _EXACT * call.rounding:
        if _apart(row, _turn_all(call, vector, other[:1])) <= _EXACT * call.rounding:
            measured, expected = "the second row, at positions 5 … 10, turns as the first, at 0 … 5", "its own positions"
            return [kinds.ROWS.at(where, measured=measured, expected=expected)]
        found.append(_beside(where, "one that starts at 0"))
    longer = torch.stack((steps, steps + up_to - _LENGTH))
    if (
        not found
        and _apart(_row(_turn_all(call, vector, longer), 0), _turn_all(call, vector, longer[:1])) > _EXACT * call.rounding
    ):
        found.append(_beside(where, f"one that ends at {up_to - 1}"))
    return found


def check_length(call: RotaryFunction, where: str, up_to: int, generator: torch.Generator, *, promised: bool) -> list[Finding]:
    """The first tokens turn alike in a short call and in one that reaches the last position."""
    vector = call.random(call.head_dim, generator=generator)
    steps = torch.arange(_LENGTH)
    if call.positions == "start":  # all of them, as far as memory goes
        up_to = min(up_to, max(16, _ENTRIES // (max(call.heads, call.kv_heads) * call.head_dim)))
        longer = torch.arange(up_to)
    else:
        longer = torch.cat((steps, torch.tensor([up_to - 1])))
    short, long = _turn_all(call, vector, steps[None]), _turn_all(call, vector, longer[None])
    apart = _apart(short, Turned(long.q[:, :, :_LENGTH], long.k[:, :, :_LENGTH], None))
    if apart <= _EXACT * call.rounding:
        return []
    return [
        kinds.LENGTH.at(
            where,
            measured=f"positions 0 … {_LENGTH - 1} come out different in a call that reaches {up_to - 1}, by {apart:.3g}",
            expected="frequencies that stay as they are while a text grows",
            severity="note" if promised else None,
        )
    ]


def _beside(where: str, neighbour: str) -> Finding:
    return kinds.BATCH.at(where, measured=f"a row comes out different beside {neighbour}", expected="the row's result alone")


def _turn_all(call: RotaryFunction, vector: Tensor, positions: Tensor) -> Turned:
    rows, length = positions.shape
    return call(vector.expand(rows, call.heads, length, -1), vector.expand(rows, call.kv_heads, length, -1), positions)


def _row(turned: Turned, row: int) -> Turned:
    return Turned(turned.q[row : row + 1], turned.k[row : row + 1], None)


def _apart(one: Turned, two: Turned) -> float:
    """The largest difference, in units of the largest entry."""
    scale = max(float(one.q.abs().max()), float(one.k.abs().max()), 1e-30)
    return max(float((one.q - two.q).abs().max()), float((one.k - two.k).abs().max())) / scale


def check_compiled(call: RotaryFunction, where: str, backend: str, up_to: int, generator: torch.Generator) -> list[Finding]:
    """The compiled function gives the eager result, at two lengths and offsets."""
    compiled = replace(call, fn=torch.compile(call.fn, backend=backend))
    vector = call.random(call.head_dim, generator=generator)
    for start, length in ((0, _LENGTH), (_OFFSET, _LENGTH), (up_to - 9, 9)):
        at = torch.arange(start, start + length)[None]
        apart = _apart(_turn_all(call, vector, at), _turn_all(compiled, vector, at))
        # compilers fuse products and sums, and round angles once less: 2 · 2⁻²⁴ of the position
        if apart > _EXACT * call.rounding + 2 * 2.0**-24 * (start + length):
            return [
                kinds.COMPILED.at(
                    where,
                    measured=f"positions {start} … {start + length - 1} come out different under {backend}, by {apart:.3g}",
                    expected="the eager result",
                )
            ]
    return []
