"""What a backend is, and the dense form of mask and bias that dense backends share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from posenc.attn.request import Request
from posenc.core.bias import DenseBias, materialize


class Backend(ABC):
    """One way to compute attention."""

    name: ClassVar[str]

    @abstractmethod
    def refusal(self, request: Request) -> str | None:
        """Why this backend cannot serve a request, in one sentence, or ``None``. Reads static facts only."""

    @abstractmethod
    def run(self, request: Request) -> Tensor:
        """``[batch, heads, q, v_dim]`` in q's dtype."""


class DenseTerms(NamedTuple):
    """Mask and bias written out.

    Shape:
        allowed: ``[*batch, 1, q, k]`` or ``[q, k]`` booleans, or ``None`` when everything is seen. A row that sees
            nothing is all true here, so that its softmax and gradients are finite; ``sees`` is false there.
        bias: ``[*batch, heads, q, k]``, or ``None``.
        sees: ``[*batch, 1, q, 1]``, false for rows whose output is zero; ``None`` when every row sees something.
    """

    allowed: Tensor | None
    bias: Tensor | None
    sees: Tensor | None


def dense_terms(request: Request, dtype: torch.dtype) -> DenseTerms:
    """The dense form of a request's mask and bias, with ``dtype`` the least width of the bias."""
    bias = None
    if request.bias is not None:
        bias = _dense_bias(request, dtype)
    if request.mask.sees_all(request.q_length, request.k_length):
        return DenseTerms(None, bias, None)
    allowed = request.mask.allowed(request.q_length, request.k_length, device=request.q.device)
    if allowed.ndim > 2:
        allowed = allowed.unsqueeze(-3)
    if request.mask.sees_itself(request.q_length, request.k_length):
        return DenseTerms(allowed, bias, None)
    sees = allowed.any(dim=-1, keepdim=True)
    return DenseTerms(allowed | ~sees, bias, sees)


def _dense_bias(request: Request, dtype: torch.dtype) -> Tensor:
    if isinstance(request.bias, DenseBias):  # made once for all layers that share it
        return request.bias.bias
    assert request.bias is not None
    assert request.positions is not None
    return materialize(request.bias, request.positions, request.k_positions, dtype=dtype)
