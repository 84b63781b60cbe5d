"""How long rotation takes, beside torch's own copies and other libraries, in one process.

    python benchmarks/rotary.py --out docs/results/rotary.json --plot docs/images/rotary.png

How contestants are timed is in side_by_side.py. Peers that are not installed are left out and named. Thread count,
allocator and versions go into the result file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import Progress
from side_by_side import Run, Seconds, Target, environment, imported, judged, measure, show, show_targets, summary, write
from torch import Tensor

from posenc import Geometric, RoPE, apply_rotary_, apply_rotary_pair, rotary_table
from posenc.kernels import native

BASE = 10_000.0
SHAPES = {
    "1×32×4096×128": ((1, 32, 4096, 128), (1, 32, 4096, 128)),
    "4×8×512×64": ((4, 8, 512, 64), (4, 8, 512, 64)),
    "1×32/8×4096×128": ((1, 32, 4096, 128), (1, 8, 4096, 128)),
}
ONE_TOKEN = ((1, 32, 1, 128), (1, 8, 1, 128))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LAYERS = 32


BIG = "1×32×4096×128"
TARGETS = [
    Target(f"forward {BIG} float32", "posenc", "clone", 1.2),
    Target(f"forward {BIG} bfloat16", "posenc", "clone", 1.3),
    Target(f"forward {BIG} float32", "posenc, warm buffers", "copy_, warm buffers", 1.2),
    Target(f"forward {BIG} bfloat16", "posenc, warm buffers", "copy_, warm buffers", 1.3),
    Target(f"forward {BIG} float32", "posenc, in place", "clone", 0.35),
    Target(f"forward {BIG} bfloat16", "posenc, in place", "clone", 0.45),
    Target(f"forward {BIG} float32", "posenc", "transformers, compiled", 1 / 1.8),
    Target(f"forward {BIG} float32", "posenc", "rotary-embedding-torch", 1 / 6),
    Target(f"forward+backward {BIG} float32", "posenc", "transformers", 1 / 4),
    Target("one token float32", "posenc", "transformers", 0.5),
    Target(f"one token, {LAYERS} layers, tables included", "posenc", "transformers", 0.5),
]


class Peers:
    """Other libraries' rotations of q and k, as far as they are installed."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        self.hf = imported("transformers", "transformers.models.llama.modeling_llama", self.missing)
        self.ret = imported("rotary-embedding-torch", "rotary_embedding_torch", self.missing)
        self.xt = imported("x-transformers", "x_transformers.x_transformers", self.missing)
        self.tune = imported("torchtune", "torchtune.modules.position_embeddings", self.missing)

    def runs(self, q: Tensor, k: Tensor, *, compiled: bool = True) -> dict[str, Run]:
        """Each library's way to turn q and k, its table made beforehand."""
        length, width = q.shape[-2:]
        runs: dict[str, Run] = {}
        cos, sin = full_width(length, width, q.dtype)
        if self.hf is not None:
            apply = self.hf.apply_rotary_pos_emb
            runs["transformers"] = lambda: apply(q, k, cos, sin)
            if compiled:
                fused = torch.compile(apply)
                runs["transformers, compiled"] = lambda: fused(q, k, cos, sin)
        if self.ret is not None:
            theirs = self.ret.RotaryEmbedding(dim=width)
            runs["rotary-embedding-torch"] = lambda: (theirs.rotate_queries_or_keys(q), theirs.rotate_queries_or_keys(k))
        if self.xt is not None:
            freqs, scale = self.xt.RotaryEmbedding(width).forward_from_seq_len(length)
            turn = self.xt.apply_rotary_pos_emb
            runs["x-transformers"] = lambda: (turn(q, freqs, scale), turn(k, freqs, scale))
        if self.tune is not None:
            module, as_theirs = (
                self.tune.RotaryPositionalEmbeddings(width, max(length, 2)),
                (q.transpose(1, 2), k.transpose(1, 2)),
            )
            runs["torchtune"] = lambda: [module(x) for x in as_theirs]
        polar = torch.polar(torch.ones(length, width // 2), angles(length, width))
        if q.dtype == torch.float32:
            runs["complex form"] = lambda: (turn_complex(q, polar), turn_complex(k, polar))
        return runs


def angles(length: int, width: int) -> Tensor:
    """Positions times frequencies, float32."""
    return torch.arange(length)[:, None].float() * Geometric(BASE).frequencies(width, dtype=torch.float32).inv_freq


def full_width(length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine as transformers has them: full width, in the model's dtype."""
    double = torch.cat([angles(length, width)] * 2, dim=-1)[None]
    return double.cos().to(dtype), double.sin().to(dtype)


def turn_complex(x: Tensor, polar: Tensor) -> Tensor:
    """Pairs of neighbours as complex numbers, the form of Llama's first release."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * polar).flatten(-2).type_as(x)


def forward_runs(peers: Peers, q: Tensor, k: Tensor, *, compiled: bool) -> dict[str, Run]:
    table = table_for(q)
    q_out, k_out, q_in, k_in = (torch.empty_like(x).copy_(x) for x in (q, k, q, k))

    def warm() -> None:
        apply_rotary_pair(q, k, table, pairing="half", out=(q_out, k_out))

    def in_place() -> None:
        apply_rotary_pair(q_in, k_in, table, pairing="half", out=(q_in, k_in))

    fused = {}
    if compiled:
        inductor = torch.compile(lambda q, k: apply_rotary_pair(q, k, table, pairing="half"))
        fused["posenc, compiled"] = lambda: inductor(q, k)
    return {
        "clone": lambda: (q.clone(), k.clone()),
        "copy_, warm buffers": lambda: (q_out.copy_(q), k_out.copy_(k)),
        "posenc": lambda: apply_rotary_pair(q, k, table, pairing="half"),
        "posenc, interleaved": lambda: apply_rotary_pair(q, k, table, pairing="interleaved"),
        "posenc, warm buffers": warm,
        "posenc, in place": in_place,
        "posenc, reference": lambda: apply_rotary_pair(q, k, table, pairing="half", backend="reference"),
        **fused,
        **peers.runs(q, k, compiled=compiled),
    }


def table_for(q: Tensor) -> Any:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return rotary_table(torch.arange(q.shape[-2]), Geometric(BASE).frequencies(q.shape[-1]), dtype=wide)


def backward_runs(peers: Peers, q: Tensor, k: Tensor, *, compiled: bool) -> dict[str, Run]:
    q, k, table = q.requires_grad_(), k.requires_grad_(), table_for(q)
    grads = torch.randn_like(q), torch.randn_like(k)
    runs = {
        "posenc": lambda: apply_rotary_pair(q, k, table, pairing="half"),
        "posenc, reference": lambda: apply_rotary_pair(q, k, table, pairing="half", backend="reference"),
        **peers.runs(q, k, compiled=compiled),
    }
    keep = ("posenc", "posenc, reference", "transformers", "transformers, compiled", "rotary-embedding-torch")

    def both(run: Run) -> Run:
        return lambda: torch.autograd.grad(run(), (q, k), grads)

    return {name: both(run) for name, run in runs.items() if name in keep}


def one_token_runs(peers: Peers, dtype: torch.dtype) -> dict[str, Run]:
    q, k = (torch.randn(shape).to(dtype) for shape in ONE_TOKEN)
    table = table_for(q)
    return {
        "clone": lambda: (q.clone(), k.clone()),
        "posenc": lambda: apply_rotary_pair(q, k, table, pairing="half"),
        "posenc, in place": lambda: (apply_rotary_(q, table, pairing="half"), apply_rotary_(k, table, pairing="half")),
        "posenc, reference": lambda: apply_rotary_pair(q, k, table, pairing="half", backend="reference"),
        **peers.runs(q, k, compiled=False),
    }


def layers_runs(peers: Peers) -> dict[str, Run]:
    """One decode step of a model: the table once, then every layer's q and k."""
    q, k = (torch.randn(shape) for shape in ONE_TOKEN)
    rope, at = RoPE(ONE_TOKEN[0][-1]), torch.tensor([[1000]])

    def ours() -> None:
        prepared = rope.prepare(at)
        for _ in range(LAYERS):
            rope.transform(q, k, prepared)

    runs: dict[str, Run] = {"posenc": ours}
    if peers.hf is not None:
        from transformers import LlamaConfig

        config = LlamaConfig(
            hidden_size=4096, num_attention_heads=32, rope_parameters={"rope_type": "default", "rope_theta": BASE}
        )
        module, apply = peers.hf.LlamaRotaryEmbedding(config), peers.hf.apply_rotary_pos_emb

        def theirs() -> None:
            cos, sin = module(q, at)
            for _ in range(LAYERS):
                apply(q, k, cos, sin)

        runs["transformers"] = theirs
    return runs


def table_runs(peers: Peers) -> dict[str, Run]:
    at, frequencies = torch.arange(4096)[None], Geometric(BASE).frequencies(128)
    runs: dict[str, Run] = {
        "posenc, float64 angles": lambda: rotary_table(at, frequencies),
        "posenc, float32 angles": lambda: rotary_table(at, Geometric(BASE).frequencies(128, dtype=torch.float32)),
    }
    if peers.hf is not None:
        from transformers import LlamaConfig

        module = peers.hf.LlamaRotaryEmbedding(LlamaConfig(hidden_size=4096, num_attention_heads=32))
        x = torch.zeros(1)
        runs["transformers"] = lambda: module(x, at)
    return runs


def plot(path: Path, sections: dict[str, Any]) -> None:
    """Bars of the large shape, as multiples of a copy; a light bar for what is not posenc."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for panel, dtype in zip(panels, ("float32", "bfloat16"), strict=True):
        rows = {
            n: r for n, r in sections[f"forward {BIG} {dtype}"].items() if n not in ("copy_, warm buffers", "posenc, reference")
        }
        names = sorted(rows, key=lambda name: -rows[name]["ratio"])
        ratios = [rows[name]["ratio"] for name in names]
        colours = ["#0b6e4f" if n.startswith("posenc") else "#333333" if n == "clone" else "#b8c4bb" for n in names]
        bars = panel.barh(names, ratios, color=colours)
        room = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # before the line of clone
        panel.bar_label(bars, [f"{ratio:.2f}×" for ratio in ratios], padding=3, fontsize=9, bbox=room)
        panel.set_xlim(0, max(ratios) * 1.15)
        panel.set_title(f"{dtype}, q and k of {BIG}", fontsize=10, loc="left")
        panel.set_xlabel("time, as a multiple of clone()")
        panel.axvline(1, color="#333333", linewidth=0.8, zorder=0)
        panel.spines[["top", "right"]].set_visible(False)
    temporary = path.with_suffix(f".new{path.suffix}")
    figure.savefig(temporary, dpi=150)
    temporary.replace(path)


@click.command()
@click.option("--rounds", default=15, show_default=True, help="Rounds of each section.")
@click.option("--quick", is_flag=True, help="Three rounds, the large shape only.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the result here, as JSON.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Draw the large shape here.")
def main(rounds: int, quick: bool, out: Path | None, picture: Path | None) -> None:
    """Time rotation beside torch's own copies and other libraries."""
    rounds = 3 if quick else rounds
    torch.manual_seed(0)
    peers, console = Peers(), Console()
    sections: dict[str, Seconds] = {}
    makers: list[tuple[str, Callable[[], dict[str, Run]], int]] = []
    for shape, (q_shape, k_shape) in SHAPES.items():
        for name, dtype in DTYPES.items():
            if quick and (shape != BIG or name == "float64"):
                continue

            def pair(q_shape: Any = q_shape, k_shape: Any = k_shape, dtype: Any = dtype) -> tuple[Tensor, Tensor]:
                return torch.randn(q_shape).to(dtype), torch.randn(k_shape).to(dtype)

            fused = q_shape == k_shape
            repeats = 1 if shape != "4×8×512×64" else 4
            makers.append((f"forward {shape} {name}", lambda p=pair, f=fused: forward_runs(peers, *p(), compiled=f), repeats))
            if name in ("float32", "bfloat16"):
                makers.append(
                    (
                        f"forward+backward {shape} {name}",
                        lambda p=pair, f=fused: backward_runs(peers, *p(), compiled=f),
                        repeats,
                    )
                )
    makers += [(f"one token {name}", lambda d=dtype: one_token_runs(peers, d), 200) for name, dtype in list(DTYPES.items())[:2]]
    makers.append((f"one token, {LAYERS} layers, tables included", lambda: layers_runs(peers), 10))
    makers.append(("table of 4096 tokens, 64 pairs", lambda: table_runs(peers), 4))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(makers))
        for title, make, repeats in makers:
            progress.update(task, description=title)
            sections[title] = measure(make(), rounds, repeats)
            progress.advance(task)
    shown = {title: summary(seconds) for title, seconds in sections.items()}
    for title, rows in shown.items():
        show(console, title, rows)
    verdicts = judged(TARGETS, sections)
    show_targets(console, verdicts)
    for name, reason in peers.missing.items():
        console.print(f"{name} is left out: {reason}", markup=False, highlight=False)
    if out is not None:
        here = environment(("transformers", "rotary-embedding-torch", "x-transformers", "torchtune"))
        here["kernel"] = native.refusal() or native.threads()
        found = {"rounds": rounds, "environment": here, "missing": peers.missing, "targets": verdicts, "sections": shown}
        write(out, "posenc.benchmark.rotary/1", "benchmarks/rotary.py", found)
    if picture is not None:
        plot(picture, shown)


if __name__ == "__main__":
    main()
