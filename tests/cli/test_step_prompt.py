"""`flexinspect run --interactive`: the run stops at each step and reads commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.patience import PATIENCE_S
from support.warm_python import Popen

from flexinspect.control.client import ControlClient
from flexinspect.control.discovery import find_capture
from flexinspect.trace.reader import TraceReader


def _start(trace: Path, *flags: str) -> subprocess.Popen[str]:
    run = [sys.executable, "-m", "flexinspect", "run", "--no-ui", "--out", str(trace)]
    random = ("--weights", "random", "--stop", "eos", "--max-new-tokens", "6")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return Popen([*run, "--interactive", *random, *flags], text=True, **pipes)


def test_a_run_stops_before_the_first_step_and_at_each_one(tmp_path: Path) -> None:
    trace = tmp_path / "a.flextrace"
    commands = ["", "n", "status", "step x", "level extreme", "fork 9 --text a", "'", "c", ""]
    out, err = _start(trace).communicate("\n".join(commands), timeout=PATIENCE_S)
    before, after_first, after_second, after_status, *others = err.split("(flexinspect) ")
    assert "paused before the first step (--interactive)" in before
    assert "step 0 prefill" in after_first
    assert "    token " in after_first
    assert after_first.rstrip().endswith("paused after step 0 (requested)")
    assert "step 1 decode" in after_second
    assert "place  after step 1" in after_status
    answers = ("not a whole number", "level extreme", "has no step 9", "No closing quotation")
    for text, answer in zip(others, answers, strict=False):
        assert answer in text
    assert "6 tokens" in out
    with TraceReader(trace) as reader:
        assert reader.state == "finished"
        assert [step.step for step in reader.steps(0)] == list(range(6))
        pauses = [row.event.text for row in reader.events() if row.event.kind == "paused"]
        assert pauses[0] == "paused before the first step: --interactive"
        assert len(pauses) == 3


def test_the_end_of_the_input_ends_the_run_with_a_valid_trace(tmp_path: Path) -> None:
    trace = tmp_path / "a.flextrace"
    run = _start(trace)
    _, err = run.communicate("step 2\n", timeout=PATIENCE_S)
    assert run.returncode == 130
    assert "The input has ended, and the run with it." in err
    with TraceReader(trace) as reader:
        assert (reader.state, len(reader.steps(0))) == ("interrupted", 2)


def _read_until(run: subprocess.Popen[str], end: str) -> None:
    """Read what a run prints up to some text."""
    assert run.stderr is not None
    said = ""
    while not said.endswith(end):
        char = run.stderr.read(1)
        assert char, said
        said += char


def test_with_wait_other_clients_continue_a_run_whose_input_has_ended(tmp_path: Path) -> None:
    trace = tmp_path / "a.flextrace"
    run = _start(trace, "--wait")
    assert run.stdin is not None
    run.stdin.close()
    run.stdin = None
    _read_until(run, "the run waits for commands: flexinspect ctl step --pid")
    ControlClient(find_capture(trace=trace).address).continue_()
    _, err = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, err


def test_a_prompt_ends_when_another_client_continues_the_run(tmp_path: Path) -> None:
    trace = tmp_path / "a.flextrace"
    run = _start(trace)
    open_input, run.stdin = run.stdin, None  # `communicate` would close it
    _read_until(run, "(flexinspect) ")
    ControlClient(find_capture(trace=trace).address).continue_()
    _, err = run.communicate(timeout=PATIENCE_S)
    assert open_input is not None
    open_input.close()
    assert run.returncode == 0, err
    assert "Another client has continued the run." in err
