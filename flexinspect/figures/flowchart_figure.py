"""The flowchart of a generation as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from flexinspect.core.errors import UsageError
from flexinspect.core.languages import Labels
from flexinspect.core.text import printable
from flexinspect.figures.figure_files import check_figure_path, save_figure
from flexinspect.figures.flowchart_boxes import (
    BOX_COLORS,
    FlowBox,
    FlowchartConfig,
    flow_boxes,
    flowchart_title,
)
from flexinspect.figures.sheet import (
    MIN_FONT_SIZE,
    PAD,
    POINTS,
    Sheet,
    Typesetter,
    base_font_size,
    check_size,
    figure_settings,
    new_sheet,
    require_matplotlib,
    typesetter,
)
from flexinspect.figures.themes import THEMES, FigureTheme, sign_color

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS = 10
"""Units of `FlowchartConfig` in the width of a figure."""


class _Places(Struct, frozen=True):
    """Lengths in inches: boxes of `width` by `height` at `left`, `spacing` from top to top."""

    left: float
    top: float
    width: float
    height: float
    spacing: float
    text_left: float
    text_width: float


def draw_flowchart_figure(
    boxes: Sequence[FlowBox],
    config: FlowchartConfig | None = None,
    *,
    labels: Labels,
    title: str,
    theme: FigureTheme = THEMES["light"],
    figure: Figure | None = None,
) -> Figure:
    """Draw the boxes from top to bottom, each with its text beside it; the size is the config's.

    `figure` is an empty figure to draw on. A theme with colours of its own for boxes replaces those
    that the configuration leaves at their defaults. Raises `UsageError` when matplotlib or a font
    is missing, or when the text does not fit in a size of at least `MIN_FONT_SIZE`.
    """
    config = config or FlowchartConfig()
    require_matplotlib()
    width, height = config.figure_size
    check_size(width, height)
    shown = [printable(text) for box in boxes for text in (box.title, box.text)]
    with figure_settings():
        type_ = typesetter((*shown, printable(title), labels("flowchart_repeat"), "…<U+>"))
        size, places = _fit(boxes, config, type_, title)
        sheet = new_sheet(width, height, theme, type_, figure=figure)
        heading = type_.wrap(printable(title), width - 2 * PAD, size * 1.15, bold=True)
        sheet.lines(PAD, PAD, heading, size * 1.15, bold=True)
        for number, box in enumerate(boxes):
            _draw_box(sheet, box, number, places, size, _box_color(box, config, theme))
            if number + 1 < len(boxes):
                _draw_arrow(sheet, number, places)
        _draw_loop(sheet, boxes, places, size, labels("flowchart_repeat"))
    return sheet.figure


def save_flowchart(
    path: str | Path,
    *,
    labels: Labels,
    theme: FigureTheme = THEMES["light"],
    dpi: int = 300,
) -> Path:
    """Draw the flowchart into a file by its suffix; return the path.

    Raises as `draw_flowchart_figure` and `save_figure` do.
    """
    check_figure_path(path)
    title = flowchart_title(labels)
    figure = draw_flowchart_figure(flow_boxes(labels), labels=labels, title=title, theme=theme)
    return save_figure(figure, path, title=title, language=labels.language, dpi=dpi)


def _fit(
    boxes: Sequence[FlowBox], config: FlowchartConfig, type_: Typesetter, title: str
) -> tuple[float, _Places]:
    """Return the largest size of text that fits, in points, and the places for it."""
    size = 1.35 * base_font_size(config.figure_size[0])
    while size >= MIN_FONT_SIZE:
        places = _place(boxes, config, type_, size, title)
        line = type_.line_height(size)
        rows = [type_.wrap(printable(box.text), places.text_width, size) for box in boxes]
        widest = max(type_.size(text, size) for lines in rows for text in lines)
        is_high_enough = max(map(len, rows)) * line <= places.spacing and places.height >= line
        if is_high_enough and widest <= places.text_width:
            return size, places
        size -= 0.25
    what = "The text of the flowchart does not fit into {:g} by {:g} inches."
    hint = "Choose a larger figure_size, or narrower boxes (box_width)."
    raise UsageError(what.format(*config.figure_size), hint=hint)


def _place(
    boxes: Sequence[FlowBox], config: FlowchartConfig, type_: Typesetter, size: float, title: str
) -> _Places:
    width, height = config.figure_size
    loop = 2.2 * type_.line_height(size)
    titles = (type_.size(box.title, size, bold=True) for box in boxes)
    box_width = max(width * config.box_width / UNITS, max(titles) + 2 * PAD)
    heading = type_.wrap(printable(title), width - 2 * PAD, size * 1.15, bold=True)
    top = PAD + (len(heading) + 0.4) * type_.line_height(size * 1.15)
    n_units = (len(boxes) - 1) * config.vertical_spacing + config.box_height
    unit = (height - top - 2 * PAD) / n_units
    left = PAD + loop
    text_left = left + box_width + 2 * PAD
    return _Places(
        left=left,
        top=top,
        width=box_width,
        height=config.box_height * unit,
        spacing=config.vertical_spacing * unit,
        text_left=text_left,
        text_width=max(width - text_left - PAD, 0.01),
    )


def _box_color(box: FlowBox, config: FlowchartConfig, theme: FigureTheme) -> str:
    key = BOX_COLORS[box.name]
    keys = list(dict.fromkeys(BOX_COLORS.values()))
    if theme.flow is not None and config.color(box.name) == getattr(FlowchartConfig(), key):
        return theme.flow[keys.index(key)]
    return config.color(box.name)


def _draw_box(
    sheet: Sheet, box: FlowBox, number: int, places: _Places, size: float, color: str
) -> None:
    from matplotlib.patches import FancyBboxPatch

    top, line = places.top + number * places.spacing, sheet.type.line_height(size)
    middle = top + places.height / 2
    rounding = min(0.25 * places.height, 0.12)
    patch = FancyBboxPatch(
        (places.left, top),
        places.width,
        places.height,
        boxstyle=f"round,pad=0,rounding_size={rounding}",
        facecolor=color,
        edgecolor=sheet.theme.muted,
        linewidth=0.8,
    )
    sheet.paper.add_patch(patch)
    options: dict[str, Any] = {"ha": "center", "bold": True, "color": sign_color(color)}
    sheet.text(places.left + places.width / 2, middle, box.title, size, **options)
    lines = sheet.type.wrap(printable(box.text), places.text_width, size)
    start = middle - len(lines) * line / 2
    sheet.lines(places.text_left, start, lines, size)


def _draw_arrow(sheet: Sheet, number: int, places: _Places) -> None:
    x = places.left + places.width / 2
    start = places.top + number * places.spacing + places.height
    _arrow(sheet, [(x, start), (x, start + places.spacing - places.height)])


def _draw_loop(
    sheet: Sheet, boxes: Sequence[FlowBox], places: _Places, size: float, text: str
) -> None:
    """Draw the arrow from the generation loop's lower left side back to its upper one."""
    number = next((n for n, box in enumerate(boxes) if box.name == "generation"), None)
    if number is None:
        return
    top, line = places.top + number * places.spacing, sheet.type.line_height(size)
    high, low = top + 0.2 * places.height, top + 0.8 * places.height
    x, end = places.left - 0.7 * line, places.left
    _arrow(sheet, [(end, low), (x, low), (x, high), (end, high)])
    options: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "center"}
    middle, color = top + places.height / 2, sheet.theme.muted
    sheet.text(
        x - 0.7 * line, middle, text, max(size * 0.88, MIN_FONT_SIZE), color=color, **options
    )


def _arrow(sheet: Sheet, points: Sequence[tuple[float, float]]) -> None:
    """Draw lines through points with a head at the last one."""
    from matplotlib.patches import Polygon

    color, head = sheet.theme.muted, min(0.09, 5 * sheet.width / POINTS / 3)
    (x0, y0), (x1, y1) = points[-2:]
    length = max(abs(x1 - x0) + abs(y1 - y0), 1e-6)
    dx, dy = (x1 - x0) / length * head, (y1 - y0) / length * head
    xs, ys = zip(*points[:-1], (x1 - dx, y1 - dy), strict=True)
    sheet.line(xs, ys, color, linewidth=1.0, solid_joinstyle="miter")
    corners = [(x1, y1)] + [(x1 - dx - s * dy * 0.45, y1 - dy + s * dx * 0.45) for s in (1, -1)]
    sheet.paper.add_patch(Polygon(corners, facecolor=color, edgecolor="none"))
