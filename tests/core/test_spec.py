"""Descriptions: what every catalogued encoding says of itself holds together."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError
from typing import get_args

import pytest

import posenc
from posenc import CATALOG, ModelShape, load_encoding
from posenc.core.spec import Claim

SHAPE = ModelShape(dim=32, heads=4, kv_heads=2, head_dim=8, layers=2, max_length=16)
each_encoding = pytest.mark.parametrize("name", CATALOG)


@each_encoding
def test_spec_describes_its_class(name):
    encoding = load_encoding(name)
    spec = encoding.spec
    assert spec.name == name
    assert spec.claims <= set(get_args(Claim))
    assert spec.summary
    assert "\n" not in spec.summary
    assert all(re.fullmatch(r"\d{4}\.\d{5}|\d{4}\.\d{4}", reference.arxiv) for reference in spec.references)
    assert any(isinstance(made, encoding) for made in spec.build(SHAPE))
    with pytest.raises(FrozenInstanceError):
        spec.name = "other"


@each_encoding
def test_encodings_say_where_they_act_and_how_they_were_made(name):
    encoding = load_encoding(name)
    assert encoding.acts_on in ("the positions", "the input", "queries and keys", "the score", "the score, with content")
    assert encoding.__name__ in repr(encoding.spec.build(SHAPE)[0])


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'rotary' is not in the catalogue"):
        load_encoding("rotary")
    with pytest.raises(AttributeError, match="no attribute 'Rotary'"):
        _ = posenc.Rotary
