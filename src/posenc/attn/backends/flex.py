"""torch's flex_attention, with mask and bias compiled into the kernel."""

from __future__ import annotations

from typing import final

from torch import Tensor

from posenc.attn.backends.base import Backend
from posenc.attn.request import Request


@final
class Flex(Backend):
    """torch's flex_attention, with mask and bias compiled into the kernel."""

    name = "flex"

    def refusal(self, request: Request) -> str | None:
        return "it is not written yet"

    def run(self, request: Request) -> Tensor:
        raise NotImplementedError
