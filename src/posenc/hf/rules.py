"""The other things that configurations say of positions: input tables, score biases, temperatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final


@final
@dataclass(frozen=True)
class InputTable:
    """A table of position codes that is added to the embeddings.

    Args:
        kind: learned rows, or one of the sinusoidal conventions.
        rows: how many there are; ``None`` for a formula without end.
        offset: the row of the first token: 2 in OPT, ``padding_idx + 1`` in RoBERTa.
        per_axis: rows along each axis, for grids.
    """

    kind: Literal["learned", "sinusoidal"]
    rows: int | None = None
    offset: int = 0
    layout: Literal["interleaved", "concatenated"] | None = None

    @property
    def length(self) -> int | None:
        """How many tokens fit."""
        return None if self.rows is None else self.rows - self.offset

    def __str__(self) -> str:
        size = "" if self.rows is None else f" of {self.rows} rows"
        start = f", first token at row {self.offset}" if self.offset else ""
        fits = f" ({self.length} tokens fit)" if self.offset and self.rows else ""
        form = f", {self.layout}" if self.layout else ""
        return f"{self.kind} table{size}{form}{start}{fits}"


@final
@dataclass(frozen=True)
class BiasRule:
    """A bias on the attention scores.

    Args:
        kind: ``alibi``, ``t5``, ``deberta``, ``shaw``, ``swin``, ``transformer-xl`` …
        heads: how many heads it has.
        details: the other numbers that define it.
    """

    kind: str
    heads: int | None = None
    details: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        words = [f"{self.heads} heads"] if self.heads else []
        words += [f"{name.replace('_', ' ')} {value}" for name, value in self.details]
        names = {"alibi": "ALiBi", "t5": "T5 buckets", "deberta": "DeBERTa disentangled", "swin": "Swin table"}
        return f"{names.get(self.kind, self.kind)} bias" + (f" ({', '.join(words)})" if words else "")
