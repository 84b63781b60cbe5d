"""Attention that becomes sharper with position."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from posenc.core.sites import QKEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.temperature import LogN, Temperature
from posenc.core.tokens import check_positions
from posenc.errors import ShapeError


@final
class LogitTemperature(QKEncoding):
    """Multiplies each query by a factor of its position, so that attention over many keys stays as sharp as over few.

    The thing people get wrong: which formula. `LogTemperature`, `LogRatio` and `LogN` differ by one token in where they
    start and by a step function in how they rise; a checkpoint needs its own. Only queries are multiplied: on both
    sides the logits would get the square.

    Biases whose terms come from the query (`ShawRelative`) are multiplied with it; others are not. Use it beside the
    encodings of a layer, ``[RoPE(…), LogitTemperature(…)]``, in any order.

    Args:
        factor: `LogTemperature` (Llama 4, Ministral 3), `LogRatio` (Inkling), `LogN` (Qwen), or your own `Temperature`:
            a callable from positions to float64 factors.

    Shape:
        q: ``[*batch, heads, seq, head_dim]``; k: likewise, of any head count; positions: ``[*batch, seq]``.

    Returns:
        The multiplied queries, rounded once to their dtype, and the keys as they were.

    Raises:
        TypeError: a factor that cannot be called; half-precision positions.
        ShapeError: another number of positions than queries; queries and keys of different length without k_positions.

    Example:
        >>> q = k = torch.ones(1, 1, 2, 4)
        >>> LogitTemperature(LogN(16))(q, k, torch.tensor([15, 255]))[0][0, 0, :, 0]
        tensor([1., 2.])

    Differs from:
        transformers: factors in float32 there, in float64 here. Inkling's bias is multiplied there as well.

    References:
        Chiang and Cholak 2022, "Overcoming a Theoretical Limitation of Self-Attention", arXiv:2202.12172; Nakanishi 2025,
        "Scalable-Softmax Is Superior for Attention", arXiv:2501.19399.
    """

    spec = EncodingSpec(
        name="temperature",
        summary="multiplies queries, more at later positions",
        build=lambda shape: [LogitTemperature(LogN(max(2, shape.max_length)))],
        claims=frozenset({"parameter-free", "any-length", "real-positions"}),
        references=(
            Reference("Chiang and Cholak 2022", "Overcoming a Theoretical Limitation of Self-Attention", "2202.12172"),
            Reference("Nakanishi 2025", "Scalable-Softmax Is Superior for Attention", "2501.19399"),
        ),
    )

    def __init__(self, factor: Temperature) -> None:
        super().__init__()
        if isinstance(factor, type) or not callable(factor):
            raise TypeError(
                f"LogitTemperature: factor = {factor!r}. Expected a function of positions such as LogN(2048). A constant "
                "factor belongs into the softmax scale."
            )
        self.factor = factor

    def extra_repr(self) -> str:
        return repr(self.factor)

    def prepare(self, positions: Tensor, k_positions: Tensor | None = None, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The factor of each query, ``[*batch, seq]``; keys have none."""
        check_positions(positions, name="LogitTemperature")
        home = positions.cpu() if positions.device.type == "mps" else positions  # no float64 on mps
        return self.factor(home).to(dtype).to(positions.device)

    def transform(self, q: Tensor, k: Tensor, prepared: Tensor) -> tuple[Tensor, Tensor]:
        """Queries times their factors."""
        if prepared.shape[-1:] != q.shape[-2:-1]:
            raise ShapeError(
                f"LogitTemperature: factors of {tuple(prepared.shape)} positions for q of shape {tuple(q.shape)}. Expected one "
                "per query. Prepare them from the positions of exactly these tokens."
            )
        return (q * prepared[..., None, :, None]).to(q.dtype), k
