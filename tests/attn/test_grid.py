"""Every score encoding of the catalogue, under every mask, on every backend: right, or refused with a reason."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from posenc import ScoreBias, ScoreEncoding, SlopeBias
from posenc.attn.select import BACKENDS
from posenc.catalog import CATALOG, load_encoding
from posenc.core.sites import ContentScoreEncoding
from posenc.testing.grid import BACKEND_NAMES, SCENES, Cell, backend_grid

NAMES = [name for name in CATALOG if issubclass(load_encoding(name), (ScoreEncoding, ContentScoreEncoding))]


def cells_of(name: str) -> list[Cell]:
    torch.set_num_threads(1)
    return list(backend_grid({name: load_encoding(name).spec.build}))


@pytest.mark.parametrize("name", NAMES)
def test_every_backend_agrees_or_refuses(name: str) -> None:
    cells = cells_of(name)
    assert len(cells) == len(SCENES) * len(BACKENDS)
    assert [cell for cell in cells if not cell.agrees] == []
    assert all(cell.refusal for cell in cells if cell.dtype is None)
    served = Counter(cell.backend for cell in cells if cell.dtype is not None)
    undefined = {cell.scene for cell in cells if (cell.refusal or "").startswith("the encoding:")}
    for backend in ("sdpa", "reference"):  # these refuse nothing that is defined
        assert served[backend] == len(SCENES) - len(undefined)


class HalfSlope(ScoreEncoding):
    """A bias that a backend may get wrong: its two forms disagree."""

    spec = load_encoding("alibi").spec

    def forward(self) -> ScoreBias:
        slopes = torch.full((4,), 0.5 + 0.25 * HalfSlope.calls)
        HalfSlope.calls += 1
        return SlopeBias(slopes, -slopes)

    calls = 0


def test_a_disagreement_is_found() -> None:
    cells = list(backend_grid({"half": lambda shape: [HalfSlope()]}, scenes=["causal"], backends=["sdpa"]))
    assert [cell.agrees for cell in cells] == [False]


def test_names_are_those_of_the_backends() -> None:
    assert tuple(backend.name for backend in BACKENDS) == BACKEND_NAMES
