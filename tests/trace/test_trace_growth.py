"""The work of a query is that of its result, not that of the trace: counted, never timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.query_work import QueryWork, counted_queries

from benchmarks import synthetic
from flexinspect.records.finding import Finding, Repeat, Severity
from flexinspect.records.step import EventRecord, OutputRecord, StepRecord
from flexinspect.trace import queries
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.trace_session import TraceSession, _all_rules_ran

SMALL, TIMES = 100, 8
"""Steps of the small trace, and how many times as many the large one has."""

ALLOWED = 1.5
"""By how much the work may grow: trees of pages get deeper."""


def busy_trace(path: Path, n: int) -> Path:
    """Write a trace with a finding, an event and a line at each of `n` steps, and more answers."""
    made = synthetic._Made(synthetic._prompt([10] * 5, n), n, thin=True)
    with TraceWriter.create(path, synthetic._manifest(made)) as writer:
        writer.write_event(EventRecord("phase", "generating", 1.0))
        writer.begin_generation(made.generation())
        writer.write_steps([_busy(step) for step in made.steps(0, n)])
        writer.write_output(OutputRecord("stdout", f"{i}\n", 1.0, 0, i) for i in range(n))
        writer.end_generation(made.end())
        short = synthetic._Made(synthetic._prompt([10] * 5, 1), 1, thin=True)
        for number in range(1, n // 20):
            writer.begin_generation(replace(short.generation(), generation=number))
            writer.write_steps([replace(step, generation=number) for step in short.steps(0, 1)])
            writer.end_generation(replace(short.end(), generation=number))
    return path


def _busy(step: StepRecord) -> StepRecord:
    number = step.step
    finding = Finding(
        "numbers.nan", Severity.WARNING, f"Step {number}.", step=number, layer=number % 8
    )
    return replace(
        step, findings=(finding,), events=(EventRecord("graph-break", "break", 1.0, 0, number),)
    )


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("growth")
    small, large = (busy_trace(folder / f"{n}.flextrace", n) for n in (SMALL, SMALL * TIMES))
    return small, large


@pytest.fixture
def work() -> Iterator[QueryWork]:
    with counted_queries() as counted:
        yield counted


@pytest.fixture
def readers(
    traces: tuple[Path, Path], work: QueryWork
) -> Iterator[tuple[TraceReader, TraceReader]]:
    with TraceReader(traces[0]) as small, TraceReader(traces[1]) as large:
        yield small, large


QUERIES: dict[str, Callable[[TraceReader], Any]] = {
    "the counter of findings": queries.findings_counter,
    "the marks of a timeline": lambda reader: queries.finding_steps(reader, 0, 40, 80),
    "the hits of a breakpoint": lambda reader: queries.matching_events(
        reader, 0, 40, 80, "breakpoint", 40
    ),
    "the next finding": lambda reader: queries.adjacent_finding(
        reader, (0, 0, 60, 0, -1, 1 << 62), 1
    ),
    "the finding before": lambda reader: queries.adjacent_finding(
        reader, (0, 0, 60, 0, -1, -1), -1
    ),
    "the last finding": lambda reader: queries.adjacent_finding(reader, queries.LAST_POSITION, -1),
    "the first finding": lambda reader: queries.adjacent_finding(reader, queries.FIRST_POSITION, 1),
    "the newest events of a kind": lambda reader: queries.newest_events(reader, "phase", 0, 64),
    "events that never were": lambda reader: queries.newest_events(reader, "debugger", 0, 64),
    "the first and the last step": lambda reader: queries.step_bounds(reader, 0),
    "the number of answers": queries.n_generations,
}


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_of_a_larger_trace_takes_no_more_work(
    name: str, readers: tuple[TraceReader, TraceReader], work: QueryWork
) -> None:
    costs, found = [], []
    for reader in readers:
        work.reset()
        found.append(QUERIES[name](reader))
        costs.append((work.n_ops, work.n_queries))
    (small_ops, small_queries), (large_ops, large_queries) = costs
    assert large_queries == small_queries
    assert large_ops <= ALLOWED * small_ops + 100, costs


def test_findings_are_found_in_each_direction_across_generations(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    places = [(0, 0, None), (0, 0, 1), (0, 1, 2), (2, 0, 0), (3, 1, 4), (3, 1, 5)]
    made = synthetic._Made(synthetic._prompt([10] * 5, 1), 1, thin=True)
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(made.generation())
        writer.write_findings(
            Finding("numbers.nan", Severity.NOTE, "x", generation, branch, step)
            for generation, branch, step in reversed(places)
        )
    with TraceReader(path) as reader:
        for direction, start in ((1, queries.FIRST_POSITION), (-1, queries.LAST_POSITION)):
            seen, here = [], start
            for _ in count():
                row = queries.adjacent_finding(reader, here, direction)
                if row is None:
                    break
                here = queries.finding_position(row)
                seen.append(here[:3])
            assert seen == places[::direction]


def test_asking_whether_all_rules_ran_takes_one_query_each_for_any_number_of_answers(
    readers: tuple[TraceReader, TraceReader], work: QueryWork
) -> None:
    asked = []
    for reader in readers:
        work.reset()
        assert not _all_rules_ran(reader)
        asked.append(work.n_queries)
    assert asked[0] == asked[1] <= 4


def test_a_poll_of_a_larger_trace_takes_no_more_work(
    readers: tuple[TraceReader, TraceReader], work: QueryWork
) -> None:
    costs = []
    for reader in readers:
        session = TraceSession(reader.path)
        work.reset()
        assert session.poll(0) is not None
        costs.append((work.n_ops, work.n_queries))
        session.close()
    assert costs[1][1] == costs[0][1]
    assert costs[1][0] <= ALLOWED * costs[0][0] + 100, costs


def test_the_mean_time_of_a_step_is_that_of_the_newest_steps(
    readers: tuple[TraceReader, TraceReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, reader = readers
    n = SMALL * TIMES
    steps = reader.steps(0)
    assert queries.decode_phase_time(reader, 0) == pytest.approx(
        (n - 1, sum(step.wall_ms for step in steps[1:]))
    )
    monkeypatch.setattr(queries, "MAX_TIMED_STEPS", 50)
    assert queries.decode_phase_time(reader, 0) == pytest.approx(
        (50, sum(step.wall_ms for step in steps[-50:]))
    )
    assert queries.decode_phase_time(reader, 1 << 20) == (0, 0.0)


def test_repetitions_of_a_series_raise_the_counter(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    made = synthetic._Made(synthetic._prompt([10] * 5, 1), 1, thin=True)
    with TraceWriter.create(path, {}) as writer, TraceReader(path) as reader:
        writer.begin_generation(made.generation())
        numbers = [queries.findings_counter(reader)]
        finding = Finding("numbers.nan", Severity.NOTE, "x", step=0)
        for series in ("", "layer 3"):
            writer.write_findings([replace(finding, series=series)])
            numbers.append(queries.findings_counter(reader))
        writer.write_repeats((0, 0, 1), [Repeat("numbers.nan", "layer 3")])
        numbers.append(queries.findings_counter(reader))
    assert numbers[0] == 0
    assert numbers == sorted(set(numbers))


def test_a_generation_that_has_ended_is_read_once_until_something_is_written(
    tmp_path: Path, work: QueryWork
) -> None:
    path = tmp_path / "a.flextrace"
    made = synthetic._Made(synthetic._prompt([10] * 5, 1), 1, thin=True)
    with TraceWriter.create(path, {}) as writer, TraceReader(path) as reader:
        writer.begin_generation(made.generation())
        assert reader.generation(0).state == reader.generation(0).state == "recording"
        assert work.n_queries >= 2
        writer.end_generation(made.end())
        assert reader.changed()
        first = reader.generation(0)
        work.reset()
        assert reader.generation(0) is first
        assert work.n_queries == 0
        writer.end_generation(replace(made.end(), answer="another"))
        assert reader.changed()
        assert reader.generation(0).answer == "another"
