"""What comes before any angle: sizes, dtypes, and that each token of each head is turned on its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from posenc.audit.findings import Finding
from posenc.audit.kinds import rotary as kinds
from posenc.audit.rotary.call import NAME, RaisedError, RotaryFunction


class Sizes(NamedTuple):
    batch: int
    seq: int


def sizes(call: RotaryFunction, where: str) -> Sizes | Finding:
    """A batch and a length unlike the head counts, or what is wrong when the function works with like ones only.

    Raises:
        ValueError: the function raises with both.
    """
    heads = {call.heads, call.kv_heads, call.head_dim}
    seq = next(n for n in (7, 11, 13, 17) if n not in heads)
    batch = next(n for n in (3, 5, 2, 9) if n not in heads)
    try:
        _call(call, batch, seq)
    except RaisedError as error:
        for axis, size in (("heads", Sizes(batch, call.heads)), ("batch", Sizes(seq, seq))):
            try:
                _call(call, *size)
            except (RaisedError, ValueError):
                continue
            count = size.seq if axis == "heads" else size.batch
            return kinds.AXIS.at(
                where,
                measured=f"works only when the sequence is as long as the {axis} axis ({count}); at length {seq}: {error.__cause__}",
                expected="the angle follows the sequence, whatever the other sizes",
            )
        raise
    return Sizes(batch, seq)


def _call(call: RotaryFunction, batch: int, seq: int) -> None:
    q = torch.ones(batch, call.heads, seq, call.head_dim, dtype=call.dtype)
    call(q, q[:, :1].expand(-1, call.kv_heads, -1, -1), torch.arange(seq).expand(batch, -1))


def check_dtype(call: RotaryFunction, size: Sizes, dtype: torch.dtype, where: str) -> list[Finding]:
    """The result has the dtype of the input."""
    q = torch.ones(size.batch, call.heads, size.seq, call.head_dim, dtype=dtype)
    turned = call(q, q[:, :1].expand(-1, call.kv_heads, -1, -1), torch.arange(size.seq).expand(size.batch, -1))
    sides: dict[torch.dtype, list[str]] = {}
    for side, y in (("queries", turned.q), ("keys", turned.k)):
        sides.setdefault(y.dtype, []).append(side)
    return [_as_dtype(f"{where}, {' and '.join(names)}", got, dtype) for got, names in sides.items() if got != dtype]


def _as_dtype(where: str, got: torch.dtype, wanted: torch.dtype) -> Finding:
    wider = got.is_floating_point and torch.finfo(got).eps < torch.finfo(wanted).eps
    return kinds.DTYPE.at(
        where,
        measured=_name(got),
        expected=_name(wanted),
        severity="note" if wider else "warning" if got.is_floating_point else "error",
    )


def check_axes(call: RotaryFunction, size: Sizes, where: str, generator: torch.Generator) -> list[Finding]:
    """Equal tokens turn by their place in the sequence, not by head or row."""
    vector = call.random(call.head_dim, generator=generator)
    q = vector.expand(size.batch, call.heads, size.seq, -1)
    k = vector.expand(size.batch, call.kv_heads, size.seq, -1)
    turned = call(q, k, torch.arange(size.seq).expand(size.batch, -1))
    sides = (("queries", turned.q), ("keys", turned.k))
    bound = 4 * call.rounding * float(vector.abs().max())  # a vectorized cosine and its scalar tail may differ by an ulp
    return [finding for side, y in sides for finding in _axis(f"{where}, {side}", y.double(), bound)]


def _axis(where: str, y: Tensor, bound: float) -> list[Finding]:
    spread = {axis: float((y - y.narrow(dim, 0, 1)).abs().max()) for dim, axis in enumerate(("batch", "heads", "sequence"))}
    turns = {axis: change > bound for axis, change in spread.items()}
    for axis in ("heads", "batch"):
        if not turns[axis]:
            continue
        first = float((y - y.narrow(0 if axis == "batch" else 1, 0, 1))[:, :, 0].abs().max())
        if axis == "heads" and turns["sequence"] and first <= bound:
            return [
                kinds.AXIS.at(
                    where,
                    measured="heads turn by different angles; head 0 is described",
                    expected="one angle for all heads, unless each has frequencies of its own",
                    severity="note",
                )
            ]
        also = "and along the sequence" if turns["sequence"] else "and not along the sequence"
        return [
            kinds.AXIS.at(
                where,
                measured=f"equal tokens come out different along the {axis} axis, {also}",
                expected="equal tokens at one position come out equal in every head and row",
            )
        ]
    return []


def check_tokens(call: RotaryFunction, size: Sizes, where: str, generator: torch.Generator) -> list[Finding]:
    """Each token is turned by itself, in proportion to its content, and the same each time.

    Raises:
        ValueError: the function is not linear.
    """
    q = call.random(size.batch, call.heads, size.seq, call.head_dim, generator=generator)
    k = call.random(size.batch, call.kv_heads, size.seq, call.head_dim, generator=generator)
    at = torch.arange(size.seq).expand(size.batch, -1)
    first, again = call(q, k, at), call(q, k, at)
    if not (first.q.isfinite().all() and first.k.isfinite().all()):
        return [kinds.NORM.at(where, measured="results that are no finite numbers", expected="finite results of finite inputs")]
    if not (torch.equal(first.q, again.q) and torch.equal(first.k, again.k)):
        return [
            kinds.CALL_ORDER.at(
                where,
                measured="two equal calls give different results",
                expected="one result",
                mend="Take randomness and counters out of it.",
            )
        ]
    double = call(2 * q, 2 * k, at)
    off = float((double.q - 2 * first.q).abs().max() / first.q.abs().max().clamp_min(1e-30))
    if off > 16 * call.rounding:
        raise ValueError(
            f"{NAME}: the function is not linear: twice the queries give another result than twice the result, by {off:.3g} of it. Expected "
            "a rotation alone. Leave norms, biases and scales out of the function."
        )
    found = []
    for side in ("queries", "keys"):
        moved = q.clone() if side == "queries" else k.clone()
        moved[0, 0, 0] += 1
        turned = call(moved, k, at) if side == "queries" else call(q, moved, at)
        changed = torch.cat(((turned.q != first.q).any(-1), (turned.k != first.k).any(-1)), dim=1)
        changed[0, 0 if side == "queries" else call.heads, 0] = False
        if changed.any():
            found.append(
                kinds.AXIS.at(
                    f"{where}, {side}",
                    measured=f"changing the first token of head 0 changes {int(changed.sum())} others",
                    expected="each token of each head is turned on its own",
                    mend="Transpose axes where they are to be exchanged; view and reshape mix tokens and heads.",
                )
            )
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
