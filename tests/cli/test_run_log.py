"""`--log-file`, `--verbose` and the last lines of a run."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.traces import sample_trace
from support.warm_python import run_command

from flexinspect.cli.main import main
from flexinspect.cli.run_log import RunLog
from flexinspect.cli.run_summary import print_summary, summarize_run
from flexinspect.trace.reader import open_trace

LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - flexinspect\.\w+ - (DEBUG|INFO|WARNING|ERROR) - .+"
)


def test_a_trace_becomes_lines_of_time_name_level_and_message(tmp_path: Path) -> None:
    path, file = sample_trace(tmp_path / "a.flextrace"), tmp_path / "run.log"
    log = RunLog(file)
    log.follow(path)
    log.follow(path)  # nothing is new
    log.close(path)
    lines = file.read_text("utf-8").splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    steps = [line for line in lines if " - flexinspect.step - DEBUG - step " in line]
    with open_trace(path) as reader:
        assert len(steps) == sum(reader.n_steps(row.generation) for row in reader.generations())
    assert any(" - flexinspect.finding - " in line for line in lines)
    assert lines[-1].endswith(f"the run is finished; trace {path}")


def test_a_second_run_appends_to_the_log(tmp_path: Path) -> None:
    path, file = sample_trace(tmp_path / "a.flextrace"), tmp_path / "run.log"
    for _ in range(2):
        RunLog(file).close(path)
    ends = [line for line in file.read_text("utf-8").splitlines() if "the run is" in line]
    assert len(ends) == 2


def test_a_log_file_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["run", "--no-ui", "--log-file", str(tmp_path / "none" / "run.log")])
    assert code == 2
    assert "cannot be written: No such file or directory." in capsys.readouterr().err


def test_a_verbose_run_prints_mask_isolation_and_devices_and_logs_them(tmp_path: Path) -> None:
    flags = (
        "--verbose",
        "--log-file",
        "run.log",
        "--max-new-tokens",
        "2",
        "--num_paraphrases",
        "3",
    )
    done = run_command("run", *flags, "--out", "a.flextrace", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "devices: torch " in done.stderr.partition("importing transformers")[0]
    assert "paraphra" in done.stderr.partition("step 0 prefill")[2]
    verdict = "isolation PASS: none of 3 paraphrases attends to another in 4 layers, and the newest"
    assert verdict in done.stderr
    log = (tmp_path / "run.log").read_text("utf-8")
    assert all(LINE.fullmatch(line) for line in log.splitlines())
    assert f"flexinspect.mask - INFO - {verdict}" in log
    assert "flexinspect.phase - INFO - devices: torch " in log
    commands = done.stdout.partition("next  ")[2].splitlines()
    assert [line.split("#")[0].split()[1] for line in commands] == ["open", "show", "run", "prove"]


def test_the_next_steps_explain_the_first_finding(tmp_path: Path) -> None:
    summary, output = summarize_run(sample_trace(tmp_path / "a.flextrace")), StringIO()
    assert summary["findings"]
    print_summary(summary, Console(file=output, width=200))
    assert f"flexinspect explain {summary['findings'][0].id}" in output.getvalue()
