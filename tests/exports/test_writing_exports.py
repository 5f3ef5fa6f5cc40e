"""Exports are complete or absent, replace only earlier exports, and plug-ins are checked."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from support.exporting import export
from support.traces import sample_trace

from flexinspect.core import plugins
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.exports import exporter as exporting
from flexinspect.trace.reader import TraceReader, open_trace

FORMATS = ("perfetto", "tensorboard", "parquet", "csv", "notebook")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return sample_trace(tmp_path / "run.flextrace", generations=1)


@pytest.fixture
def reader(trace: Path) -> Iterator[TraceReader]:
    with open_trace(trace) as opened:
        yield opened


def write(
    reader: TraceReader, exporter: Any, target: Path, *, progress: Any = None, **options: bool
) -> exporting.ExportResult:
    done = progress or (lambda done, total: None)
    return exporting.write_export(
        exporter, reader, exporting.ExportOptions(target), done, **options
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class OneFile:
    """An exporter of another package."""

    name, description, suffix, is_folder, unit = "one", "One file.", ".one", False, "rows"

    def export(self, reader: Any, target: Path, options: Any, progress: Any) -> Mapping[str, int]:
        target.write_text("new")
        self.fail()
        return {"": 3}

    def fail(self) -> None:
        """Fail after the file is written."""


def test_the_built_in_exporters_have_the_names_of_their_plug_ins() -> None:
    assert exporting.exporter_names() == FORMATS
    for name in FORMATS:
        exporter = exporting.load_exporter(name)
        assert exporter.name == name
        assert exporter.description.endswith(".")
        assert exporter.is_folder == (not exporter.suffix.startswith("."))


@pytest.mark.parametrize("name", FORMATS)
def test_counts_and_sizes_are_those_of_the_files(name: str, reader: TraceReader) -> None:
    exporter = exporting.load_exporter(name)
    result = write(reader, exporter, reader.path.with_name("out"))
    for path, n_bytes, _ in result.files:
        assert (result.path / path).stat().st_size == n_bytes
    if exporter.is_folder:
        listed = {path for path, *_ in result.files} | {exporting.MANIFEST}
        found = {p.relative_to(result.path).as_posix() for p in result.path.rglob("*.*")}
        assert found == listed


@pytest.mark.parametrize("name", FORMATS)
def test_an_interrupted_export_leaves_nothing(name: str, reader: TraceReader) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = names(reader.path.parent)
    with pytest.raises(KeyboardInterrupt):
        write(
            reader, exporting.load_exporter(name), reader.path.with_name("out"), progress=interrupt
        )
    assert names(reader.path.parent) == before


@pytest.mark.parametrize("name", ["perfetto", "parquet"])
def test_an_interrupted_export_leaves_the_earlier_one(name: str, reader: TraceReader) -> None:
    target, exporter = reader.path.with_name("out"), exporting.load_exporter(name)
    write(reader, exporter, target)
    before = {p: p.read_bytes() for p in [target, *target.rglob("*")] if p.is_file()}

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(reader, exporter, target, progress=interrupt, overwrite=True)
    assert {p: p.read_bytes() for p in [target, *target.rglob("*")] if p.is_file()} == before
    assert names(target.parent) == {"out", "run.flextrace"}


@pytest.mark.parametrize("name", ["perfetto", "parquet"])
def test_overwriting_replaces_the_earlier_export(name: str, reader: TraceReader) -> None:
    target, exporter = reader.path.with_name("out"), exporting.load_exporter(name)
    write(reader, exporter, target)
    with pytest.raises(UsageError, match=r"out exists already\."):
        write(reader, exporter, target)
    write(reader, exporter, target, overwrite=True)
    assert names(target.parent) == {"out", "run.flextrace"}


def test_a_folder_with_files_of_the_user_is_never_replaced(reader: TraceReader) -> None:
    folder, exporter = reader.path.with_name("out"), exporting.load_exporter("csv")
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    for _ in range(2):  # without a manifest, then with one that does not list the file
        with pytest.raises(UsageError, match="not a folder that only an earlier export wrote to"):
            write(reader, exporter, folder, overwrite=True)
        (folder / exporting.MANIFEST).write_text(json.dumps({"files": {"steps.csv": 1}}))
    assert (folder / "thesis.tex").read_text() == "mine"


def test_a_folder_is_not_replaced_by_a_file_nor_the_trace_by_anything(reader: TraceReader) -> None:
    exporter = exporting.load_exporter("notebook")
    with pytest.raises(UsageError, match="is the trace itself"):
        write(reader, exporter, reader.path, overwrite=True)
    with pytest.raises(UsageError, match="is not a file"):
        write(reader, exporter, reader.path.parent, overwrite=True)


def test_a_link_stays_and_what_it_names_is_replaced(reader: TraceReader) -> None:
    link = reader.path.with_name("link")
    link.symlink_to("real")
    write(reader, OneFile(), link)
    assert link.is_symlink()
    assert reader.path.with_name("real").read_text() == "new"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "written: No space left on device."),
        (ValueError("bad\nsecond line"), "The export to one failed: ValueError: bad."),
        (UsageError("Said by the plug-in."), "Said by the plug-in."),
    ],
)
def test_an_exporter_that_raises_is_one_sentence_and_leaves_nothing(
    reader: TraceReader, error: Exception, sentence: str
) -> None:
    class Failing(OneFile):
        def fail(self) -> None:
            raise error

    target = reader.path.with_name("out.one")
    with pytest.raises(FlexInspectError) as caught:
        write(reader, Failing(), target)
    assert caught.value.message.endswith(sentence)
    assert "\n" not in caught.value.message
    assert names(target.parent) == {"run.flextrace"}


def test_an_exporter_that_writes_nothing_is_reported(reader: TraceReader) -> None:
    class Idle(OneFile):
        def export(self, *args: Any) -> Mapping[str, int]:
            return {"": 0}

    with pytest.raises(FlexInspectError, match="cannot be written: No such file"):
        write(reader, Idle(), reader.path.with_name("out.one"))


class NoUnit(OneFile):
    unit = None  # type: ignore[assignment]


def broken_factory() -> None:
    raise RuntimeError("no licence")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (f"{__name__}:OneFile", None),
        (f"{__name__}:NoUnit", "it needs the texts name, description, suffix and unit"),
        (f"{__name__}:broken_factory", "RuntimeError: no licence"),
        ("no_such_module:X", "No module named 'no_such_module'"),
    ],
)
def test_a_plug_in_is_checked_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, value: str, sentence: str | None
) -> None:
    points = [EntryPoint("mine", value, plugins.EXPORTS)]
    monkeypatch.setattr(plugins, "registered", lambda group: iter(points))
    if sentence is None:
        assert exporting.load_exporter("mine").suffix == ".one"
        return
    with pytest.raises(FlexInspectError, match=sentence):
        exporting.load_exporter("mine")


@pytest.mark.parametrize(
    ("name", "module"),
    [("parquet", "pyarrow.parquet"), ("tensorboard", "tensorboard.summary.writer.record_writer")],
)
def test_a_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, reader: TraceReader, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(UsageError, match=rf"needs {module.split('.')[0]}, which") as caught:
        write(reader, exporting.load_exporter(name), reader.path.with_name("out"))
    assert caught.value.hint == f"pip install 'flexinspect[{name}]'"
    assert names(reader.path.parent) == {"run.flextrace"}


def test_an_export_may_be_repeated_in_each_format_side_by_side(trace: Path) -> None:
    made = {export(trace, name).name for name in FORMATS}
    assert made == {
        *("run.perfetto-trace", "run-tensorboard", "run-parquet", "run-csv", "run.ipynb")
    }
