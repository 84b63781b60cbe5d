"""Tables that positions index: enough rows for the promise, and something in each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from posenc.audit.findings import Finding
from posenc.audit.kinds.parts import BIAS_TABLE_SIZE, TABLE_PADDING_ROWS, TABLE_REPEATS, TABLE_ROWS, TABLE_UNTRAINED
from posenc.audit.live.parts import RELATIVE, Part, walk
from posenc.audit.live.promises import Promise, Promises
from posenc.hf.position_plan import PositionPlan

ABSOLUTE = re.compile(r"^(wpe|pos_embed|positions_embed|position_embeds_layer|embed_positions|position(al)?_embeddings?)$")
"""What tables of one row per token are called."""


def is_learned(part: Part) -> bool:
    """Whether training writes it."""
    return part.held == "parameter" and part.tensor.requires_grad


def check_learned(parts: list[Part], promises: Promises) -> Iterator[Finding]:
    """Tables of a row per position: enough rows for the promise, and something in each."""
    for part in parts:
        if not is_learned(part) or RELATIVE.search(called(part)):
            continue
        promise = promises.of(part.name)
        if promise is not None and is_absolute(part):
            yield from _rows(part, promise)
        if not part.tensor.is_meta:
            yield from _contents(part)


def called(part: Part) -> str:
    """The name that says what it is: of the embedding, or of the parameter."""
    names = part.name.split(".")
    return names[-2] if names[-1] in ("weight", "weights") and len(names) > 1 else names[-1]


def is_absolute(part: Part) -> bool:
    """Whether it is called like a table of one row per token."""
    return bool(ABSOLUTE.search(called(part)))


def _rows(part: Part, promise: Promise) -> Iterator[Finding]:
    plan = tower(part, promise.plan)
    table = plan.input
    if table is None or table.kind != "learned" or table.rows is None or not isinstance(part.module, nn.Embedding):
        return
    own = getattr(part.module, "offset", None)
    offset = own if isinstance(own, int) else table.offset
    rows, fits = part.tensor.shape[0], part.tensor.shape[0] - offset
    promised = table.length or 0
    start = f", the first token at row {offset}" if offset else ""
    if fits < promised:
        yield TABLE_ROWS.at(
            part.name,
            measured=f"{rows} rows{start}: {fits} tokens fit",
            expected=f"{promised} tokens, as the configuration promises",
        )
    elif plan.max_length is not None and fits < plan.max_length:
        yield TABLE_PADDING_ROWS.at(
            part.name,
            measured=f"{rows} rows{start}: {fits} tokens fit",
            expected=f"max_position_embeddings = {plan.max_length}",
        )


def tower(part: Part, plan: PositionPlan) -> PositionPlan:
    """The encoder's plan for a table of the encoder, where a flat configuration holds both."""
    encoder = plan.parts.get("encoder")
    return encoder if encoder is not None and "encoder" in part.name.split(".") else plan


def _contents(part: Part) -> Iterator[Finding]:
    """Rows of zeros beside rows that hold something, and rows that stand there twice."""
    table = part.tensor.detach()
    if table.ndim == 3 and table.shape[0] == 1:  # with an axis for the batch
        table = table[0]
    if table.ndim != 2 or table.shape[0] < 4 or not bool(table.isfinite().all()):
        return
    empty = (table == 0).all(-1)
    padding = getattr(part.module, "padding_idx", None)
    if isinstance(padding, int) and 0 <= padding < len(empty):
        empty[padding] = False
    if bool(empty.all()):  # not trained at all
        return
    if int(empty.sum()) > 1:
        yield TABLE_UNTRAINED.at(
            part.name,
            measured=f"{int(empty.sum())} of {len(empty)} rows hold zeros: {_spans(empty)}",
            expected="a code in each row",
        )
    full = table[~empty]
    different = _different(full)
    if different < len(full):
        yield TABLE_REPEATS.at(
            part.name, measured=f"{different} different rows among {len(full)}", expected="a row of its own for each position"
        )


def _different(rows: Tensor) -> int:
    """How many rows differ, by a random projection in float64: equal rows agree to the bit, others do not."""
    direction = torch.randn(rows.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shadow = (rows.double() * direction.to(rows.device)).sum(-1)
    return int(shadow.unique().numel())


def _spans(chosen: Tensor) -> str:
    at = chosen.nonzero()[:, 0].tolist()
    spans: list[list[int]] = []
    for index in at:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    shown = [f"{first}" if first == last else f"{first}–{last}" for first, last in spans[:4]]
    return "rows " + ", ".join(shown) + (" …" if len(spans) > 4 else "")


def check_bias_tables(model: nn.Module, promises: Promises) -> Iterator[Finding]:
    """T5's tables: a row per bucket, a column per head."""
    for name, module in walk(model):
        promise = promises.of(name)
        if promise is None or name.rpartition(".")[2] != "relative_attention_bias" or not isinstance(module, nn.Embedding):
            continue
        rule = next((layer.bias for layer, _ in promise.plan.runs if layer.bias is not None), None)
        if rule is None or rule.kind != "t5" or rule.heads is None:
            continue
        promised = (dict(rule.details)["buckets"], rule.heads)
        live = tuple(module.weight.shape)
        if live != promised:
            yield BIAS_TABLE_SIZE.at(
                f"{name}.weight",
                measured=f"{live[0]} buckets × {live[1]} heads",
                expected=f"{promised[0]} buckets × {promised[1]} heads",
            )
