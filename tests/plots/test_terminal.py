"""Drawings in a terminal: what is shown is what is there, and what is left out is said."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from posenc.plots.terminal import RAMP, terminal_curves, terminal_heatmap


def heat(values, width=80, colour=False):
    return terminal_heatmap(values, across="position", down="channel", width=width, colour=colour)


def test_characters_stand_for_values():
    lines = heat(torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0]])).plain.splitlines()
    assert lines[0] == "0 | :+#@"
    assert lines[-1] == "scale: ' ' is -2, '@' is 2"
    assert [RAMP.index(c) for c in lines[0][3:]] == [0, 2, 5, 7, 9]  # ⌊10 · (value + 2)/4⌋, the last one 9


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits_and_says_what_is_left_out(width):
    values = torch.arange(100 * 300, dtype=torch.float64).reshape(100, 300) / 30_000
    lines = heat(values, width=width).plain.splitlines()
    assert max(map(len, lines)) <= width
    every = {40: 9, 80: 4, 120: 3}[width]  # ⌈300 / (width − 5)⌉, two digits and " |" and one to spare
    suffix = {9: "9th", 4: "4th", 3: "3rd"}[every]
    assert f"shown: every {suffix} position across, every 5th channel down scale:" in " ".join(lines)
    assert lines[1].startswith(" 5 |")
    assert len(lines[0]) == 4 + -(-300 // every)


def test_nothing_is_said_when_nothing_is_left_out():
    assert heat(torch.eye(3)).plain.splitlines()[-2] == "position across, channel down"
    assert "shown" not in heat(torch.eye(3)).plain


def test_colours_go_from_blue_through_white_to_red():
    picture = heat(torch.tensor([[-1.0, 0.0, 1.0]]), colour=True)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
    console.print(picture)
    text = console.file.getvalue()
    assert "48;2;33;102;172m" in text
    assert "48;2;247;247;247m" in text
    assert "48;2;178;24;43m" in text
    assert "0 is white" in text


def test_a_table_of_zeros():
    assert heat(torch.zeros(2, 2)).plain.splitlines()[0] == "0 |++"


def test_curves_stand_where_their_values_are():
    picture = terminal_curves(
        [0, 1, 2], {"a": [0.0, 1.0, 2.0], "b": [0.0, 0.0, 0.0]}, across="n", up="m", width=31, logarithmic=""
    )
    lines = picture.plain.splitlines()
    area = [line[10:] for line in lines[:20]]
    assert area[0] == " " * 19 + "o"
    assert area[-1][0] == "&"  # both are 0 at the left
    assert area[-1][-1] == "x"
    assert lines[0].startswith("       2 |")
    assert lines[19].startswith("       0 |")
    assert lines[20].split() == ["0", "2"]
    assert lines[21:] == ["across: n; up: m", "o a   x b   & several"]
    assert max(map(len, lines)) <= 31


def test_logarithmic_axes_leave_out_what_has_no_logarithm():
    at, values = [1.0, 10.0, 100.0, 1000.0], [1e-3, 0.0, float("nan"), 1.0]
    lines = terminal_curves(at, {"a": values}, across="n", up="m", width=80).plain.splitlines()
    assert sum(line.count("o") for line in lines[:20]) == 2
    assert lines[0].split()[0] == "1"
    assert lines[19].split()[0] == "0.001"
    assert "across: n, logarithmic; up: m, logarithmic" in lines


def test_one_point_is_enough():
    assert "o" in terminal_curves([1], {"a": [1.0]}, across="n", up="m", width=80).plain
    assert terminal_curves([1], {"a": [0.0]}, across="n", up="m", width=80).plain  # nothing to show is no failure
