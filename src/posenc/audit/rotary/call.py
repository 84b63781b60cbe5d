"""How a rotary function is called: what it takes, in which layout, and what it must give back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from posenc.core.checks import check_integers

Layout = Literal["batch heads seq dim", "batch seq heads dim"]
"""The axes of queries and keys."""

PositionsAs = Literal["batch seq", "seq", "start"]
"""How positions are passed: an int64 tensor ``[batch, seq]``, one ``[seq]`` for all rows, or the first as an int."""

Takes = Literal["x", "q k", "q k v"]

NAME = "check_rotary"


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff, that of float32 at least: wider queries and keys may well be turned by a float32 table."""
    return max(torch.finfo(dtype).eps / 2, 2.0**-24)


class RaisedError(ValueError):
    """The user's function raised."""


class Turned(NamedTuple):
    """Queries, keys and values as ``[batch, heads, seq, dim]``, after the call."""

    q: Tensor
    k: Tensor
    v: Tensor | None


@final
@dataclass(frozen=True)
class RotaryFunction:
    """A rotary function, called in one way whatever its signature."""

    fn: Callable[..., Any]
    takes: Takes
    layout: Layout
    positions: PositionsAs
    head_dim: int
    heads: int
    kv_heads: int
    device: torch.device
    dtype: torch.dtype

    @property
    def rounding(self) -> float:
        """Unit roundoff of `dtype`, which all but precision is asked in."""
        return unit(self.dtype)

    def random(self, *shape: int, generator: torch.Generator) -> Tensor:
        """Random content, exact in `dtype`."""
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(self.dtype)

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor, v: Tensor | None = None) -> Turned:
        """Turn by positions ``[batch, seq]``; those of a function that takes a start must be consecutive."""
        at = self._as_taken(positions)
        if self.takes == "x":
            return Turned(self._one((q,), at)[0], self._one((k,), at)[0], v)
        if self.takes == "q k":
            turned_q, turned_k = self._one((q, k), at)
            return Turned(turned_q, turned_k, v)
        return Turned(*self._one((q, k, torch.zeros_like(k) if v is None else v), at))

    def _as_taken(self, positions: Tensor) -> Any:
        if self.positions == "start":
            return int(positions[0, 0])
        return (positions if self.positions == "batch seq" else positions[0]).clone().to(self.device)

    def _one(self, inputs: tuple[Tensor, ...], at: Any) -> tuple[Tensor, ...]:
        swap = self.layout == "batch seq heads dim"
        given = [(x.transpose(1, 2) if swap else x).contiguous().to(self.device) for x in inputs]
        given = [x.clone() for x in given]  # it may write to what it is given
        try:
            with torch.set_grad_enabled(any(x.requires_grad for x in given)):
                result = self.fn(*given, at)
        except Exception as error:
            shapes = ", ".join(str(list(x.shape)) for x in given)
            highest = int(at.max()) if isinstance(at, Tensor) else at
            raise RaisedError(
                f"{NAME}: the function raised {type(error).__name__}: {str(error)[:300]} (called with tensors {shapes} and positions up to "
                f"{highest}). Expected it to turn them. Pass the layout and the form of positions that it takes, and positions_up_to= the "
                "length of its table."
            ) from error
        outputs = (result,) if isinstance(result, Tensor) else tuple(result) if isinstance(result, (tuple, list)) else ()
        if len(outputs) == 2 and len(inputs) == 3:  # values were taken and not given back
            outputs = (*outputs, given[2])
        if len(outputs) != len(inputs) or not all(isinstance(y, Tensor) for y in outputs):
            got = type(result).__name__ if not outputs else f"{len(outputs)} values"
            raise TypeError(
                f"{NAME}: the function returned {got}. Expected {_tensors(len(inputs))}, turned. Wrap it in a lambda that "
                "returns them."
            )
        for x, y in zip(given, outputs, strict=True):
            if y.shape != x.shape:
                raise ValueError(
                    f"{NAME}: the function returned {list(y.shape)} for {list(x.shape)}. Expected the shape of its input. "
                    f"Check layout={self.layout!r} and the number of heads."
                )
        return tuple((y.transpose(1, 2) if swap else y).cpu() for y in outputs)


def rotary_function(
    fn: Callable[..., Any],
    layout: Layout,
    positions: PositionsAs,
    head_dim: int,
    heads: int,
    kv_heads: int | None,
    device: torch.device | str,
    dtype: torch.dtype,
) -> RotaryFunction:
    """The function with what it takes, read off its signature.

    Raises:
        TypeError: not callable, or a signature that says neither. ValueError: sizes or settings that do not fit.
    """
    check_integers(NAME, 2, head_dim=head_dim)
    check_integers(NAME, 1, heads=heads)
    kv_heads = heads if kv_heads is None else kv_heads
    check_integers(NAME, 1, kv_heads=kv_heads)
    if layout not in ("batch heads seq dim", "batch seq heads dim"):
        raise ValueError(
            f"{NAME}: layout = {layout!r}. Expected 'batch heads seq dim' or 'batch seq heads dim'. Pass the axes of its queries."
        )
    if positions not in ("batch seq", "seq", "start"):
        raise ValueError(
            f"{NAME}: positions = {positions!r}. Expected 'batch seq', 'seq' or 'start'. Pass the form in which it takes positions."
        )
    return RotaryFunction(fn, _takes(fn), layout, positions, head_dim, heads, kv_heads, torch.device(device), dtype)


def _takes(fn: object) -> Takes:
    if not callable(fn):
        raise TypeError(
            f"{NAME}: fn is {type(fn).__name__}. Expected a function (q, k, positions) -> (q, k). Pass the function itself."
        )
    try:
        parameters = list(inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [i for i, p in enumerate(plain) if any(w.startswith(("pos", "start", "offset")) for w in p.name.split("_"))]
    count = named[0] + 1 if named else sum(p.default is p.empty for p in plain)
    more = [
        p.name
        for p in parameters
        if p not in plain[:count] and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    takes: dict[int, Takes] = {2: "x", 3: "q k", 4: "q k v"}
    if count not in takes or more:
        names = ", ".join(p.name for p in parameters) or "unknown parameters"
        raise TypeError(
            f"{NAME}: fn takes ({names}). Expected (x, positions), (q, k, positions) or (q, k, v, positions). Wrap it: "
            "lambda q, k, positions: rotate(q, k, *table(positions))."
        )
    return takes[count]


def _tensors(count: int) -> str:
    return {1: "one tensor", 2: "queries and keys", 3: "queries, keys and values"}[count]
