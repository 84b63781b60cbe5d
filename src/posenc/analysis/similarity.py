"""How alike the codes of two positions are."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from posenc.analysis.shift import check_inv_freq
from posenc.core.sinusoid import sinusoid
from posenc.errors import ShapeError

Measure = Literal["dot", "cosine"]


def similarity_kernel(lags: Tensor, inv_freq: Tensor) -> Tensor:
    """The dot product of two sinusoidal codes a lag apart: ``Σ over pairs of cos(lag · inv_freq)``.

    The thing people get wrong: it does not fall steadily. It depends on the lag alone, starts at ``pairs`` and first rises
    again at lag 6 for a width of 64, at 44 for 512.

    Shape:
        lags: ``[*batch, n]``, any real numbers; inv_freq: ``[pairs]``; the kernel: ``[*batch, n]``.

    Returns:
        float64.

    Raises:
        TypeError: lags in half precision, frequencies that are not floating point. ShapeError: frequencies of several axes.

    Example:
        >>> similarity_kernel(torch.tensor([0, 1, 10]), Sinusoidal(64).inv_freq())
        tensor([32.0000, 30.9168, 21.0516], dtype=torch.float64)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762.
    """
    check_inv_freq("similarity_kernel", inv_freq)
    _, cos = sinusoid(lags, inv_freq.to(torch.float64), dtype=torch.float64)
    return cos.sum(-1)


def similarity_matrix(codes: Tensor, *, measure: Measure = "dot") -> Tensor:
    """How alike every two codes of a table are; fixed and learned tables alike.

    Args:
        codes: one row per position.
        measure: ``"dot"``, or ``"cosine"`` for rows of length 1 (a row of zeros is like nothing: 0).

    Shape:
        codes: ``[*batch, positions, dim]``; the matrix: ``[*batch, positions, positions]``.

    Returns:
        float64.

    Raises:
        ShapeError: codes of fewer than two axes. ValueError: an unknown measure.

    Example:
        >>> similarity_matrix(torch.tensor([[3.0, 0.0], [0.0, 2.0]]))
        tensor([[9., 0.],
                [0., 4.]], dtype=torch.float64)
    """
    if measure not in ("dot", "cosine"):
        raise ValueError(f"similarity_matrix: measure = {measure!r}. Expected 'dot' or 'cosine'. Name one.")
    check_codes("similarity_matrix", codes)
    rows = codes.detach().to(torch.float64)
    if measure == "cosine":
        rows = normalize(rows, dim=-1)
    return rows @ rows.transpose(-1, -2)


def check_codes(name: str, codes: Tensor) -> None:
    """Refuse what is not a table of codes, a row per position."""
    if not isinstance(codes, Tensor) or codes.ndim < 2 or 0 in codes.shape[-2:]:
        shape = tuple(codes.shape) if isinstance(codes, Tensor) else type(codes).__name__
        raise ShapeError(f"{name}: codes are {shape}. Expected [*batch, positions, dim]. Pass a row per position.")
