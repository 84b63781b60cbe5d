"""Multimodal rotary position embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import torch

from posenc.core.axes import AxesRotary, Part, owners
from posenc.core.checks import check_integers
from posenc.core.rotary import Frequencies, Pairing
from posenc.core.spec import EncodingSpec, ModelShape, Reference
from posenc.schedules.base import Schedule, check_schedule
from posenc.schedules.geometric import Geometric

AxisLayout = Literal["chunked", "interleaved", "time_last"]
"""``"chunked"``: the pairs of an axis stand together. ``"interleaved"``: axes take turns (t h w t h w …), what is over
reads the first. ``"time_last"``: all but the first take turns (h w h w …), then come the pairs of the first."""


@final
class MRoPE(AxesRotary):
    """RoPE's one ladder of frequencies, dealt out to the axes of a position: time, height and width of a multimodal token.

    The thing people get wrong: the layout. Qwen2-VL has the pairs of each axis stand together, Qwen3-VL and 3.5 interleave
    them. Text has the same number on all axes, where every layout is plain RoPE; the wrong one reads text well and sees
    pictures scrambled.

    ``angle of pair i = position[axis_of_pair[i]] · inv_freq[i]``, with ``axis_of_pair(sections, layout)``.

    Args:
        head_dim: the width of a head.
        sections: how many pairs read each axis, in the order of the positions' axes; the sum is rotary_dim / 2.
        schedule: the frequencies, `Geometric` (base 1,000,000) by default.
        layout: which pairs those are: ``"chunked"``, ``"interleaved"`` or ``"time_last"``.
        rotary_dim: how many channels turn, even; all by default.
        start: the first that does; negative counts from the end.
        pairing: ``"half"`` or ``"interleaved"``, which has nothing to do with the layout.
        head_axis: -3 for ``[batch, heads, seq, head_dim]``, -2 for ``[batch, seq, heads, head_dim]``, ``None`` for
            ``[batch, seq, head_dim]``.
        angle_dtype: float64 is exact at any practical length; float32 reproduces transformers bit for bit.

    Shape:
        q: ``[*batch, heads, seq, head_dim]``; k likewise, of any head count; positions: ``[*batch, seq, axes]``, from
        `multimodal`, or `on_axes` for text.

    Returns:
        The rotated queries and keys; dtype, device and stride order kept.

    Raises:
        ValueError: sections that do not sum to rotary_dim / 2 or that the layout cannot realise, an unknown layout or
            pairing, an odd or too wide rotary_dim.
        ShapeError: another head width, positions of another number of axes.
        TypeError: half-precision positions.

    Example:
        >>> rope = MRoPE(128, (24, 20, 20), layout="interleaved")
        >>> rope.axis_of_pair[:4], rope.axis_of_pair[-4:]
        ((0, 1, 2, 0), (0, 0, 0, 0))
        >>> q = k = torch.ones(1, 2, 9, 128)
        >>> rope(q, k, grid(1, 3, 3).positions)[0].shape
        torch.Size([1, 2, 9, 128])

    Differs from:
        transformers: Qwen2-VL, Qwen2.5-VL and PaddleOCR-VL are chunked; GLM-4V too, with ``pairing="interleaved"``; Qwen3-VL,
            Qwen3.5 and Cosmos are interleaved; NeoMME is interleaved with two sections; ERNIE-4.5-VL is time_last with
            ``pairing="interleaved"``, and its configuration lists the sections as height, width, time, not in the order of
            the axes. Interleaved sections that do not fit are shortened there, in silence.

    References:
        Wang et al. 2024, "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution",
        arXiv:2409.12191; Bai et al. 2025, "Qwen3-VL Technical Report", arXiv:2511.21631.
    """

    spec = EncodingSpec(
        name="mrope",
        summary="turns queries and keys; each pair of channels reads time, height or width",
        build=lambda shape: [MRoPE(shape.head_dim, _thirds(shape))],
        claims=frozenset(
            {"shift-invariant", "norm-preserving", "composes", "invertible", "parameter-free", "any-length", "real-positions"}
        ),
        references=(
            Reference(
                "Wang et al. 2024",
                "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution",
                "2409.12191",
            ),
            Reference("Bai et al. 2025", "Qwen3-VL Technical Report", "2511.21631"),
        ),
    )

    def __init__(
        self,
        head_dim: int,
        sections: Sequence[int],
        schedule: Schedule = Geometric(1e6),
        *,
        layout: AxisLayout = "chunked",
        rotary_dim: int | None = None,
        start: int = 0,
        pairing: Pairing = "half",
        head_axis: int | None = -3,
        angle_dtype: torch.dtype = torch.float64,
    ) -> None:
        parts = _parts(sections, layout, "MRoPE")
        super().__init__(
            head_dim,
            axes=len(parts),
            rotary_dim=rotary_dim,
            start=start,
            pairing=pairing,
            head_axis=head_axis,
            angle_dtype=angle_dtype,
        )
        check_schedule("MRoPE", schedule)
        self.schedule, self.sections, self.layout = schedule, tuple(sections), layout
        if 2 * sum(self.sections) != self.rotary_dim:
            raise ValueError(
                f"MRoPE: sections = {self.sections} sum to {sum(self.sections)} with rotary_dim = {self.rotary_dim}. Expected "
                f"{self.rotary_dim // 2}, one axis for every pair. Count pairs, not channels, and pass rotary_dim where only "
                "a part of the head turns."
            )
        self._frequencies(torch.device("cpu"))  # a schedule that does not fit says so now

    @property
    def parts(self) -> tuple[Part, ...]:
        return _parts(self.sections, self.layout, "MRoPE")

    def ladder(self, *, dtype: torch.dtype, device: torch.device) -> Frequencies:
        return self.schedule.frequencies(self.rotary_dim, dtype=dtype, device=device)

    def settings(self) -> str:
        return f"{self.sections}, {self.schedule}, layout={self.layout!r}"


def axis_of_pair(sections: Sequence[int], layout: AxisLayout) -> tuple[int, ...]:
    """The axis that each channel pair reads.

    Args:
        sections: how many pairs read each axis, in the order of the positions' axes.

    Raises:
        ValueError: an unknown layout, or sections that it cannot realise.

    Example:
        >>> axis_of_pair((2, 1, 1), "chunked"), axis_of_pair((2, 1, 1), "interleaved"), axis_of_pair((2, 1, 1), "time_last")
        ((0, 0, 1, 2), (0, 1, 2, 0), (1, 2, 0, 0))
    """
    return owners(_parts(sections, layout, "axis_of_pair"), sum(sections))


def _parts(sections: Sequence[int], layout: AxisLayout, name: str) -> tuple[Part, ...]:
    """The pairs of each axis, in the order of the axes; the first axis has what the later parts leave."""
    if layout not in ("chunked", "interleaved", "time_last"):
        raise ValueError(
            f"{name}: layout = {layout!r}. Expected 'chunked', 'interleaved' or 'time_last'. Name the one the weights were "
            "trained with."
        )
    if isinstance(sections, str) or not isinstance(sections, Sequence):
        raise TypeError(f"{name}: sections = {sections!r}. Expected pairs per axis, such as (16, 24, 24). Pass a tuple.")
    check_integers(name, 0, **{f"section {axis}": size for axis, size in enumerate(sections)})
    axes, pairs = len(sections), sum(sections)
    if not pairs:
        raise ValueError(
            f"{name}: sections = {tuple(sections)}. Expected one pair or more. Pass how many pairs read each axis, such as (16, 24, 24)."
        )
    if layout == "chunked":
        ends = [sum(sections[: axis + 1]) for axis in range(axes)]
        return tuple((axis, slice(end - size, end)) for axis, (size, end) in enumerate(zip(sections, ends, strict=True)))
    if layout == "time_last" and len(set(sections[1:])) != 1:
        raise ValueError(
            f"{name}: sections = {tuple(sections)} with layout = 'time_last'. Expected one number for all axes but the first, "
            "since they take turns. Pass the sections in the order of the axes: time, height, width."
        )
    turns, skip = (axes, 0) if layout == "interleaved" else (axes - 1, 1)
    later = [(axis, slice(axis - skip, turns * sections[axis], turns)) for axis in range(1, axes)]
    parts = ((0, slice(0, pairs)), *later)
    axis_of = owners(parts, pairs)
    result = tuple(axis_of.count(axis) for axis in range(axes))
    if result != tuple(sections):
        raise ValueError(
            f"{name}: sections = {tuple(sections)} with layout = {layout!r} come out as {result}. Expected sections that "
            f"turns of {axes} axes fill in {pairs} pairs. Pass {result} if that is how the weights were trained."
        )
    return parts


def _thirds(shape: ModelShape) -> tuple[int, int, int]:
    third, over = divmod(shape.head_dim // 2, 3)
    return third + over, third, third
