"""No finding of warning or above on models as transformers builds them.

``python -m tests.audit.test_clean_models`` writes ``docs/results/audit-zoo.json``, about two minutes on one core.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.hf.tiny_models import MODELS, Tiny, tiny

import posenc
from posenc.audit import Report
from posenc.audit.live.auditing import audit

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "audit-zoo.json"
SPREAD = (
    "llama", "gemma3_text", "gemma4_text", "cohere2", "deepseek_v3", "gptj", "phi3", "smollm3", "llama4_text", "qwen3_next",
    "modernbert", "esm", "qwen2_vl_text", "granite_swa", "gpt_oss", "pixtral",
)  # fmt: skip
"""Tables that are written, shared, scaled and applied in different ways."""


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Any:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def outcome(report: Report) -> dict[str, Any]:
    """What a committed file keeps of a report: no numbers that depend on the machine."""
    return {
        "findings": [[finding.severity, finding.id, finding.where] for finding in report.findings],
        "checked": list(report.checked),
        "skipped": dict(report.skipped),
    }


@pytest.mark.parametrize("name", SPREAD)
def test_a_clean_model_has_no_warning(name: str):
    report = audit(tiny(name).build())
    assert report.at_least("warning") == (), str(report)
    assert "rotary frequencies" in report.checked


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.model_type)
def test_every_clean_model_is_as_committed(model: Tiny):
    start = time.perf_counter()
    report = audit(model.build())
    assert time.perf_counter() - start < 10
    assert report.at_least("warning") == (), str(report)
    assert outcome(report) == json.loads(RESULTS.read_text())["models"][model.model_type]


def test_the_committed_result_is_of_these_models():
    result = json.loads(RESULTS.read_text())
    assert list(result["models"]) == [model.model_type for model in MODELS]
    found = [finding for model in result["models"].values() for finding in model["findings"]]
    assert {severity for severity, _, _ in found} <= {"note"}
    assert all("rotary tables" in model["checked"] for model in result["models"].values())


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    models, slowest = {}, 0.0
    for model in MODELS:
        net = model.build()
        start = time.perf_counter()
        report = audit(net)
        slowest = max(slowest, time.perf_counter() - start)
        models[model.model_type] = outcome(report)
        print(model.model_type, report.ids, file=sys.stderr)
    head = {
        "command": "python -m tests.audit.test_clean_models",
        "versions": {"posenc": posenc.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "python": platform.python_version(),
        "slowest_seconds_on_one_core": round(slowest, 1),
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in models.items())
    RESULTS.write_text(json.dumps(head, indent=1).removesuffix("\n}") + f',\n "models": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    main()
