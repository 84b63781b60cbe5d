"""Which backend serves a request: the named one or nobody, or the first that accepts."""

from __future__ import annotations

from typing import NamedTuple

from posenc.attn.backends.base import Backend
from posenc.attn.backends.reference import Reference
from posenc.attn.backends.sdpa import SDPA
from posenc.attn.request import Request
from posenc.errors import BackendRefused

BACKENDS: tuple[Backend, ...] = (SDPA(), Reference())
"""In the order in which ``"auto"`` asks them."""


class Verdict(NamedTuple):
    """What a backend says of a call."""

    backend: str
    chosen: bool
    reason: str


def verdicts(request: Request, backend: str) -> list[Verdict]:
    """One verdict per backend; none is chosen when the named one refuses."""
    try:
        chosen = select(request, backend).name
    except BackendRefused:
        chosen = None
    said = []
    for candidate in BACKENDS:
        refusal = candidate.refusal(request)
        if candidate.name == chosen:
            why = "named" if backend != "auto" else "the first in the order of 'auto' that accepts"
        else:
            why = f"refuses: {refusal}" if refusal else "accepts, but another was named or comes first"
        said.append(Verdict(candidate.name, candidate.name == chosen, why))
    return said


def select(request: Request, backend: str) -> Backend:
    """The backend for a request. A named one never falls back.

    Raises:
        ValueError: an unknown name.
        BackendRefused: the named one, or every one, refuses.
    """
    names = [candidate.name for candidate in BACKENDS]
    if backend != "auto" and backend not in names:
        raise ValueError(f"attention: backend = {backend!r}. Expected 'auto' or one of {', '.join(names)}. Name one.")
    refusals = {}
    for candidate in BACKENDS:
        if backend not in ("auto", candidate.name):
            continue
        refusal = candidate.refusal(request)
        if refusal is None:
            return candidate
        refusals[candidate.name] = refusal
    said = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise BackendRefused(
        f"attention: backend = {backend!r} refuses ({said}). Expected a call that it serves. "
        "Use backend='auto' or 'reference'.",
        refusals,
    )
