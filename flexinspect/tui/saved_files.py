"""Files that the screen saves in the current folder: pictures and a declaration."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

from flexinspect.core.environment import replace_file
from flexinspect.panels.base import TracePlace
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.panel_view import PanelView, theme_of
from flexinspect.tui.screens.dialogs import ask_declaration, call_in_thread


def save_picture(
    app: Any, trace: Path | None, place: TracePlace, panel: PanelView | None = None
) -> None:
    """Save a picture of a panel, or else of the whole screen, and notify the user.

    Its file is named after the trace, the panel, the place and the time of day. Raises
    `FlexInspectError`.
    """
    name = panel.panel.name if panel is not None else "screen"
    where = f"g{place.generation}-s{place.step}-{time.strftime('%H%M%S')}"
    file = Path.cwd() / f"{trace.stem if trace else 'flexinspect'}-{name}-{where}.svg"
    try:
        path = _save_screen(app, file) if panel is None else _save_panel(app, file, panel)
        app.notify(f"Saved {path}" if path else "Saved by the browser")
    except OSError as error:
        app.notify(f"{file} was not saved: {error.strerror or error}.", severity="error")


def _save_screen(app: Any, file: Path) -> Path | None:
    """Save the screen as SVG, or deliver it to the browser."""
    if app.is_web:
        app.deliver_screenshot(file.name)
        return None
    from flexinspect.drawing.picture_files import save

    # The compositor has the strips that are on the screen. Textual's own SVG relies on
    # `textLength`, without which other renderers than browsers shift the text.
    save(file, app.screen._compositor.render_strips(), title=file.stem, theme=theme_of(app))
    return file


def _save_panel(app: Any, file: Path, view: PanelView) -> Path:
    from flexinspect.drawing.picture_files import save

    save(file, list(view.strips), title=view.panel.title, theme=theme_of(app))
    return file


async def save_declaration(app: Any, reader: TraceReader | None, generation: int) -> None:
    """Write the segments that nobody declared to a file, with the borders the user chooses."""
    from flexinspect.analysis import inferred_declaration as inferred

    if reader is None:
        return
    mask = await call_in_thread(app, lambda: inferred.UndeclaredMask(reader, generation))
    if mask is None:
        return
    declaration = await ask_declaration(app, mask)
    if declaration is None:
        return
    trace = reader.path
    file = free_file(Path.cwd() / f"{trace.stem}.toml")
    try:
        replace_file(file, declaration.toml(trace.name).encode())
    except OSError as error:
        app.notify(f"{file} was not saved: {error.strerror or error}.", severity="error")
    else:
        app.notify(f"Saved {file}. The next run: flexinspect run --declare {file.name} …")


def free_file(file: Path) -> Path:
    """Return the file, or a name with the first number that is not taken."""
    names = (file.with_stem(f"{file.stem}-{number}") for number in count(2))
    return file if not file.exists() else next(name for name in names if not name.exists())
