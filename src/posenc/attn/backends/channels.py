"""A bias of the key alone as extra channels of q and k, so that the fused causal path needs no mask."""

from __future__ import annotations

from typing import final

from torch import Tensor

from posenc.attn.backends.base import Backend
from posenc.attn.request import Request


@final
class Channels(Backend):
    """A bias of the key alone as extra channels of q and k, so that the fused causal path needs no mask."""

    name = "channels"

    def refusal(self, request: Request) -> str | None:
        return "it is not written yet"

    def run(self, request: Request) -> Tensor:
        raise NotImplementedError
