"""What the tests of encodings of several axes share: their tokens on a line, for `conform`, and rotation by the paper."""

from __future__ import annotations

from math import cos, sin

import torch

from posenc import QKEncoding

F64 = torch.float64


class OnALine(QKEncoding):
    """An encoding of several axes whose tokens stand at ``position · direction``, so that plain positions drive it."""

    def __init__(self, inner, direction):
        super().__init__()
        self.inner, self.direction, self.sequence_axis = inner, direction, inner.sequence_axis

    def extra_repr(self):
        return repr(self.inner)

    def lift(self, positions):
        return torch.stack([step * positions for step in self.direction], dim=-1)

    def prepare(self, positions, k_positions=None, *, dtype=torch.float32):
        keys = None if k_positions is None else self.lift(k_positions)
        return self.inner.prepare(self.lift(positions), keys, dtype=dtype)

    def transform(self, q, k, prepared):
        return self.inner.transform(q, k, prepared)


def turn(x, positions, frequency, *, pairs, pairing, first=0):
    """Each pair turned by the sum over axes of position times ``frequency(head, axis, pair, heads)``, in float64, by loops."""
    out = x.double().clone()
    for head in range(x.shape[0]):
        for token, place in enumerate(positions.tolist()):
            for pair in range(pairs):
                a, b = (pair, pair + pairs) if pairing == "half" else (2 * pair, 2 * pair + 1)
                angle = sum(p * frequency(head, axis, pair, x.shape[0]) for axis, p in enumerate(place))
                u, v = x[head, token, a + first].item(), x[head, token, b + first].item()
                out[head, token, a + first] = u * cos(angle) - v * sin(angle)
                out[head, token, b + first] = u * sin(angle) + v * cos(angle)
    return out


def oracle_of(frequency_of):
    """An oracle for `conform` from ``frequency_of(encoding) -> frequency(head, axis, pair, heads)``."""

    def oracle(line, q, k, positions, k_positions):
        inner, frequency = line.inner, frequency_of(line.inner)
        pairs = getattr(inner, "rotary_dim", inner.head_dim) // 2
        first = getattr(inner, "start", 0) % inner.head_dim
        return tuple(
            turn(x, line.lift(at), frequency, pairs=pairs, pairing=inner.pairing, first=first)
            for x, at in ((q, positions), (k, k_positions))
        )

    return oracle
