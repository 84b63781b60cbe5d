"""Which backend serves a call: the named one or nobody, or the first that accepts, by static facts only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from posenc.errors import BackendRefused

Call_contra = TypeVar("Call_contra", contravariant=True)
Call = TypeVar("Call")


@runtime_checkable
class Serves(Protocol[Call_contra]):
    """A backend: a name, why it cannot serve a call, and why ``"auto"`` passes it over although it could; or ``None``."""

    @property
    def name(self) -> str: ...

    def refusal(self, call: Call_contra) -> str | None: ...

    def hesitation(self, call: Call_contra) -> str | None: ...


class Verdict(NamedTuple):
    """What a backend says of a call."""

    backend: str
    chosen: bool
    reason: str


def choose(what: str, backends: Sequence[Serves[Call]], call: Call, backend: str) -> Serves[Call]:
    """The backend of a call. A named one never falls back.

    Raises:
        ValueError: an unknown name.
        BackendRefused: the named one, or every one, refuses.
    """
    names = [candidate.name for candidate in backends]
    if backend != "auto" and backend not in names:
        raise ValueError(f"{what}: backend = {backend!r}. Expected 'auto' or one of {', '.join(names)}. Name one.")
    refusals = {}
    for candidate in backends:
        if backend not in ("auto", candidate.name):
            continue
        refusal = candidate.refusal(call)
        if refusal is None and backend == "auto":
            refusal = candidate.hesitation(call)
        if refusal is None:
            return candidate
        refusals[candidate.name] = refusal
    said = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise BackendRefused(
        f"{what}: backend = {backend!r} refuses ({said}). Expected a call that it serves. Use backend='auto' or 'reference'.",
        refusals,
    )


def judge(what: str, backends: Sequence[Serves[Call]], call: Call, backend: str) -> list[Verdict]:
    """One verdict per backend; none is chosen when the named one refuses."""
    try:
        chosen = choose(what, backends, call, backend).name
    except BackendRefused:
        chosen = None
    said = []
    for candidate in backends:
        refusal = candidate.refusal(call)
        if candidate.name == chosen:
            why = "named" if backend != "auto" else "the first in the order of 'auto' that accepts"
        elif refusal is None:
            hesitation = candidate.hesitation(call)
            why = f"only by name: {hesitation}" if hesitation else "accepts, but another was named or comes first"
        else:
            why = f"refuses: {refusal}"
        said.append(Verdict(candidate.name, candidate.name == chosen, why))
    return said
