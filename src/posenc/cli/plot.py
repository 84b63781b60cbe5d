"""``posenc plot``: pictures of what positions do."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

import click

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text
    from torch import Tensor

    from posenc.core.sites import Encoding
    from posenc.schedules.base import Schedule

F = TypeVar("F", bound=Callable[..., Any])


@final
class Kinds(click.Group):
    """The kinds of pictures; a wrong one is met with those that are spelled alike."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        kinds = self.list_commands(ctx)
        if args[0] in kinds or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        close = get_close_matches(args[0], kinds)
        advice = f"Did you mean {' or '.join(close)}?" if close else "Choose one."
        raise ValueError(f"plot: there is no kind {args[0]!r}. Expected one of {', '.join(kinds)}. {advice}")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Kinds"):
            formatter.write_dl([(name, command.get_short_help_str(120)) for name, command in sorted(self.commands.items())])


class Ladder(NamedTuple):
    """The frequencies that a picture is about."""

    schedule: Schedule
    rotary_dim: int
    length: int
    title: str


@click.group(cls=Kinds, subcommand_metavar="KIND [OPTIONS]")
def plot() -> None:
    """Draw what positions do, as .png, .svg or .pdf; some kinds in the terminal too.

    posenc plot KIND --help says what a kind shows and takes.
    """


def _out(required: bool = True) -> Callable[[F], F]:
    help = "Picture to write: .png, .svg or .pdf."
    return click.option("--out", type=click.Path(path_type=Path), required=required, help=help)


def _terminal(command: F) -> F:
    flag = click.option("--terminal", is_flag=True, help="Draw it in the terminal, without matplotlib.")
    return flag(_out(required=False)(command))


def _rotary(command: F) -> F:
    """Options that name a ladder of frequencies: a model's, or one of Geometric's."""
    options = [
        click.option("--config", type=click.Path(path_type=Path), help="Take a model's frequencies from its config.json."),
        click.option("--layer", type=int, help="Of this layer.  [default: the first that turns]"),
        click.option("--base", type=float, help="Base of the ladder, without --config.  [default: 10000]"),
        click.option("--rotary-dim", type=int, help="How many channels turn, without --config.  [default: 128]"),
        click.option("--length", type=int, help="Trained length in tokens.  [default: the model's, or 4096]"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@plot.command("heatmap")
@click.option("--dim", default=128, show_default=True, help="Channels.")
@click.option("--length", default=200, show_default=True, help="Positions.")
@click.option("--layout", default="concatenated", show_default=True, help="concatenated or interleaved.")
@_terminal
def heatmap(dim: int, length: int, layout: Any, out: Path | None, terminal: bool) -> None:
    """Sinusoidal codes as colours: positions across, channels up."""
    _check(out, terminal)
    import torch

    from posenc.encodings.sinusoidal import Sinusoidal

    _within("heatmap", dim=(dim, 2, 2048), length=(length, 2, 4096))
    codes = Sinusoidal(dim, layout=layout).table(torch.arange(length))
    if terminal:
        _print_heatmap(codes.T, "channel")
    if out is not None:
        from posenc.plots.tables import heatmap as picture

        _write(out, picture(codes, title=f"Sinusoidal codes, {dim} channels, {layout}"))


@plot.command("similarity")
@click.option("--dim", default=128, show_default=True, help="Channels.")
@click.option("--length", default=128, show_default=True, help="Positions.")
@_terminal
def similarity(dim: int, length: int, out: Path | None, terminal: bool) -> None:
    """How alike the sinusoidal codes of two positions are."""
    _check(out, terminal)
    import torch

    from posenc.analysis.similarity import similarity_matrix
    from posenc.encodings.sinusoidal import Sinusoidal

    _within("similarity", dim=(dim, 2, 2048), length=(length, 2, 2048))
    code = Sinusoidal(dim)
    if terminal:
        _print_heatmap(similarity_matrix(code.table(torch.arange(length)), measure="cosine"), "position")
    if out is not None:
        from posenc.plots.tables import similarity as picture

        _write(out, picture(code.inv_freq(), length, title=f"Similarity of sinusoidal codes, {dim} channels"))


@plot.command("table")
@click.argument("weights", type=click.Path(path_type=Path))
@click.option("--key", help="Name of the table in the file.  [default: its only one of two axes]")
@_terminal
def table(weights: Path, key: str | None, out: Path | None, terminal: bool) -> None:
    """A learned table and how alike its rows are. WEIGHTS is what torch.save wrote: a tensor or a state_dict."""
    _check(out, terminal)
    rows = _read_table(weights, key)
    _within("table", positions=(rows.shape[0], 2, 4096), channels=(rows.shape[1], 1, 8192))
    if terminal:
        _print_heatmap(rows.T, "channel")
    if out is not None:
        from posenc.plots.tables import learned_table

        _write(out, learned_table(rows, title=f"Learned table, {rows.shape[0]} positions"))


@plot.command("shift")
@click.option("--dim", default=32, show_default=True, help="Channels, even.")
@click.option("--position", default=4, show_default=True, help="Position to start from.")
@click.option("--by", default=5, show_default=True, help="How many tokens to move.")
@click.option("--layout", default="interleaved", show_default=True, help="concatenated or interleaved.")
@_out()
def shift(dim: int, position: int, by: int, layout: Any, out: Path) -> None:
    """One matrix moves every sinusoidal code by the same number of tokens."""
    _check(out)
    from posenc.encodings.sinusoidal import Sinusoidal

    _within("shift", dim=(dim, 2, 256), position=(position, -(10**6), 10**6), by=(by, -(10**6), 10**6))
    if dim % 2:
        raise ValueError(
            f"plot shift: --dim {dim}. Expected an even number: an odd code ends in a sine without its cosine. Add 1."
        )
    from posenc.plots.rotary import shift as picture

    _write(out, picture(Sinusoidal(dim, layout=layout), position, by))


@plot.command("rotation")
@click.option("--positions", default=10, show_default=True, help="How many positions.")
@click.option("--pairs", help="Channel pairs, with commas between.  [default: four from the faster half]")
@_rotary
@_out()
def rotation(positions: int, pairs: str | None, out: Path, **options: Any) -> None:
    """Channel pairs as clock hands, position by position."""
    _check(out)
    ladder = _ladder(**options)
    count = ladder.rotary_dim // 2
    chosen = _pairs(pairs, count) if pairs is not None else sorted({0, count // 8, count // 4, count // 2})
    _within("rotation", positions=(positions, 1, 24))
    from posenc.plots.rotary import clock_hands

    inv_freq = ladder.schedule.frequencies(ladder.rotary_dim).inv_freq
    _write(out, clock_hands(inv_freq, range(positions), chosen, title=f"Turned angle, {ladder.title}"))


@plot.command("wavelengths")
@_rotary
@_terminal
def wavelengths(out: Path | None, terminal: bool, **options: Any) -> None:
    """How many tokens each channel pair takes for a turn, against the trained length."""
    _check(out, terminal)
    from posenc.analysis.waves import wavelengths as waves_of

    ladder = _ladder(**options)
    ladders = {ladder.title: ladder.schedule}
    inner = getattr(ladder.schedule, "schedule", None)
    if inner is not None:
        ladders = {"before scaling": inner, **ladders}
    if terminal:
        curves = {name: _finite(waves_of(rule, ladder.rotary_dim)) for name, rule in ladders.items()}
        pairs = [float(pair) for pair in range(ladder.rotary_dim // 2)]
        _print_curves(pairs, curves, "channel pair", "wavelength in tokens", "y")
    if out is not None:
        from posenc.plots.rotary import wavelength_chart

        _write(out, wavelength_chart({n: r.frequencies(ladder.rotary_dim).inv_freq for n, r in ladders.items()}, ladder.length))


@plot.command("coverage")
@_rotary
@_out()
def coverage(out: Path, **options: Any) -> None:
    """Which angles each channel pair has seen within the trained length, as rings."""
    _check(out)
    from posenc.analysis.waves import angle_coverage

    ladder = _ladder(**options)
    from posenc.plots.rotary import coverage_rings

    seen = angle_coverage(ladder.schedule, ladder.rotary_dim, ladder.length)
    _write(out, coverage_rings(seen, title=f"Angles seen in training: {ladder.title}"))


@plot.command("decay")
@click.option("--limit", default=10_000, show_default=True, help="Longest distance, in tokens.")
@_rotary
@_terminal
def decay(limit: int, out: Path | None, terminal: bool, **options: Any) -> None:
    """What distance does to rotary scores of equal and of independent content."""
    _check(out, terminal)
    from posenc.analysis.decay import rotary_kernel

    _within("decay", limit=(limit, 2, 10**7))
    ladder = _ladder(**options)
    from posenc.plots.rotary import decay_curve, decay_distances

    if terminal:
        at = decay_distances(limit)
        kernel = {"mean of cosines": rotary_kernel(ladder.schedule, ladder.rotary_dim, at).tolist()}
        _print_curves(at.tolist(), kernel, "distance in tokens", "score as a share of that at distance 0", "x")
    if out is not None:
        _write(out, decay_curve(ladder.schedule, ladder.rotary_dim, limit, title=f"Rotary scores by distance: {ladder.title}"))


@plot.command("precision")
@click.option("--limit", default=2**20, show_default=True, help="Last position.")
@_rotary
@_terminal
def precision(limit: int, out: Path | None, terminal: bool, **options: Any) -> None:
    """What rounding positions, frequencies, angles or tables costs, by position."""
    _check(out, terminal)
    _within("precision", limit=(limit, 4, 10**8))
    ladder = _ladder(**options)
    from posenc.plots.precision import precision_curves, worst_errors

    if terminal:
        found = worst_errors(ladder.schedule, ladder.rotary_dim, limit)
        _print_curves(found.positions, found.errors, "position", "largest error of cos and sin", "xy")
    if out is not None:
        _write(out, precision_curves(ladder.schedule, ladder.rotary_dim, limit, title=f"What rounding costs: {ladder.title}"))


@plot.command("bias")
@click.option("--encoding", "name", default="alibi", show_default=True, help="A score encoding of the catalogue.")
@click.option("--heads", default=8, show_default=True, help="Heads.")
@click.option("--length", default=128, show_default=True, help="Tokens.")
@_out()
def bias(name: str, heads: int, length: int, out: Path) -> None:
    """A score bias by distance, head by head, and the weight it leaves when all content is alike."""
    _check(out)
    from posenc.core.sites import ScoreEncoding

    _within("bias", heads=(heads, 1, 64), length=(length, 2, 65_536))
    encoding = _named(name, heads, length)[0]
    if not isinstance(encoding, ScoreEncoding):
        raise ValueError(
            f"plot bias: --encoding {name} acts on {encoding.acts_on}. Expected one that acts on the score. Choose alibi or t5."
        )
    from posenc.plots.scores import bias_fan

    start = ", untrained" if any(True for _ in encoding.parameters()) else ""
    _write(out, bias_fan(encoding(), length, title=f"{type(encoding).__name__}, {heads} heads{start}"))


@plot.command("buckets")
@click.option("--buckets", default=32, show_default=True, help="How many there are.")
@click.option("--max-distance", default=128, show_default=True, help="From here on all distances share one.")
@_out()
def buckets(buckets: int, max_distance: int, out: Path) -> None:
    """T5's buckets of distance, a staircase."""
    _check(out)
    _within("buckets", buckets=(buckets, 4, 512), max_distance=(max_distance, 2, 65_536))
    from posenc.plots.scores import bucket_staircase

    _write(out, bucket_staircase(buckets, max_distance))


@plot.command("shuffle")
@click.option("--encoding", "name", default="rope", show_default=True, help="An encoding of the catalogue.")
@click.option("--length", default=12, show_default=True, help="Tokens.")
@_out()
def shuffle(name: str, length: int, out: Path) -> None:
    """Attention over shuffled tokens: the same without positions, another with them."""
    _check(out)
    _within("shuffle", length=(length, 3, 64))
    encodings = _named(name, 4, length, causal=False)
    if any((encoding.axes or 1) > 1 for encoding in encodings):
        raise ValueError(f"plot shuffle: --encoding {name} reads several axes. Expected one of a sequence. Choose rope.")
    from posenc.plots.scores import shuffled_attention

    _write(out, shuffled_attention({"no positions": [], type(encodings[0]).__name__: encodings}, length=length, dim=64))


def _check(out: Path | None, terminal: bool = False) -> None:
    """Refuse now what could not be written later."""
    if out is None and not terminal:
        raise ValueError("plot: nowhere to draw. Expected --out FILE or --terminal. Give one, or both.")
    if out is not None:
        from posenc.plots.style import check_picture

        check_picture(out)


def _write(out: Path, figure: Figure) -> None:
    from posenc.plots.style import write_picture

    write_picture(figure, out)
    click.echo(f"wrote {out}")


def _within(kind: str, **sizes: tuple[int, int, int]) -> None:
    for name, (value, least, most) in sizes.items():
        if not least <= value <= most:
            raise ValueError(
                f"{f'plot {kind}'.strip()}: --{name.replace('_', '-')} {value}. Expected {least:,} to {most:,}. Choose one that can be looked at."
            )


def _ladder(config: Path | None, layer: int | None, base: float | None, rotary_dim: int | None, length: int | None) -> Ladder:
    if length is not None:
        _within("", length=(length, 1, 10**9))
    if config is not None:
        for option, value in (("--base", base), ("--rotary-dim", rotary_dim)):
            if value is not None:
                raise ValueError(
                    f"plot: {option} {value:g} with --config, which says it already. Expected one of the two. Drop one."
                )
        return _of_model(config, layer, length)
    if layer is not None:
        raise ValueError(f"plot: --layer {layer} without --config. Expected a model that has layers. Give its config.json.")
    from posenc.schedules.geometric import Geometric

    base, rotary_dim = 10_000.0 if base is None else base, 128 if rotary_dim is None else rotary_dim
    _within("", rotary_dim=(rotary_dim, 2, 4096))
    schedule = Geometric(base)
    schedule.frequencies(rotary_dim)  # an odd width says so now
    return Ladder(schedule, rotary_dim, length or 4096, f"base {base:,.0f}, {rotary_dim // 2} pairs")


def _of_model(config: Path, layer: int | None, length: int | None) -> Ladder:
    from posenc.cli.main import printable
    from posenc.hf import plan
    from posenc.schedules.base import LengthRule

    found = plan(config)
    layers = found.layers
    if layer is not None and not 0 <= layer < len(layers):
        raise ValueError(f"plot: --layer {layer} of a model with {len(layers)}. Expected 0 to {len(layers) - 1}. Choose one.")
    turning = [index for index, (entry, _) in enumerate(found.runs) if entry.rotation is not None]
    if not turning:
        raise ValueError(f"plot: {config}: nothing turns in a {found.model_type!r}. Expected a rotary model. Choose another.")
    turns = (found.runs[turning[0]][0] if layer is None else layers[layer]).rotation
    if turns is None:
        raise ValueError(f"plot: --layer {layer} of {config} does not turn. Expected one that does. Leave the option away.")
    trained = length or found.trained_length or found.max_length
    if trained is None:
        raise ValueError(f"plot: {config} names no length. Expected the trained one, in tokens. Pass --length.")
    rule = turns.schedule
    schedule = rule.at(trained) if isinstance(rule, LengthRule) else rule
    width = turns.rotary_dim if turns.axes is None else turns.axes.ladder_dim
    name = printable(found.model_type) + ("" if layer is None else f", layer {layer}")
    return Ladder(schedule, width, trained, f"{name}, {width // 2} pairs")


def _pairs(text: str, count: int) -> list[int]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    bad = next((name for name in names if not (name.isdecimal() and int(name) < count)), None)
    if bad is not None or not 0 < len(names) <= 8:
        what = f"pair {bad!r}" if bad is not None else f"{len(names)} pairs"
        raise ValueError(
            f"plot rotation: {what} in --pairs {text!r}. Expected 1 to 8 of 0 to {count - 1}, with commas. Mend it."
        )
    return [int(name) for name in names]


def _named(name: str, heads: int, length: int, *, causal: bool = True) -> list[Encoding]:
    from posenc.catalog import CATALOG, load_encoding
    from posenc.core.spec import ModelShape

    if name not in CATALOG:
        close = get_close_matches(name, CATALOG)
        advice = f"Did you mean {' or '.join(close)}?" if close else "Choose one."
        raise ValueError(f"plot: --encoding {name!r} is not in the catalogue. Expected one of {', '.join(CATALOG)}. {advice}")
    import torch

    torch.manual_seed(0)  # learned ones start somewhere; the same picture each time
    shape = ModelShape(dim=64, heads=heads, kv_heads=heads, head_dim=16, layers=1, max_length=length, causal=causal)
    built = load_encoding(name).spec.build(shape)
    return [encoding.eval() for encoding in built]


def _read_table(path: Path, key: str | None) -> Tensor:
    import pickle

    import torch

    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"plot table: {path} is no file of weights. Expected what torch.save wrote, a tensor or a state_dict. Save the table alone."
        ) from error
    if isinstance(held, torch.Tensor):
        held = {"": held}
    if not isinstance(held, dict):
        raise ValueError(
            f"plot table: {path} holds a {type(held).__name__}. Expected a tensor or a state_dict. Save the table."
        )
    tables = {name: value for name, value in held.items() if isinstance(value, torch.Tensor) and value.ndim == 2}
    if key is not None:
        tables = {name: value for name, value in tables.items() if name == key}
    if len(tables) != 1:
        names = ", ".join(list(held)[:8]) or "none"
        missing = f"no table {key!r}" if key is not None else f"{len(tables)} tables"
        raise ValueError(f"plot table: {path} holds {missing}. Expected one of two axes. Pass --key; there are: {names}.")
    rows: Tensor = next(iter(tables.values())).to(torch.float64)
    if not rows.isfinite().all():
        raise ValueError(
            f"plot table: {path} holds numbers that are not finite. Expected a trained table. Look at its training."
        )
    return rows


def _finite(values: Tensor) -> list[float]:
    return [value if value < inf else float("nan") for value in values.tolist()]


def _print_heatmap(values: Tensor, down: str) -> None:
    from rich.console import Console

    from posenc.plots.terminal import terminal_heatmap

    console = Console(highlight=False)
    colour = console.color_system is not None and not console.no_color
    _print(console, terminal_heatmap(values, across="position", down=down, width=console.width, colour=colour))


def _print_curves(at: list[Any], curves: dict[str, list[float]], across: str, up: str, logarithmic: str) -> None:
    from rich.console import Console

    from posenc.plots.terminal import terminal_curves

    console = Console(highlight=False)
    picture = terminal_curves(at, curves, across=across, up=up, width=console.width, logarithmic=logarithmic)
    _print(console, picture)


def _print(console: Any, picture: Text) -> None:
    console.print(picture, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
