"""Rotary position embedding in which every axis has channels of its own."""

from __future__ import annotations

from typing import final

import torch

from posenc.core.axes import AxesRotary, Part
from posenc.core.checks import check_integers
from posenc.core.rotary import Frequencies, Pairing
from posenc.core.spec import EncodingSpec, Reference
from posenc.schedules.base import Schedule, check_schedule
from posenc.schedules.geometric import Geometric


@final
class AxialRoPE(AxesRotary):
    """Turns an equal share of the channel pairs by each axis of a position, so that scores depend on the offset along it.

    The thing people get wrong: the order of the axes. `grid` counts rows before columns, as DINOv3 and transformers'
    vision models do; rope-vit gives its first share to x, the column (``axis_order=(1, 0)``). Both fit every shape, and on
    square pictures the wrong one is merely a mirror image that the weights never saw.

    Share j holds pairs ``j · pairs/shares …`` and reads axis ``axis_order[j]``; each has the whole ladder of its own width,
    ``angle = position[axis_order[j]] · base^(-2i / (rotary_dim/shares))``. All shares turn in one rotation, so with
    ``pairing="half"`` a pair is (i, i + rotary_dim/2) across them; `blocks` gives every axis a block of channels instead.

    Args:
        head_dim: the width of a head.
        axes: how many numbers a position has.
        schedule: the frequencies of one share, `Geometric` (base 100) by default.
        axis_order: the axes that get a share, in the order of the channels; all axes as they come by default.
        rotary_dim: how many channels turn, a multiple of twice the shares; all by default.
        start: the first that does; negative counts from the end.
        pairing: ``"half"`` or ``"interleaved"``.
        head_axis: -3 for ``[batch, heads, seq, head_dim]``, -2 for ``[batch, seq, heads, head_dim]``, ``None`` for
            ``[batch, seq, head_dim]``.
        angle_dtype: float64 is exact at any practical size; float32 reproduces transformers bit for bit.

    Shape:
        q: ``[*batch, heads, seq, head_dim]``; k likewise, of any head count; positions: ``[*batch, seq, axes]``.

    Returns:
        The rotated queries and keys; dtype, device and stride order kept.

    Raises:
        ValueError: a width that does not divide into even shares, an axis_order that names no axis or one twice, an
            unknown pairing.
        ShapeError: another head width, positions of another number of axes.
        TypeError: half-precision positions.

    Example:
        >>> rope, patches = AxialRoPE(8), grid(2, 3, prefix=1)
        >>> q = k = torch.ones(1, 4, 7, 8)
        >>> rope(q, k, patches.positions)[0].shape
        torch.Size([1, 4, 7, 8])

    Differs from:
        transformers: DINOv3's positions are `patch_centres` with ``extent=2 * pi``; Qwen-VL, GLM-4V and Pixtral vision count
            patches. Gemma 4 vision is ``AxialRoPE.blocks``. Pixtral deals one ladder out to both axes: there, take `MRoPE`
            with two sections and `Explicit` frequencies, even ones before odd ones.
        rope-vit: ``axis_order=(1, 0), pairing="interleaved"``.

    References:
        Heo et al. 2024, "Rotary Position Embedding for Vision Transformer", arXiv:2403.13298; Siméoni et al. 2025,
        "DINOv3", arXiv:2508.10104.
    """

    spec = EncodingSpec(
        name="axial",
        summary="turns queries and keys, some channels for each axis",
        build=lambda shape: [AxialRoPE(shape.head_dim)],
        claims=frozenset(
            {"shift-invariant", "norm-preserving", "composes", "invertible", "parameter-free", "any-length", "real-positions"}
        ),
        references=(
            Reference("Heo et al. 2024", "Rotary Position Embedding for Vision Transformer", "2403.13298"),
            Reference("Siméoni et al. 2025", "DINOv3", "2508.10104"),
        ),
    )

    def __init__(
        self,
        head_dim: int,
        axes: int = 2,
        schedule: Schedule = Geometric(100.0),
        *,
        axis_order: tuple[int, ...] | None = None,
        rotary_dim: int | None = None,
        start: int = 0,
        pairing: Pairing = "half",
        head_axis: int | None = -3,
        angle_dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(
            head_dim,
            axes=axes,
            rotary_dim=rotary_dim,
            start=start,
            pairing=pairing,
            head_axis=head_axis,
            angle_dtype=angle_dtype,
        )
        check_schedule("AxialRoPE", schedule)
        axis_order = tuple(range(axes)) if axis_order is None else tuple(axis_order)
        if not axis_order or len(set(axis_order)) < len(axis_order) or not set(axis_order) <= set(range(axes)):
            raise ValueError(
                f"AxialRoPE: axis_order = {axis_order} for {axes} axes. Expected axes from 0 to {axes - 1}, each at most once. "
                "Pass (1, 0) for columns before rows."
            )
        self.schedule, self.axis_order = schedule, axis_order
        _check_shares(self.rotary_dim, len(axis_order), "rotary_dim")
        self._frequencies(torch.device("cpu"))  # a schedule that does not fit says so now

    @classmethod
    def blocks(
        cls,
        head_dim: int,
        axes: int = 2,
        schedule: Schedule = Geometric(100.0),
        *,
        pairing: Pairing = "half",
        head_axis: int | None = -3,
        angle_dtype: torch.dtype = torch.float64,
    ) -> list[AxialRoPE]:
        """One encoding per axis, each turning a block of neighbouring channels of its own, as in Gemma 4's vision tower.

        Only ``pairing="half"`` tells this from a single `AxialRoPE`: here a pair is (i, i + block/2) inside each block.

        Example:
            >>> [(rope.start, rope.axis_order) for rope in AxialRoPE.blocks(64)]
            [(0, (0,)), (32, (1,))]
        """
        check_integers("AxialRoPE.blocks", 1, head_dim=head_dim, axes=axes)
        _check_shares(head_dim, axes, "head_dim")
        width = head_dim // axes
        return [
            cls(
                head_dim,
                axes,
                schedule,
                axis_order=(axis,),
                rotary_dim=width,
                start=axis * width,
                pairing=pairing,
                head_axis=head_axis,
                angle_dtype=angle_dtype,
            )
            for axis in range(axes)
        ]

    @property
    def parts(self) -> tuple[Part, ...]:
        share = self.rotary_dim // 2 // len(self.axis_order)
        return tuple((axis, slice(j * share, (j + 1) * share)) for j, axis in enumerate(self.axis_order))

    def ladder(self, *, dtype: torch.dtype, device: torch.device) -> Frequencies:
        shares = len(self.axis_order)
        own = self.schedule.frequencies(self.rotary_dim // shares, dtype=dtype, device=device)
        return Frequencies(torch.cat([own.inv_freq] * shares, dim=-1), own.amplitude)

    def settings(self) -> str:
        return f"axes={self.axes}, {self.schedule}, axis_order={self.axis_order}"


def _check_shares(width: int, shares: int, key: str) -> None:
    if width % (2 * shares):
        raise ValueError(
            f"AxialRoPE: {key} = {width} for {shares} axes. Expected a multiple of {2 * shares}, whole pairs for each axis. "
            "Turn fewer channels (rotary_dim) or choose another head width."
        )
