"""Writing figures: PNG, SVG, PDF and HTML, each file complete or not there at all."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.core.environment import save_file
from flexinspect.core.errors import UsageError
from flexinspect.core.text import printable
from flexinspect.drawing.picture_files import html_page
from flexinspect.figures.sheet import figure_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf", ".html")
MIN_DPI, MAX_DPI = 30, 2400
MAX_PIXELS = 200_000_000
"""Pixels of a PNG: matplotlib needs 4 bytes for each."""


def check_figure_path(path: str | Path, formats: tuple[str, ...] = FORMATS) -> Path:
    """Return `path` if a file of that name can be written.

    Raises `UsageError` for a suffix that is not one of `formats`, a folder, and a missing folder.
    """
    target = Path(path)
    if target.suffix.lower() not in formats:
        known = f"{', '.join(formats[:-1])} or {formats[-1]}" if formats[1:] else formats[0]
        what = f"{target} has no suffix of a format that can be written."
        raise UsageError(what, hint=f"Name a file {known}.")
    try:
        is_folder, has_folder = target.is_dir(), target.parent.is_dir()
    except OSError as error:  # a name that is too long
        raise UsageError(f"{target} cannot be written: {error.strerror or error}.") from error
    if is_folder:
        raise UsageError(f"{target} is a folder.", hint="Name a file in it.")
    if not has_folder:
        raise UsageError(f"There is no folder {target.parent} for {target.name}.")
    return target


def save_figure(
    figure: Figure, path: str | Path, *, title: str, language: str = "en", dpi: int = 300
) -> Path:
    """Write a figure by the suffix of `path` (one of `FORMATS`), atomically; return the path.

    Text stays text in SVG, PDF and HTML; `dpi` holds for PNG, and for images of many cells in a
    PDF. Raises `UsageError` for a path or a resolution that cannot be, and when the file cannot be
    written.
    """
    target = check_figure_path(path)
    check_dpi(figure, dpi)
    with figure_settings():
        data = _ENCODERS[target.suffix.lower()](figure, printable(title), language, dpi)
    save_file(target, data, UsageError)
    return target


def check_dpi(figure: Figure, dpi: int) -> None:
    """Raise `UsageError` for a resolution that no file should have."""
    width, height = figure.get_size_inches()
    if not MIN_DPI <= dpi <= MAX_DPI:
        what = f"A figure cannot have {dpi} dots per inch."
        raise UsageError(what, hint=f"Choose {MIN_DPI} to {MAX_DPI}; print needs 300.")
    if width * height * dpi**2 > MAX_PIXELS:
        size = f"{width * dpi:,.0f} by {height * dpi:,.0f} pixels"
        raise UsageError(f"{size} are too many.", hint="Choose a smaller width or fewer dpi.")


def _png(figure: Figure, title: str, language: str, dpi: int) -> bytes:
    metadata = {"Title": title, "Software": "flexinspect"}
    return _printed(figure, "png", dpi=dpi, metadata=metadata)


def _pdf(figure: Figure, title: str, language: str, dpi: int) -> bytes:
    metadata = {"Title": title, "Creator": "flexinspect", "CreationDate": None}
    return _printed(figure, "pdf", dpi=dpi, metadata=metadata)


def _svg(figure: Figure, title: str, language: str, dpi: int) -> bytes:
    metadata = {"Title": title, "Creator": "flexinspect", "Date": None}
    return _printed(figure, "svg", metadata=metadata)


def _html(figure: Figure, title: str, language: str, dpi: int) -> bytes:
    svg = _svg(figure, title, language, dpi).decode()
    width = round(float(figure.get_size_inches()[0]), 2)
    style = (
        f"body {{ margin: 0; background: {_hex(figure.get_facecolor())}; }}\n"
        f"svg {{ display: block; width: min(100%, {width}in); height: auto; margin: 1rem auto; }}"
    )
    page = html_page(title, style, svg[svg.index("<svg") :], language=language)
    return page.encode()


_ENCODERS = {".png": _png, ".pdf": _pdf, ".svg": _svg, ".html": _html}


def _printed(figure: Figure, format_: str, **options: Any) -> bytes:
    out = BytesIO()
    figure.savefig(out, format=format_, facecolor=figure.get_facecolor(), **options)
    return out.getvalue()


def _hex(color: Any) -> str:
    from matplotlib.colors import to_hex

    return str(to_hex(color))
