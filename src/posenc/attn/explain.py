"""Which implementation a call would use, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posenc.attn.attention import attention
from posenc.attn.request import make_request
from posenc.attn.select import Verdict, verdicts
from posenc.core.apply import apply_rotary, apply_rotary_, apply_rotary_pair, rotary_verdicts
from posenc.core.mask import FULL

_DEFAULTS: dict[str, Any] = {
    "mask": FULL, "bias": None, "positions": None, "k_positions": None, "value_table": None,
    "scale": None, "dropout_p": 0.0,
}  # fmt: skip


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Verdict]:
    """One verdict per backend for a call of `attention`, `apply_rotary` and its kin, without running it.

    Example:
        >>> q = torch.ones(1, 1, 2, 4)
        >>> said = {verdict.backend: verdict for verdict in explain(attention, q, q, q)}
        >>> [name for name, verdict in said.items() if verdict.chosen]
        ['sdpa']
        >>> said["channels"].reason
        'refuses: there is no bias to put into channels'
    """
    backend = kwargs.pop("backend", "auto")
    if function is attention:
        return verdicts(make_request(*args, **{**_DEFAULTS, **kwargs}), backend)
    if function in (apply_rotary, apply_rotary_, apply_rotary_pair):
        return rotary_verdicts(function, *args, backend=backend, **kwargs)
    raise ValueError(
        f"explain: {getattr(function, '__name__', function)!r} has no backends. Expected attention, apply_rotary, apply_rotary_ or apply_rotary_pair. Pass one of them."
    )
