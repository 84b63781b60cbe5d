"""Blocks of queries, each with its own piece of the bias, formed again in the backward."""

from __future__ import annotations

from typing import final

from torch import Tensor

from posenc.attn.backends.base import Backend
from posenc.attn.request import Request


@final
class Blockwise(Backend):
    """Blocks of queries, each with its own piece of the bias, formed again in the backward."""

    name = "blockwise"

    def refusal(self, request: Request) -> str | None:
        return "it is not written yet"

    def run(self, request: Request) -> Tensor:
        raise NotImplementedError
