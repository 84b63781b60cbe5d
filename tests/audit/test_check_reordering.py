"""check_reordering: orders of rows, against those written out by hand."""

from __future__ import annotations

import pytest
import torch
from tests.audit.bugs.rotary import back, both, reorder
from torch import Tensor

from posenc.audit.rotary.reordering import check_reordering
from posenc.convert.pairing import reorder_pairs

GROUPED = {"heads": 4, "kv_heads": 2, "head_dim": 8}


def test_a_right_conversion_is_clean_and_described():
    report = check_reordering(both, **GROUPED, back=lambda q, k: (back(q, 4), back(k, 2)))
    assert report.findings == ()
    assert report.described == ("queries: 0 2 4 6 1 3 5 7 …", "keys: 0 2 4 6 1 3 5 7 …")
    assert report.checked == ("rows", "there and back")
    assert list(report.skipped) == ["bias"]  # .view with two sizes


@pytest.mark.parametrize("to", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_posenc_conversions_are_clean_biases_included(to, rotary_dim):
    direction, other = ("interleaved-to-half", "interleaved") if to == "half" else ("half-to-interleaved", "half")
    report = check_reordering(
        lambda q, k: (reorder_pairs(q, 4, to, rotary_dim=rotary_dim), reorder_pairs(k, 2, to, rotary_dim=rotary_dim)),
        **GROUPED,
        rotary_dim=rotary_dim,
        direction=direction,
        back=lambda q, k: (
            reorder_pairs(q, 4, other, rotary_dim=rotary_dim),
            reorder_pairs(k, 2, other, rotary_dim=rotary_dim),
        ),
    )
    assert report.findings == ()
    assert report.checked == ("rows", "bias", "there and back")


def test_the_order_of_a_public_report():
    report = check_reordering(lambda q, k: (reorder(q, 4), reorder(k, 4)), **GROUPED)
    finding = report.findings[0]
    assert finding.measured == "keys: rows 0 2 1 3 4 6 5 7 8 10 9 11 12 14 13 15"
    assert finding.expected == "rows 0 2 4 6 1 3 5 7 8 10 12 14 9 11 13 15"


@pytest.mark.parametrize(
    ("fn", "settings", "finding", "measured"),
    [
        (
            lambda q, k: (reorder(q, 2), reorder(k, 2)),
            {"kv_heads": 2},
            "reordering-heads",
            "queries: rows 0 2 4 6 8 10 12 14 1 3",
        ),
        (lambda w: reorder(w, 8), {}, "reordering-heads", "weight: rows 0 2 1 3 4 6 5 7"),
        (lambda w: w, {}, "reordering-direction", "weight: no row moves"),
        (lambda w: back(w, 4), {}, "reordering-direction", "weight: rows 0 4 1 5 2 6 3 7"),
        (lambda w: w.flip(0), {}, "reordering-rows", "weight: rows 31 30 29"),
        (lambda w: w.roll(1, 1), {}, "reordering-rows", "columns move or mix"),
        (lambda w: torch.cat((w[:16], w[:16])), {}, "reordering-rows", "16 rows are gone, 16 17 18"),
        (lambda w: w.flatten().roll(5).view_as(w), {}, "reordering-rows", "columns move or mix"),
        (lambda w: reorder(w, 4), {"rotary_dim": 4}, "reordering-span", "weight: rows 0 2 4 6 1 3 5 7"),
        (lambda w: reorder_pairs(w, 4, "half", rotary_dim=4), {}, "reordering-span", "weight: rows 0 2 1 3 4 5 6 7"),
        (lambda w: reorder(w, 4) if w.ndim > 1 else w, {}, "reordering-bias", "weight: entries 0 1 2 3"),
        (lambda w: reorder(w, 4), {"back": lambda w: reorder(w, 4)}, "reordering-round-trip", "weight: rows 0 4 1 5"),
    ],
)
def test_each_mistake_is_named(fn, settings, finding, measured):
    report = check_reordering(fn, **{"heads": 4, "head_dim": 8, **settings})
    assert finding in report.ids
    assert any(measured in one.measured for one in report.findings)


def test_weights_are_not_changed_in_place_for_the_caller():
    def in_place(weight: Tensor) -> Tensor:
        return weight.copy_(reorder(weight, 4))

    assert check_reordering(in_place, heads=4, head_dim=8).findings == ()


@pytest.mark.parametrize(
    ("fn", "settings", "error", "message"),
    [
        (None, {}, TypeError, "check_reordering: fn is NoneType"),
        (lambda a, b, c: a, {}, TypeError, r"fn takes \(a, b, c\). Expected \(q_weight, k_weight\)"),
        (lambda w: w.view(3, -1), {}, ValueError, "the function raised RuntimeError"),
        (lambda w: w[:1], {}, ValueError, r"the function returned \[1, 32\] for \[32, 32\]"),
        (lambda w: None, {}, TypeError, "the function returned NoneType. Expected one weight"),
        (lambda w: w, {"direction": "there"}, ValueError, "direction = 'there'"),
        (lambda w: w, {"heads": 0}, ValueError, "heads = 0"),
        (lambda w: w, {"rotary_dim": 3}, ValueError, "rotary_dim = 3"),
        (lambda w: w, {"rotary_dim": 16}, ValueError, "rotary_dim = 16"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(fn, settings, error, message):
    with pytest.raises(error, match=message):
        check_reordering(fn, **{"heads": 4, "head_dim": 8, **settings})
