"""Which rule made some frequencies, and which mistake."""

from posenc.audit.ladders.explaining import Reading as Reading
from posenc.audit.ladders.explaining import explain as explain
from posenc.audit.ladders.explaining import makes as makes
from posenc.audit.ladders.faults import diagnose as diagnose
