"""The findings panel: classes, the selected finding, and navigation to its place."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import mask_trace
from support.finding_traces import MANY, SEGMENTS, TOKENS, found

from flexinspect.analysis.reports.collect import UNDECLARED, FindingFilter, collect_report
from flexinspect.drawing.theme import Theme
from flexinspect.masks.mask_presets import causal
from flexinspect.panels.base import Navigate, Request, TracePlace
from flexinspect.panels.findings_of_place import load_groups
from flexinspect.panels.findings_panel import FindingsData, FindingsOptions, FindingsPanel
from flexinspect.panels.panel_source import Source
from flexinspect.records.finding import Severity
from flexinspect.records.step import GenerationRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.queries import NumberRange
from flexinspect.trace.reader import open_trace

PANEL = FindingsPanel()
PLAIN = Theme("none")


def request(
    options: FindingsOptions | None = None, width: int = 100, height: int = 30
) -> Request[FindingsOptions]:
    return Request(TracePlace(), options or PANEL.initial_options, width, height)


def load(source: Source, options: FindingsOptions | None = None) -> FindingsData:
    return PANEL.load(source, request(options))


def drawn(data: FindingsData, width: int = 100, height: int = 30, look: Theme = PLAIN) -> list[str]:
    picture = PANEL.paint(data, request(None, width, height), look)
    assert len(picture.strips) <= height
    for strip in picture.strips:
        assert strip.cell_length == width == sum(part.cell_length for part in strip)
    return [strip.text.rstrip() for strip in picture.strips]


def test_the_worst_comes_first_and_a_class_comes_once(source: Callable[..., Source]) -> None:
    data = load(source(MANY))
    assert [group.id for group in data.groups] == [
        *("mask.leak", "mask.empty-row", "numbers.nan", "logits.flat")
    ]
    assert PANEL.describe(data)[:3] == [
        "1 065 errors, 1 warning, 1 note.",
        "error mask.leak: layers 0-27, steps 3-40: 1 064 times.",
        "error mask.empty-row: step 5: once.",
    ]


def test_each_line_has_a_letter_for_its_severity(source: Callable[..., Source]) -> None:
    lines = drawn(load(source(MANY)))
    assert [text[:4] for text in lines[:4]] == ["▸E m", " E m", " W n", " N l"]
    assert lines[0].endswith("layers 0-27, steps 3-40: 1 064 times")
    assert "mask.leak is wrong." in lines[0]


def test_a_narrow_line_keeps_the_count(source: Callable[..., Source]) -> None:
    lines = drawn(load(source(MANY)), 38, 14)
    assert lines[0] == "▸E mask.leak               1 064 times"


def test_ranges_show_their_gaps() -> None:
    assert NumberRange(0, 9, 3).describe("layer") == "3 layers of 0-9"
    assert NumberRange(0, 9, 10).describe("layer") == "layers 0-9"
    assert NumberRange(4, 4, 1).describe("layer") == "layer 4"


def test_the_selected_one_shows_its_place_words_and_numbers(source: Callable[..., Source]) -> None:
    lines = PANEL.describe(load(source(MANY), FindingsOptions(1)))
    assert lines[-5:] == [
        "mask.empty-row is wrong.",
        "At generation 0, step 5.",
        "Positions: 1 “↵”, 2 “\\x1b[31mred”",
        "rows: 2",
        'worst: "Infinity"',
    ]


def test_a_finding_of_a_whole_generation_has_no_step(source: Callable[..., Source]) -> None:
    data = load(source([found("odd", step=None)]))
    assert data.groups[0].steps is None
    assert "At generation 0." in PANEL.describe(data)
    assert "error odd: generation 0: once." in PANEL.describe(data)


def test_moving_changes_the_selection_and_stops_at_the_ends(source: Callable[..., Source]) -> None:
    kept = source(MANY)
    data = load(kept)
    assert PANEL.on_action("cursor.up", data, request()) is None
    options = PANEL.on_action("cursor.down", data, request())
    assert options == FindingsOptions(1, ("error", "mask.empty-row"))
    assert load(kept, options).chosen.finding.id == "mask.empty-row"  # type: ignore[union-attr]
    last = load(kept, FindingsOptions(99))
    assert last.selected == 3
    assert PANEL.on_action("cursor.down", last, request()) is None


def test_left_and_right_go_through_the_findings_of_a_class(source: Callable[..., Source]) -> None:
    kept = source(MANY)
    assert PANEL.on_action("cursor.left", load(kept), request()) is None
    options = PANEL.on_action("cursor.right", load(kept), request())
    assert isinstance(options, FindingsOptions)
    data = load(kept, options)
    assert data.chosen is not None
    assert (data.chosen.finding.step, data.chosen.finding.layer) == (3, 1)
    assert "At generation 0, step 3, layer 1 (2 of 1 064)." in PANEL.describe(data)


def test_the_selection_stays_on_its_class_when_worse_ones_arrive(tmp_path: Path) -> None:
    path = tmp_path / "live.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "", "", SEGMENTS, TOKENS))
        writer.write_findings([found("a", Severity.NOTE), found("b", Severity.NOTE, 1)])
        source = Source(open_trace(path))
        options = PANEL.on_action("cursor.down", load(source), request())
        assert isinstance(options, FindingsOptions)
        writer.write_findings([found("worse")])
        data = load(source, options)
        assert data.groups[0].id == "worse"
        assert data.groups[data.selected].id == "b"


def test_enter_goes_to_the_step_layer_and_head(source: Callable[..., Source]) -> None:
    data = load(source(MANY), FindingsOptions(2))
    assert PANEL.on_action("cursor.enter", data, request()) == Navigate(0, 0, 2, 1, 3)


def test_a_click_selects_and_a_second_one_goes_there(source: Callable[..., Source]) -> None:
    data = load(source(MANY))
    selected = PANEL.on_mouse(9, 2, data, request(), click=True)
    assert selected == FindingsOptions(2, ("warning", "numbers.nan"))
    assert PANEL.on_mouse(9, 0, data, request(), click=True) == Navigate(0, 0, 3, 0)
    assert PANEL.on_mouse(9, 8, data, request(), click=True) is None
    assert PANEL.on_mouse(9, 2, data, request(), click=False) is None


def test_a_long_list_scrolls_to_the_selected_line(source: Callable[..., Source]) -> None:
    kept = source([found(f"kind.{n:02}", step=n) for n in range(40)])
    lines = drawn(load(kept, FindingsOptions(30)), 38, 14)
    assert lines[3].startswith("▸E kind.30")
    assert lines[0].startswith(" E kind.27")


def test_an_empty_list_says_only_what_is_known(source: Callable[..., Source]) -> None:
    data = load(source([]))
    assert PANEL.describe(data) == ["No findings are recorded in this trace.", UNDECLARED]
    assert drawn(data, 200) == ["No findings are recorded in this trace.", UNDECLARED]
    assert PANEL.on_action("cursor.enter", data, request()) is None


def test_an_empty_list_names_the_rules_that_the_manifest_names(
    source: Callable[..., Source],
) -> None:
    data = load(source([], {"rules": ["numbers", "rows"]}))
    assert PANEL.describe(data) == [
        "No problems found: 2 rules checked every recorded step.",
        UNDECLARED,
        "The rules: numbers, rows.",
    ]


@pytest.mark.parametrize("declared", [mask_trace.declared(causal()), {"training": {"groups": []}}])
def test_a_declared_mask_and_a_training_need_no_declaration(
    tmp_path: Path, declared: dict[str, Any]
) -> None:
    path = tmp_path / "run.flextrace"
    with TraceWriter.create(path, {"rules": ["rows"]}) as writer:
        writer.begin_generation(
            GenerationRecord(0, "s", "", "", SEGMENTS, TOKENS, declared=declared)
        )
    assert UNDECLARED not in PANEL.describe(load(Source(open_trace(path))))


def test_errors_alarm_and_notes_do_not(source: Callable[..., Source]) -> None:
    assert PANEL.paint(load(source(MANY)), request(), PLAIN).alarm


def test_notes_alone_do_not_alarm(source: Callable[..., Source]) -> None:
    picture = PANEL.paint(load(source([MANY[-3]])), request(), PLAIN)
    assert (picture.alarm, picture.note) == (False, "1 note")


def test_text_from_the_trace_cannot_move_the_cursor(source: Callable[..., Source]) -> None:
    nasty = found("\x1b[2Jid", sentence="a\x1b[1m\nb", evidence={"\x07": "\x1b", "n": ["\x9b"]})
    data = load(source([nasty]))
    assert all(text.isprintable() for text in [*PANEL.describe(data), *drawn(data)])


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (9, 4), (38, 14), (120, 40)])
@pytest.mark.parametrize("look", [PLAIN, Theme()])
def test_it_draws_at_any_size(
    source: Callable[..., Source], size: tuple[int, int], look: Theme
) -> None:
    assert drawn(load(source(MANY)), *size, look)


LONG = replace(
    found("segments.shifted", positions=(1, 2), evidence={f"value {n}": n for n in range(9)}),
    why="It matters because " + "the text is long " * 12,
    confirm="Look " + "at the rows " * 12,
    fix="Count the positions " + "in the input ids " * 12,
)


def screens_of(source: Source, height: int, action: str = "cursor.down") -> list[list[str]]:
    """Return what is drawn before and after each `action`, until it changes nothing."""
    screens, options = [], PANEL.initial_options
    for _ in range(50):
        asked = request(options, 80, height)
        data = PANEL.load(source, asked)
        screens.append([s.text.rstrip() for s in PANEL.paint(data, asked, PLAIN).strips])
        options = PANEL.on_action(action, data, asked)
        if options is None:
            return screens
    raise AssertionError("the end was never reached")


@pytest.mark.parametrize("height", [6, 10, 19])
def test_every_line_of_a_long_finding_can_be_read(
    source: Callable[..., Source], height: int
) -> None:
    trace = source([LONG, found("numbers.nan", Severity.NOTE)])
    whole = screens_of(trace, 200)[0][3:]
    screens = screens_of(trace, height)
    seen = {line for screen in screens for line in screen[3:]}
    assert set(whole) <= seen
    assert all(len(screen) <= height for screen in screens)
    assert screens[0][-1].startswith("▼ ")
    assert screens[1][3].startswith("▲ ")
    assert "numbers.nan is wrong." in screens[-1]


def test_the_fix_is_the_first_text_below_the_place(source: Callable[..., Source]) -> None:
    lines = screens_of(source([LONG]), 200)[0]
    names = [
        line.partition(":")[0]
        for line in lines
        if line.partition(":")[0] in ("Fix", "Why it matters")
    ]
    assert names == ["Fix", "Why it matters"]


def test_what_is_hidden_is_counted(source: Callable[..., Source]) -> None:
    trace = source([LONG])
    n_lines = len(screens_of(trace, 200)[0])
    first = screens_of(trace, 10)[0]
    assert first[-1] == f"▼ {n_lines - 9} more lines"


def test_the_report_lists_kinds_in_the_order_of_the_panel(tmp_path: Path) -> None:
    rng = random.Random(3)
    for number in range(30):
        findings = [
            replace(
                found(f"kind.{rng.randrange(6)}", rng.choice([*Severity])),
                generation=rng.randrange(2),
                step=rng.choice([None, 0, 1, 2]),
                layer=rng.choice([None, 0, 1]),
            )
            for _ in range(rng.randrange(1, 15))
        ]
        path = tmp_path / f"{number}.flextrace"
        with TraceWriter.create(path, {}) as writer:
            for generation in range(2):
                writer.begin_generation(GenerationRecord(generation, "s", "", "", SEGMENTS, TOKENS))
            writer.write_findings(findings)
        with open_trace(path) as reader:
            listed = [(group.severity, group.id) for group in load_groups(Source(reader))]
            report = collect_report(reader, FindingFilter(), ())
            assert [(group.severity, group.id) for group in report.groups()] == listed
