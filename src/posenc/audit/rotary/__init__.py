"""What a rotary function does, asked of the function."""

from posenc.audit.rotary.checking import check_rotary as check_rotary
from posenc.audit.rotary.reordering import check_reordering as check_reordering
