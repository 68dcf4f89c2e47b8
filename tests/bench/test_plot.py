"""Plots and records are saved in small files, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench.plot import COLOURS, DPI, canvas, save_plot, styled
from outrider.proto.errors import ConfigError

Image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install --editable '.[bench]'")
pytest.importorskip("matplotlib", reason="needs matplotlib: pip install --editable '.[bench]'")


def lines():
    with styled():
        drawn = canvas((4, 3))
        axes = drawn.subplots()
        for number, colour in enumerate(COLOURS):
            axes.plot([0, 1], [number, number], color=colour, linewidth=6)
        drawn.draw_without_rendering()
    return drawn


def test_a_png_has_a_palette_with_every_colour_of_the_style(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lines.png"
    save_plot(lines(), path)
    with Image.open(path) as image:
        assert image.mode == "P"
        assert image.size == (4 * DPI, 3 * DPI)
        drawn = [colour for _, colour in image.convert("RGB").getcolors()]
    for colour in ("#ffffff", *COLOURS):
        wanted = tuple(bytes.fromhex(colour[1:]))
        assert min(max(abs(a - b) for a, b in zip(wanted, got, strict=True)) for got in drawn) <= 4, colour


def test_a_png_is_smaller_than_matplotlibs_own(tmp_path: Path) -> None:
    drawn, own = lines(), tmp_path / "own.png"
    drawn.savefig(own, dpi=DPI)
    save_plot(drawn, tmp_path / "lines.png")
    assert (tmp_path / "lines.png").stat().st_size < 0.7 * own.stat().st_size


def test_other_formats_are_left_to_matplotlib(tmp_path: Path) -> None:
    save_plot(lines(), tmp_path / "lines.svg")
    assert "<svg" in (tmp_path / "lines.svg").read_text(encoding="utf-8")


def test_a_png_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    path = tmp_path / "folder.png"
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot write") as caught:
        save_plot(lines(), path, "report")
    assert caught.value.field == "report"
