"""What the literature found, as tiers: a run says with which of them it agrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class Tiers:
    """Rows from best to worst on one task past the trained length; rows of one tier are not ordered."""

    task: str
    tiers: tuple[tuple[str, ...], ...]
    source: str

    def __str__(self) -> str:
        return " > ".join("{" + ", ".join(tier) + "}" if len(tier) > 1 else tier[0] for tier in self.tiers)


LITERATURE = (
    Tiers(
        "copy-constant",
        (("nope",), ("t5",), ("alibi",), ("rope-25", "sinusoidal")),
        "Kazemnejad et al. 2023, arXiv:2305.19466, released logs: mean exact match in (1, 2] times the trained length "
        "0.99, 0.77, 0.29, 0.00 and 0.00 (107M parameters, three seeds; rotary there turns 25 % of a head)",
    ),
    Tiers(
        "copy-random",
        (("nope", "t5", "alibi"), ("rope-25", "sinusoidal")),
        "Kazemnejad et al. 2023, arXiv:2305.19466, released logs: mean exact match in (1, 1.25] times the trained length "
        "0.75, 0.77, 0.78 against 0.01 and 0.11",
    ),
    Tiers(
        "recall-lm",
        (("alibi",), ("rope",), ("sinusoidal",)),
        "Press et al. 2022, arXiv:2108.12409: language-model loss at twice the trained length against that at the trained "
        "length: -0.05, +0.06 and +0.78 nats (247M parameters)",
    ),
)


def judge(cells: Mapping[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """For each pair of rows from different tiers: whether this run agrees, disagrees, ties or cannot say.

    Args:
        cells: the report's cells by (row, task).
    """
    judged = []
    for claim in LITERATURE:
        pairs = []
        for better, worse in combinations(range(len(claim.tiers)), 2):
            for a in claim.tiers[better]:
                for b in claim.tiers[worse]:
                    if (a, claim.task) in cells and (b, claim.task) in cells:
                        pairs.append({"better": a, "worse": b, "verdict": _verdict(cells[a, claim.task], cells[b, claim.task])})
        if pairs:
            judged.append({"task": claim.task, "tiers": str(claim), "source": claim.source, "pairs": pairs})
    return judged


def _verdict(better: dict[str, Any], worse: dict[str, Any]) -> str:
    if not (better["fit"] and worse["fit"]):
        return "cannot say: did not fit"
    a, b = better["primary"], worse["primary"]
    if a is None or b is None:
        return "cannot say: undefined"
    if abs(a - b) < 0.02:
        return "tie"
    return "agrees" if (a > b) == better["higher_is_better"] else "disagrees"
