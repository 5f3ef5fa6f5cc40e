"""The interface as a user has it: keys, mouse, sizes, prompts, what is remembered."""

from __future__ import annotations

import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.style import Style
from support.traces import LAYERS, sample_trace
from support.tui import place, press, screen_lines, screen_text, settle, until
from textual.command import CommandList, CommandPalette

from flexinspect.core.keyboard import KEYS
from flexinspect.panels.base import Missing, Request, TracePlace
from flexinspect.panels.panel_registry import load_panel, panel_names
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import EventRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.panel_layout import LAYOUTS, Slots, n_columns, n_slots
from flexinspect.tui.saved_state import Layout, load_state, save_layout
from flexinspect.tui.screens.dialogs import ChoiceDialog, HelpScreen
from flexinspect.tui.screens.start_screen import UnreadableTraceScreen
from flexinspect.tui.screens.trace_screen import TraceScreen

WIDE, SMALL = (130, 40), (80, 24)
PANELS = ("tokens", "mask", "attention", "logits", "layers", "memory", "path", "findings", "run")


async def test_a_trace_opens_at_its_first_step(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        assert place(app) == TracePlace(0, 0, 0)
        lines = screen_lines(app)
        assert lines[0].startswith(
            "“Jane Austen” ✓ · answer 1 of 2 · token 1 of 6 (step 0, prefill)"
        )
        assert "Jane" in lines[1]
        assert "▲13" in lines[2]
        assert "quit" in lines[-1]


async def test_tab_moves_between_panels_and_digits_change_them(
    trace: Path, own_state: Path
) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        slots = app.screen.query_one(Slots)
        first, second = slots.views()
        assert slots.current() is first
        await press(pilot, "tab")
        assert slots.current() is second
        await press(pilot, "tab", "5")
        assert slots.views()[0].panel.name == "layers"
    remembered = json.loads((own_state / "flexinspect" / "state.json").read_text())
    assert remembered["layouts"]["generation"]["panels"][0] == "layers"
    again = InspectorApp(trace)
    async with again.run_test(size=SMALL) as pilot:
        await settle(pilot)
        assert again.screen.query_one(Slots).views()[0].panel.name == "layers"


async def test_a_digit_of_a_panel_in_another_frame_swaps_the_two(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        slots = app.screen.query_one(Slots)
        names = [view.panel.name for view in slots.views()]
        number = panel_names().index(names[1]) + 1
        await press(pilot, str(number))
        assert [view.panel.name for view in slots.views()] == names[::-1]
        assert slots.current() is slots.views()[0]
        await press(pilot, str(number))  # a panel that is there already stays
        assert [view.panel.name for view in slots.views()] == names[::-1]
        slots.focus_panel(names[0])
        await pilot.pause()
        assert slots.current() is slots.views()[1]
        assert [view.panel.name for view in slots.views()] == names[::-1]


async def test_garbage_collection_is_on_after_the_first_frame(trace: Path) -> None:
    gc.disable()
    try:
        async with InspectorApp(trace).run_test(size=SMALL) as pilot:
            await settle(pilot)
            await pilot.pause()
            assert gc.isenabled()
    finally:
        gc.enable()


async def test_keys_typed_before_the_first_frame_act_on_the_real_panels(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinspect.tui.panel_layout.LOAD_WITHIN_S", 600)
    monkeypatch.setattr(Slots, "on_resize", lambda self, event: self.lay_out())
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        assert isinstance(app.screen, TraceScreen)
        slots = app.screen.slots
        assert not slots.loaded.is_set()
        app.screen.action_do("panel.show-5")
        app.screen.action_do("app.help")
        await settle(pilot)
        assert isinstance(app.screen, HelpScreen)
        assert slots.views()[0].panel.name == "layers"
    assert load_state().layouts["generation"].panels[0] == "layers"


async def test_x_shows_one_panel_alone_and_all_again(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        slots = app.screen.query_one(Slots)
        await press(pilot, "tab", "x")
        (alone,) = slots.views()
        assert alone.size.width == SMALL[0] - 2
        await press(pilot, "right")
        assert place(app).step == 1
        await press(pilot, "x")
        assert len(slots.views()) == 2


async def test_panels_are_saved_but_not_that_one_is_alone(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        await press(pilot, "tab", "tab", "x", "7")
    again = InspectorApp(trace)
    async with again.run_test(size=WIDE) as pilot:
        await settle(pilot)
        slots = again.screen.query_one(Slots)
        assert [view.panel.name for view in slots.views()] == ["mask", "logits", "path"]


async def test_the_layout_can_be_reset(trace: Path) -> None:
    save_layout("generation", Layout(("tokens", "run", "memory", "layers"), 1))
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        await press(pilot, "x", "=")
        shown = [view.panel.name for view in app.screen.query_one(Slots).views()]
        assert shown == [*LAYOUTS["understand"][:3]]
    assert load_state().layouts["generation"] == Layout(LAYOUTS["understand"], 0)


async def test_plus_and_minus_change_how_many_panels_there_are(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        slots = app.screen.query_one(Slots)
        assert len(slots.views()) == 3
        await press(pilot, "-", "-", "-", "-")
        assert len(slots.views()) == 1
        await press(pilot, "+")
        assert len(slots.views()) == 2
    assert load_state().layouts["generation"].slots == 2


@pytest.mark.parametrize("size", [(20, 6), (40, 12), (80, 24), (100, 50), (250, 70)])
async def test_every_size_shows_something(trace: Path, size: tuple[int, int]) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        await press(pilot, "right", "x", "x")
        assert app.screen.query_one(Slots).views()
        assert "sample" in screen_lines(app)[0] or "step" in screen_lines(app)[0]


def test_the_layout_follows_the_width() -> None:
    assert [n_slots(w, h) for w, h in ((40, 10), (50, 30), (80, 24), (130, 24), (130, 40))] == [
        *(1, 2, 2, 2, 3)
    ]
    assert [n_columns(n, w) for n, w in ((2, 50), (2, 80), (3, 80), (3, 130), (4, 130))] == [
        *(1, 2, 2, 2, 2)
    ]


@pytest.mark.parametrize("name", PANELS)
async def test_every_panel_shows_the_sample(trace: Path, name: str) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        slots = app.screen.query_one(Slots)
        slots.show_panel(name)
        await settle(pilot)
        view = next(view for view in slots.views() if view.panel.name == name)
        assert view._error is None
        assert any(strip.text.strip() for strip in view.strips)
        for key in ("right", "m", "v", "z", "Z", "shift+down", "shift+right", "B"):
            await pilot.press(key)
        await settle(pilot)
        assert view._error is None


async def test_help_names_the_keys_and_says_what_the_focused_panel_shows(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=(100, 80)) as pilot:
        await settle(pilot)
        panel = app.screen.query_one(Slots).current().panel
        await pilot.press("?")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)
        shown = " ".join(screen_text(app).split()).replace("│ ", "").replace(" │", "")
        assert panel.help.shows.split(",")[0][:40] in shown
        assert shown.index("next token") < shown.index(panel.help.shows[:40])
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(app.screen, TraceScreen)


async def test_a_click_on_the_strip_goes_to_that_token(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        words = screen_lines(app)[1]
        column = cell_len(words[: words.index("ten")])
        await pilot.click("#strip", offset=(column, 0))
        await settle(pilot)
        assert place(app).step == 2


async def test_every_action_can_be_reached_by_mouse_through_the_menu(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        footer = screen_lines(app)[-1]
        assert cell_len(footer.rstrip()) <= SMALL[0]
        assert footer.rstrip().endswith("quit")
        await pilot.click(offset=(cell_len(footer[: footer.index("menu")]), SMALL[1] - 1))
        await until(pilot, lambda: isinstance(app.screen, CommandPalette))
        offered = app.screen.query_one(CommandList)
        await until(pilot, lambda: offered.option_count)
        assert offered.option_count == len(KEYS) + len(panel_names())


async def test_keys_can_be_remapped(trace: Path) -> None:
    app = InspectorApp(trace, keymap={"step.next": "w"})
    async with app.run_test(size=SMALL) as pilot:
        await press(pilot, "w")
        assert place(app).step == 1
        await press(pilot, "right")
        assert place(app).step == 1


async def test_text_of_a_trace_is_never_markup_or_control(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        text = screen_text(app)
        assert "\x1b" not in text
        assert "\\x1b" in text


async def test_without_colours_nothing_is_coloured(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        for view in app.screen.query_one(Slots).views():
            for strip in view.strips:
                for segment in strip:
                    assert segment.style is None or segment.style.color is None, view.panel.name
        assert any("Mask" in text and style.reverse for text, style in drawn(app))  # is focused
        for keys, screen in (
            ((), TraceScreen),
            (("question_mark",), HelpScreen),
            (("escape", "p", "down"), CommandPalette),
        ):
            for key in keys:
                await press(pilot, key)
            assert type(app.screen) is screen
            assert {str(style) for _, style in drawn(app) if style.color or style.bgcolor} == set()
        chosen = [text.strip() for text, style in drawn(app) if style.underline and style.bold]
        assert any("Previous token" in text for text in chosen)


def drawn(app: InspectorApp) -> list[tuple[str, Style]]:
    """Return what is on the screen, with the styles that go to the terminal."""
    strips = app.screen._compositor.render_strips()
    return [(each.text, each.style or Style()) for strip in strips for each in strip]


async def test_a_broken_trace_gets_a_screen_with_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "bad.flextrace"
    path.write_bytes(b"not a trace at all" * 100)
    app = InspectorApp(path)
    async with app.run_test(size=WIDE) as pilot:
        await pilot.pause()
        assert isinstance(app.screen, UnreadableTraceScreen)
        await app.workers.wait_for_complete()
        await pilot.pause()
        text = screen_text(app)
        assert "is not a flexinspect trace" in " ".join(text.split())
        assert "Nothing in it can be read as a trace." in text
    assert app.trace_error is not None


async def test_a_trace_cut_short_says_what_can_still_be_read_and_is_copied_when_asked(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = trace.parent / "copies"
    copies.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(copies))
    whole = trace.read_bytes()
    trace.write_bytes(whole[: len(whole) * 3 // 4])
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await pilot.pause()
        assert isinstance(app.screen, UnreadableTraceScreen)
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "cut short" in screen_text(app)
        assert "Readable in it:" in screen_text(app)
        assert not app.screen.query_one("#copying").display
        assert not list(copies.iterdir())
        await pilot.press("tab", "enter")
        while not isinstance(app.screen, TraceScreen):
            await pilot.pause(0.01)
        await settle(pilot)
        assert isinstance(app.screen, TraceScreen)
        assert "sample" in screen_lines(app)[0]
    assert not list(copies.iterdir())


async def test_a_trace_of_a_killed_process_is_usable_and_says_so(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "dead.flextrace", generations=1, steps=3, finish=False)
    app = InspectorApp(path)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        text = screen_text(app)
        assert "The trace was never finished." in text
        assert "its process ended without finishing the trace" in text.lower()
        await press(pilot, "end")
        assert place(app).step == 2


async def test_an_empty_trace_says_that_it_has_no_step(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "none.flextrace", generations=0)
    app = InspectorApp(path)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        assert "This trace has no step" in screen_text(app)
        await press(pilot, "right", "n", "x")
        assert isinstance(app.screen, TraceScreen)


@pytest.mark.parametrize("name", PANELS)
def test_before_the_first_generation_a_panel_waits_without_an_error(
    name: str, tmp_path: Path
) -> None:
    path = sample_trace(tmp_path / "none.flextrace", generations=0)
    panel = load_panel(name)
    request = Request(TracePlace(), panel.initial_options, 80, 20)
    with open_trace(path) as reader:
        try:
            lines = panel.describe(panel.load(Source(reader), request))
        except Missing as missing:
            lines = missing.lines()
    assert lines
    assert str(path) not in lines[0]


async def test_a_panel_that_fails_says_so_and_ends_nothing(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexinspect.panels.logits_panel import LogitsPanel

    def fail(*args: object) -> None:
        raise ZeroDivisionError("[bold]oh[/bold]")

    monkeypatch.setattr(LogitsPanel, "load", fail)
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        app.screen.query_one(Slots).show_panel("logits")
        await settle(pilot)
        await press(pilot, "x")  # alone, so that its lines are not broken
        text = screen_text(app)
        assert "The panel 'logits' failed: ZeroDivisionError" in text
        assert "[bold]oh[/bold]" in text
        await press(pilot, "right")
        assert place(app).step == 1


async def test_choosing_a_panel_from_the_list(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await settle(pilot)
        await pilot.press("c")
        await pilot.pause()
        assert isinstance(app.screen, ChoiceDialog)
        await pilot.press("end", "enter")
        await settle(pilot)
        assert app.screen.query_one(Slots).current().panel.name == panel_names()[-1]


async def test_panels_may_be_exchanged_as_fast_as_keys_come(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        slots = app.screen.query_one(Slots)
        for name in ("layers", "run", "path", "layers", "tokens"):
            slots.show_panel(name)
            app.screen.action_do("step.next")  # type: ignore[attr-defined]
            await pilot.press("tab")
        await settle(pilot)
        shown = [view.panel.name for view in slots.views()]
        assert len(set(shown)) == 2
        assert place(app).step == 5


async def test_a_missing_place_becomes_the_nearest_one(trace: Path) -> None:
    app = InspectorApp(trace, place=TracePlace(99, 0, 9999, 99, 99))
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        assert place(app) == TracePlace(1, 0, 5, LAYERS - 1, 1)
        assert any("no generation 99" in note.message for note in app._notifications)


async def test_a_theme_changes_the_whole_screen_at_once(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        app.theme = "textual-light"
        await settle(pilot)
        header = app.screen.query_one("#header").strips[0]  # type: ignore[attr-defined]
        assert {segment.style.bgcolor.name for segment in header} == {"#e0e0e0"}


async def test_after_a_broken_trace_a_good_one_ends_well(trace: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.flextrace"
    bad.write_bytes(b"not a trace")
    app = InspectorApp(bad)
    async with app.run_test(size=SMALL) as pilot:
        await pilot.pause()
        app._open_target(trace)
        await settle(pilot)
        assert place(app).step == 0
    assert app.trace_error is None
    assert load_state().recent == (str(trace),)


async def test_odd_values_in_a_manifest_are_survived(tmp_path: Path) -> None:
    path = tmp_path / "odd.flextrace"
    writer = TraceWriter.create(path, {"pid": -5, "started_at": 1.0, "model": {"layers": "x"}})
    writer.write_event(EventRecord("phase", "loading", 2.0, data={"fraction": float("nan")}))
    app = InspectorApp(path)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        assert "loading" in screen_text(app)
    writer.close()


async def test_without_any_panel_the_interface_says_so(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {"mask": "flexinspect.panels.no_such_module:MaskPanel"}
    monkeypatch.setattr("flexinspect.core.plugins.BUILT_IN", {"flexinspect.panels": broken})
    load_panel.cache_clear()
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await press(pilot, "right", "x", "1", "m")
        assert place(app).step == 1
        texts = [text for _, text in app.messages()]
        assert texts[-1].startswith("No panel could be loaded")
        assert texts[0].startswith("The plug-in 'mask'")


@pytest.mark.parametrize("low_bandwidth", ["0", "1"])
async def test_a_panel_follows_the_mouse_unless_output_is_saved(
    trace: Path, monkeypatch: pytest.MonkeyPatch, low_bandwidth: str
) -> None:
    monkeypatch.setenv("FLEXINSPECT_LOW_BANDWIDTH", low_bandwidth)
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        view = app.screen.query_one(Slots).views()[0]
        seen: list[tuple[int, int]] = []
        monkeypatch.setattr(view, "_call_panel", lambda _, x, y, click: seen.append((x, y)))
        await pilot.hover(view, offset=(18, 3))
        assert seen == ([(18, 3)] if low_bandwidth == "0" else [])


async def test_a_load_that_outlives_the_interface_leaves_the_trace_closed(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []

    def load(self: Any, source: Any, request: Any) -> None:
        loads.append("started")
        time.sleep(0.5)
        source.reader.run()  # opens the trace again
        loads.append("ended")

    monkeypatch.setattr("flexinspect.panels.logits_panel.LogitsPanel.load", load)
    app: Any = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await until(pilot, lambda: loads)
    for thread in threading.enumerate():
        if thread.name == "flexinspect-close":
            thread.join()
    assert loads[-1] == "ended"
    assert all(handle.db is None for handle in app.session.reader._connections._handles)
