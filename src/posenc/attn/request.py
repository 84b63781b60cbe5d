"""One attention call, checked: what backends accept or refuse."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from posenc.core.bias import ScoreBias, SumBias
from posenc.core.mask import Mask
from posenc.core.tokens import Positions, check_positions, contiguous, resolve_positions
from posenc.core.value_table import ValueTable
from posenc.errors import ShapeError


@dataclass(frozen=True, eq=False)
class Request:
    """Queries, keys and values with everything that attention needs to know, checked against each other.

    Shape:
        q: ``[batch, heads, q, dim]``; k: ``[batch, kv_heads, k, dim]``; v: ``[batch, kv_heads, k, v_dim]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    bias: ScoreBias | None
    positions: Tensor | None
    k_positions: Tensor | None
    value_table: ValueTable | None
    scale: float
    dropout_p: float

    @property
    def q_length(self) -> int:
        return self.q.shape[-2]

    @property
    def k_length(self) -> int:
        return self.k.shape[-2]

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.q.shape[1] != self.k.shape[1]


def make_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    bias: ScoreBias | None,
    positions: Positions | None,
    k_positions: Positions | None,
    scale: float | None,
    dropout_p: float,
    value_table: ValueTable | None = None,
) -> Request:
    """Check a call and fill in what it leaves open."""
    q, k, v = _one_dtype(q, k, v)
    _check_shapes(q, k, v)
    if not isinstance(mask, Mask):
        raise TypeError(
            f"attention: mask is {type(mask).__name__}. Expected a mask value, such as FULL, CAUSAL or causal(tokens). "
            "Wrap boolean tensors as same_segment or visible."
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"attention: dropout_p = {dropout_p}. Expected 0 ≤ dropout_p < 1. Pass 0.0 in evaluation.")
    if scale is not None and not isfinite(scale):
        raise ValueError(f"attention: scale = {scale}. Expected a finite number. Leave it away for 1/√dim.")
    if bias is not None:
        check_heads(bias, q.shape[1])
        _check_lengths(bias, q.shape[-2], k.shape[-2])
    if value_table is not None:
        _check_value_table(value_table, v)
    q_at, k_at = _positions(q, k, bias, value_table, positions, k_positions)
    width = sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    return Request(q, k, v, mask, bias, q_at, k_at, value_table, 1 / width if scale is None else scale, dropout_p)


def check_heads(bias: ScoreBias, heads: int) -> None:
    """Refuse what is no bias value, or one of another head count."""
    if not isinstance(bias, ScoreBias):
        raise TypeError(
            f"attention: bias is {type(bias).__name__}. Expected a ScoreBias value. Call the encoding, as in bias=ALiBi(8)(), or wrap a "
            "tensor as DenseBias."
        )
    if bias.heads not in (1, heads):
        raise ShapeError(
            f"attention: a bias of {bias.heads} heads for {heads} query heads. Expected as many, or 1. "
            "Build the encoding with the model's head count; use slice_heads for a shard of heads."
        )


def _check_value_table(table: ValueTable, v: Tensor) -> None:
    """Refuse what is no value table, or one of another width."""
    if not isinstance(table, ValueTable):
        raise TypeError(
            f"attention: value_table is {type(table).__name__}. Expected a ValueTable, as ShawRelative(…).value_table() gives. Pass that."
        )
    if table.rows.ndim != 2 or table.rows.shape[-1] != v.shape[-1] or not 0 <= table.zero < table.rows.shape[0]:
        raise ShapeError(
            f"attention: a ValueTable with rows {tuple(table.rows.shape)} and zero = {table.zero} for values of width {v.shape[-1]}. "
            f"Expected rows [span, {v.shape[-1]}] and zero among them. Build the encoding with value_dim={v.shape[-1]}."
        )


def _check_integer_axis(bias: ScoreBias | None, positions: Positions | None, k_positions: Positions | None) -> None:
    """Refuse positions that are no rows of a value table."""
    if bias is not None and bias.axes > 1:
        raise TypeError(
            f"attention: a ValueTable beside {type(bias).__name__}, which reads positions of {bias.axes} axes. Expected positions of one "
            "axis, since rows stand for distances. Leave one of them away."
        )
    for at in (positions, k_positions):
        if isinstance(at, Tensor) and at.is_floating_point():
            raise TypeError(
                f"attention: a ValueTable with {at.dtype} positions. Expected integers, since rows stand for whole distances. Round them."
            )


def _check_lengths(bias: ScoreBias, q_length: int, k_length: int) -> None:
    """Refuse a bias written for other tokens; a backend that takes it in pieces would not notice."""
    if isinstance(bias, SumBias):
        for term in bias.terms:
            _check_lengths(term, q_length, k_length)
        return
    queries, keys = bias.lengths
    if queries not in (None, 1, q_length) or keys not in (None, 1, k_length):
        made = " and ".join(f"{n} {what}" for n, what in ((queries, "queries"), (keys, "keys")) if n is not None)
        raise ShapeError(
            f"attention: a {type(bias).__name__} of {made} for {q_length} queries and {k_length} keys. Expected as many, or 1. "
            "Make the bias for exactly these tokens."
        )


def _one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = attention_input(q), attention_input(k), attention_input(v)
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise TypeError(f"attention: q is {q.dtype}, k {k.dtype}, v {v.dtype}. Expected one floating dtype. Cast them alike.")
    return q, k, v


def attention_input(x: Tensor) -> Tensor:
    """Under autocast queries, keys and values go to its dtype, as in torch's own attention; biases stay wide."""
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if autocast and x.dtype != torch.float64 else x


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if any(t.ndim != 4 for t in (q, k, v)):
        raise ShapeError(f"attention: {shapes}. Expected [batch, heads, seq, head_dim] each. Transpose or unsqueeze them.")
    if q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ShapeError(
            f"attention: {shapes}. Expected one batch, q and k of one width, k and v of one length and head count. "
            "Look at the projections."
        )
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"attention: {shapes}. Expected the query heads to be a multiple of the key heads. "
            "Grouped-query attention shares each key head among the same number of query heads."
        )


def _positions(
    q: Tensor,
    k: Tensor,
    bias: ScoreBias | None,
    value_table: ValueTable | None,
    positions: Positions | None,
    k_positions: Positions | None,
) -> tuple[Tensor | None, Tensor | None]:
    for at in (positions, k_positions):
        if isinstance(at, Tensor):
            check_positions(at, name="attention")
    if bias is None and value_table is None:
        return None, None
    if value_table is not None:
        _check_integer_axis(bias, positions, k_positions)
    bias_axes = 1 if bias is None or value_table is not None else bias.axes
    q_length, k_length = q.shape[-2], k.shape[-2]
    if bias_axes == 0:
        positions = k_positions = None
    if positions is None:
        if k_positions is not None or bias_axes > 1 or (bias is not None and not bias.reads_distance_only):
            raise TypeError(
                f"attention: positions=None with {type(value_table if bias is None else bias).__name__}. Expected positions: None means 'contiguous, the last "
                "query level with the last key', which only biases of one-axis distance can take. Pass positions and k_positions."
            )
        return (
            contiguous(q_length, start=k_length - q_length, device=q.device).positions,
            contiguous(k_length, device=q.device).positions,
        )
    if k_positions is None and q_length != k_length:
        raise ShapeError(
            f"attention: {q_length} queries and {k_length} keys with positions but without k_positions. Expected equal lengths, "
            "since k_positions=None says that they are the same tokens. Pass k_positions."
        )
    axes = None if bias_axes == 1 else bias_axes
    q_at = resolve_positions(positions, q_length, name="attention: positions", device=q.device, axes=axes)
    if k_positions is None:
        return q_at, q_at
    return q_at, resolve_positions(k_positions, k_length, name="attention: k_positions", device=q.device, axes=axes)
