"""The mask panel: who may look at whom, as it ran, and where that is not what was meant."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from flexinspect.panels.base import Go, Help, Panel, Picture, Request
from flexinspect.panels.parts.maskdata import MaskData, load_mask
from flexinspect.panels.parts.maskframe import MaskOptions, View, moved_window, scale_words
from flexinspect.panels.parts.maskpaint import NARROW, picture
from flexinspect.panels.parts.maskreport import describe
from flexinspect.panels.parts.maskwords import difference_words, differs, window_words
from flexinspect.panels.source import Source
from flexinspect.widgets.look import Look

VIEWS: tuple[View, ...] = ("executed", "received", "declared", "difference")
_MOVES = {
    "cursor.up": (-1, 0),
    "cursor.down": (1, 0),
    "cursor.left": (0, -1),
    "cursor.right": (0, 1),
}


class MaskPanel(Panel[MaskData, MaskOptions]):
    """The mask of the whole sequence: a row per token that was fed, a column per key."""

    name: ClassVar[str] = "mask"
    title: ClassVar[str] = "Mask"
    needs_tokens: ClassVar[bool] = True
    help: ClassVar[Help] = Help(
        "It shows for one layer and head which tokens (across) each token (down) may look at: as "
        "it was executed, received or declared, or where what was executed is not what was meant.",
        "Bright cells are open, dark ones closed, in between where a pixel holds both; words and "
        "bands along the axes are the tokens and their segments, and the cursor says who may look "
        "at whom and why not.",
        "Look for lost cells (meant to be open, but not executed), leaked ones (executed, but "
        "meant to be closed), rows that see nothing, and paraphrases that see each other.",
    )
    sized: ClassVar[bool] = True
    actions: ClassVar[tuple[str, ...]] = (
        "zoom.in",
        "zoom.out",
        "view.flip",
        "view.blocks",
        *_MOVES,
        "cursor.enter",
    )

    def options(self) -> MaskOptions:
        """Return the options at the start: the whole mask as it was executed."""
        return MaskOptions()

    def load(self, source: Source, request: Request[MaskOptions]) -> MaskData:
        """Return the window that is seen; parts of the mask are kept for the next step."""
        return load_mask(source, request)

    def describe(self, data: MaskData) -> list[str]:
        """Return the mask in words: what it is, who sees whom, what is not as declared."""
        return describe(data)

    def paint(self, data: MaskData, request: Request[MaskOptions], look: Look) -> Picture:
        """Draw the window."""
        strips = picture(data, look)[: request.height]
        if data.frame.width != request.width:  # the panel was resized since it was loaded
            strips = [strip.adjust_cell_length(request.width) for strip in strips]
        return Picture(strips, note(data), data.gate.bad or differs(data))

    def act(
        self, action: str, data: MaskData, request: Request[MaskOptions]
    ) -> MaskOptions | Go | None:
        """Zoom, flip the view, show blocks, move the cursor, go to the step of the cursor's row."""
        options, frame = request.options, data.frame
        if action in ("zoom.in", "zoom.out"):
            zoom = frame.zoom + (1 if action == "zoom.in" else -1)
            inside = 0 <= zoom <= frame.last_zoom
            return replace(options, zoom=zoom, row=None, key=None) if inside else None
        if action == "view.flip":
            views = [v for v in VIEWS if data.sheet.rule or v in ("executed", "received")]
            shown = options.view if options.view in views else views[0]
            return replace(options, view=views[(views.index(shown) + 1) % len(views)])
        if action == "view.blocks":
            return replace(options, blocks=not options.blocks)
        if action == "cursor.enter":
            return _enter(data)
        return _moved(action, data, options) if action in _MOVES else None

    def point(
        self, x: int, y: int, data: MaskData, request: Request[MaskOptions], *, click: bool
    ) -> MaskOptions | Go | None:
        """Put the cursor where the mouse is; the window stays where it is."""
        cell = data.frame.cell_at(x, y)
        if cell is None or cell[0] >= data.sheet.n_rows or cell[1] >= data.sheet.n_keys:
            return None
        if cell == data.cursor:
            return None
        grid = data.frame.grid
        return _with_cursor(data, replace(request.options, row=grid.row, key=grid.key), cell)


def note(data: MaskData) -> str:
    """Return the line in the border: what is wrong first, as a narrow panel cuts its end."""
    sheet, layer = data.sheet, data.place.layer
    one = sheet.heads == 1  # every head got the same
    where = f"layer {layer} · " + ("all heads" if one else f"head {sheet.head} of {sheet.heads}")
    scale = f"zoom {scale_words(data.frame)}"
    if data.frame.width < NARROW:
        where = f"L{layer} " + ("all" if one else f"H{sheet.head}/{sheet.heads}")
        scale = scale_words(data.frame)
    differs_now = differs(data) or data.view == "difference"
    parts = [
        data.view,
        difference_words(data) if differs_now else "",
        data.gate.words() + (": not what ran" if data.gate.bad else ""),
        where,
        scale,
        f"rows of {window_words(data)}" if sheet.is_cut else "",
    ]
    return " · ".join(part for part in parts if part)


def _moved(action: str, data: MaskData, options: MaskOptions) -> MaskOptions | None:
    sheet, grid = data.sheet, data.frame.grid
    if data.cursor is None:
        row = data.current[-1] if data.current else sheet.n_rows - 1
        cell = row, min(int(sheet.positions[row]), sheet.n_keys - 1)
    else:
        down, across = _MOVES[action]
        row = data.cursor[0] + down * grid.row_scale
        key = data.cursor[1] + across * grid.key_scale
        cell = min(max(row, 0), sheet.n_rows - 1), min(max(key, 0), sheet.n_keys - 1)
        if cell == data.cursor:
            return None
    first_row, first_key = moved_window(data.frame, *cell)
    return _with_cursor(data, replace(options, row=first_row, key=first_key), cell)


def _with_cursor(data: MaskData, options: MaskOptions, cell: tuple[int, int]) -> MaskOptions:
    return replace(options, q=int(data.sheet.positions[cell[0]]), kv=cell[1])


def _enter(data: MaskData) -> Go | None:
    if data.cursor is None:
        return None
    row = data.cursor[0]
    fed = data.sheet.part_of(row).fed_at(row)
    return Go(step=fed.step, pos=None if fed.n_rows == 1 else int(data.sheet.positions[row]))
