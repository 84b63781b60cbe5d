"""What a rotary function does, asked with one-hot channels and with all pairs at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from posenc.audit.rotary.call import RotaryFunction
from posenc.audit.rotary.planes import Planes, wrap

_ENTRIES = 2**22  # of one call, to stay small beside any model


def doubling(up_to: int) -> list[int]:
    """0, the powers of two, and the last position: enough to tell every frequency."""
    powers = [2**k for k in range((up_to - 1).bit_length()) if 2**k < up_to]
    return sorted({0, *powers, up_to - 1})


def matrices(call: RotaryFunction, positions: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The matrices of queries and of keys in head 0, one per position: float64 ``[positions, out, in]``."""
    width = call.head_dim
    chunk = max(1, _ENTRIES // (max(call.heads, call.kv_heads) * len(positions) * width))
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for first in range(0, width, chunk):
        hot = torch.eye(width, dtype=dtype)[first : first + chunk]
        for side, turned in zip(found, _at(call, hot[:, None, None, :], positions), strict=True):
            side.append(turned[:, 0].double())
    q, k = (torch.cat(side).permute(1, 2, 0) for side in found)  # [in, position, out]
    return q, k


def angles(
    call: RotaryFunction, planes: tuple[Planes, Planes], positions: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The angle of each turning pair of queries and keys at any positions, wrapped, float64 ``[positions, pairs]``."""
    hot = [torch.zeros(call.head_dim, dtype=dtype).index_fill(0, torch.tensor(_low(side)), 1) for side in planes]
    turned = _at(call, hot[0][None, None, None], positions, hot[1][None, None, None])
    q, k = (_angles(y[0, 0].double(), side) for y, side in zip(turned, planes, strict=True))
    return q, k


def _angles(y: Tensor, planes: Planes) -> Tensor:
    y = y if planes.order is None else y[:, planes.order]
    return wrap(torch.atan2(y[:, [j for _, j in planes.pairs]], y[:, _low(planes)]) - planes.phase)


def _low(planes: Planes) -> list[int]:
    return [i for i, _ in planes.pairs]


def _at(call: RotaryFunction, q: Tensor, positions: list[int], k: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Turn ``[rows, 1, 1, head_dim]`` at every position: ``[rows, heads, positions, head_dim]``."""
    k = q if k is None else k
    parts = [call(*_spread(call, q, k, len(run)), torch.tensor([run]).expand(len(q), -1)) for run in runs(call, positions)]
    return torch.cat([part.q for part in parts], dim=2), torch.cat([part.k for part in parts], dim=2)


def _spread(call: RotaryFunction, q: Tensor, k: Tensor, length: int) -> tuple[Tensor, Tensor]:
    return q.expand(-1, call.heads, length, -1), k.expand(-1, call.kv_heads, length, -1)


def runs(call: RotaryFunction, positions: Iterable[int]) -> list[list[int]]:
    """The positions in one call, or, for a function that takes a start, in runs of consecutive ones."""
    if call.positions != "start":
        return [list(positions)]
    found: list[list[int]] = []
    for position in positions:
        if found and found[-1][-1] + 1 == position:
            found[-1].append(position)
        else:
            found.append([position])
    return found
