"""Mistakes in what a model does with padding, packing, caches and lengths: one small decoder, each with one of its parts wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tests.audit.bugs.bug import Bug
from torch import Tensor, nn

from posenc.audit import Report
from posenc.audit.behaviour.checking import check_behaviour

HEADS, WIDTH, HEAD = 2, 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Decoder(nn.Module):
    """A decoder with a learned table or rotary positions; the parts that people get wrong are methods of their own."""

    causal = True
    max_length = 64
    rotary = False

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens = nn.Embedding(48, WIDTH)
            self.positions = nn.Embedding(self.rows(), WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(WIDTH, 48)

    def rows(self) -> int:
        return self.max_length

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        cache: list[tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        return self.run(ids, self.where(ids, attention_mask, segment_ids, past(cache)), attention_mask, segment_ids, cache)

    def run(
        self,
        ids: Tensor,
        at: Tensor,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        cache: list[tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x = self.tokens(ids)
        if not self.rotary:
            x = x + self.code(at)
        kept = []
        for layer, block in enumerate(self.blocks):
            q, k, v = (self.split(part) for part in block.qkv(block.norm(x)).chunk(3, -1))
            if self.rotary:
                cos, sin = self.table(at, mask)
                q, k = turn(q, cos, sin), turn(k, cos, sin)
            if cache is not None:
                k, v = torch.cat([cache[layer][0], k], 2), torch.cat([cache[layer][1], v], 2)
            kept.append((k, v))
            scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD)
            scores = scores.masked_fill(~self.seen(q.shape[2], k.shape[2], mask, segments), torch.finfo(x.dtype).min)
            x = x + block.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + block.mlp(block.mlp_norm(x))
        return self.head(x), kept

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)

    def where(self, ids: Tensor, mask: Tensor | None, segments: Tensor | None, start: int) -> Tensor:
        if mask is not None:
            return (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
        at = torch.arange(start, start + ids.shape[1]).expand(ids.shape)
        if segments is None:
            return at
        first = segments != torch.cat([segments[:, :1] - 1, segments[:, :-1]], 1)
        return at - torch.where(first, at, 0).cummax(-1).values

    def code(self, at: Tensor) -> Tensor:
        return self.positions(at)

    def table(self, at: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        angle = at[:, None, :, None] * self.inv_freq(at)
        return angle.cos(), angle.sin()

    def inv_freq(self, at: Tensor) -> Tensor:
        return 100.0 ** -(torch.arange(0, HEAD, 2) / HEAD)

    def seen(self, queries: int, keys: int, mask: Tensor | None, segments: Tensor | None) -> Tensor:
        seen = torch.ones(queries, keys, dtype=torch.bool)
        seen = (seen.tril(keys - queries) if self.causal else seen)[None, None]
        if mask is not None:
            seen = seen & mask.bool()[:, None, None, :]
        if segments is not None:
            seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
        return seen


def past(cache: list[tuple[Tensor, Tensor]] | None) -> int:
    return 0 if cache is None else cache[0][0].shape[2]


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Rotary(Decoder):
    rotary = True


class Placed(Decoder):
    """Positions come from the caller."""

    def forward(self, ids, position_ids=None, attention_mask=None):
        at = torch.arange(ids.shape[1]).expand(ids.shape) if position_ids is None else position_ids
        return self.run(ids, at, attention_mask)[0]


class Encoder(Decoder):
    causal = False

    def forward(self, ids, attention_mask=None):
        return self.run(ids, self.where(ids, attention_mask, None, 0), attention_mask)[0]


class SharedPositions(Decoder):
    def where(self, ids, mask, segments, start):
        return super().where(ids, None, segments, start)


class PaddingInView(Encoder):
    def seen(self, queries, keys, mask, segments):
        return super().seen(queries, keys, None, segments)


class PackedWithoutReset(Decoder):
    def where(self, ids, mask, segments, start):
        return super().where(ids, mask, None, start)


class PackedWithoutBorders(Decoder):
    def seen(self, queries, keys, mask, segments):
        return super().seen(queries, keys, mask, None)


class OffsetLost(Rotary):
    def where(self, ids, mask, segments, start):
        return (
            super().where(ids, mask, segments, 0)[:, -ids.shape[1] :]
            if mask is None
            else super().where(ids, mask, segments, start)
        )


class OffsetOfSingleTokens(Rotary):
    """``if seq_len == 1: start = past``: chunks are forgotten."""

    def where(self, ids, mask, segments, start):
        return super().where(ids, mask, segments, start if ids.shape[1] == 1 or mask is not None else 0)


class TableByLength(Rotary):
    """Tables are kept by the number of tokens, not by where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[object, tuple[Tensor, Tensor]] = {}

    def table(self, at, mask):
        key = self.key(at)
        if key not in self.kept:
            self.kept[key] = super().table(at, mask)
        return self.kept[key]

    def key(self, at):
        return tuple(at.shape)


class TableByPositions(TableByLength):
    def key(self, at):
        return tuple(at.flatten().tolist()), tuple(at.shape)


class Dynamic(Rotary):
    """NTK by the length of the call, from 16 tokens on."""

    def forward(self, ids, attention_mask=None):
        return super().forward(ids, attention_mask)[0]

    def inv_freq(self, at):
        base = 100.0 * max(self.length(int(at.max()) + 1) / 16, 1.0) ** (HEAD / (HEAD - 2))
        return base ** -(torch.arange(0, HEAD, 2) / HEAD)

    def length(self, length):
        return length


class KeepsTheLongest(Dynamic):
    longest = 0

    def length(self, length):
        self.longest = max(self.longest, length)
        return self.longest


class ScaledByRow(Rotary):
    """Positions run from 0 to 1 over the row."""

    def forward(self, ids, attention_mask=None):
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        return self.run(ids, self.where(ids, mask, None, 0), mask)[0]

    def table(self, at, mask):
        angle = 10 * at[:, None, :, None] / self.lengths(mask)[:, None, None, None] * self.inv_freq(at)
        return angle.cos(), angle.sin()

    def lengths(self, mask):
        return mask.sum(-1)


class ScaledByLongest(ScaledByRow):
    def lengths(self, mask):
        return mask.sum(-1).max()[None]


class ScaledByWidth(ScaledByRow):
    def lengths(self, mask):
        return torch.tensor([mask.shape[-1]])


class AlongTheBatch(Encoder):
    """``pe[: x.shape[0]]``, made for ``[seq, batch]``."""

    def code(self, at):
        return self.positions.weight[: at.shape[0], None]


class Kept(Rotary):
    """Keys and values stay in the model, and the caller says where the new tokens start."""

    def __init__(self) -> None:
        super().__init__()
        self.cache_kv: list[tuple[Tensor, Tensor]] = []

    def forward(self, tokens, start_pos):
        kept = [(k[:, :, :start_pos], v[:, :, :start_pos]) for k, v in self.cache_kv] if start_pos else None
        scores, self.cache_kv = self.run(tokens, self.where(tokens, None, None, self.start(start_pos)), cache=kept)
        return scores

    def start(self, start_pos):
        return start_pos


class KeptFromZero(Kept):
    def start(self, start_pos):
        return 0


class BehindPadding(Decoder):
    """RoBERTa's rule: the first token has row ``padding + 1``."""

    max_length = 16

    def rows(self) -> int:
        return self.max_length + 2

    def code(self, at):
        return self.positions(at + 2)


class BehindPaddingTooShort(BehindPadding):
    def rows(self) -> int:
        return self.max_length


class Indexed(Placed):
    """Python's indexing takes -1 for the last row."""

    def code(self, at):
        return self.positions.weight[at]


class Clamped(Placed):
    def code(self, at):
        return self.positions(at.clamp(0, self.max_length - 1))


class Unread(Placed):
    def forward(self, ids, position_ids=None, attention_mask=None):
        return super().forward(ids, None, attention_mask)


class OneRowForAll(Encoder):
    """``pe[:, n]`` where ``pe[:, :n]`` is meant."""

    def code(self, at):
        return self.positions.weight[at.shape[-1]]


class TopLeft(Decoder):
    """``is_causal=True`` with fewer queries than keys."""

    def seen(self, queries, keys, mask, segments):
        return super().seen(queries, keys, mask, segments) & torch.ones(queries, keys, dtype=torch.bool).tril()


class CausalWhenSquare(Decoder):
    """The causal mask is made for prompts alone; a chunk behind cached tokens gets none."""

    def seen(self, queries, keys, mask, segments):
        seen = super().seen(queries, keys, mask, segments)
        return seen if queries == keys else torch.ones_like(seen)


class MaskNeverArrives(Decoder):
    def seen(self, queries, keys, mask, segments):
        return torch.ones_like(super().seen(queries, keys, mask, segments))


def bug(name: str, finding: str, source: str, broken: type[nn.Module], mended: type[nn.Module]) -> Bug:
    def check(model: type[nn.Module]) -> Callable[[], Report]:
        return lambda: check_behaviour(model())

    return Bug(name, finding, source, check(broken), check(mended))


BUGS = [
    bug("left padding: one vector of positions for all rows", "left-padding", "unslothai/unsloth#3699", SharedPositions, Decoder),
    bug("padding is attended to", "right-padding", "huggingface/transformers#45811", PaddingInView, Encoder),
    bug("packed without starting positions again", "packing", "OpenRLHF/OpenRLHF#377", PackedWithoutReset, Decoder),
    bug("packed documents see each other", "packing", "OpenRLHF/OpenRLHF#377", PackedWithoutBorders, Decoder),
    bug("decoding always at position 0", "decode-offset", "keras-team/keras-hub#1544", OffsetLost, Rotary),
    bug("start_pos not passed to the table", "decode-offset", "OpenNMT/CTranslate2#1572", KeptFromZero, Kept),
    bug("rotary tables kept without their offset", "decode-offset", "lucidrains/rotary-embedding-torch#11", TableByLength, TableByPositions),
    bug("chunks of a prompt start at 0", "chunked-prefill", "OpenNMT/CTranslate2#1572", OffsetOfSingleTokens, Rotary),
    bug("a longer call leaves its base behind", "call-order", "huggingface/transformers#25104", KeepsTheLongest, Dynamic),
    bug("positions scaled by the longest row", "batch-dependence", "huggingface/transformers#24653", ScaledByLongest, ScaledByRow),
    bug("codes added along the batch", "batch-dependence", "KasperGroesLudvigsen/influenza_transformer#9", AlongTheBatch, Encoder),
    bug("positions scaled by the padded width", "right-padding", "huggingface/transformers#24653", ScaledByWidth, ScaledByRow),
    bug("rows behind the padding index not counted", "past-the-end", "huggingface/transformers#11242", BehindPaddingTooShort, BehindPadding),
    bug("position -1 takes the last row", "past-the-end", "turboderp-org/exllamav2#606", Indexed, Placed),
    bug("positions past the table clamped", "past-the-end", "huggingface/transformers#1363", Clamped, Placed),
    bug("position_ids accepted and not read", "positions-ignored", "ndif-team/nnsight#673", Unread, Placed),
    bug("one row of the table for every token", "positions-ignored", "DiffPoseTalk/DiffPoseTalk#20", OneRowForAll, Encoder),
    bug("decoding sees the first key only", "causal-alignment", "pytorch/pytorch#103082", TopLeft, Decoder),
    bug("chunks behind cached tokens see their future", "causal-alignment", "Dao-AILab/flash-attention#282", CausalWhenSquare, Decoder),
    bug("attention without its mask", "future-leak", "huggingface/transformers#48745", MaskNeverArrives, Decoder),
]  # fmt: skip
