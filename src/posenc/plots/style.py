"""How all pictures look, and how they become files. Nothing here outlives the picture: no pyplot, no changed settings."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from posenc.errors import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
SIGNED, MAGNITUDE = "RdBu_r", "viridis"  # both readable without telling red from green
BLUE, VERMILION, GREEN, ORANGE, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "0.45"

_WIDTH = 6.8  # inches; 1020 pixels at 150 dots
_SETTINGS = {
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "image.interpolation": "nearest",
    "svg.hashsalt": "posenc",  # the same picture is the same file
}
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}

P = ParamSpec("P")


@contextmanager
def _style() -> Iterator[None]:
    require("matplotlib", "plot")
    from matplotlib import style

    with style.context(["default", _SETTINGS]):  # a reader's own matplotlibrc changes nothing
        yield


def in_style(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """A function that draws a figure, with posenc's look."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _style():
            return draw(*args, **kwargs)

    return drawn


def new_figure(height: float) -> Figure:
    """An empty figure of a README's width, its height in inches, that lays itself out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(wspace=0.06)
    return figure


def colour_bar(figure: Any, image: Any, axes: Any, label: str, **kwargs: Any) -> None:
    """What the colours of an image mean."""
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, aspect=35, **kwargs)
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=7.5)


def render(figure: Figure, kind: str) -> bytes:
    """A figure as the bytes of a file; the same figure gives the same bytes.

    Args:
        kind: ``"png"``, ``"svg"`` or ``"pdf"``.
    """
    buffer = io.BytesIO()
    with _style():
        figure.savefig(buffer, format=kind, metadata=_METADATA[kind])
    return buffer.getvalue()


def check_picture(path: Path) -> str:
    """The format that a file name asks for; refuses, before any work, a picture that could not be written later.

    Raises:
        ImportError: matplotlib is not installed. ValueError: another format. OSError: no such folder, or not writable.
    """
    require("matplotlib", "plot")
    kind = path.suffix[1:].lower()
    if kind not in FORMATS:
        raise ValueError(f"plot: --out {path}. Expected a name ending in {', '.join('.' + f for f in FORMATS)}. Choose one.")
    if path.is_dir():
        raise OSError(f"plot: --out {str(path)!r} is a folder. Expected a place for a file. Add a name.")
    if not path.parent.is_dir():
        raise OSError(f"plot: --out {path}: there is no folder {str(path.parent)!r}. Expected one. Make it first.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OSError(
            f"plot: --out {path} cannot be written ({error.strerror or error}). Expected a folder that this user may write. "
            "Choose another path."
        ) from error
    return kind


def write_picture(figure: Figure, path: Path) -> None:
    """Write a picture under a temporary name and rename it, so that a reader never meets half of one."""
    content = render(figure, check_picture(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"plot: --out {path} cannot be written ({error.strerror or error}). Expected a writable place with room. "
            "Choose another path."
        ) from error
