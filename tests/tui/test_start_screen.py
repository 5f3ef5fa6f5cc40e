"""The start screen: what a user can run, open, attach to and practise on."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.traces import RUN, sample_trace
from support.tui import screen_lines, screen_text, settle, until
from textual.widgets import Input, OptionList

from flexinspect.cli.run import job_from_argv
from flexinspect.control.discovery import Address, CaptureEntry
from flexinspect.core.errors import FlexInspectError
from flexinspect.inputs.broken_run_catalog import BROKEN_RUNS, BrokenRun
from flexinspect.panels.base import TracePlace
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.job import ScriptJob
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.tui import trace_verdict
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.saved_state import load_state
from flexinspect.tui.screens import exhibit_screen, start_screen
from flexinspect.tui.screens.dialogs import ChoiceDialog, HelpScreen, TextDialog
from flexinspect.tui.screens.exhibit_screen import ExhibitScreen
from flexinspect.tui.screens.start_screen import SLOGAN, StartScreen, UnreadableTraceScreen
from flexinspect.tui.screens.text_screens import GlossaryScreen
from flexinspect.tui.screens.trace_screen import TraceScreen
from flexinspect.tui.trace_verdict import TraceVerdict, read_verdict

SMALL = (80, 24)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def choose(pilot: Any, name: str) -> None:
    """Choose an entry of the start screen by its name."""
    await pilot.pause()
    entries = pilot.app.screen.query_one(OptionList)
    entries.highlighted = entries.get_option_index(name)
    await pilot.press("enter")
    await pilot.pause()


@pytest.mark.parametrize("size", [(30, 10), SMALL, (120, 40)])
async def test_a_newcomer_sees_what_can_be_done(size: tuple[int, int]) -> None:
    app = InspectorApp()
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        text = " ".join(screen_text(app).split())
        assert "Run the demo" in text
        if size >= SMALL:
            for part in (SLOGAN, "Run your own script …", "Attach to a running", "planted bugs"):
                assert part in text
            assert "$ flexinspect tour" in text
            assert "Recent traces" not in text


async def test_a_trace_is_listed_with_its_verdict_and_answer_and_opened(trace: Path) -> None:
    Path("bad.flextrace").write_text("not a trace")
    app = InspectorApp()
    async with app.run_test(size=SMALL) as pilot:
        await until(pilot, lambda: "Jane" in screen_text(app))
        (line,) = [line for line in screen_lines(app) if "sample.flextrace" in line]
        assert line.split() == ["✖", "1", "error", "sample.flextrace", "“Jane", "Austen”", "new"]
        assert "bad.flextrace" not in screen_text(app)
        assert "flexinspect open" in screen_text(app)
        await pilot.press("enter")
        await settle(pilot)
        assert isinstance(app.screen, TraceScreen)
    assert load_state().recent == (str(trace),)


async def test_the_screen_appears_before_any_verdict_is_read(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_shown = threading.Event()

    def read(path: Path) -> TraceVerdict:
        assert is_shown.wait(10)
        return TraceVerdict("✓ no problems")

    monkeypatch.setattr(start_screen, "read_verdict", read)
    app = InspectorApp()
    async with app.run_test(size=SMALL) as pilot:
        await pilot.pause()
        assert "sample.flextrace" in screen_text(app)
        assert "no problems" not in screen_text(app)
        is_shown.set()
        await until(pilot, lambda: "✓ no problems" in screen_text(app))


async def test_escape_does_not_quit_and_q_does() -> None:
    app = InspectorApp()
    async with app.run_test(size=SMALL) as pilot:
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(app.screen, StartScreen)
        await pilot.press("q")
        await pilot.pause()
        assert app._exit


async def test_help_and_glossary_open_and_close() -> None:
    app = InspectorApp(keymap={"app.quit": "Q"})
    async with app.run_test(size=SMALL) as pilot:
        for key, screen, text in (("?", HelpScreen, "First steps"), ("G", GlossaryScreen, "ids")):
            await pilot.press(key)
            await pilot.pause()
            assert isinstance(app.screen, screen)
            assert text in screen_text(app)
            if key == "?":
                assert "Q" in screen_text(app).split()
            await pilot.press("escape")
            await pilot.pause()
            assert isinstance(app.screen, StartScreen)


@pytest.mark.parametrize(
    ("typed", "program", "is_module"),
    [
        ("tool.py --n 3", "tool.py", False),
        ("python tool.py --n 3", "tool.py", False),
        ("flexinspect run tool.py -- --n 3", "tool.py", False),
        ("--level basic tool.py -- --n 3", "tool.py", False),
        ("-m tool.sub --n 3", "tool.sub", True),
    ],
)
async def test_a_script_of_the_user_is_run(
    typed: str, program: str, is_module: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("tool.py").touch()
    started: list[Any] = []
    monkeypatch.setattr(InspectorApp, "inspect_run", lambda self, job: started.append(job))
    app = InspectorApp(make_job=job_from_argv)
    async with app.run_test(size=SMALL) as pilot:
        await choose(pilot, "script")
        assert isinstance(app.screen, TextDialog)
        app.screen.query_one(Input).value = typed
        await pilot.press("enter")
        await until(pilot, lambda: started)
    (job,) = started
    assert isinstance(job, ScriptJob)
    assert (job.program, job.is_module, job.args) == (program, is_module, ("--n", "3"))


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("missing.py", "There is no script missing.py."),
        ("--nothing tool.py", "Unrecognized arguments: --nothing."),
        ("--help", "Unrecognized arguments: --help."),
        ('tool.py "open', "The command line cannot be split: No closing quotation."),
    ],
)
async def test_an_invalid_command_line_is_an_error_message(typed: str, message: str) -> None:
    Path("tool.py").touch()
    app = InspectorApp(make_job=job_from_argv)
    async with app.run_test(size=SMALL) as pilot:
        await choose(pilot, "script")
        app.screen.query_one(Input).value = typed
        await pilot.press("enter")
        await until(pilot, lambda: app._notifications)
        assert isinstance(app.screen, StartScreen)
        (note,) = app._notifications
        assert note.message.startswith(message)


async def test_without_a_running_capture_there_is_nothing_to_attach_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flexinspect.control.discovery.running", list)
    app = InspectorApp()
    async with app.run_test(size=SMALL) as pilot:
        await choose(pilot, "attach")
        await until(pilot, lambda: app._notifications)
        assert isinstance(app.screen, StartScreen)
        (note,) = app._notifications
        assert note.message.startswith("No capture is running.")


async def test_a_running_capture_is_chosen_and_opened(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = CaptureEntry(
        41230, time.time() - 7200, Address("/run/a.sock"), str(trace), "demo \x1b[31m"
    )
    monkeypatch.setattr("flexinspect.control.discovery.running", lambda: [entry])
    app = InspectorApp()
    async with app.run_test(size=SMALL) as pilot:
        await choose(pilot, "attach")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
        assert "demo \\x1b[31m, process 41230, 2 hours old" in screen_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, TraceScreen))
        await settle(pilot)


async def choose_exhibit(pilot: Any, run: BrokenRun) -> None:
    await choose(pilot, "museum")
    assert isinstance(pilot.app.screen, ChoiceDialog)
    assert run.title in screen_text(pilot.app)
    await pilot.press("enter")
    await pilot.pause()
    assert isinstance(pilot.app.screen, ExhibitScreen)
    assert run.question in " ".join(screen_text(pilot.app).replace("│", "").split())


async def test_an_exhibit_is_built_in_stages_and_opened_at_its_step(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = BROKEN_RUNS[0]
    is_shown = threading.Event()
    built = trace.with_name("built.flextrace")

    def build(run: BrokenRun, path: Path, on_stage: Any) -> None:
        on_stage("recording")
        assert is_shown.wait(10)
        shutil.copy(trace, path)

    monkeypatch.setattr(exhibit_screen, "exhibit_path", lambda run: built)
    monkeypatch.setattr(exhibit_screen, "build_exhibit", build)
    app = InspectorApp()
    async with app.run_test(size=SMALL) as pilot:
        await choose_exhibit(pilot, run)
        await until(pilot, lambda: "Building it: recording …" in screen_text(app))
        await pilot.press("enter")
        assert isinstance(app.screen, ExhibitScreen)
        is_shown.set()
        await until(pilot, lambda: "Enter opens it" in screen_text(app))
        await pilot.press("enter")
        await settle(pilot)
        assert isinstance(app.screen, TraceScreen)
        assert app.screen.place == TracePlace(step=run.step)
        (note,) = app._notifications
        assert note.message == f"{run.question} Press A to answer."
    assert load_state().solved_exhibits == ()


async def test_an_exhibit_that_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object) -> None:
        raise FlexInspectError("The disk is full.")

    monkeypatch.setattr(exhibit_screen, "build_exhibit", build)
    app = InspectorApp()
    async with app.run_test(size=SMALL) as pilot:
        await choose_exhibit(pilot, BROKEN_RUNS[0])
        await until(pilot, lambda: "The disk is full." in screen_text(app))
        await pilot.press("enter", "escape")
        await pilot.pause()
        assert isinstance(app.screen, StartScreen)


async def test_leaving_an_exhibit_ends_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    has_left = threading.Event()
    ended: list[BaseException] = []

    def build(run: BrokenRun, path: Path, on_stage: Any) -> None:
        assert has_left.wait(10)
        try:
            on_stage("recording")
        except FlexInspectError as error:
            ended.append(error)
            raise

    monkeypatch.setattr(exhibit_screen, "build_exhibit", build)
    app = InspectorApp()
    async with app.run_test(size=SMALL) as pilot:
        await choose_exhibit(pilot, BROKEN_RUNS[0])
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(app.screen, StartScreen)
        has_left.set()
        await until(pilot, lambda: ended)


async def test_escape_returns_from_an_unreadable_trace_to_the_start_screen() -> None:
    Path("new.flextrace").write_bytes(b"")
    app = InspectorApp()
    async with app.run_test(size=SMALL) as pilot:
        await pilot.pause()
        app._open_target(Path("new.flextrace"))
        await pilot.pause()
        assert isinstance(app.screen, UnreadableTraceScreen)
        assert "back" in screen_lines(app)[-1]
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(app.screen, StartScreen)
    assert app.trace_error is None


async def test_escape_does_not_quit_an_unreadable_trace_that_was_opened_directly() -> None:
    Path("new.flextrace").write_bytes(b"")
    app = InspectorApp(Path("new.flextrace"))
    async with app.run_test(size=SMALL) as pilot:
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(app.screen, UnreadableTraceScreen)
        assert not app._exit
        assert "back" not in screen_lines(app)[-1]


def trace_with(
    path: Path, run: dict[str, Any], *findings: Finding, state: str = "finished"
) -> Path:
    writer = TraceWriter.create(path, {**RUN, **run})
    writer.write_findings(findings)
    writer.close(state)
    return path


WARNING = Finding("a.b", Severity.WARNING, "It is slow.", generation=0)
NOTE = Finding("a.c", Severity.NOTE, "It is odd.", generation=0)


def test_a_verdict_says_the_worst_and_nothing_unproven(tmp_path: Path) -> None:
    rules = {"rules": ["masks"]}
    path = tmp_path / "a.flextrace"
    cases: list[tuple[str, dict[str, Any], tuple[Finding, ...], str]] = [
        ("✓ no problems", rules, (), "finished"),
        ("● 1 note", rules, (NOTE,), "finished"),
        ("▲ 1 warning", rules, (WARNING, NOTE), "finished"),
        ("– not checked", {}, (), "finished"),
        ("✖ failed", rules, (WARNING,), "failed"),
    ]
    for number, (text, run, findings, state) in enumerate(cases):
        path = trace_with(tmp_path / f"{number}.flextrace", run, *findings, state=state)
        assert read_verdict(path).text == text
    assert read_verdict(sample_trace(tmp_path / "b.flextrace")).answer == "Jane Austen"
    path.write_bytes(path.read_bytes()[:5000])
    assert read_verdict(path).text == "? damaged"


def test_a_run_that_is_recorded_is_told_from_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "live.flextrace"
    writer = TraceWriter.create(path, {**RUN, "rules": ["masks"]})
    for is_alive, text in ((True, "● recording"), (False, "✖ not ended")):
        monkeypatch.setattr(trace_verdict, "is_recorder_alive", lambda run, alive=is_alive: alive)
        assert read_verdict(path).text == text
    writer.close()
