"""Every kind of finding, by its id; one file per area."""

from __future__ import annotations

from types import ModuleType

from posenc.audit.findings import Kind
from posenc.audit.kinds import attention, behaviour, biases, configs, frequencies, parts, rotary, tables


def _kinds(area: ModuleType) -> tuple[Kind, ...]:
    return tuple(value for value in vars(area).values() if isinstance(value, Kind))


AREAS: dict[str, tuple[Kind, ...]] = {
    area.__name__.rpartition(".")[2]: _kinds(area)
    for area in (frequencies, rotary, tables, biases, parts, behaviour, attention, configs)
}
"""The kinds of each area, in order."""

KINDS: dict[str, Kind] = {kind.id: kind for kinds in AREAS.values() for kind in kinds}
"""All of them."""
