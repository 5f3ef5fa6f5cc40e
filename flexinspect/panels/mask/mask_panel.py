"""The mask panel: which tokens attend to which, as executed, and how that differs from declared."""

from __future__ import annotations

from dataclasses import replace

from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import CURSOR_MOVES, Help, Navigate, Panel, Picture, Request
from flexinspect.panels.mask.mask_data import MaskData, load_mask
from flexinspect.panels.mask.mask_drawing import NARROW_WIDTH, draw_mask
from flexinspect.panels.mask.mask_layout import (
    MaskOptions,
    MaskViewMode,
    format_scale,
    scroll_window,
)
from flexinspect.panels.mask.mask_text import (
    describe_mask,
    format_difference,
    format_steps,
    has_difference,
)
from flexinspect.panels.panel_source import Source

VIEW_MODES: tuple[MaskViewMode, ...] = ("executed", "received", "declared", "difference")


class MaskPanel(Panel[MaskData, MaskOptions]):
    """The mask of the whole sequence: a row per input token, a column per key."""

    name = "mask"
    title = "Mask"
    initial_options = MaskOptions()
    needs_tokens = True
    help = Help(
        "It shows for one layer and head which tokens (across) each token (down) attends to: the "
        "executed, received or declared mask, or where the executed mask differs from the declared "
        "one.",
        "Bright cells are open, dark ones closed, in between where a pixel holds both; the axes "
        "show the tokens and their segments, and the text below explains the cell under the "
        "cursor.",
        "Look for lost cells (declared open, but not executed), leaked cells (executed, but "
        "declared closed), rows that attend to no key, and paraphrases that attend to each other.",
    )
    depends_on_size = True
    actions = (
        "zoom.in",
        "zoom.out",
        "view.flip",
        "view.blocks",
        *CURSOR_MOVES,
        "cursor.enter",
    )

    def load(self, source: Source, request: Request[MaskOptions]) -> MaskData:
        """Read the visible window; parts of the mask are cached for the next step."""
        return load_mask(source, request)

    def describe(self, data: MaskData) -> list[str]:
        """Describe the mask, its differences from the declared one, and the cursor's cell."""
        return describe_mask(data)

    def paint(self, data: MaskData, request: Request[MaskOptions], theme: Theme) -> Picture:
        """Draw the visible window."""
        strips = draw_mask(data, theme)[: request.height]
        if data.layout.width != request.width:  # the panel was resized since it was loaded
            strips = [strip.adjust_cell_length(request.width) for strip in strips]
        return Picture(strips, format_note(data), data.lse_check.is_failed or has_difference(data))

    def on_action(
        self, action: str, data: MaskData, request: Request[MaskOptions]
    ) -> MaskOptions | Navigate | None:
        """Zoom, flip the view, show blocks, move the cursor, go to the step of the cursor's row."""
        options, layout = request.options, data.layout
        if action in ("zoom.in", "zoom.out"):
            zoom = layout.zoom + (1 if action == "zoom.in" else -1)
            if not 0 <= zoom <= layout.last_zoom:
                return None
            return replace(options, zoom=zoom, row=None, key=None)
        if action == "view.flip":
            modes = [m for m in VIEW_MODES if data.mask_view.spec or m in ("executed", "received")]
            mode = options.view if options.view in modes else modes[0]
            return request.with_next("view", modes, mode)
        if action == "view.blocks":
            return replace(options, blocks=not options.blocks)
        if action == "cursor.enter":
            return _navigate_to_cursor(data)
        return _move_cursor(action, data, options) if action in CURSOR_MOVES else None

    def on_mouse(
        self, x: int, y: int, data: MaskData, request: Request[MaskOptions], *, click: bool
    ) -> MaskOptions | Navigate | None:
        """Move the cursor to the mouse without scrolling the window."""
        cell = data.layout.cell_at(x, y)
        if cell is None or cell[0] >= data.mask_view.n_rows or cell[1] >= data.mask_view.n_keys:
            return None
        if cell == data.cursor:
            return None
        grid = data.layout.grid
        return _with_cursor(data, replace(request.options, row=grid.row, key=grid.key), cell)


def format_note(data: MaskData) -> str:
    """Return the note in the border: problems first, because a narrow panel cuts its end."""
    mask_view, layer = data.mask_view, data.place.layer
    shared = mask_view.heads == 1  # all heads have the same mask
    head = "all heads" if shared else f"head {mask_view.head} of {mask_view.heads}"
    where, scale = f"layer {layer} · {head}", f"zoom {format_scale(data.layout)}"
    if data.layout.width < NARROW_WIDTH:
        where = f"L{layer} " + ("all" if shared else f"H{mask_view.head}/{mask_view.heads}")
        scale = format_scale(data.layout)
    show_difference = has_difference(data) or data.view_mode == "difference"
    parts = [
        data.view_mode,
        format_difference(data) if show_difference else "",
        data.lse_check.describe() + (": not what ran" if data.lse_check.is_failed else ""),
        where,
        scale,
        f"rows of {format_steps(data)}" if mask_view.is_truncated else "",
    ]
    return " · ".join(part for part in parts if part)


def _move_cursor(action: str, data: MaskData, options: MaskOptions) -> MaskOptions | None:
    mask_view, grid = data.mask_view, data.layout.grid
    if data.cursor is None:
        row = mask_view.n_rows - 1 if data.focus_row is None else data.focus_row
        cell = row, min(int(mask_view.positions[row]), mask_view.n_keys - 1)
    else:
        down, across = CURSOR_MOVES[action]
        row = data.cursor[0] + down * grid.row_scale
        key = data.cursor[1] + across * grid.key_scale
        cell = min(max(row, 0), mask_view.n_rows - 1), min(max(key, 0), mask_view.n_keys - 1)
        if cell == data.cursor:
            return None
    first_row, first_key = scroll_window(data.layout, *cell)
    return _with_cursor(data, replace(options, row=first_row, key=first_key), cell)


def _with_cursor(data: MaskData, options: MaskOptions, cell: tuple[int, int]) -> MaskOptions:
    return replace(options, q=int(data.mask_view.positions[cell[0]]), kv=cell[1])


def _navigate_to_cursor(data: MaskData) -> Navigate | None:
    if data.cursor is None:
        return None
    row = data.cursor[0]
    step_rows = data.mask_view.part_of(row).step_at(row)
    return Navigate(
        step=step_rows.step,
        pos=None if step_rows.n_rows == 1 else int(data.mask_view.positions[row]),
    )
