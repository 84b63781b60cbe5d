"""Distance through a logarithm or a power, with learned coefficients."""

from __future__ import annotations

from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from posenc.core.bias import FormulaBias, ScoreBias
from posenc.core.checks import check_integers
from posenc.core.sites import ScoreEncoding
from posenc.core.spec import EncodingSpec, Reference

_LEAST = 0.01  # the released code clamps to this


@final
class KERPLE(ScoreEncoding):
    """Subtracts a learned function of the distance from each score: a logarithm or a power, two coefficients per head.

    The thing people get wrong: the names. The released code calls the factor ``bias_p`` in the logarithmic kernel and
    ``bias_a`` in the power kernel, so copying them by name swaps factor and exponent. A state dict with those names
    loads here and lands in the right places.

    ``kernel="log"``: ``-r1 · ln(1 + r2 · |distance|)``. ``kernel="power"``: ``-r1 · |distance|^r2`` with ``r2`` up to 2.

    All coefficients are positive by construction, ``r = softplus(raw)``, the exponent ``2 · sigmoid(raw)``: the released
    code clamps its parameters in place in every forward instead. Values loaded from it are clamped as it does, to 0.01
    and above, exponents to 2 and below, before they are mapped back; an exponent of exactly 2 becomes 2 - 2⁻²³.

    The paper shares one instance among all layers.

    Args:
        heads: 1 or more.
        kernel: as above.

    Shape:
        raw_r1, raw_r2: ``[heads]``. Released: bias_p, bias_a of ``[heads, 1, 1]``.

    Returns:
        A `FormulaBias` of the distance alone; float32 or wider, the power kernel float64.

    Raises:
        TypeError: a head count that is no integer.
        ValueError: a head count below 1, an unknown kernel.

    Example:
        >>> kerple = KERPLE(4)
        >>> kerple.load_state_dict({"bias_p": torch.ones(4, 1, 1), "bias_a": torch.ones(4, 1, 1)})
        <All keys matched successfully>
        >>> materialize(kerple(), torch.tensor([7]), torch.tensor([0, 7]))[0].detach()
        tensor([[-2.0794, -0.0000]])

    Differs from:
        the released code: distances towards the future count as 0 there, here like those towards the past; equal under
        a causal mask. Its power kernel can also multiply the scores (``wei_p``, ``wei_a``); that half is not here.

    References:
        Chi et al. 2022, "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation", arXiv:2205.09921.
    """

    spec = EncodingSpec(
        name="kerple",
        summary="subtracts a learned logarithm (or power) of the distance from the scores",
        build=lambda shape: [KERPLE(shape.heads)],
        claims=frozenset({"shift-invariant", "monotone", "toeplitz", "any-length", "real-positions"}),
        references=(
            Reference(
                "Chi et al. 2022", "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation", "2205.09921"
            ),
        ),
    )

    def __init__(
        self,
        heads: int,
        kernel: Literal["log", "power"] = "log",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("KERPLE", 1, heads=heads)
        if kernel not in ("log", "power"):
            raise ValueError(f"KERPLE: kernel = {kernel!r}. Expected 'log' or 'power'. The paper's best is 'log'.")
        self.heads, self.kernel = heads, kernel
        self.raw_r1 = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.raw_r2 = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As released: ``bias_p`` from U(0, 2) and ``bias_a`` from U(0, 1)."""
        with torch.no_grad():
            p, a = (torch.empty_like(self.raw_r1, dtype=torch.float64).uniform_(0, most) for most in (2, 1))
            for parameter, raw in zip((self.raw_r1, self.raw_r2), self._from_released(p, a), strict=True):
                parameter.copy_(raw)

    def extra_repr(self) -> str:
        return f"{self.heads}, kernel={self.kernel!r}"

    @property
    def r1(self) -> Tensor:
        """The factor of each head, ``[heads]`` in float64."""
        return _softplus(self.raw_r1.double())

    @property
    def r2(self) -> Tensor:
        """The rate or exponent of each head, ``[heads]`` in float64."""
        raw = self.raw_r2.double()
        return _softplus(raw) if self.kernel == "log" else 2 * raw.sigmoid()

    def forward(self) -> ScoreBias:
        heads = torch.arange(self.heads, dtype=torch.int64, device=self.raw_r1.device)
        if self.kernel == "power":  # an exponent's rounding comes out multiplied by r2 · ln(distance), so float64
            return FormulaBias(_power, (self.r1, self.r2), heads, distance_only=True)
        wide = torch.promote_types(self.raw_r1.dtype, torch.float32)
        return FormulaBias(_log, (self.r1.to(wide), self.r2.to(wide)), heads, distance_only=True)

    def _from_released(self, p: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """``raw_r1`` and ``raw_r2`` for the released code's ``bias_p`` and ``bias_a``."""
        p, a = (t.detach().double().flatten().clamp(min=_LEAST) for t in (p, a))
        if self.kernel == "log":
            return _inverse_softplus(p), _inverse_softplus(a)
        return _inverse_softplus(a), torch.logit(p / 2, eps=2**-24)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Takes the released names as well as its own."""
        p, a = (state_dict.get(f"{prefix}bias_{letter}") for letter in "pa")
        if isinstance(p, Tensor) and isinstance(a, Tensor):
            state_dict = {key: value for key, value in state_dict.items() if key not in (f"{prefix}bias_p", f"{prefix}bias_a")}
            state_dict[f"{prefix}raw_r1"], state_dict[f"{prefix}raw_r2"] = self._from_released(p, a)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _softplus(raw: Tensor) -> Tensor:
    return nn.functional.softplus(raw, threshold=40.0)  # torch's own 20 is for float32


def _inverse_softplus(r: Tensor) -> Tensor:
    return r + (-torch.expm1(-r)).log()


def _log(q: Tensor, k: Tensor, head: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    return -r1[head] * torch.log1p(r2[head] * _distance(q, k).to(r2.dtype))


def _power(q: Tensor, k: Tensor, head: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    distance = _distance(q, k)
    apart = distance > 0
    # the slope of a power below 1 is infinite at 0, and infinity times the outer where's zero is NaN
    return -r1[head] * torch.where(apart, torch.where(apart, distance, 1.0) ** r2[head], 0.0)


def _distance(q: Tensor, k: Tensor) -> Tensor:
    if q.is_floating_point() or k.is_floating_point():
        q, k = q.double(), k.double()
    return (q - k).abs().double()
