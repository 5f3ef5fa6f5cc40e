"""The memory panel: figures, growth, the cache by segment, and leaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Missing, Navigate, NoOptions, Request, TracePlace
from flexinspect.panels.memory_panel import MemoryData, MemoryPanel, cache_parts, format_growth
from flexinspect.panels.panel_source import Source
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import GenerationRecord, MemoryRecord, StepRecord, TokenRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.queries import memory_range
from flexinspect.trace.reader import open_trace

PANEL = MemoryPanel()
PLAIN = Theme("none")
SEGMENTS = (
    Segment(0, 1, "bos", SegmentKind.BOS, 0),
    Segment(1, 7, "paraphrase\x1b 1", SegmentKind.PARAPHRASE, 1),
    Segment(7, 8, "separator 1", SegmentKind.SEPARATOR, 1),
    Segment(8, 9000, "generated", SegmentKind.GENERATED, 3),
)
SIZES = [(120, 40), (84, 6), (38, 14), (38, 5), (20, 3), (5, 30), (2, 2), (1, 1)]
Make = Callable[..., Source]


def step(number: int, memory: MemoryRecord | None, **changes: Any) -> StepRecord:
    """A step after a prompt of eight tokens; each token takes 1000 bytes of cache."""
    token = TokenRecord(8 + number, 5, "x", "x", 8 + number, 3, False, number)
    before = 7 + number if number else 0
    made = StepRecord(0, number, "decode", 1, before, 8 + number, 100.0, 5.0, 0.1)
    return replace(made, memory=memory, tokens=(token,), **changes)


def memory(number: int, rss: int = 0, **changes: Any) -> MemoryRecord:
    made = MemoryRecord(400_000_000 + rss, 9_000_000, 1000 * (8 + number))
    return replace(made, **changes)


def growing(n_steps: int, per_step: int) -> list[StepRecord]:
    return [step(n, memory(n, n * per_step)) for n in range(n_steps)]


@pytest.fixture
def source(tmp_path: Path) -> Make:
    def make(steps: list[StepRecord], fork: int | None = None) -> Source:
        path = tmp_path / "run.flextrace"
        with TraceWriter.create(path, {}) as writer:
            writer.begin_generation(GenerationRecord(0, "s", "m", "", SEGMENTS, ()))
            if fork is not None:
                writer.begin_branch(0, 1, parent=0, fork_step=fork)
            for record in steps:
                writer.write_step(record)
        return Source(open_trace(path))

    return make


def request(width: int = 120, height: int = 40, **place: int) -> Request[NoOptions]:
    return Request(TracePlace(**place), NoOptions(), width, height)


def load(source: Source, width: int = 120, height: int = 40, **place: int) -> MemoryData:
    return PANEL.load(source, request(width, height, **place))


def drawn(data: MemoryData, width: int = 120, height: int = 40, look: Theme = PLAIN) -> list[str]:
    picture = PANEL.paint(data, request(width, height), look)
    assert len(picture.strips) <= height
    for strip in picture.strips:
        assert strip.cell_length == width == sum(part.cell_length for part in strip)
    return [strip.text.rstrip() for strip in picture.strips]


def test_figures_have_their_growth_and_its_median(source: Make) -> None:
    lines = drawn(load(source(growing(6, 4000)), 38, 14, step=3), 38, 14)
    assert lines[0].split() == ["step", "3", "now", "growth", "median"]
    assert lines[1].split() == ["RSS", "400", "MB", "+4", "kB", "+4", "kB"]
    assert lines[2].split() == ["KV", "cache", "11", "kB", "+1", "kB", "+1", "kB"]
    assert lines[3].split() == ["model", "9", "MB", "0", "B", "0", "B"]


def test_the_first_step_has_no_growth(source: Make) -> None:
    data = load(source(growing(6, 4000)), 38, 14, step=0)
    assert drawn(data, 38, 14)[1].split() == ["RSS", "400", "MB", "-", "+4", "kB"]
    assert PANEL.describe(data)[0] == "Memory at the end of step 0, the first one: no growth yet."


def test_growth_at_the_left_end_of_a_window_is_known_too(source: Make) -> None:
    data = load(source(growing(300, 4000)), 38, 14, step=150)
    assert data.window.format_steps() == "steps 131-168 of 0-299"
    assert data.growth("RSS")[131] == 4000
    assert len(data.records) == 39


def test_the_cache_is_divided_by_the_length_of_segments(source: Make) -> None:
    data = load(source(growing(4, 0)), step=2)
    assert [(part.label, part.n_tokens, part.n_bytes) for part in data.parts] == [
        ("bos", 1, 1000),
        ("paraphrase\\x1b 1", 6, 6000),
        ("separator 1", 1, 1000),
        ("generated", 2, 2000),
    ]
    lines = PANEL.describe(data)
    assert "KV cache by segment: 10 keys of 1 kB each." in lines
    row = next(line for line in lines if line.strip().startswith("generated"))
    assert row.split() == ["generated", "2", "tokens", "2", "kB"]


def test_the_parts_add_up_to_the_cache(source: Make) -> None:
    data = load(source(growing(4, 0)), step=3)
    assert sum(part.n_bytes for part in data.parts) == data.records[3].kv_cache


def test_a_sliding_cache_holds_only_the_last_keys(source: Make) -> None:
    made = source([step(0, memory(0)), step(1, memory(1), kv_after=3)])
    about = made.reader.step(0, 1)
    assert about is not None
    parts = cache_parts(SEGMENTS, about, 3000)
    assert [(part.label, part.n_tokens) for part in parts] == [
        ("paraphrase\\x1b 1", 1),
        ("separator 1", 1),
        ("generated", 1),
    ]


def test_segments_are_drawn_with_bars_and_the_small_ones_together(source: Make) -> None:
    data = load(source(growing(4, 0)), 38, 14, step=2)
    lines = drawn(data, 38, 14)
    at = lines.index("KV cache by segment (by length)")
    assert lines[at + 1].split()[:6] == ["paraphrase\\…", "6", "kB", "6", "tok", "█████"]
    assert lines[-1].split() == ["2", "others", "2", "kB", "2", "tok"]


def test_timelines_name_where_they_begin(source: Make) -> None:
    data = load(source(growing(6, 4_000_000)), 38, 14, step=3)
    lines = drawn(data, 38, 14)
    assert "RSS from 400 MB up by 20 MB  steps 0-5" in lines
    assert "KV cache from 8 kB up by 5 kB" in lines


def test_a_click_on_a_timeline_goes_to_its_step(source: Make) -> None:
    data, made_request = load(source(growing(6, 4000)), step=3), request(step=3)
    for title in ("RSS from ", "KV cache from "):
        x, y = next((line.index(title), y) for y, line in enumerate(drawn(data)) if title in line)
        assert PANEL.on_mouse(x + 9, y + 1, data, made_request, click=True) == Navigate(step=2)
        assert PANEL.on_mouse(x + 24, y + 1, data, made_request, click=True) is None
        assert PANEL.on_mouse(x, y + 1, data, made_request, click=False) is None
    assert PANEL.on_mouse(0, 0, data, made_request, click=True) is None


def test_cuda_figures_appear_only_where_they_are(source: Make) -> None:
    cuda = {"cuda_allocated": 5_000_000, "cuda_reserved": 8_000_000, "cuda_peak": 7_000_000}
    data = load(source([step(n, memory(n, **cuda)) for n in range(3)]), step=1)
    assert data.figures[:4] == ["RSS", "CUDA allocated", "CUDA reserved", "CUDA peak"]
    titles = [line.partition(" from ")[0] for line in drawn(data) if " up by " in line]
    assert [title.split("  ")[-1].strip() for title in titles] == ["CUDA allocated", "KV cache"]
    assert any(line.startswith("CUDA peak") and "7 MB" in line for line in drawn(data))


def test_memory_that_grows_much_faster_than_the_cache_alarms(source: Make) -> None:
    data = load(source(growing(40, 5_000_000)), step=20)
    picture = PANEL.paint(data, request(step=20), PLAIN)
    assert picture.alarm
    assert picture.note == "RSS without the KV cache grows by 5 MB a step"
    assert PANEL.describe(data)[0] == (
        f"{picture.note}, throughout steps 0-39: something keeps memory at every step."
    )
    assert "something keeps" in " ".join(drawn(data))


@pytest.mark.parametrize(
    "rss",
    [
        lambda n: n * 330_000,  # little
        lambda n: n // 20 * 200_000_000,  # jumps of an allocator
        lambda n: min(n, 20) * 5_000_000,  # comes to rest
        lambda n: 10**9 - n * 5_000_000,  # shrinks
    ],
)
def test_other_growth_raises_no_alarm(source: Make, rss: Callable[[int], int]) -> None:
    data = load(source([step(n, memory(n, rss(n))) for n in range(40)]), step=20)
    assert not PANEL.paint(data, request(step=20), PLAIN).alarm


def test_growth_no_faster_than_the_cache_raises_no_alarm(source: Make) -> None:
    steps = [step(n, memory(n, n * 10**7, kv_cache=10**7 * (8 + n))) for n in range(40)]
    assert not PANEL.paint(load(source(steps), step=20), request(), PLAIN).alarm


def test_few_steps_have_no_trend(source: Make) -> None:
    data = load(source(growing(10, 10**7)), step=5)
    assert not PANEL.paint(data, request(), PLAIN).alarm


def test_a_step_without_memory_is_reported(source: Make) -> None:
    steps = growing(4, 4000)
    steps[2] = step(2, None)
    data = load(source(steps), step=2)
    assert data.parts == ()
    assert data.growth("RSS") == {1: 4000}
    assert "No memory is recorded at step 2." in PANEL.describe(data)
    assert drawn(data)[1].split()[:3] == ["RSS", "?", "-"]


def test_no_memory_at_all_is_missing(source: Make) -> None:
    made = source([step(0, None), step(1, None)])
    with pytest.raises(Missing, match="No memory is recorded in steps 0-1"):
        load(made)


def test_a_fork_reads_on_from_its_parent(source: Make) -> None:
    made = source([*growing(5, 1000), step(3, memory(3, 9000), branch=1)], fork=3)
    found = memory_range(made.reader, 0, 0, 9, branch=1)
    assert [record.rss - 400_000_000 for record in found.values()] == [0, 1000, 2000, 9000]
    data = load(made, step=3, branch=1)
    assert data.growth("RSS")[3] == 7000
    assert [part.label for part in data.parts][-1] == "generated"


def test_growth_is_written_with_its_sign() -> None:
    lines = [format_growth(n) for n in (None, 0, 0.2, 2048, -16_000)]
    assert lines == ["-", "0 B", "0 B", "+2 kB", "-16 kB"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("look", [PLAIN, Theme(), Theme("256")])
def test_every_size_is_drawn_to_the_cell(source: Make, size: tuple[int, int], look: Theme) -> None:
    data = load(source(growing(60, 5_000_000)), *size, step=30)
    assert len(drawn(data, *size, look)) >= 1


def test_a_picture_may_have_another_size_than_the_loaded_one(source: Make) -> None:
    data = load(source(growing(300, 4000)), 120, 40, step=150)
    assert len(drawn(data, 20, 14)) == 14
