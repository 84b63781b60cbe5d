"""Packed documents, one fused causal call for each."""

from __future__ import annotations

from typing import final

from torch import Tensor

from posenc.attn.backends.base import Backend
from posenc.attn.request import Request


@final
class Varlen(Backend):
    """Packed documents, one fused causal call for each."""

    name = "varlen"

    def refusal(self, request: Request) -> str | None:
        return "it is not written yet"

    def run(self, request: Request) -> Tensor:
        raise NotImplementedError
