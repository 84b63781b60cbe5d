"""Factors and lengths against each other."""

from __future__ import annotations

from collections.abc import Iterator

from posenc.audit.configs.sheet import ORIGINAL, Block, Sheet, number
from posenc.audit.findings import Finding
from posenc.audit.kinds.configs import FACTOR, LENGTH_RULE, LENGTHS
from posenc.hf.layers import LENGTH


def lengths(sheet: Sheet) -> Iterator[Finding]:
    """What the blocks say about lengths, against what stands beside them."""
    for block in sheet.blocks:
        if block.scales:
            yield from _of_block(sheet, block)
    if any(rotation.depends_on_length for rotation in sheet.rotations):
        kinds = {block.kind: block.where for block in sheet.blocks if block.scales}
        yield LENGTH_RULE.at(
            next(iter(kinds.values()), sheet.path("rope_parameters")),
            measured=f"rope_type {', '.join(map(str, kinds)) or 'of the class'}: one table up to a length, another beyond it",
            expected="a cache that is filled and read at one length, or keys that are rotated when they are read",
        )


def _of_block(sheet: Sheet, block: Block) -> Iterator[Finding]:
    outside = None if block.nested else number(sheet.keys, ORIGINAL)
    original = outside or number(block.data, ORIGINAL)
    where = sheet.path(ORIGINAL) if outside else f"{block.where}.{ORIGINAL}"
    longest, factor = number(sheet.keys, *LENGTH), number(block.data, "factor")
    promised = sheet.path(next((name for name in LENGTH if number(sheet.keys, name)), LENGTH[0]))
    dynamic = block.kind == "dynamic" and number(block.data, "alpha") is None
    if original and longest and original > longest:
        yield LENGTHS.at(
            where,
            measured=f"trained on {original:.0f} tokens, {promised} = {longest:.0f}",
            expected="a length of training below the length promised",
        )
    elif dynamic and original and longest and original < longest:
        yield LENGTHS.at(
            where,
            measured=f"{original:.0f}, but dynamic NTK counts from {promised} = {longest:.0f}",
            expected=f"{promised} = {original:.0f}: with {longest:.0f} nothing changes up to that length, and less after it",
        )
    elif original and longest and factor and factor > 1 and block.kind in ("linear", "yarn", "llama3", "longrope"):
        unscaled = original == longest
        mismatch = block.kind == "linear" and longest != original * factor
        if unscaled or mismatch:
            yield LENGTHS.at(
                promised,
                measured=f"{longest:.0f}, {'the length of training itself' if unscaled else f'{longest / original:g} × {original:.0f}'}; "
                f"factor = {factor:g}",
                expected=f"{original * factor:.0f}: readers that take the ratio of the lengths for the factor get {longest / original:g}",
                mend=f"Set it to factor × {ORIGINAL}, or remove the scaling.",
            )
    if (factor == 1 and block.kind in ("linear", "yarn", "llama3")) or (dynamic and factor == 1):
        yield FACTOR.at(
            f"{block.where}.factor",
            measured=f"1: {block.kind} scaling by one",
            expected="a factor above 1, or no scaling",
            severity="note",
            mend="Remove the scaling, or write the factor that was meant.",
        )
