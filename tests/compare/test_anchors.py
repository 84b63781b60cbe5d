"""The self-check: every anchor can hold, fail and be unable to say, on made-up cells."""

from __future__ import annotations

from typing import Any

import pytest

from posenc.compare.anchors import check_anchors
from posenc.compare.trial import Cell

Cells = dict[Cell, dict[str, Any]]
GUESS = 0.25


def cell(row: str, task: str, curve: dict[float, float | None], measure: str, **other: Any) -> tuple[Cell, dict[str, Any]]:
    """A cell of one seed; a curve is {ratio: value}."""
    kind = other.pop("kind", "decoder")
    curves = [{"measure": measure, "ratio": ratio, "values": [value]} for ratio, value in curve.items()]
    recall = [{"measure": "recall", "ratio": r, "values": [v], "guess": GUESS} for r, v in other.pop("recall", {}).items()]
    past = curve.get(1.25)
    made = {
        "row": row, "task": task, "kind": kind, "fit": True, "curves": curves + recall, "primary": past,
        "in_range": curve.get(1.0), "bands": {"(1, 1.25]": past},
    }  # fmt: skip
    return Cell(row, task, kind), made | other


def copying(task: str, row: str, past: float | None, twice: float | None, **other: Any) -> tuple[Cell, dict[str, Any]]:
    return cell(row, task, {1.0: 1.0, 1.25: past, 2.0: twice}, "exact match", **other)


def recalling(
    row: str, in_range: float, twice: float | None, far: float = 0.26, near: float = 0.9
) -> tuple[Cell, dict[str, Any]]:
    return cell(row, "recall-lm", {1.0: in_range, 2.0: twice}, "suffix loss", recall={0.25: near, 2.0: far, 3.0: far})


def as_published() -> Cells:
    """What the literature found."""
    return dict(
        [
            copying("copy-constant", "nope", 1.0, 0.9),
            copying("copy-constant", "alibi", 0.5, 0.2),
            copying("copy-constant", "rope-25", 0.1, 0.0),
            copying("copy-constant", "rope", 0.1, 0.0),
            copying("copy-constant", "rope-randomized", 0.9, 0.5),
            copying("copy-constant", "sinusoidal", 0.0, 0.0),
            copying("copy-constant", "sinusoidal-randomized", 0.8, 0.4),
            copying("copy-constant", "learned", None, None),
            *(copying("copy-random", row, 0.8, 0.1) for row in ("nope", "t5", "alibi")),
            *(copying("copy-random", row, 0.1, 0.0) for row in ("rope", "sinusoidal")),
            *(copying("copy-random", f"{row}-randomized", 0.5, 0.3) for row in ("rope", "sinusoidal")),
            recalling("nope", 1.05, 1.06),
            recalling("sinusoidal", 1.00, 1.50),
            recalling("rope", 1.00, 1.10),
            recalling("alibi", 1.02, 1.01),
            cell("nope", "last-k", {1.0: 0.08}, "exact match", kind="encoder", fit=False),
            cell("sinusoidal", "last-k", {1.0: 1.0}, "exact match", kind="encoder"),
        ]
    )


def verdict(cells: Cells, number: int) -> tuple[str, str | None]:
    found = next(anchor for anchor in check_anchors(cells) if anchor["anchor"] == number)
    return found["verdict"], found["why"]


def test_all_hold_on_what_was_published_and_show_their_numbers():
    found = check_anchors(as_published())
    assert [anchor["anchor"] for anchor in found] == list(range(1, 9))
    assert {anchor["verdict"] for anchor in found} == {"holds"}
    assert all(anchor["measured"] and anchor["why"] is None for anchor in found)
    assert found[1]["measured"]["sinusoidal at 2 × less at 1 ×, nats"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("number", "changed"),
    [
        (1, copying("copy-constant", "learned", None, 0.0)),
        (2, recalling("sinusoidal", 1.00, 1.29)),
        (2, recalling("rope", 1.00, 0.99)),
        (2, recalling("alibi", 1.00, 1.06)),
        (2, recalling("alibi", 1.00, 0.94)),
        (3, recalling("alibi", 1.00, 1.00, far=0.31)),
        (4, copying("copy-constant", "alibi", 1.1, 0.0)),
        (4, copying("copy-constant", "rope-25", 0.6, 0.0)),
        (5, copying("copy-random", "sinusoidal", 0.9, 0.0)),
        (5, copying("copy-random", "t5", 0.05, 0.0)),
        (6, copying("copy-random", "sinusoidal-randomized", 0.0, -0.1)),
        (6, copying("copy-constant", "rope-randomized", 0.0, -0.1)),
        (7, cell("nope", "last-k", {1.0: 0.9}, "exact match", kind="encoder")),
        (8, recalling("nope", 0.9, 1.0)),
    ],
)
def test_each_fails_on_what_is_otherwise(number, changed):
    cells = as_published() | dict([changed])
    assert verdict(cells, number) == ("fails", None)
    others = {anchor["anchor"] for anchor in check_anchors(cells) if anchor["verdict"] == "fails"}
    assert others <= {number, 2}, "the loss of NoPE or ALiBi may matter elsewhere"


@pytest.mark.parametrize(
    ("number", "changed", "why"),
    [
        (2, recalling("rope", 1.0, None), "rope has no value there"),
        (3, recalling("alibi", 1.0, 1.0, near=0.39), "nothing is recalled at short lags either"),
        (4, copying("copy-constant", "nope", 0.51, 0.0), "a tie: two means are closer than 0.02"),
        (4, copying("copy-constant", "nope", 1.0, 0.0, fit=False), "nope did not fit copy-constant"),
        (5, copying("copy-random", "rope", 0.1, 0.0, fit=False), "it holds for the rows that fit, but not all did"),
        (6, copying("copy-random", "sinusoidal-randomized", 0.1, 0.01), "a tie: two means are closer than 0.02"),
        (
            7,
            cell("sinusoidal", "last-k", {1.0: 0.9}, "exact match", kind="encoder"),
            "an encoder with positions did not fit either",
        ),
    ],
)
def test_each_says_why_it_cannot_say(number, changed, why):
    assert verdict(as_published() | dict([changed]), number) == ("cannot say", why)


def test_without_cells_nothing_can_be_said():
    for anchor in check_anchors({}):
        assert anchor["verdict"] == "cannot say"
        assert anchor["why"]


def test_randomised_rows_that_are_missing_are_named_and_the_others_judged():
    cells = {key: made for key, made in as_published().items() if key.row != "rope-randomized"}
    found = check_anchors(cells)[5]
    assert found["verdict"] == "holds"
    assert found["measured"]["rope on copy-random (rope-randomized on copy-random was not trained)"] is None
