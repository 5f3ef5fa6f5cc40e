"""Going to a step by its number or its token, and the search of a text."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.tui import answer, place, press, settle, until

from flexinspect.core.errors import TraceError
from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.tui import token_search
from flexinspect.tui.app import InspectorApp

SMALL = (80, 24)


@pytest.mark.parametrize(
    ("typed", "step"),
    [("4", 4), ("ten", 2), ("last", 5), (" First ", 0), ("prefill", 0), ("Jane", 0), ("-1", 1)],
)
async def test_go_to_takes_a_number_a_name_or_a_text(trace: Path, typed: str, step: int) -> None:
    app = InspectorApp(trace, place=TracePlace(0, 0, 1))
    async with app.run_test(size=SMALL) as pilot:
        await answer(pilot, "g", typed)
        assert place(app).step == step


async def test_a_missing_step_is_an_error_message(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await answer(pilot, "g", "999")
        assert place(app).step == 5
        messages = [note.message for note in app._notifications]
        assert messages == ["Step 999 does not exist; the nearest step is shown."]


async def test_search_finds_tokens_of_the_prompt_and_wraps_around(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await answer(pilot, "/", "emma")
        assert place(app) == TracePlace(0, 0, 0, pos=3)
        await press(pilot, "*")
        assert place(app).pos == 6
        await press(pilot, "*", "*")
        assert place(app) == TracePlace(1, 0, 0, pos=6)
        await press(pilot, "*")
        assert place(app) == TracePlace(0, 0, 0, pos=3)
        await press(pilot, "right")
        assert place(app) == TracePlace(0, 0, 1)


async def test_search_finds_words_of_several_tokens(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await answer(pilot, "/", "jane austen")
        assert place(app) == TracePlace(0, 0, 0)
        assert [note.message for note in app._notifications] == []
        await answer(pilot, "/", "who wrote emma?")
        assert place(app) == TracePlace(0, 0, 0, pos=1)
        await answer(pilot, "/", "austen")
        assert place(app) == TracePlace(0, 0, 1)


async def test_a_text_without_a_match_is_reported(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await answer(pilot, "/", "[red]")
        assert [note.message for note in app._notifications] == ["No text contains “[red]”."]


async def test_a_number_beyond_any_step_is_searched_as_text(trace: Path) -> None:
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        await pilot.press("g")
        await pilot.pause()
        app.screen.query_one("Input").value = "9" * 5000  # type: ignore[attr-defined]
        await pilot.press("enter")
        await settle(pilot)
        assert place(app).step == 0


async def test_the_interface_answers_during_a_search_that_takes_long(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_moved, find = threading.Event(), token_search.find_token

    def slow(*args: Any, **options: Any) -> Navigate | None:
        assert has_moved.wait(10)
        return find(*args, **options)

    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        monkeypatch.setattr(token_search, "find_token", slow)
        await pilot.press("/")
        await pilot.pause()
        await pilot.press("e", "m", "m", "a", "enter", "right")
        await until(pilot, lambda: place(app).step == 1)
        has_moved.set()
        await until(pilot, lambda: place(app).pos == 3)


async def test_damage_found_by_a_search_is_reported(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise TraceError("The page is damaged.")

    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot)
        monkeypatch.setattr(token_search, "find_token", fail)
        await pilot.press("/")
        await pilot.pause()
        await pilot.press("a", "enter")
        await settle(pilot)
        assert [note.message for note in app._notifications] == ["The page is damaged."]
