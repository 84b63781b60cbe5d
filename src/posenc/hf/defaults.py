"""What transformers assumes for keys that a configuration does not hold, by model type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def model_defaults() -> Mapping[str, Any]:
    """Defaults, the rule of layer kinds and the parts of every model type; written by ``tools/hf_defaults.py``."""
    data: dict[str, Any] = json.loads((files("posenc.hf") / "defaults.json").read_text(encoding="utf-8"))
    models: dict[str, Any] = data["models"]
    return models
