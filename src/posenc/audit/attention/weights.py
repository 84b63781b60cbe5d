"""One attention function, and the weights that it gives to keys: asked with one-hot values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from posenc.audit.behaviour.runner import Undrivable, first_line

NAME = "check_attention"
QUERY_POSITIONS = ("positions", "q_positions", "query_positions", "position_ids")
KEY_POSITIONS = ("k_positions", "key_positions", "kv_positions")
PAIR_MASKS = ("mask", "attn_mask", "attention_mask")
KEY_MASKS = ("attention_mask", "key_padding_mask")


@dataclass(eq=False)
class Attention:
    """``(q, k, v, …) -> out``, called with random or one-hot inputs.

    Args:
        takes: names of its arguments beside queries, keys and values.
    """

    fn: Callable[..., Any]
    takes: frozenset[str]
    heads: int
    kv_heads: int
    head_dim: int
    keys: int
    seed: int
    dtype: torch.dtype = torch.float64

    def draw(self, heads: int, length: int, turn: int = 0, batch: int = 1) -> Tensor:
        """Unit-normal numbers, the same ones every time."""
        dice = torch.Generator().manual_seed(self.seed + 17 * turn)
        return torch.randn(batch, heads, length, self.head_dim, generator=dice, dtype=torch.float64).to(self.dtype)

    def zeros(self, heads: int, length: int) -> Tensor:
        return torch.zeros(1, heads, length, self.head_dim, dtype=self.dtype)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        """Its answer, with contiguous positions where it takes some.

        Raises:
            Undrivable: it raises or answers another shape.
        """
        at = {name: self.count(q, k.shape[2] - q.shape[2]) for name in QUERY_POSITIONS if name in self.takes}
        at |= {name: self.count(k, 0) for name in KEY_POSITIONS if name in self.takes}
        try:
            with torch.no_grad():
                out = self.fn(q, k, v, **{**at, **given})
        except Exception as error:  # whatever a user's function raises
            raise Undrivable(f"it raises {type(error).__name__}: {first_line(error)}") from error
        out = out[0] if isinstance(out, tuple) and out else out
        expected = (*q.shape[:3], v.shape[-1])
        if not isinstance(out, Tensor) or tuple(out.shape) != expected:
            found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise Undrivable(f"it answers {found}, not {expected}, for queries of shape {tuple(q.shape)}")
        return out

    def rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Its answers, one row for each query of each head, zeros where a query sees nothing: ``[batch, heads · q, dim]``."""
        return self(q, k, v).flatten(1, 2).nan_to_num()

    @staticmethod
    def count(x: Tensor, start: int) -> Tensor:
        return torch.arange(start, start + x.shape[2]).expand(x.shape[0], -1)

    def weights(self, q: Tensor, k: Tensor, **given: Any) -> Tensor:
        """What each query gives to each key: ``[heads, q, k]``."""
        parts = []
        for first in range(0, k.shape[2], self.head_dim):
            v = self.zeros(self.kv_heads, k.shape[2])
            for channel, key in enumerate(range(first, min(first + self.head_dim, k.shape[2]))):
                v[:, :, key, channel] = 1
            parts.append(self(q, k, v, **given)[0])
        return torch.cat(parts, -1)[..., : k.shape[2]].nan_to_num()  # queries that see nothing

    def level(self, queries: int | None = None, /, **given: Any) -> Tensor:
        """The weights where all scores are bias alone: ``[heads, q, k]``."""
        n = self.keys if queries is None else queries
        return self.weights(self.zeros(self.heads, n), self.zeros(self.kv_heads, self.keys), **given)

    @cached_property
    def square(self) -> Tensor:
        return self.level()

    @cached_property
    def seen(self) -> Tensor:
        """Which keys the queries see, in any head: ``[k, k]`` booleans."""
        return sees(self.square)


def sees(weights: Tensor) -> Tensor:
    """What gets weight: more than 10⁻¹² of the largest in its row; a finite penalty of 28 or more hides."""
    return (weights > 1e-12 * weights.amax(-1, keepdim=True)).any(0)


def attention_of(
    fn: Callable[..., Any], *, heads: int, kv_heads: int, head_dim: int, keys: int, seed: int, name: str = NAME
) -> Attention:
    """A function that answered once.

    Raises:
        ValueError: it raises, or answers another shape, in float64 and in float32.
        TypeError: it needs other arguments.
    """
    takes = _takes(fn)
    failure: Undrivable | None = None
    for dtype in (torch.float64, torch.float32):
        attention = Attention(fn, takes, heads, kv_heads, head_dim, keys, seed, dtype)
        try:
            attention(attention.draw(heads, keys), attention.draw(kv_heads, keys, 1), attention.draw(kv_heads, keys, 2))
            return attention
        except Undrivable as error:
            failure = error
    assert failure is not None
    raise ValueError(
        f"{name}: the function cannot be called: {failure}. Expected (q, k, v) of shapes [batch, {heads}, seq, {head_dim}] and "
        f"[batch, {kv_heads}, seq, {head_dim}] to give [batch, {heads}, seq, {head_dim}]. Wrap it in a function that does."
    ) from failure.__cause__


def _takes(fn: Callable[..., Any]) -> frozenset[str]:
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    except (TypeError, ValueError):  # torch's own functions have none to read
        return frozenset()
    named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    known = {*QUERY_POSITIONS, *KEY_POSITIONS}
    needed = [p.name for p in named[3:] if p.default is p.empty and p.name not in known]
    if needed or (len(named) < 3 and len(named) == len(parameters)):
        words = f"needs {', '.join(needed)} beside queries, keys and values" if needed else f"takes {len(named)} arguments"
        raise TypeError(f"{NAME}: the function {words}. Expected (q, k, v, …). Wrap it in a function that takes these.")
    return frozenset(p.name for p in named[3:])
