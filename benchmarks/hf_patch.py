"""What `posenc.hf.patch` changes: nothing with float32 angles, in every tiny model; with float64 angles more, the farther out.

``python -m benchmarks.hf_patch`` in the repository writes ``docs/results/hf-patch.json``. One core, about two minutes.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.hf.test_patching import generates_alike
from tests.hf.tiny_models import LEFT, MODELS, Tiny
from torch import Tensor

import posenc
from posenc.errors import ConfigError
from posenc.hf import patch

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "hf-patch.json"
WINDOW = 64
FIRST = (0, 1024, 4096, 8192, 16384, 32768, 65536, 131072 - WINDOW)
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 64, "max_position_embeddings": 131072, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "initializer_range": 0.125,
}  # fmt: skip
"""Of width 64, so that weights of deviation 1/8 give queries and keys of deviation 1."""


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()


def logits(net: Any, ids: Tensor, first: int) -> Tensor:
    at = torch.arange(first, first + ids.shape[1])[None].expand_as(ids)
    with torch.no_grad():
        return net(input_ids=ids, position_ids=at, use_cache=False).logits


def differences(net: Any, ids: Tensor, first: int) -> dict[str, Any]:
    """Logits with float32 angles, as transformers forms them, against logits with float64 angles."""
    theirs = logits(net, ids, first)
    with patch(net, angle_dtype=torch.float32):
        assert torch.equal(logits(net, ids, first), theirs)
    with patch(net):
        ours = logits(net, ids, first)
    return {
        "positions": [first, first + ids.shape[1] - 1],
        "largest_difference": float(f"{(ours - theirs).abs().max():.2e}"),
        "root_mean_square": float(f"{(ours - theirs).square().mean().sqrt():.2e}"),
        "deviation_of_logits": round(float(ours.std()), 3),
    }


def by_distance(net: Any, ids: Tensor) -> list[dict[str, Any]]:
    """One text of 8,193 tokens, where keys at the start are seen from ever farther: the largest difference up to a position."""
    theirs = logits(net, ids, 0)
    with patch(net):
        change = (logits(net, ids, 0) - theirs).abs().amax(-1)[0]
    ends = (64, 256, 1024, 2048, 4096, 8192)
    return [{"up_to": end, "largest_difference": float(f"{change[: end + 1].max():.2e}")} for end in ends]


def outcome(model: Tiny) -> dict[str, str]:
    """Whether one architecture's answers are bit-equal with float32 angles."""
    net = model.build()
    before = model.answer(net)
    with patch(net, angle_dtype=torch.float32):
        same = {"logits" if model.kind == "decoder" else "hidden states": torch.equal(model.answer(net), before)}
    if model.kind == "decoder":
        try:
            generates_alike(model)
            same["generation"] = True
        except AssertionError:
            same["generation"] = False
    return {what: "bit-equal" if equal else "different" for what, equal in same.items()}


def reason(model: Tiny) -> str:
    """Why one architecture is left alone."""
    try:
        patch(model.build())
    except ConfigError as error:
        return str(error).split(" can be replaced (", 1)[1].split("). Expected a transformers model", 1)[0]
    return "it is not"


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dice = torch.Generator().manual_seed(1)
    net = llama()
    window = torch.randint(0, 64, (32, WINDOW), generator=dice)
    report = {
        "schema": "posenc.hf-patch/1",
        "command": "python -m benchmarks.hf_patch",
        "environment": {
            "posenc": posenc.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "float64_angles": {
            "model": {"model_type": "llama", **SHAPE},
            "windows": [differences(net, window, first) for first in FIRST],
            "one_text": by_distance(net, torch.randint(0, 64, (1, 8193), generator=dice)),
        },
        "float32_angles": {model.model_type: outcome(model) for model in MODELS},
        "left": [{"model_type": model.model_type, "reason": reason(model)} for model, _ in LEFT],
    }
    RESULTS.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(report["float64_angles"], indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
