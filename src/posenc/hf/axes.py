"""Which axis each pair reads, from a family's layout and a configuration's sections."""

from __future__ import annotations

from posenc.errors import ConfigError
from posenc.hf.families import AxesStyle
from posenc.hf.rotation import Axes


def axes_of(style: AxesStyle, rotary_dim: int, sections: tuple[int, ...], where: str, *, given: bool) -> Axes:
    """The axes of a layout over ``rotary_dim`` channels.

    Args:
        given: whether the configuration holds the sections; a class's own are taken as the class takes them.

    Raises:
        ConfigError: sections that do not sum to the pairs, or a width that does not divide over the axes.
    """
    if style.startswith("mrope"):
        return _multimodal(style, rotary_dim // 2, sections, where, given)
    return _picture(style, rotary_dim)


def _multimodal(style: AxesStyle, pairs: int, sections: tuple[int, ...], where: str, given: bool) -> Axes:
    ladder = tuple(range(pairs))
    if style == "mrope pairwise":
        return Axes(("row", "column"), tuple(i % 2 for i in ladder), ladder, 2 * pairs, "row and column alternate", text=True)
    if sum(sections) != pairs and (given or style != "mrope interleaved"):
        raise ConfigError(
            f"plan: {where or 'rope_parameters'}.mrope_section = {list(sections)}, which sums to {sum(sections)}. Expected {pairs}, one "
            "entry per pair that turns. Look at head_dim and partial_rotary_factor."
        )
    names = ("t", "h", "w") if len(sections) == 3 else tuple(f"axis {i}" for i in range(len(sections)))
    words = "/".join(map(str, sections))
    if style == "mrope chunked":
        of_pair = tuple(axis % len(names) for axis, count in enumerate(sections) for _ in range(count))
        return Axes(names, of_pair, ladder, 2 * pairs, f"chunked {words}", text=True)
    if len(sections) != 3:
        raise ConfigError(
            f"plan: {where or 'rope_parameters'}.mrope_section = {list(sections)}. Expected three sections, for time, height and width. "
            "Add the missing ones."
        )
    if style == "mrope alternating":
        turning = sections[0] + sections[1]
        of_pair = tuple((1 + i % 2) if i < turning else 0 for i in ladder)
        return Axes(names, of_pair, ladder, 2 * pairs, f"height and width alternate, then time: {words}", text=True)
    of_pair = tuple(next((axis for axis in (1, 2) if i % 3 == axis and i < 3 * sections[axis]), 0) for i in ladder)
    counted = tuple(of_pair.count(axis) for axis in range(3))
    note = "" if counted == sections else f" (comes to {'/'.join(map(str, counted))})"
    return Axes(names, of_pair, ladder, 2 * pairs, f"interleaved {words}{note}", text=True)


def _picture(style: AxesStyle, rotary_dim: int) -> Axes:
    count = 3 if style == "axial t h w" else 2
    share = rotary_dim // count // 2  # pairs per axis; channels left over do not turn
    rungs = tuple(range(share))
    rows_columns = ("row", "column")
    match style:
        case "axial t h w":
            return Axes(
                ("t", *rows_columns), (0,) * share + (1,) * share + (2,) * share, rungs * 3, 2 * share, "an equal share each"
            )
        case "axial columns first":
            return Axes(
                rows_columns, (1,) * share + (0,) * share, rungs * 2, 2 * share, "columns in the first half of the pairs"
            )
        case "columns first from one":
            words = "columns in the first half of the pairs; rows and columns count from 1"
            return Axes(rows_columns, (1,) * share + (0,) * share, rungs * 2, 2 * share, words, origin=1)
        case "axial pairwise":
            of_pair = tuple((i + 1) % 2 for i in range(2 * share))
            return Axes(rows_columns, of_pair, tuple(i // 2 for i in range(2 * share)), 2 * share, "column and row alternate")
        case "axial pairwise from one":
            of_pair = tuple(i % 2 for i in range(2 * share))
            words = "row and column alternate; both count from 1"
            return Axes(rows_columns, of_pair, tuple(i // 2 for i in range(2 * share)), 2 * share, words, origin=1)
        case "axial shared ladder":
            steps = (*range(0, 2 * share, 2), *range(1, 2 * share, 2))
            return Axes(
                rows_columns, (0,) * share + (1,) * share, steps, 4 * share, "one ladder: even rungs for rows, odd for columns"
            )
        case "axial blocks":
            return Axes(
                rows_columns, (0,) * share + (1,) * share, rungs * 2, 2 * share, "each turns channels of its own", blocks=2
            )
        case "patch centres":
            words = "patch centres from -2π to 2π: patch_centres(height, width, extent=2π)"
            return Axes(rows_columns, (0,) * share + (1,) * share, rungs * 2, 2 * share, words)
    return Axes(rows_columns, (0,) * share + (1,) * share, rungs * 2, 2 * share, "rows in the first half of the pairs")
