"""How a model is called: what its forward takes, what it answers, without knowing its library."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from posenc.audit.behaviour.runner import Answer, Call, Runner, twin_of
from posenc.audit.behaviour.runner import Undrivable as Undrivable
from posenc.core.tokens import Tokens, padded

_IDS = ("input_ids", "ids", "idx", "token_ids", "tokens", "x", "input", "inputs", "src")
_MASKS = {
    "attention_mask": True,
    "key_padding_mask": False,
    "src_key_padding_mask": False,
}  # whether it is true for real tokens
_POSITIONS = ("position_ids", "positions", "pos_ids", "input_pos")
_SEGMENTS = ("segment_ids", "segments", "document_ids", "doc_ids", "sequence_ids")
_STARTS = ("start_pos", "start_position", "start_index")
_CACHES = ("cache", "past_key_values", "cache_params", "past_key_value", "kv_cache", "past")


def runner_of(model: nn.Module) -> Runner:
    """The way to call a model, on a copy of it: nothing that a probe does reaches the model itself.

    Raises:
        Undrivable: a model that cannot be called with ids alone, is too large or cannot be copied.
    """
    parameters = arguments_of(model)
    twin = twin_of(model)
    if {"tokens", "generator"} <= set(parameters) and hasattr(twin, "new_cache"):
        return PosencRunner(twin)
    return SignatureRunner(twin, parameters)


@final
class SignatureRunner(Runner):
    """Calls a forward by the names of its arguments: transformers' models, and plain modules that use such names.

    Args:
        table: ``[vocabulary, dim]``: the vectors of ids, for modules that take these.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, inspect.Parameter], table: Tensor | None = None) -> None:
        super().__init__(model)
        self._table = table
        self._ids = next((name for name in parameters if name in _IDS), next(iter(parameters)))
        if table is None and self._ids not in _IDS and parameters[self._ids].default is not inspect.Parameter.empty:
            raise Undrivable(f"its forward takes {', '.join(list(parameters)[:4])}: no ids")
        self._mask = next((name for name in _MASKS if name in parameters), None)
        self._positions = next((name for name in _POSITIONS if name in parameters), None)
        self._segments = next((name for name in _SEGMENTS if name in parameters), None)
        self._cache = next((name for name in _CACHES if name in parameters), None)
        self._start = next((name for name in _STARTS if name in parameters), None)
        self._use_cache = "use_cache" in parameters
        self._boolean = False
        known = {self._ids, self._mask, self._positions, self._segments, self._cache, self._start}
        needed = [
            name
            for name, parameter in parameters.items()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            and name not in known
        ]
        if needed or "decoder_input_ids" in parameters:
            needs = ", ".join(needed) or "decoder_input_ids"
            raise Undrivable(f"its forward needs {needs} beside ids")
        self._needs_positions = self._positions is not None and parameters[self._positions].default is inspect.Parameter.empty
        config = getattr(model, "config", None)
        self.config = config
        if table is None:
            self.vocabulary, self.reserved, self.pad = _ids_of(model, config)
        else:
            self.vocabulary, self.reserved, self.pad = len(table), frozenset({0}), 0
        names = ((self._mask, "mask"), (self._positions, "positions"), (self._segments, "segments"), (self._cache, "cache"))
        takes = {what for name, what in names if name is not None}
        self._keeps = self._start is not None and self._cache is None and _keeps_cache(model)
        takes |= {"cache"} if self._keeps else set()
        self._block_mask = config is not None and self._mask == "attention_mask" and hasattr(config, "to_dict")
        if self._block_mask and "positions" in takes:
            takes.add("segments")
        self.takes = frozenset(takes)
        self.promises_causal = _promises_causal(model, config)
        if self._mask is not None and _MASKS[self._mask]:
            self._boolean = self._wants_booleans()

    def doubled(self) -> Runner:
        twin = super().doubled()
        assert isinstance(twin, SignatureRunner)
        twin._table = None if self._table is None else self._table.double()
        return twin

    def _wants_booleans(self) -> bool:
        """Whether a mask of integers is refused and one of booleans taken."""
        device = next((tensor.device for tensor in self.model.parameters()), torch.device("cpu"))
        ids, mask = torch.full((1, 2), 1, device=device), torch.ones(1, 2, dtype=torch.int64, device=device)
        for given, answer in ((mask, False), (mask.bool(), True)):
            try:
                self._boolean = answer
                self(ids, mask=given)
                return answer
            except Undrivable:
                continue
        return False

    def call(self, asked: Call) -> Answer:
        ids, mask, positions, segments, cache, start, keep = asked
        arguments: dict[str, Any] = {}
        if positions is None and self._needs_positions:
            positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape)
        if positions is not None:
            if self._positions is None:
                raise Undrivable("it takes no positions")
            arguments[self._positions] = positions
            if mask is None and segments is None and cache is None and not keep and self._block_mask:
                mask = torch.ones_like(ids)  # without one, transformers takes jumps of positions for borders of documents
        if segments is not None:
            if self._segments is not None:
                arguments[self._segments] = segments
            elif self._block_mask:
                arguments["attention_mask"] = self._blocks(segments)
            else:
                raise Undrivable("it takes no documents")
        if mask is not None:
            if self._mask is None:
                raise Undrivable("it takes no mask of padding")
            arguments[self._mask] = self._as_taken(mask)
        if self._cache is not None and cache is not None:
            arguments[self._cache] = cache
        if self._use_cache:
            arguments["use_cache"] = keep or cache is not None
        if self._start is not None:
            arguments[self._start] = start
        if self._table is not None:
            return self._answer(self.model(self._table[ids], **arguments))
        if self._ids == "input_ids":
            return self._answer(self.model(input_ids=ids, **arguments))
        return self._answer(self.model(ids, **arguments))

    def _as_taken(self, mask: Tensor) -> Tensor:
        assert self._mask is not None
        if not _MASKS[self._mask]:
            return ~mask.bool()
        return mask.bool() if self._boolean else mask

    def _blocks(self, segments: Tensor) -> Tensor:
        """A mask by documents as transformers takes it, to be added to the scores: ``[batch, 1, q, k]``."""
        n = segments.shape[-1]
        seen = segments[:, :, None] == segments[:, None, :]
        if self.causal:
            seen = seen & torch.ones(n, n, dtype=torch.bool, device=segments.device).tril()
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        return torch.zeros(seen.shape, dtype=dtype, device=segments.device).masked_fill(~seen, torch.finfo(dtype).min)[:, None]

    def _answer(self, out: Any) -> Answer:
        if isinstance(out, Tensor):
            return Answer(out, self._keeps or None)
        fields: Mapping[str, Any] = out if isinstance(out, Mapping) else vars(out) if hasattr(out, "__dict__") else {}
        cache = self._keeps or None if self._cache is None else fields.get(self._cache)
        named = [fields[name] for name in ("logits", "last_hidden_state", "scores", "output") if name in fields]
        if named:
            return Answer(named[0], cache)
        if isinstance(out, (tuple, list)) and out:
            rest = next((part for part in out[1:] if part is not None and self._cache is not None), None)
            return Answer(out[0], cache if cache is not None else rest)
        raise Undrivable(f"the model answers a {type(out).__name__}, not a tensor or something with logits")


@final
class PosencRunner(Runner):
    """Calls `posenc.Transformer`: where tokens are is its second argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        any_model: Any = model
        self.vocabulary, self.reserved, self.pad = any_model.embed.num_embeddings, frozenset(), 0
        self.promises_causal = any_model.kind == "decoder"
        self.takes = frozenset({"mask", "positions", "segments", *(["cache"] if self.promises_causal else [])})
        if any_model._axes is not None and any_model._axes > 1:
            raise Undrivable(f"its positions have {any_model._axes} axes")

    def call(self, asked: Call) -> Answer:
        ids, mask, positions, segments, cache, start, keep = asked
        model: Any = self.model
        n = ids.shape[1]
        tokens = Tokens(torch.arange(start, start + n, device=ids.device))
        if mask is not None:
            every = padded(mask)
            assert every.segments is not None
            tokens = Tokens(every.positions[:, start:], segments=every.segments[:, start:])
        if positions is not None:
            tokens = tokens._replace(positions=positions)
        if segments is not None:
            tokens = tokens._replace(segments=segments)
        cache = model.new_cache() if keep and cache is None else cache
        return Answer(model(ids, tokens, cache=cache), cache)


def arguments_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """What a forward takes, by name."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError) as error:
        raise Undrivable("its forward has no signature to read") from error
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }
    if not named:
        raise Undrivable("its forward does not name what it takes; audit the module inside the wrapper")
    return named


def of_positions(name: str) -> bool:
    """Whether a module's or tensor's name says that it holds positions: ``wpe``, ``embed_positions``, ``pos.table``."""
    return re.search(r"(?:^|[._])(?:pos|wpe|pe(?:[._]|$))", name.lower()) is not None


def _ids_of(model: nn.Module, config: Any) -> tuple[int, frozenset[int], int]:
    """How many ids there are, which are reserved, and which pads."""
    sizes = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not of_positions(name) and "type" not in name
    ]
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int) or isinstance(vocabulary, bool):
        if not sizes:
            raise Undrivable("it has no embedding of ids")
        vocabulary = sizes[0]
    vocabulary = min([vocabulary, *sizes[:1]])
    reserved = set()
    for name, value in (vars(config) if hasattr(config, "__dict__") else {}).items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            reserved.add(value)
    reserved |= {m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}
    pad = getattr(config, "pad_token_id", None)
    if not isinstance(pad, int) or not 0 <= pad < vocabulary:
        pad = next((m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None), 0)
    return vocabulary, frozenset(reserved), pad


def _keeps_cache(model: nn.Module) -> bool:
    """Whether some module holds keys and values of earlier calls itself, as the reference code of Llama does."""
    return any(
        "cache" in name.lower() for module in model.modules() for name in (*vars(module), *module._buffers, *module._modules)
    )


_BOTH_WAYS = ("xlnet", "cpmant")
"""Language models of transformers that see what follows unless the caller masks it: XLNet's permutations, CPM-Ant's prompt."""


def _promises_causal(model: nn.Module, config: Any) -> bool | None:
    for name in ("is_causal", "causal", "is_decoder"):
        value = getattr(model, name, None)
        if isinstance(value, bool):
            return value
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_causal", None) is False:
        return False
    if getattr(config, "model_type", None) in _BOTH_WAYS:
        return None
    return True if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")) else None
