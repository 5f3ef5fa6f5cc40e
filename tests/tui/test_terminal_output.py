"""What is written to the terminal: the screen is right, and few bytes are needed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from support.terminal_screen import ScreenDriver, TerminalScreen
from support.tui import settle
from textual._compositor import LayoutUpdate
from textual.geometry import Region
from textual.strip import Strip

from flexinspect.drawing.heatmap import CIVIDIS, heat
from flexinspect.drawing.theme import Theme
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.terminal_output import TerminalCells

CONSOLE = Console(color_system="truecolor", force_terminal=True, file=io.StringIO())
RED, BOLD = Style.parse("red on black"), Style.parse("bold #ffffff on blue")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> TerminalScreen:
    """The terminal of an app with `ScreenDriver`."""
    screen = TerminalScreen()
    monkeypatch.setattr(ScreenDriver, "screen", screen)
    monkeypatch.setattr(ScreenDriver, "n_bytes", 0)
    return screen


def app_in(terminal: TerminalScreen, trace: Path) -> InspectorApp:
    app = InspectorApp(trace)
    app.driver_class, app.console = ScreenDriver, CONSOLE
    return app


def render_anew(strip: Strip, console: Console) -> str:
    """Return the codes of a strip, without those that it and its styles keep."""
    for segment in strip:
        if segment.style is not None:
            segment.style._ansi = None
    return "".join(
        text if style is None else style.render(text, color_system=console._color_system)
        for text, style, _ in strip
    )


def expected_cells(app: InspectorApp) -> dict[tuple[int, int], Any]:
    """Return the cells of a terminal after Textual has repainted all of it."""
    screen = TerminalScreen()
    # Strips and styles keep their codes, and another test may have printed them in fewer colours.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strip, "render", render_anew)
        screen.write(app.screen._compositor.render_full_update().render_segments(CONSOLE))
    return screen.cells


async def test_the_terminal_shows_the_screen_after_each_key(
    trace: Path, terminal: TerminalScreen
) -> None:
    app = app_in(terminal, trace)
    async with app.run_test(headless=False, size=(100, 30)) as pilot:
        await settle(pilot)
        for key in ("right", "tab", "5", "x", "question_mark", "escape", "ctrl+p", "escape", "x"):
            await pilot.press(key)
            await settle(pilot)
            assert terminal.cells == expected_cells(app), key
        app.notify("日本語 and more")
        await pilot.pause()
        assert terminal.cells == expected_cells(app)
        app.theme = "textual-light"
        await settle(pilot)
        assert terminal.cells == expected_cells(app)


async def test_a_resized_terminal_is_repainted(trace: Path, terminal: TerminalScreen) -> None:
    app = app_in(terminal, trace)
    async with app.run_test(headless=False, size=(100, 30)) as pilot:
        await settle(pilot)
        for size in ((80, 24), (80, 24), (120, 40)):
            terminal.cells.clear()  # as after a suspension
            await pilot.resize_terminal(*size)
            await settle(pilot)
            assert terminal.cells == expected_cells(app)


async def test_a_step_writes_at_most_4_kilobytes(trace: Path, terminal: TerminalScreen) -> None:
    app = app_in(terminal, trace)
    async with app.run_test(headless=False, size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.press("right")
        await settle(pilot)
        before = ScreenDriver.n_bytes
        await pilot.press("right")
        await settle(pilot)
        assert 0 < ScreenDriver.n_bytes - before <= 4000


class Output:
    """Writes lines to a terminal as the interface does."""

    def __init__(self) -> None:
        self.cells, self.screen = TerminalCells(), TerminalScreen()

    def write(self, *segments: Segment) -> str:
        """Write a line; check what the terminal shows; return what was written."""
        strip = Strip(segments)
        update = self.cells.limit(LayoutUpdate([[strip]], Region(0, 0, strip.cell_length, 1)))
        written: str = update.render_segments(CONSOLE)
        self.screen.write(written)
        expected = TerminalScreen()
        expected.write("\x1b[1;1H" + strip.render(CONSOLE))
        assert self.screen.cells == expected.cells
        return written


@pytest.fixture
def output() -> Output:
    """A terminal that shows `step 1 of 9` in two styles."""
    output = Output()
    output.write(Segment("step 1", RED), Segment(" of 9", BOLD))
    return output


def test_an_unchanged_line_writes_nothing(output: Output) -> None:
    assert output.write(Segment("step ", RED), Segment("1", RED), Segment(" of 9", BOLD)) == ""


def test_only_changed_cells_are_written(output: Output) -> None:
    written = output.write(Segment("step 2", RED), Segment(" of 9", BOLD))
    assert written == "\x1b[1;6H\x1b[31;40m2\x1b[0m"


def test_a_style_change_is_a_change(output: Output) -> None:
    assert "step" in output.write(Segment("step 1", BOLD), Segment(" of 9", BOLD))


def test_attributes_end_without_a_reset_of_the_colours(output: Output) -> None:
    plain = BOLD + Style(bold=False)
    written = output.write(Segment("step 1", RED), Segment(" o", BOLD), Segment("f 9", plain))
    assert written == "\x1b[1;9H\x1b[38;2;255;255;255;44mf 9\x1b[0m"
    written = output.write(Segment("AAAA", BOLD), Segment(" 1 of 9", plain))
    assert "\x1b[22m" in written


def test_characters_of_two_cells_are_never_divided(output: Output) -> None:
    output.write(Segment("日本 語", RED), Segment("e\u0301 xy", BOLD))
    written = output.write(Segment("日木 語", RED), Segment("e\u0301 xy", BOLD))
    assert "日木 語" in written
    output.write(Segment("step 1", RED), Segment(" of 9", BOLD))


def test_a_forgotten_terminal_is_written_again(output: Output) -> None:
    output.cells.forget()
    assert "step 1" in output.write(Segment("step 1", RED), Segment(" of 9", BOLD))


def test_pictures_of_which_no_two_cells_are_alike_are_shown(output: Output) -> None:
    random, theme = np.random.default_rng(0), Theme("truecolor")
    output.write(Segment("step 1 of 9", BOLD))  # attributes end where the picture begins
    for _ in range(3):
        levels = random.integers(0, CIVIDIS.size, (2, 40)).astype(np.uint8)
        (picture,) = heat(levels, CIVIDIS, theme)
        assert "▀" in output.write(*picture)
    output.write(Segment("é", RED), *picture)
    output.write(Segment("日", RED), *picture)  # two cells wide
