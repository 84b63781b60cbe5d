"""Does attention notice that its tokens were shuffled?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from posenc.attn.positional import positional_attention
from posenc.core.checks import check_integers
from posenc.core.mask import FULL, Mask
from posenc.core.sites import Encoding, InputEncoding, PositionTransform
from posenc.errors import ShapeError


@final
@dataclass(frozen=True, eq=False)
class Shuffled:
    """The same tokens in two orders, and what attention made of them.

    Args:
        order: the token that stands at each place of the shuffled sequence; the last token stays last.
        weights: attention of the first head in the first layer, tokens as they come.
        shuffled_weights: of the shuffled tokens, rows and columns put back in the first order.
        outputs: the largest difference of any output, put back in order: 0 says that order does not matter.
        last: the same for the last token alone.

    Shape:
        order: ``[length]``; weights, shuffled_weights: ``[length, length]`` (query, key), float64.
    """

    order: Tensor
    weights: Tensor
    shuffled_weights: Tensor
    outputs: float
    last: float


def shuffle(
    encodings: Sequence[Encoding],
    *,
    length: int = 12,
    dim: int = 32,
    heads: int = 4,
    layers: int = 1,
    mask: Mask = FULL,
    generator: torch.Generator | None = None,
) -> Shuffled:
    """Run random attention layers on tokens and on the same tokens shuffled, and compare.

    The thing people get wrong: "attention ignores order". Without positions and without a mask it is *equivariant*: outputs
    move along with their tokens, ``f(πx) = πf(x)``, and only a pooled output is invariant. Any encoding breaks that; so
    does a causal mask, which is why decoders do without encodings. In a single causal layer the *last* output still
    cannot tell how the tokens before it are ordered; in two it can.

    Args:
        encodings: of one axis, for this width and these heads; none at all, or ``[NoPE()]``, for attention alone.
        length: tokens, 3 or more; all but the last are shuffled.
        dim: of the tokens, a multiple of heads; heads: 1 or more; layers: 1 or more, each ``x + attention(x)``.
        mask: `FULL` or `CAUSAL`.
        generator: on the CPU, for tokens, weights and order; one with seed 0 when ``None``.

    Raises:
        TypeError, ValueError: sizes that are not integers, or out of range. ShapeError: heads that do not divide dim.

    Example:
        >>> shuffle([]).outputs < 1e-12, shuffle([RoPE(8)]).outputs > 1e-3
        (True, True)
        >>> shuffle([], mask=CAUSAL).last < 1e-12, shuffle([], mask=CAUSAL, layers=2).last > 1e-3
        (True, True)

    References:
        Haviv et al. 2022, "Transformer Language Models without Positional Encodings Still Learn Positional Information",
        arXiv:2203.16634.
    """
    check_integers("shuffle", 3, length=length)
    check_integers("shuffle", 1, dim=dim, heads=heads, layers=layers)
    if dim % heads:
        raise ShapeError(f"shuffle: dim = {dim} for {heads} heads. Expected a multiple of heads. Pass dim={dim - dim % heads}.")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    x = torch.randn(1, length, dim, generator=generator, dtype=torch.float64)
    weights = torch.randn(layers, 3, dim, dim, generator=generator, dtype=torch.float64) / dim**0.5
    order = torch.cat([torch.randperm(length - 1, generator=generator), torch.tensor([length - 1])])
    with torch.no_grad():
        plain, seen = _run(x, weights, encodings, heads, mask)
        moved, seen_moved = _run(x[:, order], weights, encodings, heads, mask)
    back = order.argsort()
    gaps = (moved[:, back] - plain).abs().amax(dim=(0, 2))
    return Shuffled(order, seen, seen_moved[back][:, back], gaps.max().item(), gaps[-1].item())


def _run(x: Tensor, weights: Tensor, encodings: Sequence[Encoding], heads: int, mask: Mask) -> tuple[Tensor, Tensor]:
    """The output of the layers, and the first head's weights in the first of them."""
    length = x.shape[1]
    for encoding in encodings:
        if isinstance(encoding, InputEncoding):
            x = encoding(x, 0)
    inside = [encoding for encoding in encodings if not isinstance(encoding, (InputEncoding, PositionTransform))]
    seen = None
    one_hot = torch.eye(length, dtype=x.dtype).expand(1, heads, length, length)  # as values, it returns the weights
    for layer in weights:
        q, k, v = ((x @ matrix).unflatten(-1, (heads, -1)).transpose(1, 2) for matrix in layer)
        if seen is None:
            seen = positional_attention(q, k, one_hot, encodings=inside, positions=0, mask=mask)[0, 0]
        out = positional_attention(q, k, v, encodings=inside, positions=0, mask=mask)
        x = x + out.transpose(1, 2).flatten(2)
    assert seen is not None
    return x, seen
