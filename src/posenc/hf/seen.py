"""What the layers of one kind see in one call of a transformers model: the mask, and where its keys stand.

Imported when the first bias is added, never before: it needs flex_attention's ``BlockMask``, the one type beside tensors
that transformers hands from where masks are made to where attention is computed without touching it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Never, final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from posenc.core.checks import check_values
from posenc.core.mask import CAUSAL, FULL, Mask
from posenc.errors import ShapeError


@final
@dataclass(frozen=True, eq=False)
class Written(Mask):
    """A mask that somebody else wrote out.

    Shape:
        seen: ``[batch, q, k]`` booleans, true where the query sees the key.
    """

    seen: Tensor = field(repr=False)

    def sees(self, b: Tensor | EllipsisType, q: Tensor, k: Tensor, q_length: int, k_length: int) -> Tensor:
        if tuple(self.seen.shape[-2:]) != (q_length, k_length):
            raise ShapeError(
                f"add_bias: a mask of {' × '.join(map(str, self.seen.shape[-2:]))} for {q_length} queries and {k_length} keys. "
                "Expected one entry for each. Look at attention_mask and at the kind of cache."
            )
        seen = self.seen.to(q.device)
        return seen[0 if isinstance(b, Tensor) and seen.shape[0] == 1 else b, q, k]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.seen,)


@final
class Seen(BlockMask):
    """The mask of one call, as a posenc value, with the places of its queries and keys.

    Args:
        mask: which keys each query sees.
        lengths: batch, queries, keys.
        q_offset: how many tokens came before the first query; a tensor with static caches.
        kv_offset: how many tokens came before the first key that is still there.
        attended: ``[batch, tokens]`` booleans over all tokens so far, false for padding; ``None`` when there is none.
    """

    def __init__(
        self, mask: Mask, lengths: tuple[int, int, int], q_offset: int | Tensor, kv_offset: int, attended: Tensor | None
    ) -> None:  # no blocks, hence no super().__init__
        self.mask, self.lengths, self.q_offset, self.kv_offset, self.attended = mask, lengths, q_offset, kv_offset, attended

    @property
    def shape(self) -> tuple[int, ...]:
        batch, q_length, kv_length = self.lengths
        return batch, 1, q_length, kv_length

    def __repr__(self) -> str:
        return f"Seen({self.mask}, {self.lengths})"

    __str__ = __repr__

    def __getitem__(self, index: object) -> Never:
        raise TypeError(
            "add_bias: the model cuts the attention mask. Expected one that hands it to attention as it is. Use a model of "
            "another architecture, or posenc.Transformer."
        )

    def to(self, device: torch.device | str) -> Seen:
        mask = Written(self.mask.seen.to(device)) if isinstance(self.mask, Written) else self.mask
        attended = None if self.attended is None else self.attended.to(device)
        return Seen(mask, self.lengths, self.q_offset, self.kv_offset, attended)

    def key_positions(self, positions: Tensor) -> Tensor | None:
        """Where the keys are: the new tokens' own positions for these, counted for those in a cache.

        transformers keeps no positions of cached tokens. It gives every token either the number of tokens before it or
        the number of attended tokens before it; the new ones show which.

        Shape:
            positions: ``[batch or 1, q]`` of the new tokens; the result is ``[batch or 1, k]``, or ``None`` when the keys
                are the new tokens.
        """
        _, q_length, kv_length = self.lengths
        device = positions.device
        if isinstance(self.q_offset, Tensor):
            q_offset: int | Tensor = self.q_offset.to(device)
        elif (ahead := self.kv_offset + kv_length - self.q_offset - q_length) < 0 or (ahead > 0 and self.mask == FULL):
            raise ShapeError(
                f"add_bias: {kv_length} keys from token {self.kv_offset} on for {q_length} queries from token {self.q_offset} on. Expected "
                "keys that end with the queries; those of another sequence have no distance to them. Give cross-attention no bias."
            )
        elif ahead == 0 and q_length == kv_length:
            return None
        else:
            q_offset = self.q_offset
        k_order = torch.arange(kv_length, dtype=torch.int64, device=device) + self.kv_offset
        q_order = torch.arange(q_length, dtype=torch.int64, device=device) + q_offset
        cached, known = k_order, positions == q_order
        if self.attended is not None:
            attended = self.attended.to(device)
            real, rank = attended[:, q_order], (attended.to(torch.int64).cumsum(-1) - 1).clamp(min=0)
            by_order = (known | ~real).all(-1, keepdim=True)
            by_rank = ((positions == rank[:, q_order]) | ~real).all(-1, keepdim=True)
            cached, known = torch.where(by_rank, rank[:, k_order], k_order), by_rank | by_order
        check_values(
            known | (torch.as_tensor(q_offset) == 0),
            lambda: (
                f"add_bias: position_ids {positions.tolist()} of tokens {q_order.tolist()}, with a cache. Expected each token's number in its "
                "row, with or without the padding; transformers keeps no positions of cached tokens, and these do not tell them. Call the "
                "model without a cache, or with position_ids as generate makes them."
            ),
        )
        new = k_order - q_offset
        own = positions[:, new.clamp(0, q_length - 1)]
        return torch.where(new >= 0, own, cached)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> Seen:
    """A mask as transformers asks its mask interface for one: a static fact where it is one, else written out."""
    from transformers.masking_utils import sdpa_mask
    from transformers.utils.import_utils import is_tracing

    attended = attention_mask
    if attended is not None:
        missing = kv_offset + kv_length - attended.shape[-1]
        attended = torch.nn.functional.pad(attended, (0, max(missing, 0)))  # unfilled slots of a static cache
        # transformers' own mask for sdpa looks at the values too, once a call
        if not is_tracing(attended) and bool(attended.all()):
            attended = None
    plain = attended is None and (local_size is None or kv_length < local_size)
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if plain and aligned and allow_is_causal_skip:
        mask: Mask = CAUSAL
    elif plain and allow_is_bidirectional_skip:
        mask = FULL
    else:
        written: Any = sdpa_mask  # its annotations leave out what static caches and skipped masks give
        seen = written(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        mask = Written(seen[:, 0])
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a static cache counts on in the same tensor before attention is called
    return Seen(mask, (batch_size, q_length, kv_length), q_offset, kv_offset, attended)
