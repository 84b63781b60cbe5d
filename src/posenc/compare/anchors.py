"""Self-check: what any run of this size should find again, from the report's own cells.

Tiers, not numbers. An anchor that fails is a disagreement with the literature, and is printed as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from posenc.compare.trial import FIT_ACCURACY, Cell

Cells = Mapping[Cell, dict[str, Any]]

TIE = 0.02
"""Means closer than this are a tie."""
_RECALLS, _FORGETS = 1 / 5, 1 / 15
"""Skill beyond guessing, 0 for what guessing scores and 1 for all right: at least, and below."""


class _CannotSay(Exception):
    """A number is missing, or says nothing; the reason."""


def check_anchors(cells: Cells) -> list[dict[str, Any]]:
    """One entry per anchor: what was expected, the measured numbers, the verdict and, where there is one, the reason.

    Args:
        cells: the report's cells by row, task and kind of model, gated.
    """
    found = []
    for number, (expected, check) in enumerate(_ANCHORS, start=1):
        measured: dict[str, float | None] = {}
        try:
            holds, why = check(cells, measured), None
            verdict = "holds" if holds else "fails"
        except _CannotSay as reason:
            verdict, why = "cannot say", str(reason)
        found.append({"anchor": number, "expected": expected, "measured": measured, "verdict": verdict, "why": why})
    return found


def _learned_raises(cells: Cells, measured: dict[str, float | None]) -> bool:
    learned = [cell for (row, _, _), cell in cells.items() if row == "learned"]
    if not learned:
        raise _CannotSay("learned is not among the rows")
    values = [v for cell in learned for curve in cell["curves"] if curve["ratio"] > 1 for v in curve["values"]]
    measured["tests past the trained length"] = len(values)
    measured["of them with a value"] = sum(value is not None for value in values)
    return bool(values) and all(value is None for value in values)


def _suffix_loss(cells: Cells, measured: dict[str, float | None]) -> bool:
    rises = {}
    for row in ("sinusoidal", "rope", "alibi"):
        cell = _fitted(cells, row, "recall-lm")
        rises[row] = _at(cell, "suffix loss", 2.0) - _at(cell, "suffix loss", 1.0)
        measured[f"{row} at 2 × less at 1 ×, nats"] = rises[row]
    return rises["sinusoidal"] >= 0.3 and rises["rope"] > 0 and abs(rises["alibi"]) < 0.05


def _far_recall(cells: Cells, measured: dict[str, float | None]) -> bool:
    cell = _cell(cells, "alibi", "recall-lm")
    recall = [(c["ratio"], _value(c["values"], "alibi"), c["guess"]) for c in cell["curves"] if c["measure"] == "recall"]
    skills = []
    for name, chosen in (
        ("lags to 0.5 ×", [(value, guess) for ratio, value, guess in recall if ratio <= 0.5]),
        ("lags past 1 ×", [(value, guess) for ratio, value, guess in recall if ratio > 1]),
    ):
        if not chosen:
            raise _CannotSay("alibi was not tested for recall")
        value, guess = (fmean(numbers) for numbers in zip(*chosen, strict=True))
        measured |= {f"alibi, {name}": value, f"guessing, {name}": guess}
        skills.append((value - guess) / (1 - guess))
    near, far = skills
    if near < _RECALLS:
        raise _CannotSay("nothing is recalled at short lags either")
    return far < _FORGETS


def _counting(cells: Cells, measured: dict[str, float | None]) -> bool:
    rows = ("nope", "alibi", "rope-25")
    means = [_value([_fitted(cells, row, "copy-constant")["primary"]], row) for row in rows]
    measured |= dict(zip(rows, means, strict=True))
    return _all_above([(means[0], means[1]), (means[1], means[2])])


def _addressing(cells: Cells, measured: dict[str, float | None]) -> bool:
    upper: list[float] = []
    lower: list[float] = []
    for group, rows in ((upper, ("nope", "t5", "alibi")), (lower, ("sinusoidal", "rope"))):
        for row in rows:
            try:
                cell = _fitted(cells, row, "copy-random")
            except _CannotSay as reason:
                measured[f"{row} ({reason})"] = None
                continue
            measured[row] = value = _value([cell["bands"]["(1, 1.25]"]], row)
            group.append(value)
    if not (upper and lower):
        raise _CannotSay("one of the two groups did not fit")
    decided = _all_above([(a, b) for a in upper for b in lower])
    if decided and len(upper) + len(lower) < 5:
        raise _CannotSay("it holds for the rows that fit, but not all did")
    return decided


def _randomised(cells: Cells, measured: dict[str, float | None]) -> bool:
    pairs = []
    for row in ("sinusoidal", "rope"):
        for task in ("copy-random", "copy-constant"):
            try:
                randomized = _fitted(cells, f"{row}-randomized", task)
                plain = _fitted(cells, row, task)
            except _CannotSay as reason:
                measured[f"{row} on {task} ({reason})"] = None
                continue
            values = _at(randomized, "exact match", 2.0), _at(plain, "exact match", 2.0)
            measured |= {f"{row}-randomized on {task}": values[0], f"{row} on {task}": values[1]}
            pairs.append(values)
    if not pairs:
        raise _CannotSay("no pair of rows could be compared")
    return _all_above(pairs)


def _encoder(cells: Cells, measured: dict[str, float | None]) -> bool:
    nope, placed = (_cell(cells, row, "last-k", "encoder") for row in ("nope", "sinusoidal"))
    without, with_positions = (_value([cell["in_range"]], cell["row"]) for cell in (nope, placed))
    measured |= {"nope encoder in range": without, "sinusoidal encoder in range": with_positions}
    if with_positions < FIT_ACCURACY:
        raise _CannotSay("an encoder with positions did not fit either")
    return without < FIT_ACCURACY / 2


def _in_range_loss(cells: Cells, measured: dict[str, float | None]) -> bool:
    nope = _value([_cell(cells, "nope", "recall-lm")["in_range"]], "nope")
    others = {row: c for (row, task, kind), c in cells.items() if task == "recall-lm" and kind == "decoder" and row != "nope"}
    fitted = {row: _value([cell["in_range"]], row) for row, cell in others.items() if cell["fit"]}
    if not fitted:
        raise _CannotSay("no other row fits")
    measured |= {"nope": nope, **fitted}
    return nope > max(fitted.values()) - TIE


_ANCHORS: tuple[tuple[str, Callable[[Cells, dict[str, float | None]], bool]], ...] = (
    ("a learned table has no value past its trained length", _learned_raises),
    (
        "recall-lm, loss of the same suffix at 2 × the trained length against 1 ×: sinusoidal rises by 0.3 nats or more, RoPE "
        "rises, ALiBi stays within 0.05 nats",
        _suffix_loss,
    ),
    ("recall-lm, lags past the trained length: ALiBi recalls hardly more than guessing among the values shown", _far_recall),
    ("copy-constant in (1, 1.5] ×: NoPE > ALiBi > RoPE on 25 %", _counting),
    ("copy-random in (1, 1.25] ×: each of NoPE, T5 and ALiBi > each of sinusoidal and RoPE", _addressing),
    ("copying at 2 ×: randomised positions raise sinusoidal and RoPE", _randomised),
    ("last-k: an encoder without positions fails, one with positions does not", _encoder),
    ("recall-lm in range: NoPE is worst or tied for worst among rows that fit", _in_range_loss),
)


def _cell(cells: Cells, row: str, task: str, kind: Any = "decoder") -> dict[str, Any]:
    try:
        return cells[Cell(row, task, kind)]
    except KeyError:
        raise _CannotSay(f"{row} on {Cell(row, task, kind).asked} was not trained") from None


def _fitted(cells: Cells, row: str, task: str) -> dict[str, Any]:
    cell = _cell(cells, row, task)
    if not cell["fit"]:
        raise _CannotSay(f"{row} did not fit {task}")
    return cell


def _at(cell: dict[str, Any], measure: str, ratio: float) -> float:
    values = next((c["values"] for c in cell["curves"] if c["measure"] == measure and c["ratio"] == ratio), [None])
    return _value(values, cell["row"])


def _value(values: Sequence[float | None], row: str) -> float:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        raise _CannotSay(f"{row} has no value there")
    return fmean(known)


def _all_above(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether each first is above its second; false as soon as one is clearly below."""
    if any(a <= b - TIE for a, b in pairs):
        return False
    if any(a < b + TIE for a, b in pairs):
        raise _CannotSay(f"a tie: two means are closer than {TIE}")
    return True
