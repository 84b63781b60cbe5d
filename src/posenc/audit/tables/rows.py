"""What the rows of a table must be, whatever makes them: numbers, different from each other, and a code where one is promised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from posenc.audit.kinds import tables as kinds
from posenc.audit.tables.codes import Code, apart, read_code
from posenc.audit.tables.probe import Sheet, evaluating, listed, unit
from posenc.audit.tables.promises import check_released, compare_codes
from posenc.core.sites import InputEncoding
from posenc.hf.rules import InputTable

Promise = InputEncoding | InputTable | str | None


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two calls gave the same rows: vectorised sines and products of another shape differ in the last bits."""
    if a.shape != b.shape:
        return False
    a, b = a.to(torch.float64), b.to(torch.float64)
    return bool(((a - b).abs() <= 64 * 2.0**-24 * b.abs().amax().clamp(min=1e-30)).all())


def promised_rows(expect: InputEncoding, positions: Tensor, width: int) -> Tensor:
    """The rows of an encoding of posenc, in float64: what it adds to nothing."""
    try:
        with torch.no_grad(), evaluating(expect):
            return expect(torch.zeros(len(positions), width, dtype=torch.float64), positions)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"check_table: the promised {type(expect).__name__} has no code for {len(positions)} positions and width {width} "
            f"({error}). Expected an encoding of this width, length and kind of positions. Build it like the table."
        ) from error


def extent(accepts: Callable[[int], bool], tried: int) -> int:
    """The largest number of rows up to ``tried`` that a table has, given that it has one."""
    if accepts(tried):
        return tried
    low, high = 1, tried
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return low


def twins(rows: Tensor) -> tuple[int, int, int] | None:
    """The first two equal rows, and how many different ones there are; ``None`` if all differ."""
    generator = torch.Generator().manual_seed(0)
    marks = rows @ torch.randn(rows.shape[-1], dtype=torch.float64, generator=generator)
    order = marks.argsort(stable=True)
    neighbours = (rows[order[1:]] == rows[order[:-1]]).all(-1)  # equal rows have equal marks, so they come together
    if not neighbours.any():
        return None
    pairs = torch.stack([order[:-1][neighbours], order[1:][neighbours]]).sort(0).values
    at = int(pairs[1].argmin())
    return int(pairs[0, at]), int(pairs[1, at]), len(rows) - int(neighbours.sum())


@final
class Rows:
    """Consecutive rows of a table, in float64, and the dtype they came in."""

    def __init__(self, rows: Tensor, spacing: float = 1.0, *, one: str = "position") -> None:
        self.dtype, self.spacing, self.one = rows.dtype, spacing, one
        self.rows = rows.to(torch.float64)
        self.code: Code | None = None
        self.padding: int | None = None

    @property
    def positions(self) -> Tensor:
        return torch.arange(len(self.rows), dtype=torch.float64) * self.spacing

    def check_numbers(self, sheet: Sheet, length: int | None = None) -> bool:
        """Integers, infinities, one row for all. False when there is nothing more to look at."""
        sheet.checked += ["floating point", "finite", "rows differ"]
        if not self.dtype.is_floating_point:
            different = len(self.rows.unique(dim=0))
            sheet.found(
                kinds.INTEGER, f"a table of {self.dtype} with {different} different rows of {len(self.rows)}", "floating point"
            )
            return False
        good = self.rows.isfinite().all(-1)
        if not good.all():
            first = int((~good).nonzero()[0])
            if first > 0 and not good[first:].any() and first >= (length or 8):
                self._ends(sheet, first, "are not finite", length, "error")
            else:
                entry = self.rows[first][~self.rows[first].isfinite()][0].item()
                sheet.found(kinds.NOT_FINITE, f"the row of {self.one} {first} holds {entry}", "finite numbers")
                return False
        if len(self.rows) > 1 and bool((self.rows == self.rows[0]).all()):
            zeros = not self.rows.any()  # a learned table may start so
            what = "zeros, as before training" if zeros else listed(self.rows[0])
            sheet.found(
                kinds.SAME_ROW,
                f"{len(self.rows)} {self.one}s, every one {what}",
                "a row of its own for each",
                "warning" if zeros else None,
            )
            return False
        return True

    def check_end(self, sheet: Sheet, length: int | None, tried: int, accepts: Callable[[int], bool]) -> None:
        """Where the table ends, and what it does there; cuts the rows to those that are its own.

        Args:
            tried: how many rows were asked for.
            accepts: whether the table takes so many.
        """
        sheet.checked.append("past the end")
        count = len(self.rows)
        wraps = self._wraps()
        clamps = None if wraps else self._clamps()
        if wraps:
            self._ends(sheet, wraps, "repeat the first ones", length, "warning")
        elif clamps:
            self._ends(sheet, clamps, "all read the last row", length, "note")
        elif length is not None and (count < min(length, tried) or not accepts(length)):
            least = "" if count < tried else "at least "
            sheet.found(
                kinds.PAST_END,
                f"{least}{count:,} rows; {self.one} {count if count < tried else length - 1:,} raises",
                f"{length:,} rows, as promised (an offset needs as many rows more)",
            )
        elif count < tried:
            sheet.described.append(f"{count:,} rows, raises past the end")
        else:
            sheet.described.append(f"{count:,} rows and more")

    def _ends(self, sheet: Sheet, end: int, words: str, length: int | None, severity: str) -> None:
        short = length is not None and end < length
        sheet.found(
            kinds.PAST_END,
            f"{self.one}s from {end:,} on {words}",
            f"{length:,} rows, as promised" if short else "an error for positions past the end",
            "error" if short or severity == "error" else "warning" if severity == "warning" else "note",
        )
        sheet.described.append(f"{end:,} rows; those past the end {words}")
        self.rows = self.rows[:end]

    def _wraps(self) -> int | None:
        again = (self.rows[8:] == self.rows[0]).all(-1).nonzero()
        if not len(again):
            return None
        period = int(again[0]) + 8
        rest = self.rows[period : 2 * period]
        return period if len(rest) > 1 and torch.equal(rest, self.rows[: len(rest)]) else None

    def _clamps(self) -> int | None:
        still = (self.rows == self.rows[-1]).all(-1)
        end = len(self.rows) - int(still.flip(0).to(torch.int64).cumprod(0).sum()) + 1
        # positions rounded to half precision repeat rows everywhere, not at the end only
        return end if 1 < end < len(self.rows) and twins(self.rows[:end]) is None else None

    def check_distinct(self, sheet: Sheet, length: int | None = None) -> None:
        """A row of its own for each position that the table promises to hold, also after a cast to bfloat16."""
        sheet.checked += ["rows distinct", "rows distinct in bfloat16"]
        rows = self.rows[:length]
        found = twins(rows)
        if found is not None:
            first, second, different = found
            whole = bool((self.rows == self.rows.round()).all())
            sheet.found(
                kinds.INTEGER if whole else kinds.COLLIDE,
                f"{self.one}s {first:,} and {second:,} share a row; {different:,} different rows of {len(rows):,}"
                + (", all of whole numbers" if whole else ""),
                f"{len(rows):,} different rows",
            )
            return
        found = twins(rows.to(torch.bfloat16).to(torch.float64))
        if found is not None:
            first, second, different = found
            sheet.found(
                kinds.COLLIDE,
                f"cast to bfloat16, {self.one}s {first:,} and {second:,} share a row; {different:,} different rows of {len(rows):,}",
                "different rows in the dtype of the model",
                "note",
            )

    def check_code(self, sheet: Sheet, expect: Promise, promised: Tensor | None = None) -> None:
        """What formula the rows follow, and whether it is the promised one.

        Args:
            promised: the rows that the promise stands for, where it can make them.
        """
        sheet.checked.append("formula")
        self.code = self._read(sheet)
        if self.code is not None:
            sheet.described += self.code.described()
            self._check_angles(sheet, self.code)
        else:
            mistake = apart(self.rows, self.positions)
            if mistake is not None:
                sheet.described.append("sinusoidal, with a speed of its own in each channel")
                sheet.found(
                    kinds.FORMULA,
                    f"sine and cosine of a pair turn at different speeds: {mistake}",
                    "one speed for both channels of a pair, base^(-2i/width) with i counting pairs",
                )
            else:
                sheet.described.append(self._without_formula())
        if promised is not None:
            self._compare(sheet, promised)
        elif expect == "sinusoidal" or (isinstance(expect, InputTable) and expect.kind == "sinusoidal"):
            check_released(sheet, self.code, expect if isinstance(expect, InputTable) else None)

    def _read(self, sheet: Sheet) -> Code | None:
        """The code; a row of zeros near the start is for padding, and those before it are of no token."""
        zero = (self.rows[:8] == 0).all(-1).nonzero()
        if not len(zero):
            return read_code(self.rows, self.spacing, resolution=unit(self.dtype))
        after = int(zero[-1]) + 1
        code = read_code(self.rows[after:], self.spacing, resolution=unit(self.dtype))
        if code is None:
            return None
        self.padding = after - 1
        sheet.described.append(f"row {self.padding} is zero, for padding")
        return replace(code, offset=code.offset - after * self.spacing)

    def _without_formula(self) -> str:
        block = 0
        for width in range(4, self.rows.shape[-1], 2):
            if read_code(self.rows[:, :width], self.spacing, resolution=unit(self.dtype)) is not None:
                block = width
            elif block:
                break
        norms = self.rows.norm(dim=-1)
        words = f"no formula (learned or drawn), rows of norm {norms.min().item():.4g} to {norms.max().item():.4g}"
        if not block:
            return words
        code = read_code(self.rows[:, :block], self.spacing, resolution=unit(self.dtype))
        assert code is not None
        return f"channels 0 to {block - 1}: {', '.join(code.described())}; the others: no formula"

    def allowed(self, code: Code) -> Tensor:
        """How far each row may be off when angles are formed in float32.

        The frequency, the position times it and the rounding of an exponent cost at most four roundings of the angle; storing
        costs one more, and two are left for the sine.
        """
        angle = (self.positions + code.offset).abs() * code.ladder.frequencies.abs().max()
        return code.amplitude * (4 * 2.0**-24 * angle + 4 * max(unit(self.dtype), 2.0**-24))

    def _check_angles(self, sheet: Sheet, code: Code) -> None:
        """How exact the angles are, where the formula is known and not only measured."""
        if code.ladder.rule is None or code.ladder.base != 10_000 or code.ladder.speed != 1:
            sheet.skipped["precision of the angles"] = (
                "the frequencies are measured, and follow no released rule to compare with"
            )
            return
        sheet.checked.append("precision of the angles")
        off = (self.rows - code.rows(self.positions)).abs().amax(-1)
        if self.padding is not None:
            off[self.padding] = 0
        over = off > self.allowed(code)
        if not over.any():
            exact = unit(self.dtype) <= 2.0**-24 and bool((off <= code.amplitude * (2 * unit(self.dtype) + 1e-9)).all())
            sheet.described.append("float64 angles" if exact and len(off) > 256 else "float32 angles or wider")
            return
        first, worst = int(over.nonzero()[0]), int(off.argmax())
        sheet.found(
            kinds.PRECISION,
            f"off by {off[worst].item():.3g} at {self.one} {worst:,} and by more than float32 explains from {first:,} on"
            + self._cause(code, off),
            f"{self.allowed(code)[worst].item():.2g} at most there, from float32 angles",
        )

    def _cause(self, code: Code, off: Tensor) -> str:
        best, words = 0.25 * off.mean().item(), ""
        for dtype in (torch.bfloat16, torch.float16):
            for what in ("positions", "frequencies", "angles"):
                left = (self.rows - code.rounded(self.positions, what, dtype)).abs().mean().item()
                if left < best:
                    best, words = left, f"; {what} rounded to {str(dtype).removeprefix('torch.')} explain it"
        return words

    def _compare(self, sheet: Sheet, promised: Tensor) -> None:
        """Against the rows that a promise makes."""
        sheet.checked.append("promise")
        promised = promised[: len(self.rows)].to(torch.float64)
        mine = self.rows[: len(promised)]
        other = read_code(promised, self.spacing)
        if other is None:
            self._compare_learned(sheet, mine, promised)
            return
        allowed = self.allowed(other)[: len(promised), None]
        if ((mine - promised).abs() <= allowed).all():
            return
        code = self.code
        if code is None:
            if not sheet.has(kinds.FORMULA):
                sheet.found(kinds.FORMULA, sheet.described[-1], ", ".join(other.described()))
            return
        before = len(sheet.findings)
        compare_codes(sheet, code, other, self.spacing)
        if len(sheet.findings) > before or sheet.has(kinds.PRECISION):
            return
        off = (mine - promised).abs().amax(-1)
        early = bool((off[:8] <= 0.03).all())
        sheet.found(
            kinds.PRECISION if early else kinds.FORMULA,
            f"off by {off.max().item():.3g} at {self.one} {int(off.argmax()):,}",
            f"the promised code, within {allowed.max().item():.2g}",
        )

    def _compare_learned(self, sheet: Sheet, mine: Tensor, promised: Tensor) -> None:
        if same(mine, promised):
            return
        for shift in (1, 2, 3, 4, -1, -2, -3, -4):
            a, b = (mine, promised[shift:]) if shift > 0 else (mine[-shift:], promised)
            count = min(len(a), len(b))
            if count > 1 and same(a[:count], b[:count]):
                sheet.found(kinds.OFFSET, f"the row of {self.one} 0 is the promised one of {self.one} {shift}", "its own")
                return
        off = (mine - promised).abs().amax(-1)
        sheet.found(
            kinds.FORMULA, f"{self.one} {int(off.argmax())} is off by {off.max().item():.3g}", "the rows of the promised table"
        )
