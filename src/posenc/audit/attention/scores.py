"""What an attention makes of scores: values, heads, the softmax scale, the bias and its precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from posenc.audit.attention.weights import Attention
from posenc.audit.behaviour.runner import Undrivable
from posenc.audit.findings import Finding
from posenc.audit.kinds.attention import (
    ATTENTION_BIAS,
    ATTENTION_BIAS_ORDER,
    ATTENTION_HEADS,
    ATTENTION_PRECISION,
    ATTENTION_SCALE,
    ATTENTION_VALUES,
)
from posenc.core.bias import ScoreBias, materialize
from posenc.encodings.alibi import alibi_slopes

Outcome = Iterator[Finding | str]
_EQUAL = 1e-3
"""Relative. The mistakes looked for are factors of 2 or √dim, or bend the numbers; rounding is 10⁻⁵ in float32."""


def values(subject: Attention, name: str) -> Outcome:
    """All values equal: what comes out is a multiple of them in every row, the sum of its weights.

    Raises:
        Undrivable: weights that no softmax gives, from which nothing else can be read.
    """
    n = subject.keys
    q, k = subject.draw(subject.heads, n), subject.draw(subject.kv_heads, n, 1)
    one = subject.draw(1, 1, 2)
    out = subject(q, k, one.expand(1, subject.kv_heads, n, -1))[0].flatten(0, 1)
    out = out[out.isfinite().all(-1)]
    if not len(out):
        raise Undrivable("its answers are not finite")
    share = (out * one[0, 0]).sum(-1, keepdim=True) / one.square().sum()
    off = float((out - share * one[0, 0]).norm(dim=-1).max() / one.norm())
    if off > _EQUAL:
        yield ATTENTION_VALUES.at(
            name,
            measured=f"{n} equal values come out {100 * off:.2g} % away from their direction",
            expected="their own direction",
        )
        return
    low, high = float(share.min()), float(share.max())
    weights = subject.weights(q, k).nan_to_num()
    if high > 1 + _EQUAL or float(weights.min()) < -_EQUAL or not weights.any():
        raise Undrivable(f"its weights are not those of a softmax: they sum to {low:.3g} … {high:.3g} in a row")
    if low < 1 - _EQUAL:
        yield f"weights sum to {low:.3g} … {high:.3g} in a row: a sink, or a softmax with something beside the keys"


def heads_read(subject: Attention, name: str) -> Outcome:
    """Which key-value head each query head reads, for values and for keys."""
    heads, groups, n = subject.heads, subject.kv_heads, subject.keys
    if groups == 1 or groups > 16:
        raise Undrivable(f"{groups} key-value head{'s' * (groups > 1)}")
    expected = [head // (heads // groups) for head in range(heads)]
    v = subject.zeros(groups, n)
    v[..., 0] = 1
    v[..., 1] = torch.arange(groups, dtype=v.dtype)[None, :, None]
    out = subject(subject.zeros(heads, n), subject.zeros(groups, n), v)[0, :, -1]
    read = {"values": (out[:, 1] / out[:, 0]).nan_to_num(-1, -1, -1).round().long().tolist()}
    if len(_others(subject)):
        q, own = subject.zeros(heads, n), []
        q[..., -1] = 1
        for group in range(groups):
            k = subject.zeros(groups, n)
            k[0, group, -1, -1] = 30 * subject.head_dim**0.5
            own.append(subject.weights(q, k)[:, -1, -1])
        read["keys"] = torch.stack(own).argmax(0).tolist()
    for what, found in read.items():
        if found != expected:
            tiled = found == [head % groups for head in range(heads)]
            yield ATTENTION_HEADS.at(
                f"{name}, {what}",
                measured=f"query heads read key-value heads {found}" + (": tiled, head % kv_heads" if tiled else ""),
                expected=f"{expected}: head // {heads // groups}",
            )
    if heads != groups and all(found == expected for found in read.values()):
        yield f"{heads} query heads read {groups} key-value heads in groups"


def measured_scale(subject: Attention) -> Tensor:
    """The softmax scale of each head, from the last query against its own key: no rotation and no bias enter.

    Raises:
        Undrivable: scores that are not linear in q·k, or no other key to compare with.
    """
    n = subject.keys
    others = _others(subject)
    if not len(others):
        raise Undrivable("the last query does not see itself and another key")
    other = int(others[-1])
    u = subject.draw(1, 1, 5)[0, 0, 0]
    u = u / u.norm()
    scales: list[Tensor] = []
    for times in (1.0, 3.0):
        sides: list[Tensor] = []
        for sign in (1.0, -1.0):
            q, k = subject.zeros(subject.heads, n), subject.zeros(subject.kv_heads, n)
            q[:, :, -1], k[:, :, -1] = u, sign * times * subject.head_dim**0.5 * u
            weights = subject.weights(q, k)[:, -1]
            sides.append((weights[:, n - 1] / weights[:, other]).log())
        scales.append((sides[0] - sides[1]) / (2 * times * subject.head_dim**0.5))
    if not torch.allclose(scales[0], scales[1], rtol=_EQUAL, atol=1e-9):
        raise Undrivable("scores are not linear in q·k: a soft cap, or norms of queries and keys")
    return scales[0]


def _others(subject: Attention) -> Tensor:
    """The keys that the last query sees beside its own; none where it does not see that."""
    last = subject.seen[-1]
    return last[:-1].nonzero().flatten()[: None if bool(last[-1]) else 0]


def scale_of_scores(subject: Attention, name: str, expected: float) -> Outcome:
    scales = measured_scale(subject)
    low, high = float(scales.min()), float(scales.max())
    if high - low > _EQUAL * abs(high):
        yield f"scales from {low:.4g} to {high:.4g}, by head"
    else:
        yield f"scale {_root(high)}"
    if max(abs(low / expected - 1), abs(high / expected - 1)) <= _EQUAL:
        return
    ratio = high / expected
    width = subject.head_dim**0.5
    reasons = {
        1 / width: ": 1/√head_dim is applied twice",
        width: ": none is applied",
        subject.heads**-0.5: ": √(heads · head_dim) divides",
    }
    reason = next((words for factor, words in reasons.items() if abs(ratio / factor - 1) < _EQUAL), "")
    yield ATTENTION_SCALE.at(name, measured=f"{_root(high)}{reason}", expected=_root(expected))


def bias_on_scores(subject: Attention, name: str, scale: float, bias: ScoreBias | None) -> Outcome:
    """Scores of zero queries and keys are bias alone: their differences to the query's own key."""
    n = subject.keys
    itself = subject.square.diagonal(dim1=-2, dim2=-1)
    if not bool((itself > 0).all()):
        raise Undrivable("queries do not see themselves")
    shown = subject.seen.expand_as(subject.square) & (subject.square > 0)
    found = torch.where(shown, (subject.square.clamp(min=1e-300) / itself[..., None]).log(), 0.0).double()
    if bias is None:
        yield from _described(subject, found, shown)
        return
    promised = materialize(bias, torch.arange(n), dtype=torch.float64).detach()
    promised = promised.reshape(-1, n, n)[-promised.shape[-3] :].expand(subject.heads, n, n)
    promised = torch.where(shown, promised - promised.diagonal(dim1=-2, dim2=-1)[..., None], 0.0)
    size = promised.square().sum()
    if not size:
        raise Undrivable("the expected bias is the same for all keys that are seen")
    ratio = float((found * promised).sum() / size)
    if (found - promised).abs().max() <= _EQUAL * promised.abs().max():
        yield "bias as expected"
        return
    pure = (found - ratio * promised).norm() <= 10 * _EQUAL * promised.norm() * abs(ratio) and abs(ratio) > _EQUAL
    if pure and abs(ratio / scale - 1) < 0.01:
        yield ATTENTION_BIAS_ORDER.at(
            name, measured=f"{ratio:.4g} of the expected bias, the softmax scale", expected="all of it"
        )
        return
    where = (found - promised).abs().argmax()
    head, query, key = (int(index) for index in torch.unravel_index(where, found.shape))
    cases = {2.0: "twice the expected bias", -1.0: "the expected bias with the other sign"}
    named = next((text for factor, text in cases.items() if pure and abs(ratio - factor) < 0.01), None)
    if named is None:
        named = f"{ratio:.4g} times the expected bias" if pure else "another bias"
    if found.abs().max() <= _EQUAL * promised.abs().max():
        named = "no bias"
    yield ATTENTION_BIAS.at(
        name,
        measured=f"{named}: head {head}, query {query}, key {key} has {float(found[head, query, key]):.4g}",
        expected=f"{float(promised[head, query, key]):.4g} there, against the query's own key",
    )


def _described(subject: Attention, found: Tensor, shown: Tensor) -> Iterator[str]:
    n = subject.keys
    lag = (torch.arange(n)[:, None] - torch.arange(n)).double().expand_as(found)
    if found.abs().max() < _EQUAL:
        yield "no bias on the scores"
        return
    past = shown & (lag > 0)
    slopes = torch.stack([-(found[h][past[h]] / lag[h][past[h]]).mean() for h in range(subject.heads)])
    straight = (found + slopes[:, None, None] * lag)[past].abs().max() <= 10 * _EQUAL * found.abs().max()
    if not straight:
        yield f"a bias on the scores, from {float(found.min()):.3g} to {float(found.max()):.3g}"
        return
    alibi = torch.tensor(alibi_slopes(subject.heads), dtype=torch.float64)
    ratio = slopes / alibi
    listed = ", ".join(f"{float(slope):.4g}" for slope in slopes[:8]) + (", …" if subject.heads > 8 else "")
    if (ratio / ratio[0] - 1).abs().max() > 0.01:
        yield f"a bias that falls with distance: slopes {listed}"
    elif abs(float(ratio[0]) - 1) < 0.01:
        yield f"ALiBi: slopes {listed}"
    else:
        yield f"ALiBi times {float(ratio[0]):.4g}: slopes {listed}"


def precision(subject: Attention, name: str) -> Outcome:
    """In bfloat16: scores of 256 and 256.5, formed from numbers that it holds exactly."""
    n = subject.keys
    if n < 2 or not bool(subject.seen[n - 1, n - 2]):
        raise Undrivable("the last query does not see two keys")
    if float(subject.square[:, -1, -1].sub(subject.square[:, -1, -2]).abs().max()) > _EQUAL * float(
        subject.square[:, -1, -1].max()
    ):
        raise Undrivable("neighbouring keys differ by a bias already")
    half = Attention(
        subject.fn, subject.takes, subject.heads, subject.kv_heads, subject.head_dim, n, subject.seed, torch.bfloat16
    )
    scale = float(measured_scale(subject)[0])
    q, k = half.zeros(subject.heads, n), half.zeros(subject.kv_heads, n)
    q[..., -1], q[..., 0] = 16.0, 1.0
    k[..., -1] = 16.0 / scale
    plain = subject.weights(q.to(subject.dtype), k.to(subject.dtype))[:, -1]
    if float((plain / subject.square[:, -1]).sub(1).abs().max()) > _EQUAL:
        raise Undrivable("equal keys are told apart by their positions")
    k[:, :, -1, 0] = 0.5 / scale
    weights = half.weights(q, k)[:, -1].float()
    exact = subject.weights(q.to(subject.dtype), k.to(subject.dtype))[:, -1].float()
    ratio, expected = weights[0, -1] / weights[0, -2], exact[0, -1] / exact[0, -2]
    if not bool((ratio / expected - 1).abs() < 0.1):
        yield ATTENTION_PRECISION.at(
            f"{name}, bfloat16",
            measured=f"scores of 256.5 and 256 get weights of {float(ratio):.3g} to 1",
            expected=f"{float(expected):.3g} to 1",
        )


def _root(scale: float) -> str:
    inverse = 1 / scale**2 if scale else 0.0
    whole = round(inverse)
    return f"{scale:.4g}" + (f" = 1/√{whole}" if whole > 1 and abs(inverse / whole - 1) < 1e-4 else "")
