"""`check_table`: what a table of position codes is, and whether it is right, from calls alone."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose, isfinite, sqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from posenc.audit.findings import Report
from posenc.audit.kinds import tables as kinds
from posenc.audit.tables.grids import check_grid
from posenc.audit.tables.probe import Probe, Sheet, called, evaluating
from posenc.audit.tables.rows import Promise, Rows, extent, promised_rows, same
from posenc.core.checks import check_integers
from posenc.core.sites import InputEncoding
from posenc.errors import ShapeError
from posenc.hf.rules import InputTable

Reads = Literal["positions", "embeddings", "grid"]
"""What a table is called with: ``(positions)``, ``(x)`` to which it adds itself, or ``(height, width)`` of a picture."""

_NUMBERS = 2**22  # of float64 held at once, 32 MiB


def check_table(
    fn: Callable[..., Any],
    *,
    width: int,
    reads: Reads = "positions",
    expect: InputEncoding | InputTable | Literal["sinusoidal"] | None = None,
    length: int | None = None,
    spacing: float = 1.0,
    grid: tuple[int, int] = (16, 24),
) -> Report:
    """Read a table of position codes from calls: its formula, layout, start and end, and what is wrong with it.

    The thing people get wrong: everything fits. A table added along the batch, one row for all tokens, exponents over
    the wrong width, sines cut to integers, angles in bfloat16: all keep every shape, and the model trains, a little worse.

    Without ``expect`` only what is wrong under any convention is an error; layouts, rules and offsets are described. With
    ``"sinusoidal"`` the table must be a released sinusoidal code (base 10000, the paper's or tensor2tensor's exponents);
    with an encoding of posenc or an `posenc.hf.InputTable` it must be that one.

    Args:
        fn: ``positions -> table`` (integer tensors ``[seq]``, and ``[batch, seq]`` if it takes them), ``x -> x + table``
            (batch first; a factor on x is found), or ``(height, width) -> table`` of a picture, row after row, class and
            register rows first. A module is called in evaluation mode.
        width: of the table, in channels.
        reads: which of the three.
        expect: what it is promised to be.
        length: how many positions it promises to hold; more are tried, to see how it ends.
        spacing: the distance of neighbouring positions. 1 passes integers; for frames in seconds give the hop, and float64
            positions are passed.
        grid: ``(height, width)`` of the picture to ask for. Square ones cannot show a transposed flattening.

    Returns:
        A `Report`: the code in words, and the findings.

    Raises:
        TypeError: not a callable, a callable of other arguments, an answer that is no tensor.
        ValueError: a function that raises, answers at random, or does more than scale x and add; arguments out of range.
        ShapeError: an answer of another shape.

    Example:
        >>> from posenc import Sinusoidal
        >>> code = Sinusoidal(64, layout="concatenated", frequency_rule="tensor2tensor")
        >>> report = check_table(lambda positions: code.table(positions), width=64, expect="sinusoidal")
        >>> report.described[1:4]
        ('sinusoidal', 'concatenated layout', 'tensor2tensor frequencies, base^(-i/(width/2 - 1)), base 10,000')
        >>> report.ids
        ()

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.5.
    """
    _check_arguments(width, reads, expect, length, spacing, grid)
    taken = {"positions": "positions -> table", "embeddings": "x -> x + table", "grid": "(height, width) -> table"}
    probe = Probe("check_table", fn, taken[reads])
    sheet = Sheet(f"table {called(fn)}: {taken[reads]}", called(fn))
    if length is None and isinstance(expect, InputTable):
        length = expect.length
    with evaluating(fn):
        if reads == "grid":
            check_grid(probe, sheet, width, grid, expect)
        elif reads == "positions":
            _read_by_positions(probe, sheet, width, expect, length, spacing)
        else:
            _read_by_embeddings(probe, sheet, width, expect, length)
    return sheet.report()


def _check_arguments(
    width: int, reads: object, expect: object, length: int | None, spacing: float, grid: tuple[int, int]
) -> None:
    check_integers("check_table", 1, width=width)
    if length is not None:
        check_integers("check_table", 1, length=length)
    if reads not in get_args(Reads):
        raise ValueError(
            f"check_table: reads = {reads!r}. Expected 'positions', 'embeddings' or 'grid'. Say what fn is called with."
        )
    if not (expect is None or expect == "sinusoidal" or isinstance(expect, (InputEncoding, InputTable))):
        raise ValueError(
            f"check_table: expect = {expect!r}. Expected 'sinusoidal', an input encoding of posenc, an InputTable or None. "
            "Leave it out to have the table described."
        )
    if isinstance(spacing, bool) or not isinstance(spacing, (int, float)) or not (isfinite(spacing) and spacing > 0):
        raise ValueError(f"check_table: spacing = {spacing!r}. Expected a finite number above 0. Leave it out for tokens.")
    if not isinstance(grid, tuple) or len(grid) != 2:
        raise ValueError(f"check_table: grid = {grid!r}. Expected (height, width). Pass both, in patches.")
    check_integers("check_table", 2, **{"grid height": grid[0], "grid width": grid[1]})


def _places(count: int, spacing: float, start: int = 0) -> Tensor:
    whole = torch.arange(start, start + count, dtype=torch.int64)
    return whole if spacing == 1 else whole.to(torch.float64) * spacing


def _tried(width: int, length: int | None) -> int:
    """How many rows to ask for: enough for bfloat16 to fail, and some past a promised length."""
    return max(min(max(4096, 2 * (length or 0)), _NUMBERS // width), 16)


def _read_by_positions(probe: Probe, sheet: Sheet, width: int, expect: Promise, length: int | None, spacing: float) -> None:
    def rows(positions: Tensor) -> Tensor:
        answer = probe(positions)
        if answer.shape == (1, len(positions), width):
            answer = answer[0]
        if answer.shape != (len(positions), width):
            raise ShapeError(
                f"check_table: fn gave {tuple(answer.shape)} for {len(positions)} positions. Expected ({len(positions)}, {width}). "
                "Return a row per position, or give the right width."
            )
        return answer

    few = min(16, length or 16)
    head = rows(_places(few, spacing))
    probe.check_repeats(_places(few, spacing))
    tried = _tried(width, length)

    def accepts(n: int) -> bool:
        return probe.answers(_places(1, spacing, n - 1)) is not None

    count = extent(accepts, tried)
    whole = probe.answers(_places(count, spacing))
    if whole is None or whole.shape[-2:] != (count, width):  # takes such a position, and not as many
        count = extent(lambda n: _fits(probe.answers(_places(n, spacing)), n), count)
    table = Rows(rows(_places(max(count, few), spacing)), spacing)
    if not table.check_numbers(sheet, length):
        return
    _check_calls(probe, sheet, rows, head, table, spacing)
    if sheet.has(kinds.POSITIONS_IGNORED, kinds.CALL_DEPENDENT):
        return
    table.check_end(sheet, length, tried, accepts)
    table.check_distinct(sheet, length)
    promised = None
    if isinstance(expect, InputEncoding):
        promised = _made(expect, len(table.rows), width, spacing)
    table.check_code(sheet, expect, promised)


def _fits(answer: Tensor | None, count: int) -> bool:
    return answer is not None and answer.ndim > 1 and answer.shape[-2] == count


def _made(expect: InputEncoding, count: int, width: int, spacing: float) -> Tensor:
    """The promised rows, as many as there are."""
    try:
        return promised_rows(expect, _places(count, spacing), width)
    except ValueError:
        fits = getattr(expect, "num_positions", getattr(expect, "length", None))
        if isinstance(fits, int) and 0 < fits < count:
            return promised_rows(expect, _places(fits, spacing), width)
        raise


def _check_calls(
    probe: Probe, sheet: Sheet, rows: Callable[[Tensor], Tensor], head: Tensor, table: Rows, spacing: float
) -> None:
    """Whether a row is the row of its position: alone, out of order, in a batch, in a longer call, and again."""
    sheet.checked += ["one position alone", "any order", "longer calls", "calls after each other"]
    few = len(head)
    places = _places(few, spacing)
    raw = table.rows[:few]
    if not same(head, raw):
        sheet.found(
            kinds.CALL_DEPENDENT,
            f"positions 0 to {few - 1} get other rows in a call of {len(table.rows):,}",
            "the same rows in calls of any length",
        )
        return
    at = few // 2
    alone = rows(places[at : at + 1])
    turned = rows(places.flip(0))
    if not same(alone, head[at : at + 1]) or not same(turned, head.flip(0)):
        ignored = same(alone, head[:1]) or same(turned, head)
        sheet.found(
            kinds.POSITIONS_IGNORED if ignored else kinds.CALL_DEPENDENT,
            f"position {at} alone gets the row of position 0"
            if same(alone, head[:1])
            else f"positions {few - 1} to 0 get the rows of 0 to {few - 1}"
            if ignored
            else f"position {at} gets another row alone or in another order",
            "the row of each position, wherever it stands in the call",
        )
        return
    if not same(rows(places), head):
        sheet.found(kinds.CALL_DEPENDENT, "the first call gives other rows when it is repeated after others", "the same rows")
        return
    both = probe.answers(torch.stack([places, places.flip(0)]))
    if both is None or both.shape != (2, few, head.shape[-1]):
        sheet.skipped["positions per sequence"] = "fn takes one sequence of positions"
    else:
        sheet.checked.append("positions per sequence")
        if not same(both[0], head) or not same(both[1], head.flip(0)):
            sheet.found(
                kinds.POSITIONS_IGNORED,
                "the second sequence of a batch gets the rows of the first"
                if same(both[1], head)
                else "a batch of positions gets other rows than its sequences alone",
                "each sequence the rows of its own positions",
            )
    if spacing == 1:
        sheet.checked.append("negative positions")
        before = probe.answers(torch.tensor([-1]))
        if before is not None and before.numel() == head.shape[-1]:
            last = table.rows[-1:]
            if same(before.reshape(1, -1), last) and len(table.rows) > few:
                sheet.found(kinds.NEGATIVE, f"position -1 reads row {len(table.rows) - 1:,}, the last", "an error")


def _read_by_embeddings(probe: Probe, sheet: Sheet, width: int, expect: Promise, length: int | None) -> None:
    def added(count: int) -> Tensor:
        x = torch.zeros(1, count, width)
        answer = probe(x)
        if answer.shape != x.shape:
            raise ShapeError(
                f"check_table: fn gave {tuple(answer.shape)} for x of {tuple(x.shape)}. Expected the same shape, [batch, seq, "
                "width]. Wrap a sequence-first module: lambda x: module(x.transpose(0, 1)).transpose(0, 1)."
            )
        return answer[0]

    few = min(6, length or 6)
    if probe.answers(torch.zeros(1, few, width)) is None:
        if width != few and probe.answers(torch.zeros(1, width, width)) is not None:
            sheet.found(
                kinds.LENGTH_AXIS, f"{few} tokens are refused, {width} pass: as many as x is wide", "any number of tokens"
            )
            return
        if length is not None and probe.answers(torch.zeros(1, length, width)) is not None:
            sheet.described.append(f"exactly {length:,} tokens; other numbers raise")
            few = length
    head = added(few)
    probe.check_repeats(torch.zeros(1, few, width))
    if not _check_batch(probe, sheet, head):
        return
    _check_inputs(probe, sheet, head)
    tried = few if few == length and few > 6 else _tried(width, length)

    def accepts(n: int) -> bool:
        return probe.answers(torch.zeros(1, n, width)) is not None

    count = extent(accepts, tried)
    table = Rows(added(max(count, few)))
    if not table.check_numbers(sheet, length):
        return
    sheet.checked += ["longer calls", "calls after each other"]
    if not same(head, table.rows[:few]) or not same(added(few), head):
        sheet.found(
            kinds.CALL_DEPENDENT,
            f"the first {few} tokens get other rows in a call of {len(table.rows):,}, or after it",
            "the same rows in calls of any length",
        )
        return
    table.check_end(sheet, length, tried, accepts)
    table.check_distinct(sheet, length)
    promised = None
    if isinstance(expect, InputEncoding):
        promised = _made(expect, len(table.rows), width, 1.0)
    table.check_code(sheet, expect, promised)


def _check_batch(probe: Probe, sheet: Sheet, head: Tensor) -> bool:
    """Whether sequences of a batch get the same rows, which are those of a sequence alone."""
    sheet.checked.append("batch")
    few, width = head.shape
    batch = 3 if few != 3 else 2
    answer = probe.answers(torch.zeros(batch, few, width))
    if answer is None or answer.shape != (batch, few, width):
        sheet.found(kinds.BATCH_AXIS, f"a batch of {batch} is refused, a single sequence passes", "any batch")
        return False
    if all(same(item, head) for item in answer):
        return True
    along = bool((answer == answer[:, :1]).all())
    sheet.found(
        kinds.BATCH_AXIS,
        f"in a batch of {batch} all tokens of a sequence get one vector, another for each sequence"
        if along
        else f"in a batch of {batch} sequences get other rows than alone",
        "the same rows for each sequence, one per token",
    )
    return False


def _check_inputs(probe: Probe, sheet: Sheet, head: Tensor) -> None:
    """What happens to x itself: a factor, and its dtype."""
    sheet.checked += ["factor on x", "dtype kept"]
    few, width = head.shape
    x = torch.randn(1, few, width, generator=torch.Generator().manual_seed(0))
    change = (probe(x)[0] - head).to(torch.float64)
    flat = x[0].to(torch.float64)
    factor = ((change * flat).sum() / flat.square().sum()).item()
    # the sum with the table is rounded to float32 once, its entries once before
    close = 8 * 2.0**-24 * (abs(factor) * flat.abs().max() + head.abs().max().to(torch.float64)).item()
    if not isfinite(factor) or (change - factor * flat).abs().max().item() > close:
        if not head.isfinite().all():
            return
        raise ValueError(
            "check_table: fn does more to x than scale it and add a table. Expected x -> x + table. Pass the part that adds "
            "positions, without norms, projections or dropout."
        )
    if abs(factor) < 1e-6:
        sheet.described.append("gives the table alone, without x")
    elif not isclose(factor, 1, rel_tol=1e-5):
        root = " (√width)" if isclose(factor, sqrt(width), rel_tol=1e-5) else ""
        sheet.described.append(f"x times {factor:.6g}{root}")
    narrow = probe.answers(torch.zeros(1, few, width, dtype=torch.bfloat16))
    if narrow is not None and narrow.dtype != torch.bfloat16:
        sheet.found(kinds.DTYPE, f"x of bfloat16 comes back as {narrow.dtype}", "the dtype of x")
