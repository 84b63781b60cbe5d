"""What a bias is as a function of the distance: a line per head, buckets, something that falls, or anything else."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose
from typing import final

import torch
from torch import Tensor

from posenc.audit.biases.rules import (
    FROM_ZERO,
    RELEASED,
    SHIPPED,
    Expect,
    alike,
    max_distances,
    promised_buckets,
    rule_of,
    slopes_by_rule,
)
from posenc.audit.kinds import biases as kinds
from posenc.audit.tables.probe import Sheet, listed, rounded_to
from posenc.core.distance import Direction, bucket_starts
from posenc.hf.rules import BiasRule

# A line rounded to bfloat16 is off by 2^-8 of its value; a logarithm or power over the distances probed by the order of 1.
_STRAIGHT = 2.0**-6


@final
@dataclass(frozen=True)
class Profile:
    """A bias by distance, in float64, less its value at distance 0, which the softmax does not see.

    Args:
        past: ``[heads, distances]`` from 0 on.
        future: the same towards the future, ``None`` where nothing is visible.
        dtype: in which the bias came.
        largest: the largest magnitude that was rounded to it.
        unit: the unit roundoff of what it was rounded to.
    """

    past: Tensor
    future: Tensor | None
    dtype: torch.dtype
    largest: Tensor
    unit: float

    @property
    def rounding(self) -> Tensor:
        """How far float32 arithmetic may be off, per head: the slope, the product and the difference, each rounded once."""
        return 4 * 2.0**-24 * self.largest

    @property
    def slopes(self) -> Tensor | None:
        """The slope of each head towards the past, ``None`` if some head is no line."""
        slopes = fitted(self.past)
        return slopes if straight(self.past, slopes) else None


def fitted(profile: Tensor) -> Tensor:
    """The slope of the line through 0 that is closest to each head, positive where it falls."""
    distance = torch.arange(profile.shape[-1], dtype=torch.float64)
    return 0.0 - (profile @ distance) / distance.square().sum()


def straight(profile: Tensor, slopes: Tensor) -> bool:
    """Whether each head is a line, rounded at most to half precision."""
    distance = torch.arange(profile.shape[-1], dtype=torch.float64)
    size = profile.abs().amax(-1, keepdim=True)
    return bool(((profile + slopes[:, None] * distance).abs() <= _STRAIGHT * size).all())


def check_profile(
    sheet: Sheet, profile: Profile, expect: Expect, promised: Profile | None, direction: Direction, scale: float
) -> None:
    """All that can be asked of a function of the distance."""
    sheet.checked += ["sign", "slopes", "precision at long distance"]
    past = profile.past
    slopes = profile.slopes
    if not past.any() and (profile.future is None or not profile.future.any()):
        sheet.described.append("the same for all distances: no bias, or a table of zeros")
    elif slopes is not None:
        _check_line(sheet, profile, slopes, expect, promised, direction, scale)
        return
    elif stepped(past):
        check_steps(sheet, profile, expect, direction)
    else:
        _describe(sheet, past)
    if _named(expect) == "alibi":
        sheet.found(kinds.FORMULA, sheet.described[-1], "a line of the distance in each head, -slope · distance")
    elif _named(expect) == "t5" and past.any() and not stepped(past):
        sheet.found(kinds.FORMULA, sheet.described[-1], "buckets of the distance")
    elif promised is not None:
        _compare(sheet, profile, promised)


def _named(expect: Expect) -> str | None:
    """The kind of bias that a promise names without making it."""
    return expect.kind if isinstance(expect, BiasRule) else expect if isinstance(expect, str) else None


def _describe(sheet: Sheet, past: Tensor) -> None:
    falls = past.diff(dim=-1) <= 0
    if falls.all():
        sheet.described.append("falls with the distance, not as a line")
    else:
        count = int(falls.all(-1).sum())
        sheet.described.append(
            "a function of the distance"
            + (f", falling in {count} of {len(past)} heads" if count else ", not falling throughout")
        )


def _check_line(
    sheet: Sheet,
    profile: Profile,
    slopes: Tensor,
    expect: Expect,
    promised: Profile | None,
    direction: Direction,
    scale: float,
) -> None:
    biased = slopes.abs() > 0
    sheet.described.append("ALiBi: -slope · distance" if (slopes >= 0).all() else "a line of the distance")
    sheet.described.append(f"slopes {listed(slopes, 16)}")
    if biased.any() and not biased.all():
        sheet.described.append(f"{int(biased.sum())} of {len(slopes)} heads carry a bias")
    # the fit runs over all distances, so half precision's rounding, 2^-9 of each value, averages out to less
    close = 2.0**-8 if profile.dtype in (torch.bfloat16, torch.float16) or _rounded(profile, slopes) else 1e-5
    rule = rule_of(slopes.abs(), close)
    sheet.described.append(SHIPPED.get(rule or "", "slopes of no released rule"))
    _check_future(sheet, profile, slopes, direction)
    if (slopes < 0).any():
        heads = (slopes < 0).nonzero().flatten().tolist()
        sheet.found(
            kinds.SIGN,
            f"the bias grows by {-slopes.min().item():.6g} per step into the past"
            + ("" if len(heads) == len(slopes) else f" in heads {heads}"),
            "a bias that falls with the distance",
        )
        return
    _check_precision(sheet, profile, slopes)
    wanted = None if promised is None else promised.slopes
    if wanted is not None:
        _compare_slopes(sheet, slopes, wanted, scale, close)
        if direction == "bidirectional" and promised is not None and not sheet.has(kinds.FUTURE, kinds.SLOPES):
            _compare_future(sheet, profile, promised, close)
    elif promised is not None:
        sheet.found(kinds.FORMULA, "a line of the distance", "the promised function of the distance, which is none")
    elif _named(expect) == "t5":
        sheet.found(kinds.FORMULA, "a line of the distance", "buckets of the distance")
    elif rule is None or rule == FROM_ZERO:
        _check_known(sheet, slopes, expect, rule, scale, close)


def _rounded(profile: Profile, slopes: Tensor) -> bool:
    return bool((_off(profile, slopes) > profile.rounding[:, None]).any())


def _off(profile: Profile, slopes: Tensor) -> Tensor:
    distance = torch.arange(profile.past.shape[-1], dtype=torch.float64)
    return (profile.past + slopes[:, None] * distance).abs()


def _check_future(sheet: Sheet, profile: Profile, slopes: Tensor, direction: Direction) -> None:
    future = profile.future
    if future is None:
        return
    ahead = fitted(future)
    if not future.any():
        sheet.described.append("keys in the future: no bias")
    elif not straight(future, ahead):
        sheet.described.append("keys in the future: another function of the distance")
    elif alike(ahead, slopes, 2.0**-8):
        sheet.described.append("symmetric: past and future alike")
    elif alike(ahead, -slopes, 2.0**-8):
        sheet.described.append("signed: keys in the future are favoured, for causal attention only")
    else:
        sheet.described.append(f"slopes towards the future {listed(ahead, 16)}")
    sheet.checked.append("keys in the future")
    if direction == "bidirectional" and (ahead[slopes > 0] < 0).any():
        worst = int((-ahead).argmax())
        sheet.found(
            kinds.FUTURE,
            f"the bias of head {worst} grows by {-ahead[worst].item():.6g} per step into the future",
            "a bias that does not grow with the distance on either side",
        )


def _check_precision(sheet: Sheet, profile: Profile, slopes: Tensor) -> None:
    """Neighbouring distances keep their own values, and the line is as exact as float32."""
    off = _off(profile, slopes)
    same = (profile.past.diff(dim=-1) == 0) & (slopes > 0)[:, None]
    if not same.any() and not _rounded(profile, slopes):
        return
    measured = f"off by {off.max().item():.3g} at distance {int(off.amax(0).argmax()):,}, in {profile.dtype}"
    if same.any():
        first = int(same.any(0).nonzero()[0])
        measured = (
            f"distances {first:,} and {first + 1:,} share a value, and {int(same.any(0).sum()) - 1:,} more neighbours up to "
            f"{profile.past.shape[-1] - 1:,}; {measured}"
        )
    sheet.found(kinds.PRECISION, measured, f"off by {profile.rounding.max().item():.2g} at most, as in float32")


def _check_known(sheet: Sheet, slopes: Tensor, expect: Expect, rule: str | None, scale: float, close: float) -> None:
    """Slopes of no released rule: a known mistake, or something learned."""
    released = slopes_by_rule(len(slopes))[RELEASED]
    if rule == FROM_ZERO and len(slopes) > 1:
        sheet.found(kinds.SLOPES, f"slopes {listed(slopes)}: 2^(-8j/heads) with j from 0", f"slopes {listed(released)}")
    elif not isclose(scale, 1, rel_tol=1e-6) and rule_of(slopes / scale, max(close, 1e-4)) in SHIPPED:
        sheet.found(
            kinds.SCALE_ORDER, f"slopes {listed(slopes)}, {scale:.6g} of the released ones", f"slopes {listed(slopes / scale)}"
        )
    elif alike(slopes.sort().values, released.sort().values, close):
        sheet.found(kinds.HEAD_ORDER, f"slopes {listed(slopes, 16)}", f"slopes {listed(released, 16)}")
    elif expect == "alibi":
        sheet.found(kinds.SLOPES, f"slopes {listed(slopes, 16)}", f"slopes {listed(released, 16)}")


def _compare_slopes(sheet: Sheet, slopes: Tensor, wanted: Tensor, scale: float, close: float) -> None:
    """Against promised slopes."""
    sheet.checked.append("promise")
    close = max(close, 1e-5)
    if alike(slopes, wanted, close):
        return
    measured, expected = f"slopes {listed(slopes, 16)}", f"slopes {listed(wanted, 16)}"
    if not torch.equal(slopes != 0, wanted != 0):
        sheet.found(kinds.HEADS, measured, expected)
    elif not isclose(scale, 1, rel_tol=1e-6) and alike(slopes / scale, wanted, max(close, 1e-4)):
        sheet.found(kinds.SCALE_ORDER, f"{measured}, {scale:.6g} of the promised ones", expected)
    elif alike(slopes.sort().values, wanted.sort().values, close):
        sheet.found(kinds.HEAD_ORDER, measured, expected)
    else:
        sheet.found(kinds.SLOPES, measured, expected)


def _compare_future(sheet: Sheet, profile: Profile, promised: Profile, close: float) -> None:
    if profile.future is None or promised.future is None:
        return
    slopes, wanted = fitted(profile.future), fitted(promised.future)
    if not alike(slopes, wanted, max(close, 1e-5)):
        sheet.found(
            kinds.SLOPES, f"slopes towards the future {listed(slopes, 16)}", f"slopes towards the future {listed(wanted, 16)}"
        )


def _compare(sheet: Sheet, profile: Profile, promised: Profile) -> None:
    """Against a promise that is no line."""
    sheet.checked.append("promise")
    count = min(profile.past.shape[-1], promised.past.shape[-1])
    mine, theirs = profile.past[:, :count], promised.past[:, :count]
    # the promise is float32 or wider and so must this be; in half precision it may be off by a roundoff on both ends
    close = 4 * max(profile.unit, 2.0**-21) * max(profile.largest.max().item(), promised.largest.max().item())
    sides = [("past", mine, theirs)]
    if profile.future is not None and promised.future is not None:
        ahead = min(profile.future.shape[-1], promised.future.shape[-1])
        sides.append(("future", profile.future[:, :ahead], promised.future[:, :ahead]))
        a, b = profile.future[:, :ahead], promised.past[:, :ahead]
        c, d = profile.past[:, :ahead], promised.future[:, :ahead]
        differs = (promised.past[:, :ahead] - promised.future[:, :ahead]).abs().max() > close
        if differs and (a - b).abs().max() <= close and (c - d).abs().max() <= close:
            sheet.found(kinds.BUCKET_SIDES, "past keys have the promised bias of future ones, and the reverse", "each its own")
            return
    for side, a, b in sides:
        off = (a - b).abs().amax(0)
        if off.max() > close:
            first = int((off > close).nonzero()[0])
            kind = kinds.BUCKETS if stepped(theirs) and stepped(mine) else kinds.FORMULA
            sheet.found(
                kind,
                f"{side}: distance {first:,} is the first that differs, by {off[first].item():.3g}",
                "the promised bias of each distance",
            )
            return


def stepped(past: Tensor) -> bool:
    """Whether a bias stays the same over runs of distances that are not the last: buckets."""
    starts = edges(past)
    widths = torch.tensor(starts).diff()
    return len(starts) > 3 and bool((widths > 1).any()) and bool((widths.diff() >= -1).all())


def edges(profile: Tensor) -> tuple[int, ...]:
    """The first distance of each run of equal values."""
    changes = (profile.diff(dim=-1) != 0).any(0).nonzero().flatten() + 1
    return (0, *changes.tolist())


def check_steps(sheet: Sheet, profile: Profile, expect: Expect, direction: Direction) -> None:
    """Runs of equal bias: which of T5's rules makes them."""
    sheet.checked.append("bucket edges")
    rule = promised_buckets(expect, direction) if isinstance(expect, BiasRule) else None
    sides = [("past", edges(profile.past))]
    if direction == "bidirectional" and profile.future is not None and profile.future.any():
        sides.append(("future", edges(profile.future)))
    count = len(sides[0][1]) * len(sides)
    for side, starts in sides:
        found = max_distances(starts)
        if rule is not None and starts != rule.starts[: len(starts)]:
            at = next((i for i, (a, b) in enumerate(zip(starts, rule.starts, strict=False)) if a != b), len(rule.starts) - 1)
            sheet.found(
                kinds.BUCKETS,
                f"{side}: {len(starts)} buckets, the last from distance {starts[-1]} on",
                f"{len(rule.starts)}, bucket {at} from distance {rule.starts[at]} on",
            )
        if found:
            farthest = f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]} (cannot be told apart)"
            sheet.described.append(
                f"T5 buckets, {side}: {len(starts)}, max distance {farthest}"
                if len(sides) > 1
                else f"T5 buckets: {count}, {direction}, max distance {farthest}"
            )
            continue
        # of a few numbers in half precision two are often equal by chance
        chance = len(profile.past) < 4 and rounded_to(profile.past, profile.dtype) > 2.0**-24
        near = None if chance else _nearest(starts)
        sheet.described.append(f"buckets of the distance, {side}: {len(starts)}, of no T5 rule")
        if rule is not None or (near is None and expect != "t5"):
            continue
        exact = tuple(range(len(starts))) if near is None else near
        at = next((i for i, (a, b) in enumerate(zip(starts, exact, strict=False)) if a != b), len(starts) - 1)
        sheet.found(
            kinds.BUCKETS,
            f"{side}: bucket {at} starts at distance {starts[at]}",
            f"at distance {exact[at]}, as T5's rule for {len(starts)} buckets has it" if near else "the edges of a T5 rule",
        )


def _nearest(starts: tuple[int, ...]) -> tuple[int, ...] | None:
    """The edges of the T5 rule that these miss by rounding only: each by two distances at most."""
    exact = len(starts) // 2
    if exact < 2 or len(starts) - exact < 2 or starts[: exact - 1] != tuple(range(exact - 1)):
        return None
    guess = exact * (starts[-1] / exact) ** ((len(starts) - exact) / (len(starts) - exact - 1))
    candidates = {round(guess), *(2**power for power in range(4, 14))}
    best: tuple[int, tuple[int, ...]] | None = None
    for farthest in sorted(candidates):
        if farthest > exact:
            right = bucket_starts(len(starts), farthest)
            miss = max(abs(a - b) for a, b in zip(starts, right, strict=True))
            if miss <= 2 and (best is None or miss < best[0]):
                best = (miss, right)
    return None if best is None else best[1]
