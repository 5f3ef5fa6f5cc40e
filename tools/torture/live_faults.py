"""What happens to a trace while it is recorded: viewers that die or stop, limits, moves, rivals.

Each seed is one kind of event with random moments and sizes. The writer must go on to its end, say
what was lost if anything was, and leave what it has acknowledged.
"""

from __future__ import annotations

import errno
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from flexinspect.core.errors import FlexInspectError
from flexinspect.trace.reader import open_trace
from tools.torture import faults, forks, recordings
from tools.torture.faults import EVER, OPS, Fault
from tools.torture.forks import Child, Tell, run_child
from tools.torture.judged import problem_of
from tools.torture.recordings import NAME
from tools.torture.results import Failure

PAUSE_S = 0.004
READ_LIMIT_S = 20.0
"""How long a reader may take beside a stopped writer; a machine that tests share is slow."""
CLOSE_LIMIT_S = 20.0

Kind = Callable[[random.Random, Path], list[str]]


def prepare(folder: Path) -> None:
    """Import what checks import."""
    recordings.import_all(folder)


def attempt(_: None, seed: int, folder: Path) -> list[Failure]:
    """Let one kind of event happen, and check the trace."""
    kind = KINDS[seed % len(KINDS)]
    wrong = kind(random.Random(seed), folder)
    how = " ".join((kind.__doc__ or "").split("\n")[0].split())
    return [Failure(kind="live", detail=each, how=how) for each in wrong]


def _writer(folder: Path, seed: int = 0, pause_s: float = PAUSE_S) -> Child:
    return Child(lambda tell: recordings.write(folder / NAME, tell, seed, pause_s=pause_s))


def _ends(child: Child, folder: Path, *, closes: bool = True) -> list[str]:
    """Wait for a writer; return what is wrong with its end and its trace."""
    end = child.finish()
    wrong = [f"the writer ended with {end}"] if end else []
    if closes and "closed" not in child.lines:
        wrong.append(f"the writer did not close the trace: {_said(child)}")
    return wrong + recordings.judge(folder / NAME, _told(child), folder)


def _told(child: Child) -> tuple[str, ...]:
    return tuple(line for line in child.lines if not line.startswith(("says ", "raised ")))


def _said(child: Child) -> list[str]:
    return [line for line in child.lines if line.startswith("says ")]


# -- readers ---------------------------------------------------------------------------------------


def follow(folder: Path, tell: Tell, fault: Fault | None = None) -> None:
    """Follow a trace as an interface does, up to its end."""
    if fault is not None:
        fault.arm()
    state = "recording"
    while state == "recording":
        try:
            with open_trace(folder / NAME) as reader:
                for _ in range(8):
                    reader.changed()
                    with reader.snapshot():
                        for row in reader.generations():
                            last = reader.last_step(row.generation)
                            if last is not None:
                                reader.record(row.generation, last)
                    state = reader.state
        except FlexInspectError as error:
            tell(recordings.said(error))
            time.sleep(PAUSE_S)
    tell("followed")


def viewer_killed_at_a_call(rng: random.Random, folder: Path) -> list[str]:
    """A viewer is killed at a call."""
    fault = Fault(rng.choice(("before", "after")), rng.choice((*OPS, None)), None)
    fault = Fault(fault.action, fault.op, None, rng.randint(1, 200), EVER)
    writer = _writer(folder)
    writer.wait_for("created")
    viewer = Child(partial(follow, folder, fault=fault))
    wrong = _ends(writer, folder)
    if (end := viewer.finish()) not in ("killed", ""):
        wrong.append(f"the viewer ended with {end}")
    return wrong


def viewer_killed_at_a_moment(rng: random.Random, folder: Path) -> list[str]:
    """A viewer is killed at a random moment."""
    writer = _writer(folder)
    writer.wait_for("created")
    viewer = Child(partial(follow, folder))
    time.sleep(rng.uniform(0, 0.25))
    viewer.send(signal.SIGKILL)
    viewer.finish()
    return _ends(writer, folder)


def _hold(folder: Path, tell: Tell) -> None:
    """Read within a snapshot for as long as this process is stopped."""
    with open_trace(folder / NAME) as reader, reader.snapshot():
        reader.state  # noqa: B018
        tell("reading")
        time.sleep(0.05)
        n_steps = reader.n_steps(0)
    tell(f"read {n_steps}")


def viewer_stopped(rng: random.Random, folder: Path) -> list[str]:
    """A viewer is stopped (SIGSTOP) within a query, until the writer has ended."""
    writer = _writer(folder)
    writer.wait_for(f"step 0 {rng.randint(0, 9)}")
    viewer = Child(partial(_hold, folder))
    viewer.wait_for("reading")
    viewer.send(signal.SIGSTOP)
    started = time.monotonic()
    wrong = _ends(writer, folder, closes=False)
    if time.monotonic() - started > CLOSE_LIMIT_S:
        wrong.append("the writer waited for the viewer")
    viewer.send(signal.SIGCONT)
    if end := viewer.finish():
        wrong.append(f"the viewer ended with {end}")
    return wrong


def writer_stopped(rng: random.Random, folder: Path) -> list[str]:
    """The writer is stopped (SIGSTOP), and a reader does not wait for it."""
    writer = _writer(folder)
    writer.wait_for(f"step 0 {rng.randint(0, 9)}")
    time.sleep(rng.uniform(0, 0.03))
    writer.send(signal.SIGSTOP)
    told = _told(writer)
    found = run_child(lambda tell: _tell_all(tell, recordings.check(folder / NAME, told)), 20.0)
    writer.send(signal.SIGCONT)
    wrong = [*found.lines, *([found.end] if found.end and found.end not in found.lines else [])]
    return wrong + _ends(writer, folder)


def _tell_all(tell: Tell, lines: list[str]) -> None:
    for line in lines:
        tell(line)


# -- other programs --------------------------------------------------------------------------------


def two_writers(rng: random.Random, folder: Path) -> list[str]:
    """Two writers want one name at the same time."""
    overwrite = rng.random() < 0.5
    lengths = (5, 8)

    def act(n_steps: int, tell: Tell) -> None:
        recordings.write(folder / NAME, tell, 0, 1, n_steps, pause_s=0.05, overwrite=overwrite)

    children = [Child(partial(act, n_steps)) for n_steps in lengths]
    ends = [child.finish() for child in children]
    wrong = [f"a writer ended with {end}" for end in ends if end]
    closed = [child for child in children if "closed" in child.lines]
    silent = [child for child in children if "closed" not in child.lines and not _said(child)]
    if silent:
        wrong.append("a writer lost its trace without a sentence")
    if len(closed) != 1:
        return [*wrong, f"{len(closed)} of two writers say that they have closed the trace"]
    return wrong + recordings.judge(folder / NAME, _told(closed[0]), folder)


def trace_moved(rng: random.Random, folder: Path) -> list[str]:
    """The trace is moved while it is recorded."""
    writer = _writer(folder)
    writer.wait_for(f"step {rng.randint(0, 1)} {rng.randint(0, 9)}")
    moved = folder / "elsewhere" / NAME
    moved.parent.mkdir()
    (folder / NAME).rename(moved)
    end = writer.finish()
    wrong = [f"the writer ended with {end}"] if end else []
    if not _said(writer):
        wrong.append("the writer does not say that the trace has moved")
    rest = folder / f"{NAME}-wal"
    if rest.exists():  # what a user finds beside the old name
        shutil.move(rest, moved.parent)
    return wrong + recordings.judge(moved, _told(writer), folder)


def trace_deleted(rng: random.Random, folder: Path) -> list[str]:
    """The trace is deleted while it is recorded."""
    writer = _writer(folder)
    writer.wait_for(f"step {rng.randint(0, 1)} {rng.randint(0, 9)}")
    (folder / NAME).unlink()
    end = writer.finish()
    wrong = [f"the writer ended with {end}"] if end else []
    if not _said(writer):
        wrong.append("the writer does not say that the trace was deleted")
    return wrong


def trace_replaced(rng: random.Random, folder: Path) -> list[str]:
    """The trace is deleted while it is recorded, and another program records one of that name."""
    first = _writer(folder)
    first.wait_for(f"step 0 {rng.randint(0, 9)}")
    for file in folder.glob(f"{NAME}*"):
        file.unlink()
    second = _writer(folder, 1, 2 * PAUSE_S)
    second.wait_for("created")
    end = first.finish()
    wrong = [f"the first writer ended with {end}"] if end else []
    if not _said(first):
        wrong.append("the first writer does not say that its trace was deleted")
    second.send(signal.SIGKILL)
    second.finish()
    return wrong + recordings.judge(folder / NAME, _told(second), folder)


# -- limits ----------------------------------------------------------------------------------------


def _under(limit: Callable[[], None], folder: Path, when: str = "start") -> list[str]:
    """Let a writer run under a limit from its start, or from when the trace is created."""

    def body(tell: Tell) -> None:
        def act(line: str) -> None:
            tell(line)
            if line == when:
                limit()

        if when == "start":
            limit()
        recordings.write(folder / NAME, act, 0)

    child = Child(body)
    end = child.finish()
    wrong = [f"the writer ended with {end}"] if end else []
    if "closed" not in child.lines and not _said(child):
        wrong.append("nothing was said of what is lost")
    path = folder / NAME
    if "created" not in child.lines and (not path.exists() or not path.stat().st_size):
        return wrong
    return wrong + recordings.judge(path, _told(child), folder)


def few_files(rng: random.Random, folder: Path) -> list[str]:
    """No more descriptors can be opened (RLIMIT_NOFILE)."""

    def limit() -> None:
        n_open = forks.highest_descriptor() + rng.randint(0, 4)
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_open, n_open))

    return _under(limit, folder, rng.choice(("start", "created", "step 0 3")))


def small_files(rng: random.Random, folder: Path) -> list[str]:
    """Files may not grow beyond a size (RLIMIT_FSIZE)."""
    size = rng.randint(1, 400_000)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return _under(limit, folder, rng.choice(("start", "created", "step 0 3")))


def clock_back(rng: random.Random, folder: Path) -> list[str]:
    """The clock goes back each time that it is read."""
    seconds = rng.choice((1, 3600, 10**6))
    return _under(lambda: faults.turn_clock_back(seconds), folder)


def no_shared_memory(rng: random.Random, folder: Path) -> list[str]:
    """The file system has no shared memory, or no locks, as those of networks."""
    code, op = rng.choice(((errno.ENODEV, "map"), (errno.EACCES, "open"), (errno.ENOLCK, "lock")))
    role = None if op == "lock" else "shm"
    return _under(Fault("fail", op, role, 1, EVER, code).arm, folder)


def reader_without_memory(rng: random.Random, folder: Path) -> list[str]:
    """A command has little memory (RLIMIT_AS)."""
    from flexinspect.cli.main import main

    recordings.write(folder / NAME, lambda line: None, 0, 1, 4)
    command = [rng.choice(("dump", "show", "findings")), str(folder / NAME)]
    room = rng.randint(0, 40) << 20

    def body(tell: Tell) -> None:
        problem_of(lambda: main(command))  # without memory, Python cannot import
        size = psutil.Process().memory_info().vms + room
        no_limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size, no_limit[1]))
        found = problem_of(lambda: main(command))
        resource.setrlimit(resource.RLIMIT_AS, no_limit)
        if found is not None:
            tell(f"{found.kind}: {found.detail}")

    done = run_child(body)
    return [*done.lines, *([done.end] if done.end and done.end not in done.lines else [])]


KINDS: tuple[Kind, ...] = (
    *(viewer_killed_at_a_call, viewer_killed_at_a_moment, viewer_stopped, writer_stopped),
    *(two_writers, trace_moved, trace_deleted, trace_replaced),
    *(few_files, small_files, clock_back, no_shared_memory, reader_without_memory),
)
