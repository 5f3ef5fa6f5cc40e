"""The logits panel: the candidates, the logits processors, and the timelines."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Missing, Navigate, NoOptions, Request, TracePlace
from flexinspect.panels.logits_panel import (
    LogitsData,
    LogitsPanel,
    find_bin,
    is_changed,
    is_filtered,
    probability,
)
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import step_window
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    UNKNOWN,
    Candidate,
    GenerationRecord,
    LogitsRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

PANEL = LogitsPanel()
PLAIN = Theme("none")
SEGMENTS = (Segment(0, 9000, "generated", SegmentKind.GENERATED, 0),)
SIZES = [(120, 40), (84, 10), (38, 14), (38, 5), (20, 3), (5, 30), (2, 2), (1, 1)]
Make = Callable[..., Source]


def candidate(rank: int, text: str, chance: float, after: float | None = None) -> Candidate:
    logprob = math.log(chance)
    score = logprob if after is None else math.log(after) if after else -math.inf
    return Candidate(rank, 100 + rank, text, logprob, logprob, score, score)


PLAIN_THREE = (
    candidate(0, " Paris", 0.5),
    candidate(1, " Lyon", 0.25),
    candidate(2, "\x1b[31m作\n", 0.125),
)
SAMPLED = (
    candidate(0, " Paris", 0.5, 0.75),
    candidate(1, " Lyon", 0.25, 0.25),
    candidate(2, " Nice", 0.125, 0.0),
)


def logits(candidates: tuple[Candidate, ...] = PLAIN_THREE, **changes: Any) -> LogitsRecord:
    record = LogitsRecord(
        entropy=1.5,
        margin=0.75,
        chosen_id=100,
        chosen_rank=0,
        chosen_logprob=math.log(0.5),
        n_nan=0,
        n_inf=0,
        histogram_min=-8.0,
        histogram_max=8.0,
        histogram=(1, 0, 6, 1),
        candidates=candidates,
    )
    return replace(record, **changes)


def step(number: int, record: LogitsRecord | None, **changes: Any) -> StepRecord:
    chosen = record.chosen_id if record else 100
    token = TokenRecord(number + 4, chosen, "Ġx", " Paris", number + 4, 0, False, number)
    made = StepRecord(0, number, "decode", 1, 3, 4, 100.0, 5.0, 0.1, logits=record, tokens=(token,))
    return replace(made, **changes)


@pytest.fixture
def source(tmp_path: Path) -> Make:
    def make(steps: list[StepRecord], fork: list[StepRecord] | None = None) -> Source:
        path = tmp_path / "run.flextrace"
        with TraceWriter.create(path, {}) as writer:
            writer.begin_generation(GenerationRecord(0, "s", "m", "", SEGMENTS, ()))
            for record in steps:
                writer.write_step(record)
            for record in fork or []:
                if record is (fork or [])[0]:
                    writer.begin_branch(0, 1, parent=0, fork_step=record.step)
                writer.write_step(replace(record, branch=1))
        return Source(open_trace(path))

    return make


def request(width: int = 120, height: int = 40, **place: int) -> Request[NoOptions]:
    return Request(TracePlace(**place), NoOptions(), width, height)


def load(source: Source, width: int = 120, height: int = 40, **place: int) -> LogitsData:
    return PANEL.load(source, request(width, height, **place))


def drawn(data: LogitsData, width: int = 120, height: int = 40, look: Theme = PLAIN) -> list[str]:
    picture = PANEL.paint(data, request(width, height, step=data.step), look)
    assert len(picture.strips) <= height
    for strip in picture.strips:
        assert strip.cell_length == width == sum(part.cell_length for part in strip)
    return [strip.text.rstrip() for strip in picture.strips]


def find(lines: list[str], text: str) -> tuple[int, int]:
    """Return the column and the line at which a text is drawn."""
    return next((line.index(text), y) for y, line in enumerate(lines) if text in line)


def walk(n_steps: int = 6) -> list[StepRecord]:
    return [step(n, logits(entropy=float(n), margin=6.0 - n)) for n in range(n_steps)]


def test_candidates_have_bars_and_the_chosen_one_a_star(source: Make) -> None:
    lines = drawn(load(source([step(0, logits())])), 38, 14)
    assert lines[0] == "entropy 1.5  margin 0.75  rank 0"
    assert lines[2].split() == ["*", "0", "·Paris", "0.5", "█████"]
    assert lines[3].split()[:3] == ["1", "·Lyon", "0.25"]
    assert lines[3].count("█") == 2


def test_text_of_the_model_is_escaped(source: Make) -> None:
    data = load(source([step(0, logits())]))
    lines = "\n".join([*drawn(data), *PANEL.describe(data)])
    assert "\\x1b[31m作\\n" in lines
    assert "\x1b" not in lines


def test_without_sampling_there_is_no_second_column(source: Make) -> None:
    data = load(source([step(0, logits())]))
    assert not data.is_processed
    assert "after" not in "\n".join(drawn(data))
    assert "The scores are the logits: no processor changed these candidates." in PANEL.describe(
        data
    )


def test_sampling_shows_both_probabilities_and_the_filtered_tokens(source: Make) -> None:
    data = load(source([step(0, logits(SAMPLED))]))
    lines = drawn(data, 38, 14)
    assert lines[1].split() == ["token", "before", "after"]
    assert lines[2].split()[:5] == ["*", "0", "·Paris", "0.5", "0.75"]
    assert lines[4].split() == ["2", "·Nice", "0.125", "filtered"]
    lines = PANEL.describe(data)
    assert any(line.startswith("The processors filtered 1 of these 3 candidates") for line in lines)
    assert any("filtered" in line and '" Nice"' in line for line in lines)


def test_a_wide_picture_shows_logits_next_to_scores(source: Make) -> None:
    lines = drawn(load(source([step(0, logits(SAMPLED))])), 140, 20)
    assert lines[1].split()[:5] == ["token", "logit", "before", "score", "after"]


def test_a_chosen_token_outside_of_the_candidates_has_its_own_line(source: Make) -> None:
    record = logits(chosen_id=900, chosen_rank=47, chosen_logprob=math.log(0.01))
    data = load(source([step(0, record)]))
    lines = drawn(data, 38, 14)
    assert lines[5].split()[:4] == ["*47", "·Paris", "0.01", "▏"]
    assert PANEL.describe(data)[0] == (
        'Step 0 chose " Paris" (token 900), rank 47, with probability 0.01.'
    )


def test_a_low_picture_still_shows_the_chosen_token(source: Make) -> None:
    record = logits(chosen_id=102, chosen_rank=2)
    lines = drawn(load(source([step(0, record)])), 38, 3)
    assert [line[0] for line in lines] == ["e", " ", "*"]


def test_timelines_cover_the_window_and_a_click_goes_to_its_step(source: Make) -> None:
    data = load(source(walk()), step=2)
    made_request = request(step=2)
    x, y = find(drawn(data), "entropy 2 nats  0 to 5  steps 0-5")
    for number in range(6):
        cell = x + 4 * number + 1
        assert PANEL.on_mouse(cell, y + 1, data, made_request, click=True) == Navigate(step=number)
    assert PANEL.on_mouse(x + 24, y + 1, data, made_request, click=True) is None
    assert PANEL.on_mouse(x, y + 1, data, made_request, click=False) is None
    assert PANEL.on_mouse(0, 2, data, made_request, click=True) is None


def test_the_rank_has_a_timeline_only_where_it_is_not_always_the_best(source: Make) -> None:
    steps = walk()
    assert load(source(steps)).series_names == ["entropy", "margin"]


def test_a_rank_above_zero_adds_its_timeline(source: Make) -> None:
    steps = [*walk(), step(6, logits(chosen_id=101, chosen_rank=1))]
    data = load(source(steps), step=6)
    assert data.series_names == ["entropy", "margin", "rank"]
    expected = "Rank of the chosen token in steps 0-6: 0 (step 0) to 1 (step 6)"
    assert any(line.startswith(expected) for line in PANEL.describe(data))


def test_describe_summarizes_the_timelines(source: Make) -> None:
    lines = PANEL.describe(load(source(walk()), step=2))
    assert "Entropy in steps 0-5: 0 (step 0) to 5 (step 5), median 2.5." in lines
    assert "Margin in steps 0-5: 1 (step 5) to 6 (step 0), median 3.5." in lines


def test_only_the_window_is_read_of_many_steps(source: Make) -> None:
    data = load(source(walk(300)), 38, 14, step=150)
    assert len(data.rows) == 38 == len(data.window)
    assert data.window.format_steps() == "steps 131-168 of 0-299"


def test_nan_logits_alarm(source: Make) -> None:
    record = logits(
        (Candidate(0, 100, "x", math.nan, math.nan, math.nan, math.nan),),
        entropy=math.nan,
        margin=math.nan,
        chosen_logprob=math.nan,
        n_nan=7,
        histogram=(),
    )
    data = load(source([step(0, record), step(1, logits())]))
    picture = PANEL.paint(data, request(), PLAIN)
    assert picture.alarm
    assert picture.note == "7 of the logits of step 0 are NaN."
    assert picture.note in PANEL.describe(data)
    assert not data.is_processed
    assert drawn(data)[2].split()[:5] == ["*", "0", "x", "nan", "nan"]


def test_a_vocabulary_masked_by_the_model_raises_no_alarm(source: Make) -> None:
    data = load(source([step(0, logits(n_inf=12))]))
    assert not PANEL.paint(data, request(), PLAIN).alarm
    assert "12 logits are -Inf: the model masked these tokens itself." in PANEL.describe(data)


def test_a_step_without_logits_is_missing(source: Make) -> None:
    made = source([step(0, None)])
    with pytest.raises(Missing, match="No logits are recorded at step 0"):
        load(made)


def test_a_generation_without_steps_is_missing(source: Make) -> None:
    made = source([])
    with pytest.raises(Missing, match="No step"):
        load(made)


def test_a_basic_trace_without_histogram_says_so(source: Make) -> None:
    data = load(source([step(0, logits(histogram=(), histogram_min=0.0, histogram_max=0.0))]))
    assert not any(" of them, log counts" in line for line in drawn(data))
    assert PANEL.describe(data)[-1].startswith("No histogram of the logits is recorded")


def test_the_histogram_marks_the_bin_of_the_chosen_logit(source: Make) -> None:
    record = logits()
    assert find_bin(record, -8.0) == 0
    assert find_bin(record, 8.0) == 3
    assert find_bin(record, -0.1) == 1
    assert find_bin(record, math.inf) is None
    data = load(source([step(0, record)]))
    assert any("logits -8 to 8, 8 of them, log counts" in line for line in drawn(data))
    assert PANEL.describe(data)[-1].endswith("most of them near 2.")


def test_a_fork_shows_the_steps_of_its_parent_before_it(source: Make) -> None:
    made = source(walk(4), [step(2, logits(entropy=50.0)), step(3, logits(entropy=60.0))])
    data = load(made, step=1, branch=1)
    assert data.record.entropy == 1.0
    assert data.series("entropy") == {0: 0.0, 1: 1.0, 2: 50.0, 3: 60.0}
    assert load(made, step=3, branch=1).record.entropy == 60.0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("look", [PLAIN, Theme(), Theme("256")])
def test_every_size_is_drawn_to_the_cell(source: Make, size: tuple[int, int], look: Theme) -> None:
    data = load(source([*walk(8), step(8, logits(SAMPLED, chosen_rank=1))]), *size, step=8)
    assert len(drawn(data, *size, look)) >= 1


def test_a_picture_may_have_another_size_than_the_loaded_one(source: Make) -> None:
    data = load(source(walk(300)), 120, 40, step=150)
    lines = drawn(data, 20, 14)
    assert len(lines) == 13
    y = next(y for y in range(1, 13) if lines[y].startswith("entropy "))
    assert PANEL.on_mouse(19, y + 1, data, request(20, 14), click=True) is not None


def test_below_a_histogram_a_click_goes_to_the_step_that_is_drawn_there(source: Make) -> None:
    data = load(source(walk()), 80, 60, step=2)
    lines, made_request = drawn(data, 80, 60), request(80, 60, step=2)
    assert any(" of them, log counts" in line for line in lines)
    x, y = find(lines, "entropy 2 nats  0 to 5")
    assert PANEL.on_mouse(x + 1, y, data, made_request, click=True) is None
    assert PANEL.on_mouse(x + 1, y + 1, data, made_request, click=True) == Navigate(step=0)


def test_an_invalid_log_probability_gives_nan() -> None:
    assert probability(0.0) == 1.0
    assert math.isnan(probability(5.0))
    assert math.isnan(probability(math.nan))
    closed = Candidate(0, 1, "x", -math.inf, -math.inf, -math.inf, -math.inf)
    assert not is_filtered(closed)
    assert not is_changed(closed)


def test_a_window_is_centred_and_stays_inside() -> None:
    assert (step_window(50, 0, 99, 11).start, step_window(50, 0, 99, 11).stop) == (45, 56)
    assert step_window(0, 0, 99, 11).start == 0
    assert step_window(99, 0, 99, 11).stop == 100
    assert len(step_window(5, 3, 7, 40)) == 5
    assert step_window(500, 0, 9, 4).current == 9
    assert len(step_window(0, 0, 10**6, 10**6)) == 256


def test_a_column_maps_to_its_step() -> None:
    window = step_window(1, 0, 2, 40)
    assert [window.step_at(x, 40) for x in (0, 3, 4, 11, 12, -1)] == [0, 0, 1, 2, None, None]
    assert step_window(50, 0, 99, 100).step_at(9, 10) == 90


UNSEEN = tuple(replace(one, score=math.nan, score_logprob=math.nan) for one in PLAIN_THREE)


def test_an_unknown_choice_is_reported_as_unknown(source: Make) -> None:
    record = logits(
        UNSEEN, chosen_id=UNKNOWN, chosen_rank=UNKNOWN, chosen_logprob=math.nan, margin=0.25
    )
    data = load(source([step(0, logits(UNSEEN)), step(1, record, tokens=())]), step=1)
    lines = PANEL.describe(data)
    assert lines[0] == "The token chosen at step 1 is unknown: the model never received it."
    assert (
        "It is unknown whether logits processors changed these logits before the choice." in lines
    )
    assert data.series("rank") == {0: 0.0, 1: None}
    lines = drawn(data, 38, 14)
    assert lines[0].endswith("rank ?")
    assert "  ? the chosen token is unknown" in lines
    assert not any(line.startswith("*") for line in lines)
    for width, height in SIZES:
        drawn(data, width, height)
    assert "rank unknown" in PANEL.paint(data, request(step=1), PLAIN).note
