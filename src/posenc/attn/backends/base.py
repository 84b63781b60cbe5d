"""What a backend is, and the dense form of mask and bias that dense backends share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from posenc.attn.request import Request
from posenc.core.bias import materialize
from posenc.errors import ShapeError

NO_WEIGHTS = "it never forms the weights, which vectors added to the values need"


class Backend(ABC):
    """One way to compute attention."""

    name: ClassVar[str]
    dense: ClassVar[bool] = False
    """Whether it writes biases out as ``[heads, q, k]``; layers that share a bias then share what is written."""

    @abstractmethod
    def refusal(self, request: Request) -> str | None:
        """Why this backend cannot serve a request, in one sentence, or ``None``. Reads static facts only."""

    def hesitation(self, request: Request) -> str | None:
        """Why ``"auto"`` passes it over although it could serve the request, or ``None``. Never waits for a device."""
        return None

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
    """The dense form of a request's mask and bias, the bias in ``dtype``."""
    bias = None
    if request.bias is not None:
        assert request.positions is not None
        bias = materialize(request.bias, request.positions, request.k_positions, dtype=dtype)
        check_batch(bias, request, "bias")
    if request.mask.sees_all(request.q_length, request.k_length):
        return DenseTerms(None, bias, None)
    allowed = request.mask.allowed(request.q_length, request.k_length, device=request.q.device)
    if allowed.ndim > 2:
        allowed = allowed.unsqueeze(-3)
    check_batch(allowed, request, "mask")
    if request.mask.sees_itself(request.q_length, request.k_length):
        return DenseTerms(allowed, bias, None)
    sees = allowed.any(dim=-1, keepdim=True)
    return DenseTerms(allowed | ~sees, bias, sees)


def check_batch(term: Tensor, request: Request, name: str) -> None:
    """Refuse a mask or bias whose batch is neither that of q nor one."""
    batch = request.q.shape[0]
    if term.ndim > 4 or (term.ndim == 4 and term.shape[0] not in (1, batch)):
        raise ShapeError(
            f"attention: the {name} has the batch {tuple(term.shape[:-3])}. Expected ({batch},), that of q, or none. "
            "Look at the batch axes of positions, segments and biases."
        )
