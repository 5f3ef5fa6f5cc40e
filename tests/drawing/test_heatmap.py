"""Colours and cells, without an app."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.style import Style
from textual.strip import Strip

from flexinspect.drawing.heatmap import (
    CIVIDIS,
    CIVIDIS_MARKED,
    DIVERGING,
    Levels,
    Palette,
    blend,
    boxes,
    heat,
    quantise,
    quantise_marked,
    ramp,
)
from flexinspect.drawing.theme import ColorDepth, Theme

NONE = Style.null()
COLOUR, LESSER, PLAIN = Theme(), Theme("256"), Theme("none")
FOUR = Palette([(0, 0, 0), (80, 80, 80), (160, 160, 160), (255, 255, 255)], " ░▒█")
NAN, INF = math.nan, math.inf


def levels(*rows: list[int]) -> Levels:
    return np.array(rows, dtype=np.uint8)


def texts(strips: list[Strip]) -> list[str]:
    return [strip.text for strip in strips]


def backgrounds(strip: Strip) -> list[tuple[int, int, int]]:
    return [
        (color.red, color.green, color.blue)
        for text, style, _ in strip
        for _ in text
        if style and style.bgcolor and (color := style.bgcolor.get_truecolor())
    ]


def fresh(palette: Palette) -> Palette:
    """Return a copy: a Rich style remembers the codes of the first terminal it was drawn for."""
    return Palette(palette.rgb, palette.ramp, palette.centre)


def bytes_of(strip: Strip, color_system: str = "truecolor") -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=color_system)  # type: ignore[arg-type]
    return strip.render(console)


def seen(codes: str) -> list[tuple[str, str, str]]:
    """Return (character, foreground, background) per cell, as a terminal would show the bytes."""
    from rich.text import Text

    cells = []
    for span_text, style in _spans(Text.from_ansi(codes)):
        for char in span_text:
            fore = style.color.name if style.color and char != " " else ""
            cells.append((char, fore, style.bgcolor.name if style.bgcolor else ""))
    return cells


def _spans(text: object) -> list[tuple[str, Style]]:
    console = Console(file=io.StringIO(), color_system="truecolor", width=10_000)
    return [
        (segment.text, segment.style or NONE)
        for segment in console.render(text)  # type: ignore[arg-type]
        if segment.text != "\n"
    ]


# --- numbers into levels ---


def test_the_ends_of_the_range_are_the_first_and_the_last_level() -> None:
    assert quantise([0.0, 0.5, 1.0], 0, 1, 33).tolist() == [0, 16, 32]


def test_values_outside_the_range_are_clipped_and_nan_is_level_zero() -> None:
    assert quantise([-5.0, 9.0, INF, -INF, NAN], 0, 1, 4).tolist() == [0, 3, 3, 0, 0]


@pytest.mark.parametrize("ends", [(1.0, 1.0), (2.0, 1.0), (NAN, 1.0), (0.0, INF), (-1e308, 1e308)])
def test_an_invalid_range_gives_level_zero_everywhere(ends: tuple[float, float]) -> None:
    assert quantise([[0.5, NAN], [INF, 1.0]], *ends, 32).tolist() == [[0, 0], [0, 0]]


@given(st.lists(st.floats(width=32), max_size=20), st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_levels_rise_with_the_values(values: list[float], low: float, span: float) -> None:
    got = quantise(sorted(value for value in values if value == value), low, low + span, 32)
    assert got.max(initial=0) < 32
    assert (np.diff(got.astype(int)) >= 0).all()


def test_levels_are_bytes_of_the_shape_of_the_values() -> None:
    got = quantise(np.zeros((3, 0), np.float32), 0, 1, 32)
    assert got.dtype == np.uint8
    assert got.shape == (3, 0)


def test_only_nan_and_inf_get_the_marked_level() -> None:
    got = quantise_marked([0.0, 1.0, NAN, INF, -INF], 0, 1, CIVIDIS_MARKED)
    assert got.tolist() == [0, 31, 32, 32, 32]
    assert CIVIDIS_MARKED.ramp[32] == "!"


# --- palettes ---


def _luma(rgb: tuple[int, int, int]) -> float:
    return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]


def test_cividis_has_its_published_ends_and_only_gets_lighter() -> None:
    assert (CIVIDIS.size, CIVIDIS.rgb[0], CIVIDIS.rgb[-1]) == (32, (0, 34, 78), (254, 232, 56))
    assert (np.diff([_luma(rgb) for rgb in CIVIDIS.rgb]) > 0).all()


def test_cividis_is_close_to_the_published_table_between_the_anchors() -> None:
    # entries of matplotlib's `_cividis_data` that are no anchors, by their index of 256
    # (23 and 251 are where the table bends, so the farthest from a straight line)
    published = {23: (1, 50, 113), 63: (66, 78, 108), 129: (126, 124, 120), 191: (187, 173, 109)}
    published[251] = (253, 227, 52)
    table = blend(CIVIDIS.rgb, 256)
    for index, rgb in published.items():
        assert max(abs(a - b) for a, b in zip(table[index], rgb, strict=True)) <= 10


def test_the_diverging_palette_is_darkest_in_the_middle_and_as_light_at_both_ends() -> None:
    luma = [_luma(rgb) for rgb in DIVERGING.rgb]
    assert min(luma) == luma[16] == luma[DIVERGING.centre]
    assert abs(luma[0] - luma[32]) < 20
    assert DIVERGING.rgb[0][2] > DIVERGING.rgb[0][0]  # blue below
    assert DIVERGING.rgb[32][0] > DIVERGING.rgb[32][2]  # orange above


@pytest.mark.parametrize("palette", [CIVIDIS, CIVIDIS_MARKED, DIVERGING])
def test_each_level_has_a_character_of_one_cell(palette: Palette) -> None:
    assert [cell_len(char) for char in palette.ramp] == [1] * palette.size


def test_the_ramps_go_from_blank_to_full() -> None:
    assert ramp(" ░▒▓█", 5) == " ░▒▓█"
    assert (CIVIDIS.ramp[0], CIVIDIS.ramp[-1]) == (" ", "█")
    assert (DIVERGING.ramp[0], DIVERGING.ramp[16], DIVERGING.ramp[32]) == ("#", " ", "█")


def test_below_and_above_the_middle_are_different_characters() -> None:
    assert not set(DIVERGING.ramp[:15]) & set(DIVERGING.ramp[18:])


@pytest.mark.parametrize("count", [0, 257])
def test_a_palette_needs_one_to_256_levels(count: int) -> None:
    with pytest.raises(ValueError, match="needs 1 to 256 colours"):
        Palette([(0, 0, 0)] * count, " " * count)


def test_a_palette_needs_a_character_per_level() -> None:
    with pytest.raises(ValueError, match="2 colours and 1 characters"):
        Palette([(0, 0, 0), (1, 1, 1)], " ")


def test_a_pair_of_levels_is_a_half_block_and_an_equal_pair_a_blank() -> None:
    upper_two_lower_one, both_three = FOUR.run(2 * 4 + 1, 1), FOUR.run(3 * 4 + 3, 1)
    assert (upper_two_lower_one.text, both_three.text) == ("▀", " ")
    assert upper_two_lower_one.style == Style.parse("#a0a0a0 on #505050")


def test_the_cached_runs_of_a_palette_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flexinspect.drawing.heatmap._MAX_CACHED_RUNS", 3)
    palette = Palette(FOUR.rgb, FOUR.ramp)
    for length in range(1, 9):
        assert palette.run(1, length).text == "▀" * length
    assert len(palette._runs) <= 3


def test_the_text_colour_contrasts_with_its_background() -> None:
    assert FOUR.style(0).color == Color.from_rgb(255, 255, 255)
    assert FOUR.style(3).color == Color.from_rgb(0, 0, 0)


# --- half blocks ---


def test_two_rows_of_levels_make_one_line() -> None:
    (strip,) = heat(levels([0, 3, 1], [0, 1, 3]), FOUR, COLOUR)
    assert (strip.text, strip.cell_length) == (" ▀▀", 3)
    assert backgrounds(strip) == [(0, 0, 0), (80, 80, 80), (255, 255, 255)]


def test_an_odd_last_row_fills_its_line() -> None:
    strips = heat(levels([0, 0], [0, 0], [3, 2]), FOUR, COLOUR)
    assert texts(strips) == ["  ", "  "]
    assert backgrounds(strips[1]) == [(255, 255, 255), (160, 160, 160)]


@pytest.mark.parametrize("depth", ["truecolor", "256", "none"])
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (1, 0), (4, 0), (1, 1), (2, 1), (3, 7), (8, 40)])
def test_a_picture_has_half_as_many_lines_and_as_many_cells(
    shape: tuple[int, int], depth: ColorDepth
) -> None:
    rows, columns = shape
    picture = np.random.default_rng(0).integers(0, 32, shape, np.uint8)
    strips = heat(picture, CIVIDIS, Theme(depth))
    assert [strip.cell_length for strip in strips] == [columns] * ((rows + 1) // 2)
    assert [cell_len(text) for text in texts(strips)] == [columns] * ((rows + 1) // 2)


def test_a_level_outside_the_palette_is_its_last() -> None:
    (strip,) = heat(levels([200], [200]), FOUR, COLOUR)
    assert backgrounds(strip) == [(255, 255, 255)]


def test_a_line_that_stays_is_the_same_strip() -> None:
    before = heat(levels([0, 1], [0, 1], [2, 2], [3, 3]), FOUR, COLOUR)
    after = heat(levels([0, 1], [0, 1], [2, 3], [3, 3]), FOUR, COLOUR)
    assert after[0] is before[0]
    assert after[1] != before[1]


def test_the_cached_lines_of_a_palette_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexinspect.drawing.heatmap._MAX_CACHED_LINES", 2)
    palette = fresh(FOUR)
    for level in range(4):
        heat(levels([level]), palette, COLOUR)
    assert len(palette._lines) == 2


def test_long_runs_take_few_segments_and_few_bytes() -> None:
    (mask,) = heat(levels([0] * 100 + [3] * 100, [0] * 200), FOUR, COLOUR)
    assert len(list(mask)) == 2
    assert len(bytes_of(mask)) < 300


def test_a_terminal_of_256_colours_gets_no_24_bit_codes() -> None:
    for look in (COLOUR, LESSER):
        (strip,) = heat(levels([0, 3, 2], [3, 1, 2]), fresh(FOUR), look)
        codes = bytes_of(strip, "256")
        assert ";2;" not in codes
        assert "48;5;" in codes


def test_a_line_cut_in_two_is_the_same_line() -> None:
    picture = np.random.default_rng(2).integers(0, 4, (2, 30), np.uint8)
    (strip,) = heat(picture, fresh(FOUR), COLOUR)
    left, right_part = strip.crop(0, 11), strip.crop(11, 30)
    assert left.text + right_part.text == strip.text
    assert seen(bytes_of(left) + bytes_of(right_part)) == seen(bytes_of(strip))


def test_without_colours_the_larger_of_two_levels_is_a_character() -> None:
    (strip,) = heat(levels([0, 3, 1, 0], [0, 1, 2, 1]), FOUR, PLAIN)
    assert strip.text == " █▒░"
    assert backgrounds(strip) == []


def test_without_colours_a_diverging_cell_shows_the_level_farther_from_the_middle() -> None:
    (strip,) = heat(levels([0, 16, 20], [20, 32, 16]), DIVERGING, PLAIN)
    assert strip.text == "#█░"


def test_without_colours_a_marked_cell_hides_the_largest_value() -> None:
    (strip,) = heat(levels([31, 0], [32, 32]), CIVIDIS_MARKED, PLAIN)
    assert strip.text == "!!"


# --- boxes ---


def test_boxes_are_as_wide_as_asked_for() -> None:
    strips = boxes(levels([0, 1], [2, 3]), FOUR, PLAIN, cell_width=3)
    assert texts(strips) == ["   ░░░", "▒▒▒███"]


def test_boxes_in_colour_are_backgrounds() -> None:
    strips = boxes(levels([0, 3]), FOUR, COLOUR, cell_width=2)
    assert texts(strips) == ["    "]
    assert backgrounds(strips[0]) == [(0, 0, 0)] * 2 + [(255, 255, 255)] * 2


@pytest.mark.parametrize(
    ("width", "drawn"), [(1, "░+"), (2, "░░[]"), (3, "░░░[▒]"), (4, "░░░░[▒▒]")]
)
def test_the_marked_box_is_in_brackets(width: int, drawn: str) -> None:
    strips = boxes(levels([1, 2], [1, 2]), FOUR, PLAIN, cell_width=width, marked=(1, 1))
    assert strips[1].text == drawn
    assert list(strips[1])[-1].style == PLAIN.style("cursor")
    assert strips[0].text == "░" * width + "▒" * width


def test_the_marked_box_keeps_its_colour_and_its_line_its_width() -> None:
    (strip,) = boxes(levels([0, 3, 1]), FOUR, COLOUR, cell_width=4, marked=(0, 1))
    assert (strip.text, strip.cell_length) == ("    [  ]    ", 12)
    expected = [(0, 0, 0)] * 4 + [(255, 255, 255)] * 4 + [(80, 80, 80)] * 4
    assert backgrounds(strip) == expected


@pytest.mark.parametrize("marked", [(-1, 0), (1, 0), (0, 2), (5, 5)])
def test_a_cursor_outside_of_the_levels_is_not_drawn(marked: tuple[int, int]) -> None:
    assert texts(boxes(levels([0, 3]), FOUR, PLAIN, cell_width=2, marked=marked)) == ["  ██"]


@pytest.mark.parametrize("width", [0, -1])
def test_boxes_without_width_are_empty_lines(width: int) -> None:
    strips = boxes(levels([0], [1]), FOUR, COLOUR, cell_width=width, marked=(0, 0))
    assert [strip.cell_length for strip in strips] == [0, 0]
