"""What encodings need per model forward, made once and used by every layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posenc.core.bias import DenseBias, ScoreBias, materialize
from posenc.core.sites import (
    ContentScoreEncoding,
    Encoding,
    InputEncoding,
    PositionTransform,
    QKEncoding,
    ScoreEncoding,
)
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
        raise ValueError(
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
    distinct: dict[int, Encoding] = {id(encoding): encoding for encoding in check_list(encodings, "prepare")}
    values: list[Any] = []
    for encoding in distinct.values():
        check_site(encoding, "prepare")
        if isinstance(encoding, QKEncoding):
            values.append(encoding.prepare(positions, k_positions, dtype=dtype))
        else:
            values.append(_bias_of(encoding) if isinstance(encoding, ScoreEncoding) else None)
    return Prepared(tuple(distinct.values()), tuple(values))


def _bias_of(encoding: ScoreEncoding) -> ScoreBias:
    bias = encoding()
    if not isinstance(bias, ScoreBias):
        raise TypeError(
            f"{type(encoding).__name__}: its forward returned {type(bias).__name__}. Expected a ScoreBias value, such as SlopeBias or "
            "DenseBias. Return one."
        )
    return bias


def check_list(encodings: Iterable[Encoding], name: str) -> Iterable[Encoding]:
    """Refuse one encoding where a list of them belongs: modules are callable, so the mistake would surface far away."""
    if isinstance(encodings, (Encoding, str)) or encodings is None:
        shown = encodings if isinstance(encodings, str) else type(encodings).__name__
        raise TypeError(f"{name}: encodings = {shown!r}. Expected a list of encodings. Write encodings=[…], with [] for none.")
    return encodings


def check_site(encoding: Encoding, name: str) -> None:
    """Refuse, by name, what does not act inside attention."""
    if isinstance(encoding, QKEncoding) and encoding.head_axis != -3:
        raise ValueError(
            f"{name}: {type(encoding).__name__} with head_axis = {encoding.head_axis}. Expected -3, since attention works on "
            "[batch, heads, seq, head_dim]. Build it without head_axis."
        )
    if isinstance(encoding, (QKEncoding, ScoreEncoding, ContentScoreEncoding)):
        return
    if isinstance(encoding, (InputEncoding, PositionTransform)):
        raise TypeError(
            f"{name}: {type(encoding).__name__} acts on {encoding.acts_on}. Expected encodings of queries and keys or of the "
            "score. Apply it before attention, or give it to posenc.Transformer, which does."
        )
    raise TypeError(
        f"{name}: {encoding!r} is no encoding. Expected instances of posenc encodings. Subclass QKEncoding or ScoreEncoding."
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
