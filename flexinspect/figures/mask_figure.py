"""The figure of a mask: cells, words, segments, what is empty or differs, and a legend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.errors import UsageError
from flexinspect.core.languages import Labels
from flexinspect.core.text import printable, truncate
from flexinspect.figures.axis_labels import (
    TURNED_PAD,
    AxisLabels,
    key_labels,
    max_key_depth,
    row_labels,
)
from flexinspect.figures.cell_drawing import MIN_CELL, SIGNS, draw_cells, is_dotted, join_cells
from flexinspect.figures.figure_files import check_figure_path, save_figure
from flexinspect.figures.legend import Legend, LegendItem, draw_legend, place_legend
from flexinspect.figures.mask_margins import (
    BOUNDARY_DASHES,
    GENERATION_DASHES,
    CellArea,
    boundaries,
    draw_borders,
    draw_brackets,
    draw_marks,
    mark_strips,
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
from flexinspect.figures.themes import THEMES, FigureTheme
from flexinspect.masks.mask_picture import MaskPicture
from flexinspect.masks.viewport import APPLIED, BOTH, CLOSED, LEAKED, LOST, OPEN, UNKNOWN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_WIDTH = 6.5
"""Inches: the text of a page with usual margins."""

MAX_WORD = 14
"""Characters of a token's text beside the picture."""

_MAX_ASPECT = 1.4
_CLEARANCE = 0.05
"""Inches around the title of the query axis: drawn letters are a little larger than measured."""
_MIN_CELLS = 0.8  # inches of the cells' longer side, below which a figure is refused


class FigureStyle(Struct, frozen=True, kw_only=True):
    """How figures look; `width` and `height` are inches, `dpi` dots per inch of a PNG.

    Without a height it follows from the mask. With one, such as that of a slide, the legend stands
    beside the mask if it would not fit below it, and the figure may be narrower than `width`.
    """

    labels: Labels
    theme: FigureTheme = THEMES["light"]
    width: float = DEFAULT_WIDTH
    height: float | None = None
    dpi: int = 300


def cells_that_fit(width: float = DEFAULT_WIDTH) -> int:
    """Return how many cells a figure of a width in inches shows along an axis.

    `draw_mask_figure` joins cells of a picture that has more.
    """
    return int((width * 0.78 - 0.5) * POINTS / MIN_CELL)


def draw_mask_figure(
    picture: MaskPicture,
    *,
    labels: Labels,
    theme: FigureTheme = THEMES["light"],
    width: float = DEFAULT_WIDTH,
    height: float | None = None,
    note: str = "",
    figure: Figure | None = None,
) -> Figure:
    """Draw a mask as a matplotlib figure, `width` inches wide.

    The height follows from the mask; a smaller one, such as that of a slide, may be given. `theme`
    is one of `THEMES`, by default the light one. `note` stands below the title. `figure` is an
    empty figure to draw on. A picture with more cells than can be seen is reduced by `join_cells`.
    Raises `UsageError` when matplotlib or a font is missing, or for an impossible size.
    """
    style = FigureStyle(labels=labels, theme=theme, width=width, height=height)
    return draw_mask_sheet(picture, style, note=note, figure=figure)[0].figure


def save_mask_figure(
    picture: MaskPicture,
    path: str | Path,
    *,
    labels: Labels,
    theme: FigureTheme = THEMES["light"],
    width: float = DEFAULT_WIDTH,
    height: float | None = None,
    note: str = "",
    dpi: int = 300,
) -> Path:
    """Draw a mask into a PNG, SVG, PDF or HTML file, by the suffix of `path`; return the path.

    The file is replaced atomically. Raises as `draw_mask_figure` and `save_figure` do.
    """
    check_figure_path(path)
    figure = draw_mask_figure(
        picture, labels=labels, theme=theme, width=width, height=height, note=note
    )
    return save_figure(figure, path, title=picture.title, language=labels.language, dpi=dpi)


def draw_mask_sheet(
    picture: MaskPicture,
    style: FigureStyle,
    *,
    note: str = "",
    figure: Figure | None = None,
    extra_items: tuple[LegendItem, ...] = (),
) -> tuple[Sheet, CellArea]:
    """Draw a mask and return its sheet with the place of the cells; see `draw_mask_figure`.

    `extra_items` are added to the legend.
    """
    require_matplotlib()
    check_size(style.width, style.height)
    picture = join_cells(picture, cells_that_fit(style.width))
    with figure_settings():
        notes = (_sampling_note(picture, style.labels), note)
        parts = _prepare(picture, style, notes, extra_items)
        return _draw(parts, _arrange(parts), figure)


def _sampling_note(picture: MaskPicture, labels: Labels) -> str:
    if not picture.is_sampled:
        return ""
    n_rows, n_keys = picture.states.shape
    rows, keys = (int(edges[-1] - edges[0]) for edges in (picture.row_edges, picture.key_edges))
    return labels("figure_sampled", rows=rows, keys=keys, n_rows=n_rows, n_keys=n_keys)


class _Parts(Struct, frozen=True):
    """What a figure consists of: `size` and `small` are the sizes of text in points."""

    picture: MaskPicture
    style: FigureStyle
    type: Typesetter
    size: float
    small: float
    title: list[str]
    notes: list[str]
    extra_items: tuple[LegendItem, ...]

    def line(self, points: float) -> float:
        """Return the height of a line of text in inches."""
        return self.type.line_height(points)

    @property
    def heading_end(self) -> float:
        """Where the lines of the title and the notes end, in inches from the top."""
        notes = len(self.notes) * self.line(self.small)
        return PAD + len(self.title) * self.line(self.size * 1.15) + notes

    @property
    def query_label(self) -> str:
        """The title of the axis of queries."""
        return self.style.labels("figure_query_axis")


def _prepare(
    picture: MaskPicture,
    style: FigureStyle,
    notes: Sequence[str],
    extra_items: tuple[LegendItem, ...],
) -> _Parts:
    words = {pos: _axis_word(word) for pos, word in picture.words.items()}
    names = (segment.label for segment in picture.segments)
    labels = (text for key, text in style.labels.texts.items() if key.startswith("figure_"))
    texts = (*labels, picture.title, *notes, *words.values(), *names, "…<U+>")
    type_ = typesetter(map(printable, texts))
    words = {pos: type_.fonts.safe(word) for pos, word in words.items()}
    size = base_font_size(style.width)
    small, room = max(size * 0.88, MIN_FONT_SIZE), style.width - 2 * PAD
    title = type_.wrap(printable(picture.title), room, size * 1.15, bold=True)
    lines = [line for note in notes if note for line in type_.wrap(note, room, small)]
    drawn = replace(picture, words=words)
    return _Parts(
        drawn, style, type_, size, small, title if picture.title else [], lines, extra_items
    )


def _axis_word(word: str) -> str:
    """Return the text of a token for an axis: on one line, without blanks around it."""
    return truncate(printable(word.strip(" ") or "␣"), MAX_WORD)


# -- layout ----------------------------------------------------------------------------------------


class _Arrangement(Struct, frozen=True):
    """The places of everything on a sheet of `size`, its width and height in inches.

    `is_query_above` tells that the cells are too low for the title of the axis of queries, so that
    it stands above them.
    """

    area: CellArea
    rows: AxisLabels
    keys: AxisLabels
    legend: Legend
    legend_at: tuple[float, float]
    size: tuple[float, float]
    is_query_above: bool

    @property
    def cell(self) -> float:
        """The shorter side of a cell in inches."""
        return min(self.area.width / self.keys.n_cells, self.area.height / self.rows.n_cells)

    @property
    def is_dotted(self) -> bool:
        """Whether cells have gaps, dots and signs."""
        return is_dotted(self.cell, self.rows.n_cells * self.keys.n_cells)


def _arrange(parts: _Parts) -> _Arrangement:
    below = _arrange_beside(parts, 0.0)
    limit = parts.style.height
    if limit is None or below.size[1] <= limit:
        return below
    column = place_legend(_legend_items(parts, below.is_dotted), parts.type, parts.small, 0.0)
    return _arrange_beside(parts, column.width + 2 * PAD)


def _arrange_beside(parts: _Parts, legend_width: float) -> _Arrangement:
    """Place everything, with the legend below (for a width of 0) or beside the cells."""
    style, picture, aspect = parts.style, parts.picture, _aspect(parts.picture)
    strip = mark_strips(picture, 0.6 * parts.line(parts.small))
    bracket = parts.line(parts.small) + 0.06 if picture.segments else 0.0
    top = parts.heading_end + strip[1] + bracket + 0.03
    side = parts.line(parts.size) + 0.1
    last = str(int(picture.key_edges[-1]))  # half of its label is to the right of the cells
    overhang = max(parts.type.size(last, parts.small), parts.line(parts.small)) / 2
    right = max(strip[0] + bracket, overhang - PAD)
    free = style.width - 2 * PAD - side - right - legend_width
    bottom = parts.line(parts.size) + 0.05

    def height_beside(depth: float) -> float:
        height = (free - depth) * aspect
        if legend_width and style.height is not None:
            deepest = max_key_depth(picture, parts.type, parts.small)
            height = min(height, style.height - top - bottom - deepest - PAD)
        return height

    rows = row_labels(picture, parts.type, parts.small, height_beside)
    height = height_beside(rows.depth)
    width = min(free - rows.depth, height / aspect)
    if max(width, height) < _MIN_CELLS or min(width, height) <= 0:
        what = f"The mask does not fit into {style.width:g} by {style.height or 0:g} inches."
        raise UsageError(what, hint="Choose a larger figure, or leave out its height.")
    keys = key_labels(picture, parts.type, parts.small, width)
    room = top + height + keys.depth + bottom - parts.heading_end
    is_query_above = parts.type.size(parts.query_label, parts.size) > room - 2 * _CLEARANCE
    if is_query_above:
        top, side = top + parts.line(parts.size), 0.1
        width += parts.line(parts.size)
    left = PAD + side + rows.depth
    area = CellArea(left, top, width, height, strip)
    end = top + height + keys.depth + bottom
    cell = min(width / keys.n_cells, height / rows.n_cells)
    items = _legend_items(parts, is_dotted(cell, picture.states.size))
    room = legend_width or style.width - 2 * PAD
    legend = place_legend(items, parts.type, parts.small, 0.0 if legend_width else room)
    place = (
        (left + width + strip[0] + bracket + 2 * PAD, top) if legend_width else (PAD, end + 0.06)
    )
    size = (
        place[0] + legend.width + PAD if legend_width else style.width,
        max(place[1] + legend.height, end) + PAD,
    )
    return _Arrangement(area, rows, keys, legend, place, size, is_query_above)


def _aspect(picture: MaskPicture) -> float:
    """Return the height of the cells divided by their width."""
    n_rows, n_keys = picture.states.shape
    return float(np.clip(n_rows / n_keys, 0.04 if n_rows == 1 else 0.12, _MAX_ASPECT))


# -- drawing ---------------------------------------------------------------------------------------


def _draw(parts: _Parts, places: _Arrangement, figure: Figure | None) -> tuple[Sheet, CellArea]:
    style, picture, area = parts.style, parts.picture, places.area
    sheet = new_sheet(
        _sheet_width(parts, places), places.size[1], style.theme, parts.type, figure=figure
    )
    y = sheet.lines(PAD, PAD, parts.title, parts.size * 1.15, bold=True)
    sheet.lines(PAD, y, parts.notes, parts.small, color=style.theme.muted)
    axes = sheet.axes(area.left, area.top, area.width, area.height)
    n_rows, n_keys = picture.states.shape
    axes.set(xlim=(0, n_keys), ylim=(n_rows, 0), facecolor=style.theme.closed)
    draw_cells(axes, picture.states, style.theme, places.cell)
    _draw_ticks(axes, parts, places)
    _draw_axis_titles(sheet, parts, places)
    draw_borders(axes, sheet, picture)
    draw_marks(sheet, picture, area, with_signs=not places.is_dotted)
    draw_brackets(sheet, picture, area, style.labels, parts.small)
    draw_legend(sheet, places.legend, *places.legend_at, parts.small)
    return sheet, area


def _sheet_width(parts: _Parts, places: _Arrangement) -> float:
    """Return the width of the sheet: less than asked for where its height limits the cells."""
    titles = (parts.type.size(text, parts.size * 1.15, bold=True) for text in parts.title)
    notes = (parts.type.size(text, parts.small) for text in parts.notes)
    widest = max((*titles, *notes), default=0.0) + 2 * PAD
    return min(max(places.size[0], widest), parts.style.width)


def _draw_ticks(axes: Any, parts: _Parts, places: _Arrangement) -> None:
    theme, families = parts.style.theme, list(parts.type.fonts.families)
    font = {"fontsize": parts.small, "family": families, "color": theme.ink, "parse_math": False}
    axes.set_yticks(places.rows.places, places.rows.texts, va="center_baseline", **font)
    turned = {"rotation": 90, "va": "top"} if places.keys.is_turned else {}
    pad = TURNED_PAD * parts.small if places.keys.is_turned else 2
    axes.set_xticks(places.keys.places, places.keys.texts, ha="center", **turned, **font)
    axes.tick_params(length=2, width=0.6, pad=2, color=theme.frame)
    axes.tick_params(axis="x", pad=pad)
    for spine in axes.spines.values():
        spine.set(linewidth=0.6, color=theme.frame)


def _draw_axis_titles(sheet: Sheet, parts: _Parts, places: _Arrangement) -> None:
    area, size, query = places.area, parts.size, parts.query_label
    half = parts.line(size) / 2
    y = area.top + area.height + places.keys.depth + 0.05 + half
    key = parts.style.labels("figure_key_axis")
    reach = parts.type.size(key, size) / 2
    x = max(area.left + area.width / 2, PAD + reach)
    sheet.text(min(x, sheet.width - PAD - reach), y, key, size, ha="center")
    if places.is_query_above:
        y = area.top - area.strip[1] - half
        y -= parts.line(parts.small) + 0.06 if parts.picture.segments else 0
        sheet.text(PAD, y, f"{query} ↓", size)
    else:
        reach = parts.type.size(query, size) / 2
        low = parts.heading_end + _CLEARANCE + reach
        high = area.top + area.height + places.keys.depth
        high += parts.line(size) + 0.05 - _CLEARANCE - reach
        y = min(max(area.top + area.height / 2, low), high)
        sheet.text(PAD + half, y, query, size, rotation=90, ha="center", va="center")


def _legend_items(parts: _Parts, has_dots: bool) -> list[LegendItem]:
    picture, theme, labels = parts.picture, parts.style.theme, parts.style.labels
    present = set(map(int, np.unique(picture.states)))
    items = [
        LegendItem(labels("figure_open"), "square", theme.open),
        LegendItem(labels("figure_closed"), "dot" if has_dots else "square", theme.closed),
    ]
    if present & set(range(CLOSED + 1, OPEN)):
        items.append(LegendItem(labels("figure_partly"), "half", theme.closed))
    for state, key in _SPECIAL_STATES.items():
        if state in present:
            color, sign = theme.state_color(state), SIGNS.get(state, "")
            items.append(LegendItem(labels(key), "square", color, sign))
    for key, color, dashes, is_drawn in (
        ("figure_boundary", theme.boundary, BOUNDARY_DASHES, bool(boundaries(picture))),
        (
            "figure_generation",
            theme.generation,
            GENERATION_DASHES,
            picture.first_generated is not None,
        ),
    ):
        if is_drawn:
            items.append(LegendItem(labels(key), "line", color, dashes=dashes))
    for key, flags, marker in (
        ("figure_empty_row", picture.empty_rows, "<"),
        ("figure_unseen_key", picture.unseen_keys, "v"),
    ):
        if flags.any():
            items.append(LegendItem(labels(key), "mark", theme.mark, marker))
    return [*items, *parts.extra_items]


_SPECIAL_STATES = {
    APPLIED: "figure_applied",
    LOST: "figure_lost",
    LEAKED: "figure_leaked",
    BOTH: "figure_both",
    UNKNOWN: "figure_unknown",
}
