"""Biases of the key alone as extra channels of q and k, which ride in a fused causal call.

Under a causal mask of equal lengths ``-slope · (query - key)`` is ``slope · key`` and a term that its whole row shares,
which the softmax drops. ``slope · key`` is an inner product, so it may be part of q·k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.attn.request import Request
from posenc.core.bias import KeyBias, ScoreBias, SlopeBias, SumBias
from posenc.core.checks import check_values, readable
from posenc.errors import ShapeError

TILE = 8
"""Widths are multiples of this: bfloat16 at 64 + 8 channels takes 1.1 times as long as at 64, at 64 + 6 1.2 times."""
_PARTS = 3
"""bfloat16 numbers that hold a float32 between them."""
_PRODUCTS = ((2, 0), (1, 1), (1, 0), (0, 2), (0, 1), (0, 0))
"""Which parts of slope and position meet; the others are below 2⁻²⁴ of the whole. Small ones first, because the kernel
sums in float32."""
_MOST = 32
_FAR = {torch.bfloat16: 2**16, torch.float16: 2**13}
"""How large ``slope · position`` may be, and for slopes up to 1 how many tokens there may be: the kernel's float32 sums keep it to
2⁻²⁴ of it, no more than the roundings of these dtypes. In bfloat16 32,768 tokens are as exact as with a dense mask."""
_STEADY = 2.0**-10, 2.0**10
"""Scales; the bias is divided by them."""
_ROOM = 6
"""Powers of 2 that move from keys to queries, so that both and their lower parts are normal float16 numbers: slopes to 90 and
positions to 2²¹ apart, then less of the one for more of the other."""


def no_channels(request: Request) -> str | None:
    """Why the bias of a causal request cannot ride in channels, in one sentence, or ``None``. Reads static facts only."""
    assert request.bias is not None
    for term in _terms(request.bias):
        if isinstance(term, SlopeBias):
            if term.future is not None:
                return "slopes of their own for the future are no term of the key alone; signed ones have future=None"
        elif not isinstance(term, KeyBias):
            return f"{type(term).__name__} is no term of the key alone"
    if request.q.dtype not in _FAR:
        return f"{request.q.dtype} sums q·k and slope · position in the precision of the result; bfloat16 and float16 have room"
    if not _STEADY[0] <= abs(request.scale) <= _STEADY[1]:
        return f"scale = {request.scale:g} is too far from 1 to divide a {request.q.dtype} bias by"
    count = channels(request)
    if count > _MOST:
        return f"it takes {count} extra channels, and more than {_MOST} cost as much as a mask"
    if any(isinstance(term, SlopeBias) for term in _terms(request.bias)) and request.k_length > _FAR[request.q.dtype]:
        return f"float32 sums of slope · position are too coarse for {request.q.dtype} past {_FAR[request.q.dtype]} tokens"
    return None


def channels(request: Request) -> int:
    """How many channels the bias takes."""
    return 0 if request.bias is None else sum(_count(term, request) for term in _terms(request.bias))


def with_channels(request: Request) -> tuple[Tensor, Tensor]:
    """Queries and keys with the bias in extra channels, filled up to a tile. Gradients flow through both."""
    assert request.bias is not None
    queries, keys = [request.q], [request.k]
    for term in _terms(request.bias):
        for into, like, extra in zip((queries, keys), (request.q, request.k), _channels_of(term, request), strict=True):
            batch = torch.broadcast_shapes(extra.shape[:-3], (1,))
            if len(batch) > 1 or batch[0] not in (1, like.shape[0]):
                raise ShapeError(
                    f"attention: the bias has the batch {tuple(batch)}. Expected ({like.shape[0]},), that of q, or none. "
                    "Look at the batch axes of positions and biases."
                )
            into.append(extra.to(like.dtype).expand(*like.shape[:-1], extra.shape[-1]))
    spare = -sum(part.shape[-1] for part in queries) % TILE
    for into in (queries, keys):
        into.append(into[0].new_zeros(()).expand(*into[0].shape[:-1], spare))
    return torch.cat(queries, -1), torch.cat(keys, -1)


def too_far(request: Request) -> str | None:
    """Why slopes and positions are too large for float32 sums, or ``None``; where their values cannot be read it is not known."""
    assert request.bias is not None
    for term in _terms(request.bias):
        if isinstance(term, SlopeBias) and request.k_length:
            reach = _reach(term, request)
            if readable(reach) and not bool(reach <= _FAR[request.q.dtype]):
                return _too_far(term, request)
    return None


def _reach(term: SlopeBias, request: Request) -> Tensor:
    """The largest ``slope · position``, from the key in the middle."""
    assert request.k_positions is not None
    at = (request.k_positions - _middle(request.k_positions)).detach().abs().amax()
    return term.past.detach().abs().amax().to(at.device, torch.float32) * at.to(torch.float32)


def _too_far(term: SlopeBias, request: Request) -> str:
    dtype = request.q.dtype
    return (
        f"slope · position reaches {float(_reach(term, request)):g} from the middle of the sequence, and past {_FAR[dtype]} float32 "
        f"sums are too coarse for {dtype}"
    )


def _terms(bias: ScoreBias) -> tuple[ScoreBias, ...]:
    return tuple(inner for term in bias.terms for inner in _terms(term)) if isinstance(bias, SumBias) else (bias,)


def _count(term: ScoreBias, request: Request) -> int:
    if isinstance(term, KeyBias):
        return _PARTS * _share(term, request)
    return len(_PRODUCTS) + _learned(term)


def _share(term: ScoreBias, request: Request) -> int:
    """How many heads of a bias meet in one key head."""
    return 1 if term.heads == 1 else request.q.shape[1] // request.k.shape[1]


def _learned(term: ScoreBias) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in term.tensors())


def _channels_of(term: ScoreBias, request: Request) -> tuple[Tensor, Tensor]:
    """What a term adds to queries and keys: ``[*batch, heads, q, channels]`` and ``[*batch, kv_heads, k, channels]``, or 1
    where they are alike."""
    if isinstance(term, KeyBias):
        return _key_channels(term, request)
    assert isinstance(term, SlopeBias)
    return _slope_channels(term, request)


def _slope_channels(term: SlopeBias, request: Request) -> tuple[Tensor, Tensor]:
    assert request.positions is not None
    assert request.k_positions is not None
    device, dtype = request.q.device, request.q.dtype
    middle = _middle(request.k_positions)
    at = (request.k_positions - middle).to(torch.float32)[..., None, :]
    room = (at.detach().abs().amax() / 2.0**15).log2().ceil().clamp(min=_ROOM).exp2()
    slope = term.past.to(device, torch.float32)[:, None]
    check_values(
        _reach(term, request) <= _FAR[dtype],
        lambda: f"attention: {_too_far(term, request)}. Expected less of either. Name another backend: 'sdpa' forms distances.",
    )
    at, slope = at / room, slope * (room / request.scale)
    slopes, places = _split(slope, dtype), _split(at, dtype)
    q = [slopes[i] for i, _ in _PRODUCTS]
    k = [places[j] for _, j in _PRODUCTS]
    if _learned(term):
        # The row's own term moves no result, but its gradient cancels what the slope's would round away.
        row = slope * ((request.positions - middle).to(torch.float32)[..., None, :] / room)
        q, k = [part.expand_as(row) for part in q] + [row.detach() - row], [*k, torch.ones_like(at)]
    return torch.stack(q, -1), torch.stack(k, -1)


def _key_channels(term: KeyBias, request: Request) -> tuple[Tensor, Tensor]:
    """Every query head that shares a key head has channels of its own in it."""
    values = term.values.to(request.q.device)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    values = (values - _middle(values).nan_to_num(0.0, 0.0, 0.0)).to(torch.float32) / (2.0**_ROOM * request.scale)
    share = _share(term, request)
    values = values.unflatten(-2, (-1, share)).mT  # [*batch, kv_heads or 1, k, share]
    most = torch.finfo(request.q.dtype).max / 2  # in place of infinity, whose product with 0 is NaN
    k = torch.cat(_split(values.clamp(-most, most), request.q.dtype), -1)
    q = 2.0**_ROOM * torch.eye(share, dtype=torch.float32, device=values.device).repeat(values.shape[-3], _PARTS)
    return q[:, None], k


def _middle(x: Tensor) -> Tensor:
    """The entry in the middle: an origin near which numbers are small. What all keys share does not matter."""
    return x.detach().narrow(-1, x.shape[-1] // 2, 1)


def _split(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of ``dtype`` whose sum is a float32, as float32; the first carries the gradient."""
    parts = []
    for _ in range(_PARTS):
        part = x.to(dtype).to(x.dtype)
        parts.append(part)
        x = (x - part).detach()
    return parts
