"""What is interrupted: every program that writes a trace, and one that reads it.

A scenario prepares a folder, acts in a child, and says what must be left, given what the child has
acknowledged.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from flexinspect.core.errors import FlexInspectError
from flexinspect.records.step import EventRecord
from flexinspect.trace.file import location
from flexinspect.trace.file import writer as writer_module
from flexinspect.trace.file.writer import RuleReview, TraceWriter, append_reviews
from flexinspect.trace.reader import open_trace
from tools.torture import recordings
from tools.torture.forks import Child, Tell
from tools.torture.recordings import NAME

Told = tuple[str, ...]


class Act(Protocol):
    """Does something in a folder, and tells what it has done."""

    def __call__(self, folder: Path, tell: Tell, seed: int) -> None: ...


class Scenario(Struct, frozen=True):
    """A program: `prepare` returns what is acknowledged before it, `act` is what gets killed.

    `state` is that of the trace once the act is "closed". `records` is whether it makes a trace.
    """

    name: str
    act: Act
    prepare: Callable[[Path, int], Told] = lambda folder, seed: ()
    state: str | None = None
    records: bool = False

    def judge(self, folder: Path, before: Told, told: Told) -> list[str]:
        """Return what is wrong after the act was cut off, or after its end."""
        path = _trace_of(folder)
        if "created" not in (*before, *told) and (path is None or not path.stat().st_size):
            return []  # nothing was promised yet: no file, or an empty one
        if path is None:
            return ["there is no trace"]
        return recordings.judge(path, (*before, *told), folder, state=self.state)


def _trace_of(folder: Path) -> Path | None:
    """Return the trace, which may still be in a temporary folder."""
    places = [folder / NAME, *folder.glob(f"tmp/*/{NAME}")]
    found = [path for path in places if path.exists()]
    return max(found, key=lambda path: path.stat().st_size, default=None)


def _record(folder: Path, tell: Tell, seed: int) -> None:
    recordings.write(folder / NAME, tell, seed)


def _record_folding(folder: Path, tell: Tell, seed: int) -> None:
    """Record with a WAL that is folded into the file all the time."""
    writer_module.WAL_LIMIT_PAGES, writer_module.WAL_TIDY_BYTES = 20, 0
    recordings.write(folder / NAME, tell, seed)


def _older(folder: Path, seed: int) -> Told:
    recordings.write(folder / NAME, lambda line: None, seed + 1, 1, 2)
    return ()


def _overwrite(folder: Path, tell: Tell, seed: int) -> None:
    recordings.write(folder / NAME, tell, seed, 1, 4, overwrite=True)


def _record_and_move(folder: Path, tell: Tell, seed: int) -> None:
    """Record as for a folder on a network file system."""
    (folder / "tmp").mkdir()
    tempfile.tempdir = str(folder / "tmp")
    vars(location)["network_file_system"] = lambda folder: "nfs"
    recordings.write(folder / NAME, tell, seed, 1, 4)


def _die(folder: Path, tell: Tell, seed: int) -> None:
    run = {"model": "torture", "pid": os.getpid(), "started_at": 1000.0}
    writer = TraceWriter.create(folder / NAME, run)
    writer.begin_generation(recordings.generation(0))
    tell("generation 0")
    for number in range(3 + seed % 5):
        writer.write_step(recordings.step(number, 0))
        tell(f"step 0 {number}")
    os.kill(os.getpid(), signal.SIGKILL)


def _dead(folder: Path, seed: int) -> Told:
    child = Child(partial(_die, folder, seed=seed))
    end = child.finish()
    assert end == "killed", end
    return ("created", f"pid {child.pid}", *child.lines)


def _close_dead(folder: Path, tell: Tell, seed: int) -> None:
    """What `flexinspect run` does for the trace of a process that has died."""
    try:
        with open_trace(folder / NAME) as reader:
            pid = int(reader.run()["pid"])
    except FlexInspectError as error:
        tell(recordings.said(error))
        return
    event = EventRecord("torture", "event 0", 1002.0)
    if location.close_dead_trace(folder / NAME, "killed", pid, lambda *_: (event, ())):
        tell("event 0")
        tell("closed")


def _finished(folder: Path, seed: int) -> Told:
    told: list[str] = []
    recordings.write(folder / NAME, told.append, seed, 1, 5)
    return tuple(told)


def _append(folder: Path, tell: Tell, seed: int) -> None:
    """What the rules do that run on a finished trace."""
    events = (EventRecord("torture", "event 7", 1002.0, 0),)
    try:
        append_reviews(folder / NAME, [RuleReview("torture", 0, (), events, 1003.0, 1.0)])
    except FlexInspectError as error:
        tell(recordings.said(error))
        return
    tell("event 7")


def _view(folder: Path, tell: Tell, seed: int) -> None:
    """Read the trace of a process that has died, from open to close."""
    try:
        with open_trace(folder / NAME) as reader:
            for number in range(3):
                with reader.snapshot():
                    reader.record(0, number)
                reader.changed()
    except FlexInspectError as error:
        tell(recordings.said(error))


SCENARIOS = (
    Scenario("record", _record, records=True),
    Scenario("record, folding the WAL", _record_folding, records=True),
    Scenario("overwrite", _overwrite, _older, records=True),
    Scenario("record and move", _record_and_move, records=True),
    Scenario("close for a dead process", _close_dead, _dead, state="failed"),
    Scenario("add findings", _append, _finished),
    Scenario("view", _view, _dead),
)
