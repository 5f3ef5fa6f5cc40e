"""The X-ray of a token: what it sees, what sees it, and where that is not what was declared."""

from __future__ import annotations

import pytest
from support import mask_trace
from support.tui import screen_lines, settle, until

from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Request, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import load_token_window
from flexinspect.panels.tokens_panel import TokensOptions, TokensPanel
from flexinspect.panels.xray import Direction, XRay
from flexinspect.panels.xray_loading import load_xray
from flexinspect.trace.reader import open_trace
from flexinspect.tui.app import InspectorApp


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    path = mask_trace.write(tmp_path_factory.mktemp("xray") / "t.flextrace")
    return Source(open_trace(path))


def xray(source: Source, direction: Direction, **place: int) -> XRay:
    at = TracePlace(**place)
    loaded = load_xray(source, at, load_token_window(source, at, 64), direction)
    assert loaded is not None
    return loaded


def test_a_token_sees_the_open_cells_of_its_row(source: Source) -> None:
    dense = mask_trace.dense_mask(mask_trace.RIGHT)
    found = xray(source, "sees", step=0, layer=mask_trace.RIGHT, pos=9)
    assert found.positions("open") == [key for key in range(18) if dense[9, key]]
    assert found.summary() == f"row 9 “this” sees {dense[9].sum()} of 10 tokens"


def test_a_token_is_seen_by_the_open_cells_of_its_column(source: Source) -> None:
    dense = mask_trace.dense_mask(mask_trace.RIGHT)
    found = xray(source, "seen by", step=0, layer=mask_trace.RIGHT, pos=2)
    assert found.positions("open") == [row for row in range(18) if dense[row, 2]]


def test_leaked_and_lost_tokens_are_told_apart_from_open_ones(source: Source) -> None:
    found = [xray(source, "sees", step=0, layer=mask_trace.WRONG, pos=pos) for pos in range(15)]
    assert sum(len(one.positions("leaked")) for one in found) > 0
    assert sum(len(one.positions("lost")) for one in found) > 0
    leaky = next(one for one in found if one.positions("leaked"))
    assert "leaked, should be closed" in leaky.summary()
    assert any(line.startswith("  leaked: ") for line in leaky.describe())


def test_a_generated_token_has_the_row_that_predicted_it(source: Source) -> None:
    assert xray(source, "sees", step=2, layer=mask_trace.RIGHT).pos == 16


def test_a_layer_without_recorded_cells_has_no_xray(source: Source) -> None:
    at = TracePlace(layer=mask_trace.TABLES, pos=3)
    assert load_xray(source, at, load_token_window(source, at, 64), "sees") is None


def test_without_colours_leaked_and_lost_tokens_still_differ(source: Source) -> None:
    plain, styles = Theme("none"), {}
    found = XRay("sees", 3, "x", {0: "open", 1: "closed", 2: "leaked", 3: "lost"}, 2, 4)
    panel = TokensPanel()
    request = Request(TracePlace(layer=mask_trace.RIGHT, pos=9), TokensOptions(xray="sees"), 60, 9)
    data = panel.load(source, request)
    for strip in panel.paint(data, request, plain).strips:
        assert all(segment.style is None or segment.style.color is None for segment in strip)
    from flexinspect.drawing.token_cells import TokenCell

    for pos in range(4):
        styles[pos] = str(found.style(TokenCell(pos, "a", 0), plain, current=False))
    assert len(set(styles.values())) == 4


async def test_one_key_shows_the_xray_in_the_strip_and_moves_with_the_token(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = mask_trace.write(tmp_path_factory.mktemp("xray") / "t.flextrace")
    app = InspectorApp(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("a")
        await settle(pilot)
        await until(pilot, lambda: "sees 15 of 15 tokens" in screen_lines(app)[3])
        assert "━" in screen_lines(app)[2]
        await pilot.press("comma", "comma")
        await settle(pilot)
        assert screen_lines(app)[3].startswith("row 13 “Answer” sees 14 of 14")
        await pilot.press("semicolon", "a")
        await settle(pilot)
        assert screen_lines(app)[3].startswith("row 14 “:”: ")
        await pilot.press("a")
        await settle(pilot)
        assert not screen_lines(app)[3].startswith("row")
