"""Learned waves of time, and one line."""

from __future__ import annotations

from math import isfinite, log, pi
from typing import final

import torch
from torch import Tensor, nn

from posenc.core.checks import check_integers
from posenc.core.sites import InputEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.tokens import Positions, resolve_positions
from posenc.errors import ShapeError


@final
class Time2Vec(InputEncoding):
    """Adds sines of learned frequency and phase, and in the first channel a straight line.

    The thing people get wrong: the line. It grows without end, so with frame numbers or seconds since 1970 it drowns
    everything else; give times from the start of the sequence, in a unit in which they stay moderate, and say how far they
    reach (``length``): the line starts within ±1 over it. The second thing: half precision. A frequency rounded to bfloat16
    is off by whole turns after a few hundred steps, so half-precision parameters are refused.

    ``code[0] = ω[0] · t + φ[0]``; ``code[i] = sin(ω[i] · t + φ[i])``. With several axes ``ω · t`` is their sum.

    The paper leaves the first values open. Here frequencies are log-uniform from 1/length to 1/step radians per unit with
    either sign, phases uniform over the circle, the line's offset 0.

    Args:
        dim: the model width.
        length: how far positions reach, in their unit.
        step: how far apart neighbours are, in the same unit; below ``length``.
        axes: how many numbers a position has; ``None`` for plain numbers.

    Shape:
        x: ``[*batch, seq, dim]``; positions: ``[*batch, seq]``, with axes ``[*batch, seq, axes]``, any real numbers.
        weight (ω): ``[dim, axes or 1]``; bias (φ): ``[dim]``.

    Returns:
        ``x`` plus the code, rounded once to ``x``'s dtype.

    Raises:
        ValueError: a width below 1, a length that is not above the step.
        TypeError: half-precision positions or parameters.
        ShapeError: ``x`` of another width, or other positions.

    Example:
        >>> Time2Vec(8, length=30.0, step=0.01)(torch.zeros(3, 8), seconds(3, 160, 16_000).positions).shape
        torch.Size([3, 8])

    Differs from:
        the paper: the vector is joined to the input there; here it is added. Angles in float64.

    References:
        Kazemi et al. 2019, "Time2Vec: Learning a Vector Representation of Time", arXiv:1907.05321.
    """

    spec = EncodingSpec(
        name="time2vec",
        summary="learned sines and one line added to the embeddings",
        build=lambda shape: [Time2Vec(shape.dim, length=float(max(2, shape.max_length)))],
        claims=frozenset({"any-length", "real-positions"}),
        references=(Reference("Kazemi et al. 2019", "Time2Vec: Learning a Vector Representation of Time", "1907.05321"),),
    )

    def __init__(
        self,
        dim: int,
        length: float,
        *,
        step: float = 1.0,
        axes: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("Time2Vec", 1, dim=dim)
        if axes is not None:
            check_integers("Time2Vec", 1, axes=axes)
        for key, value in (("length", length), ("step", step)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Time2Vec: {key} = {value!r}. Expected a number. Pass a plain int or float.")
        if not (0 < step < length and isfinite(length)):
            raise ValueError(
                f"Time2Vec: length = {length}, step = {step}. Expected a step above 0 and a finite length above it, both in the "
                "unit of positions. For audio in seconds give the clip and the hop."
            )
        self.dim, self.length, self.step, self.axes = dim, float(length), float(step), axes
        self.weight = nn.Parameter(torch.empty(dim, axes or 1, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Frequencies, phases and the line as the class says."""
        with torch.no_grad():
            self.weight.uniform_(-1, 1, generator=generator)
            sign, share = self.weight[1:].sign(), self.weight[1:].abs()
            self.weight[1:] = sign * torch.exp(-share * log(self.length / self.step)) / self.step
            self.weight[:1] /= self.length
            self.bias.uniform_(0, 2 * pi, generator=generator)
            self.bias[0] = 0

    def extra_repr(self) -> str:
        more = "" if self.axes is None else f", axes={self.axes}"
        return f"{self.dim}, length={self.length:g}, step={self.step:g}{more}"

    def table(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The code of each position, ``[*batch, seq, dim]``."""
        if self.weight.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"Time2Vec: parameters are {self.weight.dtype}. Expected float32 or float64, since angles from rounded frequencies "
                "are off by whole turns. Call .float() on this module after casting the model, and load its parameters again."
            )
        home = torch.device("cpu") if positions.device.type == "mps" else positions.device  # no float64 on mps
        places, weight, bias = (t.to(home).to(torch.float64) for t in (positions, self.weight, self.bias))
        axes = [places] if self.axes is None else list(places.unbind(-1))
        angle = bias
        for axis, place in enumerate(axes):
            angle = angle + place[..., None] * weight[:, axis]
        return torch.cat([angle[..., :1], angle[..., 1:].sin()], dim=-1).to(dtype).to(positions.device)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ShapeError(f"Time2Vec: x has width {x.shape[-1]}. Expected {self.dim}. Build it with the model's width.")
        at = resolve_positions(positions, x.shape[-2], name="Time2Vec", device=x.device, axes=self.axes)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return (x + self.table(at, dtype=wide)).to(x.dtype)
