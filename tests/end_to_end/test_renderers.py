"""An exported SVG looks the same in a browser, in librsvg and as the PNG that is exported."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.png import read_png

from flexinspect.cli.main import main
from flexinspect.drawing.picture_files import (
    CELL_HEIGHT,
    CELL_WIDTH,
    MARGIN,
    find_monospace,
    to_png,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RSVG = shutil.which("rsvg-convert")


def cells_with_text(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return which cells have more than one colour, by line and column of the picture."""
    inside = pixels[MARGIN:-MARGIN, MARGIN:-MARGIN, :3].astype(int)
    n_lines, n_columns = inside.shape[0] // CELL_HEIGHT, inside.shape[1] // CELL_WIDTH
    cells = inside.reshape(n_lines, CELL_HEIGHT, n_columns, CELL_WIDTH, 3)
    spread = cells.max(axis=(1, 3)) - cells.min(axis=(1, 3))
    found: npt.NDArray[np.bool_] = spread.max(axis=-1) > 64
    return found


def in_browser(svg: Path, size: tuple[int, int]) -> bytes:
    target = svg.with_name("browser.png")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    folder, window = (
        f"--user-data-dir={svg.parent / 'profile'}",
        f"--window-size={size[0]},{size[1]}",
    )
    command = [str(CHROMIUM), *flags, folder, window, f"--screenshot={target}", svg.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return target.read_bytes()


def in_librsvg(svg: Path) -> bytes:
    return subprocess.run([str(RSVG), str(svg)], check=True, capture_output=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.skipif(RSVG is None, reason="rsvg-convert (librsvg2-bin) is not installed")
@pytest.mark.skipif(find_monospace() is None, reason="no monospace font on this machine")
@pytest.mark.parametrize("panel", ["mask", "logits"])
def test_text_is_at_the_same_place_in_every_renderer(
    panel: str, trace: Path, tmp_path: Path
) -> None:
    svg = tmp_path / "panel.svg"
    assert main(["show", str(trace), "--panel", panel, "--export", str(svg)]) == 0
    own = read_png(to_png(svg.read_text("utf-8"), zoom=1.0))
    height, width = own.shape[:2]
    browser = read_png(in_browser(svg, (width, height + 200)))[:height, :width]
    found = [cells_with_text(pixels) for pixels in (own, browser, read_png(in_librsvg(svg)))]
    assert found[0].sum() > 100
    for other in found[1:]:
        assert (found[0] != other).mean() < 0.01
