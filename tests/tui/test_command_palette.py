"""The palette, the help and the glossary of the interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tui import screen_text, settle, until
from textual.command import CommandList, CommandPalette

from flexinspect.core.keyboard import GROUPS, KEYS, all_keys
from flexinspect.panels.base import TracePlace
from flexinspect.panels.panel_registry import load_panel, panel_names
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.panel_layout import Slots
from flexinspect.tui.screens.command_palette import format_rows, help_rows
from flexinspect.tui.screens.dialogs import HelpScreen
from flexinspect.tui.screens.text_screens import GlossaryScreen
from flexinspect.tui.screens.trace_screen import TraceScreen

pytestmark = pytest.mark.slow

WIDE, SMALL = (120, 40), (80, 24)


async def offered(pilot: Any, query: str = "") -> list[str]:
    """Open the palette, type a query, and return its lines."""
    await settle(pilot)
    await pilot.press("p")
    await until(pilot, lambda: isinstance(pilot.app.screen, CommandPalette))
    await pilot.press(*query)
    await pilot.pause()
    await until(pilot, lambda: not _is_searching(pilot.app))
    await pilot.pause()
    commands = pilot.app.screen.query_one(CommandList)
    return [" ".join(str(option.prompt).split()) for option in commands.options]


def _is_searching(app: Any) -> bool:
    group = CommandPalette._GATHER_COMMANDS_GROUP
    return any(work.group == group and not work.is_finished for work in app.workers)


async def test_the_palette_lists_keys_and_groups_instead_of_ids(trace: Path) -> None:
    app = InspectorApp(trace, keymap={"step.next": "w"})
    async with app.run_test(size=SMALL) as pilot:
        lines = await offered(pilot)
    assert len(lines) == len(KEYS) + len(panel_names())
    assert lines[0] == "Move w Next token"
    assert "Panels 2 Show panel Mask" in lines
    assert not any("step.next" in line for line in lines)
    groups = [line.split()[0] for line in lines]
    assert list(dict.fromkeys(groups)) == list(GROUPS)
    assert groups == sorted(groups, key=GROUPS.index)


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("reset", "Panels = Reset the layout"),
        ("reset layout", "Panels = Reset the layout"),
        ("layers", "Panels 5 Show panel Layers"),
        ("mask", "Panels 2 Show panel Mask"),
        ("screenshot", "Save s Save a picture of the screen"),
        ("x", "Panels x Only this panel, or all again"),
        ("pause", "Run space Pause after this step, or continue"),
        ("fork token", "Fork F Try another token here"),
    ],
)
async def test_a_search_offers_what_was_meant_first(trace: Path, query: str, first: str) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        assert (await offered(pilot, query))[0] == first


@pytest.mark.parametrize("query", ["reset", "sort", "tor", "export", "sun"])
async def test_spread_letters_never_offer_to_stop_the_run(trace: Path, query: str) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        assert not any("Stop the run" in line for line in await offered(pilot, query))


async def test_a_number_goes_to_that_step(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        assert (await offered(pilot, "4"))[0] == "Go to step 4"
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, TraceScreen))
        await settle(pilot)
        assert isinstance(app.screen, TraceScreen)
        assert app.screen.place == TracePlace(step=4)


async def test_a_found_panel_is_shown(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=WIDE) as pilot:
        await offered(pilot, "memory")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, TraceScreen))
        await settle(pilot)
        assert app.screen.query_one(Slots).current().panel.name == "memory"


@pytest.mark.parametrize("size", [SMALL, WIDE, (40, 12)])
async def test_help_begins_with_the_keys_of_the_panel(trace: Path, size: tuple[int, int]) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        app.screen.query_one(Slots).show_panel("mask")
        await pilot.press("?")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)
        shown: Any = app.screen.query_one("#keys")
        lines = str(shown.content).splitlines()
        assert lines[0].split()[0] == "Mask"
        assert lines[1].split()[:3] == ["z", "zoom", "in"]
        has_two_columns = len(lines[0].split()) == 2
        assert has_two_columns == (size[0] >= 80)
        assert "zoom in" in screen_text(app)


async def test_a_line_of_the_help_never_wraps_by_itself(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=(80, 120)) as pilot:
        await settle(pilot)
        await pilot.press("?")
        await pilot.pause()
        keys: Any = app.screen.query_one("#keys")
        assert keys.size.height == len(str(keys.content).splitlines())


def test_the_help_has_every_action_once() -> None:
    rows = help_rows(lambda id_: f"<{id_}>", "Mask", load_panel("mask").actions)
    shown = [keys for block in rows.values() for keys, _ in block]
    ids = [key.id for key in all_keys() if not key.id.startswith("panel.show-")]
    assert sorted(shown) == sorted(
        [*(f"<{id_}>" for id_ in ids), "<panel.show-1> … <panel.show-10>"]
    )
    assert [*rows] == ["Mask", *(group for group in GROUPS if group in rows)]


@pytest.mark.parametrize("width", [10, 30, 71, 76, 110])
def test_no_line_of_the_keys_is_too_wide(width: int) -> None:
    rows = help_rows(lambda id_: "s+← H", "Mask", load_panel("mask").actions)
    lines = str(format_rows(rows, width)).splitlines()
    assert max(map(len, lines)) <= max(width, 22)


async def test_the_glossary_is_searched_while_typing(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        await pilot.press("G")
        await pilot.pause()
        assert isinstance(app.screen, GlossaryScreen)
        assert "numbers and ids" in screen_text(app)
        await pilot.press("pagedown", "pagedown")
        await pilot.pause()
        assert "numbers and ids" not in screen_text(app)
        await pilot.press(*"margin")
        await pilot.pause()
        assert "The best logit minus the second best." in screen_text(app)
        await pilot.press(*"xyz")
        await pilot.pause()
        assert "No term has this word." in screen_text(app)
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(app.screen, TraceScreen)
