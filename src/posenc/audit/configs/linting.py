"""`lint`: every check on every model of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posenc.audit.configs.axes import sections
from posenc.audit.configs.heads import head_widths
from posenc.audit.configs.layers import layer_lists
from posenc.audit.configs.lengths import lengths
from posenc.audit.configs.names import conflicts, names
from posenc.audit.configs.readers import readers
from posenc.audit.configs.refusals import refusal
from posenc.audit.configs.remarks import remarks
from posenc.audit.configs.scaling import scaling
from posenc.audit.configs.sheet import Sheet, sheet_of
from posenc.audit.configs.temperature import temperature
from posenc.audit.findings import Finding, Report
from posenc.audit.kinds.configs import DEFAULTED, UNREAD
from posenc.errors import ConfigError
from posenc.hf.describe import words
from posenc.hf.position_plan import LayerPlan, PositionPlan, plan
from posenc.hf.source import read_config, short

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".gguf", ".npz", ".h5", ".msgpack")
LONGEST = 400

CHECKS: dict[str, Callable[[Sheet], Iterator[Finding]]] = {
    "names": names,
    "conflicts": conflicts,
    "lengths": lengths,
    "scaling": scaling,
    "temperature": temperature,
    "head widths": head_widths,
    "sections": sections,
    "layers": layer_lists,
}
"""What is looked at in every model of a configuration, beside what its plan remarks."""


def lint(config: str | Path | Mapping[str, Any] | object) -> Report:
    """Find position keys that are unread, missing, defaulted or in conflict in a configuration.

    The thing people get wrong: a key that nobody reads is no error anywhere. The model loads, short texts are fine, and
    the scaling that the file asks for is not there.

    Args:
        config: a path to ``config.json`` or its folder, its content as a mapping, or a transformers configuration.
            transformers itself is not needed. Nothing is downloaded, nothing is unpickled, no code of the model runs.

    Returns:
        A `Report`. ``described`` says what the model does with positions and what each reader makes of the file, where
        that is known. A configuration that `posenc.hf.plan` refuses has a finding of severity ``error`` with its reason.

    Raises:
        ConfigError: a file that is not there, not JSON, not one object, or holds weights.

    Example:
        >>> from posenc.audit.configs import lint
        >>> llama = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        ...          "max_position_embeddings": 8192, "rope_theta": 500000.0}
        >>> lint(llama).findings
        ()
        >>> yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
        >>> [finding.where for finding in lint({**llama, "rope_scaling": yarn}).at_least("warning")]
        ['max_position_embeddings']
    """
    data = _read(config)
    subject = (
        str(config) if isinstance(config, (str, Path)) else f"configuration of {short(data.get('model_type') or 'no type')}"
    )
    loaded = not isinstance(config, (str, Path, Mapping))
    refused: list[Finding] = []
    skipped: dict[str, str] = {}
    found: PositionPlan | None = None
    try:
        found = plan(data)
    except ConfigError as error:
        refused.append(refusal(error))
        skipped = {"plan": "the configuration is refused", "readers": "the configuration is refused"}
    main = sheet_of(data, found, loaded=loaded)
    sheets = [main, *_towers(found, loaded)]
    findings = [*refused, *(finding for sheet in sheets for check in CHECKS.values() for finding in check(sheet))]
    described: list[str] = []
    if found is not None:
        findings += [finding for sheet in sheets for finding in remarks(sheet)]
        lines, others = readers(main)
        findings += others
        described = [*_described(found, ""), *lines]
    checked = [*CHECKS, *(() if found is None else ("plan", "readers"))]
    return Report.of(subject, map(_brief, _specific(findings)), described=described, checked=checked, skipped=skipped)


def _read(config: object) -> dict[str, Any]:
    if isinstance(config, (str, Path)) and Path(config).suffix.lower() in WEIGHTS:
        raise ConfigError(
            f"lint: {str(config)!r} holds weights by its name. Expected config.json or a folder that holds it; weights are "
            "not read and nothing is unpickled. Pass the config.json beside it."
        )
    try:
        return read_config(config)
    except ConfigError as error:
        raise ConfigError(f"lint: {str(error).removeprefix('plan: ')}") from None


def _towers(found: PositionPlan | None, loaded: bool) -> Iterator[Sheet]:
    """The other towers that have positions and keys of their own."""
    for name, part in {} if found is None else found.parts.items():
        if part.config:
            yield sheet_of(dict(part.config), part, where=name, loaded=loaded)


def _specific(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings without those that only repeat that a key is unread or defaulted where another says what is wrong."""
    kept = list(findings)
    vague = (UNREAD, DEFAULTED)
    named = {finding.where for finding in kept if finding.kind not in vague}
    return (finding for finding in kept if finding.kind not in vague or finding.where not in named)


def _brief(finding: Finding) -> Finding:
    """Files may hold names and texts of any length; a finding does not."""

    def cut(text: str) -> str:
        return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"

    return replace(finding, where=cut(finding.where), measured=cut(finding.measured), expected=cut(finding.expected))


def _described(found: PositionPlan, name: str) -> Iterator[str]:
    """What turns, and what else knows positions, a line each."""
    lead = f"{name}: " if name else ""
    if found.input is not None:
        yield f"{lead}{found.input}"
    total = len(found.layers)
    counts: dict[str, int] = {}
    for layer, count in found.runs:
        for fact in _facts(layer):
            counts[fact] = counts.get(fact, 0) + count
    for fact, count in counts.items():
        yield f"{lead}{'all' if count == total else count} layer{'s' * (count != 1)}: {fact}"
    for part, inner in found.parts.items():
        yield from _described(inner, part)


def _facts(layer: LayerPlan) -> Iterator[str]:
    if layer.rotation is not None:
        turning = layer.rotation
        whole = turning.rotary_dim == turning.head_dim
        span = f"{turning.rotary_dim}" if whole else f"{turning.rotary_dim} of {turning.head_dim}"
        axes = "" if turning.axes is None else f"; axes {', '.join(turning.axes.names)}"
        yield f"{words(turning.schedule)}; {span} channels turn, {turning.pairing} pairing{axes}"
    else:
        yield "nothing turns"
    if layer.bias is not None:
        yield str(layer.bias)
