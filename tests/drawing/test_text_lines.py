"""Bars, timelines, numbers, lines and looks, without an app."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from flexinspect.drawing.plots import bar, format_number, sparkline, timeline
from flexinspect.drawing.text_lines import (
    align_right,
    clip_text,
    header,
    join_blocks,
    line,
    wrap_paragraph,
)
from flexinspect.drawing.theme import DARK_COLORS, SEGMENT_COLORS, Theme
from flexinspect.drawing.token_cells import segment_style

NONE = Style.null()
COLOUR, PLAIN = Theme(), Theme("none")
NAN, INF = math.nan, math.inf


def texts(strips: list[Strip]) -> list[str]:
    return [strip.text for strip in strips]


# --- bars, sparklines, timelines ---


@pytest.mark.parametrize(
    ("fraction", "drawn"),
    [
        (0.0, "    "),
        (0.5, "██  "),
        (0.625, "██▌ "),
        (1.0, "████"),
        (7.0, "████"),
        (-1.0, "    "),
        (1e-9, "▏   "),
        (INF, "████"),
        (-INF, "    "),
        (NAN, "?   "),
    ],
)
def test_a_bar_covers_its_fraction_to_an_eighth(fraction: float, drawn: str) -> None:
    assert bar(fraction, 4) == drawn


@given(st.floats(), st.integers(-2, 50))
def test_a_bar_is_as_wide_as_asked_for(fraction: float, width: int) -> None:
    assert len(bar(fraction, width)) == max(width, 0)


def test_a_sparkline_rises_from_zero_to_the_highest_value() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7, 8], 9) == "▁▁▂▃▄▅▆▇█"


def test_a_sparkline_shows_gaps_and_non_finite_values() -> None:
    assert sparkline([4.0, None, NAN, INF, 8.0], 7) == "▄ !!█  "


def test_a_long_sparkline_shows_the_highest_of_each_bucket() -> None:
    assert sparkline([1, 8, 0, 4, None, None, 2, NAN], 4) == "█▄ !"


def test_a_sparkline_of_equal_values_has_one_height() -> None:
    assert sparkline([0.0, 0.0], 2) == "▁▁"
    assert sparkline([3.0, 3.0], 2) == "██"
    assert sparkline([-3.0, -3.0], 2) == "▁▁"


def test_a_sparkline_of_the_largest_floats_does_not_overflow() -> None:
    assert sparkline([-1.7e308, 1.7e308], 2) == "▁█"


@given(st.lists(st.none() | st.floats(), max_size=40), st.integers(-1, 30))
def test_a_sparkline_is_as_wide_as_asked_for(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) == max(width, 0)


def test_a_timeline_is_columns_of_eighths() -> None:
    strips = timeline([0, 8, 16, 12], 5, 2, PLAIN)
    assert texts(strips) == ["  █▄ ", "▁███ "]


def test_a_timeline_of_negative_values_starts_at_the_lowest() -> None:
    assert texts(timeline([-8.0, 0.0, 8.0], 3, 1, PLAIN)) == ["▁▄█"]


def test_a_timeline_marks_non_finite_values_at_the_foot() -> None:
    strips = timeline([8.0, NAN, None, INF], 4, 2, COLOUR)
    assert texts(strips) == ["█   ", "█! !"]
    styles = {text: style for text, style, _ in strips[1]}
    assert styles["!"] == COLOUR.style("bad")
    assert styles["█"] == COLOUR.style("accent")


def test_the_marked_value_of_a_timeline_stays_visible() -> None:
    high, low = timeline([8.0, 4.0], 2, 2, COLOUR, marked=1)
    assert texts([high, low]) == ["█┊", "██"]
    assert [style for _, style, _ in high] == [COLOUR.style("accent"), COLOUR.style("muted")]
    assert [style for _, style, _ in low] == [COLOUR.style("accent"), COLOUR.style("strong")]


def test_without_colours_the_marked_value_of_a_timeline_is_reversed_in_every_line() -> None:
    for strip in timeline([8.0, 8.0, 8.0], 4, 2, PLAIN, marked=1, style="good"):
        assert [(text, style) for text, style, _ in strip] == [
            ("█", PLAIN.style("good")),
            ("█", PLAIN.style("cursor")),
            ("█", PLAIN.style("good")),
            (" ", PLAIN.style("text")),
        ]


@pytest.mark.parametrize("marked", [-1, 3])
def test_a_marked_index_out_of_range_is_not_drawn(marked: int) -> None:
    (strip,) = timeline([8.0, 8.0, 8.0], 3, 1, PLAIN, marked=marked)
    assert [style for _, style, _ in strip] == [PLAIN.style("accent")]


@given(st.integers(1, 400), st.integers(1, 60), st.data())
def test_the_marked_column_of_a_long_timeline_is_the_one_of_its_value(
    count: int, width: int, data: st.DataObject
) -> None:
    marked = data.draw(st.integers(0, count - 1))
    values = [8.0 if index == marked else 0.0 for index in range(count)]
    (strip,) = timeline(values, width, 1, PLAIN, marked=marked)
    reversed_text = [text for text, style, _ in strip if style and style.reverse]
    assert reversed_text == ["█"]


@given(st.lists(st.none() | st.floats(), max_size=40), st.integers(-1, 30), st.integers(-1, 5))
def test_a_timeline_fills_its_place(values: list[float | None], width: int, height: int) -> None:
    strips = timeline(values, width, height, COLOUR, marked=0)
    assert [cell_len(strip.text) for strip in strips] == [max(width, 0)] * max(height, 0)
    assert {strip.cell_length for strip in strips} <= {max(width, 0)}


# --- numbers as text ---


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0032, "0.0032"),
        (12.4, "12.4"),
        (1.2e6, "1.2e+06"),
        (NAN, "nan"),
        (-INF, "-inf"),
        (None, "-"),
        (-0.0, "0"),
        (3, "3"),
        (0.25, "0.25"),
        (-7.125, "-7.12"),
        (99.96, "100"),
        (999.6, "1000"),
        (65504.0, "65504"),
        (131072.0, "1.3e+05"),
        (1.5e-7, "1.5e-07"),
    ],
)
def test_a_number_is_short(value: float | None, written: str) -> None:
    assert format_number(value) == written


@pytest.mark.parametrize(
    ("value", "width", "written"),
    [
        (12.4, 6, "  12.4"),
        (12.4, 3, " 12"),
        (1.24e6, 4, " 1e6"),
        (-3.2e-9, 5, "-3e-9"),
        (3.2e-9, 3, "  …"),
        (12345.0, 2, " …"),
        (NAN, 2, " …"),
        (None, 3, "  -"),
    ],
)
def test_a_number_loses_digits_but_is_never_cut_to_another_number(
    value: float | None, width: int, written: str
) -> None:
    assert format_number(value, width) == written


@given(st.none() | st.floats(), st.integers(1, 12))
def test_a_number_is_as_wide_as_asked_for(value: float | None, width: int) -> None:
    assert len(format_number(value, width)) == width


@given(st.floats(-1e5, 1e5))
def test_a_number_is_read_back_within_its_digits(value: float) -> None:
    assert math.isclose(float(format_number(value)), value, rel_tol=0.06, abs_tol=1e-300)


# --- lines ---


def drawn(parts: list[str], width: int) -> str:
    return line([(part, NONE) for part in parts], width).text


def test_a_short_line_is_filled_up() -> None:
    assert drawn(["ab", "c"], 5) == "abc  "


def test_the_fill_has_its_own_style() -> None:
    grey = Style.parse("on #333333")
    assert list(line([("a", NONE)], 3, grey)) == [Segment("a", NONE), Segment("  ", grey)]


@pytest.mark.parametrize(
    ("parts", "width", "shown"),
    [
        (["abcdef"], 4, "abc…"),
        (["ab", "cdef"], 4, "abc…"),
        (["abcd", "ef"], 4, "abc…"),
        (["abcd", "", "ef"], 4, "abc…"),
        (["abc"], 1, "…"),
        (["a", "bc"], 1, "…"),
        (["abc"], 0, ""),
        (["abc"], -3, ""),
        ([], 0, ""),
    ],
)
def test_a_long_line_ends_in_an_ellipsis_wherever_its_parts_end(
    parts: list[str], width: int, shown: str
) -> None:
    assert drawn(parts, width) == shown


def test_trailing_blanks_are_cut_without_an_ellipsis() -> None:
    assert drawn(["abcd", "   "], 4) == "abcd"
    assert drawn(["abc", "   "], 4) == "abc "


def test_text_after_blanks_is_cut_with_an_ellipsis() -> None:
    assert drawn(["abcd", "   ", "e"], 4) == "abc…"


@pytest.mark.parametrize(
    ("width", "shown"), [(1, "…"), (2, " …"), (3, "日…"), (4, "日本"), (5, "日本 ")]
)
def test_a_wide_character_that_does_not_fit_leaves_a_blank(width: int, shown: str) -> None:
    assert drawn(["日本"], width) == shown
    assert drawn(["日", "本"], width) == shown
    assert clip_text("日本", width) == shown


def test_a_combining_mark_in_its_own_span_stays_on_its_letter() -> None:
    assert drawn(["e", "\u0301"], 1) == "e\u0301"


PIECES = st.lists(st.text(st.sampled_from("ab 日本é🎉\u0301"), max_size=6), max_size=6)


@given(PIECES, st.integers(-2, 12))
def test_a_line_has_exactly_its_width(parts: list[str], width: int) -> None:
    strip = line([(part, NONE) for part in parts], width)
    assert cell_len(strip.text) == strip.cell_length == max(width, 0)


@given(st.text(st.sampled_from("ab 日🎉")), st.integers(-2, 12))
def test_clip_text_and_align_right_have_exactly_their_width(text: str, width: int) -> None:
    assert cell_len(clip_text(text, width)) == max(width, 0)
    assert cell_len(align_right(text, width)) == max(width, 0)


def test_align_right_pads_on_the_left() -> None:
    assert align_right("ab", 4) == "  ab"
    assert align_right("abcdef", 4) == "abc…"


def test_a_paragraph_is_wrapped_at_words_and_keeps_its_lines() -> None:
    assert texts(wrap_paragraph("one two three\n\nfour", 9, NONE)) == [
        "one two  ",
        "three    ",
        "         ",
        "four     ",
    ]


def test_a_paragraph_of_wide_characters_loses_none() -> None:
    strips = wrap_paragraph("日本語日本語日本語", 8, NONE)
    assert texts(strips) == ["日本語日", "本語日本", "語      "]


def test_a_paragraph_shows_control_characters_and_markup_as_they_are() -> None:
    assert texts(wrap_paragraph("\x1b[31m[red]\t", 20, NONE)) == ["\\x1b[31m[red]\\t" + " " * 5]


@pytest.mark.parametrize("width", [-1, 0, 1, 3, 8])
def test_a_narrow_paragraph_keeps_its_width(width: int) -> None:
    strips = wrap_paragraph("a considerable text 日本語", width, NONE)
    assert {cell_len(strip.text) for strip in strips} == {max(width, 0)}


def test_blocks_side_by_side_are_filled_up_to_the_longer_one() -> None:
    left, right_part = [line([("ab", NONE)], 3)], [line([(c, NONE)], 2) for c in "xyz"]
    assert texts(join_blocks(left, right_part, NONE)) == ["ab x ", "   y ", "   z "]
    assert texts(join_blocks([], right_part, NONE)) == ["x ", "y ", "z "]
    assert join_blocks([], [], NONE) == []


# --- looks ---

NAMES = [
    *("text", "strong", "muted", "title", "accent", "good", "warn", "bad"),
    *("chosen", "cursor", "special", "invisible"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_theme_without_colours_has_every_style(name: str) -> None:
    style = PLAIN.style(name)
    assert (style.color, style.bgcolor) == (None, None)


@pytest.mark.parametrize("name", NAMES)
def test_a_coloured_style_has_both_colours(name: str) -> None:
    style = COLOUR.style(name)
    assert style.color is not None
    assert style.bgcolor == COLOUR.color("background")


def test_without_colours_important_styles_still_differ_from_text() -> None:
    text = PLAIN.style("text")
    for name in ("strong", "muted", "title", "warn", "bad", "chosen", "cursor", "special"):
        assert PLAIN.style(name) != text, name


def test_an_unknown_style_is_an_error() -> None:
    with pytest.raises(KeyError):
        COLOUR.style("nonsense")


def test_neighbouring_segment_styles_differ_and_repeat() -> None:
    bands = [segment_style(number, 0, False) for number in range(len(SEGMENT_COLORS) + 1)]
    assert all(one != other for one, other in pairwise(bands))
    assert bands[0] == segment_style(len(SEGMENT_COLORS), 0, False)
    assert segment_style(0, 0, True) != segment_style(0, 1, True)


def _contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2.2, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    lin = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * lin[0] + 0.7152 * lin[1] + 0.0722 * lin[2]


@pytest.mark.parametrize("name", sorted(set(DARK_COLORS) - {"background", "surface"}))
def test_the_dark_colours_are_readable_on_their_background(name: str) -> None:
    assert (
        _contrast(DARK_COLORS[name], DARK_COLORS["background"]) >= 4
    )  # 4.5 would exclude Textual's primary


@pytest.mark.parametrize("band", SEGMENT_COLORS)
def test_white_text_is_readable_on_every_segment_colour(band: str) -> None:
    assert _contrast("#ffffff", band) >= 3  # large text in WCAG; a heatmap's labels are short


def test_the_header_counts_cells_not_characters() -> None:
    parts = [("日本語日本語", "title", 0), ("step 3", "text", 1)]
    assert header(parts, 18, Theme("none")).text.rstrip() == "日本語日本語"
    assert header(parts, 21, Theme("none")).text == "日本語日本語 · step 3"
