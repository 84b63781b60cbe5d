"""Keys that are already rotated, moved to other positions or frequencies."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from posenc.core.apply import apply_rotary
from posenc.core.checks import check_values
from posenc.core.rotary import Frequencies, Pairing, rotary_table_nd
from posenc.core.tokens import Positions, resolve_positions
from posenc.errors import ShapeError


def rerotate(
    keys: Tensor,
    positions: Positions,
    new_positions: Positions | None = None,
    *,
    frequencies: Frequencies,
    new_frequencies: Frequencies | None = None,
    pairing: Pairing,
    start: int = 0,
    head_axis: int | None = -3,
    axes: int | None = None,
) -> Tensor:
    """Move keys that were rotated for some positions and frequencies to others, in one rotation.

    The thing people get wrong: mixing. Once a base grows with length, a long list of factors takes over, or tokens
    before these are dropped, cached keys still stand where they were and scores with new queries are silently off.

    Each pair turns by ``new_positions · new_inv_freq - positions · inv_freq``, formed in the frequencies' dtype, and
    is multiplied by ``new amplitude / amplitude``. Where nothing changes, finite keys come back equal. The result is
    that of rotating the original keys directly, but for `rerotation_error`; each further call adds one more rounding
    of the keys, so keep unrotated keys where every step moves them.

    Args:
        positions: where the keys were rotated for: a tensor, or an int for contiguous tokens from this start.
        new_positions: where they are to be; the same when ``None``.
        frequencies: what they were rotated with, amplitude included; per sequence with a batch axis.
        new_frequencies: what they are to be rotated with; the same when ``None``.
        pairing, start, head_axis: as they were rotated, see `apply_rotary`.
        axes: how many axes a position has, ``None`` for plain numbers; frequencies as in `rotary_table_nd`.

    Shape:
        keys: ``[*batch, heads, seq, head_dim]``; positions: ``[*batch, seq]``, with axes ``[*batch, seq, axes]``.

    Returns:
        Keys of the same shape, dtype and device; never aliases the input.

    Raises:
        ValueError: an amplitude of 0, which cannot be undone.
        ShapeError: frequencies of different widths; positions that are not those of the keys.
        TypeError: frequencies of half precision or of two dtypes.

    Example:
        >>> from posenc import Geometric, RoPE
        >>> keys = torch.randn(1, 2, 5, 8)
        >>> base, longer = (Geometric(base).frequencies(8) for base in (1e4, 5e5))
        >>> stored = RoPE(8)(keys, keys, 0)[1]
        >>> moved = rerotate(stored, 0, frequencies=base, new_frequencies=longer, pairing="half")
        >>> torch.allclose(moved, RoPE(8, Geometric(5e5))(keys, keys, 0)[1], atol=1e-5)
        True

    References:
        Xiao et al. 2023, arXiv:2309.17453 (positions within the cache); Ding et al. 2024, arXiv:2402.13753 (LongRoPE,
        whose factors change with length).
    """
    new_frequencies = frequencies if new_frequencies is None else new_frequencies
    length = keys.shape[-3 if head_axis == -2 else -2]
    at = resolve_positions(positions, length, name="rerotate", device=keys.device, axes=axes)
    to = at
    if new_positions is not None:
        to = resolve_positions(new_positions, length, name="rerotate (new)", device=keys.device, axes=axes)
    old, new = _one_kind(frequencies.inv_freq, new_frequencies.inv_freq)
    if axes is None:
        at, to, old, new = at[..., None], to[..., None], old[..., None, :], new[..., None, :]
    places = torch.cat(torch.broadcast_tensors(to.to(new.dtype), at.to(old.dtype)), dim=-1)
    # positions of twice the axes, the second half with frequencies reversed: the sum over axes is the difference angle
    difference = Frequencies(
        torch.cat(torch.broadcast_tensors(new, -old), dim=-2),
        _amplitude(new_frequencies, old.dtype) / _undoable(_amplitude(frequencies, old.dtype)),
    )
    table = rotary_table_nd(places, difference, dtype=torch.float64 if keys.dtype == torch.float64 else torch.float32)
    return apply_rotary(keys, table, pairing=pairing, head_axis=head_axis, start=start)


def rerotation_error(dtype: torch.dtype, *, farthest: float = 0.0, angle_dtype: torch.dtype = torch.float64) -> float:
    """How far `rerotate` may be from rotating the original keys exactly, relative to the length of the rotated pair.

    A bound for each channel: ``2u + u² + 16v + 2·farthest·w``, where u is the unit roundoff of the keys (they are
    rounded when stored and once more when moved), v that of the arithmetic, float32 or float64 (table, products and
    sum, twice), and w that of the angles. It holds where keys are not subnormal.

    Args:
        dtype: of the keys.
        farthest: the largest ``position · inv_freq``, old or new, in radians; it matters to float64 keys and to float32
            frequencies. Positions of one axis.
        angle_dtype: of the frequencies.

    Example:
        >>> f"{rerotation_error(torch.bfloat16):.4f} {rerotation_error(torch.float32):.2e}"
        '0.0078 1.07e-06'
    """
    u, w = (torch.finfo(of).eps / 2 for of in (dtype, angle_dtype))
    v = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    # Stored key: table within 4v, products and sum 2v, rounding u. Each channel errs by 6v + u of the pair's length, the
    # pair as a vector by √2·6v + u. That is turned along, and the same 6v + u comes on top: (6 + 6√2)v + 2u + u².
    return 2 * u + u * u + 16 * v + 2 * farthest * w


def _one_kind(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    if old.dtype != new.dtype or old.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"rerotate: inv_freq is {old.dtype} and the new one {new.dtype}. Expected both float64 or both float32, as the keys were "
            "rotated. Make them from the schedules with one dtype."
        )
    if old.shape[-1] != new.shape[-1]:
        raise ShapeError(
            f"rerotate: frequencies of {old.shape[-1]} pairs and new ones of {new.shape[-1]}. Expected as many. "
            "Make both for the same rotary_dim."
        )
    return old, new


def _amplitude(frequencies: Frequencies, dtype: torch.dtype) -> float | Tensor:
    amplitude = frequencies.amplitude
    return amplitude.to(dtype) if isinstance(amplitude, Tensor) else amplitude


def _undoable(amplitude: float | Tensor) -> float | Tensor:
    message = "rerotate: amplitude = {}. Expected a finite number other than 0: zeroed keys cannot be brought back. Rotate the original keys."
    if isinstance(amplitude, Tensor):
        valid = amplitude.isfinite() & (amplitude != 0)
        check_values(valid, lambda: message.format(amplitude[~valid][0].item()))
    elif not isfinite(amplitude) or amplitude == 0:
        raise ValueError(message.format(amplitude))
    return amplitude
