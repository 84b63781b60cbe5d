"""Lengths against a trained length."""

from __future__ import annotations

import pytest

from posenc import CATALOG, load_encoding
from posenc.analysis import length_report, past_trained
from posenc.analysis.lengths import QUANTILES


def test_numbers_of_one_group():
    report = length_report(range(1, 101), 90)
    total = report.total
    assert (total.count, total.tokens, total.shortest, total.longest) == (100, 5050, 1, 100)
    assert QUANTILES == (0.5, 0.9, 0.95, 0.99)
    assert total.quantiles == (50, 90, 95, 99)
    assert (total.beyond, total.share_beyond) == (10, 0.1)
    assert total.tokens_beyond == sum(range(1, 11))
    assert report.groups == report.encodings == ()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([7], (7, 7, 7, 7)), ([1, 9], (1, 9, 9, 9)), ([3, 1, 2], (2, 3, 3, 3)), ([0, 0, 0, 8], (0, 8, 8, 8))],
)
def test_quantiles_are_lengths_that_occur(lengths, expected):
    assert length_report(lengths, 5).total.quantiles == expected


def test_the_trained_length_itself_is_not_past_it():
    assert length_report([4096], 4096).total.beyond == 0
    assert length_report([4097], 4096).total.tokens_beyond == 1


def test_a_small_mean_hides_a_long_tail():
    total = length_report([10] * 90 + [10_000] * 10, 1024).total
    assert total.share_beyond == 0.1
    assert total.tokens_beyond / total.tokens > 0.8


def test_groups_come_with_the_longest_first():
    report = length_report([1, 9, 9, 9, 2], 5, groups=["a", "b", "c", "c", "a"])
    assert [(group.name, group.count, group.beyond) for group in report.groups] == [("b", 1, 1), ("c", 2, 2), ("a", 2, 0)]
    assert report.total.count == 5


@pytest.mark.parametrize("name", CATALOG)
def test_words_follow_claims(name):
    encoding = load_encoding(name)
    found = past_trained(encoding, 2048)
    assert found.name == name
    assert found.defined == ("any-length" in encoding.spec.claims)
    assert found.words.startswith("defined" if found.defined else "claims nothing past 2,048 tokens")
    assert ("distances of 2,048 or more" in found.words) == (
        encoding.reads_positions and {"any-length", "shift-invariant"} <= encoding.spec.claims
    )
    assert ("never rises" in found.words) == ("monotone" in encoding.spec.claims)


def test_a_report_asks_encodings():
    report = length_report([1], 64, encodings=[load_encoding("learned"), load_encoding("nope")])
    assert [entry.defined for entry in report.encodings] == [False, True]
    assert "reads no positions" in report.encodings[1].words


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: length_report([], 5), ValueError, "length_report: no lengths. Expected one or more."),
        (lambda: length_report([1, -2], 5), ValueError, "lengths[1] = -2. Expected an integer of 0 or more"),
        (lambda: length_report([1.5], 5), TypeError, "lengths[0] = 1.5. Expected an integer"),
        (lambda: length_report([1], 0), ValueError, "trained = 0. Expected an integer of 1 or more"),
        (lambda: length_report([1, 2], 5, groups=["a"]), ValueError, "1 groups for 2 lengths. Expected one per length."),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
