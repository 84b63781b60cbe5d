"""`check_reordering`: whether a function moves the rows of query and key projections as the other pairing needs them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from posenc.audit.findings import Finding, Report
from posenc.audit.kinds import rotary as kinds
from posenc.convert.pairing import pair_order
from posenc.core.checks import check_integers
from posenc.core.rotary import Pairing

Direction = Literal["interleaved-to-half", "half-to-interleaved"]

_NAME = "check_reordering"


def check_reordering(
    fn: Callable[..., Any],
    *,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    rotary_dim: int | None = None,
    direction: Direction = "interleaved-to-half",
    back: Callable[..., Any] | None = None,
    hidden: int | None = None,
) -> Report:
    """Follow each row of the projections of queries and keys through a function that converts them to the other pairing.

    The thing people get wrong: grouped-query models. Their key projection has fewer heads; reordered with the number of
    query heads it keeps its shape, a multi-head model still passes, and a grouped one speaks gibberish. Therefore pass a
    function of both weights, with the head counts that your script gives it.

    Args:
        fn: ``(q_weight, k_weight) -> (q_weight, k_weight)``, or ``(weight) -> weight`` for a projection of ``heads`` heads.
        heads: of queries.
        head_dim: the width of a head.
        kv_heads: of keys; as many by default.
        rotary_dim: how many channels of a head turn, the leading ones; all by default. The others must not move.
        direction: ``"interleaved-to-half"`` (Meta's Llama to transformers) or ``"half-to-interleaved"``.
        back: the function for the other direction, to test that there and back is the identity.
        hidden: columns of the weights; ``heads · head_dim`` by default.

    Shape:
        q_weight: ``[heads · head_dim, hidden]``; k_weight: ``[kv_heads · head_dim, hidden]``. A bias, ``[heads · head_dim]``,
        is tried as well; a function that does not take one is not blamed.

    Returns:
        A `Report`; ``described`` gives the order of the first head's rows.

    Raises:
        TypeError: no function, another signature, or a result that is not tensors.
        ValueError: the function raises, or changes shapes; numbers that do not fit.

    Example:
        >>> from posenc.convert import reorder_pairs
        >>> report = check_reordering(
        ...     lambda q, k: (reorder_pairs(q, 4, "half"), reorder_pairs(k, 4, "half")), heads=4, kv_heads=2, head_dim=8
        ... )
        >>> report.ids
        ('reordering-heads',)
        >>> print(report.findings[0].measured)
        keys: rows 0 2 1 3 4 6 5 7 8 10 9 11 12 14 13 15
    """
    check_integers(_NAME, 1, heads=heads, head_dim=head_dim)
    kv_heads = heads if kv_heads is None else kv_heads
    check_integers(_NAME, 1, kv_heads=kv_heads)
    hidden = heads * head_dim if hidden is None else hidden
    check_integers(_NAME, 1, hidden=hidden)
    if direction not in ("interleaved-to-half", "half-to-interleaved"):
        raise ValueError(
            f"{_NAME}: direction = {direction!r}. Expected 'interleaved-to-half' or 'half-to-interleaved'. Pass what the function does."
        )
    sides = _sides(fn, heads, kv_heads)
    to: Pairing = "half" if direction == "interleaved-to-half" else "interleaved"
    expected = {side: _order(head_dim, count, to, rotary_dim) for side, count in sides.items()}
    where = getattr(fn, "__qualname__", None) or type(fn).__name__
    kv = "" if kv_heads == heads else f", {kv_heads} of keys"
    subject = f"reordering {where}: {heads} heads{kv}, head_dim {head_dim}, {direction.replace('-', ' ')}"
    found: list[Finding] = []
    described: list[str] = []
    checked = ["rows"]
    skipped: dict[str, str] = {}
    rows = [torch.arange(len(order), dtype=torch.float32) for order in expected.values()]
    moved = _call(fn, [row[:, None].expand(-1, hidden) for row in rows])
    columns = _call(fn, [torch.arange(hidden, dtype=torch.float32).expand(len(row), -1) for row in rows])
    for (side, order), weight, column in zip(expected.items(), moved, columns, strict=True):
        said = _rows(side, weight, column, order, where)
        if said is None:
            said = _wrong_order(side, weight[:, 0].long(), order, head_dim, to, rotary_dim, where)
            described.append(f"{side}: {_say(weight[:head_dim, 0])} …")
        found += said
    if not found:
        found += _bias(fn, expected, where, skipped, checked)
    if back is not None and not found:
        checked.append("there and back")
        again = _call(back, list(moved))
        for side, row, weight in zip(expected, rows, again, strict=True):
            if not torch.equal(weight[:, 0], row):
                found.append(
                    kinds.REORDERING_ROUND_TRIP.at(where, measured=f"{side}: rows {_say(weight[:, 0])}", expected="0 1 2 3 …")
                )
    return Report.of(subject, found, described=described, checked=checked, skipped=skipped)


def _sides(fn: object, heads: int, kv_heads: int) -> dict[str, int]:
    """The projections that the function takes, with their head counts."""
    if not callable(fn):
        raise TypeError(
            f"{_NAME}: fn is {type(fn).__name__}. Expected a function (q_weight, k_weight) -> both. Pass the function itself."
        )
    try:
        parameters = [p for p in inspect.signature(fn).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        parameters = []
    plain = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if not plain or len(parameters) not in (1, 2):
        names = ", ".join(p.name for p in parameters) or "unknown parameters"
        raise TypeError(
            f"{_NAME}: fn takes ({names}). Expected (q_weight, k_weight) or (weight). Wrap it: lambda q, k: (reorder(q, heads), "
            "reorder(k, kv_heads))."
        )
    return {"weight": heads} if len(parameters) == 1 else {"queries": heads, "keys": kv_heads}


def _order(head_dim: int, heads: int, to: Pairing, rotary_dim: int | None) -> Tensor:
    """The rows of all heads in the other pairing's order."""
    head = pair_order(head_dim, to, rotary_dim=rotary_dim)
    return (torch.arange(heads)[:, None] * head_dim + head).flatten()


def _call(fn: Callable[..., Any], weights: list[Tensor]) -> tuple[Tensor, ...]:
    given = [weight.clone() for weight in weights]
    shapes = ", ".join(str(list(weight.shape)) for weight in given)
    try:
        with torch.no_grad():
            result = fn(*given)
    except Exception as error:
        raise ValueError(
            f"{_NAME}: the function raised {type(error).__name__}: {str(error)[:300]} (called with {shapes}). Expected it to reorder the "
            "rows. Check heads, kv_heads, head_dim and hidden."
        ) from error
    outputs = (result,) if isinstance(result, Tensor) else tuple(result) if isinstance(result, (tuple, list)) else ()
    if len(outputs) != len(weights) or not all(isinstance(y, Tensor) for y in outputs):
        raise TypeError(
            f"{_NAME}: the function returned {type(result).__name__}. Expected {'one weight' if len(weights) == 1 else 'two weights'}. "
            "Wrap it in a lambda that returns them."
        )
    for x, y in zip(weights, outputs, strict=True):
        if x.shape != y.shape:
            raise ValueError(
                f"{_NAME}: the function returned {list(y.shape)} for {list(x.shape)}. Expected the same shape. Check heads and head_dim."
            )
    return outputs


def _rows(side: str, weight: Tensor, column: Tensor, order: Tensor, where: str) -> list[Finding] | None:
    """Whether every row is there, whole and once; ``None`` when it is."""
    if not torch.equal(column.float(), torch.arange(column.shape[1], dtype=torch.float32).expand_as(column)):
        measured = "columns move or mix: the input axis was reordered"
    elif not torch.equal(weight, weight[:, :1].expand_as(weight)):
        measured = "rows are torn apart: a row's entries come from several rows"
    elif not torch.equal(weight[:, 0].float().sort().values, torch.arange(len(order), dtype=torch.float32)):
        lost = sorted(set(range(len(order))) - set(weight[:, 0].tolist()))
        measured = f"{len(lost)} rows are gone, {_say(torch.tensor(lost))}" if lost else "rows are mixed"
    else:
        return None
    return [kinds.REORDERING_ROWS.at(where, measured=f"{side}: {measured}", expected="each row whole and once")]


def _wrong_order(
    side: str, got: Tensor, order: Tensor, head_dim: int, to: Pairing, rotary_dim: int | None, where: str
) -> list[Finding]:
    """Which known mistake made the order, if it is not the right one."""
    if torch.equal(got, order):
        return []
    total = len(order)
    other: Pairing = "interleaved" if to == "half" else "half"
    heads = total // head_dim
    measured, expected = f"{side}: rows {_say(got)}", f"rows {_say(order)}"
    for width in (total // count for count in range(1, total // 4 + 1) if total % count == 0):  # two rows keep their order
        if width != head_dim and width % 2 == 0 and torch.equal(got, _order(width, total // width, to, None)):
            return [kinds.REORDERING_HEADS.at(where, measured=measured, expected=expected)]
    if torch.equal(got, torch.arange(total)):
        return [kinds.REORDERING_DIRECTION.at(where, measured=f"{side}: no row moves", expected=expected)]
    if torch.equal(got, _order(head_dim, heads, other, rotary_dim)):
        return [kinds.REORDERING_DIRECTION.at(where, measured=measured, expected=expected)]
    if rotary_dim is not None and rotary_dim < head_dim:
        within = torch.arange(total) % head_dim
        still = within >= rotary_dim
        if not torch.equal(got[still], torch.arange(total)[still]):
            return [kinds.REORDERING_SPAN.at(where, measured=measured, expected=expected)]
    elif any(torch.equal(got, _order(head_dim, heads, to, width)) for width in range(2, head_dim, 2)):
        return [kinds.REORDERING_SPAN.at(where, measured=measured, expected=expected)]
    return [kinds.REORDERING_ROWS.at(where, measured=measured, expected=expected)]


def _bias(
    fn: Callable[..., Any], expected: dict[str, Tensor], where: str, skipped: dict[str, str], checked: list[str]
) -> list[Finding]:
    try:
        moved = _call(fn, [torch.arange(len(order), dtype=torch.float32) for order in expected.values()])
    except (ValueError, TypeError) as error:
        skipped["bias"] = f"it takes no bias of one axis ({error.__cause__ or error})"
        return []
    checked.append("bias")
    return [
        kinds.REORDERING_BIAS.at(
            where, measured=f"{side}: entries {_say(bias)}", expected=f"entries {_say(order)}, as the rows"
        )
        for (side, order), bias in zip(expected.items(), moved, strict=True)
        if not torch.equal(bias.float(), order.float())
    ]


def _say(rows: Tensor) -> str:
    shown = " ".join(f"{int(row)}" for row in rows[:16])
    return shown + (" …" if len(rows) > 16 else "")
