"""Rules that have not seen a trace look at it when it is opened, and the panels follow."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest
from support.paths import TESTS
from support.rules import Slow
from support.tui import screen_text, settle
from textual.pilot import Pilot

from flexinspect.analysis import offline_rules
from flexinspect.core import plugins
from flexinspect.rules.numerics.nan_and_inf import NumbersRule
from flexinspect.trace.file.writer import review_statements
from flexinspect.trace.reader import open_trace
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.saved_state import Layout, save_layout
from flexinspect.tui.screens.trace_screen import TraceScreen
from flexinspect.tui.trace_session import TraceSession

CHILD = """
import sys
from support.rules import Slow
from flexinspect.core import plugins
from flexinspect.analysis import offline_rules
plugins.load_all = lambda group: ({"slow": Slow}, {})
if sys.argv[2:] == ["read-only"]:
    from flexinspect.trace.file import writer
    writer.os.access = lambda path, mode: False
sys.exit(offline_rules.main(sys.argv[1:]))
"""


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, with_review: None) -> list[str]:
    """The arguments after the trace of the review process; its only rule is `Slow`."""
    args: list[str] = []
    made = {"numbers": NumbersRule, "slow": Slow}
    monkeypatch.setattr(plugins, "load_all", lambda group: (made, {}))
    tests = str(TESTS)
    monkeypatch.setenv("PYTHONPATH", ":".join([*sys.path, tests]))
    monkeypatch.setattr(
        offline_rules,
        "review_command",
        lambda path: [sys.executable, "-c", CHILD, str(path), *args],
    )
    return args


async def until(pilot: Pilot[None], text: str) -> str:
    for _ in range(600):
        await settle(pilot)
        if text in (shown := " ".join(screen_text(pilot.app).split())):
            return shown
        await asyncio.sleep(0.02)
    raise AssertionError(f"{text} never came: {shown}")


async def test_findings_of_offline_rules_appear_in_an_open_trace(
    trace: Path, child: list[str]
) -> None:
    save_layout("generation", Layout(("findings",), 1))
    async with InspectorApp(trace).run_test(size=(100, 40)) as pilot:
        await settle(pilot)
        assert "1 error" in screen_text(pilot.app)
        await until(pilot, "1 error, 2 warnings")
        await pilot.press("shift+down")
        shown = await until(pilot, "Why it matters: It matters.")
    assert "Fix: Cut it." in shown
    assert "query: SELECT * FROM steps" in shown
    with open_trace(trace) as reader:
        assert reader.reviews() == [("slow", 0), ("slow", 1)]


def test_findings_of_a_held_run_are_computed_again_at_its_end(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = TraceSession(trace)
    screen = TraceScreen(feed)
    reviewed: list[list[tuple[str, int]]] = []
    reader = screen.reader
    assert reader is not None
    monkeypatch.setattr(screen, "_review", lambda: reviewed.append(reader.reviews()))
    screen.review_once(n_held=2)
    reader.add_reviews(
        review_statements(offline_rules.review(reader, [Slow()], store=False).unstored)
    )
    screen.review_once(n_held=2)
    assert reader.reviews() == [("slow", 0), ("slow", 1)]
    screen.review_once()
    assert reviewed == [[], []]
    feed.close()


async def test_findings_that_cannot_be_stored_are_shown_with_a_note(
    trace: Path, child: list[str]
) -> None:
    child.append("read-only")
    before = trace.read_bytes()
    app = InspectorApp(trace)
    async with app.run_test(size=(100, 40)) as pilot:
        await until(pilot, "2 warnings")
        await pilot.pause()
        (message,) = [note.message for note in app._notifications]
    assert message == f"The findings are not stored in {trace}: it is read-only."
    assert trace.read_bytes() == before


async def test_closing_ends_the_process_of_the_review(
    trace: Path, child: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began = tmp_path / "began"
    sleeper = f"open({str(began)!r}, 'w').close(); import time; time.sleep(60)"
    monkeypatch.setattr(
        offline_rules, "review_command", lambda path: [sys.executable, "-c", sleeper]
    )
    ended: list[int | None] = []
    real = asyncio.create_subprocess_exec

    async def noted(*args: str, **options: object) -> asyncio.subprocess.Process:
        process = await real(*args, **options)  # type: ignore[arg-type]
        ended.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    async with InspectorApp(trace).run_test(size=(100, 40)) as pilot:
        for _ in range(500):
            await pilot.pause(0.02)
            if began.exists():
                break
        assert began.exists()
    (pid,) = ended
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the process still runs")


async def test_a_trace_that_every_rule_has_seen_starts_no_process(
    trace: Path, child: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_trace(trace) as reader:
        offline_rules.review(reader, [Slow()])
    started: list[Path] = []
    monkeypatch.setattr(
        offline_rules, "review_command", lambda path: started.append(path) or ["no"]
    )
    async with InspectorApp(trace).run_test(size=(100, 40)) as pilot:
        await until(pilot, "2 warnings")
        await settle(pilot)
    assert started == []
