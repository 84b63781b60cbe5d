"""Sections: which axis of a position each rotating pair reads."""

from __future__ import annotations

from collections.abc import Iterator

from posenc.audit.configs.sheet import Block, Sheet
from posenc.audit.findings import Finding
from posenc.audit.kinds.configs import SECTIONS
from posenc.hf.defaults import model_defaults
from posenc.hf.families import FAMILIES
from posenc.hf.source import short

NAMES = ("mrope_section", "xdrope_section")


def sections(sheet: Sheet) -> Iterator[Finding]:
    """Sections that the architecture lays out in another way than the file says, or does not read at all."""
    for block in sheet.blocks:
        name = next((name for name in NAMES if block.data.get(name)), None)
        if name is None:
            yield from _without(sheet, block)
        else:
            yield from _with(sheet, block, name)


def _without(sheet: Sheet, block: Block) -> Iterator[Finding]:
    says_several = "mrope" in (block.data.get("type"), block.data.get("rope_type"))
    if says_several and not any(rotation.axes is not None for rotation in sheet.rotations) and sheet.plan is not None:
        yield SECTIONS.at(
            f"{block.where}.mrope_section",
            measured="not given, though the type is 'mrope': one axis turns all pairs",
            expected="pairs per axis: [time, height, width]",
            severity="warning",
            mend="Add mrope_section as the model was trained.",
        )


def _with(sheet: Sheet, block: Block, name: str) -> Iterator[Finding]:
    where, given = f"{block.where}.{name}", block.data[name]
    if sheet.known and not any(_reads_axes(model_type) for model_type in sheet.types):
        yield SECTIONS.at(
            where,
            measured=f"{short(given)} for {sheet.model_type!r}, which has one axis in transformers 5.24",
            expected="an architecture that reads several axes, or no sections",
            severity="warning",
        )
        return
    for rotation in sheet.rotations:
        if rotation.axes is not None and "comes to" in rotation.axes.style:
            yield SECTIONS.at(
                where,
                measured=f"{short(given)}, {rotation.axes.style}",
                expected="sections whose height and width take every third pair as often as they say",
                severity="warning",
                mend="Use the sections that the model was trained with, or the layout in blocks.",
            )
            break
    flag = block.data.get("mrope_interleaved")
    layout = sheet.family.axes
    said, fixed = ("interleaved", "mrope chunked") if flag is True else ("in blocks", "mrope interleaved")
    if isinstance(flag, bool) and layout == fixed:
        yield SECTIONS.at(
            f"{block.where}.mrope_interleaved",
            measured=f"{str(flag).lower()} ({said}), but {sheet.model_type!r} is {fixed.removeprefix('mrope ')} whatever the key says",
            expected="the layout of the architecture: readers that go by the key give most pairs another axis",
            severity="warning",
            mend="Correct the key.",
        )


def _reads_axes(model_type: str) -> bool:
    family = FAMILIES.get(model_type)
    return model_type not in model_defaults() or "hunyuan" in model_type or (family is not None and family.axes is not None)
