"""`assert_positions_ok`: the audit of a model as one line of a test suite."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from posenc.audit import KINDS, Report, Severity, audit


def assert_positions_ok(model: nn.Module, *, fail_on: Severity = "warning", allow: Collection[str] = ()) -> Report:
    """Fail when the audit of a model finds something.

    The thing people get wrong: testing positions on one short sequence without padding, where almost every mistake
    gives the right answer.

    Args:
        fail_on: the least severity that fails.
        allow: ids of findings that are known and accepted.

    Returns:
        The report, accepted findings included.

    Raises:
        AssertionError: with the findings, as the audit prints them.
        ValueError: an id that no finding has.

    Example:
        >>> from posenc import RoPE, Transformer
        >>> model = Transformer(16, dim=16, layers=1, heads=2, encodings=[RoPE(8)])
        >>> assert_positions_ok(model).findings
        ()
    """
    unknown = [name for name in allow if name not in KINDS]
    if unknown:
        raise ValueError(
            f"assert_positions_ok: allow = {unknown[0]!r}. Expected ids of findings, such as 'left-padding'. "
            "posenc.audit.KINDS lists them."
        )
    report = audit(model)
    wrong = tuple(finding for finding in report.at_least(fail_on) if finding.id not in allow)
    if wrong:
        raise AssertionError(f"{report.subject}: {len(wrong)} of its positions' findings:\n\n" + "\n\n".join(map(str, wrong)))
    return report
