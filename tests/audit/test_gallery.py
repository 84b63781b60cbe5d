"""Every bug of the gallery is found, and is not found on its mended twin."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.audit.bugs import Bug, gallery

from posenc.audit import KINDS

BUGS = gallery()


def test_the_gallery_is_large_and_its_names_are_unique():
    assert len(BUGS) >= 40
    assert [name for name, count in Counter(bug.name for bug in BUGS).items() if count > 1] == []


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_found_and_its_mended_twin_is_clean(bug: Bug):
    assert bug.finding in KINDS
    broken = bug.broken()
    assert bug.finding in {finding.id for finding in broken.at_least("warning")}, str(broken)
    mended = bug.mended()
    assert mended.at_least("warning") == (), str(mended)
