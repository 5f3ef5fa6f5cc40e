"""The findings of a trace in one line, and their classes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.finding_traces import MANY, found

from flexinspect.panels.base import TracePlace
from flexinspect.panels.findings_of_place import load_groups, load_summary
from flexinspect.panels.panel_source import Source
from flexinspect.records.finding import Severity


def test_the_line_of_findings_prefers_this_generation(source: Callable[..., Source]) -> None:
    worse = found("bad", sentence="All is lost.")
    here = found("mild", Severity.WARNING, generation=1, sentence="Look here.")
    kept = source([worse, here], n_generations=3)
    assert load_summary(kept, TracePlace(0)).text() == "1 error, 1 warning: All is lost."
    assert load_summary(kept, TracePlace(1)).text() == "1 error, 1 warning: Look here."
    elsewhere = load_summary(kept, TracePlace(2)).text()
    assert elsewhere == "1 error, 1 warning: All is lost. (generation 0)"


def test_the_line_of_findings_of_a_clean_trace(source: Callable[..., Source]) -> None:
    assert load_summary(source([]), TracePlace()).text() == "no findings"


def test_classes_are_counted_once_while_nothing_new_comes(
    source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = source(MANY)
    first = load_groups(kept)
    queries: list[str] = []
    query = kept.reader._query
    monkeypatch.setattr(
        kept.reader, "_query", lambda sql, params: (queries.append(sql), query(sql, params))[1]
    )
    assert load_groups(kept) is first
    (counting,) = queries
    assert counting.startswith("SELECT (SELECT max(finding) FROM findings)")
