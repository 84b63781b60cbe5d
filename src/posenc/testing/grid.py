"""Every encoding under every mask on every backend: it agrees with the definition, or the backend says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.attn.cache import GrowingCache
from posenc.attn.positional import positional_attention
from posenc.attn.select import BACKENDS
from posenc.core.mask import CAUSAL, FULL, Mask, causal, visible, window
from posenc.core.sites import Encoding
from posenc.core.spec import ModelShape
from posenc.core.tokens import Tokens, contiguous, packed, padded
from posenc.errors import BackendRefused
from posenc.testing.subject import on_a_line

SHAPE = ModelShape(dim=32, heads=4, kv_heads=2, head_dim=8, layers=1, max_length=16, causal=True)
LENGTH, BATCH = 11, 2


class Scene(NamedTuple):
    """Tokens and a mask: what attention is asked.

    Args:
        cached: how many of the tokens come first, in a call of their own, and wait in a cache.
    """

    tokens: Tokens
    mask: Mask
    cached: int = 0


def _left_padded() -> Scene:
    seen = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    seen[0, :3] = 0
    tokens = padded(seen)
    return Scene(tokens, causal(tokens))


def _packed() -> Scene:
    tokens = packed(torch.tensor([0, 4, 5, LENGTH]), LENGTH)
    return Scene(tokens, causal(tokens))


def _shuffled() -> Scene:
    order = torch.arange(LENGTH).flip(0).roll(3)
    return Scene(Tokens(order, order), visible(order, order, window=6))


SCENES: dict[str, Callable[[], Scene]] = {
    "full": lambda: Scene(contiguous(LENGTH), FULL),
    "causal": lambda: Scene(contiguous(LENGTH), CAUSAL),
    "far out": lambda: Scene(contiguous(LENGTH, start=3000), CAUSAL),
    "sliding window": lambda: Scene(contiguous(LENGTH), CAUSAL & window(4)),
    "window both ways": lambda: Scene(contiguous(LENGTH), window(3, 2)),
    "left padding": _left_padded,
    "packed": _packed,
    "out of order": _shuffled,
    "a prompt in two pieces": lambda: Scene(contiguous(LENGTH), CAUSAL, 6),
    "one token with a cache": lambda: Scene(contiguous(LENGTH), CAUSAL, LENGTH - 1),
}
"""What is asked of every backend, by name."""

BACKEND_NAMES = tuple([backend.name for backend in BACKENDS])


@dataclass(frozen=True)
class Cell:
    """What one backend made of one encoding in one scene.

    Args:
        dtype: the widest that it took, or ``None`` when it refused all.
        refusal: why it refused, for the last dtype asked.
        error: the largest error in units of what is allowed; at most 1 agrees.
        backward: the same of the gradients of q, k, v and the encoding's parameters; ``None`` where it offers none.
    """

    encoding: str
    scene: str
    backend: str
    dtype: torch.dtype | None
    refusal: str | None
    error: float | None
    backward: float | None

    @property
    def agrees(self) -> bool:
        return self.refusal is not None or (
            self.error is not None and self.error <= 1 and (self.backward is None or self.backward <= 1)
        )


def backend_grid(
    encodings: dict[str, Callable[[ModelShape], Sequence[Encoding]]],
    *,
    backends: Sequence[str] = BACKEND_NAMES,
    scenes: Sequence[str] = tuple(SCENES),
) -> Iterator[Cell]:
    """Each (encoding, scene, backend), compared with the reference in float64, forward and backward.

    Args:
        encodings: by name, how to build them for a model, as in `EncodingSpec.build`.

    Example:
        >>> from posenc.testing.grid import backend_grid
        >>> cells = list(backend_grid({"alibi": ALiBi.spec.build}, scenes=["causal"], backends=["sdpa"]))
        >>> cells[0].agrees, cells[0].dtype
        (True, torch.float64)
    """
    for name, build in encodings.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = list(build(SHAPE))
            _stir(made)
        for scene_name in scenes:
            scene = SCENES[scene_name]()
            try:
                yardstick = _Yardstick(made, scene)
            except (ValueError, TypeError) as error:  # an encoding may be undefined there, and says so
                yield from (Cell(name, scene_name, backend, None, f"the encoding: {error}", None, None) for backend in backends)
                continue
            for backend in backends:
                yield _cell(name, scene_name, backend, made, scene, yardstick)


def _stir(encodings: Sequence[Encoding]) -> None:
    """Parameters that start at zero show nothing."""
    for parameter in (p for encoding in encodings for p in encoding.parameters()):
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=parameter.dtype))


_Result = Sequence[Tensor]
"""The output, then the gradients of q, k, v and the encodings' parameters."""


def _content(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = (SHAPE.heads, LENGTH, SHAPE.head_dim), *[(SHAPE.kv_heads, LENGTH, SHAPE.head_dim)] * 2, (LENGTH, SHAPE.dim)
    # values that bfloat16 holds, so that every dtype starts from the same numbers
    q, k, v, x = (torch.randn(BATCH, *size, generator=draw).bfloat16().to(dtype) for size in sizes)
    return q, k, v, x


def _run(encodings: Sequence[Encoding], scene: Scene, backend: str, dtype: torch.dtype) -> _Result:
    """The output of the scene's last call, and gradients of a fixed weighting of it.

    Raises:
        BackendRefused: also for the gradient alone.
    """
    made = [copy.deepcopy(encoding).to(torch.promote_types(dtype, torch.float32)) for encoding in encodings]
    q, k, v, x = _content(dtype)
    leaves: list[Tensor] = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    leaves += [p for encoding in made for p in encoding.parameters() if p.requires_grad]
    axes = next((encoding.axes for encoding in made if encoding.axes is not None), None)
    cache = GrowingCache() if scene.cached else None
    out: Tensor = q
    for part in (slice(0, scene.cached), slice(scene.cached, None)) if scene.cached else (slice(None),):
        out = positional_attention(
            *(t[..., part, :] for t in (q, k, v)),
            encodings=made,
            positions=_cut(scene.tokens, part, made, axes),
            cache=cache,
            x=x[:, part],
            mask=scene.mask,
            backend=backend,
        )
    weighting = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)
    grads = torch.autograd.grad(out, leaves, weighting, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True))]


def _cut(tokens: Tokens, part: slice, encodings: Sequence[Encoding], axes: int | None) -> Tokens:
    positions = tokens.positions[..., part]
    if axes is not None:
        positions = on_a_line(next(encoding for encoding in encodings if encoding.axes == axes), positions)
    order, segments = (None if t is None else t[..., part] for t in (tokens.order, tokens.segments))
    return Tokens(positions, order, segments, axes)


class _Yardstick:
    """The definition's result in float64, and how far a result in another precision may be from it.

    Eight times as far as torch's own dense attention and the definition stray in that precision, tensor by tensor, and
    eight units of the largest entry: another order of the same roundings is owed no more. A parameter's gradient sums what
    comes back from all keys, rounded key by key where they hold it, so it is owed the square root of their number more.
    """

    def __init__(self, encodings: Sequence[Encoding], scene: Scene) -> None:
        self._encodings, self._scene = encodings, scene
        self._truth = _run(encodings, scene, "reference", torch.float64)
        self._allowed: dict[torch.dtype, list[float]] = {}

    def allowed(self, dtype: torch.dtype) -> list[float]:
        if dtype not in self._allowed:
            strayed = [self._errors(_run(self._encodings, self._scene, backend, dtype)) for backend in ("reference", "sdpa")]
            unit = torch.finfo(dtype).eps / 2
            self._allowed[dtype] = [
                8 * (max(errors) + unit * float(truth.abs().max()) * (1 if index < 4 else sqrt(LENGTH)))
                for index, (*errors, truth) in enumerate(zip(*strayed, self._truth, strict=True))
            ]
        return self._allowed[dtype]

    def units(self, result: _Result, dtype: torch.dtype) -> list[float]:
        """The error of each tensor in units of what is allowed."""
        tiny = torch.finfo(torch.float64).tiny
        return [error / max(allowed, tiny) for error, allowed in zip(self._errors(result), self.allowed(dtype), strict=True)]

    def _errors(self, result: _Result) -> list[float]:
        pairs = zip(result, self._truth, strict=True)
        return [float((a - b).abs().nan_to_num(nan=torch.inf).max()) for a, b in pairs]


def _cell(encoding: str, scene_name: str, backend: str, made: Sequence[Encoding], scene: Scene, yardstick: _Yardstick) -> Cell:
    refusal = None
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        try:
            result = _run(made, scene, backend, dtype)
        except BackendRefused as error:
            refusal = error.refusals.get(backend, str(error))
            continue
        out, *grads = yardstick.units(result, dtype)
        return Cell(encoding, scene_name, backend, dtype, None, out, max(grads))
    return Cell(encoding, scene_name, backend, None, refusal, None, None)
