"""Distance as a part of the query's position, through a small network."""

from __future__ import annotations

from math import isfinite
from typing import Any, final

import torch
from torch import Tensor, nn

from posenc.core.autocast import without_autocast
from posenc.core.bias import FormulaBias, ScoreBias
from posenc.core.checks import check_integers
from posenc.core.sites import ScoreEncoding
from posenc.core.spec import EncodingSpec, Reference

_EPS = 1e-6  # of the released code, added to the normaliser


@final
class FIRE(ScoreEncoding):
    """Adds ``f(ψ(distance) / ψ(max(query, threshold)))`` to each score; f is a small network with one output per head.

    The thing people get wrong: it is *not* a function of the distance. Past the threshold the same distance counts for
    less the further along the query stands, so queries need their true positions in their document: restarted in each
    packed document, counted from the first real token under left padding, continued in a cache.

    ``ψ(x) = ln(|c| · x + 1)``, ``threshold = |L_multiplier| · 512``, and f is linear, ReLU, linear, with ``hidden`` units.
    Every input of f lies between 0 and 1, so lengths past the trained ones ask it nothing new.

    Made for causal attention. A key in the future counts as one at distance 0, with finite gradients: an encoder can tell
    how far back a key is, and of later ones nothing.

    One instance for all layers is the paper's FIRE-S; one per layer is FIRE.

    Args:
        heads: 1 or more.
        hidden: the width of f.
        threshold: in positions, above 0; what ``L_multiplier`` multiplies, ``init_L`` in the released code.
        init_c: where c starts, above 0.

    Shape:
        c, L_multiplier: ``[]``; mlp.0.weight: ``[hidden, 1]``; mlp.2.weight: ``[heads, hidden]``; named as in the released
        code, whose fixed ``init_L`` is compared with ``threshold`` when a checkpoint holds it.

    Returns:
        A `FormulaBias` in float32 or wider; integer or real positions, never ``None``.

    Raises:
        TypeError: counts that are no integers.
        ValueError: a count below 1, a threshold or init_c that is not above 0.

    Example:
        >>> bias, at = FIRE(4)(), torch.arange(600)
        >>> row = materialize(bias, at)[:, -1]
        >>> row.shape
        torch.Size([4, 600])

    Differs from:
        the released code: ``|distance|`` there, so that keys in the future mirror the past; equal under a causal mask.
        copies of it: some drop the + 1 inside the logarithm, subtract instead of dividing, or place the 1e-6 elsewhere.

    References:
        Li et al. 2024, "Functional Interpolation for Relative Positions Improves Long Context Transformers",
        arXiv:2310.04418.
    """

    spec = EncodingSpec(
        name="fire",
        summary="adds a small network of the distance as a part of the query's position to the scores",
        build=lambda shape: [FIRE(shape.heads)],
        claims=frozenset({"any-length", "real-positions"}),
        references=(Reference("Li et al. 2024", "Functional Interpolation for Relative Positions", "2310.04418"),),
    )

    def __init__(
        self,
        heads: int,
        *,
        hidden: int = 32,
        threshold: float = 512,
        init_c: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("FIRE", 1, heads=heads, hidden=hidden)
        for name, value, meaning in (("threshold", threshold, "of positions"), ("init_c", init_c, "per position")):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not (isfinite(value) and value > 0):
                raise ValueError(
                    f"FIRE: {name} = {value!r}. Expected a finite number above 0, {meaning}. Leave it out for the paper's."
                )
        self.heads, self.threshold, self.init_c = heads, threshold, init_c
        self.mlp = nn.Sequential(
            nn.Linear(1, hidden, device=device, dtype=dtype), nn.ReLU(), nn.Linear(hidden, heads, device=device, dtype=dtype)
        )
        self.c = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.L_multiplier = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """f as torch starts linear layers, c at ``init_c``, the threshold where it was set."""
        for layer in (self.mlp[0], self.mlp[2]):
            assert isinstance(layer, nn.Linear)
            layer.reset_parameters()
        nn.init.constant_(self.c, self.init_c)
        nn.init.ones_(self.L_multiplier)

    def extra_repr(self) -> str:
        return f"{self.heads}, threshold={self.threshold:g}"

    def forward(self) -> ScoreBias:
        wide = torch.promote_types(self.c.dtype, torch.float32)
        learned = (self.c, self.L_multiplier, *self.mlp.parameters())
        c, multiplier, *network = (parameter.to(wide) for parameter in learned)
        threshold = (multiplier * self.threshold).abs()
        heads = torch.arange(self.heads, dtype=torch.int64, device=self.c.device)
        return FormulaBias(_fire, (c, threshold, *network), heads, pointwise=False)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """The released code stores the threshold beside what multiplies it; another one would change every number."""
        given = state_dict.get(prefix + "init_L")
        rest = {key: value for key, value in state_dict.items() if key != prefix + "init_L"}
        if isinstance(given, Tensor) and given.device.type != "meta" and float(given) != self.threshold:
            error_msgs.append(
                f"FIRE: {prefix}init_L = {float(given):g} in the state dict. Expected {self.threshold:g}, the threshold it was "
                f"built with. Build it with threshold={float(given):g}."
            )
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


def _fire(
    q: Tensor,
    k: Tensor,
    head: Tensor,
    c: Tensor,
    threshold: Tensor,
    rise: Tensor,
    shift: Tensor,
    rows: Tensor,
    offset: Tensor,
) -> Tensor:
    """The bias of one entry, or of a grid: hidden units once for each query and key, never for each head.

    They stand as ``[hidden, entries]``, which halves the time of the backward against ``[entries, hidden]``.
    """
    distance = (q - k).to(c.dtype).clamp(min=0)
    part = _psi(distance, c) / (_psi(torch.maximum(q.to(c.dtype), threshold), c) + _EPS)
    own = head.reshape(-1)
    with without_autocast(part.device):
        units = torch.addmm(shift.unsqueeze(-1), rise, part.reshape(1, -1)).relu_()
        every = torch.addmm(offset[own].unsqueeze(-1), rows[own], units)
    if head.ndim == 0:
        return every.reshape(())
    return every.view(len(own), *part.squeeze(-3).shape).movedim(0, -3)  # part is [*batch, 1, q, k]


def _psi(x: Tensor, c: Tensor) -> Tensor:
    return (c.abs() * x).log1p()
