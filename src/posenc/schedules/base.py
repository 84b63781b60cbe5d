"""What a frequency rule is: a schedule, which needs a width only, or a length rule, which needs the length as well."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import final

import torch
from torch import Tensor

from posenc.core.checks import check_integers, check_values
from posenc.core.rotary import Frequencies
from posenc.core.rotary import Schedule as Schedule


class LengthRule(ABC):
    """A rule whose frequencies depend on how long the sequence is: `DynamicNTK`, `LongRoPE`.

    The thing people get wrong: keys that are already cached keep the frequencies they were turned with, so a sequence
    that grows past a change of frequencies compares queries of one rule with keys of another. Therefore this is not a
    schedule. Either fix one length for the whole of a sequence, ``rule.at(length)``, which is a schedule, or give the
    frequencies to each call, ``rope.prepare(…, frequencies=rule.frequencies_at(rotary_dim, lengths))``, and rotate
    keys anew when they change.

    A length is a sequence's own, its last position plus one; never the padded width of the batch.
    """

    @abstractmethod
    def frequencies_at(
        self,
        rotary_dim: int,
        lengths: Tensor | int,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> Frequencies:
        """The frequencies of sequences of these lengths.

        Args:
            lengths: in tokens, integers of 0 or more.
            device: of the frequencies; that of ``lengths`` by default.

        Shape:
            lengths: ``[*batch]``; inv_freq: ``[*batch, pairs]``; amplitude: a number, or ``[*batch]`` where it depends
            on the length.
        """

    @final
    def at(self, length: int) -> AtLength:
        """The schedule of sequences of this length, in tokens."""
        return AtLength(self, length)


@final
@dataclass(frozen=True)
class AtLength:
    """A length rule at one length: a schedule, whose cached keys stay right.

    Args:
        rule: `DynamicNTK`, `LongRoPE`, or your own `LengthRule`.
        length: in tokens, 1 or more; the longest that the sequence will become.

    Raises:
        TypeError: a rule that is no `LengthRule`, or a length that is no integer.
        ValueError: a length below 1.

    Example:
        >>> from posenc.schedules.dynamic_ntk import DynamicNTK
        >>> from posenc.schedules.geometric import Geometric
        >>> AtLength(DynamicNTK(Geometric(), 2.0, 2048), 2048).frequencies(4).inv_freq
        tensor([1.0000, 0.0100], dtype=torch.float64)
    """

    rule: LengthRule
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.rule, LengthRule):
            raise TypeError(
                f"AtLength: rule = {self.rule!r}. Expected a LengthRule such as DynamicNTK. A schedule needs no length; use it as it is."
            )
        check_integers("AtLength", 1, length=self.length)

    def frequencies(
        self, rotary_dim: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Frequencies:
        """The rule's frequencies of ``rotary_dim / 2`` pairs at this length."""
        return self.rule.frequencies_at(rotary_dim, self.length, dtype=dtype, device=device)


def check_schedule(name: str, schedule: object) -> None:
    """Refuse what is not a schedule, and a length rule without a length.

    Raises:
        TypeError: either.
    """
    if isinstance(schedule, LengthRule):
        raise TypeError(
            f"{name}: schedule = {schedule!r}, whose frequencies depend on the length, while keys already cached do not "
            "follow. Expected a schedule. Fix the length, rule.at(length); or give RoPE the frequencies of each call, "
            "prepare(…, frequencies=rule.frequencies_at(rotary_dim, lengths)), and rotate keys anew when they change."
        )
    if isinstance(schedule, type) or not callable(getattr(schedule, "frequencies", None)):
        raise TypeError(
            f"{name}: schedule = {schedule!r}. Expected a schedule such as Geometric(10000.0). A bare base goes into Geometric."
        )


def resolve_lengths(name: str, lengths: Tensor | int, device: torch.device | str | None) -> Tensor:
    """Lengths as a tensor of integers on ``device``, checked.

    Raises:
        TypeError: lengths that are not integers. ValueError: negative ones.
    """
    if not isinstance(lengths, Tensor):
        check_integers(name, 0, lengths=lengths)
        return torch.full((), lengths, dtype=torch.int64, device=device)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(
            f"{name}: lengths are {lengths.dtype}. Expected integers, in tokens. Take positions.amax(-1) + 1 of integer positions."
        )
    check_values(
        lengths >= 0,
        lambda: f"{name}: lengths = {lengths.tolist()}. Expected 0 or more. Take each sequence's last position plus one.",
    )
    return lengths if device is None else lengths.to(device)


def keep_numbers(
    schedule: object, *keys: str, least: float | None = None, above: float | None = None, optional: bool = False
) -> None:
    """Hold these settings of a frozen schedule as floats, so that equal ones compute alike, or refuse them.

    Raises:
        TypeError: not a number. ValueError: not finite, below ``least``, or not above ``above``.
    """
    bound = f"of {least:g} or more" if least is not None else f"above {above:g}"
    for key in keys:
        value = getattr(schedule, key)
        if value is None and optional:
            continue
        says = f"{type(schedule).__name__}: {key} = {value!r}. Expected a finite number {bound}."
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{says} Pass a plain int or float.")
        right = isfinite(value) and (least is None or value >= least) and (above is None or value > above)
        if not right:
            wrong_way = isfinite(value) and key == "factor" and value > 0
            raise ValueError(
                f"{says} A factor divides frequencies, so a context 4 times as long has factor 4: pass its inverse."
                if wrong_way
                else f"{says} Look at the configuration it comes from."
            )
        object.__setattr__(schedule, key, float(value))


def keep_length(schedule: object) -> None:
    """Refuse an ``original_length`` that is no number of tokens; ``None`` says that it is not known yet.

    Raises:
        TypeError: not an integer. ValueError: below 1.
    """
    length = getattr(schedule, "original_length", None)
    if length is not None:
        check_integers(type(schedule).__name__, 1, original_length=length)


def known_length(schedule: object) -> int:
    """The ``original_length``, which frequencies cannot be computed without.

    Raises:
        ValueError: it was left out.
    """
    length = getattr(schedule, "original_length", None)
    if length is None:
        raise ValueError(
            f"{type(schedule).__name__}: original_length is not given. Expected the length that the model was trained on, in tokens. "
            "Pass it; only posenc.hf.extend fills it in from a model."
        )
    assert isinstance(length, int)
    return length


def keep_list(schedule: object, key: str) -> None:
    """Hold a list of numbers of a frozen schedule as a tuple of floats, so that it can be hashed and compared.

    Raises:
        TypeError: not a list of plain numbers.
    """
    given = getattr(schedule, key)
    values = tuple(given) if isinstance(given, Iterable) else (given,)
    if not isinstance(given, Iterable) or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in values):
        raise TypeError(
            f"{type(schedule).__name__}: {key} = {given!r}. Expected a list of numbers, one per channel pair. "
            "Pass plain ints and floats; of a tensor, its tolist()."
        )
    object.__setattr__(schedule, key, tuple(float(v) for v in values))
