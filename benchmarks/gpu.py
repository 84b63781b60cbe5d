"""The Triton kernel on a CUDA GPU: first whether it is right, then how long it takes beside torch's own copies and others.

    python benchmarks/gpu.py                   writes docs/results/rotary-gpu.json
    python benchmarks/gpu.py --quick           the large shape in bfloat16, few rounds
    python benchmarks/gpu.py --dry-run         no GPU: the same code on tiny tensors, under Triton's interpreter

Not yet run on a GPU. Errors are measured against the rotation in float64, as parts of what the arithmetic is allowed: two
roundings of float32, and one more to a 16-bit dtype. Contestants are timed in turn, as side_by_side.py says. Peers that
are not installed, or that fail, are left out and named. Exit code 1 when a check fails, 2 without CUDA.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from side_by_side import Run, Seconds, imported, in_turn, versions, write
from side_by_side import summary as medians
from torch import Tensor

from posenc import Geometric, MRoPE, RotaryTable, apply_rotary, apply_rotary_pair, axis_of_pair, packed, rotary_table

RESULT = Path(__file__).parents[1] / "docs" / "results" / "rotary-gpu.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BIG = "1×32×4096×128"
SHAPES = {
    BIG: ((1, 32, 4096, 128), (1, 32, 4096, 128)),
    "4×8×512×64": ((4, 8, 512, 64), (4, 8, 512, 64)),
    "1×32/8×4096×128": ((1, 32, 4096, 128), (1, 8, 4096, 128)),
    "1×32×1×128": ((1, 32, 1, 128), (1, 32, 1, 128)),
    "1×32/8×1×128": ((1, 32, 1, 128), (1, 8, 1, 128)),
}
TINY = {"1×2/1×3×8": ((1, 2, 3, 8), (1, 1, 3, 8))}
ROUNDING = {torch.float32: 0.0, torch.float64: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""The relative error of storing a float32 result, half a unit in the last place."""
GRAPH_CALLS = 20
PACKAGES = ("triton", "transformers", "liger-kernel", "flash-attn")


class Failed(Exception):
    """A check that did not hold, in words."""


# --- whether it is right ------------------------------------------------------------------------------------------------


def turned(x: Tensor, table: tuple[Tensor, Tensor], pairing: Any, first: int) -> Tensor:
    """The rotation in float64, by the arithmetic that defines it."""
    wide = RotaryTable(table[0].double(), table[1].double())
    return apply_rotary(x.double(), wide, pairing=pairing, start=first, backend="reference")


def worst(result: Tensor, x: Tensor, table: tuple[Tensor, Tensor], pairing: Any, first: int = 0) -> float:
    """The largest error, as a part of what is allowed: at most 1."""
    cos, sin = table
    truth, pairs = turned(x, table, pairing, first), cos.shape[-1]
    sums = (turned(x.abs(), (cos.abs(), sign * sin.abs()), pairing, first) for sign in (1, -1))
    size = torch.maximum(*sums)  # |a·cos| + |b·sin|, in whichever of the two no sign is against it
    unit = 2.0**-51 if x.dtype == torch.float64 else 2.0**-23 * (1 + 2.0**-20)  # in float64 the truth has errors of its own
    rounding = ROUNDING[x.dtype]
    if x.dtype == torch.bfloat16 and not x.is_cuda:
        rounding *= 2  # Triton's interpreter cuts off where a GPU rounds
    allowed = size * unit + (truth.abs() + size * unit) * rounding + torch.finfo(x.dtype).smallest_normal * 2.0**-8
    turning = slice(first, first + 2 * pairs)
    others = [channel for channel in range(x.shape[-1]) if not first <= channel < first + 2 * pairs]
    if not torch.equal(result[..., others], x[..., others]):
        raise Failed("channels that do not turn are changed")
    if result.dtype != x.dtype or result.shape != x.shape:
        raise Failed(f"a result of {result.dtype} {tuple(result.shape)} for {x.dtype} {tuple(x.shape)}")
    return float(((result.double() - truth).abs() / allowed)[..., turning].amax())


def checks(kernel: Any, device: str, scale: int) -> dict[str, Callable[[], float]]:
    """Each check gives its largest error, as a part of what is allowed."""
    dice = torch.Generator(device).manual_seed(0)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=dice, device=device).to(dtype)

    def table(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        return tensor(*shape, dtype=dtype), tensor(*shape, dtype=dtype)

    seq, heads = 5 * scale + 1, 2 * scale

    def forward(dtype: torch.dtype, pairing: str) -> float:
        """Grouped heads, pairs that are no power of two, channels before and after, a table for each row, strided memory."""
        q, k = tensor(2, seq, heads, 24, dtype=dtype).transpose(1, 2), tensor(2, 1, seq, 24, dtype=dtype)
        own = table(2, seq, 5, dtype=kernel.WIDE[dtype])
        results = kernel.rotate((q, k), [own, own], pairing=pairing, first=6)
        return max(worst(result, x, own, pairing, 6) for result, x in zip(results, (q, k), strict=True))

    def whole(dtype: torch.dtype, pairing: str) -> float:
        x, own = tensor(1, heads, seq, 128 if scale > 1 else 16, dtype=dtype), table(seq, 64 if scale > 1 else 8)
        return worst(kernel.rotate((x,), [own], pairing=pairing)[0], x, own, pairing)

    def same_bits(pairing: str) -> float:
        x, own = tensor(1, heads, seq, 24), table(seq, 5)
        reference = apply_rotary(x, RotaryTable(*own), pairing=pairing, start=6, backend="reference")
        if not torch.equal(kernel.rotate((x,), [own], pairing=pairing, first=6)[0], reference):
            raise Failed("float32 differs from the reference in its last bits: is multiply-add fused?")
        return 0.0

    def backward(dtype: torch.dtype, pairing: str) -> float:
        x, grad, own = tensor(1, heads, seq, 12, dtype=dtype), tensor(1, heads, seq, 12, dtype=dtype), table(seq, 5)
        needing = x.requires_grad_()
        (back,) = torch.autograd.grad(kernel.rotate((needing,), [own], pairing=pairing, first=1)[0], needing, grad)
        return worst(back, grad, (own[0], -own[1]), pairing, 1)

    def in_place(pairing: str) -> float:
        x, own = tensor(1, heads, seq, 12), table(seq, 5)
        before = x.clone()
        kernel.rotate((x,), [own], pairing=pairing, first=1, outs=[x])
        return worst(x, before, own, pairing, 1)

    def one_token() -> float:
        x, own = tensor(1, heads, 1, 16), table(1, 8)
        return worst(kernel.rotate((x,), [own], pairing="half")[0], x, own, "half")

    def gathered(dtype: torch.dtype, pairing: str) -> float:
        x, (cos, sin) = tensor(2, heads, seq, 12, dtype=dtype), table(50, 5)
        at = torch.randint(0, 50, (2, seq), generator=dice, device=device)
        (result,) = kernel.rotate_gathered((x,), (cos, sin), at, pairing=pairing, first=2)
        return worst(result, x, (cos[at], sin[at]), pairing, 2)

    def outside() -> float:
        x, at = tensor(1, heads, 4, 8), torch.tensor([0, -1, 9, 2**40], device=device)
        (result,) = kernel.rotate_gathered((x,), table(9, 4), at, pairing="half")
        if result.isnan().any(-1)[0, 0].tolist() != [False, True, True, True]:
            raise Failed("positions past the table give numbers")
        return 0.0

    def documents() -> float:
        x, (cos, sin) = tensor(seq, heads, 8), table(seq, 4)
        ends = torch.tensor([0, seq // 3, seq // 3, seq], device=device)
        (result,) = kernel.rotate_gathered((x,), (cos, sin), pairing="interleaved", cu_seqlens=ends, head_axis=-2)
        at = packed(ends.cpu(), seq).positions.to(device)
        return worst(result.transpose(0, 1), x.transpose(0, 1), (cos[at], sin[at]), "interleaved")

    def axes() -> float:
        x, sections = tensor(2, heads, seq, 16), (4, 2, 2)
        at = torch.randint(0, 50, (2, seq, 3), generator=dice, device=device)
        every = rotary_table(torch.arange(50, device=device), Geometric(1e6).frequencies(16))
        which = torch.tensor(axis_of_pair(sections, "interleaved"), device=device)
        (result,) = kernel.rotate_gathered((x,), every, at, pairing="half", axis_of_pair=which)
        return worst(result, x, MRoPE(16, sections, layout="interleaved").prepare(at)[0], "half")

    def past_two_billion() -> float:
        """In place, since it is 4.3 GB; only the last head is compared."""
        x, own = torch.ones(1, 4097, 4096, 128, dtype=torch.bfloat16, device=device), table(4096, 64)
        kernel.rotate((x,), [own], pairing="half", outs=[x])
        last = x[:, -1:]
        return worst(last, torch.ones_like(last), own, "half")

    every: dict[str, Callable[[], float]] = {}
    for pairing in ("half", "interleaved"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            name = f"{str(dtype).removeprefix('torch.')} {pairing}"
            every[f"forward, grouped and partial, {name}"] = lambda d=dtype, p=pairing: forward(d, p)
            if dtype != torch.float64:
                every[f"forward, all channels, {name}"] = lambda d=dtype, p=pairing: whole(d, p)
                every[f"backward, {name}"] = lambda d=dtype, p=pairing: backward(d, p)
                every[f"rows by position, {name}"] = lambda d=dtype, p=pairing: gathered(d, p)
        every[f"in place, {pairing}"] = lambda p=pairing: in_place(p)
        every[f"the reference's bits, float32 {pairing}"] = lambda p=pairing: same_bits(p)
    every |= {"one token": one_token, "positions past the table": outside, "documents": documents, "several axes": axes}
    if device == "cuda" and torch.cuda.mem_get_info()[0] > 12e9:
        every["more than 2³¹ numbers"] = past_two_billion
    return every


def check_all(kernel: Any, device: str, scale: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, check in checks(kernel, device, scale).items():
        try:
            error = check()
        except Failed as failure:
            found[name] = {"passed": False, "error": None, "says": str(failure)}
        except Exception as failure:  # a kernel that does not compile is a result, too
            found[name] = {"passed": False, "error": None, "says": f"{type(failure).__name__}: {failure}"[:500]}
        else:
            says = "" if error <= 1 else f"{error:.3g} times the error that is allowed"
            found[name] = {"passed": error <= 1, "error": round(error, 4) if error == error else None, "says": says or ""}
    return found


# --- how long it takes --------------------------------------------------------------------------------------------------


class Peers:
    """Other libraries' rotations of q and k, as far as they are installed."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        self.hf = imported("transformers", "transformers.models.llama.modeling_llama", self.missing)
        self.liger = imported("liger-kernel", "liger_kernel.transformers.rope", self.missing)
        self.flash = imported("flash-attn", "flash_attn.layers.rotary", self.missing)

    def runs(self, q: Tensor, k: Tensor, table: RotaryTable) -> dict[str, Run]:
        """Each library's way to turn q and k, its table made beforehand and in the dtype that it takes."""
        runs: dict[str, Run] = {}
        cos, sin = (torch.cat([part, part], -1)[None].to(q.dtype) for part in table)
        if self.hf is not None:
            runs["transformers"] = lambda: self.hf.apply_rotary_pos_emb(q, k, cos, sin)
        if self.liger is not None:
            runs["liger-kernel"] = lambda: self.liger.liger_rotary_pos_emb(q, k, cos, sin)
        if self.flash is not None:
            half_cos, half_sin = (part.to(q.dtype) for part in table)
            by_token = q.transpose(1, 2), k.transpose(1, 2)
            runs["flash-attn"] = lambda: [self.flash.apply_rotary_emb(x, half_cos, half_sin) for x in by_token]
        return runs


def contestants(kernel: Any, peers: Peers, q: Tensor, k: Tensor, *, backward: bool, compiled: bool) -> dict[str, Run]:
    """Named ways to turn q and k; the first is what the others are compared with."""
    seq, width = q.shape[-2:]
    if backward:
        q, k = q.requires_grad_(), k.requires_grad_()
    table = rotary_table(torch.arange(seq, device=q.device), Geometric(10_000.0).frequencies(width))
    positions = torch.arange(seq, device=q.device)
    runs: dict[str, Run] = {
        "clone": lambda: (q.clone(), k.clone()),
        "posenc": lambda: kernel.rotate((q, k), [table, table], pairing="half"),
        "posenc, interleaved": lambda: kernel.rotate((q, k), [table, table], pairing="interleaved"),
        "posenc, rows by position": lambda: kernel.rotate_gathered((q, k), table, positions, pairing="half"),
        "posenc reference": lambda: apply_rotary_pair(q, k, table, pairing="half", backend="reference"),
    }
    if q.is_cuda:
        runs["posenc, apply_rotary_pair"] = lambda: apply_rotary_pair(q, k, table, pairing="half", backend="triton")
    if compiled:
        torch.compiler.reset()  # or after a few shapes it is compiled no more
        fused = torch.compile(lambda q, k: apply_rotary_pair(q, k, table, pairing="half", backend="reference"))
        runs["posenc reference, compiled"] = lambda: fused(q, k)
    runs |= peers.runs(q, k, table)
    if backward:
        grads = torch.randn_like(q), torch.randn_like(k)
        return {name: (lambda run=run: torch.autograd.grad(tuple(run()), (q, k), grads)) for name, run in runs.items()}
    q_out, k_out, q_in, k_in = (torch.empty_like(x).copy_(x) for x in (q, k, q, k))
    runs["copy_, warm buffers"] = lambda: (q_out.copy_(q), k_out.copy_(k))
    runs["posenc, warm buffers"] = lambda: kernel.rotate((q, k), [table, table], pairing="half", outs=[q_out, k_out])
    runs["posenc, in place"] = lambda: kernel.rotate((q_in, k_in), [table, table], pairing="half", outs=[q_in, k_in])
    return runs


class Clock:
    """Seconds of one call: on a GPU with the cache swept before, of many calls in a row, or replayed from a graph."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.sweep = torch.empty(64 * 2**20 if self.cuda else 1, dtype=torch.int32, device=device)  # 256 MB, more than any L2

    def alone(self, run: Run, calls: int = 3) -> float:
        if not self.cuda:
            return self._host(run, 1)
        taken = []
        for _ in range(calls):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.sweep.zero_()
            start.record()
            run()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        return statistics.median(taken)

    def in_a_row(self, run: Run, calls: int = 100) -> float:
        """With what the host needs to launch them, which is most of it for one token."""
        if not self.cuda:
            return self._host(run, 1)
        torch.cuda.synchronize()
        taken = self._host(lambda: ([run() for _ in range(calls)], torch.cuda.synchronize()), 1)
        return taken / calls

    def _host(self, run: Run, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls


def replayed(run: Run) -> Run:
    """Some calls captured in a CUDA graph, as decoding loops do."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run() for _ in range(GRAPH_CALLS)]
    return lambda: (graph.replay(), kept)


def itself(run: Run) -> Run:
    return run


def measure(
    runs: dict[str, Run],
    ready: Callable[[Run], Run],
    time_of: Callable[[Run], float],
    rounds: int,
    missing: dict[str, str],
    title: str,
) -> Seconds:
    """Seconds of each contestant in each round; one that fails is left out and named."""
    alive = {}
    for name, run in runs.items():
        try:
            for _ in range(min(rounds, 3)):
                run()  # compile, allocate, warm up
            prepared = ready(run)
            prepared()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            missing[f"{name} ({title})"] = f"{type(error).__name__}: {error}"[:300]
        else:
            alive[name] = prepared
    return in_turn(alive, rounds, time_of)


def summary(seconds: Seconds, moved: int) -> dict[str, Any]:
    """With how many bytes of q and k went through memory in a second."""
    return {
        name: {**row, "gigabytes_per_second": round(moved / row["seconds"] / 1e9, 1)} for name, row in medians(seconds).items()
    }


@dataclass(frozen=True)
class Section:
    """Contestants, how each is made ready and timed, the bytes that one call moves, and the calls that one run is."""

    title: str
    make: Callable[[], dict[str, Run]]
    moved: int
    time_of: Callable[[Run], float]
    ready: Callable[[Run], Run] = itself
    calls: int = 1

    def result(self, rounds: int, missing: dict[str, str]) -> dict[str, Any]:
        seconds = measure(self.make(), self.ready, self.time_of, rounds, missing, self.title)
        return summary({name: [one / self.calls for one in taken] for name, taken in seconds.items()}, self.moved)


def sections(kernel: Any, peers: Peers, device: str, *, quick: bool, dry: bool) -> list[Section]:
    clock, made = Clock(device), []

    def make(shapes: Any, dtype: torch.dtype, *, backward: bool = False, by_token: bool = False) -> dict[str, Run]:
        q, k = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
        if by_token:  # as the projections of a model leave it
            q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        return contestants(kernel, peers, q, k, backward=backward, compiled=not dry)

    for shape, shapes in (TINY if dry else SHAPES).items():
        for name, dtype in DTYPES.items():
            if quick and (name != "bfloat16" or (not dry and shape not in (BIG, "1×32/8×1×128"))):
                continue
            moved = 2 * dtype.itemsize * sum(torch.Size(part).numel() for part in shapes)
            ways = partial(make, shapes, dtype)
            if shapes[0][-2] == 1:
                made.append(Section(f"one token {shape} {name}, launches included", ways, moved, clock.in_a_row))
                made.append(
                    Section(f"one token {shape} {name}, in a CUDA graph", ways, moved, clock.alone, replayed, GRAPH_CALLS)
                )
                continue
            made.append(Section(f"forward {shape} {name}", ways, moved, clock.alone))
            made.append(Section(f"forward+backward {shape} {name}", partial(ways, backward=True), 2 * moved, clock.alone))
            if shape == BIG:
                made.append(
                    Section(f"forward {shape} {name}, memory by token", partial(ways, by_token=True), moved, clock.alone)
                )
    return made


# --- what is told -------------------------------------------------------------------------------------------------------


def environment(device: str) -> dict[str, Any]:
    told: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions(PACKAGES),
        "gpu": None,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        told["gpu"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gigabytes": round(properties.total_memory / 1e9, 1),
            "processors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return told


def _driver() -> str | None:
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.split("\n")[0].strip() or None


def show_checks(console: Console, found: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Errors against float64, as a part of what is allowed", title_justify="left")
    for column in ("check", "error", ""):
        table.add_column(column, justify="right" if column == "error" else "left")
    for name, result in found.items():
        error = "" if result["error"] is None else f"{result['error']:.3f}"
        table.add_row(name, error, "passed" if result["passed"] else escape(f"FAILED: {result['says']}"))
    console.print(table)


def show(console: Console, title: str, rows: dict[str, Any]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("", "time", "GB/s", f"/ {next(iter(rows))}"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        seconds = row["seconds"]
        readable = f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
        style = "bold" if name.startswith("posenc") else ""
        table.add_row(name, readable, f"{row['gigabytes_per_second']:.0f}", f"{row['ratio']:.2f}", style=style)
    console.print(table)


@click.command()
@click.option("--rounds", default=15, show_default=True, help="Rounds of each section.")
@click.option("--quick", is_flag=True, help="Five rounds, bfloat16, the large shape and one token.")
@click.option("--dry-run", is_flag=True, help="Without a GPU: tiny tensors under Triton's interpreter; times mean nothing.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="The result file [docs/results/rotary-gpu.json; none in a dry run]."
)
def main(rounds: int, quick: bool, dry_run: bool, out: Path | None) -> None:
    """Check the Triton kernel on a CUDA GPU, then time it."""
    if not dry_run and not torch.cuda.is_available():
        click.echo(
            "benchmarks/gpu.py: no CUDA device. Expected a machine with one. Try --dry-run here, which checks without timing.",
            err=True,
        )
        sys.exit(2)
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    try:
        from posenc.kernels import triton_rotary as kernel
    except ImportError as error:
        click.echo(f"benchmarks/gpu.py: triton cannot be imported ({error}). Expected it. Run: pip install triton.", err=True)
        sys.exit(2)
    device, console = "cpu" if dry_run else "cuda", Console()
    torch.manual_seed(0)
    rounds = 1 if dry_run else 5 if quick else rounds
    result: dict[str, Any] = {
        "rounds": rounds,
        "environment": environment(device),
        "checks": check_all(kernel, device, 1 if dry_run else 20),
        "missing": {},
        "sections": {},
    }
    show_checks(console, result["checks"])
    failed = [name for name, check in result["checks"].items() if not check["passed"]]
    if not failed:
        peers = Peers()
        result["missing"] = peers.missing
        every = sections(kernel, peers, device, quick=quick, dry=dry_run)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("measuring", total=len(every))
            for section in every:
                progress.update(task, description=section.title)
                result["sections"][section.title] = section.result(rounds, peers.missing)
                progress.advance(task)
                torch.cuda.empty_cache()
        for title, rows in result["sections"].items():
            show(console, title, rows)
        for name, reason in peers.missing.items():
            console.print(f"{name} is left out: {reason}", markup=False, highlight=False)
    path = out or (None if dry_run else RESULT)
    if path is not None:
        write(path, "posenc.benchmark.rotary-gpu/1", "benchmarks/gpu.py", result)
        console.print(f"Written to {path}", highlight=False)
    if failed:
        click.echo(f"benchmarks/gpu.py: {len(failed)} checks failed, the first: {failed[0]}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
