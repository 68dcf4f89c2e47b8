"""Style, colours and saving of all plots.

The colours are those of Okabe and Ito, which stay apart for the colour-blind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from outrider.bench.record import write
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.extras import lacking

DPI = 150
PALETTE = 32  # colours of a PNG
COLOURS = ("#7a7a7a", "#0072b2", "#d55e00", "#009e73", "#b8559b", "#b88600", "#56b4e9")
GREY, *HUES = COLOURS
INK, FAINT = "#222222", "#d9d9d9"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "lines.linewidth": 1.9,
    "lines.markersize": 5,
    "legend.frameon": False,
}


def check_drawing(field: str) -> None:
    """See that plots can be drawn; raises `ConfigError`."""
    try:
        import matplotlib  # noqa: F401, ICN001 - only whether it is there
    except ImportError as error:
        raise ConfigError(f"{lacking('bench', error.name or '')}, or leave it out", field=field) from error


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the house's style inside the `with` block."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        yield


def canvas(size_in: tuple[float, float] | None = None, layout: Any = "constrained") -> Any:
    """Return a bare matplotlib Figure: it has the Agg canvas, so no pyplot, no display, no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=size_in, layout=layout)


def save_plot(drawn: Any, path: Path, field: str = "plot") -> None:
    """Write what was drawn; a PNG gets a palette, which keeps it small. Raises `ConfigError`."""
    as_png = path.suffix.lower() == ".png"
    write(path, lambda: _save_png(drawn, path) if as_png else drawn.savefig(path, dpi=DPI), field)


def _save_png(drawn: Any, path: Path) -> None:
    from PIL import Image

    rendered = BytesIO()
    drawn.savefig(rendered, format="png", dpi=DPI)
    with Image.open(rendered) as image:
        paletted = image.convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
        paletted.save(path, format="png", optimize=True, dpi=(DPI, DPI))
