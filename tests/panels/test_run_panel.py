"""The run panel: the pipeline with real numbers, and the facts of the manifest."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from flexinspect.drawing.text_lines import Pen
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Request, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.panels.run_panel import (
    Box,
    RunFacts,
    RunOptions,
    RunPanel,
    draw_diagram,
    generation_stages,
    manifest_rows,
)
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    CallRecord,
    GenerationEnd,
    GenerationRecord,
    MaskRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

PANEL = RunPanel()
PLAIN = Theme("none")
SEGMENTS = (
    Segment(0, 1, "bos", SegmentKind.BOS, 0),
    Segment(1, 3, "paraphrase 1", SegmentKind.PARAPHRASE, 1),
    Segment(3, 4, "separator 1", SegmentKind.SEPARATOR, 1),
    Segment(4, 8, "generated", SegmentKind.GENERATED, 3),
)
TOKENS = (
    TokenRecord(0, 1, "<s>", "", 0, 0, True),
    TokenRecord(1, 2, "What", "What", 1, 1),
    TokenRecord(2, 3, "?", "?", 2, 1),
    TokenRecord(3, 4, "Ċ", "\n", 3, 2),
)
MANIFEST: dict[str, Any] = {
    "argv": ["flexinspect", "run", "--prompt", "a b"],
    "compiled": False,
    "cost": {"ratio": 0.018},
    "job": {"dataset": "demo", "prompts": []},
    "model": {"name": "demo", "parameters": 2164416},
    "seed": 7,
    "started_at": 0.0,
}


def step(number: int, wall_ms: float, **changes: Any) -> StepRecord:
    phase, q_len, before = ("decode", 1, 3 + number) if number else ("prefill", 4, 0)
    calls = tuple(
        CallRecord(i, "flex uncompiled", "flexinspect", "mask0", 1, 8, 2, q_len, 9, 64, "f", 0.1)
        for i in range(3)
    )
    token = TokenRecord(4 + number, 5, "yes", "yes", 4 + number, 3, False, number)
    made = StepRecord(
        *(0, number, phase, q_len, before, before + q_len, 1.0, wall_ms, 0.1),
        tokens=(token,),
        calls=calls,
    )
    return replace(made, **changes)


def mask() -> MaskRecord:
    cells = np.tril(np.ones((1, 4, 4), np.bool_))
    return MaskRecord("mask0", "block", 1, 1, 4, 4, 0, 0, 128, 128, "m.rule", cells=cells)


def write(
    path: Path, run: dict[str, Any], *, answer: str | None = "Yes", expected: tuple[str, ...] = ()
) -> Path:
    with TraceWriter.create(path, run) as writer:
        writer.begin_generation(
            GenerationRecord(
                *(0, "q-17", "segment-isolation", "contiguous", SEGMENTS, TOKENS, expected),
                declared={"separators": "attached"},
            )
        )
        writer.write_step(step(0, 250.0, masks=(mask(),)))
        for number, wall_ms in ((1, 10.0), (2, 20.0), (3, 90.0)):
            writer.write_step(step(number, wall_ms))
        if answer is not None:
            writer.end_generation(GenerationEnd(0, "finished", answer, SEGMENTS, "eos", 2.0))
    return path


@pytest.fixture
def data(tmp_path: Path) -> RunFacts:
    return load(write(tmp_path / "run.flextrace", MANIFEST, expected=("yes", "oui")))


def load(path: Path, place: TracePlace | None = None) -> RunFacts:
    return PANEL.load(Source(open_trace(path)), Request(place or TracePlace(step=1), RunOptions()))


def stage_lines(data: RunFacts, title: str) -> tuple[str, ...]:
    return next(box.lines for box in generation_stages(data) if box.title.startswith(title))


def drawn(
    data: RunFacts, width: int = 120, height: int = 40, look: Theme = PLAIN, offset: int = 0
) -> list[str]:
    request = Request(TracePlace(), RunOptions(offset), width, height)
    picture = PANEL.paint(data, request, look)
    assert len(picture.strips) <= height
    for strip in picture.strips:
        assert strip.cell_length == width == sum(part.cell_length for part in strip)
    return [strip.text.rstrip() for strip in picture.strips]


def test_the_stages_stand_in_the_order_in_which_they_happen(data: RunFacts) -> None:
    assert [box.title for box in generation_stages(data)] == [
        *("input", "concatenation", "mask", "patch", "prefill", "decode loop ↻", "text")
    ]


def test_the_input_names_sample_and_question(data: RunFacts) -> None:
    assert stage_lines(data, "input") == ("demo q-17", "1 paraphrase", "“What?”")


def test_the_concatenation_counts_tokens_and_gives_bounds(data: RunFacts) -> None:
    assert stage_lines(data, "concatenation") == (
        "4 tokens in 3 segments",
        "positions contiguous",
        "bos [0, 1)",
        "paraphrase 1 [1, 3)",
        "and 1 separator",
    )


def test_many_segments_are_cut_but_the_last_one_stays(data: RunFacts) -> None:
    many = tuple(Segment(n, n + 1, f"paraphrase {n}", SegmentKind.PARAPHRASE, n) for n in range(40))
    lines = stage_lines(replace(data, segments=many), "concatenation")
    assert "… 33 more" in lines
    assert lines[-1] == "paraphrase 39 [39, 40)"


def test_the_mask_gives_its_fingerprint_and_open_share(data: RunFacts) -> None:
    assert stage_lines(data, "mask") == (
        "segment-isolation",
        "separators attached",
        "mask0 (block), 4x4, block 128x128",
        "62.5 % of its cells open",
    )


def test_the_patch_says_what_ran_in_which_layers(data: RunFacts) -> None:
    assert stage_lines(data, "patch") == (
        "flex uncompiled, layers 0-2",
        "backend flexinspect",
        "not compiled",
    )


def test_a_layer_with_another_decode_path_is_named(data: RunFacts) -> None:
    calls = (*data.calls[:2], replace(data.calls[2], path="sdpa", backend="sdpa"))
    assert stage_lines(replace(data, calls=calls), "patch")[:3] == (
        "prefill: flex uncompiled, layers 0-2",
        "decode: flex uncompiled, layers 0-1; sdpa, layer 2",
        "backend flexinspect, sdpa",
    )


def test_the_prefill_gives_time_and_speed(data: RunFacts) -> None:
    assert stage_lines(data, "prefill") == ("4 tokens in 250.0 ms", "16 tokens/s", "cache 0 → 4")


def test_the_decode_loop_gives_the_true_mean_and_the_cost_of_capture(data: RunFacts) -> None:
    assert stage_lines(data, "decode") == (
        "3 steps",
        "40.0 ms per step",
        "25.0 tokens/s",
        "overhead 1.8 % of the model's time",
    )


def test_the_text_is_compared_with_what_was_expected(data: RunFacts) -> None:
    box = generation_stages(data)[-1]
    assert box == Box("text", ("“Yes”", "expected yes | oui", "✓ correct", "finished, eos"), "good")


def test_a_wrong_answer_is_marked_as_wrong(tmp_path: Path) -> None:
    box = generation_stages(
        load(write(tmp_path / "a.flextrace", {}, answer="No", expected=("yes",)))
    )[-1]
    assert "✗ not an expected answer" in box.lines
    assert box.style == "bad"


def test_an_answer_is_not_evaluated_without_an_expectation(tmp_path: Path) -> None:
    lines = stage_lines(load(write(tmp_path / "a.flextrace", {})), "text")
    assert lines == ("“Yes”", "finished, eos")


def test_an_unfinished_answer_is_shown_and_not_evaluated(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "causal", "", SEGMENTS, TOKENS, ("yes",)))
        writer.write_step(step(0, 5.0))
        lines = stage_lines(load(path), "text")
    assert lines == ("“yes”", "expected yes", "recording")


def test_times_that_are_no_numbers_leave_their_line_out(data: RunFacts) -> None:
    assert data.prefill is not None
    nonfinite = replace(data.prefill, wall_ms=float("nan"))
    assert stage_lines(replace(data, prefill=nonfinite), "prefill") == ("cache 0 → 4",)
    assert stage_lines(replace(data, decode_time=(3, float("nan")), run={}), "decode") == (
        "3 steps",
    )


def test_a_trace_without_generations_shows_its_manifest(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "a.flextrace", {"seed": 7}):
        pass
    data = load(tmp_path / "a.flextrace")
    assert stage_lines(data, "prefill") == ("not recorded",)
    assert ("seed", "7") in manifest_rows(data)
    assert "seed: 7" in PANEL.describe(data)


@pytest.mark.parametrize(
    "run",
    [
        {"job": None, "cost": "much", "model": [1], "argv": 3, "versions": "x"},
        {"job": {"dataset": {"a": 1}}, "cost": {"ratio": None}, "started_at": "yesterday"},
        {"started_at": float("nan"), "ended_at": 1e300, "unknown": {"deep": {"er": [None]}}},
    ],
)
def test_a_manifest_of_another_tool_is_shown_as_it_is(tmp_path: Path, run: dict[str, Any]) -> None:
    data = load(write(tmp_path / "a.flextrace", run))
    names = [name for name, _ in manifest_rows(data)]
    assert names[0] == "state"
    assert drawn(data)
    assert all(text.isprintable() for text in PANEL.describe(data))


def test_the_manifest_gives_the_command_line_as_it_was_typed(data: RunFacts) -> None:
    facts = dict(manifest_rows(data))
    assert facts["command"] == "flexinspect run --prompt 'a b'"
    assert facts["model.parameters"] == "2164416 (2.2 M)"
    assert facts["seed"] == "7"
    assert facts["state"] == "finished"
    assert "argv" not in facts


def test_a_huge_manifest_is_cut_and_says_so(data: RunFacts) -> None:
    facts = manifest_rows(replace(data, run={f"k{n}": "v" * 9000 for n in range(1000)}))
    assert len(facts) == 301
    assert facts[-1] == ("…", "702 more facts")
    assert max(len(value) for _, value in facts) <= 2001


def test_text_from_the_trace_cannot_move_the_cursor(tmp_path: Path) -> None:
    run = {"\x1bkey": "\x1b[2J", "argv": ["\x1b"], "model": {"a\nb": ["\x9b"]}}
    data = load(write(tmp_path / "a.flextrace", run, answer="\x1b[1m", expected=("\x07",)))
    assert all(text.isprintable() for text in [*PANEL.describe(data), *drawn(data, 60, 200)])


def test_a_wide_diagram_goes_from_left_to_right() -> None:
    stages = [Box("one", ("1",)), Box("two", ("2", "3"))]
    assert [strip.text for strip in draw_diagram(stages, Pen(PLAIN, 53))] == [
        "╭─ one ─────────────────╮   ╭─ two ─────────────────╮",
        "│ 1                     │──▶│ 2                     │",
        "│                       │   │ 3                     │",
        "╰───────────────────────╯   ╰───────────────────────╯",
    ]


def test_a_narrow_diagram_goes_down() -> None:
    stages = [Box("one", ("1",)), Box("two", ("two words",))]
    assert [strip.text for strip in draw_diagram(stages, Pen(PLAIN, 12))] == [
        "╭─ one ────╮",
        "│ 1        │",
        "╰──────────╯",
        "      ▼     ",
        "╭─ two ────╮",
        "│ two      │",
        "│ words    │",
        "╰──────────╯",
    ]


def test_wide_characters_keep_the_boxes_closed() -> None:
    strips = draw_diagram([Box("日本", ("東京は日本の首都です。" * 3,))], Pen(PLAIN, 20))
    assert {strip.cell_length for strip in strips} == {20}
    assert all(strip.text.endswith(("╮", "│", "╯")) for strip in strips)


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (4, 3), (9, 4), (38, 14), (120, 40)])
@pytest.mark.parametrize("look", [PLAIN, Theme()])
def test_it_draws_at_any_size(data: RunFacts, size: tuple[int, int], look: Theme) -> None:
    assert len(drawn(data, *size, look)) == min(size[1], len(drawn(data, size[0], 999)))


def test_scrolling_reaches_the_last_line_and_stops(data: RunFacts) -> None:
    whole = drawn(data, 38, 500)
    options, seen = RunOptions(), 0
    while True:
        request = Request(TracePlace(), options, 38, 14)
        after = PANEL.on_action("cursor.down", data, request)
        if after is None:
            break
        options, seen = after, seen + 1
    assert seen > 3
    assert drawn(data, 38, 14, offset=options.offset) == whole[-14:]
    up = PANEL.on_action("cursor.up", data, Request(TracePlace(), options, 38, 14))
    assert up == RunOptions(options.offset - 4)
    assert PANEL.on_action("cursor.up", data, Request(TracePlace(), RunOptions(), 38, 14)) is None


def test_the_note_says_how_much_is_out_of_sight(data: RunFacts) -> None:
    picture = PANEL.paint(data, Request(TracePlace(), RunOptions(3), 38, 14), PLAIN)
    n_lines = len(drawn(data, 38, 500))
    assert picture.note == f"finished, lines 4-17 of {n_lines}"


def test_a_generation_that_is_not_there_leaves_the_manifest(data: RunFacts) -> None:
    elsewhere = load(Path(data.path), TracePlace(generation=5))
    assert elsewhere.generation is None
    assert stage_lines(elsewhere, "text") == ("not recorded",)
    assert ("seed", "7") in manifest_rows(elsewhere)


def test_a_huge_answer_is_cut_before_it_is_wrapped_and_keeps_its_verdict(
    data: RunFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped: list[int] = []
    original = textwrap.wrap

    def counting(text: str, *rest: Any, **more: Any) -> list[str]:
        wrapped.append(len(text))
        return original(text, *rest, **more)

    monkeypatch.setattr(textwrap, "wrap", counting)
    huge = replace(data, answer="word " * 200_000, is_correct=False)
    for width in (30, 120):
        assert "✗ not an expected" in "\n".join(drawn(huge, width, 400))
    assert max(wrapped) < 5000
    assert stage_lines(huge, "text")[0].endswith("…”")
    assert len("\n".join(PANEL.describe(huge))) < 5000


def test_the_answer_is_evaluated_once_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []

    def is_correct(answer: str, expected: Any) -> bool:
        judged.append(answer)
        return True

    monkeypatch.setattr("flexinspect.inputs.samples.is_correct_answer", is_correct)
    path = write(tmp_path / "a.flextrace", {}, expected=("yes",))
    source = Source(open_trace(path))
    for number in (0, 1, 2):
        facts = PANEL.load(source, Request(TracePlace(step=number), RunOptions()))
        drawn(facts)
    assert judged == ["Yes"]
    assert "✓ correct" in stage_lines(facts, "text")
