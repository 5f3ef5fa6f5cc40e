"""The tokens panel with a sequence that is longer than its window, and the text of tokens."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.earlier_traces import unpack

from flexinspect.cli.run_summary import summarize_run
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import display_text
from flexinspect.panels import token_window
from flexinspect.panels.base import Missing, Request, TracePlace
from flexinspect.panels.panel_registry import load_panel
from flexinspect.panels.panel_source import Source
from flexinspect.panels.run_panel import RunOptions, RunPanel
from flexinspect.panels.token_window import load_answer, uncertainty
from flexinspect.panels.tokens_panel import TokensData, TokensOptions, TokensPanel
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    LogitsRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from flexinspect.tui.status_lines import draw_token_strip

PANEL = TokensPanel()
N_PROMPT = 901
LONG = 400
SEGMENTS = (
    Segment(0, 1, "bos", SegmentKind.BOS, 0),
    *(
        Segment(1 + 300 * n, 301 + 300 * n, f"paraphrase {n + 1}", SegmentKind.PARAPHRASE, n + 1)
        for n in range(3)
    ),
    Segment(N_PROMPT, N_PROMPT + LONG, "generated", SegmentKind.GENERATED, 4),
)


def token(pos: int, step: int | None = None) -> TokenRecord:
    number = next(i for i, segment in enumerate(SEGMENTS) if segment.start <= pos < segment.stop)
    text = f" w{pos}" if pos else ""
    return TokenRecord(pos, pos, f"Ġw{pos}", text, pos, number, pos == 0, step)


def write(path: Path, n_steps: int, *, answer: str | None = None) -> Path:
    with TraceWriter.create(path, {}) as writer:
        prompt = tuple(token(pos) for pos in range(N_PROMPT))
        expected = ("w901",)
        writer.begin_generation(GenerationRecord(0, "s", "m", "", SEGMENTS, prompt, expected))
        for number in range(n_steps):
            pos = N_PROMPT + number
            rows, before = (1, pos - 1) if number else (N_PROMPT, 0)
            phase = "decode" if number else "prefill"
            record = StepRecord(0, number, phase, rows, before, before + rows, 1.0, 5.0, 0.1)
            writer.write_step(choosing(record, token(pos, number)))
        if answer is not None:
            writer.end_generation(GenerationEnd(0, "finished", answer, SEGMENTS, "eos", 2.0))
    return path


def choosing(record: StepRecord, chosen: TokenRecord) -> StepRecord:
    return replace(record, tokens=(chosen,))


def load(source: Source, step: int, width: int = 38, height: int = 14) -> TokensData:
    return PANEL.load(source, Request(TracePlace(step=step), TokensOptions(), width, height))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(open_trace(write(tmp_path_factory.mktemp("tokens") / "a.flextrace", LONG)))


def test_describe_names_the_positions_of_the_window(source: Source) -> None:
    data = load(source, 399)
    lines = PANEL.describe(data)
    where = f"positions {data.window.start} to {data.window.stop - 1} are shown"
    assert lines[0] == f"1301 tokens in 5 segments; {where}."
    assert data.window.start > N_PROMPT
    generated = [text for text in lines if text.startswith("  step ")]
    assert len(generated) == data.window.stop - data.window.start
    assert generated[-1].startswith("  step 399:  w1300 at position 1300")


def test_segments_outside_of_the_window_show_their_first_tokens(source: Source) -> None:
    lines = PANEL.describe(load(source, 399))
    assert lines[1].startswith("bos [0, 1): ")
    assert not lines[1].endswith("…")
    assert lines[2].startswith("paraphrase 1 [1, 301):  w1 w2 w3 w4")
    assert lines[3].startswith("paraphrase 2 [301, 601):  w301 w302")
    assert all(line.endswith("…") and 100 < len(line) < 260 for line in lines[2:5])


def test_a_segment_at_the_edge_shows_its_part_in_the_window(source: Source) -> None:
    data = load(source, 0)
    lines = PANEL.describe(data)
    start = data.window.start
    assert 601 < start < N_PROMPT
    assert lines[4].startswith(f"paraphrase 3 [601, 901): … w{start} w{start + 1}")
    assert lines[4].endswith(" w900")
    data = PANEL.load(source, Request(TracePlace(pos=350), TokensOptions(), 38, 14))
    lines = PANEL.describe(data)
    assert lines[3].startswith("paraphrase 2 [301, 601):  w301 w302")
    assert lines[3].endswith(f" w{data.window.stop - 1}…")
    first, last = data.window.start, data.window.stop - 1
    assert f"Generated: no token of positions {first} to {last}." in lines


def test_a_sequence_within_the_window_is_described_completely(source: Source) -> None:
    lines = PANEL.describe(load(source, 0, 200, 200))
    assert lines[0] == "1301 tokens in 5 segments."
    assert lines[2].endswith(" w300")
    assert not any("…" in line for line in lines[:-1])


def test_an_unfinished_answer_is_described_from_its_start(source: Source) -> None:
    for step in (3, 399):
        last = PANEL.describe(load(source, step))[-1]
        assert last.startswith("answer: w901 w902 w903")
        assert "…; expected: w901" in last


def test_stepping_reads_the_previews_once(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    load(source, 390)
    reads: list[int] = []
    original = type(source.reader).tokens

    def counting(self: object, *where: int, **more: int) -> object:
        reads.append(where[2])
        return original(self, *where, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(type(source.reader), "tokens", counting)
    load(source, 391)
    assert not [start for start in reads if start < N_PROMPT]


def test_the_last_tokens_are_read_once_until_another_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read_chunk = token_window._read_chunk

    def counted(reader: Any, place: TracePlace, number: int) -> Any:
        reads.append(number)
        return read_chunk(reader, place, number)

    monkeypatch.setattr(token_window, "_read_chunk", counted)
    growing = tmp_path / "a.flextrace"
    with TraceWriter.create(growing, {}) as writer:
        prompt = tuple(token(pos) for pos in range(N_PROMPT))
        writer.begin_generation(GenerationRecord(0, "s", "m", "", SEGMENTS, prompt))
        source = Source(open_trace(growing))
        for number in range(3):
            pos = N_PROMPT + number
            rows, before = (1, pos - 1) if number else (N_PROMPT, 0)
            record = StepRecord(0, number, "decode", rows, before, before + rows, 1.0, 5.0, 0.1)
            writer.write_step(choosing(record, token(pos, number)))
            for _ in range(2):  # the strip and the panel
                assert load(source, number).window.tokens[-1] == token(pos, number)
    last = N_PROMPT // token_window.CHUNK_TOKENS
    assert reads.count(last) == 3


def test_the_answer_of_a_branch_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "forked.flextrace"
    with TraceWriter.create(path, {}) as writer:
        prompt = tuple(token(pos) for pos in range(N_PROMPT))
        writer.begin_generation(GenerationRecord(0, "s", "m", "", SEGMENTS, prompt, ("left",)))
        record = StepRecord(0, 0, "prefill", N_PROMPT, 0, N_PROMPT, 1.0, 5.0, 0.1)
        writer.write_step(choosing(record, token(N_PROMPT, 0)))
        writer.begin_branch(0, 1, 0, 1)
        step = StepRecord(0, 1, "decode", 1, N_PROMPT, N_PROMPT + 1, 1.0, 5.0, 0.1, branch=1)
        writer.write_step(choosing(step, token(N_PROMPT + 1, 1)))
        writer.end_generation(GenerationEnd(0, "finished", "left", SEGMENTS, "eos", 2.0))
        end = GenerationEnd(0, "finished", "right", SEGMENTS, "eos", 2.0, branch=1)
        writer.end_generation(end)
    source = Source(open_trace(path))
    expected_text = []
    for branch in (0, 1):
        place = TracePlace(branch=branch, step=branch)
        data = PANEL.load(source, Request(place, TokensOptions(), 80, 20))
        expected_text.append(PANEL.describe(data)[-1])
    assert expected_text == [
        "answer: left; expected: left (right)",
        "answer: right; expected: left (wrong)",
    ]


@pytest.mark.parametrize("size", [(120, 40), (38, 14), (1, 1)])
@pytest.mark.parametrize("look", [Theme(), Theme("none")], ids=["colour", "plain"])
def test_every_size_is_drawn_to_the_cell(
    source: Source, size: tuple[int, int], look: Theme
) -> None:
    width, height = size
    request = Request(TracePlace(step=200), TokensOptions(), width, height)
    picture = PANEL.paint(PANEL.load(source, request), request, look)
    assert 0 < len(picture.strips) <= height
    assert {strip.cell_length for strip in picture.strips} == {width}
    assert "1301 tokens" in picture.note


@pytest.mark.parametrize(
    ("token", "text", "expected_text"),
    [
        ("ĠParis", " Paris", (" Paris", False)),
        ("<eos>", "", ("<eos>", True)),
        ("Ċ", "\n", ("↵", True)),
        ("Ġ", " ", ("·", True)),
        ("æĹ", "", ("◌", True)),
        ("¥", "日", ("日", False)),
        ("ĠðŁĹ", "", ("◌", True)),
        ("<0xE6>", "", ("<0xE6>", True)),
        ("", "", ("∅", True)),
        ("x", "\x1b[31m", ("\\x1b[31m", False)),
        ("[red]", "[red]", ("[red]", False)),
        ("\\x1b", "\\x1b", ("\\\\x1b", False)),
    ],
)
def test_a_token_is_shown_as_the_text_that_it_adds(
    token: str, text: str, expected_text: tuple[str, bool]
) -> None:
    assert display_text(token, text, special=False) == expected_text


@pytest.mark.parametrize(("rank", "expected_text"), [(0, ""), (3, ", rank 3"), (-1, "")])
def test_a_rank_of_0_and_an_unknown_rank_are_not_shown(
    tmp_path: Path, rank: int, expected_text: str
) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "m", "", SEGMENTS, (token(0),)))
        record = StepRecord(0, 0, "prefill", 1, 0, 1, 1.0, 5.0, 0.1)
        logits = LogitsRecord(0.0, 1.0, 7, rank, -0.5, 0, 0, 0.0, 1.0, (1,), ())
        writer.write_step(replace(choosing(record, token(901, 0)), logits=logits))
    (line,) = [t for t in PANEL.describe(load(Source(open_trace(path)), 0)) if "step 0:" in t]
    assert line.partition(", entropy 0.000")[2] == expected_text


@pytest.mark.parametrize("colour", ["probability", "entropy"])
def test_a_step_with_nan_logits_has_no_uncertainty(source: Source, colour: str) -> None:
    row = source.reader.steps(0, 0, limit=1)[0]
    assert uncertainty(replace(row, chosen_logprob=math.nan, entropy=math.nan), colour) is None
    assert uncertainty(replace(row, chosen_logprob=0.0, entropy=0.0), colour) == 0.0


def test_an_answer_whose_run_was_killed_has_no_verdict_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "killed.flextrace"
    chosen = replace(token(N_PROMPT, 0), token="left", text="left")
    with TraceWriter.create(path, {}) as writer:
        prompt = tuple(token(pos) for pos in range(N_PROMPT))
        writer.begin_generation(GenerationRecord(0, "s", "m", "", SEGMENTS, prompt, ("left",)))
        record = StepRecord(0, 0, "prefill", N_PROMPT, 0, N_PROMPT, 1.0, 5.0, 0.1)
        writer.write_step(choosing(record, chosen))
        writer.end_generation(GenerationEnd(0, "failed", "", SEGMENTS, "", 2.0))
    source = Source(open_trace(path))
    place = TracePlace()
    data = PANEL.load(source, Request(place, TokensOptions(), 80, 20))
    assert PANEL.describe(data)[-1] == "answer so far: left; expected: left"
    assert load_answer(source, place).is_correct is None
    facts = RunPanel().load(source, Request(place, RunOptions()))
    assert (facts.answer, facts.is_correct) == ("left", None)
    (generation,) = summarize_run(path)["generations"]
    assert (generation["answer"], generation["correct"]) == ("left", None)


@pytest.mark.parametrize("kind", ["error", "not-recorded"])
@pytest.mark.parametrize("name", ["tokens", "logits", "mask", "path"])
def test_a_run_without_a_model_says_why_nothing_is_recorded(
    name: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "empty.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.write_event(EventRecord(kind, "No model was\x1b found.", 1.0))
    panel = load_panel(name)
    with pytest.raises(Missing) as missing:
        panel.load(Source(open_trace(path)), Request(TracePlace(), panel.initial_options, 80, 20))
    assert missing.value.lines() == [
        "No step of this generation is recorded.",
        "No model was\\x1b found.",
    ]


def test_a_damaged_trace_that_lacks_a_token_is_drawn(tmp_path: Path) -> None:
    path = unpack("watch", tmp_path)
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute("DELETE FROM tokens WHERE pos = 2").rowcount
    with open_trace(path) as reader:
        last = reader.tokens(0)[-1].pos
        for pos in (1, 2, last):
            request = Request(TracePlace(pos=pos), TokensOptions(), 80, 20)
            data = TokensPanel().load(Source(reader), request)
            drawn = TokensPanel().paint(data, request, Theme("none"))
            has_token = "no token that this step chose" not in drawn.strips[-2].text
            assert has_token == (pos != 2)
            strip, _ = draw_token_strip(data.window, 80, Theme("none"))
            assert len(strip) == 2
