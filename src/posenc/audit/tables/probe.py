"""Calling what is to be checked: answers as tensors, errors with the name of the check, modules put back as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from posenc.audit.findings import Finding, Kind, Report, Severity


class Refused(ValueError):
    """The function raised."""


@final
class Probe:
    """Calls a user's function without gradients and leaves the random state as it was.

    Args:
        name: of the public check, for messages.
        expected: what the function takes and gives, for messages.
    """

    def __init__(self, name: str, fn: Callable[..., Any], expected: str) -> None:
        if not callable(fn):
            raise TypeError(
                f"{name}: fn is a {type(fn).__name__}. Expected a callable {expected}. Pass a function or a module."
            )
        self.name, self.fn, self.expected, self.calls = name, fn, expected, 0

    def __call__(self, *given: Any) -> Tensor:
        """What the function gives, detached."""
        fresh = [value.clone() if isinstance(value, Tensor) else value for value in given]  # x += table is allowed
        self.calls += 1
        cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=cards):
                torch.default_generator.manual_seed(self.calls)  # what is drawn at random differs from call to call
                answer = self.fn(*fresh)
        except Exception as error:
            kind = TypeError if isinstance(error, TypeError) else Refused
            raise kind(
                f"{self.name}: fn raised {type(error).__name__}: {error}. Expected a callable {self.expected}. "
                "Call it yourself with the same arguments, or wrap it in a lambda that takes them."
            ) from error
        if not isinstance(answer, Tensor):
            raise TypeError(
                f"{self.name}: fn gave a {type(answer).__name__}. Expected a callable {self.expected}. Return the tensor alone."
            )
        if answer.is_meta or answer.is_complex() or answer.dtype == torch.bool or answer.layout != torch.strided:
            what = "a tensor without values (meta)" if answer.is_meta else f"{answer.dtype}, {answer.layout}"
            raise TypeError(
                f"{self.name}: fn gave {what}. Expected a dense tensor of real numbers. Load the weights, or return cosine and "
                "sine in place of complex numbers."
            )
        return answer.detach().cpu().clone()  # a buffer may change in a later call

    def answers(self, *given: Any) -> Tensor | None:
        """The same, ``None`` where the function refuses."""
        try:
            return self(*given)
        except (Refused, TypeError):
            return None

    def check_repeats(self, *given: Any) -> None:
        """Refuse a function whose answers differ although nothing else happened in between."""
        if not torch.equal(torch.nan_to_num(self(*given)), torch.nan_to_num(self(*given))):
            raise ValueError(
                f"{self.name}: fn gives two answers to the same call. Expected none to be drawn at random. Switch dropout and "
                "random positions off: module.eval()."
            )


@contextmanager
def evaluating(fn: object) -> Iterator[None]:
    """A module in evaluation mode, each of its parts as it was afterwards."""
    modes = {module: module.training for module in fn.modules()} if isinstance(fn, nn.Module) else {}
    for module in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff of a dtype: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def rounded_to(values: Tensor, dtype: torch.dtype) -> float:
    """The unit roundoff of what values were rounded to, whatever dtype they came in: Falcon's bias is float32 of bfloat16 numbers."""
    for narrow in (torch.bfloat16, torch.float16):
        if dtype.is_floating_point and torch.equal(values.nan_to_num(), values.nan_to_num().to(narrow).to(values.dtype)):
            return unit(narrow)
    return max(unit(dtype), 2.0**-24)


def listed(values: Tensor, most: int = 4) -> str:
    """The first numbers of a vector, for messages."""
    shown = ", ".join(f"{value:.6g}" for value in values.flatten()[:most].tolist())
    return f"[{shown}{', …' if values.numel() > most else ''}]"


@final
@dataclass
class Sheet:
    """What one check has found so far."""

    subject: str
    where: str
    described: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def found(self, kind: Kind, measured: str, expected: str, severity: Severity | None = None) -> None:
        """Note a finding."""
        self.findings.append(kind.at(self.where, measured=measured, expected=expected, severity=severity))

    def has(self, *kinds: Kind) -> bool:
        """Whether there is a finding of one of these kinds."""
        return any(finding.kind in kinds for finding in self.findings)

    def report(self) -> Report:
        """All of it."""
        return Report.of(self.subject, self.findings, described=self.described, checked=self.checked, skipped=self.skipped)


def called(fn: object) -> str:
    """What to call a function in a report."""
    return getattr(fn, "__qualname__", None) or type(fn).__name__
