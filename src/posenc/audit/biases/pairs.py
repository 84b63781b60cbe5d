"""A bias between pairs of tokens: whether equal distances are alike, and whether tokens stand where the call says."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor

from posenc.audit.biases.buckets import check_buckets
from posenc.audit.biases.profile import Profile, check_profile
from posenc.audit.biases.rules import Expect, promised_bias, promised_buckets
from posenc.audit.findings import Severity
from posenc.audit.kinds import biases as kinds
from posenc.audit.tables.probe import Probe, Sheet, rounded_to
from posenc.core.bias import ScoreBias, materialize
from posenc.core.distance import Direction
from posenc.errors import ShapeError
from posenc.hf.rules import BiasRule

FEW = 24
"""How many tokens the structure is looked at with."""
_SHIFT = 1000
_HIDDEN = -1e4  # below any bias: what masks write, from -10000 in old models to -inf


@final
class Asked:
    """A bias between given positions, whatever the function is called with."""

    def __init__(self, probe: Probe, takes: Literal["positions", "lengths"], heads: int) -> None:
        self.probe, self.takes, self.heads = probe, takes, heads
        self.dtype = torch.float32
        self.unit = 2.0**-24
        self.key_only = False
        self.aligned = True

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        return self.probe(q, k) if self.takes == "positions" else self.probe(len(q), len(k))

    def shaped(self, answer: Tensor, q: int, k: int) -> Tensor | None:
        """``[heads, q, k]`` of an answer, ``None`` if it has another shape."""
        if answer.ndim == 4 and answer.shape[0] == 1:
            answer = answer[0]
        if answer.ndim == 2 and (self.heads == 1 or not answer.dtype.is_floating_point):
            answer = answer[None]
        whole = not answer.dtype.is_floating_point and answer.ndim == 3 and answer.shape[0] == 1
        if answer.ndim != 3 or answer.shape[0] != (1 if whole else self.heads) or answer.shape[2] != k:
            return None
        return answer if answer.shape[1] == q else answer.expand(-1, q, -1) if answer.shape[1] == 1 else None

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        answer = self.raw(q, k)
        shaped = self.shaped(answer, len(q), len(k))
        if shaped is None:
            raise ShapeError(
                f"{self.probe.name}: fn gave {tuple(answer.shape)} for {len(q)} queries and {len(k)} keys. Expected "
                f"({self.heads}, {len(q)}, {len(k)}) or ({self.heads}, 1, {len(k)}). Return all heads, queries before keys."
            )
        self.dtype = answer.dtype
        return shaped.to(torch.float64)

    def maybe(self, q: Tensor, k: Tensor) -> Tensor | None:
        """The same, ``None`` where the function refuses or answers in another shape."""
        answer = self.probe.answers(*((q, k) if self.takes == "positions" else (len(q), len(k))))
        shaped = None if answer is None else self.shaped(answer, len(q), len(k))
        return None if shaped is None else shaped.to(torch.float64)


def _less_own(bias: Tensor, own: Tensor) -> Tensor:
    """Each row less its value at the query's own key, which the softmax does not see."""
    return bias - bias.gather(-1, own.expand(bias.shape[0], -1)[..., None])


def check_pairs(asked: Asked, sheet: Sheet, direction: Direction, expect: Expect, length: int, scale: float) -> None:
    """Structure on a small square, then alignment and positions, then the function of the distance."""
    few = torch.arange(FEW)
    bias = asked(few, few)
    asked.probe.check_repeats(*((few, few) if asked.takes == "positions" else (FEW, FEW)))
    if not asked.dtype.is_floating_point:
        check_buckets(asked, sheet, promised_buckets(expect, direction), direction, length)
        return
    past = torch.ones(FEW, FEW, dtype=torch.bool).tril()
    asked.unit = rounded_to(bias[:, past], asked.dtype)
    ahead = bias[:, ~past]
    masked = bool((ahead <= _HIDDEN).all())
    if masked:
        sheet.described.append("the causal mask is part of it")
    visible = past if masked or direction == "causal" else torch.ones_like(past)
    sheet.checked.append("finite")
    if not bias[:, visible].isfinite().all():
        head, row, column = (~(bias.isfinite() | ~visible)).nonzero()[0].tolist()
        sheet.found(
            kinds.NOT_FINITE,
            f"{bias[head, row, column].item()} in head {head} for a key {row - column} tokens back",
            "finite numbers where attention is allowed",
        )
        return
    relative = _check_relative(sheet, asked, bias, past, visible, direction, expect)
    if asked.takes == "positions":
        sound = _check_positions(sheet, asked, bias, relative, _gravity(expect, asked.heads, direction))
    else:
        # an encoder's queries are its keys, so nothing rests on it there
        sound = _check_alignment(sheet, asked, bias, "note" if direction == "bidirectional" else "error")
        sound = sound or direction == "bidirectional"
    if not relative or not sound or not _check_longer(sheet, asked, bias, past, visible):
        return
    profile = _profile(asked, length, futures=not masked)
    promised = None
    value = promised_bias(expect, asked.heads, direction)
    if value is not None:
        promised = _promised(value, profile, sheet)
    check_profile(sheet, profile, expect, promised, direction, scale)
    if asked.key_only:
        sheet.described.append("a term of the key alone, the same after the softmax")


def _check_relative(
    sheet: Sheet, asked: Asked, bias: Tensor, past: Tensor, visible: Tensor, direction: Direction, expect: Expect
) -> bool:
    """Whether equal distances get equal biases."""
    sheet.checked.append("equal distances alike")
    # two roundings for each of the two numbers of a head that are compared
    close = 4 * asked.unit * bias.masked_fill(~visible, 0).abs().amax((-2, -1))
    less = _less_own(bias, torch.arange(FEW)[None])
    if not (_uneven(bias, visible) > close).any():
        return True
    if not (_uneven(less, visible) > close).any():
        asked.key_only = True
        return True
    if direction == "bidirectional" and not (torch.minimum(_uneven(bias, past), _uneven(less, past)) > close).any():
        sheet.found(
            kinds.SHIFT,
            "keys at one distance in the past get one bias, in the future several",
            "one bias for each distance on both sides",
        )
        return False
    sheet.described.append("not a function of the distance")
    gravity = _gravity(expect, asked.heads, direction)
    if gravity is not None:
        sheet.found(
            kinds.NOT_RELATIVE,
            f"biases of one distance differ by up to {_uneven(less, visible).max().item():.3g} within {FEW} tokens",
            "one bias for each distance, up to a constant per query",
            gravity,
        )
    return False


def _check_longer(sheet: Sheet, asked: Asked, bias: Tensor, past: Tensor, visible: Tensor) -> bool:
    """Whether the same tokens have the same bias in a longer call."""
    more = torch.arange(2 * FEW)
    longer = asked.maybe(more, more)
    if longer is None:
        sheet.skipped["longer calls"] = f"fn refuses {2 * FEW} tokens"
        return True
    sheet.checked.append("longer calls")
    own = torch.arange(FEW)[None]
    got, right = _less_own(longer[:, :FEW, :FEW], own), _less_own(bias, own)
    close = _close(asked, longer)
    if _alike(got.masked_fill(~visible, 0), right.masked_fill(~visible, 0), close):
        return True
    behind = _alike(got.masked_fill(~past, 0), right.masked_fill(~past, 0), close)
    sheet.found(
        kinds.SHIFT if behind else kinds.CALL_DEPENDENT,
        f"the first {FEW} tokens have other biases in a call of {2 * FEW}" + (", towards the future only" if behind else ""),
        "one bias for each pair of tokens, whatever the call's length",
    )
    return False


def _gravity(expect: Expect, heads: int, direction: Direction) -> Severity | None:
    """Of a bias that is no function of the distance: an error where it is promised to be one, nothing where it is not."""
    value = promised_bias(expect, heads, direction)
    if value is not None:
        return "error" if value.reads_distance_only else None
    return "note" if expect is None or (isinstance(expect, BiasRule) and expect.kind not in ("alibi", "t5")) else "error"


def _uneven(bias: Tensor, visible: Tensor) -> Tensor:
    """How much entries of one distance differ at most, per head."""
    rows, columns = visible.nonzero().T
    distance = rows - columns + visible.shape[1]
    values = bias[:, rows, columns]
    index = distance.expand_as(values)
    shape = (len(bias), 2 * visible.shape[1])
    high = torch.full(shape, -torch.inf, dtype=values.dtype).scatter_reduce(1, index, values, "amax")
    low = torch.full(shape, torch.inf, dtype=values.dtype).scatter_reduce(1, index, values, "amin")
    return (high - low).masked_fill(high < low, 0).amax(-1)


def _close(asked: Asked, *biases: Tensor) -> float:
    return 8 * asked.unit * max(b.nan_to_num().masked_fill(b <= _HIDDEN, 0).abs().max().item() for b in biases)


def _alike(a: Tensor, b: Tensor, close: float) -> bool:
    """Whether biases are equal, but for what a mask hides anyway: in the future of a causal bias anything may stand."""
    hidden = ((a <= _HIDDEN) & (b <= _HIDDEN)) | (a.isnan() & b.isnan())
    return bool(((a - b).abs().masked_fill(hidden, 0) <= close).all())


def _check_alignment(sheet: Sheet, asked: Asked, bias: Tensor, gravity: Severity) -> bool:
    """Whether fewer queries than keys are the last ones."""
    sheet.checked.append("fewer queries than keys")
    keys = torch.arange(FEW)
    for queries in (1, 3):
        got = asked.maybe(keys[-queries:], keys)
        expected = bias[:, -queries:]
        if got is None:
            answer = asked.probe.answers(queries, FEW)
            if answer is None:
                sheet.skipped["fewer queries than keys"] = f"fn refuses {queries} queries and {FEW} keys"
                return True
            sheet.found(
                kinds.ALIGNMENT,
                f"{queries} queries and {FEW} keys give a bias of shape {tuple(answer.shape)}",
                f"one bias per key, ({asked.heads}, {queries}, {FEW})",
                gravity,
            )
            asked.aligned = False
            return False
        own = keys[-queries:][None]
        close = _close(asked, expected, got)
        if _alike(_less_own(got, own), _less_own(expected, own), close):
            continue
        top = _alike(got, bias[:, :queries], close)
        sheet.found(
            kinds.ALIGNMENT,
            f"{queries} quer{'y' if queries == 1 else 'ies'} with {FEW} keys get the rows of the "
            + ("first tokens" if top else "wrong tokens"),
            "the rows of the last tokens",
            gravity,
        )
        asked.aligned = False
        return False
    return True


def _check_positions(sheet: Sheet, asked: Asked, bias: Tensor, relative: bool, gravity: Severity | None) -> bool:
    """Whether queries and keys stand where their positions say: alone, with gaps, far along."""
    sheet.checked += ["positions, not places in the call", "fewer queries than keys"]
    keys = torch.arange(FEW)
    one = asked.maybe(keys[-1:], keys)
    if one is None or not _alike(
        _less_own(one, keys[-1:][None]), _less_own(bias[:, -1:], keys[-1:][None]), _close(asked, bias)
    ):
        answer = one if one is not None else asked.probe.answers(keys[-1:], keys)
        what = "nothing" if answer is None else f"a bias of shape {tuple(answer.shape)}" if one is None else "another bias"
        sheet.found(
            kinds.POSITIONS_IGNORED,
            f"a query at position {FEW - 1} alone gets {what}, not the one it has among others",
            "the bias of its own distances",
        )
        return False
    gaps = torch.tensor([0, 0, 0, 1, 2, 5, 9, 10])  # left padding, then a gap as after a cut document
    got = asked.maybe(gaps, gaps)
    if got is None:
        sheet.skipped["positions with gaps"] = "fn refuses them"
    else:
        own = torch.arange(len(gaps))[None]
        right = _less_own(bias[:, gaps][:, :, gaps], own)
        mine = _less_own(got, own)
        past = gaps[:, None] >= gaps
        if not _alike(mine.masked_fill(~past, 0), right.masked_fill(~past, 0), _close(asked, bias)):
            by_place = bias[:, : len(gaps), : len(gaps)]
            ignored = _alike(got, by_place, _close(asked, bias))
            sheet.found(
                kinds.POSITIONS_IGNORED,
                f"positions {gaps.tolist()} get the biases of "
                + (f"{list(range(len(gaps)))}" if ignored else "other distances than theirs"),
                "the biases of the distances between these positions",
            )
            return False
    far = asked.maybe(keys + _SHIFT, keys + _SHIFT)
    if far is None or not relative:
        return True
    own = keys[None]
    past = keys[:, None] >= keys
    # float32 positions of this size may be subtracted after they were multiplied by the slope
    close = _close(asked, bias) * (1 if not asked.key_only else _SHIFT / FEW)
    mine, right = _less_own(far, own).masked_fill(~past, 0), _less_own(bias, own).masked_fill(~past, 0)
    if not _alike(mine, right, close):
        sheet.described.append(f"a function of the distance near the start of a text, another one {_SHIFT:,} tokens on")
        if gravity is not None:
            sheet.found(
                kinds.NOT_RELATIVE,
                f"{_SHIFT:,} tokens on, biases differ by up to {(mine - right).abs().max().item():.3g}",
                "one bias for each distance (FIRE and absolute terms are none)",
                gravity,
            )
    return True


def _profile(asked: Asked, length: int, *, futures: bool) -> Profile:
    """The bias by distance, as far as asked and as the function goes."""
    while True:
        query, keys = torch.tensor([length]), torch.arange((2 if futures else 1) * length + 1)
        if asked.takes == "positions":
            row = asked.maybe(query, keys)
            if row is not None:
                less = _less_own(row, query[None])[:, 0]
                past, ahead = less[:, : length + 1].flip(-1), less[:, length:] if futures else None
                break
        else:
            span = torch.arange(length + 1)
            row = asked.maybe(span[-1:], span) if asked.aligned else None
            side = torch.arange(min(length, 512) + 1)
            square = asked.maybe(side, side)
            if square is not None:
                row = square[:, -1:] if row is None else row
                past = _less_own(row, torch.tensor([[row.shape[-1] - 1]]))[:, 0].flip(-1)
                ahead = _less_own(square[:, :1], torch.tensor([[0]]))[:, 0] if futures else None
                break
        if length <= FEW:  # this much was answered before
            square = asked(torch.arange(FEW), torch.arange(FEW))
            less = _less_own(square, torch.arange(FEW)[None])
            row, past, ahead = square[:, -1:], less[:, -1].flip(-1), less[:, 0] if futures else None
            break
        length //= 2
    largest = row[:, 0].masked_fill(row[:, 0] <= _HIDDEN, 0).abs().amax(-1)
    return Profile(past, ahead, asked.dtype, largest, asked.unit)


def _promised(value: ScoreBias, profile: Profile, sheet: Sheet) -> Profile | None:
    """The promise by distance, at the same places."""
    farthest = profile.past.shape[-1] - 1
    if value.axes > 1 or value.lengths != (None, None):
        sheet.skipped["promise"] = "it is made for other positions than those of a line"
        return None
    if value.heads not in (1, len(profile.past)):
        raise ShapeError(
            f"check_bias: a promise of {value.heads} heads for a bias of {len(profile.past)}. Expected as many. Slice it: "
            "slice_heads(bias, slice(first, last))."
        )
    query, keys = torch.tensor([farthest]), torch.arange(2 * farthest + 1)
    with torch.no_grad():
        row = materialize(value, query, keys, dtype=torch.float64).expand(len(profile.past), -1, -1)
    less = _less_own(row, query[None])[:, 0]
    largest = row[:, 0].abs().amax(-1)
    return Profile(less[:, : farthest + 1].flip(-1), less[:, farthest:], torch.float64, largest, 2.0**-53)
