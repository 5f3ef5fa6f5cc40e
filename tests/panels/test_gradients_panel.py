"""The gradients panel: which segment made the token, where in the model, and the check."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import textual
from rich.cells import cell_len
from support.gradtraces import gradients, grads_trace, nonfinite, red
from support.paths import TESTS
from support.traces import N_PROMPT
from support.tui import screen_text, settle

from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Missing, Navigate, Request, TracePlace
from flexinspect.panels.gradients_panel import (
    GradientsData,
    GradientsOptions,
    GradientsPanel,
    SegmentShare,
    format_percent,
    merge_separators,
)
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import GradientRecord
from flexinspect.trace.reader import open_trace
from flexinspect.tui import saved_state
from flexinspect.tui.app import InspectorApp

GOLDENS = TESTS / "fixtures" / "goldens"
MADE_WITH = "8.2.8"
PANEL = GradientsPanel()
PLAIN = Theme("none")
WHERE = GradientsOptions(side="where")
SIZES = [(120, 40), (78, 20), (38, 14), (38, 6), (20, 3), (6, 30), (2, 2), (1, 1)]
Make = Callable[..., Source]


@pytest.fixture
def source(tmp_path: Path) -> Make:
    def make(*records: GradientRecord) -> Source:
        return Source(open_trace(grads_trace(tmp_path / "t.flextrace", *records)))

    return make


def request(
    width: int = 78, height: int = 20, options: GradientsOptions | None = None, **place: Any
) -> Request[GradientsOptions]:
    return Request(TracePlace(**place), options or GradientsOptions(), width, height)


def load(source: Source, **place: Any) -> GradientsData:
    return PANEL.load(source, request(**place))


def drawn(
    data: GradientsData, options: GradientsOptions | None = None, look: Theme = PLAIN
) -> list[str]:
    picture = PANEL.paint(data, request(options=options, step=data.place.step), look)
    return [strip.text.rstrip() for strip in picture.strips]


def test_segments_have_bars_with_a_sign_and_separators_share_a_line(source: Make) -> None:
    lines = drawn(load(source(gradients())))
    assert lines[0] == 'log-probability -0.1 of " Jane", step 0'
    assert lines[1] == (
        "check ✓ logits as recorded, off by 2.0e-07 ≤ 1e-03 of the largest; dense refe…"
    )
    bars = {line[:14].strip(): line[14:].split() for line in lines[3:8]}
    assert list(bars) == ["bos", "paraphrase 1", "paraphrase 2", "cue", "separators"]
    assert bars["paraphrase 2"][:2] == ["+60", "%"]
    assert bars["cue"][:2] == ["-40", "%"]
    assert bars["bos"][:2] == ["0", "%"]
    assert "31" in bars["paraphrase 1"], "4 of 13 words, all norms alike"


def test_shares_are_of_all_absolute_values_and_of_all_norms(source: Make) -> None:
    shares = {one.label: one for one in load(source(gradients())).shares}
    assert shares["paraphrase 2"].signed == pytest.approx(0.6)
    assert shares["cue"].signed == pytest.approx(-0.4)
    assert sum(one.norm for one in shares.values()) == pytest.approx(1)
    assert shares["paraphrase 1"].norm == pytest.approx(4 / N_PROMPT)
    assert sum(abs(one.signed) for one in shares.values()) == pytest.approx(1)


def test_words_are_coloured_by_what_they_say_of_the_token(source: Make) -> None:
    data, look = load(source(gradients())), Theme()
    picture = PANEL.paint(data, request(), look)
    backs = {
        segment.text: segment.style.bgcolor.get_truecolor()
        for strip in picture.strips
        for segment in strip
        if segment.style and segment.style.bgcolor
    }
    red_part, _, blue_part = backs["Emma"]
    assert red_part > blue_part, "orange speaks for it"
    red_part, _, blue_part = backs[":"]
    assert blue_part > red_part, "blue speaks against it"
    assert backs[" Jane"] == (255, 255, 255)


def test_without_colours_bold_is_for_the_token_and_underlined_against_it(source: Make) -> None:
    picture = PANEL.paint(load(source(gradients())), request(), PLAIN)
    styles = {segment.text: segment.style for strip in picture.strips for segment in strip}
    assert styles["Emma"].bold
    assert not styles["Emma"].underline
    assert styles[":"].underline
    text = "\n".join(strip.text for strip in picture.strips)
    assert "Bold contributes to the token, underlined acts against it." in text


def test_the_limits_of_the_attribution_are_shown(source: Make) -> None:
    data = load(source(gradients()))
    for text in (" ".join(" ".join(drawn(data)).split()), "\n".join(PANEL.describe(data))):
        assert "it does not show what would happen without a segment" in text
        assert "it is not attention" in text


def test_the_other_side_has_a_row_per_layer_and_a_column_per_group(source: Make) -> None:
    lines = drawn(load(source(gradients()), layer=1), WHERE)
    assert lines[2].split() == ["q", "v", "mlp", "norm", "hidden"]
    assert lines[3].split() == ["layer", "0", "0.5", "0.5", "0.5", "0.5", "0.4"]
    assert lines[4].split() == ["▸layer", "1", "1", "1", "1", "1", "0.2"]
    assert lines[7] == "outside: lm_head 3"


def test_many_layers_are_shown_around_the_place(source: Make) -> None:
    data = load(source(gradients()), layer=3)
    picture = PANEL.paint(data, request(60, 6, WHERE, layer=3), PLAIN)
    assert [strip.text.split()[1] for strip in picture.strips[3:5]] == ["2", "3"]


def test_nonfinite_layers_are_marked_and_reported(source: Make) -> None:
    data = load(source(nonfinite(1)), step=1)
    lines = drawn(data, WHERE)
    assert lines[2].startswith("NaN is in the gradient of step 1's log-probability: in 1 of 17")
    marked = [line.split()[1] for line in lines if line[1:].startswith("layer") and "!" in line]
    assert marked == ["1"]
    assert "nan" in next(line for line in lines if line[1:].startswith("layer 1 "))
    picture = PANEL.paint(data, request(options=WHERE, step=1), Theme())
    assert picture.alarm
    cells = [s for strip in picture.strips for s in strip if s.text.strip() in ("nan", "0")]
    assert {s.style.bgcolor.get_truecolor() for s in cells if s.style} == {(230, 40, 60)}
    assert len(cells) == 1 + 4


def test_nothing_is_drawn_after_a_failed_check(source: Make) -> None:
    data = load(source(gradients(0), red(1)), step=1)
    for options in (GradientsOptions(), WHERE):
        picture = PANEL.paint(data, request(options=options, step=1), PLAIN)
        text = "\n".join(strip.text for strip in picture.strips)
        assert "check ✗ not what ran: logits, off by 3.0e-01 > 1e-03" in text
        assert "Nothing is drawn" in text
        assert "paraphrase" not in text
        assert picture.alarm
    lines = PANEL.describe(data)
    assert "Nothing is shown." in lines
    assert any("is not what ran" in line for line in lines)


def test_a_step_without_gradients_says_which_have_some(source: Make) -> None:
    with pytest.raises(Missing) as nothing:
        load(source(gradients(0), gradients(2)), step=1)
    assert nothing.value.lines() == [
        "No gradients are recorded for step 1.",
        "These steps have some: 0, 2.",
    ]


def test_a_run_without_gradients_says_how_to_get_them(source: Make) -> None:
    with pytest.raises(Missing) as nothing:
        load(source())
    assert nothing.value.lines() == [
        "No gradients are recorded for this generation.",
        "Run with --grads; they are computed at the end of the generation.",
    ]


def test_a_margin_names_the_token_it_is_to(source: Make) -> None:
    data = load(source(gradients(target="margin", value=2.5, runner_up_id=51)))
    assert drawn(data)[0] == 'margin 2.5 of " Jane" to " Aus", step 0'


def test_the_description_has_segments_tokens_and_problems(source: Make) -> None:
    lines = PANEL.describe(load(source(gradients())))
    assert lines[0] == 'Gradient of the log-probability -0.1 of " Jane", step 0.'
    assert "paraphrase 2               4           +60 %    31 %" in lines
    assert 'For it: "Emma" at 6 (0.2), "\'s" at 7 (0.2), " 作者" at 8 (0.2).' in lines
    assert 'Against it: ":" at 12 (-0.4).' in lines
    assert "Outside of the layers: lm_head 3." in lines
    assert "No gradient is NaN, Inf, exploding, vanishing or dead." in lines


def test_values_that_are_not_finite_are_drawn_as_such(source: Make) -> None:
    tokens = np.full((2, N_PROMPT), np.nan, np.float32)
    data = load(source(gradients(tokens=tokens)))
    assert any("?" in line for line in drawn(data))
    picture = PANEL.paint(data, request(), Theme())
    sick_words = [s for strip in picture.strips for s in strip if s.text == "Emma"]
    assert sick_words[0].style is not None
    assert sick_words[0].style.bgcolor is not None
    assert sick_words[0].style.bgcolor.get_truecolor() == (230, 40, 60)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [GradientsOptions(), GradientsOptions(by="norm"), WHERE])
def test_every_size_is_filled_exactly(
    source: Make, size: tuple[int, int], options: GradientsOptions
) -> None:
    width, height = size
    made = source(nonfinite(0), red(1), gradients(2))
    for step in range(3):
        made_request = request(width, height, options, step=step)
        for look in (PLAIN, Theme()):
            picture = PANEL.paint(PANEL.load(made, made_request), made_request, look)
            assert len(picture.strips) <= height
            assert {strip.cell_length for strip in picture.strips} <= {width}


def test_keys_flip_the_side_and_the_measure(source: Make) -> None:
    data, made_request = load(source(gradients())), request()
    assert PANEL.on_action("view.flip", data, made_request) == WHERE
    assert PANEL.on_action("view.flip", data, request(options=WHERE)) == GradientsOptions()
    assert PANEL.on_action("view.measure", data, made_request) == GradientsOptions(by="norm")
    assert PANEL.on_action("view.measure", data, request(options=WHERE)) is None
    assert PANEL.on_action("zoom.in", data, made_request) is None


def test_a_click_goes_to_the_layer_or_the_word(source: Make) -> None:
    data = load(source(gradients(2)), step=2)
    where = request(options=WHERE, step=2)
    assert PANEL.on_mouse(3, 5, data, where, click=True) == Navigate(layer=2)
    assert PANEL.on_mouse(3, 12, data, where, click=True) is None
    made_request = request(step=2)
    lines = [strip.text for strip in PANEL.paint(data, made_request, PLAIN).strips]
    row = next(number for number, text in enumerate(lines) if "Emma?" in text)
    assert PANEL.on_mouse(
        lines[row].index("Emma?"), row, data, made_request, click=True
    ) == Navigate(step=0, pos=3)
    jane = cell_len(lines[row].split("Jane")[0])
    assert PANEL.on_mouse(jane, row, data, made_request, click=True) == Navigate(step=0)
    assert PANEL.on_mouse(jane, row, data, made_request, click=False) is None
    assert PANEL.on_mouse(jane, 4, data, made_request, click=True) is None


def test_a_share_is_a_whole_percentage_without_a_sign_of_zero() -> None:
    assert format_percent(0.004, sign=True) == format_percent(-0.004, sign=True) == "0 %"
    assert format_percent(-0.126, sign=True) == "-13 %"
    assert format_percent(float("nan")) == "?"
    assert [one.label for one in merge_separators([SegmentShare("a", 0, 1, 0.5, 0.5)])] == ["a"]


async def test_on_the_screen_of_80_by_24(tmp_path: Path) -> None:
    path = grads_trace(tmp_path / "t.flextrace", gradients(0), nonfinite(1), red(2))
    saved_state.save_layout("generation", saved_state.Layout(("gradients", "tokens")))
    app = InspectorApp(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "paraphrase 2" in screen_text(app)
        assert "check ✓" in screen_text(app)
        await pilot.press("m")
        await settle(pilot)
        assert "layer 3" in screen_text(app)
        await pilot.press("right")
        await settle(pilot)
        assert "NaN is in the gradient" in screen_text(app)
        await pilot.press("right")
        await settle(pilot)
        assert "check ✗" in screen_text(app)
        await pilot.press("right")
        await settle(pilot)
        assert "No gradients are recorded for step 3." in " ".join(screen_text(app).split())


@pytest.mark.skipif(textual.__version__ != MADE_WITH, reason=f"made with Textual {MADE_WITH}")
@pytest.mark.parametrize("options", [GradientsOptions(), WHERE])
async def test_the_screen_matches_its_golden_picture(
    tmp_path: Path, options: GradientsOptions
) -> None:
    path = grads_trace(tmp_path / "sample.flextrace", gradients(0), nonfinite(1))
    saved_state.save_layout("generation", saved_state.Layout(("gradients", "tokens")))
    app = InspectorApp(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        for key in ("m", "right") if options == WHERE else ():
            await pilot.press(key)
            await settle(pilot)
        app.clear_notifications()
        await settle(pilot)
        svg = app.export_screenshot(title="flexinspect", simplify=True)
    golden = GOLDENS / f"gradients-{options.side}.svg"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(svg, encoding="utf-8")
    assert svg == golden.read_text("utf-8")
