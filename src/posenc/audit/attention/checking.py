"""`check_attention`: what one attention function or module does: who sees whom, with which scale and bias, from which heads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from posenc.audit.attention.masks import alignment, masks, order, pattern
from posenc.audit.attention.scores import bias_on_scores, heads_read, precision, scale_of_scores, values
from posenc.audit.attention.weights import NAME, Attention, attention_of
from posenc.audit.behaviour.checking import examine
from posenc.audit.behaviour.probe import Probe, apart, percent
from posenc.audit.behaviour.runner import Undrivable, twin_of
from posenc.audit.behaviour.runners import SignatureRunner, arguments_of
from posenc.audit.findings import Finding, Report
from posenc.audit.kinds.attention import ATTENTION_VALUES
from posenc.audit.kinds.behaviour import BATCH_DEPENDENCE, POSITIONS_IGNORED
from posenc.core.bias import ScoreBias
from posenc.core.checks import check_integers
from posenc.core.mask import All, Mask, Window

KEYS = 24
"""Keys of a probe, where no wider window is expected."""


def check_attention(
    attention: Callable[..., Any] | nn.Module,
    *,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    bias: ScoreBias | None = None,
    dim: int | None = None,
    seed: int = 0,
) -> Report:
    """Infer from a few calls what an attention does, and compare it with what is expected.

    The thing people get wrong: with a cache there are fewer queries than keys, and then "causal" has two meanings. Torch's
    ``is_causal=True`` aligns the first query with the first key, so that a new token sees the start of the text alone. The
    weights are read off here with one-hot values, so the report says who sees whom.

    A function is asked for its weights, its softmax scale, its bias on the scores and which key-value heads each query
    head reads. Masks and positions are probed if it takes them by these names: ``attn_mask``, ``mask``, ``attention_mask``
    (``[batch, 1, q, k]``, booleans of either sense or numbers to add), ``key_padding_mask`` (``[batch, k]``),
    ``positions`` and ``k_positions`` (``[batch, seq]``). A module that maps ``x`` to ``out`` is run as
    `posenc.audit.check_behaviour` runs models: padding, packing, caches, causality.

    Args:
        attention: ``(q, k, v, …) -> out``, or a module ``(x, …) -> out``.
        heads, head_dim, kv_heads: of the queries; as many key-value heads by default.
        mask: who should see whom: ``CAUSAL``, ``FULL``, ``CAUSAL & window(8)``.
        scale: of the softmax, 1/√head_dim by default.
        bias: on the scores, after the scale.
        dim: the width of ``x``, heads · head_dim by default.
        seed: of the random inputs.

    Shape:
        q: ``[batch, heads, seq, head_dim]``; k, v: ``[batch, kv_heads, seq, head_dim]``; out as q. x: ``[batch, seq, dim]``.

    Returns:
        A `Report`; ``described`` says what was found.

    Raises:
        TypeError: not callable, or arguments of other names without defaults.
        ValueError: a function that raises, or answers another shape.

    Example:
        >>> from posenc import CAUSAL, ALiBi
        >>> from posenc import attention as attend
        >>> report = check_attention(lambda q, k, v: attend(q, k, v, mask=CAUSAL, bias=ALiBi(4)()), heads=4, head_dim=16)
        >>> print("\\n".join(report.described))
        causal
        queries aligned with the last key
        scale 0.25 = 1/√16
        ALiBi: slopes 0.25, 0.0625, 0.01562, 0.003906
        >>> report.findings
        ()
    """
    if not callable(attention):
        raise TypeError(f"{NAME}: a {type(attention).__name__}. Expected a function or module. Pass (q, k, v) -> out.")
    kv_heads = heads if kv_heads is None else kv_heads
    check_integers(NAME, 1, heads=heads, head_dim=head_dim, kv_heads=kv_heads)
    if heads % kv_heads or head_dim < 2:
        raise ValueError(
            f"{NAME}: heads = {heads}, kv_heads = {kv_heads}, head_dim = {head_dim}. Expected heads a multiple of kv_heads, and "
            "head_dim 2 or more. Look at the model's shape."
        )
    _check_promise(mask, scale, bias, heads)
    name = type(attention).__name__ if isinstance(attention, nn.Module) else getattr(attention, "__name__", "attention")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(attention, nn.Module) and _takes_one(attention):
            return _module(attention, name, heads * head_dim if dim is None else dim, mask, seed)
        fn = _evaluated(attention) if isinstance(attention, nn.Module) else attention
        keys = max(KEYS, _window(mask) + 2)
        return _function(
            attention_of(fn, heads=heads, kv_heads=kv_heads, head_dim=head_dim, keys=keys, seed=seed), name, mask, scale, bias
        )


def _check_promise(mask: object, scale: object, bias: object, heads: int) -> None:
    for key, value, kind in (("mask", mask, Mask), ("bias", bias, ScoreBias)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"{NAME}: {key} is a {type(value).__name__}. Expected a posenc {kind.__name__}, such as "
                f"{'CAUSAL & window(8)' if key == 'mask' else 'ALiBi(heads)()'}, or None. Pass the value, not a tensor."
            )
    if isinstance(bias, ScoreBias) and bias.heads not in (1, heads):
        raise ValueError(f"{NAME}: a bias of {bias.heads} heads for {heads}. Expected 1 or {heads}. Build it for these heads.")
    if scale is not None and not (isinstance(scale, (int, float)) and not isinstance(scale, bool) and scale > 0):
        raise ValueError(
            f"{NAME}: scale = {scale!r}. Expected a number above 0, or None for 1/√head_dim. Pass the softmax scale."
        )


def _function(subject: Attention, name: str, mask: Mask | None, scale: float | None, bias: ScoreBias | None) -> Report:
    expected = subject.head_dim**-0.5 if scale is None else scale
    checks: dict[str, Callable[[], Any]] = {
        "values": lambda: values(subject, name),
        "batch": lambda: _batch(subject, name),
        "who sees whom": lambda: pattern(subject, name, mask),
        "alignment": lambda: alignment(subject, name),
        "order": lambda: order(subject, name),
        "masks": lambda: masks(subject, name),
        "heads": lambda: heads_read(subject, name),
        "scale": lambda: scale_of_scores(subject, name, expected),
        "bias": lambda: bias_on_scores(subject, name, expected, bias),
        "precision": lambda: precision(subject, name),
    }
    findings: list[Finding] = []
    described: list[str] = []
    checked: list[str] = []
    skipped: dict[str, str] = {}
    for check, run in checks.items():
        try:
            yielded = list(run())
        except Undrivable as reason:
            skipped[check] = str(reason)
            if check == "values":  # weights cannot be read off with one-hot values
                return Report.of(name, skipped={"attention": str(reason)})
            continue
        findings += [one for one in yielded if isinstance(one, Finding)]
        described += [one for one in yielded if isinstance(one, str)]
        checked.append(check)
        if check == "values" and findings:
            skipped["who sees whom, scale, bias, heads"] = "values are changed, so weights cannot be read off"
            break
    return Report.of(name, findings, described=described, checked=checked, skipped=skipped)


def _batch(subject: Attention, name: str) -> Any:
    n = subject.keys
    q, k, v = (
        subject.draw(heads, n, turn, 3) for turn, heads in enumerate((subject.heads, subject.kv_heads, subject.kv_heads))
    )
    off = apart(subject.rows(q, k, v)[0], subject.rows(q[:1], k[:1], v[:1])[0])
    if off > 1e-4:
        yield BATCH_DEPENDENCE.at(
            name, measured=f"a row answers otherwise beside two others: {percent(off)}", expected="the answer of the row alone"
        )


def _module(module: nn.Module, name: str, dim: int, mask: Mask | None, seed: int) -> Report:
    """A module that maps vectors, run as a model whose ids are random vectors."""

    def probe(turn: int) -> Probe:
        twin = twin_of(module)
        like = next((p for p in twin.parameters() if p.is_floating_point()), torch.empty(0))
        dice = torch.Generator().manual_seed(seed + turn)
        table = torch.randn(48, dim, generator=dice).to(like)
        runner = SignatureRunner(twin, arguments_of(module), table)
        if mask is not None:
            runner.promises_causal = not bool(mask.allowed(4, 4, device="cpu").triu(1).any())
        ids = torch.stack([torch.randperm(47, generator=dice)[:12] + 1 for _ in range(3)])
        return Probe(name, runner, None, ids.to(like.device), (ids % 47 + 1).to(like.device))

    try:
        first = probe(0)
        first.runner(first.ids[:1])
    except Undrivable as reason:
        raise ValueError(
            f"{NAME}: {name} cannot be called with x of shape [3, 12, {dim}]: {reason}. Expected a module (x, …) -> out, or a "
            "function (q, k, v) -> out. Wrap it, or pass dim."
        ) from reason.__cause__
    report = examine(first, lambda: probe(1), None)
    if "behaviour" in report.skipped:
        return Report.of(name, skipped=report.skipped)
    same = first.runner(first.ids[:1, :1].repeat(1, first.n)).scores[0]
    off = apart(same, same[:1].expand_as(same))
    told = "positions" in first.runner.takes  # else they may be in x already
    findings = [finding for finding in report.findings if told or finding.id != POSITIONS_IGNORED.id]
    own = ["no positions of its own"] if len(findings) < len(report.findings) else []
    if off > first.tolerance:
        measured = f"equal tokens come out unequal: {percent(off)}"
        findings.append(ATTENTION_VALUES.at(name, measured=measured, expected="equal values come out as they went in"))
    described, checked = (*report.described, *own), (*report.checked, "values")
    return Report.of(name, findings, described=described, checked=checked, skipped=report.skipped)


def _takes_one(module: nn.Module) -> bool:
    needed = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    return len([p for p in needed if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]) < 3


def _evaluated(module: nn.Module) -> Callable[..., Any]:
    try:
        return twin_of(module)
    except Undrivable as reason:
        raise ValueError(f"{NAME}: {reason}. Expected a module with weights. Load it first.") from reason


def _window(mask: Mask | None) -> int:
    """The window that a mask has, 0 when none; one wider than 512 is not probed."""
    parts = mask.masks if isinstance(mask, All) else (mask,)
    sizes = [part.before for part in parts if isinstance(part, Window)]
    return max((size for size in sizes if size <= 512), default=0)
