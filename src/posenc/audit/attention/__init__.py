"""What one attention does, asked of the module."""

from posenc.audit.attention.checking import check_attention as check_attention
