"""Rotary positions: frequencies → table → rotation, each a value that does not know the others' makers.

A *pair* of channels is a plane; pair i turns by ``angle = position · inv_freq[i]``. Tables are half width (one column
per pair), because a full-width table bakes in which channels pair up. Which channels do is the call's `Pairing`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple

from posenc.core.checks import check_integers
from posenc.core.tokens import check_positions
from posenc.errors import ShapeError

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


@runtime_checkable
class Schedule(Protocol):
    """A rule for frequencies: `Geometric`, `YaRN`, `Explicit`, or your own frozen dataclass."""

    def frequencies(
        self, rotary_dim: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Frequencies: ...


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


def rotary_span(name: str, head_dim: int, rotary_dim: int | None, start: int) -> tuple[int, int]:
    """How many channels of a head turn, all by default, and the first that does; a negative start counts from the end.

    Raises:
        ValueError: an odd width, or channels that do not lie in the head. TypeError: numbers that are not whole.
    """
    check_integers(name, 1, head_dim=head_dim)
    check_integers(name, start=start)
    turning = head_dim if rotary_dim is None else rotary_dim
    check_rotary_dim(turning, name=name)
    first = start + head_dim if start < 0 else start
    if not 0 <= first <= head_dim - turning:
        raise ValueError(
            f"{name}: rotary_dim = {turning} from start = {start} in head_dim = {head_dim}. Expected "
            "start + rotary_dim ≤ head_dim. Pass start=-rotary_dim for the trailing channels."
        )
    return turning, first


def is_head_axis(head_axis: object) -> bool:
    """Whether it is -3, -2 or ``None``; -3.0 and tensors, which compare equal in their ways, are not."""
    return head_axis is None or (type(head_axis) is int and head_axis in (-3, -2))


def check_rotary_settings(name: str, pairing: object, head_axis: object, angle_dtype: object) -> None:
    """Refuse settings that no rotary module takes.

    Raises:
        ValueError: an unknown pairing or head axis. TypeError: angles in another dtype.
    """
    if pairing not in ("half", "interleaved"):
        raise ValueError(
            f"{name}: pairing = {pairing!r}. Expected 'half' or 'interleaved'. Name the one the weights were trained with."
        )
    if angle_dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name}: angle_dtype = {angle_dtype}. Expected torch.float64 or torch.float32. Use float64.")
    if not is_head_axis(head_axis):
        raise ValueError(
            f"{name}: head_axis = {head_axis!r}. Expected -3 for [batch, heads, seq, head_dim], -2 for [batch, seq, heads, "
            "head_dim] or None without heads. Pass the one of your layout."
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
        TypeError: half-precision positions, frequencies or tables. ShapeError: a single number without an axis,
            or batches that differ.

    Example:
        >>> table = rotary_table(torch.arange(4), Frequencies(torch.tensor([1.0, 0.01], dtype=torch.float64)))
        >>> table.cos.shape
        torch.Size([4, 2])

    References:
        Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
    """
    at, inv_freq = _inputs(positions, frequencies, dtype, "rotary_table")
    if positions.ndim == 0 or inv_freq.ndim == 0:
        raise ShapeError(
            f"rotary_table: positions of {positions.ndim} axes with inv_freq of {inv_freq.ndim}. Expected [*batch, seq] with "
            "[*batch, pairs]. Give a single position an axis of its own: positions[None]."
        )
    _check_batches(positions.shape[:-1], inv_freq.shape[:-1], frequencies.amplitude, "rotary_table")
    angle = at.unsqueeze(-1).to(inv_freq.dtype) * inv_freq.unsqueeze(-2)
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
    at, inv_freq = _inputs(positions, frequencies, dtype, "rotary_table_nd")
    if positions.ndim < 2 or inv_freq.ndim < 2 or positions.shape[-1] != inv_freq.shape[-2] or not positions.shape[-1]:
        raise ShapeError(
            f"rotary_table_nd: positions {tuple(positions.shape)} with inv_freq {tuple(inv_freq.shape)}. Expected "
            "[*batch, seq, axes] with [*batch, axes, pairs], one axis or more. Use rotary_table for positions of one axis."
        )
    _check_batches(positions.shape[:-2], inv_freq.shape[:-2], frequencies.amplitude, "rotary_table_nd")
    per_axis = at[..., :, :, None].to(inv_freq.dtype) * inv_freq[..., None, :, :]
    angle = per_axis.select(-2, 0)
    for axis in range(1, per_axis.shape[-2]):
        angle = angle + per_axis.select(-2, axis)
    return _table(angle, frequencies.amplitude, dtype, positions.device)


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


def check_frequencies(frequencies: object, *, name: str, rotary_dim: int | None = None) -> None:
    """Refuse what is not `Frequencies` (a bare tensor, a list, a schedule), or not one per pair of ``rotary_dim``.

    Raises:
        TypeError: something else. ShapeError: another number of pairs.
    """
    if not isinstance(frequencies, Frequencies) or not isinstance(frequencies.inv_freq, Tensor):
        held = f" of a {type(frequencies.inv_freq).__name__}" if isinstance(frequencies, Frequencies) else ""
        raise TypeError(
            f"{name}: frequencies are {type(frequencies).__name__}{held}. Expected Frequencies of a tensor. Make them with "
            "schedule.frequencies(rotary_dim), or Frequencies(inv_freq)."
        )
    if isinstance(frequencies.amplitude, bool) or not isinstance(frequencies.amplitude, (int, float, Tensor, torch.SymFloat)):
        raise TypeError(
            f"{name}: amplitude = {frequencies.amplitude!r}. Expected a number, or a tensor of one per sequence. Leave it out for 1."
        )
    if rotary_dim is not None and frequencies.inv_freq.shape[-1:] != (rotary_dim // 2,):
        raise ShapeError(
            f"{name}: frequencies of {frequencies.inv_freq.shape[-1:].numel()} pairs. Expected {rotary_dim // 2}, for rotary_dim = "
            f"{rotary_dim}. Make them with schedule.frequencies({rotary_dim}): one per pair, for all axes together."
        )


def _check_batches(positions: torch.Size, inv_freq: torch.Size, amplitude: float | Tensor, name: str) -> None:
    """Refuse batches of different sizes; without the cost where there is one set of frequencies for all."""
    gains = amplitude.shape if isinstance(amplitude, Tensor) else ()
    for one, other in ((positions, inv_freq), (positions, gains), (inv_freq, gains)):
        if other and any(a != b and a != 1 and b != 1 for a, b in zip(reversed(one), reversed(other), strict=False)):
            raise ShapeError(
                f"{name}: positions of batch {tuple(positions)} with frequencies of batch {tuple(inv_freq)} and amplitudes of "
                f"{tuple(gains)}. Expected batches that spread over each other. Give one set of frequencies for all, or one per sequence."
            )


def _inputs(positions: Tensor, frequencies: Frequencies, dtype: torch.dtype, name: str) -> tuple[Tensor, Tensor]:
    check_positions(positions, name=name)
    check_frequencies(frequencies, name=name)
    inv_freq = frequencies.inv_freq
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
    cos, sin = angle.cos(), angle.sin()
    if isinstance(amplitude, Tensor) or amplitude != 1.0:  # one token's table takes as long as its operations are many
        cos, sin = cos * amplitude, sin * amplitude
    return RotaryTable(cos.to(device, dtype), sin.to(device, dtype))
