"""Deviations of transformers' own models that were looked into: reported as notes, with the reason."""

from __future__ import annotations

from dataclasses import replace

from posenc.audit.findings import Finding

_UNNUMBERED = "new tokens are numbered from 0 unless position_ids are given, as generate() gives them"
_WINDOWED = "with sliding_window set, its cache drops keys that a full pass still sees"
_LAYER_0 = "its cache reports the length of layer 0, which is linear and holds no keys, so masks are made for new tokens alone"
_NO_IDS = "it counts positions through the padding and takes no others; pad on the right"
_NEIGHBOURS = "a convolution or an embedding of neighbours reads what stands next to a token, padding too"

_COUNT_THROUGH = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart", "prophetnet", "trocr",
)  # fmt: skip

KNOWN: dict[tuple[str, str], str] = {
    ("bamba", "decode-offset"): _UNNUMBERED,
    ("bamba", "chunked-prefill"): _UNNUMBERED,
    ("minimax", "decode-offset"): _LAYER_0,
    ("minimax", "chunked-prefill"): _LAYER_0,
    ("minimax", "left-padding"): _LAYER_0,
    ("qwen3_vl_moe_text", "decode-offset"): _WINDOWED,
    ("qwen3_vl_moe_text", "chunked-prefill"): _WINDOWED,
    ("moshi", "decode-offset"): _WINDOWED,
    ("moshi", "chunked-prefill"): _WINDOWED,
    ("git", "left-padding"): "with a cache it expects the tokens of a picture before the text",
    ("prophetnet", "past-the-end"): "its positions start behind the padding row",
    ("rwkv", "left-padding"): "it does not read the mask, and padding enters its state",
    ("mobilebert", "packing"): _NEIGHBOURS,
    **{("convbert", kind): _NEIGHBOURS for kind in ("left-padding", "right-padding", "packing")},
    **{(name, "left-padding"): _NO_IDS for name in _COUNT_THROUGH},
}
"""``(model_type, kind): reason``."""


def settle(findings: list[Finding], model_type: str | None) -> list[Finding]:
    """The findings, known deviations of the architecture as notes."""
    return [_settled(finding, KNOWN.get((model_type or "", finding.id))) for finding in findings]


def _settled(finding: Finding, reason: str | None) -> Finding:
    if reason is None or finding.severity == "note":
        return finding
    return replace(finding, severity="note", expected=f"{finding.expected}. Known of transformers: {reason}")
