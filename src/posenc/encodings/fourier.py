"""Sines and cosines along many directions: random, doubling, or learned."""

from __future__ import annotations

from math import isfinite, pi, sqrt
from typing import Literal, final

import torch
from torch import Tensor, nn

from posenc.core.checks import check_integers
from posenc.core.conventions import code
from posenc.core.rotary import Frequencies, rotary_table, rotary_table_nd
from posenc.core.sites import InputEncoding
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.tokens import Positions, resolve_positions
from posenc.errors import ShapeError

Kind = Literal["gaussian", "bands", "learned"]


@final
class FourierFeatures(InputEncoding):
    """Adds sines and cosines of real coordinates, at frequencies that are drawn, doubled or learned.

    The thing people get wrong: the unit. All three come from coordinates of order 1: on token numbers the bands are all zero
    (the sine of a multiple of π), and drawn frequencies of one cycle per token are noise. Normalise first (`patch_centres`,
    seconds of a short clip), or choose a small ``std``.

    ``"gaussian"``: ``[cos(2π B p) | sin(2π B p)]``, B drawn once from N(0, std²) in cycles per unit and never trained; it is
    a parameter without gradient, because it must be saved. The deviation decides what can be told apart: too small blurs,
    too large is noise.

    ``"bands"`` (NeRF): ``sin(2^k π p), cos(2^k π p)`` for k = 0, 1, … and each axis in turn; nothing is stored.

    ``"learned"``: ``dim^(-1/2) · [cos(W p) | sin(W p)]``, whose norm is 1/√2 at any p and W, through a layer, GELU and a
    layer; W starts as N(0, std²) in radians per unit (1/γ in the paper) and is trained.

    Args:
        dim: the model width, even; for ``"bands"`` a multiple of twice the axes.
        axes: how many numbers a position has; ``None`` for plain numbers.
        kind: ``"gaussian"``, ``"bands"`` or ``"learned"``.
        std: of the drawn frequencies, above 0, 1 by default; not for ``"bands"``.
        generator: for the first values.

    Shape:
        x: ``[*batch, seq, dim]``; positions: ``[*batch, seq]``, with axes ``[*batch, seq, axes]``, any real numbers.
        weight (B or W): ``[dim / 2, axes or 1]``; mlp.0 and mlp.2: linear layers of dim by dim, ``"learned"`` only.

    Returns:
        ``x`` plus the code, rounded once to ``x``'s dtype. `features` gives the sines and cosines alone.

    Raises:
        ValueError: a width that does not divide, an unknown kind, a std that is not above 0 or has no meaning.
        TypeError: half-precision positions or frequencies.
        ShapeError: ``x`` of another width, or other positions.

    Example:
        >>> encoding = FourierFeatures(8, 2, "bands")
        >>> encoding(torch.zeros(6, 8), patch_centres(2, 3).positions).shape
        torch.Size([6, 8])

    Differs from:
        NeRF: the paper's order and its π; the released code leaves π out and puts all axes of a frequency together. There the
            features replace the coordinates; here they are added.

    References:
        Tancik et al. 2020, "Fourier Features Let Networks Learn High Frequency Functions in Low Dimensional Domains",
        arXiv:2006.10739; Mildenhall et al. 2020, "NeRF", arXiv:2003.08934; Li et al. 2021, "Learnable Fourier Features for
        Multi-Dimensional Spatial Positional Encoding", arXiv:2106.02795.
    """

    spec = EncodingSpec(
        name="fourier",
        summary="sines and cosines along drawn, doubling or learned frequencies added to the embeddings",
        build=lambda shape: [FourierFeatures(shape.dim, kind="learned")],
        claims=frozenset({"any-length", "real-positions"}),
        references=(
            Reference("Tancik et al. 2020", "Fourier Features Let Networks Learn High Frequency Functions", "2006.10739"),
            Reference("Mildenhall et al. 2020", "NeRF", "2003.08934"),
            Reference("Li et al. 2021", "Learnable Fourier Features", "2106.02795"),
        ),
    )

    def __init__(
        self,
        dim: int,
        axes: int | None = None,
        kind: Kind = "gaussian",
        *,
        std: float | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("FourierFeatures", 1, dim=dim)
        if axes is not None:
            check_integers("FourierFeatures", 1, axes=axes)
        if kind not in ("gaussian", "bands", "learned"):
            raise ValueError(f"FourierFeatures: kind = {kind!r}. Expected 'gaussian', 'bands' or 'learned'. Name one.")
        multiple = 2 * (axes or 1) if kind == "bands" else 2
        if dim % multiple:
            raise ValueError(
                f"FourierFeatures: dim = {dim} of kind {kind!r} with axes = {axes}. Expected a multiple of {multiple}, a sine and a "
                "cosine each. Choose another width."
            )
        if kind == "bands" and std is not None:
            raise ValueError(
                f"FourierFeatures: std = {std} of kind 'bands'. Expected none, since nothing is drawn. Leave it out."
            )
        std = 1.0 if std is None else std
        if isinstance(std, bool) or not isinstance(std, (int, float)) or not (isfinite(std) and std > 0):
            raise ValueError(
                f"FourierFeatures: std = {std!r}. Expected a finite number above 0, in frequency per unit of position. Leave it "
                "out for 1."
            )
        self.dim, self.axes, self.kind, self.std = dim, axes, kind, float(std)
        if kind != "bands":
            weight = torch.empty(dim // 2, axes or 1, device=device, dtype=dtype)
            self.weight = nn.Parameter(weight, requires_grad=kind == "learned")
        if kind == "learned":
            layers = (nn.Linear(dim, dim, device=device, dtype=dtype) for _ in range(2))
            self.mlp = nn.Sequential(next(layers), nn.GELU(), next(layers))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Frequencies from N(0, std²), layers as torch has them; a fixed B is drawn anew as well."""
        if self.kind == "bands":
            return
        nn.init.normal_(self.weight, std=self.std, generator=generator)
        if self.kind == "learned":
            bound = 1 / sqrt(self.dim)
            for layer in (self.mlp[0], self.mlp[2]):
                for parameter in layer.parameters():
                    nn.init.uniform_(parameter, -bound, bound, generator=generator)

    def extra_repr(self) -> str:
        drawn = "" if self.kind == "bands" else f", std={self.std:g}"
        return f"{self.dim}, axes={self.axes}, kind={self.kind!r}{drawn}"

    def features(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The sines and cosines, ``[*batch, seq, dim]``; of the learned kind what goes into its layers."""
        home = torch.device("cpu") if positions.device.type == "mps" else positions.device  # no float64 on mps
        if self.kind == "bands":
            return self._bands(positions, dtype, home)
        if self.weight.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"FourierFeatures: frequencies are {self.weight.dtype}. Expected float32 or float64, since angles from rounded "
                "frequencies are wrong. Call .float() on this module after casting the model, and load its parameters again."
            )
        unit, gain = (2 * pi, 1.0) if self.kind == "gaussian" else (1.0, self.dim**-0.5)
        matrix = unit * self.weight.to(home).to(torch.float64).T
        if self.axes is None:
            cos, sin = rotary_table(positions, Frequencies(matrix[0], gain), dtype=dtype)
        else:
            cos, sin = rotary_table_nd(positions, Frequencies(matrix, gain), dtype=dtype)
        return torch.cat([cos, sin], dim=-1)

    def _bands(self, positions: Tensor, dtype: torch.dtype, home: torch.device) -> Tensor:
        share = self.dim // (self.axes or 1)
        doubling = torch.arange(share // 2, dtype=torch.int64, device=home).to(torch.float64)
        frequencies = Frequencies(pi * torch.exp2(doubling))
        axes = (positions,) if self.axes is None else positions.unbind(-1)
        return torch.cat([code(axis, frequencies, share, layout="interleaved", dtype=dtype) for axis in axes], dim=-1)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ShapeError(
                f"FourierFeatures: x has width {x.shape[-1]}. Expected {self.dim}. Build it with the model's width."
            )
        at = resolve_positions(positions, x.shape[-2], name="FourierFeatures", device=x.device, axes=self.axes)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        features = self.features(at, dtype=wide)
        if self.kind == "learned":
            features = self.mlp(features.to(self.weight.dtype))
        return (x + features.to(wide)).to(x.dtype)
