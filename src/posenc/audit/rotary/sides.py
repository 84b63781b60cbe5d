"""What queries and keys must share, and what each must keep: norms, signs, amplitudes, distances."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.audit.findings import Finding
from posenc.audit.kinds import rotary as kinds
from posenc.audit.rotary.call import RotaryFunction, unit
from posenc.audit.rotary.planes import Planes, wrap


def compare_sides(q: Planes, k: Planes, where: str, rounding: float) -> list[Finding]:
    """Queries against keys: the same planes, frequencies, amplitude and offset."""
    if q.pairs != k.pairs:
        return [
            kinds.LAYOUT.at(
                where,
                measured=f"queries turn {_slice(q)}, keys {_slice(k)}",
                expected="the same channels and pairs in both",
            )
        ]
    if (q.order is None) != (k.order is None):
        return [
            kinds.LAYOUT.at(
                where,
                measured="one of queries and keys comes out in another order of channels",
                expected="the same order in both",
            )
        ]
    faster = q.turning.abs() > _resolution(q, rounding)
    loose = 1e-3 * q.turning.abs() + _resolution(q, rounding)  # rules differ by per cents, roundings by less
    if faster.any() and ((q.turning + k.turning).abs() <= loose)[faster].all():
        first = f"{float(q.turning[0]):+.6g} and {float(k.turning[0]):+.6g} radians per position"
        return [kinds.OPPOSITE.at(where, measured=f"the first pair turns by {first}", expected="the same sense in both")]
    apart = (q.turning - k.turning).abs() - loose
    found = []
    if (apart > 0).any():
        pair = int(apart.argmax())
        found.append(
            kinds.NOT_RELATIVE.at(
                where,
                measured=f"pair {pair} turns by {float(q.turning[pair]):.6g} in queries and {float(k.turning[pair]):.6g} in keys",
                expected="one frequency per pair",
            )
        )
    elif (wrap(q.phase - k.phase).abs() > 64 * rounding).any():
        offset = _offset(q) - _offset(k)
        found.append(
            kinds.OFFSET.at(
                where,
                measured=f"queries stand {offset:+.4g} positions from keys of the same position",
                expected="one offset for both",
                severity="error",
            )
        )
    gains = q.gains[0] / k.gains[0]
    if (gains - 1).abs().max() > 16 * rounding:
        found.append(
            kinds.AMPLITUDE.at(
                where,
                measured=f"queries are scaled by {float(q.gains[0, 0]):.6g}, keys by {float(k.gains[0, 0]):.6g}",
                expected="one amplitude in both",
            )
        )
    return found


def check_side(planes: Planes, where: str, rounding: float) -> list[Finding]:
    """One side alone: its offset and its sense."""
    found = []
    if (planes.phase.abs() > 64 * rounding).any():
        found.append(
            kinds.OFFSET.at(
                where, measured=f"position 0 turns like position {_offset(planes):.4g}", expected="position 0 is the identity"
            )
        )
    signs = planes.turning.sign()
    if (signs < 0).all():
        found.append(
            kinds.SIGN.at(
                where,
                measured="queries and keys both turn backwards: (a·cos + b·sin, b·cos − a·sin)",
                expected="(a·cos − b·sin, b·cos + a·sin)",
                severity="note",
            )
        )
    elif (signs != signs[0]).any():
        backwards = (signs < 0).nonzero()[:, 0].tolist()
        found.append(
            kinds.SIGN.at(
                where,
                measured=f"{len(backwards)} of {len(signs)} pairs turn backwards, or by more than half a turn per position",
                expected="the same sense in all pairs",
                severity="note",  # learned frequencies may have any sign; a promise finds the rest
            )
        )
    return found


def check_repeated(planes: Planes, promised: Tensor | None, where: str) -> list[Finding]:
    """Each frequency serves one pair, unless it is promised otherwise."""
    repeated = _repeated(planes.turning)
    if repeated is None or (promised is not None and _repeated(promised) is not None):
        return []
    return [kinds.LAYOUT.at(where, measured=repeated, expected="each frequency once")]


def check_norm(q: Planes, k: Planes, where: str, bound: float) -> tuple[list[Finding], str | None]:
    """One amplitude at all positions, up to ``bound``; or gains of queries and keys that cancel (xPos), in words."""
    sides = [side.gains / side.gains[:1] for side in (q, k)]
    if all((side - 1).abs().max() <= bound for side in sides):
        found = []
        for name, side in (("queries", q), ("keys", k)):
            gains = side.gains[0]
            if gains.max() - gains.min() > bound * gains.max():
                found.append(
                    kinds.NORM.at(
                        f"{where}, {name}",
                        measured=f"pairs are scaled by {float(gains.min()):.6g} to {float(gains.max()):.6g}",
                        expected="one amplitude for all pairs",
                    )
                )
        return found, None
    if (
        sides[0].shape == sides[1].shape and (sides[0] * sides[1] - 1).abs().max() <= 2.0**-6
    ):  # exponents in float32, to 2⁻⁶ at worst
        return [], "queries grow and keys shrink with the position, so that scores decay with distance (xPos)"
    name, gain = ("queries", sides[0]) if (sides[0] - 1).abs().max() > bound else ("keys", sides[1])
    return [
        kinds.NORM.at(
            f"{where}, {name}",
            measured=f"the gain of a pair goes from {float(gain.min()):.6g} to {float(gain.max()):.6g} of that at position 0",
            expected="one amplitude at all positions",
        )
    ], None


def check_scores(
    call: RotaryFunction, planes: Planes, dtype: torch.dtype, up_to: int, where: str, generator: torch.Generator
) -> list[Finding]:
    """Scores of the same two tokens, near the start and moved to the end."""
    q = torch.randn(1, call.heads, 1, call.head_dim, generator=generator, dtype=torch.float64).to(dtype).expand(-1, -1, 4, -1)
    k = (
        torch.randn(1, call.kv_heads, 1, call.head_dim, generator=generator, dtype=torch.float64)
        .to(dtype)
        .expand(-1, -1, 4, -1)
    )
    shift = up_to - 4
    steps = torch.arange(4)[None]
    here, there = _scores(call, q, k, steps), _scores(call, q, k, steps + shift)
    gain = float(planes.gains.max()) ** 2
    lengths = float(q[:, :, 0].double().norm(dim=-1).max() * k[:, :, 0].double().norm(dim=-1).max())
    # each of four turned vectors has angles off by 4 · 2⁻²⁴ of the position, and two roundings of its own
    bound = gain * lengths * (4 * 4 * up_to * 2.0**-24 * max(1.0, float(planes.turning.abs().max())) + 16 * unit(dtype))
    off = float((here - there).abs().max())
    if off <= bound:
        return []
    return [
        kinds.NOT_RELATIVE.at(
            where,
            measured=f"moving two tokens by {shift} positions changes their score by {off:.3g}",
            expected=f"no change, {bound:.2g} at most",
        )
    ]


def _scores(call: RotaryFunction, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    turned = call(q, k, positions)
    return turned.q[:, :1].double() @ turned.k[:, :1].double().transpose(-1, -2)


def check_content(
    call: RotaryFunction, planes: tuple[Planes, Planes], dtype: torch.dtype, up_to: int, where: str, generator: torch.Generator
) -> list[Finding]:
    """Channels that do not turn, and values, come out bit-equal."""
    at = torch.arange(up_to - 3, up_to)[None]
    q = torch.randn(1, call.heads, 3, call.head_dim, generator=generator).to(dtype)
    k = torch.randn(1, call.kv_heads, 3, call.head_dim, generator=generator).to(dtype)
    v = torch.randn(1, call.kv_heads, 3, call.head_dim, generator=generator).to(dtype)
    turned = call(q, k, at, v)
    name = str(dtype).removeprefix("torch.")
    found = []
    if call.takes == "q k v" and turned.v is not None and not torch.equal(turned.v, v):
        off = float((turned.v - v).abs().max())
        found.append(
            kinds.VALUES.at(f"{where}, in {name}", measured=f"values change by up to {off:.3g}", expected="bit-equal values")
        )
    for side, before, after, plane in (("queries", q, turned.q, planes[0]), ("keys", k, turned.k, planes[1])):
        inside = torch.zeros(call.head_dim, dtype=torch.bool)
        inside[plane.start : plane.start + plane.rotary_dim] = True
        if inside.all() or plane.order is not None:
            continue
        if not torch.equal(before[..., ~inside], after[..., ~inside].to(dtype)):
            off = float((before - after)[..., ~inside].abs().max())
            found.append(
                kinds.UNTOUCHED.at(
                    f"{where}, {side} in {name}",
                    measured=f"the {int((~inside).sum())} channels that do not turn change by up to {off:.3g}",
                    expected="bit-equal",
                )
            )
    return found


def one_sided(q: Planes | Finding, k: Planes | Finding, where: str) -> Finding | None:
    """Whether one side turns and the other stands still."""
    for turning, still, names in ((q, k, ("queries", "keys")), (k, q, ("keys", "queries"))):
        if isinstance(turning, Planes) and isinstance(still, Finding) and still.kind is kinds.POSITIONS_IGNORED:
            return kinds.ONE_SIDED.at(where, measured=f"{names[0]} turn, {names[1]} do not", expected="both turn")
    return None


def _resolution(planes: Planes, rounding: float) -> Tensor:
    """Frequencies that the positions at hand cannot tell from 0."""
    return torch.full_like(planes.turning, 64 * rounding)


def _offset(planes: Planes) -> float:
    """The offset in positions, from the slowest pair, which has not turned all the way round yet."""
    slow = int(planes.turning.abs().argmin())
    return float(planes.phase[slow] / planes.turning[slow])


def _repeated(frequencies: Tensor) -> str | None:
    """Signs of a full-width table cut to half width: a frequency that serves two pairs."""
    count = len(frequencies)
    if count < 4 or count % 2 or torch.allclose(frequencies, frequencies[:1], rtol=1e-4, atol=0):
        return None
    some = ", ".join(f"{f:.5g}" for f in frequencies[:4].tolist())
    if torch.allclose(frequencies[::2], frequencies[1::2], rtol=1e-5, atol=0):
        return f"each frequency serves two pairs: {some} … (a table with each column twice was cut in half)"
    if torch.allclose(frequencies[: count // 2], frequencies[count // 2 :], rtol=1e-5, atol=0):
        return f"the frequencies of the first half of the pairs come again in the second: {some} … (every second column of a table in halves)"
    return None


def _slice(planes: Planes) -> str:
    first = ", ".join(map(str, planes.pairs[:2]))
    return f"{len(planes.pairs)} pairs, {first} …"
