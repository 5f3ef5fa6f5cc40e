"""The page about exports has the formats, tags, tracks and queries that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import pytest
from support.exporting import Timeline, export
from support.pages import blocks, run_python
from support.paths import DOCS
from support.traces import sample_trace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flexinspect.exports.exporter import ExportOptions, exporter_names, load_exporter, write_export
from flexinspect.exports.trace_mask_images import MAX_PIXELS, N_STEPS
from flexinspect.trace.reader import open_trace

PAGE = (DOCS / "exports.md").read_text("utf-8")


def first_column(heading: str) -> list[str]:
    """Return the first column of the table that follows a heading."""
    section = PAGE.split(heading, 1)[1]
    rows = section[section.index("|---") :].split("\n\n")[0].splitlines()[1:]
    return [row.split("|")[1].strip() for row in rows]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_trace(tmp_path_factory.mktemp("page") / "run.flextrace")


def test_the_page_lists_the_formats_with_their_default_names() -> None:
    assert first_column("# Exports") == [f"`{name}`" for name in exporter_names()]
    for name in exporter_names():
        exporter = load_exporter(name)
        slash = "/" if exporter.is_folder else ""
        assert f"| `{name}` | `run{exporter.suffix}{slash}` |" in PAGE


def test_the_queries_run_on_an_export(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(trace, "parquet")
    monkeypatch.chdir(trace.parent)
    queries = [block for block in blocks(PAGE, "sql") if "run-parquet" in block]
    found: list[Any] = [duckdb.sql(query).fetchall() for query in queries]
    assert len(found) == 3
    assert found[0][-1] == (3, "sdpa", 2)
    assert found[1][0][:3] in ((0, 5, ""), (1, 5, ""))
    assert found[1][0][-1] == "generated"
    assert found[2] == [("sample", "float32")]


def test_the_page_names_the_tags_that_are_written(trace: Path) -> None:
    run = EventAccumulator(str(export(trace, "tensorboard") / "generation-0")).Reload()
    named = set(re.findall(r"`([^`]+)`", " ".join(first_column("## TensorBoard"))))
    written = {tag for kind in ("scalars", "histograms", "images") for tag in run.Tags()[kind]}
    written = {re.sub(r"attention_to/.*", "attention_to/N_LABEL", tag) for tag in written}
    assert written - {"memory/model"} <= named
    assert f"at most {N_STEPS} steps" in PAGE
    assert f"more than {MAX_PIXELS} rows or keys" in PAGE


def test_the_page_names_the_tracks_that_are_written(trace: Path) -> None:
    timeline = Timeline(export(trace, "perfetto"))
    kinds = {path.split("/")[2] for path in timeline.paths.values() if path.count("/") >= 2}
    kinds |= {path.split("/")[1] for path in timeline.paths.values() if path.count("/") == 1}
    named = " ".join(first_column("## Perfetto"))
    assert kinds == {
        *("generation 0: sample-0", "generation 1: sample-1", "steps", "layers", "segments"),
        *("counters", "findings", "events"),
    }
    assert all(f"`{kind}`" in named for kind in kinds if not kind.startswith("generation"))
    n_values = sum(map(len, timeline.counters.values()))
    n_events = len(timeline.slices) + len(timeline.instants) + n_values
    assert f"run.perfetto-trace: {n_events} events, " in PAGE


def test_the_exporter_of_the_page_works(trace: Path) -> None:
    names = run_python(PAGE)
    target = trace.with_name("run.answers.txt")
    with open_trace(trace) as reader:
        write_export(names["AnswersExporter"](), reader, ExportOptions(target), lambda *_: None)
    assert target.read_text() == "' Jane Austen'\n" * 2
