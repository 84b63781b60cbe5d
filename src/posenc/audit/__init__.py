"""Find silent position bugs: in a model, a function or a configuration."""

from posenc.audit.attention.checking import check_attention
from posenc.audit.behaviour.checking import check_behaviour
from posenc.audit.biases.checking import check_bias, check_scores
from posenc.audit.configs import lint
from posenc.audit.findings import Finding, Kind, Report, Severity
from posenc.audit.kinds import KINDS
from posenc.audit.ladders.explaining import Reading, explain, makes
from posenc.audit.ladders.faults import diagnose
from posenc.audit.live.auditing import audit
from posenc.audit.rotary.checking import check_rotary
from posenc.audit.rotary.reordering import check_reordering
from posenc.audit.tables.checking import check_table

__all__ = [
    "KINDS",
    "Finding",
    "Kind",
    "Reading",
    "Report",
    "Severity",
    "audit",
    "check_attention",
    "check_behaviour",
    "check_bias",
    "check_reordering",
    "check_rotary",
    "check_scores",
    "check_table",
    "diagnose",
    "explain",
    "lint",
    "makes",
]
