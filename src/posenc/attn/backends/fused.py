"""One call of torch's fused attention, in the form that its kernels take."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_HALF = (torch.bfloat16, torch.float16)
_HALF_IS_SLOW = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
"""Whether this processor multiplies halves by widening each: its fused backward then takes six times as long as float32's."""


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float, dropout_p: float
) -> Tensor:
    """Attention under a mask, or causal with equal lengths, in q's dtype.

    The kernels take q, k and v of one width, so zeros fill the narrower, and masks of two or four axes. Where a gradient
    of halves is slow, it is formed in float32.

    Shape:
        mask: booleans, or what is added to the scores: ``[q, k]`` or ``[batch or 1, heads or 1, q, k]``.
    """
    if causal and scale <= 0.0:  # the CPU kernel hides by -inf before it multiplies by the scale
        q, scale = (-q, -scale) if scale else (0.0 * q, 1.0)
    dtype, width, v_width = q.dtype, max(q.shape[-1], v.shape[-1]), v.shape[-1]
    if _HALF_IS_SLOW and dtype in _HALF and q.device.type == "cpu" and _needs_gradient(q, k, v):
        q, k, v = q.float(), k.float(), v.float()
    out = scaled_dot_product_attention(
        filled(q, width), filled(k, width), filled(v, width),
        attn_mask=mask, dropout_p=dropout_p, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
    ).to(dtype)  # fmt: skip
    return out if v_width == width else out[..., :v_width]


def filled(x: Tensor, width: int) -> Tensor:
    """With channels of zeros up to a width."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
