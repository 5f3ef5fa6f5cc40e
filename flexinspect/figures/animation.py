"""The animation of a generation: the rows of the mask appear step by step, as GIF or HTML."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.core.conversion import script_json
from flexinspect.core.environment import PACKAGE_DATA, require_library, save_file
from flexinspect.core.errors import UsageError
from flexinspect.core.languages import Labels
from flexinspect.core.text import printable
from flexinspect.figures.cell_drawing import is_dotted, join_cells
from flexinspect.figures.figure_files import check_dpi, check_figure_path
from flexinspect.figures.legend import LegendItem
from flexinspect.figures.mask_figure import FigureStyle, cells_that_fit, draw_mask_sheet
from flexinspect.figures.mask_margins import CellArea
from flexinspect.figures.sheet import (
    PAD,
    Sheet,
    base_font_size,
    figure_settings,
    new_sheet,
    typesetter,
)
from flexinspect.figures.themes import FigureTheme, mix_colors
from flexinspect.masks.mask_picture import MaskPicture
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.masks.viewport import OPEN

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = (".gif", ".html")
FRAME_MS, LAST_FRAME_MS = 500, 2500
"""Milliseconds for which a frame and the last one are shown."""

Weights = npt.NDArray[np.floating[Any]]
Progress = Callable[[int, int], None]
"""Is called with the number of frames that are done and the number of all frames."""

_TRANSPARENT = 255  # the index of the colour of a GIF that leaves a pixel as it is
_SHADES = 32  # colours of attention weights in a GIF


class AnimationStep(Struct, frozen=True):
    """One step: the rows `start <= q < stop` are computed; rows before them were before.

    `weights` is the attention of the row to each key, float (keys,), None where it is unknown.
    """

    start: int
    stop: int
    caption: str
    weights: Weights | None = None


class AnimationFrame(Struct, frozen=True):
    """A frame of the animation; `box` (left, top, right, bottom) is what differs from the last."""

    image: Image
    box: tuple[int, int, int, int]
    caption: str


def generation_steps(
    picture: MaskPicture, labels: Labels, weights: Sequence[Weights | None] | None = None
) -> tuple[AnimationStep, ...]:
    """Return the prefill as the first step, then one step per generated token.

    `weights` has the attention of the newest row of each step, the prefill first; missing ones are
    unknown. A mask without generated tokens appears row by row.
    """
    start, stop = int(picture.row_edges[0]), int(picture.row_edges[-1])
    first = picture.first_generated
    first = start + 1 if first is None else min(max(first, start + 1), stop)
    spans = [(start, first), *((row, row + 1) for row in range(first, stop))]
    steps = []
    for number, (low, high) in enumerate(spans):
        known = weights[number] if weights is not None and number < len(weights) else None
        word = printable(picture.words.get(high - 1, "").strip())
        key = "figure_step_prefill" if high - low > 1 else "figure_step_row"
        quoted = f"“{word}”" if word else ""
        caption = labels(key, step=number, rows=high - low, row=low, word=quoted).rstrip()
        steps.append(AnimationStep(low, high, caption, known))
    return tuple(steps)


def save_animation(
    picture: MaskPicture,
    path: str | Path,
    *,
    style: FigureStyle,
    steps: Sequence[AnimationStep] | None = None,
    dpi: int = 100,
    progress: Progress | None = None,
) -> Path:
    """Write the steps as GIF or as an HTML page that needs no other file; return the path.

    By default the steps are those of `generation_steps`. Memory holds a few frames and what is
    written, which is the difference between frames. The file is replaced atomically. Raises
    `UsageError` for another suffix, an impossible size, when matplotlib or pillow is missing, or
    when the file cannot be written.
    """
    target = check_figure_path(path, FORMATS)
    require_library("PIL.Image", "figures", "An animation")
    steps = generation_steps(picture, style.labels) if steps is None else steps
    if not steps:
        raise UsageError("An animation needs at least one step.")
    player = _Player(picture, style, dpi, has_weights=any(s.weights is not None for s in steps))
    frames = _reported(player.frames(steps), len(steps), progress)
    if target.suffix.lower() == ".gif":
        data = _gif(frames, player, len(steps))
    else:
        data = _page(frames, player, picture.title)
    save_file(target, data, UsageError)
    return target


def _reported(
    frames: Iterable[AnimationFrame], n_frames: int, progress: Progress | None
) -> Iterator[AnimationFrame]:
    for number, frame in enumerate(frames, start=1):
        yield frame
        if progress is not None:
            progress(number, n_frames)


# -- frames ----------------------------------------------------------------------------------------


class _Player:
    """Draws the figure twice, with all cells and with none, and composes frames of both."""

    def __init__(
        self, picture: MaskPicture, style: FigureStyle, dpi: int, *, has_weights: bool
    ) -> None:
        from PIL import Image

        self.style = style
        self.dpi = dpi
        self.picture = join_cells(picture, cells_that_fit(style.width))
        key = "figure_newest_weights" if has_weights else "figure_newest"
        newest = LegendItem(style.labels(key), "square", style.theme.newest)
        sheet, area = draw_mask_sheet(picture, style, extra_items=(newest,))
        check_dpi(sheet.figure, dpi)
        sheet.figure.set_dpi(dpi)
        self.full = Image.fromarray(_pixels(sheet))
        cells = sheet.figure.axes[1]
        for artist in (*cells.images, *cells.collections, *cells.patches):
            artist.set_visible(False)
        cells.set_facecolor(style.theme.background)
        self.empty = Image.fromarray(_pixels(sheet))
        self.rows, self.keys = _pixel_edges(area, self.picture, dpi)
        self.gap = 1 if is_dotted(self._cell(area), self.picture.states.size) else 0

    def _cell(self, area: CellArea) -> float:
        n_rows, n_keys = self.picture.states.shape
        return float(min(area.width / n_keys, area.height / n_rows))

    def frames(self, steps: Iterable[AnimationStep]) -> Iterator[AnimationFrame]:
        """Yield a frame per step; the box of the first one is the whole image."""
        from PIL import ImageChops

        drawn, last = self.empty.copy(), None
        for step in steps:
            rows = slice(*self._range(step))
            bottom = int(self.rows[rows.stop])
            box = (int(self.keys[0]), int(self.rows[0]), int(self.keys[-1]), bottom)
            drawn.paste(self.full.crop(box), box[:2])
            image = drawn.copy()
            self._light_up(image, rows, step.weights)
            changed = None if last is None else ImageChops.difference(last, image).getbbox()
            box = (0, 0, *image.size) if last is None else changed or (0, 0, 1, 1)
            last = image
            yield AnimationFrame(image, box, step.caption)

    def _range(self, step: AnimationStep) -> tuple[int, int]:
        """Return the row ranges of the picture with the rows of a step."""
        edges = self.picture.row_edges
        low = int(np.searchsorted(edges, step.start, side="right")) - 1
        return max(low, 0), min(int(np.searchsorted(edges, step.stop)), len(edges) - 1)

    def _light_up(self, image: Image, rows: slice, weights: Weights | None) -> None:
        """Colour the newest row by its attention, or its open cells, and draw a frame around it."""
        from PIL import ImageDraw

        theme, pen = self.style.theme, ImageDraw.Draw(image)
        top, bottom = int(self.rows[rows.start]), int(self.rows[rows.stop]) - 1
        if rows.stop - rows.start == 1:
            for key, color in enumerate(self._row_colors(rows.start, weights)):
                left, right = int(self.keys[key]), int(self.keys[key + 1]) - 1
                box = (left + self.gap, top + self.gap, right - self.gap, bottom - self.gap)
                if color and box[2] >= box[0]:
                    pen.rectangle((*box[:3], max(box[3], box[1])), fill=color)
        width = max(round(self.dpi / 60), 1)
        edge = (int(self.keys[0]) - width, top - width, int(self.keys[-1]) + width, bottom + width)
        pen.rectangle(edge, outline=theme.newest, width=width)

    def _row_colors(self, row: int, weights: Weights | None) -> list[str | None]:
        """Return the colour of each cell of a row, None for one that stays as it is."""
        theme, states = self.style.theme, self.picture.states[row]
        if weights is None:
            lit = {
                state: mix_colors(theme.state_color(state), theme.newest, 0.7)
                for state in range(1, OPEN + 1)
            }
            return [lit.get(int(state)) for state in states]
        shares = _range_sums(weights, self.picture.key_edges)
        shares = np.sqrt(shares / max(float(shares.max()), 1e-30))
        return [_weight_color(theme, float(share)) if share > 0 else None for share in shares]

    def caption(self, text: str) -> Image:
        """Return a strip with a caption, as wide as the frames."""
        from PIL import Image

        points = base_font_size(self.style.width)
        with figure_settings():
            type_ = typesetter((text, "…<U+>"))
            height = type_.line_height(points) + PAD
            sheet = new_sheet(self.full.width / self.dpi, height, self.style.theme, type_)
            text = type_.shorten(text, sheet.width - 2 * PAD, points)
            sheet.text(PAD, height / 2, text, points, color=self.style.theme.ink)
            sheet.figure.set_dpi(self.dpi)
            return Image.fromarray(_pixels(sheet))


def _weight_color(theme: FigureTheme, share: float) -> str:
    return mix_colors(theme.closed, theme.newest, round(share * _SHADES) / _SHADES)


def _range_sums(weights: Weights, edges: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the sum of the weights in each range of keys; keys beyond the weights have none."""
    n_keys = int(edges[-1])
    padded = np.zeros(n_keys)
    known = np.nan_to_num(np.asarray(weights, np.float64))[:n_keys]
    padded[: len(known)] = known
    sums: npt.NDArray[np.float64] = np.add.reduceat(padded, edges[:-1])
    return sums


def _pixels(sheet: Sheet) -> npt.NDArray[np.uint8]:
    """Return the drawn sheet, uint8 (height, width, 3)."""
    with figure_settings():
        sheet.figure.canvas.draw()
    pixels: Any = sheet.figure.canvas
    return np.ascontiguousarray(np.asarray(pixels.buffer_rgba())[..., :3])


def _pixel_edges(
    area: CellArea, picture: MaskPicture, dpi: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the pixels at which each row range and each key range begins, and the end."""
    n_rows, n_keys = picture.states.shape
    rows = area.top + area.height * np.arange(n_rows + 1) / n_rows
    keys = area.left + area.width * np.arange(n_keys + 1) / n_keys
    return np.rint(rows * dpi).astype(np.intp), np.rint(keys * dpi).astype(np.intp)


# -- GIF -------------------------------------------------------------------------------------------


def _gif(frames: Iterable[AnimationFrame], player: _Player, n_frames: int) -> bytes:
    """Return an animated GIF whose frames hold what changed.

    Pillow's own writer keeps all frames in memory until the last one.
    """
    palette, last = _palette(player), None
    strip_height = player.caption("").height
    size = (player.full.width, player.full.height + strip_height)
    out = bytearray(_gif_header(size, palette))
    for number, frame in enumerate(frames, start=1):
        whole = np.concatenate([np.asarray(player.caption(frame.caption)), np.asarray(frame.image)])
        changed = np.ones(whole.shape[:2], np.bool_)
        if last is not None:
            changed = (whole != last).any(axis=2)
        last = whole
        ms = LAST_FRAME_MS if number == n_frames else FRAME_MS
        out += _gif_image(whole, changed, palette, ms)
    return bytes(out) + b";"


def _gif_header(size: tuple[int, int], palette: npt.NDArray[np.uint8]) -> bytes:
    """Return the header, the global palette of 256 colours, and the request to repeat forever.

    See https://www.w3.org/Graphics/GIF/spec-gif89a.txt.
    """
    table = palette.tobytes().ljust(768, b"\0")
    repeat = b"!\xff\x0bNETSCAPE2.0\x03\x01\0\0\0"
    return b"GIF89a" + struct.pack("<HHBBB", *size, 0xF7, 0, 0) + table + repeat


def _gif_image(
    pixels: npt.NDArray[np.uint8], changed: BoolArray, palette: npt.NDArray[np.uint8], ms: int
) -> bytes:
    """Return the part of a frame that changed; other pixels in it are transparent."""
    from PIL import Image
    from PIL.GifImagePlugin import getdata

    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    if not len(rows):
        rows = columns = np.zeros(1, np.intp)
    top, left = int(rows[0]), int(columns[0])
    part = (slice(top, int(rows[-1]) + 1), slice(left, int(columns[-1]) + 1))
    image = _indexed(pixels[part], palette)
    kept = Image.fromarray(np.where(changed[part], 0, 255).astype(np.uint8))
    image.paste(_TRANSPARENT, (0, 0), kept)
    options = {"duration": ms, "disposal": 1, "transparency": _TRANSPARENT}
    return b"".join(getdata(image, (left, top), **options))


def _palette(player: _Player) -> npt.NDArray[np.uint8]:
    """Return the colours of lit cells, then the most frequent ones of the figure, (n, 3)."""
    theme = player.style.theme
    shades = [_weight_color(theme, n / _SHADES) for n in range(_SHADES + 1)]
    shades += [mix_colors(theme.state_color(n), theme.newest, 0.7) for n in range(1, OPEN + 1)]
    shades += [theme.ink, theme.muted, theme.background, theme.boundary, theme.generation]
    pixels = np.concatenate([np.asarray(player.full), np.asarray(player.empty)])
    found, counts = np.unique(_packed(pixels), return_counts=True)
    usual = _unpacked(found[np.argsort(-counts, kind="stable")])
    first = [[int(shade[at : at + 2], 16) for at in (1, 3, 5)] for shade in shades]
    palette = np.concatenate([np.array(first, np.uint8), usual])
    return palette[:_TRANSPARENT]


def _indexed(pixels: npt.NDArray[np.uint8], palette: npt.NDArray[np.uint8]) -> Image:
    """Return an image of the nearest colours; Pillow's own look-up confuses similar ones."""
    from PIL import Image

    found, places = np.unique(_packed(pixels), return_inverse=True)
    colors = _unpacked(found).astype(np.int32)
    distances = ((colors[:, None] - palette.astype(np.int32)[None]) ** 2).sum(axis=2)
    nearest = distances.argmin(axis=1).astype(np.uint8)
    return Image.fromarray(nearest[places].reshape(pixels.shape[:2]), "P")


def _packed(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Return the colours of pixels (height, width, 3) as one number each."""
    red, green, blue = (pixels[..., n].astype(np.uint32) for n in range(3))
    packed: npt.NDArray[np.uint32] = red << np.uint32(16) | green << np.uint32(8) | blue
    return packed


def _unpacked(colors: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    parts = np.stack([colors >> 16, (colors >> 8) & 255, colors & 255], axis=1)
    return parts.astype(np.uint8)


# -- HTML ------------------------------------------------------------------------------------------


def _page(frames: Iterable[AnimationFrame], player: _Player, title: str) -> bytes:
    """Return a page with the frames as PNGs of what changed, and a player."""
    theme, labels = player.style.theme, player.style.labels
    listed = [
        {
            "x": frame.box[0],
            "y": frame.box[1],
            "source": _png_source(frame.image.crop(frame.box)),
            "caption": frame.caption,
        }
        for frame in frames
    ]
    texts = {
        "language": labels.language,
        "title": printable(title),
        "width": str(player.full.width),
        "height": str(player.full.height),
        "background": theme.background,
        "ink": theme.ink,
        "muted": theme.muted,
        "accent": theme.newest,
        "picture": _png_source(player.full),
        "pace": str(FRAME_MS),
        **{name: labels(f"figure_{name}") for name in ("back", "play", "next", "place", "keys")},
    }
    page = (PACKAGE_DATA / "animation.html").read_text("utf-8")
    for name, text in texts.items():
        page = page.replace("{{" + name + "}}", escape(text, quote=True))
    scripts = {
        "play_json": labels("figure_play"),
        "pause_json": labels("figure_pause"),
        "frames": listed,
    }
    for name, value in scripts.items():
        page = page.replace("{{" + name + "}}", script_json(value))
    return page.encode()


def _png_source(image: Image) -> str:
    out = BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
