"""Randomised training positions."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from posenc.core.checks import check_values
from posenc.core.sites import PositionTransform
from posenc.core.spec import EncodingSpec, Reference
from posenc.core.tokens import check_integer_positions, check_positions


@final
class Randomized(PositionTransform):
    """In training, replaces positions 0 … n - 1 by n sorted random ones below ``limit``, without repetition.

    The thing people get wrong: what happens in evaluation. Here it is the identity: plain positions, as published for
    the encoders' tests. Long positions are then no news to the model, because it has trained on numbers that large.

    The position p reads entry p of its row's draw, so padding and packed restarts keep their meaning. Positions with a
    batch axis get one draw per row; without one, the whole batch shares a draw.

    Args:
        limit: positions are drawn from ``[0, limit)``; at least the longest training sequence.

    Shape:
        positions: ``[*batch, seq]`` integers from 0 to seq - 1; the same comes back, int64.

    Raises:
        ValueError: a sequence longer than ``limit``, or positions outside 0 … seq - 1.
        TypeError: real positions.

    Example:
        >>> transform = Randomized(100)
        >>> drawn = transform(torch.arange(5), torch.Generator().manual_seed(0))
        >>> bool((drawn.diff() > 0).all())
        True
        >>> transform.eval()(torch.arange(3))
        tensor([0, 1, 2])

    References:
        Ruoss et al. 2023, "Randomized Positional Encodings Boost Length Generalization of Transformers",
        arXiv:2305.16843.
    """

    spec = EncodingSpec(
        name="randomized",
        summary="draws sorted random positions in training",
        build=lambda shape: [Randomized(8 * shape.max_length)],
        claims=frozenset({"parameter-free", "any-length"}),
        references=(
            Reference("Ruoss et al. 2023", "Randomized Positional Encodings Boost Length Generalization", "2305.16843"),
        ),
    )

    def __init__(self, limit: int) -> None:
        super().__init__()
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(
                f"Randomized: limit = {limit!r}. Expected an integer of 1 or more, at least the longest training sequence. "
                "Several times the length to be reached is usual."
            )
        self.limit = limit

    def extra_repr(self) -> str:
        return str(self.limit)

    def forward(self, positions: Tensor, generator: torch.Generator | None = None) -> Tensor:
        check_positions(positions, name="Randomized")
        if not self.training:
            return positions
        check_integer_positions(positions, name="Randomized", why="each picks an entry of the draw")
        positions = positions.to(torch.int64)
        n = positions.shape[-1]
        if n > self.limit:
            raise ValueError(
                f"Randomized: {n} tokens with limit = {self.limit}. Expected at most limit tokens, since positions are drawn "
                "without repetition. Raise limit."
            )
        check_values(
            (positions >= 0) & (positions < n),
            lambda: (
                f"Randomized: positions from {positions.min().item()} to {positions.max().item()} for {n} tokens. "
                "Expected 0 … n - 1: they pick entries of a draw. Build them with contiguous, padded or packed."
            ),
        )
        noise = torch.rand(*positions.shape[:-1], self.limit, device=positions.device, generator=generator, dtype=torch.float64)
        drawn = noise.topk(n, dim=-1).indices.sort(dim=-1).values
        return drawn.gather(-1, positions)
