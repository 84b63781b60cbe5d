"""Scaling that is dropped, said twice, or has its parts in each other's place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from posenc.audit.configs.sheet import Block, Sheet, number
from posenc.audit.findings import Finding
from posenc.audit.kinds.configs import DROPPED, SWAPPED, TWICE
from posenc.hf.extension import ONLY_LONGROPE, WITHOUT_RULES
from posenc.hf.families import READ_BY_FEW


def scaling(sheet: Sheet) -> Iterator[Finding]:
    """Blocks whose scaling the architecture does not apply, or applies in a way that was hardly meant."""
    for block in sheet.blocks:
        yield from _dropped(sheet, block)
        unread = list(_of_few(sheet, block))
        yield from unread
        factor, alpha = number(block.data, "factor"), number(block.data, "alpha")
        if block.kind == "dynamic" and alpha not in (None, 1) and factor not in (None, 1) and not unread:
            yield TWICE.at(
                f"{block.where}.factor",
                measured=f"{factor:g} beside alpha = {alpha:g}",
                expected="one of the two: readers of alpha raise the base once and for all, the others with the length",
            )
        yield from _swapped(block)


def _dropped(sheet: Sheet, block: Block) -> Iterator[Finding]:
    factor = number(block.data, "factor")
    if block.kind == "default" and factor not in (None, 1):
        yield DROPPED.at(
            f"{block.where}.factor",
            measured=f"{factor:g}, with rope_type {'default' if {'rope_type', 'type'} & block.data.keys() else 'absent'}: not applied",
            expected="a rope_type that scales: linear, dynamic, yarn, llama3",
        )
    if not block.scales:
        return
    if WITHOUT_RULES & {*sheet.types}:
        yield DROPPED.at(
            block.where,
            measured=f"rope_type {block.kind!r} for {sheet.model_type!r}, whose class in transformers 5.24 reads no rule",
            expected="no scaling, or an architecture that reads it",
        )
    elif ONLY_LONGROPE & {*sheet.types} and block.kind not in ("longrope", "yarn"):  # Phi-3 reads yarn as longrope
        yield DROPPED.at(
            block.where,
            measured=f"rope_type {block.kind!r} for {sheet.model_type!r}, whose class accepts longrope alone",
            expected="rope_type 'longrope'",
        )
    elif sheet.plan is not None and not sheet.rotations:
        yield DROPPED.at(
            block.where,
            measured=f"rope_type {block.kind!r}, but no layer of {sheet.model_type!r} turns",
            expected="no scaling where nothing turns",
        )


def _of_few(sheet: Sheet, block: Block) -> Iterator[Finding]:
    """Keys that one or two architectures read, in the block of another."""
    for name, those in READ_BY_FEW.items():
        value = number(block.data, name)
        if value not in (None, 1) and sheet.known and not those & {*sheet.types}:
            yield DROPPED.at(
                f"{block.where}.{name}",
                measured=f"{value:g} for {sheet.model_type!r}, which does not read it in transformers 5.24",
                expected=f"one of {', '.join(sorted(those))}, or the key that this architecture reads",
            )


def _swapped(block: Block) -> Iterator[Finding]:
    short, long = block.data.get("short_factor"), block.data.get("long_factor")
    if not _numbers(short) or not _numbers(long) or len(short) != len(long):
        return
    if all(a >= b for a, b in zip(short, long, strict=True)) and short != long:
        yield SWAPPED.at(
            f"{block.where}.short_factor",
            measured=f"no entry below its long_factor: up to {max(short):g} there, up to {max(long):g} in long_factor",
            expected="the larger divisors in long_factor, for texts beyond the original length",
        )


def _numbers(value: object) -> TypeGuard[list[float]]:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in value)
    )
