"""`flexinspect run --break`: own programs, exit codes, and how a run continues after a pause."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.warm_python import Popen

from flexinspect.cli.main import build_parser
from flexinspect.cli.run import checked_job
from flexinspect.control.client import ControlClient
from flexinspect.control.discovery import running
from flexinspect.core.errors import UsageError
from flexinspect.inputs.model_names import DEMO
from flexinspect.records.job import Job, ScriptJob
from flexinspect.records.step import StepRecord
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.breakpoints.actions import RunBreakpoints
from flexinspect_hooks.control.step_barrier import StepBarrier

PROGRAM = f"""
import sys
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({str(DEMO)!r}).eval()
print("before")
model.generate(torch.arange(3, 15)[None], max_new_tokens=4, min_new_tokens=4, do_sample=False)
print("after")
"""


def start(*args: str, folder: Path) -> subprocess.Popen[str]:
    """Start a command without a terminal."""
    return Popen(
        [sys.executable, "-m", "flexinspect", "run", *args],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM)
    return path


def test_a_breakpoint_without_a_terminal_ends_the_program(program: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.flextrace"
    process = start("--out", str(out), "--break", "step == 1", str(program), folder=tmp_path)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 3
    assert printed == "before\n"
    assert "flexinspect: Stopped at breakpoint 1, step == 1: step 1 (decode)" in errors
    assert "add --wait" in errors
    assert "Traceback" not in errors
    with open_trace(out) as reader:
        assert [row.step for row in reader.steps(0)] == [0, 1]
        assert reader.run()["exit_code"] == 3


def test_a_paused_program_prints_how_to_continue_it(program: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.flextrace"
    args = ("--wait", "--out", str(out), "--break", "prob > 0 and step == 1", str(program))
    process = start(*args, folder=tmp_path)
    client = client_of(out)
    until(lambda: client.status().state == "paused")
    status = client.status()
    assert (status.place.step, status.kind) == (1, "program")
    assert status.reason.startswith("breakpoint 1, prob > 0 and step == 1: step 1 (decode): prob ")
    client.continue_()
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed) == (0, "before\nafter\n")
    assert f"Continue with: flexinspect ctl continue --pid {status.pid}" in errors


def test_a_summary_as_json_reports_the_stop(tmp_path: Path) -> None:
    args = ("--json", "--out", "run.flextrace", "--break", "entropy >= 0 and step == 0")
    process = start(*args, folder=tmp_path)
    printed, _ = process.communicate(timeout=120)
    summary = json.loads(printed)
    assert process.returncode == summary["exit_code"] == 3
    assert summary["error"].startswith("Stopped at breakpoint 1, entropy >= 0 and step == 0: ")
    assert summary["state"] == "interrupted"


def client_of(trace: Path) -> ControlClient:
    found: list[Any] = []

    def is_there() -> bool:
        found[:] = [entry for entry in running() if entry.trace == str(trace)]
        return bool(found)

    until(is_there)
    return ControlClient(found[0].address)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


# -- flags -------------------------------------------------------------------------------------


def job_of(*args: str) -> Job | ScriptJob:
    return checked_job(build_parser("run").parse_args(["run", *args]))


def test_flags_and_settings_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    (tmp_path / "flexinspect.toml").write_text('[breakpoints]\nsick = "nan or inf"\n')
    job = job_of("--break", "entropy > 3", "--break", "fallback [once]")
    assert job.breakpoints == ("nan or inf", "entropy > 3", "fallback [once]")
    again = Job.from_json(job.to_json())
    assert (again.breakpoints, again.on_break) == (job.breakpoints, "stop")
    (tmp_path / "mine.py").touch()
    script = job_of("--wait", "--break", "step == 1", "mine.py", "--break", "its own")
    assert script.breakpoints == ("nan or inf", "step == 1")
    assert isinstance(script, ScriptJob)
    assert script.args == ("--break", "its own")
    assert ScriptJob.from_json(script.to_json()).on_break == "wait"


def test_what_cannot_be_read_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="--break: entropi is not a known name") as caught:
        job_of("--break", "entropi > 3")
    assert caught.value.hint == "Did you mean entropy?"
    with pytest.raises(UsageError, match="No finding id matches this"):
        job_of("--break", "finding msk.*")
    assert job_of("--break", "finding mask.* >= warning").breakpoints


def test_wait_without_control_is_refused() -> None:
    with pytest.raises(UsageError, match="--wait pauses the run until a command comes"):
        job_of("--wait", "--no-control", "--break", "step == 1")


def test_a_run_without_control_gets_no_hint_to_wait() -> None:
    barrier = StepBarrier()
    control: Any = SimpleNamespace(barrier=barrier, targets=SimpleNamespace(), note="")
    breaks = RunBreakpoints(
        job_of("--no-control", "--break", "step == 1"), control, lambda text: None
    )
    recorder: Any = SimpleNamespace(put=lambda item: None)
    breaks.begin(recorder).evaluate(StepRecord(0, 1, "decode", 1, 9, 10, time.time(), 5.0, 0.1))
    stopped = breaks.stop_error()
    assert stopped is not None
    assert (stopped.exit_code, "--wait" in str(stopped.hint)) == (3, False)
    assert "--no-control" in str(stopped.hint)
