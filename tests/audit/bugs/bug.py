"""What an entry of the gallery is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from posenc.audit import Report


@dataclass(frozen=True)
class Bug:
    """A mistake and its mend, each looked at by the check that a user would call.

    Args:
        name: what is wrong, in a few words, unique in the gallery.
        finding: the id that must be found.
        source: public reports of it, ``owner/repo#number``, or where the mistake is described.
        broken: checks the wrong thing.
        mended: checks its twin, which differs in nothing but the mend.
    """

    name: str
    finding: str
    source: str
    broken: Callable[[], Report]
    mended: Callable[[], Report]
