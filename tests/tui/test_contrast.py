"""All text is readable: its contrast is computed for every style, in every theme of Textual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.color import Color
from rich.style import Style
from support.traces import sample_trace
from support.tui import screen_lines, settle, until
from textual.theme import BUILTIN_THEMES

from flexinspect.drawing.theme import MIN_CONTRAST, SEGMENT_COLORS, Theme, contrast, readable
from flexinspect.drawing.token_cells import CURRENT_TOKEN_STYLE, _heat_style, segment_style
from flexinspect.tui import saved_state
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.panel_view import theme_of

THEMES = [name for name in BUILTIN_THEMES if "ansi" not in name]
"""The colours of the `ansi` theme are those of the terminal, so they cannot be computed."""


def ratio(style: Style) -> float:
    assert style.color is not None
    assert style.bgcolor is not None
    return contrast(style.color, style.bgcolor)


def test_the_contrast_is_that_of_the_definition() -> None:
    black, white, grey = (Color.parse(text) for text in ("#000000", "#ffffff", "#777777"))
    assert contrast(black, white) == pytest.approx(21)
    assert contrast(white, black) == contrast(black, white)
    assert contrast(grey, white) == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("name", THEMES)
async def test_all_styles_of_text_are_readable(name: str, tmp_path: Path) -> None:
    app: Any = InspectorApp(sample_trace(tmp_path / "sample.flextrace"))
    async with app.run_test(size=(100, 30)) as pilot:
        app.theme = name
        await settle(pilot)
        drawn: Theme = theme_of(app)
        assert drawn.depth != "none"
        low = {key: ratio(style) for key, style in drawn._styles.items()}
        assert min(low.values()) >= MIN_CONTRAST, low
        titles = {}
        for slot in app.query(".slot"):
            background = Color.parse(drawn.colors["background"])
            for part in ("border_title_color", "border_subtitle_color"):
                color = getattr(slot.styles, part)
                solid = slot.background_colors[1].blend(color, color.a)
                titles[part, slot.has_pseudo_class("focus-within")] = contrast(
                    Color.parse(solid.hex6), background
                )
        assert all(value >= MIN_CONTRAST for value in titles.values()), titles


def test_tokens_are_readable_on_every_segment_and_every_probability() -> None:
    styles = [
        segment_style(n, odd, False) for n in range(-1, len(SEGMENT_COLORS)) for odd in (0, 1)
    ]
    styles += [_heat_style(level, False) for level in range(16)] + [CURRENT_TOKEN_STYLE]
    assert min(map(ratio, styles)) >= MIN_CONTRAST
    backgrounds = {style.bgcolor for style in styles[2 : 2 + 2 * len(SEGMENT_COLORS)]}
    assert len(backgrounds) >= 2 * len(SEGMENT_COLORS) - 2


def test_a_colour_that_is_readable_stays_as_it_is() -> None:
    white, black = Color.parse("#ffffff"), Color.parse("#000000")
    assert readable(white, black) == white
    assert readable(Color.parse("#101010"), black) != Color.parse("#101010")


@pytest.mark.parametrize("term", ["xterm", "linux"])
async def test_a_terminal_of_sixteen_colours_is_drawn_without_any(
    term: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console.Console.color_system", property(lambda console: "standard"))
    app: Any = InspectorApp(sample_trace(tmp_path / "sample.flextrace"))
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        assert theme_of(app).no_color
        strips = [strip for strips in app.screen._compositor.render_strips() for strip in strips]
        assert all(segment.style is None or segment.style.color is None for segment in strips)


@pytest.mark.parametrize("name", ["textual-dark", "textual-light", "gruvbox", "solarized-light"])
async def test_the_verdict_of_the_highlighted_trace_is_readable(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sample_trace(tmp_path / "sample.flextrace")
    saved_state.save_state(theme=name)
    app: Any = InspectorApp()
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: any("✖ 1 error" in line for line in screen_lines(app)))
        lines = app.screen._compositor.render_strips()
        (row,) = (line for line in lines if "sample.flextrace" in line.text and "✖" in line.text)
        styles = [part.style for part in row if part.text.strip() and not part.style.dim]
        assert min(map(ratio, styles)) >= MIN_CONTRAST


@pytest.mark.parametrize("name", ["textual-dark", "textual-light"])
@pytest.mark.parametrize("key", ["question_mark", "G"])
async def test_the_text_of_windows_is_readable(name: str, key: str, tmp_path: Path) -> None:
    saved_state.save_state(theme=name)
    app: Any = InspectorApp(sample_trace(tmp_path / "sample.flextrace"))
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.press(key)
        await until(pilot, lambda: app.screen.query(".window"))
        await settle(pilot)
        window = app.screen.query_one(".window").content_region
        lines = app.screen._compositor.render_strips()[window.y : window.bottom]
        parts = [part for line in lines for part in line.crop(window.x, window.right)]
        # Blocks are those of the scroll bar.
        texts = {part.text.strip(): part.style for part in parts if part.text.strip(" ▁▂▃▄▅▆▇")}
        low = {text: ratio(style) for text, style in texts.items() if ratio(style) < MIN_CONTRAST}
        assert low == {}


async def test_the_colours_are_those_of_the_theme_also_if_they_were_asked_for_early(
    tmp_path: Path,
) -> None:
    app: Any = InspectorApp(sample_trace(tmp_path / "sample.flextrace"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app.theme = "textual-light"
        theme_of(app)  # Textual still has the colours of the old theme
        await settle(pilot)
        assert theme_of(app).colors["background"] == "#e0e0e0"
