"""What score biases cost, beside plain causal attention and a mask written out, in one process.

    python benchmarks/attention.py --out docs/results/attention.json --plot docs/images/attention.png

Three questions: how near ALiBi comes to plain causal attention (time, memory, error of every row against float64); what
learned biases cost forward and backward when their n² numbers are never all there; and whether every encoding under
every mask on every backend agrees with its definition (``--grid-only`` asks that alone).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from side_by_side import Run, Seconds, Target, environment, judged, measure, show, show_targets, summary, verdict, write
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from posenc import CAUSAL, FIRE, KERPLE, ALiBi, ScoreBias, T5Bias, attention, materialize
from posenc.catalog import CATALOG, load_encoding
from posenc.compare.speed import peak_bytes
from posenc.core.sites import ContentScoreEncoding, ScoreEncoding
from posenc.testing.grid import SCENES, Cell, backend_grid

LENGTH, HEADS = 4096, 8
WIDTHS = (64, 128)
ERROR_SHAPES = {  # heads, kv_heads, width, length
    "8 heads of 64": (8, 8, 64, 4096),
    "12 heads of 64": (12, 12, 64, 4096),
    "8 heads of 80": (8, 8, 80, 4096),
    "8 heads of 128": (8, 8, 128, 4096),
    "16 heads of 64 over 4": (16, 4, 64, 4096),
    "1 head of 64, 32,768 tokens": (1, 1, 64, 32_768),
}
LEARNED: dict[str, Callable[[], Any]] = {
    "T5": lambda: T5Bias(HEADS),
    "KERPLE, log": lambda: KERPLE(HEADS),
    "KERPLE, power": lambda: KERPLE(HEADS, kernel="power"),
    "FIRE": lambda: FIRE(HEADS),
}
PLAIN, OURS, DENSE = "plain causal", "posenc, ALiBi", "dense mask, written before"


def alibi_section(width: int, *, backward: bool) -> str:
    return f"ALiBi, {'forward+backward' if backward else 'forward'}, {LENGTH} tokens, {HEADS} heads of {width}, bfloat16"


TARGETS = [
    Target(alibi_section(width, backward=backward), OURS, reference, at_most)
    for width, near in zip(WIDTHS, (1.15, 1.3), strict=True)
    for backward in (False, True)
    for reference, at_most in ((PLAIN, near), (DENSE, 0.5))
]


def given(heads: int, kv_heads: int, width: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, length, width, generator=draw).to(dtype) for h in (heads, kv_heads, kv_heads))
    return q, k, v


def written(bias: ScoreBias, length: int, dtype: torch.dtype) -> Tensor:
    """Bias and causal mask as one dense tensor."""
    dense = materialize(bias, torch.arange(length), dtype=torch.float32)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return dense.masked_fill(hidden, float("-inf")).to(dtype)[None]


def alibi_runs(width: int, *, backward: bool) -> dict[str, Run]:
    q, k, v = (t.requires_grad_(backward) for t in given(HEADS, HEADS, width, LENGTH, torch.bfloat16))
    bias = ALiBi(HEADS)()
    mask = written(bias, LENGTH, torch.bfloat16)
    runs: dict[str, Run] = {
        PLAIN: lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        OURS: lambda: attention(q, k, v, mask=CAUSAL, bias=bias),
        DENSE: lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "posenc, dense": lambda: attention(q, k, v, mask=CAUSAL, bias=bias, backend="sdpa"),
    }
    if not backward:
        return runs
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    return {name: both(run, (q, k, v), grad) for name, run in runs.items()}


def both(run: Run, leaves: tuple[Tensor, ...], grad: Tensor) -> Run:
    return lambda: torch.autograd.grad(run(), leaves, grad)


def alibi_memory() -> list[dict[str, Any]]:
    """What ALiBi adds to the peak of plain causal attention, as a share of the mask that it does without."""
    found = []
    for width in WIDTHS:
        runs = alibi_runs(width, backward=False)
        mask_bytes = HEADS * LENGTH**2 * torch.bfloat16.itemsize
        share = (peak_bytes(runs[OURS]) - peak_bytes(runs[PLAIN])) / mask_bytes
        section = f"ALiBi, peak memory, {LENGTH} tokens, {HEADS} heads of {width}, bfloat16"
        found.append(verdict(Target(section, "posenc beyond plain causal", "the mask", 0.1), share))
    return found


def exact(q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias) -> Tensor:
    """Causal attention in float64, a few queries at a time."""
    q, k, v = (t.double() for t in (q, k, v))
    groups, length = q.shape[1] // k.shape[1], q.shape[-2]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    at, rows = torch.arange(length), []
    for some in at.split(256):
        end = int(some[-1]) + 1
        scores = q[:, :, some] @ k[:, :, :end].mT * q.shape[-1] ** -0.5
        scores += materialize(bias, some, at[:end], dtype=torch.float64)
        rows.append(scores.masked_fill(at[:end] > some[:, None], float("-inf")).softmax(-1) @ v[:, :, :end])
    return torch.cat(rows, dim=-2)


def alibi_errors() -> list[dict[str, Any]]:
    """The largest error over all rows, against that of a dense mask."""
    found = []
    for name, (heads, kv_heads, width, length) in ERROR_SHAPES.items():
        q, k, v = given(heads, kv_heads, width, length, torch.bfloat16)
        bias = ALiBi(heads)()
        truth = exact(q, k, v, bias)
        ours, dense = (
            float((attention(q, k, v, mask=CAUSAL, bias=bias, backend=backend) - truth).abs().max())
            for backend in ("channels", "sdpa")
        )
        target = Target(f"ALiBi, largest error, {name}", "posenc", "dense mask", 1.25)
        found.append({**verdict(target, ours / dense), "error": ours, "error_of_dense": dense})
    return found


def learned_runs(encoding: Any, backend: str) -> Run:
    leaves = [t.requires_grad_() for t in given(HEADS, HEADS, 64, LENGTH, torch.float32)]
    q, k, v = leaves
    leaves = [*leaves, *encoding.parameters()]
    at, grad = torch.arange(LENGTH), torch.ones_like(q)

    def run() -> object:
        out = attention(q, k, v, mask=CAUSAL, bias=encoding(), positions=at, backend=backend)
        return torch.autograd.grad(out, leaves, grad)

    return run


def learned(name: str, rounds: int) -> tuple[Seconds, list[dict[str, Any]]]:
    """Time and memory of one learned bias, forward and backward, against the dense path."""
    runs = {"dense": learned_runs(LEARNED[name](), "sdpa"), "posenc": learned_runs(LEARNED[name](), "blockwise")}
    plain = given(HEADS, HEADS, 64, LENGTH, torch.float32)
    linear = 8 * plain[0].nbytes  # q, k, v, the result and their gradients: what no path does without
    section = f"{name}, forward+backward, {LENGTH} tokens, {HEADS} heads of 64, float32"
    peaks = {way: peak_bytes(run) for way, run in runs.items()}
    share = max(peaks["posenc"] - linear, 0) / (peaks["dense"] - linear)
    seconds = measure(runs, rounds, 1, warm_ups=0)  # measuring memory has run each once
    verdicts = [
        {**verdict(Target(section, "posenc, peak memory", "dense", 1 / 8), share), "peak_bytes": peaks},
        *judged([Target(section, "posenc", "dense", 1.0)], {section: seconds}),
    ]
    return seconds, verdicts


def grid(progress: Callable[[str], None]) -> list[Cell]:
    """Every score encoding of the catalogue on every backend."""
    cells: list[Cell] = []
    for name in CATALOG:
        encoding = load_encoding(name)
        if issubclass(encoding, (ScoreEncoding, ContentScoreEncoding)):
            progress(name)
            cells += backend_grid({name: encoding.spec.build})
    return cells


def show_grid(console: Console, cells: list[Cell]) -> None:
    table = Table(title=f"Agreement with the definition, forward and backward, over {len(SCENES)} scenes", title_justify="left")
    backends = list(dict.fromkeys(cell.backend for cell in cells))
    for column in ("", *backends):
        table.add_column(column)
    by_row: dict[str, dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        by_row[cell.encoding][cell.backend].append(cell)
    for encoding, row in by_row.items():
        table.add_row(encoding, *(_outcome(row[backend]) for backend in backends))
    console.print(table)


def _outcome(cells: list[Cell]) -> str:
    wrong = [cell for cell in cells if not cell.agrees]
    if wrong:
        return f"[bold red]wrong: {', '.join(cell.scene for cell in wrong)}[/]"
    agree = sum(cell.refusal is None for cell in cells)
    return f"{agree} of {len(cells)} agree" if agree else "refuses"


@click.command()
@click.option("--rounds", default=7, show_default=True, help="Rounds of each section.")
@click.option("--grid-only", is_flag=True, help="The grid of encodings and backends alone.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the result here, as JSON.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Draw times and memory here.")
def main(rounds: int, grid_only: bool, out: Path | None, picture: Path | None) -> None:
    """Time score biases beside plain causal attention and dense masks; check every backend."""
    console = Console()
    sections: dict[str, Seconds] = {}
    verdicts: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=None)
        if not grid_only:
            for width in WIDTHS:
                for backward in (False, True):
                    title = alibi_section(width, backward=backward)
                    progress.update(task, description=title)
                    sections[title] = measure(alibi_runs(width, backward=backward), rounds, 1, warm_ups=1)
            verdicts += judged(TARGETS, sections)
            progress.update(task, description="memory and errors of ALiBi")
            verdicts += alibi_memory() + alibi_errors()
            for name in LEARNED:
                progress.update(task, description=f"{name}, forward and backward")
                seconds, found = learned(name, 3)
                sections[found[0]["section"]] = seconds
                verdicts += found
        cells = grid(lambda name: progress.update(task, description=f"agreement of {name}"))
    shown = {title: summary(seconds) for title, seconds in sections.items()}
    for title, rows in shown.items():
        show(console, title, rows)
    show_grid(console, cells)
    if verdicts:
        show_targets(console, verdicts)
    if out is not None:
        found = {
            "rounds": rounds,
            "environment": environment(()),
            "targets": verdicts,
            "sections": shown,
            "grid": [
                {**cell.__dict__, "dtype": None if cell.dtype is None else str(cell.dtype).removeprefix("torch.")}
                for cell in cells
            ],
        }
        write(out, "posenc.benchmark.attention/1", "benchmarks/attention.py", found)
    if picture is not None:
        plot(picture, shown, verdicts)


def plot(path: Path, shown: dict[str, Any], verdicts: list[dict[str, Any]]) -> None:
    """Left: ALiBi beside plain causal attention. Right: the memory of learned biases, dense and in blocks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    rows = shown[alibi_section(64, backward=True)]
    names = sorted(rows, key=lambda name: -rows[name]["ratio"])
    colours = ["#0b6e4f" if name == OURS else "#333333" if name == PLAIN else "#b8c4bb" for name in names]
    bars = left.barh(names, [rows[name]["ratio"] for name in names], color=colours)
    left.bar_label(bars, [f"{rows[name]['ratio']:.2f}×" for name in names], padding=3, fontsize=9)
    left.set_xlim(0, max(row["ratio"] for row in rows.values()) * 1.18)
    left.set_xlabel("time, as a multiple of plain causal attention")
    left.set_title(f"ALiBi, forward and backward, {LENGTH} tokens, bfloat16", fontsize=10, loc="left")
    memory = {v["section"].partition(", forward")[0]: v["peak_bytes"] for v in verdicts if "peak_bytes" in v}
    for offset, (way, label, colour) in enumerate((("dense", "written out", "#b8c4bb"), ("posenc", "in blocks", "#0b6e4f"))):
        places = [index + 0.4 * offset for index in range(len(memory))]
        heights = [peaks[way] / 2**30 for peaks in memory.values()]
        drawn = right.bar(places, heights, width=0.38, color=colour, label=label)
        right.bar_label(drawn, [f"{height:.2f}" for height in heights], fontsize=8)
    right.set_xticks([index + 0.2 for index in range(len(memory))], [name.replace(", ", "\n") for name in memory])
    right.set_ylabel("peak memory, GiB")
    right.legend(frameon=False)
    right.set_title(f"Learned biases, forward and backward, {LENGTH} tokens", fontsize=10, loc="left")
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    temporary = path.with_suffix(f".new{path.suffix}")
    figure.savefig(temporary, dpi=150)
    temporary.replace(path)


if __name__ == "__main__":
    main()
