"""`check_bias` and `check_scores`: what is added to attention scores, and whether it is right, from calls alone."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from posenc.audit.biases.grids import check_window
from posenc.audit.biases.pairs import FEW, Asked, check_pairs
from posenc.audit.biases.rules import Expect
from posenc.audit.findings import Report
from posenc.audit.tables.probe import Probe, Sheet, called, evaluating
from posenc.core.bias import ScoreBias
from posenc.core.checks import check_integers
from posenc.core.distance import Direction
from posenc.core.sites import ScoreEncoding
from posenc.hf.rules import BiasRule

Takes = Literal["positions", "lengths", "grid"]
"""What a bias is called with: ``(q_positions, k_positions)``, ``(q_len, k_len)``, or ``(height, width)`` of a window."""


def check_bias(
    fn: Callable[..., Any],
    *,
    heads: int,
    takes: Takes = "positions",
    direction: Direction = "causal",
    expect: Expect = None,
    length: int = 2048,
    grid: tuple[int, int] = (2, 3),
) -> Report:
    """Read a bias on attention scores from calls: its kind, slopes or buckets, and what is wrong with it.

    The thing people get wrong: a sign, an alignment or a rule of slopes changes no shape. The model still trains, looks at
    other tokens, and a decoder that is right on whole texts is wrong one token at a time.

    Constants per query do not matter, since the softmax drops them: the form that adds ``slope · key`` reads as ALiBi.

    Args:
        fn: ``(q_positions, k_positions) -> bias`` with integer tensors ``[q]`` and ``[k]``; ``(q_len, k_len) -> bias``, the
            queries being the last of the keys; or ``(height, width) -> bias`` between all cells of a window. A bias is
            ``[heads, q, k]``, or ``[heads, 1, k]``; integers ``[q, k]`` are read as bucket (or table row) numbers.
        heads: how many heads it has.
        takes: which of the three.
        direction: ``"bidirectional"`` where no causal mask hides the future.
        expect: what it is promised to be: an encoding or bias of posenc, a `posenc.hf.BiasRule`, ``"alibi"`` (any released
            rule of slopes), ``"t5"``, or ``"relative"`` (any function of the distance).
        length: the longest distance to look at, in tokens.
        grid: ``(height, width)`` of the window to ask for. Square ones cannot show a wrong stride.

    Returns:
        A `Report`: the bias in words, and the findings.

    Raises:
        TypeError: not a callable, a callable of other arguments, an answer that is no tensor.
        ValueError: a function that raises or answers at random; arguments out of range.
        ShapeError: an answer of another shape.

    Example:
        >>> from posenc import ALiBi, materialize
        >>> alibi = ALiBi(8)
        >>> report = check_bias(lambda q, k: materialize(alibi(), q, k), heads=8, expect="alibi")
        >>> report.described[0], report.described[-2]
        ('ALiBi: -slope · distance', 'slopes of the released rule')
        >>> report.ids
        ()

    References:
        Press et al. 2022, arXiv:2108.12409; Raffel et al. 2020, arXiv:1910.10683; Liu et al. 2021, arXiv:2103.14030.
    """
    _check_arguments("check_bias", heads, takes, direction, expect, length, grid)
    taken = {
        "positions": "(q_positions, k_positions) -> bias",
        "lengths": "(q_len, k_len) -> bias",
        "grid": "(height, width) -> bias",
    }
    probe = Probe("check_bias", fn, taken[takes])
    sheet = Sheet(f"bias {called(fn)}: {taken[takes]}", called(fn))
    with evaluating(fn):
        if takes == "grid":
            check_window(probe, sheet, heads, grid, expect)
        else:
            check_pairs(Asked(probe, takes, heads), sheet, direction, expect, length, 1.0)
    return sheet.report()


def check_scores(
    fn: Callable[..., Any],
    *,
    heads: int,
    head_dim: int,
    direction: Direction = "causal",
    expect: Expect = None,
    length: int = 256,
) -> Report:
    """Read scale and bias from attention scores: `check_bias` on what scores are without content, and where the scale acts.

    The thing people get wrong: ``(q · k + bias) / √head_dim``. The bias then acts with a slope of ``slope / √head_dim``; only
    Falcon's released models are trained so.

    Args:
        fn: ``(q, k) -> scores`` before the softmax.
        heads: how many heads queries and keys have.
        head_dim: the width of a head.
        direction, expect: as in `check_bias`.
        length: how many tokens to call it with.

    Shape:
        q, k: ``[1, heads, seq, head_dim]``, q the last tokens of k; scores: ``[1, heads, q, k]``.

    Returns:
        A `Report`: scale and bias in words, and the findings.

    Raises:
        TypeError, ValueError, ShapeError: as for `check_bias`.

    Example:
        >>> from posenc import ALiBi, materialize
        >>> def scores(q, k):
        ...     at = torch.arange(k.shape[-2])
        ...     return q @ k.mT * q.shape[-1] ** -0.5 + materialize(ALiBi(4)(), at[-q.shape[-2] :], at)
        >>> check_scores(scores, heads=4, head_dim=64, expect=ALiBi(4)).described[0]
        'scale 0.125 (1/√head_dim)'
    """
    _check_arguments("check_scores", heads, "lengths", direction, expect, length, (2, 3))
    check_integers("check_scores", 1, head_dim=head_dim)
    probe = Probe("check_scores", fn, "(q, k) -> scores")
    sheet = Sheet(f"scores {called(fn)}: (q, k) -> scores", called(fn))

    def without_content(queries: int, keys: int) -> Tensor:
        return probe(torch.zeros(1, heads, queries, head_dim), torch.zeros(1, heads, keys, head_dim))

    with evaluating(fn):
        asked = Asked(Probe("check_scores", without_content, "(q, k) -> scores"), "lengths", heads)
        scale = _scale(probe, asked, sheet, heads, head_dim)
        check_pairs(asked, sheet, direction, expect, length, 1.0 if scale is None else scale)
    return sheet.report()


def _scale(probe: Probe, asked: Asked, sheet: Sheet, heads: int, head_dim: int) -> float | None:
    """What the product of queries and keys is multiplied by, where nothing else happens to it."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, FEW, head_dim, generator=generator) for _ in range(2))
    bias = asked(torch.arange(FEW), torch.arange(FEW))
    with_content = probe(q, k).to(torch.float64).reshape(bias.shape)
    past = torch.ones(FEW, FEW, dtype=torch.bool).tril()
    change = (with_content - bias)[:, past]
    products = (q.double() @ k.double().mT)[0][:, past]
    scale = ((change * products).sum() / products.square().sum()).item()
    # a product of head_dim terms in float32, and its sum with the bias
    close = 2.0**-22 * head_dim * (products.abs().max() * abs(scale) + bias[:, past].abs().max()).item()
    if not (change - scale * products).abs().max().item() <= close:
        sheet.skipped["scale"] = "scores are not scale · q · k + bias: the bias depends on content, or something else acts"
        return None
    root = " (1/√head_dim)" if isclose(scale, head_dim**-0.5, rel_tol=1e-5) else ""
    sheet.described.append(f"scale {scale:.6g}{root}")
    return scale


def _check_arguments(
    name: str, heads: int, takes: object, direction: object, expect: object, length: int, grid: tuple[int, int]
) -> None:
    check_integers(name, 1, heads=heads)
    check_integers(name, 2, length=length)
    if takes not in get_args(Takes):
        raise ValueError(f"{name}: takes = {takes!r}. Expected 'positions', 'lengths' or 'grid'. Say what fn is called with.")
    if direction not in ("causal", "bidirectional"):
        raise ValueError(f"{name}: direction = {direction!r}. Expected 'causal' or 'bidirectional'. Name one.")
    words = ("relative", "alibi", "t5")
    if not (expect is None or expect in words or isinstance(expect, (ScoreEncoding, ScoreBias, BiasRule))):
        raise ValueError(
            f"{name}: expect = {expect!r}. Expected a score encoding or bias of posenc, a BiasRule, 'alibi', 't5', 'relative' or "
            "None. Leave it out to have the bias described."
        )
    if not isinstance(grid, tuple) or len(grid) != 2:
        raise ValueError(f"{name}: grid = {grid!r}. Expected (height, width). Pass both, in cells.")
    check_integers(name, 1, **{"grid height": grid[0], "grid width": grid[1]})
