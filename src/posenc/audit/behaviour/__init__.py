"""What a whole model does with padding, packing, caches and lengths."""

from posenc.audit.behaviour.checking import check_behaviour as check_behaviour
