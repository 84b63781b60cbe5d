"""Training positions shifted, jittered and stretched."""

from __future__ import annotations

from math import isfinite, log
from typing import Literal, final

import torch
from torch import Tensor

from posenc.core.checks import check_integers, check_values
from posenc.core.sites import PositionTransform
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.tokens import check_integer_positions, check_positions
from posenc.errors import ShapeError

Numbers = Literal["real", "integer"]


@final
class Augmented(PositionTransform):
    """In training, moves the positions of a sequence together, each a little on its own, and stretches them all.

    The thing people get wrong: relative encodings see no shift, so for them `shift` changes nothing; it teaches absolute
    ones that only distances count. The second thing: jitter of more than half the distance between neighbours swaps them;
    that is refused, because it destroys the order instead of blurring it.

    ``"real"`` (CAPE): ``λ · (position + Δ + ε)`` with Δ ~ U(-shift, shift) and ln λ ~ U(-ln stretch, ln stretch) once per
    sequence, ε ~ U(-jitter, jitter) for each token; Δ and ε for each axis. ``"integer"`` (SHAPE): ``position + Δ`` with Δ
    from 0 … shift, for encodings that look positions up; their table needs ``shift`` more rows. In evaluation both are the
    identity.

    Positions with a batch axis get one draw per row; without one, the whole batch shares a draw. Documents packed into one
    row move together.

    Args:
        shift: the farthest that a sequence moves, in the positions' unit; an integer for ``"integer"``.
        jitter: the farthest that a token moves on its own; at most half the distance between neighbours.
        stretch: the most that distances grow, or shrink, 1 or more; 1 leaves them.
        numbers: ``"real"`` or ``"integer"``.
        axes: how many numbers a position has; ``None`` for plain numbers.

    Shape:
        positions: ``[*batch, seq]``, with axes ``[*batch, seq, axes]``; the same shape comes back.

    Returns:
        float64 positions for ``"real"``, int64 for ``"integer"``; in evaluation the positions themselves.

    Raises:
        ValueError: a negative or infinite setting; jitter or stretch of integers; neighbours closer than twice the jitter.
        TypeError: real positions or a real shift for ``"integer"``.
        ShapeError: positions of another number of axes.

    Example:
        >>> transform = Augmented(shift=100, numbers="integer")
        >>> transform(torch.arange(4), torch.Generator().manual_seed(0)).diff()
        tensor([1, 1, 1])
        >>> transform.eval()(torch.arange(3))
        tensor([0, 1, 2])

    Differs from:
        CAPE: its code also moves positions so that their mean is 0; subtract it before, if wanted.

    References:
        Likhomanenko et al. 2021, "CAPE: Encoding Relative Positions with Continuous Augmented Positional Embeddings",
        arXiv:2106.03143; Kiyono et al. 2021, "SHAPE: Shifted Absolute Position Embedding for Transformers",
        arXiv:2109.05644.
    """

    spec = EncodingSpec(
        name="augmented",
        summary="shifts, jitters and stretches positions in training",
        build=lambda shape: [Augmented(shift=shape.max_length, jitter=0.5, stretch=1.1)],
        claims=frozenset({"parameter-free", "any-length", "real-positions"}),
        references=(
            Reference("Likhomanenko et al. 2021", "CAPE: Continuous Augmented Positional Embeddings", "2106.03143"),
            Reference("Kiyono et al. 2021", "SHAPE: Shifted Absolute Position Embedding", "2109.05644"),
        ),
    )

    def __init__(
        self,
        *,
        shift: float = 0.0,
        jitter: float = 0.0,
        stretch: float = 1.0,
        numbers: Numbers = "real",
        axes: int | None = None,
    ) -> None:
        super().__init__()
        for key, value, least in (("shift", shift, 0), ("jitter", jitter, 0), ("stretch", stretch, 1)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Augmented: {key} = {value!r}. Expected a number. Pass a plain int or float.")
            if not (isfinite(value) and value >= least):
                raise ValueError(
                    f"Augmented: {key} = {value}. Expected a finite number of {least} or more. It is the largest change, to "
                    "either side."
                )
        if numbers not in ("real", "integer"):
            raise ValueError(f"Augmented: numbers = {numbers!r}. Expected 'real' or 'integer'. Name one.")
        if numbers == "integer":
            check_integers("Augmented", 0, shift=shift)
            if jitter or stretch != 1:
                raise ValueError(
                    f"Augmented: jitter = {jitter}, stretch = {stretch} with integers. Expected a shift alone, which leaves them "
                    "integers. Use numbers='real' with an encoding of real positions."
                )
        if axes is not None:
            check_integers("Augmented", 1, axes=axes)
        self.shift, self.jitter, self.stretch, self.numbers, self.axes = shift, jitter, stretch, numbers, axes

    def extra_repr(self) -> str:
        more = "" if self.axes is None else f", axes={self.axes}"
        return f"shift={self.shift}, jitter={self.jitter}, stretch={self.stretch}, numbers={self.numbers!r}{more}"

    def forward(self, positions: Tensor, generator: torch.Generator | None = None) -> Tensor:
        check_positions(positions, name="Augmented")
        if not self.training:
            return positions
        trailing = 1 if self.axes is None else 2
        if positions.ndim < trailing or (self.axes is not None and positions.shape[-1] != self.axes):
            raise ShapeError(
                f"Augmented: positions of shape {tuple(positions.shape)}. Expected [*batch, seq{'' if self.axes is None else f', {self.axes}'}]. "
                "Build it with the number of axes that positions have."
            )
        per_sequence = (*positions.shape[: positions.ndim - trailing], *(1 for _ in range(trailing)))
        per_axis = per_sequence if self.axes is None else (*per_sequence[:-1], self.axes)

        def uniform(size: tuple[int, ...], least: float = -1.0, most: float = 1.0) -> Tensor:
            draw = torch.empty(size, dtype=torch.float64, device=positions.device)
            return draw.uniform_(least, most, generator=generator)  # torch.rand with a generator takes no symbolic size

        if self.numbers == "integer":
            check_integer_positions(positions, name="Augmented", why="it keeps them integers")
            steps = uniform(per_axis, 0.0, self.shift + 1).floor().clamp(max=self.shift)  # a draw may round up to its end
            return positions.to(torch.int64) + steps.to(torch.int64)
        places = positions.to(torch.float64)
        self._check_spacing(places)
        moved = places + self.shift * uniform(per_axis) + self.jitter * uniform(positions.shape)
        return moved * torch.exp(log(self.stretch) * uniform(per_sequence))

    def _check_spacing(self, places: Tensor) -> None:
        """Neighbours that each move by less than half of their distance keep their order."""
        apart = places.diff(dim=-1 if self.axes is None else -2).abs()
        valid = (apart == 0) | (apart * (1 + 1e-9) >= 2 * self.jitter)  # frames 10 ms apart are so up to rounding
        check_values(
            valid,
            lambda: (
                f"Augmented: jitter = {self.jitter} with neighbours {apart[~valid].min().item():g} apart. Expected at most half "
                "of their distance, or they change places. Give jitter in the positions' own unit."
            ),
        )
