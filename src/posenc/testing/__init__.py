"""Tests for encodings, yours too: `conform` with an oracle; `posenc.testing.strategies` for hypothesis.

For models: `assert_positions_ok`.
"""

from posenc.testing.checks import CHECKS as CHECKS
from posenc.testing.claims import CLAIMS as CLAIMS
from posenc.testing.conformance import SHAPE as SHAPE
from posenc.testing.conformance import conform as conform
from posenc.testing.models import assert_positions_ok as assert_positions_ok
from posenc.testing.oracles import ORACLES as ORACLES
from posenc.testing.subject import Subject as Subject
