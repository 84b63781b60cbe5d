"""What a plan remarks while it reads, as findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple, final

from posenc.audit.configs.foreign import FOREIGN
from posenc.audit.configs.sheet import Sheet, neutral, number
from posenc.audit.findings import Finding, Kind, Severity
from posenc.audit.kinds.configs import (
    ARCHITECTURE,
    CONFLICT,
    DEFAULTED,
    DROPPED,
    FACTOR,
    HEAD_DIM,
    MISSING,
    REFUSED,
    UNREAD,
)
from posenc.hf.blocks import BLOCK_KEYS
from posenc.hf.layers import LENGTH
from posenc.hf.reader import TEXT_PARTS

ROTARY = ("rope", "rotary", "yarn", "ntk", "theta")
"""A key that holds one of these words asks for a rotation; others, as ``position``, may mean anything."""

READ = (
    *BLOCK_KEYS, "rope_parameters", "rope_scaling", "head_dim", "sliding_window", "use_sliding_window", "layer_types", "no_rope_layers",
    "rope_local_base_freq", "rotary_pct", "rotary_emb_base", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "position_embedding_type",
)  # fmt: skip
"""What an unread key may be a slip of the pen for."""


@final
class Remark(NamedTuple):
    """How plans word one of their remarks, and what it is as a finding.

    Args:
        words: a pattern; ``said`` is what was measured.
        where: the key, with groups of the pattern in it.
    """

    words: str
    kind: Kind
    expected: str
    severity: Severity | None = None
    where: str = "{key}"


TRAINED = "the value that the model was trained with, in the file"

REMARKS = (
    Remark(
        r"(?P<key>\S+) (?P<said>is not planned: .+)", REFUSED, "a part that can be read, or one without positions", "note"
    ),
    Remark(
        r"(?P<key>\S*original_max_position_embeddings) is (?P<said>not given: max_position_embeddings = .+)",
        MISSING,
        "the length of training: with the extended length in its place the scaling starts too late",
        "warning",
    ),
    Remark(r"(?P<key>original_max_position_embeddings) = (?P<said>\d+ beside the block counts, .+)", CONFLICT, "one length", "warning"),
    Remark(r"(?P<key>\S+)(?P<said> = \S+ is not read by .+ where rope_type is .+)", UNREAD, "an architecture that turns a part of the head"),
    Remark(r"(?P<key>\S+truncate)(?P<said> = false is not honoured .+)", UNREAD, "truncate in a block for all layers"),
    Remark(r"(?P<key>hidden_size)(?P<said> = \d+ does not divide over .+)", HEAD_DIM, "a width that divides over the heads, or head_dim", "warning"),
    Remark(r"the number of layers is (?P<said>not given: .+)", DEFAULTED, "how many there are", where="num_hidden_layers"),
    Remark(r"the base of (?P<kind>\S+) is (?P<said>not given: .+)", DEFAULTED, TRAINED, where="rope_parameters.{kind}.rope_theta"),
    Remark(r"(?P<key>\S+) is (?P<said>not given: .+)", DEFAULTED, TRAINED),
    Remark(r"(?P<said>the base is .+, written in the code of .+)", DEFAULTED, "no key: the class reads none", where="rope_theta"),
    Remark(r"(?P<said>no rotary block is given: .+)", DEFAULTED, TRAINED, where="rope_parameters"),
    Remark(
        r"(?P<said>no model_type: .+|model_type .+ is not one that .+)",
        ARCHITECTURE,
        "an architecture that transformers has",
        where="model_type",
    ),
)  # fmt: skip
"""The first that fits; a remark that none fits is about the architecture."""

Match = re.Match[str]


def remarks(sheet: Sheet) -> Iterator[Finding]:
    """The findings that a plan's remarks come to."""
    if sheet.plan is None:
        return
    for note in sheet.plan.notes:
        said = note
        while said.partition(": ")[0] in TEXT_PARTS:
            said = said.partition(": ")[2]
        for words, finding in WEIGHED:
            match = re.fullmatch(words, said, re.DOTALL)
            if match:
                yield from finding(sheet, match)
                break
        else:
            yield _plain(sheet, said)


def _plain(sheet: Sheet, said: str) -> Finding:
    for remark in REMARKS:
        match = re.fullmatch(remark.words, said, re.DOTALL)
        if match:
            where = sheet.path(remark.where.format(**match.groupdict()))
            measured = match["said"].removeprefix(" = ")
            return remark.kind.at(where, measured=measured, expected=remark.expected, severity=remark.severity)
    return ARCHITECTURE.at(sheet.path("model_type"), measured=said, expected="readers that know it")


def _value(sheet: Sheet, path: str) -> Any:
    found: Any = sheet.keys
    if path in found:
        return found[path]
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _unread(sheet: Sheet, match: Match) -> Iterator[Finding]:
    path, leaf = match["key"], match["key"].rpartition(".")[2]
    if leaf in FOREIGN and path == leaf:
        return  # has a finding of its own
    value = _value(sheet, path)
    in_block = path != leaf and path not in sheet.keys
    slip = leaf not in BLOCK_KEYS and leaf not in READ and not neutral(value)
    typo = get_close_matches(leaf[:100], READ, cutoff=0.92) if slip else []
    asks = leaf not in BLOCK_KEYS if in_block else any(word in leaf for word in ROTARY)
    default_on = in_block and value is False  # truncate: false says a lot
    off = ((neutral(value) and not default_on) or sheet.own_code) and not typo
    why = "; rope_type has no use for it" if in_block and leaf in BLOCK_KEYS else ""
    yield UNREAD.at(
        sheet.path(path),
        measured=f"{match['value']}, read by nothing in transformers 5.24{why}",
        expected=f"{typo[0]}, by the spelling" if typo else "a key that the architecture reads",
        severity="warning" if (asks or typo) and not off else "note",
        mend=f"Write {typo[0]}." if typo else None,
    )


def _beside(sheet: Sheet, match: Match) -> Iterator[Finding]:
    """A key beside a text model's own object."""
    name = match["key"]
    outside = sheet.where.rpartition(".")[0]
    where = f"{outside}.{name}" if outside else name
    value = None if sheet.plan is None else sheet.plan.config.get(name)
    own = sheet.keys.get(name)
    rotary = any(word in name for word in ROTARY) and not neutral(value)
    differs = own is not None and own != value
    severity: Severity = "warning" if rotary and (own is None or differs) else "note"
    kind = CONFLICT if rotary and differs else DROPPED if own is None and isinstance(value, dict) else UNREAD
    yield kind.at(
        where,
        measured=f"{match['value']} beside {match['inside']}, whose own keys count",
        expected=f"the key in {sheet.where}",
        severity=severity,
        mend=f"Move it into {sheet.where}, or remove it.",
    )


def _unused(sheet: Sheet, match: Match) -> Iterator[Finding]:
    given = next((block for block in sheet.blocks if sheet.path(match["key"]) == block.where), None)
    if given is None or given.scales:
        return  # a class's own block; scaling has a finding of its own
    yield UNREAD.at(
        given.where, measured="used by no layer", expected="a kind of layer that the model has, or no block", severity="note"
    )


def _factor(sheet: Sheet, match: Match) -> Iterator[Finding]:
    length = next((name for name in LENGTH if number(sheet.keys, name)), LENGTH[0])
    where = sheet.path(match["key"])
    original = re.match(r"(\d+) and (\d+)", match["said"])
    if original and int(original[2]) > int(original[1]):
        return  # LENGTHS says so
    yield FACTOR.at(
        where,
        measured=f"{match['factor']}, but the lengths {match['said']}",
        expected=f"{length} = factor × original length; here the factor counts, readers that take the ratio get another table",
    )


def _base(sheet: Sheet, match: Match) -> Iterator[Finding]:
    """The base: worth a warning where something else in the file shows that one was meant."""
    named = [name for name, foreign in FOREIGN.items() if foreign.means == "base" and sheet.keys.get(name) is not None]
    shown = ""
    if named:
        shown = f"{named[0]} names a base"
    elif sheet.keys.get("rope_parameters"):
        shown = "rope_parameters is where the base stands"
    elif any(block.kind == "llama3" for block in sheet.blocks):
        shown = "Llama 3's rule comes with a base of its own"
    yield DEFAULTED.at(
        sheet.path("rope_theta"),
        measured=match["said"] + (f", though {shown}" if shown else ""),
        expected=TRAINED,
        severity="warning" if shown and not sheet.own_code else "note",
    )


WEIGHED: tuple[tuple[str, Callable[[Sheet, Match], Iterator[Finding]]], ...] = (
    (r"(?P<key>.+?) = (?P<value>.+) beside (?P<inside>\w+) is read by nothing here", _beside),
    (r"(?P<key>.+?) = (?P<value>.+?)( beside the blocks)? is read by nothing here", _unread),
    (r"(?P<key>.+) is used by no layer", _unused),
    (r"(?P<key>\S+) = (?P<factor>\S+), but the lengths (?P<said>.+ imply .+): the explicit factor counts", _factor),
    (r"rope_theta is (?P<said>not given: .+)", _base),
)
"""Remarks whose gravity depends on what else the file holds."""
