"""What encodings need per model forward, made once and used by every layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posenc.core.bias import DenseBias, ScoreBias, materialize
from posenc.core.sites import ContentScoreEncoding, Encoding, InputEncoding, PositionTransform, QKEncoding, ScoreEncoding
from posenc.errors import ShapeError


@dataclass(frozen=True, eq=False)
class Prepared:
    """A value per encoding instance: for a `QKEncoding` what its `prepare` made, for a `ScoreEncoding` its bias."""

    encodings: tuple[Encoding, ...]
    values: tuple[Any, ...]

    def __getitem__(self, encoding: Encoding) -> Any:
        for known, value in zip(self.encodings, self.values, strict=True):
            if known is encoding:
                return value
        raise KeyError(
            f"Prepared: nothing for this {type(encoding).__name__}. Expected one of the instances given to prepare. "
            "Prepare all encodings of the model together."
        )

    def materialized(self, positions: Tensor, k_positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Prepared:
        """The same with every bias written out once, for layers that share it on a dense backend."""
        dense = [
            DenseBias(materialize(value, positions, k_positions, dtype=dtype)) if isinstance(value, ScoreBias) else value
            for value in self.values
        ]
        return Prepared(self.encodings, tuple(dense))


def prepare(
    encodings: Iterable[Encoding],
    positions: Tensor,
    k_positions: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Prepared:
    """Tables and biases of some encodings for these tokens: once per model forward, for all layers.

    Args:
        encodings: of queries and keys or of the score; an instance that appears twice is prepared once.
        positions: ``[*batch, seq]`` of the new queries; k_positions of the new keys, the same tokens when ``None``.
        dtype: of rotary tables; float64 for a float64 model.

    Raises:
        TypeError: an encoding that acts elsewhere.

    Example:
        >>> rope = RoPE(8)
        >>> prepare([rope], torch.arange(3))[rope][0].cos.shape
        torch.Size([3, 4])
    """
    distinct: dict[int, Encoding] = {id(encoding): encoding for encoding in encodings}
    values: list[Any] = []
    for encoding in distinct.values():
        check_site(encoding, "prepare")
        if isinstance(encoding, QKEncoding):
            values.append(encoding.prepare(positions, k_positions, dtype=dtype))
        else:
            values.append(encoding() if isinstance(encoding, ScoreEncoding) else None)
    return Prepared(tuple(distinct.values()), tuple(values))


def check_site(encoding: Encoding, name: str) -> None:
    """Refuse, by name, what does not act inside attention."""
    if isinstance(encoding, (QKEncoding, ScoreEncoding, ContentScoreEncoding)):
        return
    if isinstance(encoding, (InputEncoding, PositionTransform)):
        raise TypeError(
            f"{name}: {type(encoding).__name__} acts on {encoding.acts_on}. Expected encodings of queries and keys or of the "
            "score. Apply it before attention, or give it to posenc.Transformer, which does."
        )
    raise TypeError(
        f"{name}: {type(encoding).__name__} is no encoding. Expected instances of posenc encodings. Subclass QKEncoding or "
        "ScoreEncoding."
    )


def check_axes(encodings: Iterable[Encoding], axes: int | None, name: str) -> None:
    """Refuse tokens whose positions have another number of axes than an encoding reads: ``[seq, axes]`` would pass for
    ``[batch, seq]``."""
    for encoding in encodings:
        if encoding.reads_positions and encoding.axes != axes:
            raise ShapeError(
                f"{name}: positions of {axes or 1} axes for {type(encoding).__name__}. Expected {encoding.axes or 1}. "
                "Build the tokens with one number per token (contiguous, padded, …) or use an encoding of that many axes."
            )
