"""Pictures of what a panel draws: SVG as vectors, PNG through the extra `flexinspect[png]`.

Rich's own export writes block characters as letters, which leaves seams between lines, and squeezes
wide characters into the place of narrow ones. Here a cell is 8 by 16 pixels, and block and
line characters are areas of whole pixels, so that a heat map has no seams. Text is left to a
monospace font of the reader's machine; nothing is fetched from anywhere.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from rich.cells import cell_len
from rich.color import Color, blend_rgb
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from textual.strip import Strip

from flexinspect.core.errors import FlexInspectError, UsageError
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
"""Few monospace fonts have pictures of control characters; a PNG cannot leave that to a browser."""

Area = tuple[int, int, int, int]
"""Left, top, width and height in pixels of a cell."""


def _make_areas() -> dict[str, tuple[Area, ...]]:
    """Return the characters that are drawn as areas; see the Unicode block Block Elements."""
    found: dict[str, tuple[Area, ...]] = {
        "▀": ((0, 0, 8, 8),),
        "▐": ((4, 0, 4, 16),),
        "▔": ((0, 0, 8, 2),),
        "▕": ((7, 0, 1, 16),),
    }
    for eighths, char in enumerate("▁▂▃▄▅▆▇█", start=1):
        found[char] = ((0, 16 - 2 * eighths, 8, 2 * eighths),)
    for eighths, char in enumerate("▏▎▍▌▋▊▉", start=1):
        found[char] = ((0, 0, eighths, 16),)
    quarters: list[Area] = [(0, 0, 4, 8), (4, 0, 4, 8), (0, 8, 4, 8), (4, 8, 4, 8)]
    for char, numbers in zip("▖▗▘▙▚▛▜▝▞▟", _QUADRANTS, strict=True):
        found[char] = tuple(quarters[number] for number in numbers)
    arms: dict[str, Area] = {"l": (0, 7, 4, 1), "r": (3, 7, 5, 1), "u": (3, 0, 1, 8)}
    arms["d"] = (3, 7, 1, 9)
    for chars, which in _LINES.items():
        found |= {char: tuple(arms[arm] for arm in which) for char in chars}
    return found


_QUADRANTS = ((2,), (3,), (0,), (0, 2, 3), (0, 3), (0, 1, 2), (0, 1, 3), (1,), (1, 2), (1, 2, 3))
_LINES = dict(
    zip(
        ("─", "│", "┌╭", "┐╮", "└╰", "┘╯", "├", "┤", "┬", "┴", "┼"),
        ("lr", "ud", "rd", "ld", "ur", "ul", "udr", "udl", "lrd", "lru", "lrud"),
        strict=True,
    )
)
_AREAS = _make_areas()
_SHADES = {"░": 0.25, "▒": 0.5, "▓": 0.75}


def save(
    path: str | Path, strips: Sequence[Strip], *, title: str, theme: Theme, note: str = ""
) -> Path:
    """Write a picture as SVG or PNG, by the ending of `path`, and return where it is.

    The file is replaced whole or not at all. Raises `UsageError` for another ending and
    `FlexInspectError` when there is no way to make a PNG or the file cannot be written.
    """
    target = Path(path)
    ending = target.suffix.lower()
    if ending not in (".svg", ".png"):
        raise UsageError(f"{target} is neither SVG nor PNG.", hint="Name a file .svg or .png.")
    svg = to_svg(strips, title=title, look=theme, note=note)
    _write_atomically(target, to_png(svg) if ending == ".png" else svg.encode())
    return target


def to_svg(strips: Sequence[Strip], *, title: str, look: Theme, note: str = "") -> str:
    """Return the strips as an SVG, with `title` above and `note` below them.

    The same strips give the same bytes. It refers to nothing outside of it, and whatever the strips
    say is text, never markup.
    """
    title, note = _printable(title), _printable(note)
    width = max([strip.cell_length for strip in strips] or [cell_len(title), 1])
    rows = [line([(title, look.style("title"))], width), Strip([], 0), *strips]
    if note:
        rows += [Strip([], 0), line([(note, look.style("muted"))], width)]
    theme = _terminal_theme(look)
    drawing = _Drawing(theme.background_color.hex)
    for y, strip in enumerate(rows):
        _draw_row(drawing, strip, y, theme)
    return _svg_document(drawing, (width * CELL_WIDTH, len(rows) * CELL_HEIGHT), title, look)


def to_png(svg: str, *, zoom: float = ZOOM) -> bytes:
    """Return an SVG of `to_svg` as a PNG of `zoom` times its size.

    Raises `FlexInspectError` when the extra is not installed or no monospace font is found.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise FlexInspectError(
            "A PNG needs the package resvg-py, which is not installed.",
            hint="pip install 'flexinspect[png]', or name the file .svg, which needs nothing.",
        ) from error
    font = find_monospace()
    if font is None:
        raise FlexInspectError(
            "A PNG needs a monospace font, and none of those known was found on this machine.",
            hint="Install one (Debian: apt-get install fonts-dejavu-core), or name the file .svg.",
        )
    try:
        return bytes(
            resvg_py.svg_to_bytes(
                svg_string=svg.replace(_FONT_FAMILIES, f"'{font.family}'").translate(
                    _CONTROL_SYMBOLS
                ),
                zoom=zoom,
                font_files=list(font.files),
                font_family=font.family,
                monospace_family=font.family,
            )
        )
    except ValueError as error:
        raise FlexInspectError(
            f"The PNG could not be drawn: {error}.", hint="Name the file .svg, which needs nothing."
        ) from error


class _CellStyle(NamedTuple):
    """How a run of cells looks, as the values of SVG attributes."""

    foreground: str
    background: str
    attributes: str


@dataclass
class _Drawing:
    """What is drawn, from back to front: backgrounds, areas, texts."""

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
        where = (x * CELL_WIDTH + left, y * CELL_HEIGHT + top)
        parts = self.areas.setdefault(fill, [])
        if width == CELL_WIDTH:
            parts.append(_rectangle_path((*where, width * times, height)))
            return
        parts += [
            _rectangle_path((where[0] + n * CELL_WIDTH, where[1], width, height))
            for n in range(times)
        ]

    def text(self, text: str, style: _CellStyle, x: int, y: int) -> None:
        if (
            "underline" not in style.attributes
        ):  # blanks matter only where there is a line below them
            x += len(text) - len(text.lstrip(" "))
            text = text.strip(" ")
        if text:
            length = cell_len(text) * CELL_WIDTH
            self.texts.append(
                f'<text x="{x * CELL_WIDTH}" y="{y * CELL_HEIGHT + _BASELINE}" '
                f'textLength="{length}" fill="{style.foreground}"{style.attributes}>{escape(text)}</text>'
            )


def _rectangle_path(area: Area) -> str:
    x, y, width, height = area
    return f"M{x} {y}h{width}v{height}h-{width}z"


def _draw_row(drawing: _Drawing, strip: Strip, y: int, theme: TerminalTheme) -> None:
    """Draw one row of cells."""
    x = 0
    for style, text in _style_runs(strip):
        ink = _cell_style(style, theme)
        n_cells = cell_len(text)
        drawing.back(ink.background, x, y, n_cells)
        for piece in _split_pieces(text):
            _draw_piece(drawing, piece, ink, x, y)
            x += cell_len(piece)


def _draw_piece(drawing: _Drawing, piece: str, style: _CellStyle, x: int, y: int) -> None:
    char = piece[0]
    if char in _AREAS:
        for area in _AREAS[char]:
            drawing.area(style.foreground, x, y, area, len(piece))
    elif char in _SHADES:
        whole = (0, 0, CELL_WIDTH, CELL_HEIGHT)
        drawing.area(
            _mix_colors(style.background, style.foreground, _SHADES[char]), x, y, whole, len(piece)
        )
    else:
        drawing.text(piece, style, x, y)


def _style_runs(strip: Strip) -> Iterator[tuple[Style, str]]:
    """Yield runs of one style, whatever segments they come in."""
    found = (segment for segment in strip if segment.text and not segment.control)
    for style, group in groupby(found, key=lambda segment: segment.style or Style.null()):
        yield style, _printable("".join(segment.text for segment in group))


def _split_pieces(text: str) -> Iterator[str]:
    """Yield runs of one drawn character, single wide characters, and the text between them."""
    if text.isascii():
        yield text
        return
    for char, group in groupby(_split_clusters(text), key=_cluster_kind):
        if char:
            yield "".join(group)
        else:
            yield from group


def _split_clusters(text: str) -> Iterator[str]:
    """Yield characters, each with the marks of no width that follow it."""
    whole = ""
    for char in text:
        if whole and cell_len(char):
            yield whole
            whole = ""
        whole += char
    if whole:
        yield whole


def _cluster_kind(cluster: str) -> str:
    """Tell what may stand together: equal areas, narrow text ("t"), a wide one alone ("")."""
    if cluster in _AREAS or cluster in _SHADES:
        return cluster
    return "t" if cell_len(cluster) == 1 else ""


def _printable(text: str) -> str:
    """Replace what no XML may hold and no font can show; ours is escaped long before."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "�" for char in text)


@lru_cache(maxsize=4096)
def _cached_cell_style(style: Style, fore: str, back: str) -> _CellStyle:
    theme = _make_terminal_theme(fore, back)
    front = (style.color or Color.default()).get_truecolor(theme).hex
    behind = (style.bgcolor or Color.default()).get_truecolor(theme, foreground=False).hex
    if style.reverse:
        front, behind = behind, front
    if style.dim:
        front = _mix_colors(front, behind, 0.5)
    rest = ' font-weight="bold"' if style.bold else ""
    rest += ' font-style="italic"' if style.italic else ""
    lines = ["underline"] * bool(style.underline) + ["line-through"] * bool(style.strike)
    rest += f' text-decoration="{" ".join(lines)}"' if lines else ""
    return _CellStyle(front, behind, rest)


def _cell_style(style: Style, theme: TerminalTheme) -> _CellStyle:
    return _cached_cell_style(style, theme.foreground_color.hex, theme.background_color.hex)


def _terminal_theme(theme: Theme) -> TerminalTheme:
    return _make_terminal_theme(theme.colors["foreground"], theme.colors["background"])


@lru_cache(maxsize=16)
def _make_terminal_theme(fore: str, back: str) -> TerminalTheme:
    """Return the terminal that a picture is of; its sixteen colours are those of xterm."""
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME

    theme = TerminalTheme(Color.parse(back).get_truecolor(), Color.parse(fore).get_truecolor(), [])
    theme.ansi_colors = DEFAULT_TERMINAL_THEME.ansi_colors
    return theme


def _mix_colors(one: str, other: str, share: float) -> str:
    """Return `one` with a share of `other`."""
    ends = [Color.parse(name).get_truecolor() for name in (one, other)]
    return blend_rgb(ends[0], ends[1], share).hex


def _svg_document(drawing: _Drawing, size: tuple[int, int], title: str, theme: Theme) -> str:
    width, height = size[0] + 2 * MARGIN, size[1] + 2 * MARGIN
    layers = [*_svg_paths(drawing.backs), *_svg_paths(drawing.areas)]
    border_color = _mix_colors(
        drawing.background, _terminal_theme(theme).foreground_color.hex, 0.25
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" '
        f'fill="{drawing.background}" stroke="{border_color}"/>\n'
        f'<g transform="translate({MARGIN} {MARGIN})" font-family="{_FONT_FAMILIES}" '
        f'font-size="{_FONT_SIZE}" xml:space="preserve">\n<g shape-rendering="crispEdges">'
    )
    return "\n".join([head, *layers, "</g>", *drawing.texts, "</g>", "</svg>\n"])


def _svg_paths(fills: Mapping[str, Iterable[str]]) -> Iterator[str]:
    for fill, parts in fills.items():
        yield f'<path fill="{fill}" d="{"".join(parts)}"/>'


def _write_atomically(target: Path, data: bytes) -> None:
    """Write beside the target, then take its place, so that nobody sees half a picture."""
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
        part.replace(target)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise FlexInspectError(
            f"The picture cannot be written to {target}: {error.strerror or error}.",
            hint="Name a file in a folder that exists and that you may write to.",
        ) from error


class Font(NamedTuple):
    """A family and the files of its styles."""

    family: str
    files: tuple[str, ...]


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
"""Files of monospace fonts (lower case, without ending) and their families, best first."""


@lru_cache(maxsize=1)
def find_monospace() -> Font | None:
    """Return the best known monospace font of this machine, None when there is none.

    Drawing with a family that is not there would leave out all text without a word.
    """
    found: dict[str, Path] = {}
    for folder in _font_folders():
        for file in folder.rglob("*"):
            if file.suffix.lower() in (".ttf", ".otf", ".ttc"):
                found.setdefault(file.stem.lower(), file)
    for stem, family in _FONTS.items():
        if stem in found:
            first = found[stem]
            begin = first.stem.split("-")[0]
            return Font(family, tuple(sorted(map(str, first.parent.glob(f"{begin}*")))))
    return None


def _font_folders() -> Iterator[Path]:
    """Yield the folders of fonts of Linux, macOS and Windows, and of Python packages last."""
    with suppress(RuntimeError):  # without a home folder there are no fonts of the user
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
