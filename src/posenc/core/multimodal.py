"""Tokens of several axes: text, pictures and videos in one sequence, patches at their centres, decoding after them."""

from __future__ import annotations

from math import inf
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from posenc.core.checks import check_integers, check_values
from posenc.core.tokens import PADDING, Tokens, check_positions, check_whole
from posenc.errors import ShapeError


def multimodal(
    grids: Tensor,
    total: int,
    *,
    time_step: Tensor | None = None,
    documents: Tensor | None = None,
    side: Literal["right", "left"] = "right",
) -> Tokens:
    """Text, pictures and videos in one sequence, each token at its (time, height, width).

    The thing people get wrong: where text goes on after a picture. Every block starts one past the largest number that
    any axis has reached, so a picture of 2 × 3 tokens takes six tokens but only three positions.

    Text advances on all axes together; a picture or video counts its grid from the block's start, last axis fastest.

    Args:
        grids: the blocks of each row in order, as (time, height, width) in tokens of the language model, after patches are
            merged: ``(n, 0, 0)`` is a run of n text tokens, ``(1, h, w)`` a picture, ``(t, h, w)`` a video, ``(0, 0, 0)``
            nothing, to fill up shorter rows.
        total: the number of tokens in a row, a host integer; what the blocks leave over is padding.
        time_step: how far a video's clock moves from frame to frame, in positions, one per block; the product is cut to
            whole numbers before the start is added, in ``time_step``'s own dtype. 1 by default, and for text always.
        documents: the document of each block, never falling; positions start again at 0 with each.
        side: where the padding is.

    Shape:
        grids: ``[*batch, blocks, 3]`` integers; time_step, documents: ``[*batch, blocks]``; the result's positions:
        ``[*batch, total, 3]``, its segments: ``[*batch, total]``.

    Returns:
        Tokens with ``axes=3``. Padding is at position 0, in segment -1; where no row has any, ``tokens._replace(segments=None)``
        says so.

    Raises:
        TypeError: grids, documents or a total that are not integers; a half-precision time_step.
        ShapeError: grids without three numbers per block, time_step or documents of other blocks.
        ValueError: more tokens than ``total``, negative sizes, a grid with one side of 0, documents that fall.

    Example:
        >>> multimodal(torch.tensor([[3, 0, 0], [1, 2, 2], [2, 0, 0]]), 9).positions.T
        tensor([[0, 1, 2, 3, 3, 3, 3, 5, 6],
                [0, 1, 2, 3, 3, 4, 4, 5, 6],
                [0, 1, 2, 3, 4, 3, 4, 5, 6]])

    Differs from:
        transformers: equal for text, pictures and videos that are no longer than they are high or wide. Version 5 starts
            what follows after the larger of height and width alone, so text after a longer video meets its last frames;
            version 4 and the models' own code count time too, as here. Positions are ``[batch, seq, 3]``, there
            ``[3, batch, seq]``; grids are in patches there, before merging.

    References:
        Wang et al. 2024, "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution",
        arXiv:2409.12191; Bai et al. 2025, "Qwen2.5-VL Technical Report", arXiv:2502.13923 (time_step).
    """
    _check_blocks(grids, total, time_step, documents, side)
    grids = grids.to(torch.int64)
    time, height, width = grids.unbind(-1)
    is_text = height == 0
    counts = torch.where(is_text, time, time * height * width)
    ends = counts.cumsum(-1)
    used = pad(ends, (1, 0))[..., -1:]
    check_values(
        used <= total,
        lambda: (
            f"multimodal: the blocks hold {int(used.max())} tokens with total = {total}. Expected {total} at most. Pass the length "
            "of the padded rows."
        ),
    )

    latest = (time - 1).clamp(min=0)
    if time_step is not None:
        latest = torch.where(is_text, latest, _cut(latest, time_step))
    farthest = torch.stack([latest, height - 1, width - 1]).amax(0)
    spans = torch.where(counts > 0, farthest + 1, 0)
    starts = spans.cumsum(-1) - spans
    if documents is not None:
        documents = documents.to(torch.int64).expand(counts.shape)
        first = documents != pad(documents, (1, 0), value=PADDING)[..., :-1]
        starts = starts - torch.where(first, starts, 0).cummax(-1).values

    index = torch.arange(total, dtype=torch.int64, device=grids.device).expand(*counts.shape[:-1], total)
    if side == "left":
        index = index - (total - used)
    real = (index >= 0) & (index < used)
    block = torch.searchsorted(ends, index.contiguous(), right=True)

    def of_token(values: Tensor) -> Tensor:
        return pad(values.expand(counts.shape), (0, 1)).gather(-1, block)  # a block more, for padding to read

    within = index - of_token(ends - counts)
    rows, columns = of_token(height).clamp(min=1), of_token(width).clamp(min=1)
    text = of_token(is_text)
    frame = within // (rows * columns)
    if time_step is not None:
        frame = torch.where(text, frame, _cut(frame, of_token(time_step)))
    place = [frame, torch.where(text, within, within // columns % rows), torch.where(text, within, within % columns)]
    positions = torch.where(real[..., None], torch.stack(place, dim=-1) + of_token(starts)[..., None], 0)
    segments = torch.zeros_like(index) if documents is None else of_token(documents)
    return Tokens(positions, None, torch.where(real, segments, PADDING), axes=3)


def _cut(frame: Tensor, time_step: Tensor) -> Tensor:
    return (frame.to(time_step.dtype) * time_step).to(torch.int64)


def _check_blocks(grids: Tensor, total: int, time_step: Tensor | None, documents: Tensor | None, side: str) -> None:
    check_whole(grids, name="multimodal: grids")
    check_integers("multimodal", 0, total=total)
    if grids.ndim < 2 or grids.shape[-1] != 3:
        raise ShapeError(
            f"multimodal: grids of shape {tuple(grids.shape)}. Expected [*batch, blocks, 3], (time, height, width) of each block. "
            "Write a run of n text tokens as (n, 0, 0)."
        )
    if side not in ("right", "left"):
        raise ValueError(f"multimodal: side = {side!r}. Expected 'right' or 'left'. Name the side that is padded.")
    time, height, width = grids.unbind(-1)
    plain = (time >= 0) & (height == 0) & (width == 0)
    check_values(
        plain | (grids >= 1).all(-1),
        lambda: (
            f"multimodal: grids = {grids.tolist()}. Expected (n, 0, 0) for text, or three sizes of 1 or more. Give pictures a time of 1."
        ),
    )
    for key, values in (("time_step", time_step), ("documents", documents)):
        if values is not None and (values.shape[-1:] != grids.shape[-2:-1] or values.ndim >= grids.ndim):
            raise ShapeError(
                f"multimodal: {key} of shape {tuple(values.shape)} for grids of shape {tuple(grids.shape)}. Expected [*batch, blocks]. "
                "Pass one number per block."
            )
    if time_step is not None:
        check_positions(time_step, name="multimodal: time_step")
        check_values(
            time_step >= 0,
            lambda: f"multimodal: time_step = {time_step.tolist()}. Expected numbers of 0 or more. Pass positions per frame.",
        )
    if documents is not None:
        check_whole(documents, name="multimodal: documents")
        check_values(
            documents >= pad(documents, (1, 0))[..., :-1],
            lambda: (
                f"multimodal: documents = {documents.tolist()}. Expected numbers from 0 that never fall. Number the documents of a "
                "row in their order."
            ),
        )


def next_positions(tokens: Tokens) -> Tensor:
    """The position that the next token of each row takes: one past the largest on any axis in the row's last document.

    It is what decoding after `multimodal` continues from; the length of the row is another number.
    ``next_positions(tokens) - lengths`` is what transformers calls ``rope_deltas``.

    Shape:
        the result: ``[*batch]``, 0 for a row without real tokens.

    Example:
        >>> prompt = multimodal(torch.tensor([[[3, 0, 0], [1, 2, 2], [2, 0, 0]]]), 9)
        >>> next_positions(prompt)
        tensor([7])
        >>> on_axes(decode(next_positions(prompt)), 3).positions
        tensor([[[7, 7, 7]]])
    """
    farthest = tokens.positions if tokens.axes is None else tokens.positions.amax(-1)
    if tokens.segments is not None:
        segments = tokens.segments
        last = pad(segments, (1, 0), value=PADDING).amax(-1, keepdim=True)
        farthest = torch.where((segments == last) & (segments != PADDING), farthest, -1)
    return pad(farthest, (1, 0), value=-1).amax(-1) + 1


def on_axes(tokens: Tokens, axes: int) -> Tokens:
    """Tokens of one axis at the same number on several: text, for an encoding that also takes pictures.

    Example:
        >>> on_axes(contiguous(2), 3).positions
        tensor([[0, 0, 0],
                [1, 1, 1]])
    """
    check_integers("on_axes", 1, axes=axes)
    if tokens.axes is not None:
        raise ShapeError(
            f"on_axes: tokens of {tokens.axes} axes. Expected tokens of one axis. Pass those of contiguous, padded, packed or decode."
        )
    return tokens._replace(positions=tokens.positions[..., None].expand(*tokens.positions.shape, axes), axes=axes)


def patch_centres(
    *sizes: int,
    extent: float = 1.0,
    prefix: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tokens:
    """The centres of a picture's patches, each axis from ``-extent`` to ``extent``, after ``prefix`` tokens at the origin.

    The thing people get wrong: more patches are then finer steps over the same range, not a longer range; changing the
    resolution changes every distance between neighbours.

    ``extent · (2 · (i + 1/2) / size - 1)`` on each axis, row-major like `grid`; ``extent=2 * pi`` is DINOv3's, and with
    ``dtype=torch.float32`` its very numbers. Rotary encodings leave tokens at the origin as they are.

    Shape:
        the result's positions are ``[prefix + product(sizes), axes]``.

    Example:
        >>> patch_centres(2, 2).positions.T
        tensor([[-0.5000, -0.5000,  0.5000,  0.5000],
                [-0.5000,  0.5000, -0.5000,  0.5000]], dtype=torch.float64)

    References:
        Siméoni et al. 2025, "DINOv3", arXiv:2508.10104.
    """
    if not sizes or not -inf < extent < inf:
        raise ValueError(
            f"patch_centres: sizes = {sizes}, extent = {extent}. Expected at least one axis and a finite extent. Pass the grid in "
            "patches, such as patch_centres(14, 14)."
        )
    check_integers("patch_centres", 0, prefix=prefix, **{f"size of axis {axis}": size for axis, size in enumerate(sizes)})
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"patch_centres: dtype = {dtype}. Expected torch.float64 or torch.float32. Use float64.")
    halves = [torch.arange(size, dtype=dtype, device=device) + 0.5 for size in sizes]
    axes = [extent * (2.0 * (half / size) - 1.0) for half, size in zip(halves, sizes, strict=True)]
    cells = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
    return Tokens(torch.cat([cells.new_zeros(prefix, len(sizes)), cells]), axes=len(sizes))
