"""The lines that `flexinspect run` prints while it follows a trace."""

from __future__ import annotations

import signal
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.traces import sample_trace
from support.undeclared import write

from flexinspect.cli import live_run
from flexinspect.cli.live_run import RunProgress
from flexinspect.cli.run_summary import print_summary, summarize_run
from flexinspect.launch.child_process import Capture
from flexinspect.records.finding import Finding, Severity


def test_no_line_is_lost_when_ctrl_c_comes_before_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sample_trace(tmp_path / "a.flextrace")
    expected, output = StringIO(), StringIO()
    for file, is_interrupted in ((expected, False), (output, True)):
        progress = RunProgress(Console(file=file, width=200), verbose=True)
        if is_interrupted:
            with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
                patches.setattr(progress, "_print_lines", _interrupt)
                progress.follow(path)
        progress.follow(path)
        progress.stop_following()
    assert "generation 0: " in expected.getvalue()
    assert "step 1 decode" in expected.getvalue()
    assert output.getvalue() == expected.getvalue()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_long_prompt_is_not_printed_whole(tmp_path: Path) -> None:
    words = [f" word{n}" for n in range(900)]
    path = write(tmp_path / "a.flextrace", np.tri(900, dtype=bool), words)
    following, result = StringIO(), StringIO()
    progress = RunProgress(Console(file=following, width=200))
    progress.follow(path)
    progress.stop_following()
    summary = summarize_run(path)
    print_summary(summary, Console(file=result, width=200))
    for printed in (following.getvalue(), result.getvalue()):
        assert "word0 word1" in printed
        assert "word99" not in printed
    assert "word899" in summary["generations"][0]["question"]


def test_the_cost_of_recomputes_is_stated_beside_that_of_capture(tmp_path: Path) -> None:
    summary = summarize_run(write(tmp_path / "a.flextrace", np.tri(4, dtype=bool), list("abcd")))
    cost = {"ratio": 0.03, "steps": 12, "total_s": 1.5, "checks": 3, "checks_s": 0.5}
    result = StringIO()
    print_summary({**summary, "level": "basic", "cost": cost}, Console(file=result, width=200))
    assert "capture at level basic took 3.0 %" in result.getvalue()
    assert "3 recomputes of --check-every took 0.50 s, 25 % of the time" in result.getvalue()


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (0.24, "took 24.0 %"),
        (1.31, "took 131.0 % of the 0.09 s that the steps take without it"),
        (12.0, "took longer than the model"),
    ],
)
def test_a_large_cost_says_of_what_it_is_a_share(tmp_path: Path, ratio: float, words: str) -> None:
    summary = summarize_run(write(tmp_path / "a.flextrace", np.tri(4, dtype=bool), list("abcd")))
    result = StringIO()
    cost = {"ratio": ratio, "steps": 12, "total_s": 0.2}
    print_summary({**summary, "level": "basic", "cost": cost}, Console(file=result, width=200))
    assert f"{words}\n" in result.getvalue()


def test_a_trace_without_a_step_is_not_offered_to_step_through(tmp_path: Path) -> None:
    summary = summarize_run(write(tmp_path / "a.flextrace", np.tri(4, dtype=bool), list("abcd")))
    whole, empty = StringIO(), StringIO()
    print_summary(summary, Console(file=whole, width=200))
    print_summary({**summary, "generations": []}, Console(file=empty, width=200))
    assert "# step through it\n" in whole.getvalue()
    assert "# what was recorded: no step\n" in empty.getvalue()


class Stuck(Capture):
    """A capture process that ends only when it is killed."""

    display_name = "The capture process"

    def __init__(self) -> None:
        super().__init__()
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return -9 if self.was_killed else None

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.was_killed = True


def test_a_run_that_does_not_end_after_ctrl_c_is_killed_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_run, "END_WITHIN_S", 0.2)
    process, output = Stuck(), StringIO()
    run = live_run.LiveRun(process, RunProgress(Console(file=output, width=200)))
    sleeps = iter([KeyboardInterrupt])

    def sleep(seconds: float) -> None:
        for interrupt in sleeps:
            raise interrupt
        time_sleep(seconds)

    time_sleep = live_run.time.sleep
    monkeypatch.setattr(live_run.time, "sleep", sleep)
    assert run.watch() == -9
    assert process.signals == [signal.SIGINT]
    assert "did not end within 0 s of the signal, and was killed" in output.getvalue()


def test_a_run_whose_trace_is_moved_to_another_file_system_is_waited_for(tmp_path: Path) -> None:
    process = Stuck()
    process.state.path, process.state.recording = tmp_path / "a", tmp_path / "b"
    run = live_run.LiveRun(process, RunProgress(Console(file=StringIO())), stops=1)
    run._stopped_at -= 3600
    run._kill_if_it_hangs()
    assert not process.was_killed
    process.state.path = process.state.recording
    run._kill_if_it_hangs()
    assert process.was_killed


def test_findings_that_say_the_same_of_several_generations_have_one_line(tmp_path: Path) -> None:
    summary = summarize_run(write(tmp_path / "a.flextrace", np.tri(4, dtype=bool), list("abcd")))
    found = [Finding("audit.hook", Severity.NOTE, "A hook.", generation=n) for n in range(6)]
    found += [Finding("audit.choice", Severity.NOTE, "A choice.", step=n) for n in range(2)]
    found.append(Finding("audit.hook", Severity.NOTE, "Another hook."))
    result = StringIO()
    print_summary({**summary, "findings": found}, Console(file=result, width=200))
    lines = [one for one in result.getvalue().splitlines() if one.startswith("note: ")]
    assert lines == [
        "note: A hook. (generations 0, 1, 2, 3, …)  [audit.hook]",
        "note: A choice. (2 times)  [audit.choice]",
        "note: Another hook.  [audit.hook]",
    ]
