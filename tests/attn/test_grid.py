"""Every score encoding of the catalogue, under every mask, on every backend: right, or refused with a reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posenc import ScoreEncoding
from posenc.attn import select
from posenc.attn.backends.base import Backend
from posenc.attn.backends.reference import Reference
from posenc.attn.request import Request
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


class Deaf(Backend):
    """Leaves the bias out."""

    name = "deaf"

    def refusal(self, request: Request) -> str | None:
        return None

    def run(self, request: Request) -> Tensor:
        return Reference().run(replace(request, bias=None))


def test_a_disagreement_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "BACKENDS", (*BACKENDS, Deaf()))
    for name in ("alibi", "shaw"):
        for cell in backend_grid({name: load_encoding(name).spec.build}, backends=["deaf", "sdpa"]):
            assert cell.agrees == (cell.backend == "sdpa"), cell


def test_names_are_those_of_the_backends() -> None:
    assert tuple(backend.name for backend in BACKENDS) == BACKEND_NAMES
