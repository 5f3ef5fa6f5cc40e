"""The output panel: printed lines up to the current step, escaped for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.traces import RUN, sample_trace

from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Missing, Request, TracePlace
from flexinspect.panels.output_panel import OutputData, OutputOptions, OutputPanel
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import GenerationRecord, OutputRecord, StepRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

PANEL = OutputPanel()
PLAIN = Theme("none")
PRINTED = (
    OutputRecord("stdout", "loading\nhalf ", 1.0),
    OutputRecord("stderr", "10%\r55%\r100%\n", 1.5, 0, 0),
    OutputRecord("stdout", "a line\n", 2.0, 0, 0),
    OutputRecord("stdout", "\x1b[31mred[/b] \u202e\n", 3.0, 0, 1),
    OutputRecord("stderr", "Traceback", 4.0, 0, 2),
)


def made(path: Path, printed: Sequence[OutputRecord] = PRINTED, n_steps: int = 3) -> Source:
    with TraceWriter.create(path / "run.flextrace", RUN) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "", "", (), ()))
        for number in range(n_steps):
            writer.write_step(StepRecord(0, number, "decode", 1, number, number + 1, 1.0, 1.0, 0.1))
        writer.write_output(printed)
    return Source(open_trace(path / "run.flextrace"))


def at(step: int, *, width: int = 30, height: int = 8, **options: object) -> Request[OutputOptions]:
    chosen = replace(OutputOptions(), **options)  # type: ignore[arg-type]
    return Request(TracePlace(step=step), chosen, width, height)


def drawn(data: OutputData, request: Request[OutputOptions]) -> list[str]:
    picture = PANEL.paint(data, request, PLAIN)
    assert len(picture.strips) <= request.height
    assert all(strip.cell_length == request.width for strip in picture.strips)
    return [strip.text.rstrip() for strip in picture.strips]


def test_lines_are_in_order_with_those_of_the_step_marked(tmp_path: Path) -> None:
    source, request = made(tmp_path), at(1)
    lines = drawn(PANEL.load(source, request), request)
    assert lines == [
        "  loading",
        "  half a line",
        " !100%",
        "▸ \\x1b[31mred[/b] \\u202e",
        " !Traceback",
    ]


def test_the_last_line_of_the_step_is_at_the_bottom(tmp_path: Path) -> None:
    printed = [OutputRecord("stdout", f"line {n}\n", float(n), 0, n // 10) for n in range(50)]
    source = made(tmp_path, printed, n_steps=6)
    request = at(2, height=5)
    data = PANEL.load(source, request)
    assert drawn(data, request) == [f"▸ line {n}" for n in range(25, 30)]
    assert PANEL.paint(data, request, PLAIN).note == "lines 26-30 of 50"
    assert drawn(PANEL.load(source, at(5)), at(5, height=2)) == ["  line 48", "  line 49"]


def test_scrolling_stops_at_both_ends(tmp_path: Path) -> None:
    printed = [OutputRecord("stdout", f"line {n}\n", float(n), 0, 1) for n in range(9)]
    source, request = made(tmp_path, printed), at(1, height=3)
    data = PANEL.load(source, request)
    up = PANEL.on_action("cursor.up", data, request)
    assert up == OutputOptions(scroll=-1)
    assert PANEL.on_action("cursor.down", data, request) is None
    assert PANEL.on_action("zoom.in", data, request) is None
    assert drawn(data, at(1, height=3, scroll=-4))[-1] == "▸ line 4"
    assert drawn(data, at(1, height=3, scroll=-99)) == ["▸ line 0", "▸ line 1", "▸ line 2"]


def test_long_and_wide_lines_are_wrapped(tmp_path: Path) -> None:
    source = made(tmp_path, [OutputRecord("stdout", "作" * 20 + "\n", 1.0, 0, 0)])
    request = at(0, width=20)
    lines = drawn(PANEL.load(source, request), request)
    assert [line.strip("▸ ") for line in lines] == ["作" * 9, "作" * 9, "作" * 2]


def test_one_stream_can_be_selected_and_describe_shows_the_origin_of_lines(tmp_path: Path) -> None:
    source = made(tmp_path)
    data = PANEL.load(source, at(2, stream="stderr"))
    assert [one.text for one in data.lines] == ["100%", "Traceback"]
    assert PANEL.describe(data) == [
        "2 lines, 2 of them on stderr.",
        "stderr, generation 0 step 0: 100%",
        "stderr, generation 0 step 2: Traceback",
    ]
    lines = PANEL.describe(PANEL.load(source, at(0)))
    assert lines[1] == "stdout, before the first step: loading"
    assert lines[-1] == "And 2 more after this step."


def test_a_trace_without_output_says_how_to_record_it(tmp_path: Path) -> None:
    source = Source(open_trace(sample_trace(tmp_path / "sample.flextrace")))
    with pytest.raises(Missing) as caught:
        PANEL.load(source, at(0))
    assert "flexinspect run SCRIPT.py" in caught.value.hint


def test_a_program_that_printed_nothing_is_not_told_how_to_be_recorded(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "run.flextrace", RUN | {"program": {"name": "a.py"}}):
        pass
    with pytest.raises(Missing) as caught:
        PANEL.load(Source(open_trace(tmp_path / "run.flextrace")), at(0))
    assert caught.value.lines() == ["The program has printed nothing."]
