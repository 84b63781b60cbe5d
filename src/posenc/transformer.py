"""A small, readable Transformer that takes any encoding by value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import sqrt
from operator import add
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from posenc.attn.cache import Cache, GrowingCache, StaticCache
from posenc.attn.positional import positional_attention
from posenc.attn.prepared import Prepared, check_axes, check_list, check_site, prepare
from posenc.attn.request import attention_input, make_request
from posenc.attn.select import select
from posenc.core.bias import ScoreBias
from posenc.core.checks import check_values
from posenc.core.mask import FULL, Mask, Window, causal, same_segment
from posenc.core.sites import ContentScoreEncoding, Encoding, InputEncoding, PositionTransform, QKEncoding, ScoreEncoding
from posenc.core.tokens import Positions, Tokens, check_tokens, contiguous, decode, padded, resolve_positions
from posenc.errors import ShapeError

Encodings = Sequence[Encoding] | Callable[[int], Sequence[Encoding]]
Windows = int | None | Callable[[int], int | None]


class Block(nn.Module):
    """Pre-norm attention and a GELU network, each around a residual."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, mlp_ratio: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)
        hidden = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        encodings: Sequence[Encoding],
        prepared: Prepared,
        mask: Mask,
        cache: Cache | None,
        dropout_p: float,
        backend: str,
    ) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (self._heads(projection(normed)) for projection in (self.q, self.k, self.v))
        attended = positional_attention(
            q, k, v, encodings=encodings, positions=tokens, prepared=prepared, cache=cache, x=normed, mask=mask,
            dropout_p=dropout_p, backend=backend,
        )  # fmt: skip
        x = x + self.out(attended.transpose(-3, -2).flatten(-2))
        return torch.add(x, self.mlp(self.mlp_norm(x)))

    def _heads(self, projected: Tensor) -> Tensor:
        heads = projected.shape[-1] // self.head_dim  # not -1, which an empty sequence leaves open
        return projected.reshape(*projected.shape[:-1], heads, self.head_dim).transpose(-3, -2)

    if TYPE_CHECKING:
        __call__ = forward


class Transformer(nn.Module):
    """A pre-norm Transformer, encoder or decoder, with any positional encodings.

    Tables and biases are prepared once per forward and shared by all layers. Token embeddings are multiplied by √dim,
    as in the original paper, and tied with the output.

    Args:
        vocabulary: the number of token ids.
        encodings: a list, each instance shared by all layers; or a function ``layer -> list`` for parameters of their
            own, layers without positions, bases per layer. Input encodings and position transforms act once, before
            the first layer, so a function gives them for layer 0 only.
        kind: ``"decoder"`` (causal) or ``"encoder"``.
        window: a sliding window in tokens, the same for all layers or a function ``layer -> window or None``.
        dropout: of the attention weights, in training.
        backend: of attention.

    Shape:
        ids: ``[batch, seq]`` integers; the result: ``[batch, seq, vocabulary]``.

    Example:
        >>> model = Transformer(100, dim=32, layers=2, heads=4, encodings=[RoPE(8)])
        >>> model(torch.zeros(1, 5, dtype=torch.int64), 0).shape
        torch.Size([1, 5, 100])

    References:
        Vaswani et al. 2017, arXiv:1706.03762; pre-norm as in Xiong et al. 2020, arXiv:2002.04745.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        dim: int,
        layers: int,
        heads: int,
        encodings: Encodings,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        kind: Literal["decoder", "encoder"] = "decoder",
        window: Windows = None,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if min(vocabulary, dim, layers, heads, kv_heads) < 1 or heads % kv_heads or (head_dim is None and dim % heads):
            raise ValueError(
                f"Transformer: vocabulary = {vocabulary}, dim = {dim}, layers = {layers}, heads = {heads}, kv_heads = {kv_heads}, "
                f"head_dim = {head_dim}. Expected 1 or more each, dim a multiple of heads (or an explicit head_dim) and heads a "
                "multiple of kv_heads. Look at the model's shape."
            )
        if kind not in ("decoder", "encoder"):
            raise ValueError(f"Transformer: kind = {kind!r}. Expected 'decoder' or 'encoder'. Name one.")
        self.dim, self.kind, self.dropout, self.backend = dim, kind, dropout, backend
        self.heads, self.kv_heads = heads, kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.windows = [window(layer) if callable(window) else window for layer in range(layers)]
        if any(size is not None and size < 1 for size in self.windows):
            raise ValueError(
                f"Transformer: windows = {self.windows}. Expected 1 or more tokens, the token itself included, or None. Use "
                "None for a layer without a window."
            )
        shared = isinstance(encodings, Encoding) or not callable(encodings)  # an encoding is callable, but a mistake here
        per_layer = [
            list(check_list(encodings if shared else encodings(layer), "Transformer"))  # type: ignore[arg-type, operator]
            for layer in range(layers)
        ]
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, self.head_dim, mlp_ratio) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self._place_encodings(per_layer, shared=shared)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)

    def _place_encodings(self, per_layer: list[list[Encoding]], *, shared: bool) -> None:
        """Register each instance once and note, by index, which layer uses which."""
        for encoding in (encoding for layer in per_layer for encoding in layer):
            if not isinstance(encoding, (InputEncoding, PositionTransform)):
                check_site(encoding, "Transformer")
        distinct = {id(encoding): encoding for layer in per_layer for encoding in layer}
        self.encodings = nn.ModuleList(distinct.values())
        index_of = {key: index for index, key in enumerate(distinct)}
        self._before: list[int] = []
        self._inside: list[list[int]] = []
        for layer, encodings in enumerate(per_layer):
            inside = []
            for encoding in encodings:
                if isinstance(encoding, (InputEncoding, PositionTransform)):
                    if layer == 0:
                        self._before.append(index_of[id(encoding)])
                    elif not shared:
                        raise ValueError(
                            f"Transformer: {type(encoding).__name__} in layer {layer} acts on {encoding.acts_on}. Expected it in "
                            "layer 0 only, since it acts once, before the layers. Return it for layer 0."
                        )
                else:
                    inside.append(index_of[id(encoding)])
            self._inside.append(inside)

    def forward(
        self,
        ids: Tensor,
        tokens: Tokens | Positions,
        *,
        cache: Sequence[Cache] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: where the ids are: `Tokens` (padded, packed, decode, …), a tensor of positions, or an int for
                contiguous ids from this start (0 for a whole sequence).
            cache: one per layer, from `new_cache`; the ids are appended to it.
            generator: for position transforms in training.
        """
        if ids.ndim != 2 or ids.is_floating_point():
            raise ShapeError(
                f"Transformer: ids are {ids.dtype} of shape {tuple(ids.shape)}. Expected integers [batch, seq]. Add a batch axis."
            )
        check_values(
            (ids >= 0) & (ids < self.embed.num_embeddings),
            lambda: (
                f"Transformer: ids from {ids.min().item()} to {ids.max().item()}. Expected 0 to {self.embed.num_embeddings - 1}, the "
                "vocabulary. Look at the tokenizer."
            ),
        )
        tokens = self._tokens(ids, tokens)
        check_tokens(tokens, ids.shape[0], ids.shape[1], name="Transformer")
        if cache is not None:
            self._check_cache(cache)
        x = self.embed(ids) * sqrt(self.dim)
        for index in self._before:
            encoding = self._encoding(index)
            if isinstance(encoding, PositionTransform):
                tokens = tokens._replace(positions=encoding(tokens.positions, generator))
        for index in self._before:
            encoding = self._encoding(index)
            if isinstance(encoding, InputEncoding):
                x = _encoded(encoding, x, tokens.positions)
        placed, keys = (tokens, tokens) if cache is None else cache[0].place(tokens)
        prepared = self._prepare(x, tokens)
        masks = {window: self._mask(placed, keys, window) for window in set(self.windows)}
        dropout_p = self.dropout if self.training else 0.0
        written: Prepared | None = None
        for layer, block in enumerate(self.blocks):
            encodings = [self._encoding(index) for index in self._inside[layer]]
            layer_cache, mask, of_layer = None if cache is None else cache[layer], masks[self.windows[layer]], prepared
            if self._writes_biases(encodings, layer, x, tokens, keys, prepared, mask, dropout_p):
                if written is None:
                    written = prepared.materialized(tokens.positions, keys.positions, dtype=_table_dtype(x))
                of_layer = written
            x = block(x, tokens, encodings, of_layer, mask, layer_cache, dropout_p, self.backend)
        return nn.functional.linear(self.norm(x), self.embed.weight)

    if TYPE_CHECKING:
        __call__ = forward

    def _check_cache(self, cache: Sequence[Cache]) -> None:
        if self.kind == "encoder":
            raise ValueError(
                "Transformer: a cache with an encoder, which sees the future. Expected none. Leave cache away, or use kind='decoder'."
            )
        if isinstance(cache, Cache) or len({id(one) for one in cache}) != len(self.blocks) or len(cache) != len(self.blocks):
            raise ValueError(
                f"Transformer: cache = {cache!r}. Expected a list of {len(self.blocks)} caches, one of its own for each layer. "
                "Make it with new_cache()."
            )

    def _encoding(self, index: int) -> Encoding:
        encoding = self.encodings[index]
        assert isinstance(encoding, Encoding)
        return encoding

    @property
    def _axes(self) -> int | None:
        every = [self._encoding(index).axes for index in range(len(self.encodings))]
        return next((axes for axes in every if axes is not None), None)

    def _tokens(self, ids: Tensor, tokens: Tokens | Positions) -> Tokens:
        if not isinstance(tokens, Tokens):
            name, axes = "Transformer", self._axes
            return Tokens(resolve_positions(tokens, ids.shape[1], name=name, device=ids.device, axes=axes), axes=axes)
        check_axes((self._encoding(index) for index in range(len(self.encodings))), tokens.axes, "Transformer")
        return tokens

    def _prepare(self, x: Tensor, tokens: Tokens) -> Prepared:
        inside = [self._encoding(index) for indices in self._inside for index in indices]
        return prepare(inside, tokens.positions, dtype=_table_dtype(x))

    def _writes_biases(
        self,
        encodings: Sequence[Encoding],
        layer: int,
        x: Tensor,
        tokens: Tokens,
        keys: Tokens,
        prepared: Prepared,
        mask: Mask,
        dropout_p: float,
    ) -> bool:
        """Whether a layer's backend writes biases out as numbers, which layers then share."""
        terms: list[ScoreBias] = [prepared[one] for one in encodings if isinstance(one, ScoreEncoding)]
        if not terms or any(isinstance(one, ContentScoreEncoding) for one in encodings):
            return bool(terms)  # what content adds is not known yet, and few backends take both
        width = self._key_width(layer)
        entry = attention_input(x)[:, None, :, :1]  # as queries and keys to look at, without their memory
        row = entry[:, :, :1]
        request = make_request(
            entry.expand(-1, self.heads, -1, width),
            row.expand(-1, self.kv_heads, keys.length, width),
            row.expand(-1, self.kv_heads, keys.length, self.head_dim),
            mask=mask,
            bias=reduce(add, terms),
            positions=tokens.positions,
            k_positions=keys.positions,
            scale=None,
            dropout_p=dropout_p,
        )
        return select(request, self.backend).dense

    def _mask(self, tokens: Tokens, keys: Tokens, window: int | None) -> Mask:
        if self.kind == "decoder":
            return causal(tokens, keys, window)
        mask = FULL if window is None else Window(window, window - 1)
        return mask if tokens.segments is None else mask & same_segment(tokens.segments)

    def new_cache(self, batch: int | None = None, length: int | None = None) -> list[Cache]:
        """One empty cache per layer: growing, or with fixed slots when batch and length are given."""
        if self.kind == "encoder":
            raise ValueError(
                "Transformer.new_cache: an encoder sees the future, so nothing can be cached. Expected a decoder. Use kind='decoder'."
            )
        if (batch is None) != (length is None):
            raise ValueError(
                f"Transformer.new_cache: batch = {batch}, length = {length}. Expected both, for fixed slots, or neither. Give the other."
            )
        if batch is None or length is None:
            return [GrowingCache() for _ in self.blocks]
        weight, widths = self.embed.weight, [self._key_width(layer) for layer in range(len(self.blocks))]
        return [
            StaticCache(
                batch,
                self.kv_heads,
                length,
                width,
                v_dim=self.head_dim,
                axes=self._axes,
                dtype=weight.dtype,
                device=weight.device,
            )
            for width in widths
        ]

    def _key_width(self, layer: int) -> int:
        width = self.head_dim
        for index in self._inside[layer]:
            encoding = self._encoding(index)
            width = encoding.width(width) if isinstance(encoding, QKEncoding) else width
        return width

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 0.0,
        stop: int | None = None,
        cache: list[Cache] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue each row by ``new_tokens`` ids.

        Args:
            ids: ``[batch, seq]``, padded on the left when rows differ in length, with ``attention_mask``.
            temperature: 0 takes the likeliest id; above 0 samples.
            stop: an id that ends a row; the rest of that row repeats it.
            cache: from `new_cache`, to choose fixed slots; a growing one by default.

        Returns:
            ``[batch, new_tokens]``.

        Example:
            >>> model = Transformer(10, dim=16, layers=1, heads=2, encodings=[RoPE(8)]).eval()
            >>> model.generate(torch.ones(2, 3, dtype=torch.int64), 4).shape
            torch.Size([2, 4])
        """
        if temperature < 0 or new_tokens < 0:
            raise ValueError(
                f"Transformer.generate: temperature = {temperature}, new_tokens = {new_tokens}. Expected 0 or more each. Use temperature=0 for the likeliest id."
            )
        if self.training:
            raise ValueError(
                "Transformer.generate: the model is in training mode. Expected evaluation, where dropout and position transforms "
                "rest. Call model.eval() first."
            )
        if ids.ndim != 2 or ids.shape[1] == 0:
            raise ShapeError(
                f"Transformer.generate: ids of shape {tuple(ids.shape)}. Expected [batch, seq] with at least one id per row to "
                "continue from. Add a batch axis, or start with a beginning-of-sequence id."
            )
        if attention_mask is not None and not bool(attention_mask[:, -1].all()):
            raise ValueError(
                "Transformer.generate: a row ends with padding. Expected padding on the left only. Move the padding to the front."
            )
        cache = self.new_cache() if cache is None else cache
        self._check_cache(cache)
        if not all(one.empty for one in cache):
            raise ValueError(
                "Transformer.generate: the cache holds tokens already. Expected an empty one, since ids start at position 0. "
                "Make a new one, or call the model step by step with decode(lengths)."
            )
        tokens = contiguous(ids.shape[1], device=ids.device) if attention_mask is None else padded(attention_mask)
        lengths = tokens.positions[..., -1].expand(ids.shape[0]) + 1
        ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        out = ids.new_empty(ids.shape[0], new_tokens)
        for step in range(new_tokens):
            logits = self(ids, tokens, cache=cache)[:, -1]
            following = _choose(logits, temperature, generator)
            if stop is not None:
                following = torch.where(ended, stop, following)
                ended = ended | (following == stop)
            out[:, step] = following
            ids, tokens = following[:, None], decode(lengths + step)
        return out


def _table_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _encoded(encoding: InputEncoding, x: Tensor, positions: Tensor) -> Tensor:
    encoded = encoding(x, positions)
    if not isinstance(encoded, Tensor) or encoded.shape != x.shape:
        shown = tuple(encoded.shape) if isinstance(encoded, Tensor) else type(encoded).__name__
        raise ShapeError(
            f"{type(encoding).__name__}: its forward returned {shown}. Expected x's shape {tuple(x.shape)}. Return x with its code."
        )
    return encoded


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)[:, 0]
