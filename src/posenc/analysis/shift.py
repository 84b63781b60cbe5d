"""Moving a sinusoidal code is a rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.core.checks import check_values
from posenc.encodings.sinusoidal import Layout
from posenc.errors import ShapeError


def shift_matrix(shift: float, inv_freq: Tensor, *, layout: Layout) -> Tensor:
    """The matrix M with ``code(p + shift) = M @ code(p)`` for every position p.

    The thing people get wrong: what it looks like. Neighbouring 2 × 2 blocks ``[[cos, sin], [-sin, cos]]`` belong to the
    interleaved layout; in the concatenated one M is ``[[C, S], [-S, C]]`` with diagonal blocks. And that M exists says
    that a model *can* read offsets linearly, not that it will.

    M is orthogonal with determinant 1: ``M(a) @ M(b) = M(a + b)``, and the transpose shifts back.

    Args:
        shift: in units of position, any real number.
        inv_freq: radians per position, as from `Sinusoidal.inv_freq`. Odd widths have a sine without its cosine and no M.
        layout: ``"interleaved"`` or ``"concatenated"``.

    Shape:
        inv_freq: ``[pairs]``; the matrix: ``[2 · pairs, 2 · pairs]``.

    Returns:
        float64, on inv_freq's device.

    Raises:
        ShapeError: inv_freq of more than one axis. TypeError: not floating point. ValueError: an unknown layout.

    Example:
        >>> code = Sinusoidal(8)
        >>> shifted = shift_matrix(3, code.inv_freq(), layout="interleaved") @ code.table(torch.arange(5), dtype=torch.float64).T
        >>> torch.allclose(shifted.T, code.table(torch.arange(3, 8), dtype=torch.float64), rtol=0, atol=1e-14)
        True

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, section 3.5.
    """
    check_inv_freq("shift_matrix", inv_freq)
    if layout not in ("interleaved", "concatenated"):
        raise ValueError(f"shift_matrix: layout = {layout!r}. Expected 'interleaved' or 'concatenated'. Name the code's own.")
    angle = shift * inv_freq.to(torch.float64)
    C, S = angle.cos().diag(), angle.sin().diag()
    matrix = torch.cat([torch.cat([C, S], dim=1), torch.cat([-S, C], dim=1)])
    if layout == "concatenated":
        return matrix
    order = torch.arange(2 * len(angle), device=angle.device).view(2, -1).T.flatten()  # 0, pairs, 1, pairs + 1, …
    return matrix[order][:, order]


def check_inv_freq(name: str, inv_freq: Tensor) -> None:
    """Refuse frequencies that are not one floating-point axis of finite numbers."""
    if not isinstance(inv_freq, Tensor) or not inv_freq.is_floating_point():
        kind = inv_freq.dtype if isinstance(inv_freq, Tensor) else type(inv_freq).__name__
        raise TypeError(f"{name}: inv_freq is {kind}. Expected a floating-point tensor. Take Sinusoidal(dim).inv_freq().")
    if inv_freq.ndim != 1:
        raise ShapeError(
            f"{name}: inv_freq of shape {tuple(inv_freq.shape)}. Expected [pairs]. Pass the frequencies of one ladder."
        )
    check_values(
        inv_freq.isfinite(),
        lambda: (
            f"{name}: inv_freq holds {inv_freq[~inv_freq.isfinite()][0].item()}. Expected finite numbers. Look at its schedule."
        ),
    )
