"""Exports strips as SVG, as PNG with the extra `flexinspect[png]`, or as an HTML page.

Rich's own export writes block characters as letters, which leaves seams between lines, and squeezes
wide characters into one cell. Here a cell is 8 by 16 pixels, and block and line characters are
rectangles of whole pixels, so that a heat map has no seams. Text uses a monospace font of the
reader's machine; the file refers to no external resource.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from msgspec import Struct, field
from rich.cells import cell_len
from rich.color import Color, blend_rgb
from rich.style import Style
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, TerminalTheme
from textual.strip import Strip

from flexinspect.core.environment import require_library, save_file
from flexinspect.core.errors import OutputFileError, UsageError
from flexinspect.drawing.text_lines import line
from flexinspect.drawing.theme import Theme

CELL_WIDTH, CELL_HEIGHT = 8, 16
"""Pixels of a cell; eighths of it are whole numbers."""

MARGIN = 12
ZOOM = 2.0
"""Pixels of a PNG per pixel of its SVG, enough for a page in print."""

_FONT_SIZE = 13.3  # 0.6 em, the advance of nearly every monospace font, is a cell
_BASELINE = 12.5
_FONT_FAMILIES = "'DejaVu Sans Mono','Fira Code',Menlo,Consolas,'Liberation Mono',monospace"

_CONTROL_SYMBOLS = str.maketrans("␤␊␍␉", "↵↵⇤⇥")
"""Replacements for a PNG: few monospace fonts have the control pictures, and unlike a browser the
PNG renderer does not fall back to another font."""

Area = tuple[int, int, int, int]
"""Left, top, width and height in pixels of a cell."""


_QUARTERS: Sequence[Area] = ((0, 0, 4, 8), (4, 0, 4, 8), (0, 8, 4, 8), (4, 8, 4, 8))
_ARMS: Mapping[str, Area] = dict(
    zip("lrud", ((0, 7, 4, 1), (3, 7, 5, 1), (3, 0, 1, 8), (3, 7, 1, 9)), strict=True)
)
_QUADRANTS = ((2,), (3,), (0,), (0, 2, 3), (0, 3), (0, 1, 2), (0, 1, 3), (1,), (1, 2), (1, 2, 3))
_LINES = zip(
    ("─", "│", "┌╭", "┐╮", "└╰", "┘╯", "├", "┤", "┬", "┴", "┼"),
    ("lr", "ud", "rd", "ld", "ur", "ul", "udr", "udl", "lrd", "lru", "lrud"),
    strict=True,
)
_AREAS: Mapping[str, tuple[Area, ...]] = {
    "▀": ((0, 0, 8, 8),),
    "▐": ((4, 0, 4, 16),),
    "▔": ((0, 0, 8, 2),),
    "▕": ((7, 0, 1, 16),),
    **{char: ((0, 16 - 2 * n, 8, 2 * n),) for n, char in enumerate("▁▂▃▄▅▆▇█", start=1)},
    **{char: ((0, 0, n, 16),) for n, char in enumerate("▏▎▍▌▋▊▉", start=1)},
    **{
        char: tuple(_QUARTERS[number] for number in numbers)
        for char, numbers in zip("▖▗▘▙▚▛▜▝▞▟", _QUADRANTS, strict=True)
    },
    **{char: tuple(_ARMS[arm] for arm in arms) for chars, arms in _LINES for char in chars},
}
"""The rectangles of each block and line character (Unicode "Block Elements")."""

_SHADES = {"░": 0.25, "▒": 0.5, "▓": 0.75}


def save(
    path: str | Path, strips: Sequence[Strip], *, title: str, theme: Theme, note: str = ""
) -> Path:
    """Write a picture as SVG or PNG, by the suffix of `path`, and return its path.

    The file is replaced atomically. Raises `UsageError` for another suffix, and
    `FlexInspectError` when the PNG cannot be rendered or the file cannot be written.
    """
    target = Path(path)
    ending = target.suffix.lower()
    if ending not in (".svg", ".png"):
        raise UsageError(f"{target} is neither SVG nor PNG.", hint="Name a file .svg or .png.")
    svg = to_svg(strips, title=title, look=theme, note=note)
    data = to_png(svg) if ending == ".png" else svg.encode()
    save_file(target, data)
    return target


class PagePart(NamedTuple):
    """A picture of a page, and lines of text below it."""

    title: str
    strips: Sequence[Strip]
    lines: Sequence[str] = ()


def save_page(path: Path, parts: Sequence[PagePart], *, title: str, theme: Theme) -> None:
    """Write pictures and texts as one HTML page that refers to no other file.

    Raises `FlexInspectError` when the file cannot be written.
    """
    colors = f"color:{theme.colors['foreground']};background:{theme.colors['background']}"
    body = "".join(
        f"<section>{to_svg(part.strips, title=part.title, look=theme)}"
        f"<pre>{escape(chr(10).join(map(_printable, part.lines)))}</pre></section>"
        for part in parts
    )
    style = f"body{{{colors};margin:2em}}pre{{white-space:pre-wrap}}svg{{max-width:100%}}"
    save_file(path, html_page(_printable(title), style, body).encode())


def html_page(title: str, style: str, body: str, *, language: str = "en") -> str:
    """Return a page that refers to no other file; `style` and `body` are CSS and HTML."""
    return (
        f'<!DOCTYPE html>\n<html lang="{escape(language)}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def to_svg(strips: Sequence[Strip], *, title: str, look: Theme, note: str = "") -> str:
    """Return the strips as an SVG, with `title` above and `note` below them.

    The same strips give the same bytes. The SVG refers to no other file, and the text of the
    strips is escaped.
    """
    title, note = _printable(title), _printable(note)
    width = max([strip.cell_length for strip in strips] or [cell_len(title), 1])
    rows = [line([(title, look.style("title"))], width), Strip([], 0), *strips]
    if note:
        rows += [Strip([], 0), line([(note, look.style("muted"))], width)]
    theme = _terminal_theme(look.colors["foreground"], look.colors["background"])
    drawing = _Drawing(theme.foreground_color.hex, theme.background_color.hex)
    for y, strip in enumerate(rows):
        _draw_row(drawing, strip, y)
    return _svg_document(drawing, (width * CELL_WIDTH, len(rows) * CELL_HEIGHT), title)


def to_png(svg: str, *, zoom: float = ZOOM) -> bytes:
    """Render an SVG of `to_svg` as a PNG, `zoom` times as large.

    Raises `FlexInspectError` when the extra is not installed, no monospace font is found or the
    renderer fails.
    """
    resvg_py = require_library("resvg_py", "png", "A PNG file (SVG does not)")
    font = find_monospace()
    if font is None:
        raise OutputFileError(
            "A PNG needs a monospace font, and no known one was found on this machine.",
            hint="Install one (Debian: apt-get install fonts-dejavu-core), or save as .svg.",
        )
    family, files = font
    svg = svg.replace(_FONT_FAMILIES, f"'{family}'").translate(_CONTROL_SYMBOLS)
    render = partial(resvg_py.svg_to_bytes, font_family=family, monospace_family=family)
    try:
        return bytes(render(svg_string=svg, zoom=zoom, font_files=[*files]))
    except ValueError as error:
        raise OutputFileError(
            f"The PNG could not be rendered: {error}.", hint="Save the picture as .svg instead."
        ) from error


_NO_BREAK_SPACE = "\xa0"


class _CellStyle(NamedTuple):
    """The style of a run of cells, as values of SVG attributes."""

    foreground: str
    background: str
    attributes: str


class _Drawing(Struct):
    """The colours of a picture, and its layers from back to front: backgrounds, areas, texts."""

    foreground: str
    background: str
    backs: dict[str, list[str]] = field(default_factory=dict)
    areas: dict[str, list[str]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def back(self, fill: str, x: int, y: int, n_cells: int) -> None:
        if fill != self.background:
            area = (x * CELL_WIDTH, y * CELL_HEIGHT, n_cells * CELL_WIDTH, CELL_HEIGHT)
            self.backs.setdefault(fill, []).append(_rectangle_path(area))

    def area(self, fill: str, x: int, y: int, area: Area, times: int) -> None:
        left, top, width, height = area
        if width == CELL_WIDTH:
            width, times = width * times, 1
        self.areas.setdefault(fill, []).extend(
            _rectangle_path(((x + n) * CELL_WIDTH + left, y * CELL_HEIGHT + top, width, height))
            for n in range(times)
        )

    def text(self, text: str, style: _CellStyle, x: int, y: int) -> None:
        # Each word has its own place: some renderers ignore `textLength`, or blanks.
        pattern = ".+" if "underline" in style.attributes else "[^ ]+"  # blanks are underlined
        for word in re.finditer(pattern, text):
            left = x + cell_len(text[: word.start()])
            self.texts.append(
                f'<text x="{left * CELL_WIDTH}" y="{y * CELL_HEIGHT + _BASELINE}" '
                f'textLength="{cell_len(word[0]) * CELL_WIDTH}" '
                f'fill="{style.foreground}"{style.attributes}>'
                f"{escape(word[0].replace(' ', _NO_BREAK_SPACE))}</text>"
            )


def _rectangle_path(area: Area) -> str:
    x, y, width, height = area
    return f"M{x} {y}h{width}v{height}h-{width}z"


def _draw_row(drawing: _Drawing, strip: Strip, y: int) -> None:
    x = 0
    segments = (segment for segment in strip if segment.text and not segment.control)
    for style, group in groupby(segments, key=lambda segment: segment.style or Style.null()):
        text = _printable("".join(segment.text for segment in group))
        cell_style = _cell_style(style, drawing.foreground, drawing.background)
        drawing.back(cell_style.background, x, y, cell_len(text))
        for piece in _split_pieces(text):
            char = piece[0]
            if char in _AREAS:
                for area in _AREAS[char]:
                    drawing.area(cell_style.foreground, x, y, area, len(piece))
            elif char in _SHADES:
                color = _mix_colors(cell_style.background, cell_style.foreground, _SHADES[char])
                drawing.area(color, x, y, (0, 0, CELL_WIDTH, CELL_HEIGHT), len(piece))
            else:
                drawing.text(piece, cell_style, x, y)
            x += cell_len(piece)


def _split_pieces(text: str) -> list[str]:
    """Return runs of one block character, single wide characters, and runs of narrow text.

    A zero-width mark belongs to the character before it; after a block it is left out.
    """
    pieces: list[str] = []
    last = None
    for char in text:
        width = cell_len(char)
        kind = char if char in _AREAS or char in _SHADES else width
        if pieces and not width and isinstance(last, str):  # blocks are drawn, not marked
            continue
        if pieces and (not width or (kind == last and kind != 2)):
            pieces[-1] += char
        else:
            pieces.append(char)
        last = kind if width else last
    return pieces


def _printable(text: str) -> str:
    """Replace characters that XML forbids or no font shows; panels escape theirs before this."""
    return "".join(char if char.isprintable() else "�" for char in text)


@lru_cache(maxsize=4096)
def _cell_style(style: Style, fore: str, back: str) -> _CellStyle:
    theme = _terminal_theme(fore, back)
    foreground = (style.color or Color.default()).get_truecolor(theme).hex
    background = (style.bgcolor or Color.default()).get_truecolor(theme, foreground=False).hex
    if style.reverse:
        foreground, background = background, foreground
    if style.dim:
        foreground = _mix_colors(foreground, background, 0.5)
    attributes = ' font-weight="bold"' if style.bold else ""
    attributes += ' font-style="italic"' if style.italic else ""
    lines = ["underline"] * bool(style.underline) + ["line-through"] * bool(style.strike)
    attributes += f' text-decoration="{" ".join(lines)}"' if lines else ""
    return _CellStyle(foreground, background, attributes)


@lru_cache(maxsize=16)
def _terminal_theme(fore: str, back: str) -> TerminalTheme:
    """Return the terminal theme of a picture; its 16 ANSI colours are Rich's default ones."""
    theme = TerminalTheme(Color.parse(back).get_truecolor(), Color.parse(fore).get_truecolor(), [])
    theme.ansi_colors = DEFAULT_TERMINAL_THEME.ansi_colors
    return theme


def _mix_colors(first: str, second: str, share: float) -> str:
    """Blend two colours; `share` is that of `second`."""
    low, high = (Color.parse(color).get_truecolor() for color in (first, second))
    return blend_rgb(low, high, share).hex


def _svg_document(drawing: _Drawing, size: tuple[int, int], title: str) -> str:
    width, height = size[0] + 2 * MARGIN, size[1] + 2 * MARGIN
    fills = (*drawing.backs.items(), *drawing.areas.items())
    layers = [f'<path fill="{fill}" d="{"".join(paths)}"/>' for fill, paths in fills]
    border_color = _mix_colors(drawing.background, drawing.foreground, 0.25)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" '
        f'fill="{drawing.background}" stroke="{border_color}"/>\n'
        f'<g transform="translate({MARGIN} {MARGIN})" font-family="{_FONT_FAMILIES}" '
        f'font-size="{_FONT_SIZE}" xml:space="preserve">\n<g shape-rendering="crispEdges">'
    )
    return "\n".join([head, *layers, "</g>", *drawing.texts, "</g>", "</svg>\n"])


_FONTS = dict(
    pair.strip().split(" = ")
    for pair in """dejavusansmono = DejaVu Sans Mono
        menlo = Menlo
        consola = Consolas
        cascadiamono = Cascadia Mono
        firacode-regular = Fira Code
        hack-regular = Hack
        jetbrainsmono-regular = JetBrains Mono
        liberationmono-regular = Liberation Mono
        notosansmono-regular = Noto Sans Mono
        ubuntumono-r = Ubuntu Mono
        freemono = FreeMono
        monaco = Monaco
        lucon = Lucida Console
        cour = Courier New""".splitlines()
)
"""File stems of monospace fonts, in lower case, and their families; the best first."""


@lru_cache(maxsize=1)
def find_monospace() -> tuple[str, tuple[str, ...]] | None:
    """Return the family and the files of the best known monospace font, None without any.

    The renderer silently omits all text of a family that is not installed.
    """
    files: dict[str, Path] = {}
    for folder in _font_folders():
        for file in folder.rglob("*"):
            if file.suffix.lower() in (".ttf", ".otf", ".ttc"):
                files.setdefault(file.stem.lower(), file)
    for stem, family in _FONTS.items():
        if stem in files:
            file = files[stem]
            return family, tuple(sorted(map(str, file.parent.glob(file.stem.split("-")[0] + "*"))))
    return None


def _font_folders() -> Iterator[Path]:
    """Yield the font folders of Linux, macOS and Windows, and those of Python packages last."""
    with suppress(RuntimeError):  # the user has no home folder
        home = Path.home()
        yield from (home / ".local/share/fonts", home / ".fonts", home / "Library/Fonts")
    for name in ("/usr/share/fonts", "/usr/local/share/fonts"):
        yield Path(name)
    yield from (Path("/System/Library/Fonts"), Path("/Library/Fonts"))
    for variable, inside in (("WINDIR", "Fonts"), ("LOCALAPPDATA", "Microsoft/Windows/Fonts")):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / inside
    yield Path(sys.prefix) / "fonts"
    package = importlib.util.find_spec("matplotlib")
    if package is not None and package.origin:
        yield Path(package.origin).parent / "mpl-data/fonts/ttf"
