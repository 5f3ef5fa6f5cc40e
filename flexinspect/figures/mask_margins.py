"""What stands on and around the cells of a mask figure: borders, marks, brackets of segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.core.languages import Labels
from flexinspect.core.text import printable
from flexinspect.figures.sheet import POINTS, Sheet
from flexinspect.masks.mask_picture import MaskPicture
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.masks.viewport import BOTH, LEAKED, LOST
from flexinspect.records.prompt import Segment, SegmentKind

BOUNDARY_DASHES, GENERATION_DASHES = (0, (3, 2)), (0, (7, 2.5))
"""Dashes of lines between segments and before the first generated token, in line widths."""

_ARM = 0.04  # inches of a bracket's arms


class CellArea(Struct, frozen=True):
    """The place of the cells on the sheet, in inches from its upper left corner.

    `strip` is the width of the strip for marks beside the rows, and the height of the one over the
    keys; the brackets of segments are beyond it.
    """

    left: float
    top: float
    width: float
    height: float
    strip: tuple[float, float] = (0.0, 0.0)


def boundaries(picture: MaskPicture) -> list[int]:
    """Return where segments start, except the first one and the generated one.

    A separator belongs to the segment before it.
    """
    own = [segment for index, segment in enumerate(picture.segments) if segment.owner == index]
    return [s.start for s in own if s.start and s.start != picture.first_generated]


def draw_borders(axes: Any, sheet: Sheet, picture: MaskPicture) -> None:
    """Draw the lines between segments, thinner where they are close, and that of generation."""
    starts = boundaries(picture)
    spacing = sheet.width * POINTS / (len(starts) + 1)
    width = min(max(0.045 * spacing, 0.3), 0.8 if sheet.width < 5 else 1.1)
    style: dict[str, Any] = {"color": sheet.theme.boundary, "linestyle": BOUNDARY_DASHES}
    for start in starts:
        _draw_border(axes, picture, start, linewidth=width, **style)
    if picture.first_generated is not None:
        width = 0.8 if sheet.width < 5 else 1.1
        style = {"color": sheet.theme.generation, "linestyle": GENERATION_DASHES}
        _draw_border(axes, picture, picture.first_generated, linewidth=width, **style)


def _draw_border(axes: Any, picture: MaskPicture, position: int, **style: Any) -> None:
    for edges, draw in ((picture.row_edges, axes.axhline), (picture.key_edges, axes.axvline)):
        if edges[0] < position < edges[-1]:
            draw(_place(edges, position), zorder=3, **style)


def _place(edges: npt.NDArray[Any], position: float) -> float:
    """Return the place of a position on an axis whose unit is the cell."""
    return float(np.interp(position, edges, np.arange(len(edges))))


def mark_strips(picture: MaskPicture, size: float) -> tuple[float, float]:
    """Return `CellArea.strip`: `size` for an axis with marks, else a gap."""
    differs = np.isin(picture.states, (LOST, LEAKED, BOTH)).any()
    rows, keys = (
        size if differs or flags.any() else 0.03
        for flags in (picture.empty_rows, picture.unseen_keys)
    )
    return rows, keys


def draw_marks(sheet: Sheet, picture: MaskPicture, area: CellArea, *, with_signs: bool) -> None:
    """Mark empty rows and unseen keys; `with_signs` also rows and keys with lost or leaked cells,
    for a picture whose cells are too small for signs."""
    lost, leaked = (np.isin(picture.states, (kind, BOTH)) for kind in (LOST, LEAKED))
    for axis, flags in enumerate((picture.empty_rows, picture.unseen_keys)):
        strip = _Strip(sheet, area, axis, len(flags))
        strip.mark(flags, "<v"[axis], sheet.theme.mark)
        if with_signs:
            strip.mark(lost.any(axis=1 - axis) & ~flags, "_", sheet.theme.ink)
            strip.mark(leaked.any(axis=1 - axis) & ~flags, "+", sheet.theme.ink)


class _Strip(Struct, frozen=True):
    """The strip beside the rows (axis 0) or over the keys (axis 1), along `n` cells."""

    sheet: Sheet
    area: CellArea
    axis: int
    n: int

    def mark(self, flags: BoolArray, marker: str, color: str) -> None:
        """Mark each run of cells by a line along it; marks that would overlap are left out."""
        scale = (self.area.height, self.area.width)[self.axis] / self.n
        size = min(self.area.strip[self.axis] * 0.62, 0.08)
        style = {"marker": marker, "markersize": size * POINTS, "clip_on": False}
        last = -size
        for start, stop in _runs(flags):
            if stop - start > 1:
                self.sheet.line(*self._at(start * scale, stop * scale), color, linewidth=1.0)
            middle = (start + stop) / 2 * scale
            if middle - last >= size * 0.8:
                self.sheet.paper.plot(*self._at(middle), color=color, **style)
                last = middle

    def _at(self, *along: float) -> tuple[list[float], list[float]]:
        area, across = self.area, self.area.strip[self.axis] / 2
        if self.axis == 0:
            x = area.left + area.width + across
            return [x] * len(along), [area.top + each for each in along]
        return [area.left + each for each in along], [area.top - across] * len(along)


def _runs(flags: BoolArray) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the runs of True."""
    steps = np.diff(flags.astype(np.int8), prepend=0, append=0)
    starts, stops = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    yield from zip(starts.tolist(), stops.tolist(), strict=True)


def draw_brackets(
    sheet: Sheet, picture: MaskPicture, area: CellArea, labels: Labels, points: float
) -> None:
    """Draw a bracket over the keys and beside the rows of each segment, with its name or number."""
    color = sheet.theme.muted
    right, top = area.left + area.width + area.strip[0], area.top - area.strip[1]
    half = _ARM + 0.02 + sheet.type.line_height(points) / 2
    turned: dict[str, Any] = {"rotation": 270, "ha": "center", "va": "center"}
    for segment in picture.segments:
        if segment.kind is SegmentKind.SEPARATOR:
            continue
        names = segment_names(segment, picture.segments, labels)
        low, high = _extent(segment, picture.key_edges, area.width)
        if high - low >= 0.02:
            xs = [area.left + x for x in (low, low, high, high)]
            sheet.line(xs, [top, top - _ARM, top - _ARM, top], color)
            name, middle = _fitting(sheet, names, high - low, points), area.left + (low + high) / 2
            sheet.text(middle, top - half, name, points, color=color, ha="center")
        low, high = _extent(segment, picture.row_edges, area.height)
        if high - low >= 0.02:
            ys = [area.top + y for y in (low, low, high, high)]
            sheet.line([right, right + _ARM, right + _ARM, right], ys, color)
            name, middle = _fitting(sheet, names, high - low, points), area.top + (low + high) / 2
            sheet.text(right + half, middle, name, points, color=color, **turned)


def _extent(segment: Segment, edges: npt.NDArray[Any], length: float) -> tuple[float, float]:
    """Return where a segment begins and ends on an axis of `length` inches, with a gap."""
    scale = length / (len(edges) - 1)
    return _place(edges, segment.start) * scale + 0.01, _place(edges, segment.stop) * scale - 0.01


def _fitting(sheet: Sheet, names: Sequence[str], room: float, points: float) -> str:
    """Return the first name that fits; 5, 10, 15, ... have room over their neighbours."""
    for name in names:
        is_fifth = name.isdecimal() and int(name) % 5 == 0
        if sheet.type.size(name, points) <= (room * 4 if is_fifth else room):
            return name
    return ""


def segment_names(segment: Segment, segments: Sequence[Segment], labels: Labels) -> tuple[str, str]:
    """Return the name of a segment and a shorter one.

    The name is the user's label, or that of its kind in the language of `labels`.
    """
    alike = [each for each in segments if each.kind is segment.kind]
    n, number = len(alike), alike.index(segment) + 1
    kind = str(segment.kind)
    is_counted = segment.kind is SegmentKind.PARAPHRASE and (n < 10 or number % 5 == 0)
    short = str(number) if is_counted else ""
    if segment.label in ("", kind, f"{kind} {number}", f"Seg{number}"):
        return labels(f"figure_segment_{kind}", number=number), short
    return printable(segment.label), short
