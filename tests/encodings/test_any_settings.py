"""Encodings with settings at random follow their oracles."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc.testing import CHECKS, ORACLES, SHAPE, Subject
from posenc.testing.strategies import encodings, positions, widths
from posenc.testing.subject import allowance, assert_within, content_for, run, truth


def subject_of(encoding):
    # frequencies above one radian per position are not drawn, so the usual allowance holds
    return Subject(lambda shape: encoding, ORACLES[encoding.spec.name], encoding.spec.claims, SHAPE)


@given(encodings(SHAPE))
def test_any_settings_follow_the_oracle(encoding):
    CHECKS["values"](subject_of(encoding))


@given(encodings(SHAPE), st.data())
def test_any_positions_follow_the_oracle(encoding, data):
    most = 10**6 if "any-length" in encoding.spec.claims else SHAPE.max_length - 1
    at = data.draw(positions(4, most=most))
    content = content_for(encoding, SHAPE, 4)
    for actual, right in zip(run(encoding, content, at), truth(subject_of(encoding), encoding, content, at), strict=True):
        allowed = allowance(right, encoding, content, at, dtype=torch.float32, angle_dtype=torch.float64)
        assert_within(actual, right, allowed, "differs from the oracle")


@given(widths(), widths(even=False), positions(real=True, least=-5, most=5))
def test_strategies_draw_what_they_say(even, any_width, at):
    assert even % 2 == 0 < even
    assert any_width >= 1
    assert at.dtype == torch.float64
    assert bool((at.abs() <= 5).all())
