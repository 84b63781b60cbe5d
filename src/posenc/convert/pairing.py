"""The weights of queries and keys from one pairing of channels to the other."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.core.checks import check_integers
from posenc.core.rotary import Pairing, rotary_span
from posenc.errors import ShapeError


def pair_order(head_dim: int, to: Pairing, *, rotary_dim: int | None = None, start: int = 0) -> Tensor:
    """The channels of a head in another pairing's order: ``new[i] = old[order[i]]``.

    Args:
        to: ``"half"`` for channels that are interleaved now, ``"interleaved"`` for channels that pair halves now.
        rotary_dim: how many channels turn, all by default; the others stay where they are.
        start: the first that does; negative counts from the end.

    Returns:
        ``[head_dim]`` int64.

    Raises:
        ValueError: an unknown pairing, or turning channels that do not lie in the head.

    Example:
        >>> pair_order(8, "half").tolist()
        [0, 2, 4, 6, 1, 3, 5, 7]
    """
    rotary_dim, first = rotary_span("pair_order", head_dim, rotary_dim, start)
    if to not in ("half", "interleaved"):
        raise ValueError(
            f"pair_order: to = {to!r}. Expected 'half' or 'interleaved'. Name the pairing that the result shall have."
        )
    order = torch.arange(head_dim)
    turning = torch.arange(rotary_dim).reshape((-1, 2) if to == "half" else (2, -1)).T.flatten()
    order[first : first + rotary_dim] = first + turning
    return order


def reorder_pairs(weight: Tensor, heads: int, to: Pairing, *, rotary_dim: int | None = None, start: int = 0) -> Tensor:
    """A projection of queries or keys for the other pairing: same model, same scores.

    The thing people get wrong: the key projection of a grouped-query model has fewer heads. With the number of query
    heads every shape still fits and the text is noise. Biases, and per-channel norms of queries and keys, move too;
    values do not.

    Args:
        weight: ``[heads · head_dim, …]``, one row per channel; a bias or norm weight has one axis, and a norm that all
            heads share has ``heads=1``.
        heads: *of this tensor*: key heads for keys.
        to: the pairing of the result.

    Returns:
        A new tensor of the same shape and dtype. Reordering to the other pairing and back is the identity.

    Raises:
        ShapeError: rows that do not divide over the heads.

    Example:
        >>> keys = torch.arange(16.0)[:, None]  # two key heads of eight channels
        >>> reorder_pairs(keys, 2, "half").flatten().int().tolist()
        [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]

    Differs from:
        transformers: its conversion scripts have this once per model, mostly without partial rotation.
    """
    check_integers("reorder_pairs", 1, heads=heads)
    if weight.ndim < 1 or weight.shape[0] % heads:
        raise ShapeError(
            f"reorder_pairs: a weight of shape {tuple(weight.shape)} for {heads} heads. Expected heads · head_dim rows. Pass the number of "
            "key heads for a key projection."
        )
    head_dim = weight.shape[0] // heads
    order = pair_order(head_dim, to, rotary_dim=rotary_dim, start=start).to(weight.device)
    moved: Tensor = weight.unflatten(0, (heads, head_dim)).index_select(1, order).flatten(0, 1)
    return moved
