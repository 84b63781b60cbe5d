"""Names of keys: old ones, those of other conventions, and two that say different things."""

from __future__ import annotations

from collections.abc import Iterator

from posenc.audit.configs.foreign import FOREIGN
from posenc.audit.configs.sheet import Sheet, neutral, number
from posenc.audit.findings import Finding, Severity
from posenc.audit.kinds.configs import CONFLICT, LEGACY, TWICE
from posenc.hf.parameters import ALIASES
from posenc.hf.source import short


def names(sheet: Sheet) -> Iterator[Finding]:
    """Keys of other conventions, and old names for the type."""
    scaled = next((block for block in sheet.blocks if block.scales), None)
    for name, foreign in FOREIGN.items():
        value = sheet.keys.get(name)
        if value is None:
            continue
        if foreign.means == "scaling" and scaled is not None and not neutral(value):
            yield TWICE.at(
                sheet.path(name),
                measured=f"{short(value)}, beside {scaled.where} with rope_type {scaled.kind!r}",
                expected=f"one of the two: {foreign.whose} may read both, transformers reads the block",
            )
            continue
        same = foreign.means == "base" and any(getattr(r.schedule, "base", None) == value for r in sheet.rotations)
        harmless = neutral(value) or same or sheet.own_code or foreign.instead == "no key"
        severity: Severity = "note" if harmless else "warning"
        yield LEGACY.at(
            sheet.path(name),
            measured=f"{short(value)}, a key of {foreign.whose}; transformers does not read it",
            expected=foreign.instead,
            severity=severity,
            mend="Nothing is lost: remove it." if harmless and not sheet.own_code else None,
        )
    for block in sheet.blocks:
        old, new = block.data.get("type"), block.data.get("rope_type")
        said = new if isinstance(new, str) else old
        if isinstance(said, str) and (new is None or said in ALIASES):
            yield LEGACY.at(
                f"{block.where}.{'type' if new is None else 'rope_type'}",
                measured=f"{short(said)}, an old {'name of the key' if new is None else 'word'}: read as {block.kind!r}",
                expected=f"rope_type: {short(block.kind)}",
                severity="note",
                mend="Write rope_type, beside type if older readers need it.",
            )


def conflicts(sheet: Sheet) -> Iterator[Finding]:
    """Values beside blocks that no block shares: they look as if they counted."""
    nested = [block for block in sheet.blocks if block.nested]
    for name in ("rope_theta", "partial_rotary_factor"):
        beside = number(sheet.keys, name)
        inside = {value for block in nested if (value := number(block.data, name)) is not None}
        if beside is not None and len(inside) and all(name in block.data for block in nested) and beside not in inside:
            yield CONFLICT.at(
                sheet.path(name),
                measured=f"{beside:g} beside blocks that say {', '.join(f'{value:g}' for value in sorted(inside))}: it counts nowhere",
                expected="one of the blocks' values, or no key",
                severity="warning",
            )
    for block in sheet.blocks:
        longest, promised = number(block.data, "max_position_embeddings"), number(sheet.keys, "max_position_embeddings")
        if longest and promised and longest != promised:
            yield CONFLICT.at(
                f"{block.where}.max_position_embeddings",
                measured=f"{longest:.0f}, but {promised:.0f} beside the block",
                expected="the same length in both places",
                severity="note",
            )
