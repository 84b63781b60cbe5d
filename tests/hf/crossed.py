"""Every rotary class that reads the shared registry, crossed with every rope type and parameters of real models.

``python -m tests.hf.crossed`` runs all of it and writes ``docs/results/hf-zoo.json``, the counts that ``docs/hf-zoo.md``
quotes. Each comparison starts from a fresh module, because transformers' dynamic tables depend on the calls before.
"""

from __future__ import annotations

import copy
import json
import math
import platform
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from tests.hf.zoo import Case, Table, cases
from torch import Tensor

from posenc.core.multimodal import patch_centres
from posenc.errors import ConfigError
from posenc.hf import PositionPlan, plan

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "hf-zoo.json"
COMMAND = "python -m tests.hf.crossed"

Status = Literal["matched", "one ulp", "skipped", "refused", "differs", "mismatched"]
"""``matched``: bit for bit. ``one ulp``: see `POLAR`. ``skipped``: transformers raises, or there is no table of positions.
``refused``: posenc says why it does not plan it, and transformers computes something. ``differs``: transformers computes
what no model of its own can use or its own documentation contradicts, see `finding`. ``mismatched``: a defect here."""

STATUSES: tuple[Status, ...] = ("matched", "one ulp", "skipped", "refused", "differs", "mismatched")
POLAR = "torch.polar's cosine and sine are up to one unit in the last place off torch.cos and torch.sin"
NO_POSITIONS = {
    "MusicFlamingoRotaryEmbedding": "angles of window and frame numbers, multiplied by timestamps in seconds",
    "EsmFold2RotaryEmbedding": "takes coordinates of atoms and the number of their group, not positions of tokens",
}
"""Classes whose table is no function of positions, and why; posenc has nothing to compare."""
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True)
class Outcome:
    """What came of one comparison."""

    status: Status
    reason: str = ""


@dataclass(frozen=True)
class Parameters:
    """One block of ``rope_parameters``, as a model's configuration holds it.

    Args:
        name: whose, or what is special.
        rope_type: the registry's name.
        block: the other keys.
        max_length: ``max_position_embeddings``.
        original_length: the length that the positions are chosen around.
    """

    name: str
    rope_type: str
    block: Mapping[str, Any] = field(hash=False)
    max_length: int
    original_length: int

    @property
    def id(self) -> str:
        return f"{self.rope_type}: {self.name}"

    def calls(self) -> tuple[tuple[int, ...], ...]:
        """Positions of each call. Length rules see a call that is just short, one just long and one very long."""
        length = self.original_length
        short = tuple(sorted({0, 1, 7, min(1023, length - 1), length - 1}))
        everywhere = tuple(sorted({*short, 1023, length, length + 1, 131_071}))
        if self.rope_type not in ("dynamic", "longrope"):
            return (everywhere,)
        return short, (*short, length), everywhere


def _set(name: str, rope_type: str, max_length: int, original: int | None = None, /, **block: Any) -> Parameters:
    if rope_type in ("yarn", "longrope", "llama3"):
        block["original_max_position_embeddings"] = original or max_length
    return Parameters(name, rope_type, block, max_length, original or max_length)


PARAMETERS: tuple[Parameters, ...] = (
    _set("Llama 2", "default", 4096, rope_theta=10_000.0),
    _set("Llama 3", "default", 8192, rope_theta=500_000.0),
    _set("Phi 2, half a head", "default", 2048, rope_theta=10_000.0, partial_rotary_factor=0.5),
    _set("Pythia, a quarter of a head", "default", 2048, rope_theta=10_000.0, partial_rotary_factor=0.25),
    _set("LongChat", "linear", 16_384, 2048, rope_theta=10_000.0, factor=8.0),
    _set("Gemma 3", "linear", 131_072, 16_384, rope_theta=1e6, factor=8.0),
    _set("factor 1", "linear", 4096, rope_theta=10_000.0, factor=1.0),
    _set("half a head, factor 2.5", "linear", 5120, 2048, rope_theta=10_000.0, factor=2.5, partial_rotary_factor=0.5),
    _set("factor 0.5", "linear", 4096, rope_theta=10_000.0, factor=0.5),
    _set("Llama 2 stretched", "dynamic", 4096, rope_theta=10_000.0, factor=2.0),
    _set("InternLM 2", "dynamic", 32_768, rope_theta=1e6, factor=2.0),
    _set("factor 1", "dynamic", 2048, rope_theta=10_000.0, factor=1.0),
    _set("a quarter of a head", "dynamic", 2048, rope_theta=10_000.0, factor=4.0, partial_rotary_factor=0.25),
    _set("Hunyuan, alpha 1000", "dynamic", 32_768, rope_theta=10_000.0, factor=1.0, alpha=1000.0),
    _set("Hunyuan, alpha 50", "dynamic", 4096, rope_theta=10_000.0, factor=1.0, alpha=50),
    _set("Qwen 2.5", "yarn", 131_072, 32_768, rope_theta=1e6, factor=4.0),
    _set("gpt-oss, not truncated", "yarn", 131_072, 4096, rope_theta=150_000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0,
         truncate=False),
    _set("gpt-oss, truncated", "yarn", 131_072, 4096, rope_theta=150_000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0,
         truncate=True),
    _set("DeepSeek V3, mscale 1 and 1", "yarn", 163_840, 4096, rope_theta=10_000.0, factor=40.0, beta_fast=32, beta_slow=1,
         mscale=1.0, mscale_all_dim=1.0),
    _set("mscale 1 and 0.707", "yarn", 163_840, 4096, rope_theta=10_000.0, factor=40.0, mscale=1.0, mscale_all_dim=0.707),
    _set("Olmo 3, attention factor", "yarn", 65_536, 8192, rope_theta=500_000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
         attention_factor=1.2079441541679836),
    _set("beta_fast = beta_slow", "yarn", 16_384, 4096, rope_theta=10_000.0, factor=4.0, beta_fast=8.0, beta_slow=8.0),
    _set("factor 1", "yarn", 4096, rope_theta=10_000.0, factor=1.0),
    _set("half a head", "yarn", 16_384, 4096, rope_theta=500_000.0, factor=4.0, partial_rotary_factor=0.5),
    _set("a quarter of a head", "yarn", 16_384, 4096, rope_theta=500_000.0, factor=4.0, partial_rotary_factor=0.25),
    _set("Phi 3 mini 128k, no factor", "longrope", 131_072, 4096, rope_theta=10_000.0),
    _set("factor beside the lengths", "longrope", 131_072, 4096, rope_theta=10_000.0, factor=32.0),
    _set("attention factor", "longrope", 131_072, 8192, rope_theta=10_000.0, attention_factor=1.19),
    _set("Phi 3.5 MoE, a factor per list", "longrope", 131_072, 4096, rope_theta=10_000.0, short_mscale=1.243163121016122,
         long_mscale=1.243163121016122),
    _set("two factors per list", "longrope", 131_072, 4096, rope_theta=10_000.0, short_mscale=1.1, long_mscale=1.25),
    _set("half a head", "longrope", 131_072, 4096, rope_theta=10_000.0, partial_rotary_factor=0.5),
    _set("factor 1", "longrope", 4096, rope_theta=10_000.0, factor=1.0),
    _set("Llama 3.1", "llama3", 131_072, 8192, rope_theta=500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    _set("Llama 3.2", "llama3", 131_072, 8192, rope_theta=500_000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0),
    _set("equal band factors", "llama3", 131_072, 8192, rope_theta=500_000.0, factor=8.0, low_freq_factor=2.0,
         high_freq_factor=2.0),
    _set("factor 1", "llama3", 16_384, 8192, rope_theta=500_000.0, factor=1.0, low_freq_factor=1.0, high_freq_factor=4.0),
    _set("half a head", "llama3", 131_072, 8192, rope_theta=500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
         partial_rotary_factor=0.5),
    _set("Gemma 4, a quarter", "proportional", 131_072, rope_theta=1e6, partial_rotary_factor=0.25),
    _set("half, factor 8", "proportional", 131_072, rope_theta=1e6, partial_rotary_factor=0.5, factor=8.0),
    _set("everything turns", "proportional", 8192, rope_theta=10_000.0, partial_rotary_factor=1.0),
)  # fmt: skip


def crossed_cases() -> tuple[Case, ...]:
    """The cases whose class takes its rule from the registry."""
    return tuple(case for case in cases() if case.builds and case.reads_registry and case.cls.__name__ not in NO_POSITIONS)


def changes_for(case: Case, parameters: Parameters) -> dict[str, Any]:
    """What the case's configuration is made with."""
    default = case.config()
    changes = copy.deepcopy(dict(case.changes))
    changes["rope_parameters"] = _per_label(case, lambda label: _block(case, parameters, label))
    if hasattr(default, "max_position_embeddings"):
        changes["max_position_embeddings"] = parameters.max_length
    if hasattr(default, "original_max_position_embeddings"):  # it counts before the block's own
        changes["original_max_position_embeddings"] = parameters.original_length
    if case.layer_type is None and getattr(default, "head_dim", 0) is None:  # see FINDINGS
        changes["head_dim"] = _head_dim(case, None)
    return changes


def _per_label(case: Case, block: Callable[[str | None], dict[str, Any]]) -> dict[str, Any]:
    """One block, or one for every label of the configuration; labels without rotation stay without."""
    given = case.config().rope_parameters
    if case.layer_type is None:
        return block(None)
    return {
        label: None if given[label] is None else block(label) for label in given if not isinstance(given[label], float | str)
    }


def _block(case: Case, parameters: Parameters, label: str | None) -> dict[str, Any]:
    block = {"rope_type": parameters.rope_type, **parameters.block}
    share = parameters.block.get("partial_rotary_factor", _lent_share(case, label))
    plain = parameters.rope_type == "default" and not _plain_blocks_share(case)
    pairs = int(_head_dim(case, label) * (1.0 if parameters.rope_type == "proportional" or plain else share)) // 2
    if parameters.rope_type == "longrope":  # from 1 for the fastest pair to some sixty for the slowest, as Phi 3's
        block["short_factor"] = [1.0 + 0.02 * i for i in range(pairs)]
        block["long_factor"] = [round(1.0 + 63.0 * (i / pairs) ** 2, 3) for i in range(pairs)]
    sections = _sections(case)
    if sections:
        side = pairs * 3 // 8
        block["mrope_section"] = list(sections) if sum(sections) == pairs else [pairs - 2 * side, side, side]
    return block


@cache
def _lent_share(case: Case, label: str | None) -> float:
    """The part of a head that turns where a block does not say it: what the configuration class writes in."""
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if _sections(case):
        plain["mrope_section"] = list(_sections(case))
    assert case.config_class is not None
    changes = {**dict(case.changes), "rope_parameters": _per_label(case, lambda _: dict(plain))}
    filled = case.config_class(**copy.deepcopy(changes)).rope_parameters
    return float((filled[label] if label else filled).get("partial_rotary_factor") or 1.0)


def _plain_blocks_share(case: Case) -> bool:
    """Whether the class reads the share of a plain block; the registry's functions all read that of theirs."""
    return "partial_rotary_factor" in case.cls.compute_default_rope_parameters.__code__.co_consts  # type: ignore[attr-defined]


@cache
def _head_dim(case: Case, label: str | None) -> int:
    config = case.config()
    with suppress(ValueError):  # as the registry's functions read it
        config = config.per_layer_config[label] if label else config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@cache
def _sections(case: Case) -> tuple[int, ...]:
    found = getattr(case.module(), "mrope_section", None)
    return tuple((found[case.layer_type] if isinstance(found, dict) else found) or ())


def positions_of(case: Case, numbers: tuple[int, ...]) -> Tensor:
    """``[1, seq]``, or ``[1, seq, axes]`` with every axis in another order; what the class counts where it counts itself."""
    if not _free(case):
        return case.positions()
    row = torch.tensor(numbers)
    if case.axes == 1:
        return row[None]
    return torch.stack([row.roll(axis) for axis in range(case.axes)], dim=-1)[None]


def _free(case: Case) -> bool:
    return case.layout in ("positions", "axes first", "axes last", "tokens")


def layer_of(case: Case, planned: PositionPlan) -> int | None:
    """The first layer that turns by the case's block."""
    before = 0
    for layer, count in planned.runs:
        if layer.rotation is not None and case.layer_type in (None, layer.entry):
            return before
        before += count
    return None


def compare_default(case: Case) -> Outcome:
    """One case as its configuration class makes it."""
    reason = case.reason or NO_POSITIONS.get(case.cls.__name__, "")
    if reason:
        return Outcome("skipped", reason)
    at = case.positions()
    theirs = case.table(case.module(), at)
    try:
        planned = plan(case.config())
    except ConfigError as error:
        return Outcome("refused", str(error))
    layer = layer_of(case, planned)
    if layer is None:
        return Outcome("mismatched", "no layer reads this block")
    rotation = planned.layers[layer].rotation
    assert rotation is not None
    if rotation.axes is not None and rotation.axes.style.startswith("patch centres"):
        rows, columns = (int(axis.max()) + 1 for axis in at.unbind(-1))
        at = patch_centres(rows, columns, extent=2 * math.pi, dtype=torch.float32).positions[None]
    return verdict(case, theirs, Table(*planned.rotary_table(at, layer=layer, angle_dtype=torch.float32)))


def compare(case: Case, parameters: Parameters) -> Outcome:
    """One case with one block: transformers' tables against posenc's, at every call."""
    assert case.config_class is not None
    changes = changes_for(case, parameters)
    calls = parameters.calls() if _free(case) else ((),)
    theirs = []
    try:
        for call in calls:
            module = case.module(case.config_class(**copy.deepcopy(changes)))
            theirs.append(case.table(module, positions_of(case, call)))
    except Exception as error:
        return Outcome("skipped", f"{type(error).__name__}: {_general(str(error))}")
    config = case.config_class(**copy.deepcopy(changes))
    try:
        planned = plan(config)
        layer = layer_of(case, planned)
        if layer is None:
            return Outcome("mismatched", "no layer reads this block")
        ours = []
        for call in calls:
            at = positions_of(case, call)
            ours.append(Table(*planned.rotary_table(at, layer=layer, length=int(at.max()) + 1, angle_dtype=torch.float32)))
    except ConfigError as error:
        return Outcome("refused", _general(str(error)))
    outcomes = [verdict(case, a, b) for a, b in zip(theirs, ours, strict=True)]
    worst = max(outcomes, key=lambda outcome: STATUSES.index(outcome.status))
    if worst.status == "mismatched":
        reason = finding(config, parameters, theirs, ours, outcomes)
        return Outcome("differs", reason) if reason else worst
    return worst if worst.status == "mismatched" else _from_file(config, planned, layer) or worst


def _from_file(config: Any, planned: PositionPlan, layer: int) -> Outcome | None:
    """What is wrong with the plan of the file that transformers would save: it leaves out what its class assumes."""
    try:
        filed = plan(json.loads(config.to_json_string(use_diff=True)))
    except ConfigError as error:
        return Outcome("mismatched", f"its file: {_general(str(error))}")
    if filed.layers[layer].rotation == planned.layers[layer].rotation:
        return None
    return Outcome("mismatched", "its file gives another rotation than the configuration")


def finding(config: Any, parameters: Parameters, theirs: list[Table], ours: list[Table], outcomes: list[Outcome]) -> str | None:
    """Why two tables may differ, or ``None``; each of these has a test that shows it."""
    wide = getattr(config, "qk_rope_head_dim", None)
    widths = tuple(2 * tables[0].cos.shape[-1] for tables in (theirs, ours))
    if config.model_type == "deepseek_v4" and "partial_rotary_factor" not in parameters.block and widths == (512, 64):
        return "a block without a share turns the whole head, whatever share the configuration holds; posenc takes that share"
    if wide and widths[0] != wide == widths[1]:
        return "a table that is not qk_rope_head_dim wide, which the model's own attention cannot apply; posenc's is that wide"
    if config.model_type == "mimo_v2_flash" and parameters.rope_type != "default" and widths == (192, 64):
        return "the share of 0.334 that a plain block is given is not given to a scaled one, so that the whole head turns"
    if config.model_type == "phimoe" and parameters.rope_type == "longrope" and outcomes[0].status == "matched":
        return (
            "the long factors are never taken: beyond the original length the short ones stay, with the amplitude of the long"
        )
    if not config.model_type:
        return "the class is configured without a model_type, and posenc honours keys that this class does not read"
    return None


def verdict(case: Case, theirs: Table, ours: Table) -> Outcome:
    """Whether two tables are the same, bit for bit, or as near as `POLAR` lets them be."""
    if theirs.cos.shape != ours.cos.shape:
        return Outcome("mismatched", f"{theirs.cos.shape[-1]} pairs there, {ours.cos.shape[-1]} here")
    pairs = tuple(zip(theirs, ours, strict=True))
    if all(torch.equal(a, b) for a, b in pairs):
        return Outcome("matched")
    # an amplitude multiplies that unit by less than 1.5 and rounds twice more: two units at most
    if case.form == "complex" and max(_apart(a, b) for a, b in pairs) <= 2:
        return Outcome("one ulp", POLAR)
    return Outcome("mismatched", f"up to {max(float((a - b).abs().max()) for a, b in pairs):.1e} apart")


def _apart(a: Tensor, b: Tensor) -> int:
    """The largest distance, in float32 numbers."""
    bits = (t.contiguous().view(torch.int32).long() for t in (a, b))
    ordered = [torch.where(t < 0, -(t & 0x7FFF_FFFF), t) for t in bits]
    return int((ordered[0] - ordered[1]).abs().max())


def _general(message: str) -> str:
    """An error's last line without its numbers and labels, so that equal reasons are counted together."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    last = re.sub(r"rope_parameters\.(?:\w+\.)?(\w+)", r"rope_parameters.\1", lines[-1] if lines else "")
    last = re.sub(r"\{[^}]*\}", "{…}", re.sub(r"\[[^\]…]*[\]…]", "[…]", last))
    last = re.sub(r"got '?(?:linear|dynamic|yarn|longrope|llama3|proportional)\b'?", "got another", last)
    last = re.sub(r" Access it via the individual layer configs.*", "", last)
    return re.sub(r"\b\d+(\.\d+)?\b", "…", last)


def run(show: Callable[[Iterable[Case], str], Iterable[Case]]) -> dict[str, Any]:
    """Everything, as the committed file holds it."""
    started = time.perf_counter()
    defaults = {case.id: compare_default(case) for case in show(cases(), "default configurations")}
    crossed = {
        (case.id, parameters.id): compare(case, parameters)
        for case in show(crossed_cases(), "crossed with parameters")
        for parameters in PARAMETERS
    }
    by_type = {
        rope_type: _counts(outcome for (_, name), outcome in crossed.items() if name.startswith(f"{rope_type}: "))
        for rope_type in ROPE_TYPES
    }
    return {
        "schema": "posenc.hf-zoo/1",
        "command": COMMAND,
        "date": date.today().isoformat(),
        "seconds": round(time.perf_counter() - started),
        "environment": {
            "posenc": version("posenc"),
            "torch": version("torch"),
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        "classes": sorted(defaults),
        "default": {
            "counts": _counts(defaults.values()),
            "reasons": {
                case: f"{outcome.status}: {outcome.reason}" for case, outcome in defaults.items() if outcome.status != "matched"
            },
        },
        "crossed": {
            "classes": [case.id for case in crossed_cases()],
            "parameters": [parameters.id for parameters in PARAMETERS],
            "counts": by_type,
            "reasons": _reasons(crossed),
        },
    }


def _counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    count = Counter(outcome.status for outcome in outcomes)
    return {status: count[status] for status in STATUSES}


def _reasons(crossed: Mapping[tuple[str, str], Outcome]) -> list[dict[str, Any]]:
    """One entry per reason: how often, and for which classes and parameters."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for key, outcome in crossed.items():
        if outcome.status != "matched":
            found.setdefault((outcome.status, outcome.reason), []).append(key)
    return [
        {
            "status": status,
            "reason": reason,
            "count": len(keys),
            "classes": sorted({case for case, _ in keys}) if len({case for case, _ in keys}) <= 40 else "more than 40",
            "parameters": sorted({name for _, name in keys}),
        }
        for (status, reason), keys in sorted(found.items(), key=lambda item: (STATUSES.index(item[0][0]), -len(item[1])))
    ]


def main() -> int:
    """Run everything with a progress bar, print the counts and write `RESULTS`; 1 if anything is mismatched."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table as Columns
    from transformers import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # blocks that transformers warns of are part of the comparison
    torch.set_num_threads(1)
    screen = Console()
    result = run(lambda items, title: track(list(items), title, console=screen))
    columns = Columns("", *STATUSES)
    for name, counts in {"default configurations": result["default"]["counts"], **result["crossed"]["counts"]}.items():
        columns.add_row(name, *(str(counts[status]) for status in STATUSES))
    screen.print(columns)
    for entry in result["crossed"]["reasons"]:
        screen.print(f"{entry['count']} {entry['status']}: {entry['reason']}", markup=False, highlight=False)
    RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(any(counts["mismatched"] for counts in (result["default"]["counts"], *result["crossed"]["counts"].values())))


if __name__ == "__main__":
    sys.exit(main())
