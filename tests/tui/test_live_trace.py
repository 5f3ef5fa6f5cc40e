"""The interface on a run of its own: follows it, outlives it, and says how it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import TESTS
from support.patience import PATIENCE_S
from support.traces import sample_trace
from support.tui import screen_lines, screen_text, settle

from flexinspect.records.job import DebuggerOptions, Job, ScriptJob
from flexinspect.trace.reader import open_trace
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.saved_state import add_recent_trace
from flexinspect.tui.screens.dialogs import ChoiceDialog
from flexinspect.tui.screens.trace_screen import TraceScreen
from flexinspect.tui.status_lines import banner_text
from flexinspect.tui.trace_session import RunStatus

pytestmark = pytest.mark.usefixtures("forked_processes")

LONG = {"weights": "random", "max_new_tokens": 950, "stop": "eos"}
LONGER = {**LONG, "prompts": (), "dataset": "demo", "max_samples": 20, "max_new_tokens": 900}
"""A run that lasts until it is stopped, also on a busy machine."""


def job(path: Path, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "model": "demo",
        "prompts": ("What is the capital of France?", "France's capital?"),
        "out": str(path),
        "level": "basic",
    }
    return Job(**(values | changes))


async def until(pilot: Any, what: Any, seconds: float = PATIENCE_S) -> None:
    async with asyncio.timeout(seconds):
        while not what():
            await pilot.pause(0.05)


def screen(app: InspectorApp) -> TraceScreen:
    assert isinstance(app.screen, TraceScreen)
    return app.screen


async def test_a_run_is_shown_from_its_start_and_followed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # a fresh interpreter, so that its start can be seen
    path = tmp_path / "run.flextrace"
    app = InspectorApp(job=job(path))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause(0.2)
        assert "no step yet" in screen_lines(app)[0]
        assert "starting" in screen_text(app) or "importing" in screen_text(app)
        await until(pilot, lambda: screen(app).status.state == "finished")
        await settle(pilot)
        last = screen(app).status.last_step
        assert last == screen(app).place.step
        assert f"token {last + 1} of {last + 1} (step {last}" in screen_lines(app)[0]
        assert "Paris" in screen_lines(app)[1]
    assert open_trace(path).state == "finished"
    for _ in range(500):  # a thread of the closed interface may end its read first
        if list(tmp_path.glob("*.flextrace*")) == [path]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(list(tmp_path.glob("*.flextrace*")))


async def test_stepping_away_ends_following_and_says_how_far_behind(tmp_path: Path) -> None:
    app = InspectorApp(job=job(tmp_path / "run.flextrace", **LONG))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: (screen(app).status.last_step or 0) > 20)
        await pilot.press("home")
        await until(pilot, lambda: "behind, f follows" in screen_lines(app)[0])
        assert screen(app).place.step == 0
        assert not screen(app).following
        await pilot.press("f")
        await until(pilot, lambda: screen(app).place.step > 20)
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not screen(app).status.live)
        assert screen(app).status.state == "interrupted"


async def test_a_fork_in_a_pause_ends_in_a_pause_of_the_same_answer(tmp_path: Path) -> None:
    three = {**LONGER, "max_samples": 3, "max_new_tokens": 120, "stop": "length"}
    app = InspectorApp(job=job(tmp_path / "run.flextrace", **three))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: (screen(app).status.last_step or 0) > 2)
        await pilot.press("space")
        await until(pilot, lambda: screen(app).capture_status.state == "paused")
        paused_in = screen(app).capture_status.status.place.generation  # type: ignore[union-attr]
        for branch in (1, 2):
            await pilot.press("f", "F")
            await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, TraceScreen))
            await until(pilot, lambda b=branch: f"branch {b} is finished" in screen_text(app))
            place = screen(app).capture_status.status.place  # type: ignore[union-attr]
            assert (place.generation, place.branch, place.step) == (paused_in, branch, 119)
            await until(pilot, lambda b=branch: screen(app).place.branch == b)
            await until(pilot, lambda: screen(app).place.step == 119)
        await pilot.press("full_stop")
        await until(pilot, lambda: screen(app).place.generation == paused_in + 1)
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not screen(app).status.live)


async def test_a_killed_process_leaves_its_steps_and_its_last_output(tmp_path: Path) -> None:
    path = tmp_path / "run.flextrace"
    app = InspectorApp(job=job(path, **LONG))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: (screen(app).status.last_step or 0) > 5)
        os.kill(app.session.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        await until(pilot, lambda: not screen(app).status.live)
        await settle(pilot)
        text = screen_text(app)
        assert "The run failed. What was recorded before is here." in text
        assert "ended by SIGKILL" in text
        await pilot.press("home", "right")
        await settle(pilot)
        assert screen(app).place.step == 1
        assert "(step 1, decode)" in screen_lines(app)[0]
    assert open_trace(path).state == "failed"


async def test_a_run_that_cannot_begin_says_why(tmp_path: Path) -> None:
    app = InspectorApp(job=job(tmp_path / "run.flextrace", device="cuda:7"))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: not screen(app).status.live)
        await settle(pilot)
        assert "The run failed before its first token." in screen_text(app)
        assert "cuda" in screen_text(app)
        await pilot.press("right", "n", "x")
    assert not list(tmp_path.glob("*.flextrace*"))


async def test_quitting_a_live_run_asks_for_confirmation(tmp_path: Path) -> None:
    path = tmp_path / "run.flextrace"
    app = InspectorApp(job=job(path, **LONGER))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: (screen(app).status.last_step or 0) > 2)
        await pilot.press("q")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
        assert "The run is not finished." in screen_text(app)
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, TraceScreen))
        assert screen(app).status.live
        await pilot.press("q")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
        await pilot.press("enter")
        await pilot.pause(0.1)
    process = app.session.process  # type: ignore[union-attr]
    for _ in range(200):
        if process.poll() is not None:  # type: ignore[union-attr]
            break
        await asyncio.sleep(0.05)
    assert process.poll() is not None  # type: ignore[union-attr]
    assert open_trace(path).state == "interrupted"


async def test_opening_another_trace_asks_what_happens_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "run.flextrace", sample_trace(tmp_path / "other.flextrace")
    add_recent_trace(other)
    monkeypatch.setattr("flexinspect.control.discovery.running", list)
    app = InspectorApp(job=job(path, **LONGER))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: (screen(app).status.last_step or 0) > 2)
        await pilot.press("o")
        await until(pilot, lambda: "other" in screen_text(app))
        for _ in range(50):  # the running answers move the rows of the list
            await pilot.press("end", "enter")
            await pilot.pause(0.2)
            if isinstance(app.screen, ChoiceDialog):
                break
            if "other" not in screen_text(app):
                await pilot.press("o")
        assert isinstance(app.screen, ChoiceDialog)
        assert "Open the other trace, and let the run continue" in screen_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: "Jane" in screen_text(app))
        await until(pilot, lambda: screen(app).status.state == "finished")
    assert app.session is not None
    assert app.session.process is not None  # the command prints the result of the run
    assert open_trace(path).state == "interrupted"


async def test_ctrl_c_and_then_q_leave_a_valid_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.flextrace"
    app = InspectorApp(job=job(path, **LONG))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: (screen(app).status.last_step or 0) > 2)
        app.session.interrupt()  # type: ignore[union-attr]
        app._handle_signal(signal.SIGTERM)
        await until(pilot, lambda: app.session.process.poll() is not None)  # type: ignore[union-attr]
    with open_trace(path) as reader:
        assert reader.state == "interrupted"


async def test_a_trace_of_another_process_shows_when_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "other.flextrace"
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from support.traces import RUN, sample_generation, sample_step\n"
        "from flexinspect.trace.file.writer import TraceWriter\n"
        "run = {**RUN, 'pid': os.getpid(), 'started_at': time.time()}\n"
        "writer = TraceWriter.create(Path(sys.argv[1]), run)\n"
        "writer.begin_generation(sample_generation(0))\n"
        "writer.write_step(sample_step(0))\n"
        "print('ready', flush=True)\n"
        "time.sleep(120)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        app = InspectorApp(path)
        async with app.run_test(size=(100, 30)) as pilot:
            await settle(pilot)
            assert screen(app).status.state == "recording"
            other.kill()
            other.wait()
            await until(pilot, lambda: screen(app).status.state == "dead")
            await until(pilot, lambda: "The trace was never finished." in screen_text(app))
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("phase", "fraction", "text"),
    [
        ("importing torch", None, f"importing torch (3 s)  {'━' * 6}{'╌' * 24} 2 of 5"),
        ("reading weights", 0.5, f"reading weights (3 s)  {'━' * 15}{'╌' * 15} 50 %"),
        (
            "compiling FlexAttention",
            None,
            f"compiling FlexAttention (3 s)  {'━' * 24}{'╌' * 6} 5 of 5",
        ),
        (
            "preparing the first step",
            None,
            f"preparing the first step (3 s)  {'━' * 24}{'╌' * 6} 5 of 5",
        ),
        ("running the program", None, "running the program (3 s) …"),
    ],
)
def test_loading_has_a_bar_where_it_is_known_how_far_it_is(
    phase: str, fraction: float | None, text: str
) -> None:
    status = RunStatus("recording", phase=phase, fraction=fraction)
    assert banner_text(status, 3) == (text, "busy")


def test_the_banner_of_a_run_that_is_paused_before_its_first_step_says_so() -> None:
    status = RunStatus("recording", phase="running the program")
    assert banner_text(status, 3, is_paused=True) == ("paused before the first step", "busy")


def test_the_banner_says_where_a_program_without_a_step_records() -> None:
    notes = ("The program records itself. To see it: flexinspect open own.flextrace",)
    text, kind = banner_text(RunStatus("recording", phase="running the program", notes=notes))
    assert (text.splitlines()[1:], kind) == ([*notes], "busy")
    text, kind = banner_text(RunStatus("finished", notes=notes))
    assert (text, kind) == (f"This trace has no step.\n{notes[0]}", "bad")
    assert banner_text(RunStatus("finished", notes=notes, last_step=3)) == ("", "")


SCRIPT = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
print("loading", flush=True)
import torch
from support.tiny import ids, make_model
for family, layers in (("llama", 2), ("qwen2", 5)):
    model = make_model(family, num_hidden_layers=layers)
    model.generate(torch.tensor([ids(6, 1)]), max_new_tokens=4, do_sample=False)
print("[b]done[/b] \\x1b[31m", file=sys.stderr)
sys.exit(3)
"""


async def test_a_script_is_shown_with_its_output_and_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # a fresh interpreter, so that its imports can be seen
    (tmp_path / "script.py").write_text(SCRIPT, "utf-8")
    path = tmp_path / "run.flextrace"
    app = InspectorApp(job=ScriptJob(out=str(path), program=str(tmp_path / "script.py")))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: "importing torch" in screen_text(app))
        await until(pilot, lambda: not screen(app).status.live)
        await settle(pilot)
        assert screen(app).status.state == "failed"
        process = app.session.process if app.session is not None else None
        assert process is not None
        await until(pilot, lambda: process.poll() == 3)
        assert "Qwen2ForCausalLM" in screen_lines(app)[0]
        await pilot.press("0")
        await settle(pilot)
        assert " loading" in screen_text(app)
        assert "▸![b]done[/b] \\x1b[31m" in screen_text(app)
        for _ in range(6):
            await pilot.press("down")
        await settle(pilot)
        assert screen(app).place.layer == 4
        await pilot.press("less_than_sign")
        await settle(pilot)
        assert "LlamaForCausalLM" in screen_lines(app)[0]
        await pilot.press("down", "down", "down")
        await settle(pilot)
        assert screen(app).place.layer == 1


async def test_where_debugpy_listens_is_said_once_and_not_repeated_over_the_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # debugpy needs a process of its own
    app = InspectorApp(job=job(tmp_path / "run.flextrace", debugger=DebuggerOptions(port=0)))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: screen(app).status.state == "finished")
        await settle(pilot)
        for key in ("left", "right", "left", "n"):
            await pilot.press(key)
            await settle(pilot)
        said = [text for _, text in app.messages() if "debugpy listens on" in text]
        assert len(said) == 1
