"""The code panel: the source text of a mask_mod, with the values of one cell."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support import mask_trace
from support.traces import RUN, sample_generation
from support.tui import screen_lines, settle, until

from flexinspect.core.keyboard import all_keys
from flexinspect.drawing.text_lines import Pen
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Missing, Request, TracePlace
from flexinspect.panels.code_panel import CodeData, CodeOptions, CodePanel, _head_lines
from flexinspect.panels.panel_source import Source
from flexinspect.records.finding import Finding, Severity
from flexinspect.trace.codec import encode_findings
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from flexinspect.tui.app import InspectorApp

TEXT = """def mask_mod(b, h, q_idx, kv_idx):
    same = SEG[q_idx] == SEG[kv_idx]
    return (kv_idx <= q_idx) & (same | (kv_idx == 0) | (q_idx >= CUE))"""
SEG = {"shape": [15], "values": [0, 1, 2, 3], "counts": [1, 6, 6, 2]}
CODE = {"source": "gen.py:31", "variables": {"SEG": SEG, "CUE": 13}, "indices": "rows"}
EVENT = {"source": "gen.py:31", "name": "mask_mod", "line": 31, "text": TEXT}
INSERT = "INSERT INTO events (kind, text, at, data) VALUES ('source', '', 0, ?)"


def write(path: Path, code: Any = CODE, event: Any = EVENT) -> Path:
    """Write a trace whose masks all have this code."""
    mask_trace.write(path)
    with closing(sqlite3.connect(path)) as db, db:
        value = None if code is None else json.dumps(code)
        db.execute("UPDATE masks SET mask_mod_code = ?", (value,))
        db.execute(INSERT, (json.dumps(event),))
    return path


def load(path: Path, layer: int = mask_trace.RIGHT, **options: int) -> CodeData:
    place = TracePlace(step=0, layer=layer)
    request = Request(place, CodeOptions(**options), 100, 30)
    return CodePanel().load(Source(open_trace(path)), request)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("code") / "t.flextrace")


def test_a_closed_cell_names_the_condition_that_closed_it(trace: Path) -> None:
    lines = CodePanel().describe(load(trace, q=9, kv=3))
    assert lines[:4] == [
        "Cell: row 9 “this”, key 3 “is”. It is closed.",
        "Closed because of line 32: SEG[q_idx] == SEG[kv_idx], which is 2 == 1, False",
        "Closed because of line 33: kv_idx == 0, which is 3 == 0, False",
        "Closed because of line 33: q_idx >= CUE, which is 9 >= 13, False",
    ]


def test_below_each_line_stand_its_values(trace: Path) -> None:
    lines = CodePanel().describe(load(trace, q=9, kv=3))
    before, after = "(False | (3 == 0) | (9 >= 13))", "(False | False | False)"
    assert lines[5:] == [
        "   31 def mask_mod(b, h, q_idx, kv_idx):",
        "   32     same = SEG[q_idx] == SEG[kv_idx]  ◀",
        "            SEG[9] = 2, SEG[3] = 1",
        "          → 2 == 1 → False",
        "   33     return (kv_idx <= q_idx) & (same | (kv_idx == 0) | (q_idx >= CUE))  ◀",
        f"          → (3 <= 9) & {before} → True & {after} → False",
    ]


def test_without_a_chosen_cell_it_shows_the_first_one_that_differs(trace: Path) -> None:
    data = load(trace, layer=mask_trace.WRONG)
    assert "should be" in CodePanel().describe(data)[0]


def load_step(path: Path, step: int) -> CodeData:
    place = TracePlace(step=step, layer=mask_trace.RIGHT)
    return CodePanel().load(Source(open_trace(path)), Request(place, CodeOptions(), 100, 30))


def test_without_a_difference_it_shows_a_cell_of_the_step(trace: Path) -> None:
    n_prompt = mask_trace.N_PROMPT
    assert [load_step(trace, step).q for step in (0, 1, 2)] == [
        n_prompt - 1,
        n_prompt,
        n_prompt + 1,
    ]


def test_a_step_with_a_finding_shows_the_border_that_it_names(tmp_path: Path) -> None:
    path = write(tmp_path / "t.flextrace")
    finding = Finding("segments.shifted", Severity.WARNING, "Early.", 0, step=0, positions=(7,))
    with closing(sqlite3.connect(path)) as db, db:
        for statement in encode_findings([finding]):
            db.execute(*statement)
    data = load_step(path, 0)
    assert (data.q, data.kv, data.evaluation.is_open) == (7, 6, False)


def test_a_cell_that_ran_otherwise_than_the_code_says_is_pointed_out(trace: Path) -> None:
    data = load(trace, layer=mask_trace.WRONG)
    assert data.evaluation.is_open is not None
    disagreeing = [line for line in CodePanel().describe(data) if "block tables decide" in line]
    assert len(disagreeing) == 1


def test_positions_are_indices_of_a_mask_mod_that_takes_positions(tmp_path: Path) -> None:
    path = write(tmp_path / "t.flextrace", CODE | {"indices": "positions"})
    assert load(path, q=9, kv=3).indices == (0, 0, 9, 3)


def test_the_arrow_keys_move_to_neighbouring_cells_and_stop_at_the_border(trace: Path) -> None:
    panel, data = CodePanel(), load(trace, q=9, kv=0)
    request = Request(TracePlace(), CodeOptions(9, 0))
    assert panel.on_action("cursor.down", data, request) == CodeOptions(10, 0)
    assert panel.on_action("cursor.right", data, request) == CodeOptions(9, 1)
    assert panel.on_action("cursor.left", data, request) is None


def test_a_position_behind_the_mask_shows_its_last_row(trace: Path) -> None:
    data = load(trace, q=4000, kv=4000)
    assert (data.q, data.kv) == (data.positions[-1], data.n_keys - 1)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(None, "was not recorded"), (CODE | {"source": "other.py:1"}, "source text of other.py:1")],
)
def test_missing_code_is_a_sentence(tmp_path: Path, code: Any, reason: str) -> None:
    path = write(tmp_path / "t.flextrace", code)
    try:
        text = "\n".join(CodePanel().describe(load(path, q=9, kv=3)))
    except Missing as missing:
        text = "\n".join(missing.lines())
    assert reason in text


@pytest.mark.parametrize("layer", [mask_trace.BARE, mask_trace.TABLES])
def test_a_layer_without_cells_is_a_sentence(trace: Path, layer: int) -> None:
    with pytest.raises(Missing, match="cells of this layer's mask") as caught:
        load(trace, layer=layer)
    assert caught.value.hint == ""


def test_only_a_trace_of_level_basic_is_told_to_record_more(tmp_path: Path) -> None:
    path = tmp_path / "basic.flextrace"
    with closing(TraceWriter.create(path, RUN | {"level": "basic"})) as writer:
        writer.begin_generation(sample_generation(0))
    with pytest.raises(Missing) as caught:
        load(path, layer=0)
    assert caught.value.hint == "Record with --level advanced or higher."
    empty = tmp_path / "empty.flextrace"
    TraceWriter.create(empty, RUN).close()
    with pytest.raises(Missing) as caught:
        load(empty, layer=0)
    assert caught.value.lines() == ["No step was recorded, so there is no mask_mod to show."]


@pytest.mark.parametrize(
    "text", ["def f(:", "x = 1", "lambda b: (", "def f(b, h, q, k):\n  while b:\n    pass"]
)
def test_any_source_text_is_shown_without_an_error(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "t.flextrace", event=EVENT | {"text": text})
    lines = CodePanel().describe(load(path, q=9, kv=3))
    assert any("not evaluated to the end" in line for line in lines)


@pytest.mark.parametrize(
    "variables",
    [
        7,
        {},
        {"SEG": {"shape": [2]}},
        {"SEG": 5},
        {"SEG": {"other": "x"}},
        {"SEG": {"shape": 3, "counts": "x"}},
        {"SEG": []},
    ],
)
def test_any_values_are_shown_without_an_error(tmp_path: Path, variables: Any) -> None:
    path = write(tmp_path / "t.flextrace", CODE | {"variables": variables})
    lines = CodePanel().describe(load(path, q=9, kv=3))
    assert any("not evaluated to the end" in line for line in lines)


def test_every_size_is_filled_and_never_exceeded(trace: Path) -> None:
    data = load(trace, q=9, kv=3)
    for width in (1, 8, 20, 38, 80, 200):
        for height in (1, 2, 5, 20):
            request = Request(TracePlace(), CodeOptions(9, 3), width, height)
            picture = CodePanel().paint(data, request, Theme("none"))
            assert len(picture.strips) <= height
            assert {strip.cell_length for strip in picture.strips} == {width}


def test_in_a_small_panel_the_deciding_line_is_visible(trace: Path) -> None:
    request = Request(TracePlace(), CodeOptions(9, 3), 100, 8)
    strips = CodePanel().paint(load(trace, q=9, kv=3), request, Theme("none")).strips
    assert any("◀" in strip.text for strip in strips)


def test_a_scrolled_panel_begins_with_the_beginning_of_a_line(trace: Path) -> None:
    data, panel = load(trace, q=9, kv=3), CodePanel()
    for width, height in product((24, 30, 40, 60), range(12, 30)):
        request = Request(TracePlace(), CodeOptions(9, 3), width, height)
        rows = [strip.text.rstrip() for strip in panel.paint(data, request, Theme("none")).strips]
        head = len(Pen(Theme("none"), width).paragraphs(_head_lines(data)))
        assert len(rows) <= head or re.match(r"gen\.py|\s*\d+ |\s+→|\s+SEG\[9\]", rows[head])


async def test_y_shows_the_code_of_the_cell_that_the_mask_panel_has_selected(
    trace: Path,
) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=(160, 50)) as pilot:
        await settle(pilot)
        screen: Any = app.screen
        mask = next(view for view in screen.slots.views() if view.panel.name == "mask")
        mask.focus()
        await pilot.press("shift+up", "shift+left")
        await settle(pilot)
        cell = (mask.options.q, mask.options.kv)
        await pilot.press("y")
        await until(pilot, lambda: any("Cell: row" in line for line in screen_lines(app)))
        code = screen.slots.current()
        assert code.panel.name == "code"
        assert (code.options.q, code.options.kv) == cell
        await pilot.press("shift+left")
        await settle(pilot)
        assert (mask.options.q, mask.options.kv) == (cell[0], cell[1] - 1)


def test_the_help_names_the_keys_that_move_the_cell_and_those_that_move_the_place() -> None:
    assert "Shift and an arrow key move to another cell" in CodePanel.help.read
    assert {"cursor.up", "cursor.down"} <= set(CodePanel.actions)
    defaults = {key.id: key.keys for key in all_keys()}
    assert "shift+down" in defaults["cursor.down"]
    assert "down" in defaults["layer.next"]
