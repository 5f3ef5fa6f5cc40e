"""The header: answer, place, state of the capture and its cost; and the messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace
from support.traces import sample_trace
from support.tui import screen_text, settle, until

from flexinspect.control.messages import PAUSE_REQUESTED, StatusResponse, StepRef
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import TracePlace
from flexinspect.panels.token_window import Answer, TokenChunk, TokenWindow
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import TokenRecord
from flexinspect.trace.query_results import StepRow
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.status_lines import draw_token_strip, header_parts, pause_message
from flexinspect.tui.trace_session import CaptureStatus, RunStatus

SILENT = CaptureStatus(is_unresponsive=True)


def texts(status: RunStatus) -> list[str]:
    parts = header_parts(status, TracePlace(), None, following=True, capture_status=SILENT)
    return [text for text, _, _ in parts]


def test_a_process_that_still_loads_is_not_called_busy() -> None:
    assert "busy, no reply" not in texts(RunStatus("recording", phase="importing torch"))


def test_a_process_that_generates_and_does_not_answer_is_called_busy() -> None:
    assert "busy, no reply" in texts(RunStatus("recording", generations=1, last_step=3))


def cost_of(step: StepRow | None = None, **run: Any) -> list[str]:
    parts = header_parts(RunStatus("recording", run=run), TracePlace(), step, following=True)
    return [text for text, _, _ in parts if "overhead" in text]


def step_of(wall_ms: float, capture_ms: float) -> StepRow:
    """Return a step that took so long, of it for its capture."""
    fields = dict.fromkeys(StepRow.__struct_fields__)
    times = {"phase": "decode", "wall_ms": wall_ms, "capture_ms": capture_ms}
    return StepRow(**(fields | times))  # type: ignore[arg-type]


def test_the_cost_is_a_percentage_during_and_after_the_run() -> None:
    assert cost_of(step_of(53.0, 3.0)) == ["overhead 6 %"]
    assert cost_of(step_of(53.0, 3.0), cost={"ratio": 0.084}) == ["overhead 8 %"]
    assert cost_of(step_of(53.0, float("nan"))) == cost_of() == []


FINISHED = RunStatus(
    "finished",
    run={"model": {"name": "/home/me/models/demo", "device": "cpu"}, "level": "advanced"},
    generations=2,
    last_step=2,
)


def header_of(status: RunStatus, *answer: object, **capture: object) -> list[str]:
    place = TracePlace(generation=1, step=1)
    known = Answer(*answer) if answer else None  # type: ignore[arg-type]
    parts = header_parts(status, place, None, known, following=False, **capture)  # type: ignore[arg-type]
    return [text for text, _, _ in parts]


def test_ordinals_count_from_1_and_ids_from_0() -> None:
    texts_ = header_of(FINISHED)
    assert "answer 2 of 2" in texts_
    assert "token 2 of 3 (step 1)" in texts_
    assert "answer 2 of 2 so far" in header_of(replace(FINISHED, state="recording"))


def test_the_answer_comes_first_with_a_sign_whether_it_was_expected() -> None:
    assert header_of(FINISHED, " Paris\n", "finished", True)[0] == "“Paris” ✓"
    assert header_of(FINISHED, "Lyon", "finished", False)[0] == "“Lyon” ✖"
    assert header_of(FINISHED, "x" * 99, "finished", None)[0] == f"“{'x' * 23}…”"


def test_a_local_model_is_named_by_its_folder() -> None:
    assert "demo" in header_of(FINISHED)
    assert not any("/home/me" in text for text in header_of(FINISHED))


def test_the_header_says_why_the_run_is_paused() -> None:
    live = RunStatus("recording", generations=2, last_step=2)
    reason = "breakpoint 1, entropy > 3\x1b: step 1 (decode): entropy 3.4"
    status = StatusResponse("paused", StepRef(1, 0, 1), "paused", reason)
    texts_ = header_of(live, capture_status=CaptureStatus(status))
    assert "paused: breakpoint `entropy > 3\\x1b`" in texts_
    asked = StatusResponse("paused", StepRef(1, 0, 1), "paused", PAUSE_REQUESTED)
    assert "paused" in header_of(live, capture_status=CaptureStatus(asked))
    running = StatusResponse("running", StepRef(1, 0, 1), "", until="after the next step")
    assert "pausing" in header_of(live, capture_status=CaptureStatus(running))


def test_a_pause_says_where_why_and_how_to_continue() -> None:
    hit = "breakpoint 1, step == 0: step 0 (prefill): token 'is'"
    cases = {
        hit: "Paused at token 1 · breakpoint `step == 0` · space continue · . one token",
        "branch 1 is done": "Paused at token 1 · branch 1 is done · space continue · . one token",
        PAUSE_REQUESTED: "Paused at token 1 · space continue · . one token",
    }
    for reason, message in cases.items():
        status = StatusResponse("paused", StepRef(0, 0, 0), "paused", reason)
        assert pause_message(status, ["space continue", ". one token"]) == message
    before = StatusResponse("paused", StepRef(0, 0, -1), "paused", PAUSE_REQUESTED)
    assert pause_message(before, ["p continue"]) == "Paused before the first token · p continue"


async def test_a_message_replaces_the_last_one_and_all_are_listed(tmp_path: Path) -> None:
    app = InspectorApp(sample_trace(tmp_path / "sample.flextrace"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        for text in ("one", "two", "three"):
            app.notify(text)
            await pilot.pause()
        assert [note.message for note in app._notifications] == ["three"]
        await pilot.press("M")
        await until(pilot, lambda: "two" in screen_text(app))
        shown = screen_text(app)
        assert shown.index("three") < shown.index("two") < shown.index("one")


def test_of_two_segments_in_the_same_place_the_wider_one_has_its_label() -> None:
    tokens = tuple(TokenRecord(pos, pos, "word", "word", pos, 0) for pos in range(12))
    one = Segment(0, 1, "wording 1", SegmentKind.PARAPHRASE, 0)
    two = Segment(1, 8, "wording 2", SegmentKind.PARAPHRASE, 1)
    three = Segment(8, 12, "wording 3", SegmentKind.PARAPHRASE, 2)
    window = TokenWindow((TokenChunk(tokens, {}),), (one, two, three), 6, len(tokens))
    (_, labels), row = draw_token_strip(window, 60, Theme())
    text = labels.text
    assert "wording 1" not in text
    assert text.index("╵wording 2") == row.columns[1]
    assert text.index("╵wording 3") == row.columns[8]
    assert text.index("▲6") == row.columns[6]
