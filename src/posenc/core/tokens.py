"""Where tokens are, when they come and which document they belong to.

`Tokens` is the value that everything else reads; the builders here make it for the situations that occur: whole
sequences, packed documents, decoding with a cache, padding, grids, audio frames and sequence shards. The mathematics
of an encoding only ever sees the coordinates.
"""

from __future__ import annotations

from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple

from posenc.core.checks import check_integers, check_values
from posenc.errors import ShapeError

_FARTHEST = 2**62

Positions = Tensor | int
"""Coordinates, or an ``int``: contiguous from this start."""

PADDING = -1
"""The segment of padding: it sees nothing and nothing sees it."""


class Tokens(NamedTuple):
    """Positions, order and segments of some tokens.

    ``None`` is a static fact, not a default to be filled in: an ``order`` of ``None`` says that tokens come as they
    stand, ``segments`` of ``None`` that they are all of one document, ``axes`` of ``None`` that a position is one
    number. Fused attention relies on that.

    Shape:
        positions: ``[*batch, seq]``, integers or float32/float64; with ``axes`` given, ``[*batch, seq, axes]``.
        order, segments: ``[*batch, seq]`` integers. Segment -1 is padding.

    Example:
        >>> Tokens(torch.arange(3)).positions
        tensor([0, 1, 2])
    """

    positions: Tensor
    order: Tensor | None = None
    segments: Tensor | None = None
    axes: int | None = None

    @property
    def length(self) -> int:
        """The number of tokens in a row."""
        return self.positions.shape[-1 if self.axes is None else -2]


_register_namedtuple(Tokens, serialized_type_name="posenc.Tokens")  # or torch.export.save refuses it


def contiguous(n: int, start: int = 0, *, device: torch.device | str | None = None) -> Tokens:
    """``n`` tokens at ``start, start + 1, …``.

    Example:
        >>> contiguous(3, start=4).positions
        tensor([4, 5, 6])
    """
    check_integers("contiguous", 0, n=n)
    check_integers("contiguous", start=start)
    return Tokens(torch.arange(start, start + n, dtype=torch.int64, device=device))


def packed(cu_seqlens: Tensor, total: int) -> Tokens:
    """Documents laid end to end: positions restart at each boundary and segments number the documents.

    The thing people get wrong: packing needs restarted positions for absolute codes *and* a segment mask for all
    methods; `posenc.causal` builds that mask from these tokens.

    Shape:
        cu_seqlens: ``[documents + 1]`` integers from 0, never falling; tokens past the last one are padding.

    Args:
        total: the number of tokens, a host integer, so that nothing waits for the device.

    Raises:
        ValueError: boundaries that fall, do not start at 0 or pass ``total``.

    Example:
        >>> packed(torch.tensor([0, 5, 9]), 9).positions
        tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            f"packed: cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}. Expected a one-axis int32 or "
            "int64 tensor of boundaries, such as [0, 5, 9]. For positions of several axes derive it from one axis."
        )
    edges = cu_seqlens.to(torch.int64)
    valid = torch.cat([edges[:1] == 0, edges[1:] >= edges[:-1], edges[-1:] <= total])
    check_values(
        valid,
        lambda: (
            f"packed: cu_seqlens = {cu_seqlens.tolist()} with total = {total}. Expected boundaries that start at 0, "
            "never fall and end at or before total. Pass the cumulative document lengths."
        ),
    )
    index = torch.arange(total, dtype=torch.int64, device=cu_seqlens.device)
    segments = torch.searchsorted(edges, index, right=True) - 1
    positions = index - edges[segments]
    return Tokens(positions, None, torch.where(index < edges[-1], segments, PADDING))


def decode(cache_lengths: Tensor, n: int = 1) -> Tokens:
    """The next ``n`` tokens of each row, given how many real tokens each row has cached.

    Shape:
        cache_lengths: ``[batch]`` integers; the result's positions are ``[batch, n]``.

    Example:
        >>> decode(torch.tensor([4, 2]), 2).positions
        tensor([[4, 5],
                [2, 3]])
    """
    if cache_lengths.ndim != 1 or cache_lengths.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            f"decode: cache_lengths is {cache_lengths.dtype} of shape {tuple(cache_lengths.shape)}. Expected a one-axis "
            "integer tensor [batch]. Pass one length per row."
        )
    check_integers("decode", 0, n=n)
    check_values(
        cache_lengths >= 0,
        lambda: (
            f"decode: cache_lengths = {cache_lengths.tolist()}. Expected 0 or more. Pass how many real tokens each row has cached."
        ),
    )
    steps = torch.arange(n, dtype=torch.int64, device=cache_lengths.device)
    return Tokens(cache_lengths.to(torch.int64)[:, None] + steps)


def padded(attention_mask: Tensor, fill: int = 0) -> Tokens:
    """A padded batch, left or right: each row counts its own real tokens from 0; padding is in no document.

    Shape:
        attention_mask: ``[*batch, seq]`` of bool, or integers with 1 = real and 0 = padding.

    Args:
        fill: the position that padding holds. The default 0 is valid for every encoding; -1 is what
            ``Learned(padding_idx=…)`` takes as "the padding row".

    Example:
        >>> tokens = padded(torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]))
        >>> tokens.positions
        tensor([[0, 0, 0, 1, 2],
                [0, 1, 2, 3, 4]])
        >>> tokens.segments[0]
        tensor([-1, -1,  0,  0,  0])
    """
    if attention_mask.ndim < 1 or attention_mask.is_floating_point():
        raise TypeError(
            f"padded: attention_mask is {attention_mask.dtype} of shape {tuple(attention_mask.shape)}. Expected bool or "
            "integers, 1 for real tokens. Pass the tokenizer's mask, not an additive float mask."
        )
    real = attention_mask.to(torch.bool)
    check_values(
        real.to(attention_mask.dtype) == attention_mask,
        lambda: (
            f"padded: attention_mask holds values from {attention_mask.min().item()} to {attention_mask.max().item()}. Expected 0 and "
            "1 only, 1 for real tokens. Pass the tokenizer's mask, not an additive one."
        ),
    )
    count = real.to(torch.int64).cumsum(-1) - 1
    return Tokens(torch.where(real, count, fill), None, real.to(torch.int64) - 1)


def grid(*sizes: int, prefix: int = 0, device: torch.device | str | None = None) -> Tokens:
    """A row-major grid, last axis fastest, after ``prefix`` tokens (class or register tokens) at the origin.

    Shape:
        the result's positions are ``[prefix + product(sizes), axes]``.

    Example:
        >>> grid(2, 3).positions.T
        tensor([[0, 0, 0, 1, 1, 1],
                [0, 1, 2, 0, 1, 2]])
    """
    if not sizes or min(sizes) < 0 or prefix < 0:
        raise ValueError(
            f"grid: sizes = {sizes}, prefix = {prefix}. Expected at least one axis and no negative size. "
            "Pass the grid in patches, such as grid(14, 14, prefix=1)."
        )
    check_integers("grid", 0, prefix=prefix, **{f"size of axis {axis}": size for axis, size in enumerate(sizes)})
    axes = [torch.arange(size, dtype=torch.int64, device=device) for size in sizes]
    cells = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
    return Tokens(torch.cat([cells.new_zeros(prefix, len(sizes)), cells]), axes=len(sizes))


def seconds(
    frames: int, hop: float, sample_rate: float, *, start: float = 0.0, device: torch.device | str | None = None
) -> Tokens:
    """Audio frames at their times in seconds, ``start + frame · hop / sample_rate``, in float64.

    The same instant has the same position at any sample rate and hop.

    Example:
        >>> seconds(3, hop=160, sample_rate=16_000).positions
        tensor([0.0000, 0.0100, 0.0200], dtype=torch.float64)
    """
    check_integers("seconds", frames=frames)
    if frames < 0 or not 0 < hop < inf or not 0 < sample_rate < inf or not -inf < start < inf:
        raise ValueError(
            f"seconds: frames = {frames}, hop = {hop}, sample_rate = {sample_rate}, start = {start}. Expected frames ≥ 0, a hop "
            "and a rate above 0, all finite. Pass hop in samples and sample_rate in samples per second."
        )
    index = torch.arange(frames, dtype=torch.float64, device=device)
    return Tokens(start + index * hop / sample_rate)


def shard(tokens: Tokens, rank: int, ranks: int, *, layout: Literal["contiguous", "head_tail"] = "contiguous") -> Tokens:
    """The tokens that one rank of a context-parallel group holds, with their global positions and order.

    ``"head_tail"`` cuts the sequence into ``2 · ranks`` chunks and gives rank r chunks r and ``2 · ranks - 1 - r``,
    which balances causal work. The order becomes explicit, because a shard no longer stands as it comes.

    Raises:
        ShapeError: the sequence does not divide evenly.

    Example:
        >>> shard(contiguous(16), 1, 2, layout="head_tail").positions
        tensor([ 4,  5,  6,  7,  8,  9, 10, 11])
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"shard: rank = {rank} of {ranks}. Expected 0 ≤ rank < ranks. Pass this process's rank.")
    if layout not in ("contiguous", "head_tail"):
        raise ValueError(f"shard: layout = {layout!r}. Expected 'contiguous' or 'head_tail'. Name the one in use.")
    length = tokens.length
    order = torch.arange(length, device=tokens.positions.device) if tokens.order is None else tokens.order
    chunks = ranks if layout == "contiguous" else 2 * ranks
    if length % chunks:
        raise ShapeError(
            f"shard: {length} tokens over {ranks} ranks ({layout}). Expected a multiple of {chunks}. Pad the sequence first."
        )
    size = length // chunks
    mine = [rank] if layout == "contiguous" else [rank, chunks - 1 - rank]
    index = torch.cat([torch.arange(c * size, (c + 1) * size, device=tokens.positions.device) for c in mine])
    positions = tokens.positions.index_select(-1 if tokens.axes is None else -2, index)
    segments = None if tokens.segments is None else tokens.segments.index_select(-1, index)
    return Tokens(positions, order.index_select(-1, index), segments, tokens.axes)


def follow(tokens: Tokens, more: Tokens) -> Tokens:
    """``more`` appended to ``tokens``, as a key-value cache does. Facts stay static where both sides allow it.

    Example:
        >>> follow(contiguous(2), contiguous(1, start=2)).positions
        tensor([0, 1, 2])
    """
    if tokens.axes != more.axes:
        raise ShapeError(
            f"follow: positions of {more.axes or 1} axes after positions of {tokens.axes or 1}. Expected the same number. "
            "Build both from the same kind of builder."
        )
    trailing = 0 if tokens.axes is None else 1
    positions = _join(tokens.positions, more.positions, trailing)
    order = segments = None
    if tokens.order is not None or more.order is not None:
        before = standing_order(tokens) if tokens.order is None else tokens.order
        after = _latest(before) + 1 + standing_order(more) if more.order is None else more.order
        order = _join(before, after)
    if tokens.segments is not None or more.segments is not None:
        segments = _join(segments_of(tokens), segments_of(more))
    return Tokens(positions, order, segments, tokens.axes)


def _latest(order: Tensor) -> Tensor:
    """The last order in each row, -1 where there is none: ``[*batch, 1]``."""
    return torch.nn.functional.pad(order, (1, 0), value=-1).amax(-1, keepdim=True)


def standing_order(tokens: Tokens) -> Tensor:
    """The order of tokens that come as they stand: ``[seq]`` integers from 0."""
    return torch.arange(tokens.length, dtype=torch.int64, device=tokens.positions.device)


def segments_of(tokens: Tokens) -> Tensor:
    """The segments, with "one document" spelled out as zeros: ``[*batch, seq]``."""
    if tokens.segments is not None:
        return tokens.segments
    return torch.zeros(tokens.length, dtype=torch.int64, device=tokens.positions.device)


def _join(a: Tensor, b: Tensor, trailing: int = 0) -> Tensor:
    """Concatenate along the sequence, spreading a side without a batch over the other's."""
    batch = torch.broadcast_shapes(a.shape[: a.ndim - 1 - trailing], b.shape[: b.ndim - 1 - trailing])
    sides = [t.expand(*batch, *t.shape[t.ndim - 1 - trailing :]) for t in (a, b)]
    return torch.cat(sides, dim=-1 - trailing)


def resolve_positions(positions: Positions, length: int, *, name: str, device: torch.device, axes: int | None = None) -> Tensor:
    """Positions as a checked tensor for ``length`` tokens: ``[*batch, length]`` or ``[*batch, length, axes]``.

    An ``int`` becomes ``start, start + 1, …``. Half-precision positions are refused everywhere: bfloat16 holds no odd
    integer above 256.

    Raises:
        TypeError: half precision, bool, complex, or not a tensor or int.
        ShapeError: another number of tokens or axes.
        ValueError: NaN or infinite positions.
    """
    if isinstance(positions, (int, torch.SymInt)) and not isinstance(positions, bool):
        if isinstance(positions, int) and abs(positions) >= _FARTHEST:
            raise ValueError(
                f"{name}: positions = {positions}. Expected a start below 2⁶² in size, so that distances fit an int64. Look at how it "
                "was computed."
            )
        if axes is not None:
            raise TypeError(
                f"{name}: positions = {positions}. Expected a tensor [*batch, {length}, {axes}] for {axes} axes. "
                "An integer start is for one axis; pass grid(…).positions."
            )
        return torch.arange(positions, positions + length, dtype=torch.int64, device=device)
    check_positions(positions, name=name)
    assert isinstance(positions, Tensor)
    expected = (length,) if axes is None else (length, axes)
    if tuple(positions.shape[-len(expected) :]) != expected:
        raise ShapeError(
            f"{name}: positions have shape {tuple(positions.shape)}. Expected [*batch, {', '.join(map(str, expected))}]. "
            "Pass one position per token, or an int for tokens contiguous from that start."
        )
    return positions.to(device)


def check_positions(positions: object, *, name: str) -> None:
    """Refuse what cannot be a position tensor: wrong type, half precision, NaN, infinity."""
    if not isinstance(positions, Tensor):
        raise TypeError(
            f"{name}: positions are {type(positions).__name__}. Expected a tensor. "
            "Pass contiguous(n, start).positions; an int is only taken where the length is known."
        )
    if positions.dtype in (torch.float16, torch.bfloat16) or (positions.dtype.itemsize == 1 and positions.is_floating_point()):
        raise TypeError(
            f"{name}: positions are {positions.dtype}. Expected integers, float32 or float64, since half precision cannot "
            "tell neighbours apart above 256 (bfloat16) or 2048 (float16). Keep positions out of casts and autocast."
        )
    if positions.dtype == torch.bool or positions.is_complex():
        raise TypeError(
            f"{name}: positions are {positions.dtype}. Expected integers, float32 or float64. "
            "If this is a mask, pass padded(mask).positions."
        )
    if positions.is_floating_point():
        check_values(
            positions.isfinite(),
            lambda: (
                f"{name}: positions hold {positions[~positions.isfinite()][0].item()}. "
                "Expected finite numbers. Look at where the positions were computed."
            ),
        )


def check_tokens(tokens: Tokens, batch: int, length: int, *, name: str) -> None:
    """Refuse tokens that are not those of a ``[batch, length]`` call, or whose order and segments are not integers."""
    check_positions(tokens.positions, name=name)
    if tokens.positions.ndim < (1 if tokens.axes is None else 2) or tokens.length != length:
        raise ShapeError(
            f"{name}: positions of shape {tuple(tokens.positions.shape)} for a sequence of {length}. Expected one per token. Build the tokens from the new ones only; "
            "a cache knows the earlier ones."
        )
    trailing = 1 if tokens.axes is None else 2
    leading = {"positions": tokens.positions.shape[: tokens.positions.ndim - trailing]}
    for key, values in (("order", tokens.order), ("segments", tokens.segments)):
        if values is None:
            continue
        check_whole(values, name=f"{name}: {key}")
        if values.shape[-1:] != (length,):
            raise ShapeError(f"{name}: {key} has shape {tuple(values.shape)}. Expected [*batch, {length}]. Pass one per token.")
        leading[key] = values.shape[:-1]
    for key, sizes in leading.items():
        if tuple(sizes) not in ((), (1,), (batch,)):
            raise ShapeError(
                f"{name}: {key} of batch {tuple(sizes)} for a batch of {batch}. Expected no batch axis, 1 or {batch}. "
                "Build the tokens from the same rows."
            )


def check_whole(values: Tensor, *, name: str) -> None:
    """Refuse orders and segments that are not integer tensors."""
    if not isinstance(values, Tensor) or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} is {kind}. Expected an integer tensor. Number the tokens or documents with int64.")


def check_integer_positions(positions: Tensor, *, name: str, why: str) -> None:
    """Refuse real-valued positions where rows or buckets are looked up."""
    if positions.is_floating_point():
        raise TypeError(
            f"{name}: positions are {positions.dtype}. Expected integers, because {why}. "
            "Pass integer positions, or use an encoding of real positions."
        )
