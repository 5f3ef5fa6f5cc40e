"""Pictures of the whole screen and of one panel."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flexinspect.panels.base import TracePlace
from flexinspect.screens.panelview import PanelView, theme_of


def picture_file(trace: Path | None, place: TracePlace, name: str) -> Path:
    """Return a new file name in the current folder: trace, what it shows, place, time of day."""
    stem = trace.stem if trace else "flexinspect"
    where = f"g{place.generation}-s{place.step}"
    return Path.cwd() / f"{stem}-{name}-{where}-{time.strftime('%H%M%S')}.svg"


def save_screen(app: Any, path: Path) -> Path | None:
    """Write the screen as SVG; in a browser it is handed to that. Raises `OSError`."""
    if app.is_web:
        app.deliver_screenshot(path.name)
        return None
    part = path.with_name(f".{path.name}.part")
    part.write_text(app.export_screenshot(title=path.stem, simplify=True), encoding="utf-8")
    part.replace(path)
    return path


def save_panel(view: PanelView, path: Path) -> Path:
    """Write what a panel shows as SVG. Raises `FlexInspectError`."""
    from flexinspect.export import save

    save(path, list(view.strips), title=view.panel.title, theme=theme_of(view.app))
    return path
