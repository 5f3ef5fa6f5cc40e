"""`flexinspect report`: its file, its messages and its exit codes."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from support.attention_trace import SyntheticGeneration, write
from support.traces import sample_trace

from flexinspect.cli import report
from flexinspect.cli.main import main
from flexinspect.core import environment
from flexinspect.exports.report import report_file, trace_contents
from flexinspect.exports.report.report_file import is_report


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return sample_trace(tmp_path / "run.flextrace")


def test_the_file_is_named_after_the_trace(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["report", str(trace)]) == 0
    file = tmp_path / "run.html"
    printed = capsys.readouterr()
    assert printed.out == f"run.html ({file.stat().st_size / 1e6:.2f} MB)\n"
    assert printed.err == ""
    assert is_report(file)
    assert stat.S_IMODE(file.stat().st_mode) & 0o400


def test_the_title_can_be_given_and_is_escaped(trace: Path, tmp_path: Path) -> None:
    assert main(["report", str(trace), "--title", "<b>One & two</b>"]) == 0
    assert "<h1>&lt;b&gt;One &amp; two&lt;/b&gt;</h1>" in (tmp_path / "run.html").read_text()


def test_json_names_file_size_and_what_was_left_out(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["report", str(trace), "-o", "r.html", "--generation", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    size = (tmp_path / "r.html").stat().st_size
    assert (facts.pop("notes"), facts.pop("left_out")) == ([], [])
    assert facts == {"file": "r.html", "bytes": size, "generations": 1}


def test_missing_rules_run_before_unless_asked_not_to(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviewed: list[Path] = []
    monkeypatch.setattr(
        report, "run_missing_rules", lambda reader, _: reviewed.append(reader.path) or []
    )
    assert main(["report", str(trace), "--no-review", "-o", "stored.html"]) == 0
    assert reviewed == []
    assert main(["report", str(trace), "-o", "checked.html"]) == 0
    assert reviewed == [trace]


def test_a_report_is_replaced_only_if_asked(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["report", str(trace)]) == 0
    before = (tmp_path / "run.html").read_bytes()
    assert main(["report", str(trace), "--title", "new"]) == 2
    assert "run.html exists already.\nName another --out, or add --overwrite." in (
        capsys.readouterr().err
    )
    assert (tmp_path / "run.html").read_bytes() == before
    assert main(["report", str(trace), "--title", "new", "--overwrite"]) == 0
    assert (tmp_path / "run.html").read_bytes() != before


@pytest.mark.parametrize("content", ["<html>my own page</html>", "SQLite format 3\x00"])
def test_another_file_is_never_replaced(
    content: str, trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.html").write_text(content)
    assert main(["report", str(trace), "-o", "mine.html", "--overwrite"]) == 2
    assert "mine.html is not a report, so it is not overwritten." in capsys.readouterr().err
    assert (tmp_path / "mine.html").read_text() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "."], ". is a folder."),
        (["-o", "none/run.html"], "There is no folder none."),
        (["--generation", "9"], "The trace has no generation 9."),
        (["--max-size", "0.01"], "more than the 0.01 MB of --max-size."),
    ],
)
def test_a_bad_request_is_one_sentence(
    arguments: list[str],
    message: str,
    trace: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert main(["report", str(trace), *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert not [*tmp_path.glob("*.html")]


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "big"])
def test_a_size_is_a_number_above_0(
    size: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(trace), f"--max-size={size}"])
    assert ended.value.code == 2
    assert "is not a number of megabytes above 0" in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "not.flextrace").write_text("text")
    assert main(["report", "not.flextrace"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not [*tmp_path.glob("*.html")]


def test_an_interruption_leaves_no_file(
    trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_file, "render", interrupt)
    assert main(["report", str(trace)]) == 130
    assert [file.name for file in tmp_path.iterdir()] == ["run.flextrace"]


def test_a_full_disk_leaves_no_file(
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(environment, "replace_file", fail)
    assert main(["report", str(trace)]) == 2
    assert "run.html cannot be written: No space left on device." in capsys.readouterr().err
    assert not [*tmp_path.glob("*.html")]


def test_what_was_left_out_is_said_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "run.flextrace"
    write(trace, SyntheticGeneration(n_steps=24)).reader.close()
    assert main(["report", str(trace), "--no-review", "-o", "all.html"]) == 0
    size = ((tmp_path / "all.html").stat().st_size - 3000) / 1e6
    capsys.readouterr()
    assert main(["report", str(trace), "--no-review", f"--max-size={size}", "--json"]) == 0
    printed = capsys.readouterr()
    left_out = json.loads(printed.out)["left_out"]
    assert left_out
    assert printed.err == "".join(f"flexinspect: {sentence}\n" for sentence in left_out)


@pytest.mark.parametrize(
    ("is_alive", "sentence"),
    [
        (True, "The trace was still being recorded when this report was made."),
        (False, "The process that recorded the trace ended without finishing it."),
    ],
)
def test_an_unfinished_trace_is_reported_with_a_note(
    is_alive: bool,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    trace, page = tmp_path / "run.flextrace", tmp_path / "run.html"
    sample_trace(trace, finish=False)
    monkeypatch.setattr(trace_contents, "is_recorder_alive", lambda run: is_alive)
    assert main(["report", str(trace), "--no-review", "-o", str(page)]) == 0
    assert capsys.readouterr().err == f"flexinspect: {sentence}\n"
    assert sentence in page.read_text("utf-8")
