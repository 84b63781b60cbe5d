"""Findings as values: what is wrong, where, how much, why it matters and how to mend it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final, get_args

Severity = Literal["note", "warning", "error"]
"""``note``: worth knowing. ``warning``: wrong for some inputs, or likely to be. ``error``: wrong now."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
PAGES = "docs/findings"
"""Where the documentation has one page per kind."""


@final
@dataclass(frozen=True)
class Kind:
    """A kind of finding; `posenc.audit.KINDS` lists them all.

    Args:
        id: short and stable, in words: ``"rotary-pairing"``.
        severity: of a finding of this kind, unless the check knows better.
        title: what is wrong, in a few words.
        why: what it does to the model.
        mend: what to do.
    """

    id: str
    severity: Severity
    title: str
    why: str
    mend: str

    def at(
        self, where: str, *, measured: str, expected: str, severity: Severity | None = None, mend: str | None = None
    ) -> Finding:
        """A finding of this kind.

        Args:
            where: the module, function, layer or key.
            measured: what was seen, with numbers.
            expected: what should have been.
        """
        return Finding(self, where, measured, expected, severity or self.severity, mend or self.mend)

    @property
    def page(self) -> str:
        """Where the documentation shows it: the wrong thing, how it looks, the mend."""
        return f"{PAGES}/{self.id}.md"


@final
@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing. Made by `Kind.at`."""

    kind: Kind
    where: str
    measured: str
    expected: str
    severity: Severity
    mend: str

    @property
    def id(self) -> str:
        return self.kind.id

    def __str__(self) -> str:
        return (
            f"{self.severity}: {self.kind.title} [{self.id}]\n"
            f"  where     {self.where}\n"
            f"  measured  {self.measured}\n"
            f"  expected  {self.expected}\n"
            f"  why       {self.kind.why}\n"
            f"  mend      {self.mend}\n"
            f"  see       {self.kind.page}"
        )

    def to_dict(self) -> dict[str, str]:
        """Plain data: all of it in strings."""
        return {
            "id": self.id,
            "severity": self.severity,
            "title": self.kind.title,
            "where": self.where,
            "measured": self.measured,
            "expected": self.expected,
            "why": self.kind.why,
            "mend": self.mend,
            "page": self.kind.page,
        }


@final
@dataclass(frozen=True)
class Report:
    """What a check found. Print it, ask `at_least`, or write `to_json`.

    Args:
        subject: what was looked at.
        described: what its positions are, in words, one line each.
        findings: the gravest first.
        checked: names of the checks that ran.
        skipped: checks that did not, each with the reason.
    """

    subject: str
    described: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        subject: str,
        findings: Iterable[Finding] = (),
        *,
        described: Iterable[str] = (),
        checked: Iterable[str] = (),
        skipped: Mapping[str, str] | None = None,
    ) -> Report:
        """A report with its findings in order, equal ones once."""
        grave = sorted(dict.fromkeys(findings), key=lambda finding: -SEVERITIES.index(finding.severity))
        once = tuple(dict.fromkeys(checked))
        return Report(subject, tuple(dict.fromkeys(described)), tuple(grave), once, dict(skipped or {}))

    @property
    def ids(self) -> tuple[str, ...]:
        """The kinds of the findings, each once, the gravest first."""
        return tuple(dict.fromkeys(finding.id for finding in self.findings))

    def at_least(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of a severity or a graver one."""
        floor = SEVERITIES.index(severity)
        return tuple(finding for finding in self.findings if SEVERITIES.index(finding.severity) >= floor)

    def __add__(self, other: Report) -> Report:
        """Both, under this one's subject."""
        return Report.of(
            self.subject,
            (*self.findings, *other.findings),
            described=(*self.described, *other.described),
            checked=(*self.checked, *other.checked),
            skipped={**self.skipped, **other.skipped},
        )

    def __str__(self) -> str:
        lines = [self.subject, *(f"  {line}" for line in self.described)]
        counts = [(s, sum(finding.severity == s for finding in self.findings)) for s in reversed(SEVERITIES)]
        said = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts if count) or "nothing found"
        lines.append(f"  {said}; {len(self.checked)} check{'s' * (len(self.checked) != 1)}, {len(self.skipped)} skipped")
        lines += [f"\n{finding}" for finding in self.findings]
        if self.skipped:
            lines += ["\nskipped", *(f"  {name}: {reason}" for name, reason in self.skipped.items())]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `json`."""
        return {
            "subject": self.subject,
            "described": list(self.described),
            "findings": [finding.to_dict() for finding in self.findings],
            "checked": list(self.checked),
            "skipped": dict(self.skipped),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
