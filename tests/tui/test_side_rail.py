"""The side rail: what it lists, how it follows the place, and where it leads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.traces import SEGMENTS, sample_generation, sample_step
from support.tui import screen_text, settle, until
from textual.events import MouseScrollUp

from flexinspect.control.discovery import Address, CaptureEntry
from flexinspect.panels.base import TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import GenerationEnd
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from flexinspect.tui import rail_data
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.panel_view import PanelView
from flexinspect.tui.rail_data import (
    OtherTraces,
    Outline,
    RailRequest,
    Row,
    describe_fork,
    load_rail,
    row_of_place,
)
from flexinspect.tui.saved_state import add_recent_trace, load_state, save_state
from flexinspect.tui.screens.trace_screen import TraceScreen
from flexinspect.tui.side_rail import RailList, SideRail

pytestmark = pytest.mark.slow

WIDE, SMALL = (130, 40), (80, 24)
CHANGE = {"kind": "token", "token_id": 7, "text": " Mary\x1b"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flexinspect.control.discovery.running", list)


@pytest.fixture
def forked(tmp_path: Path) -> Path:
    """A trace of three answers: the last is unfinished, the second has a fork and problems."""
    path = tmp_path / "forked.flextrace"
    writer = TraceWriter.create(path, {})
    for number in range(3):
        writer.begin_generation(sample_generation(number))
        for step in range(3):
            writer.write_step(sample_step(step, number))
        if number < 2:
            text = ("Jane\n Austen", "Mary\x1b")[number]
            end = GenerationEnd(number, "finished", text, SEGMENTS, "eos", 1010.0)
            writer.end_generation(end)
    writer.begin_branch(1, 1, parent=0, fork_step=1, change=CHANGE, segments=SEGMENTS)
    for step in (1, 2):
        writer.write_step(replace(sample_step(step, 1), branch=1, masks=()))
    writer.write_findings(
        [
            Finding("a.b", Severity.ERROR, "It is wrong.", generation=1),
            Finding("a.c", Severity.ERROR, "It is wrong too.", generation=1),
            Finding("a.d", Severity.WARNING, "It is slow.", generation=1),
            Finding("a.d", Severity.WARNING, "It is slow.", generation=0),
            Finding("a.e", Severity.NOTE, "It is odd.", generation=2),
        ]
    )
    writer.close()
    return path


def rows(app: Any) -> list[str]:
    """Return the text of the rail, line by line."""
    return [strip.text.rstrip() for strip in app.screen.query_one(RailList).strips]


def screen(app: InspectorApp) -> TraceScreen:
    assert isinstance(app.screen, TraceScreen)
    return app.screen


async def press(pilot: Any, *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


def load(path: Path, **changes: Any) -> rail_data.RailData:
    place = TracePlace(1)
    request = RailRequest(place, 1, OtherTraces(), row_of_place(place), 0, 30)
    with open_trace(path) as reader:
        return load_rail(Source(reader), "forked", request._replace(**changes))


# -- rows -----------------------------------------------------------------------------------------


def test_the_rows_of_an_outline_are_found_without_being_made() -> None:
    answers = range(1_000_000)
    outline = Outline((("heading", ("a",)), ("answer", answers), ("trace", (Path("b"),))))
    assert len(outline) == 1_000_002
    assert outline.row(500_001) == Row("answer", 500_000)
    assert outline.index(Row("answer", 999_999)) == 1_000_000
    assert outline.index(Row("trace", Path("b"))) == 1_000_001
    assert outline.index(Row("branch", 1)) is None


def test_the_cursor_moves_over_headings() -> None:
    sections = (("heading", ("a",)), ("answer", range(2)), ("heading", ("", "b")), ("trace", (1,)))
    outline = Outline(sections)
    assert [outline.move(2, 1), outline.move(5, -1)] == [5, 2]
    assert [outline.move(1, -1), outline.move(1, -99), outline.move(1, 99)] == [1, 1, 5]
    assert Outline((("heading", ("a",)),)).move(0, 1) == 0


def test_answers_have_their_sign_and_their_problems(forked: Path) -> None:
    answers = load(forked).answers
    assert answers[0] == ("“Jane Austen”", True, (0, 1))
    assert answers[1] == ("“Mary\\x1b”", False, (2, 1))
    assert answers[2].is_correct is None
    assert answers[2].text.startswith("Who wrote")
    assert answers[2].problems == (0, 0)


def test_the_forks_of_the_current_answer_are_below_it(forked: Path) -> None:
    data = load(forked)
    assert data.rows[2:5] == (("answer", 1), ("branch", 1), ("answer", 2))
    assert describe_fork(data.branches[1]) == "token 2: “ Mary\\x1b”"
    assert Row("branch", 1) not in load(forked, place=TracePlace(0)).rows


def test_only_visible_answers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "many.flextrace"
    writer = TraceWriter.create(path, {})
    for number in range(1000):
        writer.begin_generation(sample_generation(number))
    writer.close()
    place = TracePlace(700)
    data = load(path, place=place, cursor=row_of_place(place), height=10)
    assert len(data.outline) == 1001
    assert sorted(data.answers) == [row.key for row in data.rows] == list(range(695, 705))
    tops = {}
    for number in (696, 695, 704, 0, 999):
        cursor = Row("answer", number)
        tops[number] = load(path, place=place, cursor=cursor, top=data.top, height=10).top
    assert tops == {696: 696, 695: 695, 704: 697, 0: 0, 999: 991}


# -- the widget -----------------------------------------------------------------------------------


async def test_a_key_shows_focuses_and_hides_the_rail_and_it_is_remembered(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        rail = app.screen.query_one(SideRail)
        assert not rail.display
        n_before = len(screen(app).slots.views())
        await press(pilot, "tab", "o")
        assert rows(app)[:3] == [
            "sample",
            "▸  1 ✓ “Jane Austen”       ✖ 1",
            "   2 ✓ “Jane Austen”",
        ]
        assert app.screen.query_one("#header").region.x == rail.size.width + 2
        await press(pilot, "escape")
        assert rail.display
        assert app.screen.focused is screen(app).slots.views()[1]
        await press(pilot, "ctrl+b")
        assert rail.rows.has_focus
        await press(pilot, "o")
        assert not rail.display
        assert isinstance(app.screen.focused, PanelView)
        assert len(screen(app).slots.views()) == n_before
        assert load_state().rail is False
        await press(pilot, "o")
    again = InspectorApp(trace)
    async with again.run_test(size=WIDE) as pilot:
        await settle(pilot)
        assert again.screen.query_one(SideRail).display
        assert isinstance(again.screen.focused, PanelView)


@pytest.mark.parametrize(("width", "is_shown"), [(100, False), (159, False), (160, True)])
async def test_a_new_user_sees_the_rail_on_a_wide_screen(
    trace: Path, width: int, is_shown: bool
) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=(width, 40)) as pilot:
        await settle(pilot)
        assert app.screen.query_one(SideRail).display is is_shown
        assert isinstance(app.screen.focused, PanelView)


async def test_a_narrow_screen_is_covered_only_while_a_row_is_chosen(forked: Path) -> None:
    save_state(rail=True)
    app = InspectorApp(forked)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        rail = app.screen.query_one(SideRail)
        assert not rail.display
        await press(pilot, "o")
        assert rail.display
        assert app.screen.query_one("#header").region.x == 0
        await press(pilot, "escape")
        assert not rail.display
        await press(pilot, "o", "tab")
        assert not rail.display
        await press(pilot, "o")
        await pilot.resize_terminal(120, 40)
        await settle(pilot)
        assert rail.display
        await pilot.resize_terminal(*SMALL)
        await press(pilot, "down", "enter")
        assert not rail.display
        assert screen(app).place.generation == 1
        assert isinstance(app.screen.focused, PanelView)
    assert load_state().rail is True


async def test_the_rail_goes_to_answers_and_forks_and_follows_the_place(forked: Path) -> None:
    app = InspectorApp(forked)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        await press(pilot, "o", "down", "enter")
        assert screen(app).place == TracePlace(1)
        assert [row[0] for row in rows(app)[1:4]] == [" ", "▸", " "]
        assert rows(app)[3].lstrip() == "┣ 1 token 2: “ Mary\\x1b”"
        await press(pilot, "down", "enter")
        assert (screen(app).place.generation, screen(app).place.branch) == (1, 1)
        assert screen(app).place.step == 1
        assert rows(app)[3].startswith("▸")
        await press(pilot, "right")
        assert screen(app).place.generation == 1
        await press(pilot, "escape", "<")
        assert rows(app)[1].startswith("▸")
        assert rows(app)[2].startswith("   2 ✖ “Mary\\x1b”")
        assert rows(app)[2].endswith("✖ 2")
        assert rows(app)[1].endswith("▲ 1")
        await press(pilot, "backspace")
        assert screen(app).place == TracePlace(1)


async def test_a_click_goes_to_an_answer_and_the_wheel_moves_the_cursor(forked: Path) -> None:
    app = InspectorApp(forked)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        await press(pilot, "o")
        await pilot.click(RailList, offset=(5, 3))
        await settle(pilot)
        assert screen(app).place.generation == 2
        await pilot.click(RailList, offset=(5, 0))
        await settle(pilot)
        assert screen(app).place.generation == 2
        await pilot._post_mouse_events([MouseScrollUp], RailList, button=0)
        await press(pilot, "enter")
        assert screen(app).place.generation == 0


async def test_a_hidden_rail_reads_nothing(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    def note(name: str, result: Any) -> Any:
        return lambda *args: reads.append(name) or result

    monkeypatch.setattr(rail_data, "load_rail", note("rows", None))
    monkeypatch.setattr(rail_data, "list_other_traces", note("others", OtherTraces()))
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await press(pilot, "right", ">", "o", "o")
        n_reads = len(reads)
        await press(pilot, "right", "<")
        assert len(reads) == n_reads
        assert set(reads) == {"rows", "others"}


async def test_a_new_answer_and_its_text_appear_while_a_run_records(tmp_path: Path) -> None:
    path = tmp_path / "live.flextrace"
    facts = {"pid": 1, "started_at": time.time()}
    writer = TraceWriter.create(path, facts)
    writer.begin_generation(sample_generation(0))
    writer.write_step(sample_step(0))
    app = InspectorApp(path)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        await press(pilot, "o")
        assert "Who wrote" in rows(app)[1]
        end = GenerationEnd(0, "finished", "Jane", SEGMENTS, "eos", 1010.0)
        writer.end_generation(end)
        writer.begin_generation(sample_generation(1))
        writer.write_step(sample_step(0, 1))
        screen(app).poll_trace()
        await until(pilot, lambda: any("“Jane”" in row for row in rows(app)))
        assert any(row.lstrip("▸ ").startswith("2") for row in rows(app))
    writer.close()


# -- other traces ---------------------------------------------------------------------------------


def test_the_own_run_is_none_of_the_others_before_its_trace_is_open(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = CaptureEntry(11, time.time(), Address("/run/11.sock"), str(trace))
    monkeypatch.setattr("flexinspect.control.discovery.running", lambda: [entry])
    assert not rail_data.list_other_traces(None, 11).captures
    assert rail_data.list_other_traces(None, None).captures == {trace: "generation, process 11"}


async def test_other_traces_are_listed_with_their_verdict_and_opened(
    trace: Path, forked: Path
) -> None:
    add_recent_trace(forked)
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        await press(pilot, "o")
        await until(pilot, lambda: any("✖ 2 errors" in row for row in rows(app)))
        assert "Recent traces" in rows(app)
        assert len([row for row in rows(app) if "sample" in row]) == 1
        await press(pilot, "end")
        await pilot.press("enter")
        await until(pilot, lambda: "Mary" in screen_text(app))
        await settle(pilot)
        assert rows(app)[0] == "forked"
        assert len(app.screen_stack) == 2
        assert isinstance(app.screen.focused, PanelView)
    assert load_state().recent[0] == str(forked)


async def test_running_captures_are_listed_without_the_own_one(
    trace: Path, forked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [
        CaptureEntry(n, time.time(), Address(f"/run/{n}.sock"), str(path), "demo\x1b")
        for n, path in ((11, trace), (12, forked))
    ]
    monkeypatch.setattr("flexinspect.control.discovery.running", lambda: entries)
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        await press(pilot, "o")
        await until(pilot, lambda: "Running now" in rows(app))
        shown = [row for row in rows(app) if "process" in row]
        assert shown == ["  ● demo\\x1b, process 12"]
        assert "Recent traces" not in rows(app)


async def test_a_trace_that_cannot_be_opened_is_explained(trace: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.flextrace"
    short.write_bytes(trace.read_bytes()[:100])
    add_recent_trace(short)
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        await press(pilot, "o")
        await until(pilot, lambda: any("? damaged" in row for row in rows(app)))
        await press(pilot, "end")
        await pilot.press("enter")
        await until(pilot, lambda: "This trace cannot be opened" in screen_text(app))
