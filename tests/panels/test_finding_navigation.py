"""The next finding, and the place of a finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from support.finding_traces import MANY, found

from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.panels.findings_of_place import navigate_to_finding, next_finding
from flexinspect.panels.panel_source import Source
from flexinspect.trace.query_results import FindingRow


def test_a_finding_with_positions_shows_the_first_of_them() -> None:
    assert navigate_to_finding(MANY[-1]) == Navigate(0, 0, 5, pos=1)


def walk(source: Source, direction: int, n: int) -> list[tuple[int, int | None, int | None]]:
    place, row, seen = TracePlace(), None, []
    for _ in range(n):
        row = next_finding(source.reader, place, direction, row)
        assert row is not None
        place = moved(place, row)
        seen.append((row.finding.generation, row.finding.step, row.finding.layer))
    return seen


def moved(place: TracePlace, row: FindingRow) -> TracePlace:
    go = navigate_to_finding(row.finding)
    named = {name: getattr(go, name) for name in ("generation", "branch", "step", "layer", "head")}
    return replace(place, **{name: value for name, value in named.items() if value is not None})


WALKED = [
    found("c", step=4, layer=2),
    found("b", step=4),
    found("a", step=2, layer=1),
    found("whole", step=None, generation=1),
    found("twice", step=0, generation=1, layer=0),
    found("again", step=0, generation=1, layer=0),
]


IN_ORDER = [(0, 2, 1), (0, 4, None), (0, 4, 2), (1, None, None), (1, 0, 0), (1, 0, 0)]


def test_next_finding_visits_every_finding_once_and_starts_again(
    source: Callable[..., Source],
) -> None:
    assert walk(source(WALKED, n_generations=2), 1, 7) == [*IN_ORDER, IN_ORDER[0]]


def test_previous_finding_goes_through_the_same_findings_backwards(
    source: Callable[..., Source],
) -> None:
    backwards = IN_ORDER[::-1]
    assert walk(source(WALKED, n_generations=2), -1, 7) == [*backwards, backwards[0]]


def test_next_finding_after_a_place_needs_no_last_one(source: Callable[..., Source]) -> None:
    reader = source(WALKED, n_generations=2).reader
    row = next_finding(reader, TracePlace(0, 0, 2, 1), 1)
    assert row is not None
    assert row.finding.id == "b"


def test_without_findings_there_is_no_next(source: Callable[..., Source]) -> None:
    assert next_finding(source([]).reader, TracePlace(), 1) is None


def test_stepping_uses_the_index_and_never_reads_the_whole_table(
    source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = source(MANY).reader
    queries: list[tuple[str, Any]] = []
    query = reader._query
    monkeypatch.setattr(
        reader, "_query", lambda sql, params: (queries.append((sql, params)), query(sql, params))[1]
    )
    for direction in (1, -1):
        next_finding(reader, TracePlace(step=20, layer=27), direction)
    plans = [
        row[3] for sql, params in queries for row in query(f"EXPLAIN QUERY PLAN {sql}", params)
    ]
    assert plans
    assert not [plan for plan in plans if plan.startswith("SCAN")]
