"""The gradient of a rotary function, which is the transposed rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.audit.findings import Finding
from posenc.audit.kinds import rotary as kinds
from posenc.audit.rotary.call import RotaryFunction, unit


def check_gradient(call: RotaryFunction, up_to: int, where: str, generator: torch.Generator) -> list[Finding]:
    """``⟨w, f(x)⟩ = ⟨∇, x⟩`` for every x, token by token, because f is linear."""
    at = torch.arange(up_to - 5, up_to)[None]
    q = call.random(1, call.heads, 5, call.head_dim, generator=generator).requires_grad_()
    k = call.random(1, call.kv_heads, 5, call.head_dim, generator=generator).requires_grad_()
    weights = tuple(call.random(*x.shape, generator=generator) for x in (q, k))
    turned = call(q, k, at)
    outputs = [(y, weight) for y, weight in zip(turned[:2], weights, strict=True) if y.requires_grad]
    if len(outputs) < 2:
        return [
            kinds.GRADIENT.at(
                where,
                measured="no gradient reaches queries or keys",
                expected="the transposed rotation",
                severity="note",  # fine for inference
                mend="Train with another function; this one stops the gradient.",
            )
        ]
    gradients = torch.autograd.grad([(y * weight).sum() for y, weight in outputs], (q, k), allow_unused=True)
    others = call.random(*q.shape, generator=generator), call.random(*k.shape, generator=generator)
    there = call(*others, at)
    found = []
    for side, gradient, x, y, weight in zip(("queries", "keys"), gradients, others, there[:2], weights, strict=True):
        gradient = torch.zeros_like(x) if gradient is None else gradient
        ahead, back = _products(weight, y), _products(gradient, x)
        off = (ahead.sum(-1) - back.sum(-1)).abs()
        # each entry has a few roundings of its own: three of the rotation, one of the result
        rounding = max(unit(tensor.dtype) for tensor in (x, y, gradient))
        if (off > 16 * rounding * (ahead.abs().sum(-1) + back.abs().sum(-1))).any():
            found.append(
                kinds.GRADIENT.at(
                    f"{where}, {side}",
                    measured=f"⟨w, f(x)⟩ and ⟨gradient, x⟩ differ by {float(off.max()):.3g}",
                    expected="the gradient is the transposed rotation: by minus the angle",
                )
            )
    return found


def _products(one: Tensor, other: Tensor) -> Tensor:
    return one.double() * other.double()
