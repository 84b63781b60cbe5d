"""Rotary positions: frequencies → table → rotation, each a value that does not know the others' makers.

A *pair* of channels is a plane; pair i turns by ``angle = position · inv_freq[i]``. Tables are half width (one column
per pair), because a full-width table bakes in which channels pair up. Which channels do is the call's `Pairing`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import _register_namedtuple

from posenc.core.tokens import check_positions
from posenc.errors import BackendRefused, ShapeError

Pairing = Literal["half", "interleaved"]
"""``"half"``: channels (i, i + rotary_dim/2) form a plane. ``"interleaved"``: channels (2i, 2i + 1)."""


class Frequencies(NamedTuple):
    """How fast each channel pair turns, and the gain on rotated channels.

    Shape:
        inv_freq: radians per unit of position, ``[*batch, pairs]``; several axes ``[*batch, axes, pairs]``.
        amplitude: a number, or ``[*batch]`` when it differs per sequence.
    """

    inv_freq: Tensor
    amplitude: float | Tensor = 1.0


class RotaryTable(NamedTuple):
    """Cosine and sine per token and pair, amplitude folded in: ``[*batch, seq, pairs]`` each."""

    cos: Tensor
    sin: Tensor


for _value in (Frequencies, RotaryTable):
    _register_namedtuple(_value, serialized_type_name=f"posenc.{_value.__name__}")  # or torch.export.save refuses them


def check_rotary_dim(rotary_dim: int, *, name: str) -> None:
    """Refuse a rotary width that is not a positive even integer."""
    if isinstance(rotary_dim, bool) or not isinstance(rotary_dim, int) or rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"{name}: rotary_dim = {rotary_dim!r}. Expected an even integer, 2 or more: channels turn in pairs. "
            "Rotate fewer channels of an odd head (rotary_dim=head_dim - 1)."
        )


def rotary_table(positions: Tensor, frequencies: Frequencies, *, dtype: torch.dtype = torch.float32) -> RotaryTable:
    """Cosine and sine of ``positions · inv_freq``.

    The thing people get wrong: the precision of the angle. It is formed in ``inv_freq``'s dtype, by elementwise
    multiplication, and rounded once, after the cosine. With float64 frequencies the table is within 3e-8 of the truth
    at positions near 10⁷; with float32 it equals transformers' tables bit for bit, errors at long range included.

    Shape:
        positions: ``[*batch, seq]``; frequencies.inv_freq: ``[*batch, pairs]``; the table: ``[*batch, seq, pairs]``.

    Args:
        dtype: of the table, float32 or float64.

    Returns:
        A `RotaryTable` on the positions' device.

    Raises:
        TypeError: half-precision positions, frequencies or tables.

    Example:
        >>> table = rotary_table(torch.arange(4), Frequencies(torch.tensor([1.0, 0.01], dtype=torch.float64)))
        >>> table.cos.shape
        torch.Size([4, 2])

    References:
        Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
    """
    at, inv_freq = _inputs(positions, frequencies.inv_freq, dtype, "rotary_table")
    angle = at[..., :, None].to(inv_freq.dtype) * inv_freq[..., None, :]
    return _table(angle, frequencies.amplitude, dtype, positions.device)


def rotary_table_nd(positions: Tensor, frequencies: Frequencies, *, dtype: torch.dtype = torch.float32) -> RotaryTable:
    """Cosine and sine of ``Σ over axes of positions · inv_freq``: axial, multimodal and mixed rotary.

    A pair that reads one axis has frequency 0 on the others, so every assignment of axes to pairs is a matrix of
    frequencies.

    Shape:
        positions: ``[*batch, seq, axes]``; frequencies.inv_freq: ``[*batch, axes, pairs]``; the table:
        ``[*batch, seq, pairs]``.

    Example:
        >>> frequencies = Frequencies(torch.eye(2, dtype=torch.float64))
        >>> rotary_table_nd(torch.tensor([[3, 0], [0, 3]]), frequencies).cos.round(decimals=2)
        tensor([[-0.9900,  1.0000],
                [ 1.0000, -0.9900]])
    """
    at, inv_freq = _inputs(positions, frequencies.inv_freq, dtype, "rotary_table_nd")
    if positions.ndim < 2 or inv_freq.ndim < 2 or positions.shape[-1] != inv_freq.shape[-2]:
        raise ShapeError(
            f"rotary_table_nd: positions {tuple(positions.shape)} with inv_freq {tuple(inv_freq.shape)}. Expected "
            "[*batch, seq, axes] with [*batch, axes, pairs]. Use rotary_table for positions of one axis."
        )
    per_axis = at[..., :, :, None].to(inv_freq.dtype) * inv_freq[..., None, :, :]
    angle = per_axis.select(-2, 0)
    for axis in range(1, per_axis.shape[-2]):
        angle = angle + per_axis.select(-2, axis)
    return _table(angle, frequencies.amplitude, dtype, positions.device)


def apply_rotary(
    x: Float[Tensor, "*batch heads seq head_dim"],
    table: RotaryTable,
    *,
    pairing: Pairing,
    head_axis: int | None = -3,
    start: int = 0,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Turn each channel pair of ``x`` by its token's angle: ``(a·cos - b·sin, b·cos + a·sin)``.

    The thing people get wrong: ``pairing`` belongs to the weights that made ``x``. The wrong one keeps every shape and
    gives fluent nonsense.

    Channels outside ``[start, start + 2·pairs)`` pass through bit-equal. The arithmetic is float32 (float64 for
    float64 ``x``), rounded once to ``x``'s dtype; the gradient is the transposed rotation under the same rule.

    Shape:
        x: ``[*batch, heads, seq, head_dim]``, or ``[*batch, seq, heads, head_dim]`` with ``head_axis=-2``.
        table: ``[*batch, seq, pairs]``, spread over the heads; with ``head_axis=None`` it must broadcast to ``x``
        as it stands (no head axis, or one of its own).

    Args:
        start: the first rotating channel; negative counts from the end (``-2 * pairs``: the trailing channels).
        out: where to write the result (may be ``x`` itself); not for tensors that need a gradient.
        backend: ``"auto"`` or ``"reference"``.

    Returns:
        The rotated tensor: ``x``'s shape, dtype, device and stride order; never aliases ``x`` unless ``out`` does.

    Raises:
        TypeError: half-precision tables, or integer ``x``.
        ShapeError: a table that does not fit ``x``.

    Example:
        >>> x = torch.arange(1.0, 9.0).reshape(1, 1, 8)
        >>> inv_freq = torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64)
        >>> table = rotary_table(torch.tensor([3]), Frequencies(inv_freq))
        >>> apply_rotary(x, table, pairing="interleaved")[0, 0, :4]
        tensor([-1.2722, -1.8389,  1.6839,  4.7079])

    Differs from:
        transformers: full-width tables there, applied in the model's dtype.
        flash-attention: ``interleaved=`` there is ``pairing="interleaved"``.

    References:
        Su et al. 2021, arXiv:2104.09864 (interleaved pairs).
    """
    if backend not in ("auto", "reference"):
        raise BackendRefused(
            f"apply_rotary: backend = {backend!r}. Expected 'auto' or 'reference'. Name one of these.",
            {backend: "there is no such backend"},
        )
    first, pairs = _rotating(x, table, pairing, start)
    cos, sin = table if head_axis is None else (t.unsqueeze(head_axis) for t in table)
    seq_axis = -3 if head_axis == -2 else -2
    one_for_all = head_axis is not None and table.cos.shape[-2:-1] != x.shape[seq_axis:][:1]
    if one_for_all or not _spreads(cos.shape, (*x.shape[:-1], pairs)):
        raise ShapeError(
            f"apply_rotary: table of shape {tuple(table.cos.shape)} for x of shape {tuple(x.shape)} with head_axis = "
            f"{head_axis}. Expected [*batch, seq, pairs] that spreads over x's heads. Make the table from the positions "
            "of exactly these tokens, and set head_axis=-2 for [batch, seq, heads, head_dim]."
        )
    if torch.compiler.is_compiling() and _exports_to_onnx() and head_axis == -3 and first == 0 and x.ndim == 4:
        return _onnx_node(x, table, pairing)
    result = _rotate(x, cos, sin, pairing, first)
    return result if out is None else _write(result, x, out)


def apply_rotary_pair(
    q: Tensor,
    k: Tensor,
    table: RotaryTable,
    k_table: RotaryTable | None = None,
    *,
    pairing: Pairing,
    head_axis: int | None = -3,
    start: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`apply_rotary` of queries and keys in one call; ``k_table=None`` means the keys are the same tokens."""
    k_table = table if k_table is None else k_table
    rotated_q = apply_rotary(q, table, pairing=pairing, head_axis=head_axis, start=start, backend=backend)
    return rotated_q, apply_rotary(k, k_table, pairing=pairing, head_axis=head_axis, start=start, backend=backend)


def transpose(table: RotaryTable) -> RotaryTable:
    """The transposed rotation, which is also its gradient: sine changes sign, an amplitude stays.

    Example:
        >>> transpose(RotaryTable(torch.tensor([[0.0]]), torch.tensor([[2.0]]))).sin
        tensor([[-2.]])
    """
    return RotaryTable(table.cos, -table.sin)


def inverse(table: RotaryTable) -> RotaryTable:
    """The table that undoes this one, an amplitude included: the transpose divided by ``cos² + sin²``.

    Example:
        >>> inverse(RotaryTable(torch.tensor([[0.0]]), torch.tensor([[2.0]]))).sin
        tensor([[-0.5000]])
    """
    gain = table.cos.square() + table.sin.square()
    return RotaryTable(table.cos / gain, -table.sin / gain)


def _inputs(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, name: str) -> tuple[Tensor, Tensor]:
    check_positions(positions, name=name)
    if inv_freq.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name}: inv_freq is {inv_freq.dtype}. Expected float32 or float64. "
            "Frequencies rounded to half precision are wrong by whole turns; make them from the schedule."
        )
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name}: dtype = {dtype}. Expected torch.float32 or torch.float64. "
            "apply_rotary rounds to the dtype of q and k, once; the table stays wide."
        )
    if inv_freq.dtype == torch.float64 and positions.device.type == "mps":  # no float64 there: built here, moved after
        return positions.cpu(), inv_freq.cpu()
    return positions, inv_freq.to(positions.device)


def _table(angle: Tensor, amplitude: float | Tensor, dtype: torch.dtype, device: torch.device) -> RotaryTable:
    if isinstance(amplitude, Tensor):
        amplitude = amplitude.to(angle.device, angle.dtype)[..., None, None]
    cos, sin = ((wave * amplitude).to(dtype) for wave in (angle.cos(), angle.sin()))
    return RotaryTable(cos.to(device), sin.to(device))


def _rotating(x: Tensor, table: RotaryTable, pairing: Pairing, start: int) -> tuple[int, int]:
    """The first rotating channel and the number of pairs, checked."""
    if pairing not in ("half", "interleaved"):
        raise ValueError(
            f"apply_rotary: pairing = {pairing!r}. Expected 'half' (i, i + rotary_dim/2) or 'interleaved' (2i, 2i + 1). "
            "Name the one that the weights were trained with."
        )
    if table.cos.dtype not in (torch.float32, torch.float64) or table.sin.dtype != table.cos.dtype:
        raise TypeError(
            f"apply_rotary: the table is {table.cos.dtype} and {table.sin.dtype}. Expected float32 or float64. A "
            "mixed-precision wrapper that casts its inputs is the usual cause: pass integer positions through it and "
            "prepare the table inside."
        )
    if not x.is_floating_point():
        raise TypeError(f"apply_rotary: x is {x.dtype}. Expected a floating dtype. Pass queries or keys.")
    pairs, head_dim = table.cos.shape[-1], x.shape[-1]
    first = start + head_dim if start < 0 else start
    if table.cos.shape != table.sin.shape or not 0 <= first <= head_dim - 2 * pairs:
        raise ShapeError(
            f"apply_rotary: a table of {pairs} pairs (cos {tuple(table.cos.shape)}, sin {tuple(table.sin.shape)}) at "
            f"start = {start} for head_dim = {head_dim}. Expected start + 2·pairs ≤ head_dim. Tables are half width: "
            "one column per pair, not per channel."
        )
    return first, pairs


def _spreads(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    tail = over[len(over) - len(shape) :] if len(shape) <= len(over) else ()
    return len(tail) == len(shape) and all(a in (1, b) for a, b in zip(shape, tail, strict=True))


def _exports_to_onnx() -> bool:
    """Whether torch.onnx is tracing; without loading it when it is not."""
    return bool(torch.compiler.is_exporting()) and torch.onnx.is_in_onnx_export()


def _onnx_node(x: Tensor, table: RotaryTable, pairing: Pairing) -> Tensor:
    """One RotaryEmbedding node of opset 23. The standard has the table in x's dtype."""
    cos, sin = (t.expand(x.shape[0], *t.shape[-2:]).to(x.dtype) for t in table)
    interleaved, rotary_dim = pairing == "interleaved", 2 * cos.shape[-1]
    turned: Tensor = torch.onnx.ops.rotary_embedding(
        x, cos, sin, interleaved=interleaved, rotary_embedding_dim=0 if rotary_dim == x.shape[-1] else rotary_dim
    )
    return turned


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing, first: int) -> Tensor:
    pairs = cos.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(wide), sin.to(wide)
    before, middle, after = x[..., :first], x[..., first : first + 2 * pairs].to(wide), x[..., first + 2 * pairs :]
    if pairing == "half":
        a, b = middle[..., :pairs], middle[..., pairs:]
    else:
        a, b = middle[..., 0::2], middle[..., 1::2]
    turned = [(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)]
    if pairing == "interleaved":
        turned = [torch.stack(turned, dim=-1).flatten(-2)]
    return _join_like(x, [part for part in (before, *turned, after) if part.shape[-1]])


def _join_like(x: Tensor, parts: list[Tensor]) -> Tensor:
    """Concatenate channels, keeping x's order of strides so that [B, S, H, D].transpose(1, 2) stays one."""
    if not parts:
        return x.clone()
    if torch.compiler.is_compiling() or x.is_contiguous() or x.stride(-1) != 1:
        return torch.cat(parts, dim=-1)
    by_stride = sorted(range(x.ndim - 1), key=lambda axis: -x.stride()[axis])
    joined = torch.cat([part.permute(*by_stride, -1) for part in parts], dim=-1)
    back = sorted(range(x.ndim - 1), key=by_stride.__getitem__)
    return joined.permute(*back, -1)


def _write(result: Tensor, x: Tensor, out: Tensor) -> Tensor:
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ShapeError(
            f"apply_rotary: out is {out.dtype} of shape {tuple(out.shape)}. Expected {x.dtype} of shape {tuple(x.shape)}. "
            "Pass torch.empty_like(x)."
        )
    if torch.is_grad_enabled() and (result.requires_grad or out.requires_grad):
        raise ValueError(
            "apply_rotary: out= with a tensor that needs a gradient. Expected inference. Leave out= away, or use torch.no_grad()."
        )
    return out.copy_(result)
