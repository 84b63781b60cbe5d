"""Mistakes in functions that turn queries and keys, and in those that reorder their projections."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from math import log
from typing import Any

import torch
from tests.audit.bugs.bug import Bug
from torch import Tensor

from posenc.audit.rotary.checking import check_rotary
from posenc.audit.rotary.reordering import check_reordering
from posenc.hf.rotation import Rotation
from posenc.schedules.geometric import Geometric
from posenc.schedules.yarn import YaRN

HEAD = 32
Turn = Callable[..., Any]


def ladder(width: int = HEAD, base: float = 1e4) -> Tensor:
    return base ** -(torch.arange(0, width, 2).float() / width)


def angles(positions: Tensor, width: int = HEAD, base: float = 1e4) -> Tensor:
    """``[batch, 1, seq, pairs]``: beside the heads of ``[batch, heads, seq, head_dim]``."""
    return (positions[..., None].float() * ladder(width, base))[:, None]


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def halves(x: Tensor, angle: Tensor) -> Tensor:
    angle = torch.cat((angle, angle), dim=-1)
    return x * angle.cos().to(x.dtype) + rotate_half(x) * angle.sin().to(x.dtype)


def neighbours(x: Tensor, angle: Tensor) -> Tensor:
    angle = angle.repeat_interleave(2, dim=-1)
    return x * angle.cos().to(x.dtype) + rotate_neighbours(x) * angle.sin().to(x.dtype)


def good(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return halves(q, angles(positions)), halves(k, angles(positions))


BUGS: list[Bug] = []


def bug(name: str, finding: str, source: str, broken: Turn, mended: Turn = good, **settings: Any) -> None:
    def check(fn: Turn) -> Callable[[], Any]:
        return lambda: check_rotary(fn, **{"head_dim": HEAD, **settings})

    BUGS.append(Bug(name, finding, source, check(broken), check(mended)))


# Pairs


def other_pairing(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return neighbours(q, angles(positions)), neighbours(k, angles(positions))


bug("weights of one pairing, rotated with the other", "rotary-pairing", "jzhang38/TinyLlama#24", other_pairing, pairing="half")


def complex_pairs(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        angle = angles(positions)
        spin = torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * spin).flatten(-2).to(x.dtype)

    return turn(q), turn(k)


def complex_halves(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        angle = angles(positions)
        spin = torch.polar(torch.ones_like(angle), angle)
        planes = x.float().unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()
        return torch.view_as_real(torch.view_as_complex(planes) * spin).transpose(-1, -2).flatten(-2).to(x.dtype)

    return turn(q), turn(k)


bug(
    "complex numbers of neighbours for weights in halves",
    "rotary-pairing",
    "tatsu-lab/stanford_alpaca#227",
    complex_pairs,
    complex_halves,
    expect=Rotation(Geometric(), HEAD, HEAD, pairing="half"),
)


def mixed_layout(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = angles(positions)
    angle = torch.cat((angle, angle), dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return tuple(x * cos.to(x.dtype) + rotate_neighbours(x) * sin.to(x.dtype) for x in (q, k))  # type: ignore[return-value]


bug("a table in halves with the arithmetic of neighbours", "rotary-layout", "nurl-lang/nurl#584", mixed_layout, other_pairing)


def cut_table(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    wide = angles(positions).repeat_interleave(2, dim=-1)[..., : HEAD // 2]
    return halves(q, wide), halves(k, wide)


bug("a full-width table cut to half width", "rotary-layout", "docs/findings/rotary-layout.md", cut_table)


def every_second(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = angles(positions)
    wide = torch.cat((angle, angle), dim=-1)[..., ::2]
    return halves(q, wide), halves(k, wide)


bug("every second column of a table in halves", "rotary-layout", "docs/findings/rotary-layout.md", every_second)


def keys_by_neighbours(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return halves(q, angles(positions)), neighbours(k, angles(positions))


bug("queries in halves, keys by neighbours", "rotary-layout", "docs/findings/rotary-layout.md", keys_by_neighbours)


# Channels


def half_of(x: Tensor, angle: Tensor) -> Tensor:
    width = 2 * angle.shape[-1]
    return torch.cat((halves(x[..., :width], angle), x[..., width:]), dim=-1)


def partial(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = angles(positions, HEAD // 2)
    return half_of(q, angle), half_of(k, angle)


def trailing(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle, width = angles(positions, HEAD // 2), HEAD // 2
    return tuple(torch.cat((x[..., :-width], halves(x[..., -width:], angle)), dim=-1) for x in (q, k))  # type: ignore[return-value]


HALF = Rotation(Geometric(), HEAD, HEAD // 2)
bug("partial rotary ignored", "rotary-span", "ml-explore/mlx-lm#1698", good, partial, expect=HALF)
bug("a kernel that turns the whole head", "rotary-span", "linkedin/Liger-Kernel#1451", good, partial, expect=HALF, kv_heads=2)
bug(
    "the trailing channels turn instead of the leading",
    "rotary-span",
    "huggingface/transformers#48652",
    trailing,
    partial,
    expect=HALF,
)


def scales_the_rest(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    gain = 0.1 * log(4) + 1
    turned = partial(q, k, positions)
    return tuple(x * gain for x in turned)  # type: ignore[return-value]


def scales_the_turned(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    gain, width = 0.1 * log(4) + 1, HEAD // 2
    turned = partial(q, k, positions)
    return tuple(torch.cat((x[..., :width] * gain, x[..., width:]), dim=-1) for x in turned)  # type: ignore[return-value]


bug(
    "the amplitude on channels that do not turn",
    "rotary-untouched",
    "docs/findings/rotary-untouched.md",
    scales_the_rest,
    scales_the_turned,
)


# Sense and sides


def backwards(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return halves(q, -angles(positions)), halves(k, -angles(positions))


bug(
    "the wrong sign in rotate_half",
    "rotary-sign",
    "karpathy/nanochat, which turns the other way",
    backwards,
    expect=Geometric(),
)


def no_minus(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.cat((angles(positions), angles(positions)), dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return tuple(x * cos.to(x.dtype) + torch.cat(x.chunk(2, -1)[::-1], -1) * sin.to(x.dtype) for x in (q, k))  # type: ignore[return-value]


bug("rotate_half without its minus", "rotary-sign", "docs/findings/rotary-sign.md", no_minus)


def opposite(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return halves(q, angles(positions)), halves(k, -angles(positions))


bug("keys turn against queries", "rotary-opposite", "docs/findings/rotary-opposite.md", opposite)


def queries_only(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return halves(q, angles(positions)), k


bug("only queries turn", "rotary-one-sided", "docs/findings/rotary-one-sided.md", queries_only)


def all_three(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    angle = angles(positions)
    return halves(q, angle), halves(k, angle), halves(v, angle)


def two_of_three(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (*good(q, k, positions), v)


bug("values turn as well", "rotary-values", "docs/findings/rotary-values.md", all_three, two_of_three, kv_heads=2)


def twice(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return good(*good(q, k, positions), positions)


bug("rotated in the model and again in attention", "rotary-twice", "lablup/mlxcel#1324", twice, expect=Geometric())


GAIN = 0.1 * log(8) + 1
STRETCHED = YaRN(Geometric(), 8.0, 4096)


def yarn(gains: tuple[float, float]) -> Turn:
    def turn(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = STRETCHED.frequencies(HEAD, dtype=torch.float32).inv_freq
        angle = (positions[..., None].float() * inv_freq)[:, None]
        return halves(q, angle) * gains[0], halves(k, angle) * gains[1]

    return turn


bug(
    "the amplitude on queries only",
    "rotary-amplitude",
    "docs/findings/rotary-amplitude.md",
    yarn((GAIN, 1.0)),
    yarn((GAIN, GAIN)),
    expect=STRETCHED,
)
bug(
    "the amplitude squared",
    "amplitude",
    "docs/findings/amplitude.md",
    yarn((GAIN**2, GAIN**2)),
    yarn((GAIN, GAIN)),
    expect=STRETCHED,
)
bug(
    "the amplitude forgotten on one path",
    "amplitude-missing",
    "GaijinEntertainment/daScript#3479",
    yarn((1.0, 1.0)),
    yarn((GAIN, GAIN)),
    expect=STRETCHED,
)


def offset_keys(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return halves(q, angles(positions + 1)), halves(k, angles(positions))


bug("queries one position ahead of keys", "rotary-offset", "docs/findings/rotary-offset.md", offset_keys)


def sine_only_scaled(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.cat((angles(positions), angles(positions)), dim=-1)
    return tuple(x * (GAIN * angle.cos()).to(x.dtype) + rotate_half(x) * angle.sin().to(x.dtype) for x in (q, k))  # type: ignore[return-value]


bug("the amplitude on the cosine only", "rotary-norm", "docs/findings/rotary-norm.md", sine_only_scaled, yarn((GAIN, GAIN)))


# Axes


def along_heads(q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:  # [batch, seq, heads, dim], taken for [batch, heads, seq, dim]
        at = torch.arange(start, start + x.shape[-2])
        return halves(x, angles(at[None]))

    return turn(q), turn(k)


def along_sequence(q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        at = torch.arange(start, start + x.shape[1])
        return halves(x, angles(at[None]).transpose(1, 2))

    return turn(q), turn(k)


bug(
    "the head axis turns",
    "rotary-axis",
    "docs/findings/rotary-axis.md",
    along_heads,
    along_sequence,
    layout="batch seq heads dim",
    positions="start",
)


def along_batch(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = angles(positions).transpose(0, 2)  # [seq, 1, batch, pairs]: for modules that take the sequence first
    return halves(q, angle[:, :, :1]), halves(k, angle[:, :, :1])


bug("a sequence-first table on batch-first queries", "rotary-axis", "KasperGroesLudvigsen/influenza_transformer#9", along_batch)


def unsqueezed_wrong(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = angles(positions).transpose(1, 2)  # unsqueeze(2) where unsqueeze(1) belongs
    return halves(q, angle), halves(k, angle)


bug("the table unsqueezed at the wrong axis", "rotary-axis", "docs/findings/rotary-axis.md", unsqueezed_wrong)


def viewed(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        flipped = x.reshape(x.shape[0], x.shape[2], x.shape[1], -1)  # meant to exchange heads and sequence
        return halves(flipped, angles(positions).transpose(1, 2)).reshape(x.shape)

    return turn(q), turn(k)


def transposed(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(halves(x.transpose(1, 2), angles(positions).transpose(1, 2)).transpose(1, 2) for x in (q, k))  # type: ignore[return-value]


bug("view where transpose belongs", "rotary-axis", "docs/findings/rotary-axis.md", viewed, transposed)


# Precision


def rounded_positions(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return good(q, k, positions.to(torch.bfloat16))


bug("positions in bfloat16", "rotary-position-rounding", "huggingface/candle#3520", rounded_positions)


def positions_like_queries(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return good(q, k, positions.to(q.dtype))


bug("positions in the dtype of the queries", "rotary-position-rounding", "huggingface/candle#3520", positions_like_queries)


def rounded_ladder(half: torch.dtype) -> Turn:
    def turn(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = (positions[..., None].float() * ladder().to(half).float())[:, None]
        return halves(q, angle), halves(k, angle)

    return turn


bug("frequencies in bfloat16", "rotary-precision", "huggingface/transformers#29496", rounded_ladder(torch.bfloat16))
bug(
    "frequencies cast with the module",
    "frequency-rounded",
    "InternLM/InternLM#237",
    rounded_ladder(torch.bfloat16),
    expect=Geometric(),
)
bug("frequencies in float16", "rotary-precision", "NVIDIA/Megatron-LM#744", rounded_ladder(torch.float16))


def half_angles(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = (positions[..., None].half() * ladder().half())[:, None].float()
    return halves(q, angle), halves(k, angle)


bug("angles of a table in float16", "rotary-precision", "EleutherAI/gpt-neox#1003", half_angles, positions_up_to=2048)


def ladder_like_queries(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = (positions[..., None].float() * ladder().to(q.dtype).float())[:, None]
    return halves(q, angle), halves(k, angle)


bug("frequencies in the dtype of the queries", "rotary-precision", "sgl-project/sglang-jax#1472", ladder_like_queries)


def by_matmul(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = (positions[..., None].float() @ ladder()[None])[:, None].float()
    return halves(q, angle), halves(k, angle)


def by_product(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = (positions[..., None].float() * ladder()[None])[:, None].float()
    return halves(q, angle), halves(k, angle)


bug("angles by a matrix product under autocast", "rotary-precision", "huggingface/transformers#25681", by_matmul, by_product)


def rounded_table(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.cat((angles(positions), angles(positions)), dim=-1)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    return tuple(x * cos.to(x.dtype) + rotate_half(x) * sin.to(x.dtype) for x in (q, k))  # type: ignore[return-value]


bug("cosines kept in bfloat16", "rotary-table-precision", "okoge-kaz/llm-recipes#6", rounded_table)


def cast_to_positions(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(x.to(positions.dtype) for x in good(q, k, positions))  # type: ignore[return-value]


bug("the result cast to the dtype of the positions", "rotary-dtype", "huggingface/transformers#47674", cast_to_positions)


# Positions


def from_zero(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return good(q, k, torch.arange(positions.shape[1]).expand_as(positions))


bug(
    "decoded tokens turned as if at position 0",
    "rotary-positions-ignored",
    "keras-team/keras-hub#1544; OpenNMT/CTranslate2#1572",
    from_zero,
)


def first_row(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return good(q, k, positions[:1])


bug("one set of positions for a left-padded batch", "rotary-rows", "unslothai/unsloth#3699; ndif-team/nnsight#673", first_row)


def from_start(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return good(q, k, positions[:, :1] + torch.arange(positions.shape[1]))


bug("consecutive positions from the first", "rotary-rows", "OpenRLHF/OpenRLHF#377", from_start)


class Cached:
    """A table per key, kept between calls."""

    def __init__(self, key: Callable[[Tensor], Any]) -> None:
        self._key, self._tables = key, {}  # type: ignore[var-annotated]

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        key = self._key(positions)
        if key not in self._tables:
            self._tables[key] = angles(positions)
        return halves(q, self._tables[key]), halves(k, self._tables[key])


BUGS.append(
    Bug(
        "a cache keyed by the length alone",
        "rotary-call-order",
        "lucidrains/rotary-embedding-torch#11",
        lambda: check_rotary(Cached(lambda positions: positions.shape), head_dim=HEAD),
        lambda: check_rotary(Cached(lambda positions: tuple(positions.flatten().tolist())), head_dim=HEAD),
    )
)


class Growing:
    """A table as long as the longest call, in the dtype of the call that made it."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype, self.cos, self.sin = dtype, torch.empty(0), torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        length = int(positions.max()) + 1
        if length > len(self.cos) or (q.dtype == torch.bfloat16 and self.dtype is None):
            angle = torch.arange(length)[:, None].float() * ladder()
            wide = torch.cat((angle, angle), dim=-1)
            self.cos, self.sin = wide.cos().to(self.dtype or q.dtype), wide.sin().to(self.dtype or q.dtype)
        cos, sin = self.cos[positions][:, None].to(q.dtype), self.sin[positions][:, None].to(q.dtype)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


BUGS.append(
    Bug(
        "a cache that keeps the dtype of an earlier call",
        "rotary-call-order",
        "docs/findings/rotary-call-order.md",
        lambda: check_rotary(Growing(None), head_dim=HEAD, positions_up_to=1024),
        lambda: check_rotary(Growing(torch.float32), head_dim=HEAD, positions_up_to=1024),
    )
)


@cache
def shared_table(width: int, length: int) -> Tensor:
    return torch.arange(length)[:, None].float() * ladder(width, BASE[0])


@lru_cache
def keyed_table(width: int, length: int, base: float) -> Tensor:
    return torch.arange(length)[:, None].float() * ladder(width, base)


BASE = [1e4]


def of_base(base: float, *, keyed: bool) -> Turn:
    def turn(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        BASE[0] = base
        table = keyed_table(HEAD, 1024, base) if keyed else shared_table(HEAD, 1024)
        angle = table[positions][:, None]
        return halves(q, angle), halves(k, angle)

    return turn


def second_of_two(*, keyed: bool) -> Any:
    x = torch.ones(1, 4, 3, HEAD)
    of_base(1e4, keyed=keyed)(x, x, torch.arange(3)[None])  # a local layer comes first
    return check_rotary(of_base(1e6, keyed=keyed), head_dim=HEAD, positions_up_to=1024, expect=Geometric(1e6))


BUGS.append(
    Bug(
        "a cache keyed without the base",
        "frequency-base",
        "docs/findings/frequency-base.md",
        lambda: second_of_two(keyed=False),
        lambda: second_of_two(keyed=True),
    )
)


def by_length(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    length = max(int(positions.max()) + 1, 2048)
    base = 1e4 * (2 * length / 2048 - 1) ** (HEAD / (HEAD - 2))
    return halves(q, angles(positions, base=base)), halves(k, angles(positions, base=base))


def at_one_length(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    base = 1e4 * (2 * 8192 / 2048 - 1) ** (HEAD / (HEAD - 2))
    return halves(q, angles(positions, base=base)), halves(k, angles(positions, base=base))


bug("a base that grows under cached keys", "rotary-length", "huggingface/transformers#25104", by_length, at_one_length)
bug(
    "a base that follows the longest row of the batch",
    "rotary-batch",
    "huggingface/transformers#24653",
    by_length,
    at_one_length,
)


def clamped(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return good(q, k, positions.clamp(max=2047))


bug("positions clamped to the table", "rotary-not-relative", "docs/findings/rotary-not-relative.md", clamped)


def other_keys(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return halves(q, angles(positions, base=3.05e4)), halves(k, angles(positions))


bug("keys of another base than queries", "rotary-not-relative", "huggingface/transformers#25104", other_keys)


class OwnBackward(torch.autograd.Function):
    """A fused kernel with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angle: Tensor, sense: float) -> Tensor:
        ctx.save_for_backward(angle)
        ctx.sense = sense
        return halves(x, angle)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (angle,) = ctx.saved_tensors
        return halves(gradients[0], ctx.sense * angle), None, None


def fused(sense: float) -> Turn:
    def turn(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return OwnBackward.apply(q, angles(positions), sense), OwnBackward.apply(k, angles(positions), sense)

    return turn


bug("a kernel whose backward turns forward", "rotary-gradient", "docs/findings/rotary-gradient.md", fused(1.0), fused(-1.0))


# Projections


def reorder(weight: Tensor, heads: int) -> Tensor:
    """Neighbours to halves, as conversion scripts write it."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def back(weight: Tensor, heads: int) -> Tensor:
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def reordering(name: str, finding: str, source: str, broken: Turn, mended: Turn, **settings: Any) -> None:
    def check(fn: Turn) -> Callable[[], Any]:
        return lambda: check_reordering(fn, **{"heads": 4, "kv_heads": 2, "head_dim": 8, **settings})

    BUGS.append(Bug(name, finding, source, check(broken), check(mended)))


def both(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return reorder(q, 4), reorder(k, 2)


reordering(
    "keys reordered with the number of query heads",
    "reordering-heads",
    "huggingface/transformers#31766",
    lambda q, k: (reorder(q, 4), reorder(k, 4)),
    both,
)
reordering(
    "projections reordered the other way round",
    "reordering-direction",
    "huggingface/transformers#31788",
    lambda q, k: (back(q, 4), back(k, 2)),
    both,
)
reordering(
    "keys left in the old order",
    "reordering-direction",
    "huggingface/nanotron#427",
    lambda q, k: (reorder(q, 4), k),
    both,
)


def whole_head(weight: Tensor, heads: int) -> Tensor:
    return reorder(weight, heads)


def slice_of_head(weight: Tensor, heads: int) -> Tensor:
    split = weight.unflatten(0, (heads, -1))
    turned = split[:, :4].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, split[:, 4:]), dim=1).flatten(0, 1)


reordering(
    "channels that do not turn reordered too",
    "reordering-span",
    "huggingface/transformers#48652",
    lambda q, k: (whole_head(q, 4), whole_head(k, 2)),
    lambda q, k: (slice_of_head(q, 4), slice_of_head(k, 2)),
    rotary_dim=4,
)
