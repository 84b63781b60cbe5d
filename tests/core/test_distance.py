"""Distance keeps one sign; buckets are exact integers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import pairwise_distance, t5_bucket
from posenc.core.distance import bucket_starts

DISTANCES = [0, 1, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 45, 46, 63, 64, 90, 91, 127, 128, 1000]
BIDIRECTIONAL = [0, 1, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 15, 15]
CAUSAL = [0, 1, 7, 8, 11, 12, 15, 16, 18, 18, 21, 21, 23, 24, 26, 26, 29, 29, 31, 31, 31]


def test_positive_distance_looks_back():
    assert pairwise_distance(torch.tensor([5]), torch.tensor([2, 7])).tolist() == [[3, -2]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_no_integer_dtype_wraps_around(dtype):
    assert pairwise_distance(torch.tensor([2, 127], dtype=dtype), torch.tensor([127, 2], dtype=dtype)).tolist() == [
        [-125, 0],
        [0, 125],
    ]


def test_bucket_table():
    # lucidrains/x-transformers#10
    past = torch.tensor(DISTANCES)
    assert t5_bucket(past, direction="bidirectional").tolist() == BIDIRECTIONAL
    assert t5_bucket(-past[1:], direction="bidirectional").tolist() == [16 + b for b in BIDIRECTIONAL[1:]]
    assert t5_bucket(past, direction="causal").tolist() == CAUSAL
    assert t5_bucket(-past, direction="causal").eq(0).all()


def test_bucket_edges():
    assert bucket_starts(16, 128)[8:] == (8, 12, 16, 23, 32, 46, 64, 91)
    assert bucket_starts(32, 128)[16:] == (16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113)


@given(st.integers(2, 40), st.integers(1, 300), st.booleans())
def test_buckets_rise_are_onto_and_saturate(one_sided, further, both):
    exact = one_sided // 2
    farthest = exact + further
    sides = 2 if both else 1
    buckets = t5_bucket(
        torch.arange(2 * farthest),
        buckets=sides * one_sided,
        max_distance=farthest,
        direction="bidirectional" if both else "causal",
    )
    assert bool((buckets.diff() >= 0).all())
    assert buckets[: exact + 1].tolist() == list(range(exact + 1))
    assert bool((buckets[farthest:] == one_sided - 1).all())
    if further >= 2 * one_sided**2:  # far enough that no logarithmic bucket is empty
        assert set(buckets.tolist()) == set(range(one_sided))


@given(st.integers(2, 24), st.integers(1, 500))
def test_future_mirrors_past(half, distance):
    past, future = (
        t5_bucket(torch.tensor([sign * distance]), buckets=2 * half, max_distance=half + 100, direction="bidirectional")
        for sign in (1, -1)
    )
    assert future - past == half


def test_edges_follow_the_logarithm():
    for buckets, farthest in [(16, 128), (32, 128), (20, 1000)]:
        exact = buckets // 2
        for start, j in zip(bucket_starts(buckets, farthest)[exact:], range(buckets - exact), strict=True):
            place = math.log(start / exact) / math.log(farthest / exact) * (buckets - exact)
            before = math.log((start - 1) / exact) / math.log(farthest / exact) * (buckets - exact) if j else -1.0
            assert before < j <= place + 1e-9


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"direction": "both"}, ValueError, "direction = 'both'"),
        ({"direction": "bidirectional", "buckets": 31}, ValueError, "even, bidirectional"),
        ({"direction": "causal", "max_distance": 16}, ValueError, "max_distance above the 16"),
        ({"direction": "causal", "buckets": 1}, ValueError, "at least 2 buckets"),
    ],
)
def test_rules_without_buckets_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"t5_bucket: .*{message}"):
        t5_bucket(torch.arange(3), **arguments)


def test_buckets_hold_whole_distances():
    with pytest.raises(TypeError, match=r"distances are torch\.float32"):
        t5_bucket(torch.tensor([1.5]), direction="causal")
