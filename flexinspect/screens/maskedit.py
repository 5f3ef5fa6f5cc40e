"""Asking how the mask should be changed: one change, in a few small questions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flexinspect.errors import FlexInspectError
from flexinspect.masks import PRESETS
from flexinspect.panels.base import TracePlace
from flexinspect.prompts import Segment
from flexinspect.screens.ask import ChoiceDialog, TextDialog
from flexinspect.text import escape_unprintable
from flexinspect.trace.reader import TraceReader

if TYPE_CHECKING:
    from flexinspect.control.messages import MaskEdit

EDIT_KINDS = (
    ("preset", "Use another preset"),
    ("drop", "Drop a segment: nobody sees it"),
    ("join", "Join two segments: they see each other"),
    ("see", "Let a segment see another"),
    ("unsee", "Stop a segment from seeing another"),
    ("open-cell", "Open a cell: a position sees a key"),
    ("close-cell", "Close a cell"),
    ("open-row", "Open a row: a position sees all keys up to itself"),
    ("close-row", "Close a row: a position sees only itself"),
)


async def ask_edit(app: Any, reader: TraceReader, place: TracePlace) -> MaskEdit | None:
    """Let the user describe one change of the mask; None when they leave it."""
    question = f"From step {place.step} on, with another mask"
    kind = await app.push_screen_wait(ChoiceDialog(question, EDIT_KINDS))
    if kind is None:
        return None
    if kind == "preset":
        return await _ask_preset(app)
    if kind in ("drop", "join", "see", "unsee"):
        return await _ask_segments(app, kind, reader, place)
    return await _ask_cells(app, kind)


async def _ask_preset(app: Any) -> MaskEdit | None:
    from flexinspect.control.messages import MaskEdit

    options = [(name, name) for name in PRESETS]
    name = await app.push_screen_wait(ChoiceDialog("Which preset?", options))
    return MaskEdit("preset", name=name) if name else None


_QUESTIONS = {
    "drop": ("Which segment is dropped?",),
    "join": ("Which segment …", "… is joined with which one?"),
    "see": ("Which segment …", "… sees which other one?"),
    "unsee": ("Which segment …", "… no longer sees which one?"),
}


async def _ask_segments(
    app: Any, kind: str, reader: TraceReader, place: TracePlace
) -> MaskEdit | None:
    from flexinspect.control.messages import MaskEdit

    try:
        where = (place.generation, place.branch)
        segments = await asyncio.to_thread(reader.segments, *where)
    except FlexInspectError as error:
        app.notify(error.sentence(), severity="error", markup=False)
        return None
    chosen: list[int] = []
    for question in _QUESTIONS[kind]:
        options = _segment_options(segments, exclude=chosen)
        answer = await app.push_screen_wait(ChoiceDialog(question, options))
        if answer is None:
            return None
        chosen.append(int(answer))
    op = "see" if kind == "unsee" else kind
    return MaskEdit(op, segments=tuple(chosen), is_open=kind != "unsee")  # type: ignore[arg-type]


def _segment_options(segments: Sequence[Segment], exclude: Sequence[int]) -> list[tuple[str, str]]:
    return [
        (str(number), f"{number:>2}  {escape_unprintable(one.label)}  [{one.start}, {one.stop})")
        for number, one in enumerate(segments)
        if number not in exclude and one.stop > one.start
    ]


async def _ask_cells(app: Any, kind: str) -> MaskEdit | None:
    from flexinspect.control.messages import MaskEdit

    is_cell, is_open = kind.endswith("cell"), kind.startswith("open")
    question = "Row and key, two positions" if is_cell else "Which row, a position"
    typed = await app.push_screen_wait(
        TextDialog(question, placeholder="42 7" if is_cell else "42")
    )
    numbers = [int(text) for text in re.findall(r"\d{1,9}", typed or "")]
    if len(numbers) != (2 if is_cell else 1):
        if typed:
            app.notify(f"That is no {'row and key' if is_cell else 'row'}.", severity="warning")
        return None
    if is_cell:
        return MaskEdit("cell", row=numbers[0], key=numbers[1], is_open=is_open)
    return MaskEdit("row", row=numbers[0], is_open=is_open)
