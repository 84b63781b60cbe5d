"""The backends of attention, and which of them serves a request."""

from __future__ import annotations

from posenc.attn.backends.base import Backend
from posenc.attn.backends.blockwise import Blockwise
from posenc.attn.backends.channels import Channels
from posenc.attn.backends.flex import Flex
from posenc.attn.backends.reference import Reference
from posenc.attn.backends.sdpa import SDPA
from posenc.attn.backends.varlen import Varlen
from posenc.attn.request import Request
from posenc.core.backends import Verdict as Verdict
from posenc.core.backends import choose, judge

BACKENDS: tuple[Backend, ...] = (Channels(), Varlen(), Blockwise(), SDPA(), Reference(), Flex())
"""In the order in which ``"auto"`` asks them."""


def verdicts(request: Request, backend: str) -> list[Verdict]:
    """One verdict per backend; none is chosen when the named one refuses."""
    return judge("attention", BACKENDS, request, backend)


def select(request: Request, backend: str) -> Backend:
    """The backend for a request. A named one never falls back.

    Raises:
        ValueError: an unknown name.
        BackendRefused: the named one, or every one, refuses.
    """
    chosen = choose("attention", BACKENDS, request, backend)
    assert isinstance(chosen, Backend)
    return chosen
