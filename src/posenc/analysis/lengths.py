"""How long the sequences of a data set are, against a trained length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import final

from posenc.core.checks import check_integers
from posenc.core.sites import Encoding, PositionTransform

QUANTILES = (0.5, 0.9, 0.95, 0.99)


@final
@dataclass(frozen=True)
class LengthGroup:
    """The lengths of some sequences.

    Args:
        name: of the group.
        count: how many sequences.
        tokens: how many tokens they have together.
        shortest, longest: in tokens.
        quantiles: for each of `QUANTILES`, the least length that so large a share of the sequences does not exceed: a
            length that occurs, never one between two.
        beyond: how many sequences are longer than the trained length.
        tokens_beyond: how many tokens stand past it.
    """

    name: str
    count: int
    tokens: int
    shortest: int
    longest: int
    quantiles: tuple[int, ...]
    beyond: int
    tokens_beyond: int

    @property
    def share_beyond(self) -> float:
        """The share of the sequences that are longer than the trained length."""
        return self.beyond / self.count


@final
@dataclass(frozen=True)
class PastTrained:
    """What an encoding does past the trained length, from what it claims.

    Args:
        name: in the catalogue.
        defined: whether it claims to be defined there at all.
        words: in words, no more than the claims say.
    """

    name: str
    defined: bool
    words: str


@final
@dataclass(frozen=True)
class LengthReport:
    """Lengths of a data set against a trained length.

    Args:
        trained: in tokens.
        total: all sequences.
        groups: the same by group, most sequences past the trained length first; empty without groups.
        encodings: what each encoding asked about does past the trained length.
    """

    trained: int
    total: LengthGroup
    groups: tuple[LengthGroup, ...] = ()
    encodings: tuple[PastTrained, ...] = ()


def length_report(
    lengths: Iterable[int],
    trained: int,
    *,
    groups: Iterable[str] | None = None,
    encodings: Sequence[type[Encoding]] = (),
) -> LengthReport:
    """How many sequences are longer than a model was trained for, and what encodings do there.

    The thing people get wrong: an average. A data set with a mean far below the trained length can have a tenth of its
    sequences, and most of its tokens, past it; look at the shares and the longest.

    Args:
        lengths: of sequences, in the model's tokens; whole numbers of 0 or more.
        trained: the trained length, in tokens; 1 or more.
        groups: the group of each sequence, one per length.
        encodings: classes to ask what they claim past the trained length.

    Raises:
        TypeError: lengths that are no integers. ValueError: no lengths, negative ones, another number of groups.

    Example:
        >>> report = length_report([100, 200, 300, 5000], 4096, groups=["a", "a", "b", "b"])
        >>> report.total.share_beyond, report.total.tokens_beyond, report.groups[0].name
        (0.25, 904, 'b')
    """
    check_integers("length_report", 1, trained=trained)
    known = list(lengths)
    check_integers("length_report", 0, **{f"lengths[{index}]": length for index, length in enumerate(known)})
    if not known:
        raise ValueError("length_report: no lengths. Expected one or more. Look at what they were read from.")
    names = None if groups is None else list(groups)
    if names is not None and len(names) != len(known):
        raise ValueError(
            f"length_report: {len(names)} groups for {len(known)} lengths. Expected one per length. Name each sequence's group."
        )
    by_name: dict[str, list[int]] = {}
    for name, length in zip(names or [], known, strict=False):
        by_name.setdefault(name, []).append(length)
    parts = [_group(name, members, trained) for name, members in by_name.items()]
    return LengthReport(
        trained,
        _group("all", known, trained),
        tuple(sorted(parts, key=lambda part: (-part.share_beyond, part.name))),
        tuple(past_trained(encoding, trained) for encoding in encodings),
    )


def past_trained(encoding: type[Encoding], trained: int) -> PastTrained:
    """What an encoding does past the trained length, in words that say no more than its claims.

    The thing people get wrong: "any length" means that numbers come out, not that a model does well with them.

    Example:
        >>> past_trained(Learned, 512).words
        'claims nothing past 512 tokens; it may raise'
        >>> past_trained(ALiBi, 512).words
        'defined; distances of 512 or more were never seen in training; bias never rises with distance'
    """
    spec = encoding.spec
    if "any-length" not in spec.claims:
        return PastTrained(spec.name, False, f"claims nothing past {trained:,} tokens; it may raise")
    if not encoding.reads_positions:
        words = ["defined", "reads no positions, so only the number of tokens is new"]
    elif issubclass(encoding, PositionTransform):
        words = ["defined", "what was seen in training is up to its own settings"]
    elif "shift-invariant" in spec.claims:
        words = ["defined", f"distances of {trained:,} or more were never seen in training"]
    else:
        words = ["defined", f"positions of {trained:,} or more were never seen in training"]
    if "monotone" in spec.claims:
        words.append("bias never rises with distance")
    return PastTrained(spec.name, True, "; ".join(words))


def _group(name: str, lengths: list[int], trained: int) -> LengthGroup:
    ordered = sorted(lengths)
    return LengthGroup(
        name=name,
        count=len(ordered),
        tokens=sum(ordered),
        shortest=ordered[0],
        longest=ordered[-1],
        quantiles=tuple(ordered[max(ceil(share * len(ordered)), 1) - 1] for share in QUANTILES),
        beyond=sum(length > trained for length in ordered),
        tokens_beyond=sum(max(length - trained, 0) for length in ordered),
    )
