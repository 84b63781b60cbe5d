"""The positions of a live model, against what its configuration promises."""

from posenc.audit.live.auditing import audit as audit
