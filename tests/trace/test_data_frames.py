"""Tables of a trace as data frames: the types of the schema, in pandas and in polars."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas
import polars
import pytest
from support.trace_samples import write
from support.traces import HEADS, LAYERS, sample_trace

from flexinspect.core.errors import FlexInspectError, TraceError, UsageError
from flexinspect.records.step import BuildRecord, CallRecord, GenerationRecord, StepRecord
from flexinspect.trace import schema
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import Library, TraceReader, open_trace

LIBRARIES: tuple[Library, ...] = ("pandas", "polars")
PANDAS = {
    "int": "int64",
    "length": "int64",
    "length?": "Int64",
    "int?": "Int64",
    "bool": "bool",
    "bool?": "boolean",
    "real": "float64",
    "real?": "Float64",
}
POLARS = {
    "int": polars.Int64,
    "length": polars.Int64,
    "length?": polars.Int64,
    "int?": polars.Int64,
    "bool": polars.Boolean,
    "bool?": polars.Boolean,
    "real": polars.Float64,
    "real?": polars.Float64,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_trace(tmp_path_factory.mktemp("frames") / "sample.flextrace")


@pytest.fixture
def reader(path: Path) -> Iterator[TraceReader]:
    with open_trace(path) as opened:
        yield opened


def types_of(frame: Any) -> dict[str, Any]:
    if isinstance(frame, pandas.DataFrame):
        return {name: str(dtype) for name, dtype in frame.dtypes.items()}
    return dict(frame.schema)


def wanted_types(table: str, library: str) -> dict[str, Any]:
    (found,) = (each for each in schema.TABLES if each.name == table)
    of_kind: dict[str, Any] = PANDAS if library == "pandas" else POLARS
    text = "string" if library == "pandas" else polars.String
    kinds = {name: kind for name, kind in found.kinds.items() if kind != "blob"}
    return {name: of_kind.get(kind, text) for name, kind in kinds.items()}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("table", [table.name for table in schema.TABLES])
def test_every_table_has_its_rows_and_the_types_of_the_schema(
    reader: TraceReader, path: Path, table: str, library: Library
) -> None:
    frame = reader.frame(table, library=library)
    with closing(sqlite3.connect(path)) as db:
        (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
    assert len(frame) == count
    assert types_of(frame) == wanted_types(table, library)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_values_are_those_of_the_records(reader: TraceReader, library: Library) -> None:
    tokens = reader.frame("tokens", library=library, generation=0)
    records = reader.tokens(0)
    for name in ("pos", "token_id", "token", "text", "position_id", "segment", "special"):
        assert tokens[name].to_list() == [getattr(record, name) for record in records]
    steps = [None if value is pandas.NA else value for value in tokens["step"].to_list()]
    assert steps == [record.step for record in records]
    assert steps[0] is None
    assert steps[-1] == reader.last_step(0)


@pytest.mark.parametrize("library", LIBRARIES)
def test_json_stays_the_text_it_is(reader: TraceReader, library: Library) -> None:
    found = reader.frame("findings", library=library)
    assert [json.loads(text) for text in found["positions"].to_list()] == [[16]]
    facts = reader.frame("run", library=library)
    manifest = dict(zip(facts["key"].to_list(), facts["value"].to_list(), strict=True))
    assert {key: json.loads(value) for key, value in manifest.items()} == reader.run()


def test_a_missing_step_is_not_a_float(reader: TraceReader) -> None:
    steps = reader.frame("tokens", generation=0)["step"]
    assert steps.isna().sum() == 13
    assert steps.max() == 5
    nulls = reader.frame("tokens", library="polars", generation=0)["step"].null_count()
    assert nulls == 13


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_nan_is_a_nan(reader: TraceReader, library: Library) -> None:
    stats = reader.frame("layer_stats", library=library, generation=0, step=3)
    norms = stats["norm"].to_list()
    assert [math.isnan(norm) for norm in norms] == [False, False, True, True]
    assert stats["n_nan"].to_list() == [0, 0, 3, 3]


@pytest.fixture
def checks(tmp_path: Path) -> Path:
    """A trace whose three calls have an LSE error, one that is NaN, and none."""
    path = tmp_path / "checks.flextrace"
    sizes = ("flex uncompiled", "own", None, 1, HEADS, 1, 1, 4, 4, "float32", 0.5)
    calls = tuple(
        CallRecord(layer, *sizes, error, "lse")
        for layer, error in enumerate((0.25, math.nan, None))
    )
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(GenerationRecord(0, "a", "causal", "contiguous", (), ()))
        writer.write_step(StepRecord(0, 0, "prefill", 4, 0, 4, 1.0, 1.0, 0.1, calls=calls))
    return path


def test_pandas_distinguishes_a_nan_error_from_a_missing_one(checks: Path) -> None:
    with open_trace(checks) as reader:
        error = reader.frame("calls", library="pandas")["lse_error"]
    assert error.isna().tolist() == [False, False, True]
    assert error[0] == 0.25
    assert math.isnan(error[1])


def test_polars_distinguishes_a_nan_error_from_a_missing_one(checks: Path) -> None:
    with open_trace(checks) as reader:
        frame = reader.frame("calls", library="polars")
    assert frame["lse_error"].is_null().to_list() == [False, False, True]
    assert frame["lse_error"].is_nan().to_list() == [False, True, None]
    assert frame["mask"].to_list() == [None, None, None]
    assert frame["mask"].dtype == polars.String


@pytest.fixture
def full(tmp_path: Path) -> Iterator[TraceReader]:
    """A trace of two generations of two steps with rows in all tables that capture fills."""
    with open_trace(write(tmp_path / "full.flextrace", n_generations=2)) as opened:
        yield opened


def plain(values: list[Any]) -> list[Any]:
    """Return values with None for what is missing and a string for NaN, to be compared."""

    def one(value: Any) -> Any:
        if value is None or value is pandas.NA:
            return None
        return "nan" if value != value else value

    return [one(value) for value in values]


@pytest.mark.parametrize("library", LIBRARIES)
def test_builds_are_those_of_the_steps(full: TraceReader, library: Library) -> None:
    frame = full.frame("builds", library=library, generation=1)
    records = [build for step in (0, 1) for build in full.builds(1, step)]
    assert frame["step"].to_list() == [0, 0, 1, 1]
    assert frame["build"].to_list() == [0, 1, 0, 1]
    for name in BuildRecord.__struct_fields__:
        expected = plain([getattr(record, name) for record in records])
        assert plain(frame[name].to_list()) == expected, name
    assert plain(frame["layer"].to_list()) == [None, 1, None, 1]
    assert plain(frame["heads"].to_list()) == [8, None, 8, None]
    assert plain(frame["wall_ms"].to_list()) == [1.5, "nan", 1.5, "nan"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_inputs_hold_their_lists_as_json(full: TraceReader, library: Library) -> None:
    frame = full.frame("inputs", library=library, step=1)
    assert frame["generation"].to_list() == [0, 1]
    assert frame["batch"].to_list() == [2, 2]
    for name, expected in (
        ("positions", [[0, 3], [7, 1]]),
        ("cached_before", [5, 0]),
        ("cached_after", [6, -1]),
    ):
        assert [json.loads(text) for text in frame[name].to_list()] == [expected] * 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_output_is_in_order_with_and_without_a_step(full: TraceReader, library: Library) -> None:
    frame = full.frame("output", library=library)
    rows = full.output()
    assert frame["number"].to_list() == [row.id for row in rows] == [1, 2]
    for name in ("generation", "step", "stream", "at", "text"):
        expected = [getattr(row.output, name) for row in rows]
        assert plain(frame[name].to_list()) == expected, name
    assert frame["stream"].to_list() == ["stdout", "stderr"]
    assert full.frame("output", library=library, generation=1)["text"].to_list() == [
        rows[1].output.text
    ]


def test_only_gradients_training_and_reviews_are_empty_in_a_full_trace(full: TraceReader) -> None:
    empty = [table.name for table in schema.TABLES if len(full.frame(table.name)) == 0]
    assert empty == ["grads", "gradients", "training_steps", "reviews"]


def test_a_place_selects_its_rows_only(reader: TraceReader) -> None:
    calls = reader.frame("calls", generation=1, branch=0, step=4)
    assert calls["layer"].tolist() == list(range(LAYERS))
    assert set(calls["path"]) == {"sdpa", "flex uncompiled"}
    assert set(reader.frame("calls", step=4)["generation"]) == {0, 1}
    assert len(reader.frame("calls", generation=7)) == 0


def test_rows_are_in_the_order_of_the_key(reader: TraceReader) -> None:
    keys = reader.frame("candidates", library="polars").select("generation", "step", "rank").rows()
    assert keys == sorted(keys)


def test_pandas_is_the_first_choice(reader: TraceReader) -> None:
    assert isinstance(reader.frame("steps"), pandas.DataFrame)
    assert isinstance(reader.frame("steps", library="polars"), polars.DataFrame)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed


def test_without_pandas_it_is_polars(reader: TraceReader, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "pandas")
    assert isinstance(reader.frame("steps"), polars.DataFrame)


@pytest.mark.parametrize(
    ("library", "sentence"),
    [
        (
            None,
            "A data frame needs pandas or polars, and neither is installed: pip install pandas.",
        ),
        ("polars", "polars is not installed: pip install polars."),
    ],
)
def test_without_either_library_the_error_names_one_to_install(
    reader: TraceReader, monkeypatch: pytest.MonkeyPatch, library: Library, sentence: str
) -> None:
    without(monkeypatch, "pandas", "polars")
    with pytest.raises(FlexInspectError) as caught:
        reader.frame("steps", library=library)
    assert str(caught.value) == sentence


def test_a_broken_pandas_is_not_treated_as_missing(
    reader: TraceReader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pandas.py").write_text("import something_it_needs\n")
    monkeypatch.delitem(sys.modules, "pandas")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_it_needs"):
        reader.frame("steps")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"table": "step"}, "no table 'step'; it has run, generations,"),
        ({"table": "run; DROP TABLE steps"}, "no table 'run; DROP TABLE steps'"),
        ({"table": "run", "generation": 0}, "The table run has no column generation"),
        ({"table": "output", "branch": 0}, "The table output has no column branch"),
        ({"table": "generations", "step": 0}, "The table generations has no column step"),
        (
            {"table": "steps", "library": "arrow"},
            "'arrow' is not a library for data frames: choose pandas or polars",
        ),
    ],
)
def test_unknown_tables_places_and_libraries_are_refused(
    reader: TraceReader, arguments: Any, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        reader.frame(**arguments)


def test_a_damaged_value_raises_a_trace_error(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "damaged.flextrace"
    copy.write_bytes(path.read_bytes())
    with closing(sqlite3.connect(copy)) as db:
        db.execute("UPDATE tokens SET special = 7 WHERE pos = 3")
        db.commit()
    with open_trace(copy) as reader, pytest.raises(TraceError, match="damaged: a row of tokens"):
        reader.frame("tokens")


def test_opening_a_trace_loads_neither_library(path: Path) -> None:
    code = (
        "import sys, flexinspect; trace = flexinspect.open_trace(sys.argv[1]); trace.steps(0); "
        "print({'pandas', 'polars', 'torch'} & {*sys.modules}); trace.frame('steps'); "
        "print({'pandas', 'polars', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n{'pandas'}\n"


def test_the_repr_of_a_reader_names_its_trace(reader: TraceReader, path: Path) -> None:
    assert repr(reader) == f"TraceReader({str(path)!r})"
