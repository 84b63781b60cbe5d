"""The width of a head, where it is given, guessed or derived."""

from __future__ import annotations

from collections.abc import Iterator

from posenc.audit.configs.sheet import Sheet, number
from posenc.audit.findings import Finding
from posenc.audit.kinds.configs import HEAD_DIM
from posenc.hf.layers import HEADS, WIDTH


def head_widths(sheet: Sheet) -> Iterator[Finding]:
    """A head width that readers who divide the model width by the heads do not get."""
    family = sheet.family
    if not sheet.rotations or family.where != "leading" or family.width != "head":
        return
    width, heads = number(sheet.keys, *WIDTH), number(sheet.keys, *HEADS)
    used = sheet.rotations[0].head_dim
    if not width or not heads or heads * used == width or width % heads:  # what does not divide is the plan's remark
        return
    given = number(sheet.keys, family.head_key, "head_dim")
    if given is not None and given != used:  # widths per kind of layer
        return
    said = f"{used:.0f}" if given is not None else f"not given: {used}, the default of {sheet.model_type!r}"
    yield HEAD_DIM.at(
        sheet.path(family.head_key),
        measured=f"{said}; {heads:.0f} heads of it are {heads * used:.0f} channels, hidden_size is {width:.0f}",
        expected=f"readers to take head_dim: those that divide hidden_size by the heads get {width / heads:g}",
        mend="Nothing, if the reader takes head_dim." if given is not None else None,
    )
