"""Pictures: labelled, honest in their colours, the same bytes each time, and without a trace in matplotlib's settings."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from posenc import ALiBi, Explicit, Geometric, RoPE, ShapeError, Sinusoidal, SlopeBias, T5Bias
from posenc.analysis import AngleCoverage, angle_coverage

matplotlib = pytest.importorskip("matplotlib")

from posenc.plots import precision, rotary, scores, tables  # noqa: E402
from posenc.plots.style import SIGNED, check_picture, render, write_picture  # noqa: E402

LADDER = Geometric().frequencies(32).inv_freq
PICTURES = {
    "heatmap": lambda: tables.heatmap(Sinusoidal(16).table(torch.arange(20))),
    "similarity": lambda: tables.similarity(Sinusoidal(16).inv_freq(), 20),
    "learned table": lambda: tables.learned_table(torch.randn(10, 4, generator=torch.Generator().manual_seed(1))),
    "shift": lambda: rotary.shift(Sinusoidal(8), 2, 3),
    "clock hands": lambda: rotary.clock_hands(LADDER, range(5), (0, 3)),
    "wavelengths": lambda: rotary.wavelength_chart({"one": LADDER, "two": LADDER / 4}, 64),
    "rings": lambda: rotary.coverage_rings(angle_coverage(Geometric(), 32, 64)),
    "decay": lambda: rotary.decay_curve(Geometric(), 16, 100),
    "bias": lambda: scores.bias_fan(ALiBi(4)(), 32),
    "buckets": lambda: scores.bucket_staircase(16, 64),
    "shuffle": lambda: scores.shuffled_attention({"none": [], "RoPE": [RoPE(8)]}, length=6),
    "precision": lambda: precision.precision_curves(Geometric(), 16, 256),
}


@cache
def drawn(name):
    """Drawn once for all tests that only look."""
    return PICTURES[name]()


def panels(figure):
    """The axes that show data: colour bars and legends apart."""
    return [axes for axes in figure.axes if axes.axison and axes.get_label() != "<colorbar>"]


@pytest.mark.parametrize("name", ["heatmap", "clock hands", "bias"])
def test_drawn_twice_is_the_same_file_and_leaves_no_trace(name):
    before = dict(matplotlib.rcParams)
    first, second = render(drawn(name), "svg"), render(PICTURES[name](), "svg")
    assert first == second
    assert b"<svg" in first
    assert dict(matplotlib.rcParams) == before


def test_settings_of_the_reader_change_nothing():
    once = render(tables.heatmap(torch.eye(4)), "png")
    own = {"font.size": 30, "figure.dpi": 40, "image.cmap": "jet", "axes.facecolor": "black"}
    with matplotlib.rc_context(own):
        assert render(tables.heatmap(torch.eye(4)), "png") == once
        assert matplotlib.rcParams["font.size"] == 30


def test_no_picture_needs_pyplot_and_its_global_state():
    for file in Path(precision.__file__).parent.glob("*.py"):
        assert not re.search(r"import .*pyplot|pyplot import", file.read_text(encoding="utf-8")), file


@pytest.mark.parametrize("name", PICTURES)
def test_axes_say_what_they_count(name):
    figure = drawn(name)
    assert 6.5 <= figure.get_size_inches()[0] <= 7  # 1,000 pixels at 150 dots an inch
    for axes in panels(figure):
        if axes.name == "polar":
            continue
        assert axes.get_xlabel() or not axes.xaxis.get_tick_params(which="major")["labelbottom"] or name == "shuffle", axes
    assert any(axes.get_ylabel() for axes in panels(figure)) or name in ("rings", "clock hands")
    assert any(axes.get_title(loc="left") for axes in panels(figure)) or figure.get_suptitle()


def test_signed_colours_are_centred_at_zero():
    for name in ("heatmap", "similarity", "learned table", "shift"):
        for axes in panels(drawn(name)):
            for image in axes.images:
                low, high = image.get_clim()
                assert low == -high
                assert image.get_cmap().name == SIGNED


def test_weights_have_a_scale_from_zero_and_differences_one_around_it():
    figure = drawn("shuffle")
    images = [image for axes in panels(figure) for image in axes.images]
    assert [image.get_cmap().name for image in images] == ["viridis", "viridis", SIGNED] * 2
    assert images[0].get_clim()[0] == 0
    assert images[0].get_clim() == images[4].get_clim()
    assert images[2].get_clim()[0] == -images[2].get_clim()[1]


def test_the_heatmap_shows_the_table_it_was_given():
    codes = Sinusoidal(8).table(torch.arange(5))
    image = tables.heatmap(codes).axes[0].images[0]
    assert image.get_array().tolist() == codes.T.double().tolist()


def test_a_table_of_zeros_can_be_drawn():
    assert render(tables.heatmap(torch.zeros(3, 2)), "svg")


def test_similarity_marks_where_it_rises_again():
    figure = tables.similarity(Sinusoidal(64).inv_freq(), 20)
    assert [text.get_text() for text in figure.axes[1].texts] == ["rises again\nfrom lag 5"]  # lag 6 lies above lag 5
    assert not tables.similarity(Sinusoidal(64).inv_freq(), 4).axes[1].texts


def test_the_moved_code_lies_on_the_code():
    right = drawn("shift").axes[1]
    after, moved = (line.get_ydata() for line in right.lines[2:4])
    assert max(abs(a - b) for a, b in zip(after, moved, strict=True)) < 1e-14
    assert "off by" in right.get_title(loc="left")


def test_wavelengths_are_hollow_past_the_length_and_leave_out_what_never_turns():
    figure = rotary.wavelength_chart({"one": Explicit((1.0, 0.01, 0.0)).frequencies(6).inv_freq}, 100)
    full, hollow = figure.axes[0].lines[:2]
    assert (list(full.get_xdata()), list(hollow.get_xdata())) == ([0], [1])
    assert hollow.get_markerfacecolor() == "white"
    assert "2 of 3 never complete a turn" in figure.axes[0].get_legend().get_texts()[0].get_text()


def test_rings_stop_where_training_did():
    coverage = AngleCoverage(64, (10.0, 0.25))
    figure = rotary.coverage_rings(coverage)
    arcs = figure.axes[1].patches[2:] if figure.axes[1].name == "polar" else figure.axes[0].patches[2:]
    assert [round(arc.get_width() / (2 * torch.pi), 12) for arc in arcs] == [1.0, 0.25]
    assert arcs[0].get_y() < arcs[1].get_y()  # the slowest outside
    words = " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
    assert "1 of 2 pairs never complete" in words
    assert "first short, pair 1: 0.25 turns" in words


@pytest.mark.parametrize("turns", [(3.0, 2.0), (0.5, 0.1)])
def test_rings_of_all_or_no_full_turns(turns):
    assert render(rotary.coverage_rings(AngleCoverage(8, turns)), "svg")


def test_the_fan_has_a_line_per_head_and_says_the_slope():
    figure = drawn("bias")
    assert [list(line.get_ydata())[1] for line in figure.axes[0].lines] == [-0.25, -0.0625, -1 / 64, -1 / 256]
    assert figure.axes[1].get_legend().get_texts()[0].get_text().startswith("head 0, slope 1/4: ")
    assert all(abs(sum(line.get_ydata()) - 1) < 1e-12 for line in figure.axes[1].lines)


def test_any_bias_can_be_drawn():
    assert scores.bias_fan(T5Bias(2)(), 40).axes[1].get_legend().get_texts()[0].get_text().startswith("head 0: ")
    slope = torch.tensor([0.3])
    assert ", slope 0.3: " in scores.bias_fan(SlopeBias(slope, slope), 4).axes[1].get_legend().get_texts()[0].get_text()
    assert scores.bias_fan(ALiBi(16)(), 8).axes[1].get_legend() is None  # more than can be told apart


def test_buckets_of_both_directions():
    left, right = scores.bucket_staircase(32, 128).axes
    steps = dict(zip(left.lines[0].get_xdata(), left.lines[0].get_ydata(), strict=True))
    assert [steps[d] for d in (0, 15, 16, 19, 113, 128, 150)] == [0, 15, 16, 17, 31, 31, 31]
    future = dict(zip(right.lines[1].get_xdata(), right.lines[1].get_ydata(), strict=True))
    assert (future[-1], future[-128]) == (17, 31)


def test_shuffled_weights_say_how_far_they_moved():
    titles = [axes.get_title(loc="left") for axes in panels(drawn("shuffle"))]
    assert titles[2] == "difference: none"
    assert titles[5].startswith("difference: up to 0.")


def test_worst_errors_reach_the_limit():
    found = precision.worst_errors(Geometric(), 64, 1000)
    assert found.positions == [3, 7, 15, 31, 62, 125, 250, 500, 1000]
    # two roundings of 2⁻²⁴ of an angle below 1000, as in the tests of the numbers
    assert 0 < found.errors["float32 angles"][-1] <= 1000 * 2**-23
    assert found.errors["bfloat16 positions"][-1] > 0.5


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_formats_and_their_first_bytes(tmp_path, kind):
    path = tmp_path / f"picture.{kind.upper()}"
    write_picture(drawn("buckets"), path)
    content = path.read_bytes()
    assert content.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind])
    assert content == render(drawn("buckets"), kind)
    assert b"matplotlib" not in content.lower().replace(b"http://matplotlib.org", b"") or kind != "png"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # no temporary file stays


def test_a_picture_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    figure = drawn("buckets")

    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="cannot be written .No space left on device.. Expected a writable place"):
        write_picture(figure, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda tmp: check_picture(tmp / "a.gif"), ValueError, "Expected a name ending in .png, .svg, .pdf."),
        (lambda tmp: check_picture(tmp / "a"), ValueError, "Expected a name ending in .png, .svg, .pdf."),
        (lambda tmp: check_picture(tmp / "no" / "a.png"), OSError, "there is no folder"),
        (lambda tmp: tables.heatmap(torch.ones(2, 3, 4)), ShapeError, "heatmap: codes of shape (2, 3, 4). Expected [positions"),
        (lambda tmp: tables.learned_table(torch.ones(3)), ShapeError, "learned_table: codes are (3,). Expected"),
    ],
)
def test_refusals(tmp_path, call, error, message):
    with pytest.raises(error) as caught:
        call(tmp_path)
    assert message in str(caught.value)


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"Run: pip install 'posenc\[plot\]'\."):
        tables.heatmap(torch.eye(2))
