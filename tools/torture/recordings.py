"""Traces that torture records, and the oracle: what a child has told must be in the file."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flexinspect.core.errors import FlexInspectError, TracePlaceError, TraceWriteError
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    ArrayRecord,
    Candidate,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    LogitsRecord,
    OutputRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader, open_trace
from tools.torture.forks import NOBODY, Outcome, Tell, become_nobody, run_child

NAME = "run.flextrace"
N_PROMPT = 4


def generation(number: int) -> GenerationRecord:
    """Return the prompt of a generation."""
    tokens = tuple(TokenRecord(i, 10 + i, f"t{i}", f"t{i}", i, 0) for i in range(N_PROMPT))
    segments = (Segment(0, N_PROMPT, "prompt", SegmentKind.SHARED, 0),)
    return GenerationRecord(
        number, f"sample {number}", "causal", "contiguous", segments, tokens, started_at=1000.0
    )


def step(number: int, of: int) -> StepRecord:
    """Return a step whose every value follows from its place."""
    rng = np.random.default_rng([of, number])
    token = int(rng.integers(3, 1000))
    chosen = Candidate(0, token, f"t{token}", 9.5, -0.125, 9.5, -0.125)
    values = rng.standard_normal((2, 4, int(rng.integers(1, 400)))).astype(np.float32)
    return StepRecord(
        generation=of,
        step=number,
        phase="decode" if number else "prefill",
        q_len=1 if number else N_PROMPT,
        kv_before=number and N_PROMPT - 1 + number,
        kv_after=N_PROMPT + number,
        started_at=1000.5 + number,
        wall_ms=12.5,
        capture_ms=0.125,
        logits=LogitsRecord(0.5, 1.0, token, 0, -0.125, 0, 0, -1.0, 9.5, (), (chosen,)),
        tokens=(
            TokenRecord(N_PROMPT + number, token, "t", "t", N_PROMPT + number, 0, False, number),
        ),
        arrays=(ArrayRecord("attention.mass", values),),
    )


def is_same(found: StepRecord | None, expected: StepRecord) -> bool:
    """Compare a step with what was written."""
    if found is None or len(found.arrays) != len(expected.arrays):
        return False
    pairs = zip(found.arrays, expected.arrays, strict=True)
    arrays = all(one.array.tobytes() == other.array.tobytes() for one, other in pairs)
    facts = ("phase", "q_len", "kv_before", "kv_after", "logits", "tokens")
    return arrays and all(getattr(found, key) == getattr(expected, key) for key in facts)


def write(
    path: Path,
    tell: Tell,
    seed: int,
    n_generations: int = 2,
    n_steps: int = 12,
    *,
    pause_s: float = 0.0,
    **create: Any,
) -> None:
    """Record a trace; tell each thing once the call that wrote it has returned.

    A program pauses for `pause_s` after each writing.
    """
    run = {"model": "torture", "pid": os.getpid(), "started_at": time.time()}
    try:
        writer = TraceWriter.create(path, run, **create)
    except TracePlaceError as error:
        tell(said(error))
        return
    tell("created")
    _Recording(writer, tell, random.Random(seed), pause_s).run(n_generations, n_steps)
    try:
        writer.close()
    except TracePlaceError as error:
        tell(said(error))
        return
    if writer.note:
        tell(f"says {writer.note}")
    if not writer.failed and not (writer.note or "").startswith(("Another", "The end")):
        tell("closed")


def said(error: FlexInspectError) -> str:
    """Return the line that tells of an error."""
    return f"says {' '.join(error.sentence().split())}"


class _Recording:
    """Writes generations as a recorder does: an error is told, and does not end the program."""

    def __init__(self, writer: TraceWriter, tell: Tell, rng: random.Random, pause_s: float) -> None:
        self._writer, self._tell, self._rng, self._pause_s = writer, tell, rng, pause_s

    def run(self, n_generations: int, n_steps: int) -> None:
        writer = self._writer
        for number in range(n_generations):
            prompt = generation(number)
            self._do(partial(writer.begin_generation, prompt), f"generation {number}")
            self._steps(number, n_steps)
            text = OutputRecord("stdout", f"line {number}\n", 1001.0, number, 0)
            self._do(partial(writer.write_output, [text]))
            event = EventRecord("torture", f"event {number}", 1002.0, number)
            self._do(partial(writer.write_event, event), f"event {number}")
            end = GenerationEnd(number, "finished", "text", (), "eos", 1010.0)
            self._do(partial(writer.end_generation, end), f"end {number}")

    def _steps(self, of: int, n_steps: int) -> None:
        waiting: list[StepRecord] = []
        for number in range(n_steps):
            waiting.append(step(number, of))
            if number < 2 or self._rng.random() < 0.6 or number == n_steps - 1:
                names = [f"step {one.generation} {one.step}" for one in waiting]
                self._do(partial(self._writer.write_steps, waiting), *names)
                waiting = []

    def _do(self, write: Callable[[], None], *names: str) -> None:
        try:
            write()
        except TraceWriteError as error:
            self._tell(said(error))
            names = tuple(names[index] for index in error.stored)
        else:
            names = () if self._writer.failed else names
        for name in names:
            self._tell(name)
        time.sleep(self._pause_s)


def check(path: Path, told: tuple[str, ...], *, state: str | None = None) -> list[str]:
    """Return what of the acknowledged things is missing or wrong in a trace."""
    with open_trace(path) as reader, reader.snapshot():
        wrong = [line for line in told if not _is_there(reader, line)]
        if "closed" in told and reader.state != (state or "finished"):
            wrong.append(f"the state is {reader.state}")
        for row in reader.generations():  # what was not acknowledged is whole or not there
            for one in reader.steps(row.generation):
                record = reader.record(row.generation, one.step)
                if not is_same(record, step(one.step, row.generation)):
                    wrong.append(f"step {row.generation} {one.step} differs")
    return wrong


def import_all(folder: Path) -> None:
    """Import what checks import when they run: a child without rights may not read it."""
    import tempfile  # noqa: F401

    path = folder / f"imports-{NAME}"
    write(path, lambda line: None, 0, 1, 2)
    assert not check(path, ())


def _is_there(reader: TraceReader, line: str) -> bool:
    kind, *numbers = line.split()
    if kind == "step":
        of, number = map(int, numbers)
        return reader.step(of, number) is not None
    if kind in ("generation", "end"):
        rows = {row.generation: row for row in reader.generations()}
        row = rows.get(int(numbers[0]))
        return row is not None and (kind == "generation" or row.state == "finished")
    if kind == "event":
        return any(row.event.text == f"event {numbers[0]}" for row in reader.events())
    return True


def judge(
    path: Path, told: tuple[str, ...], scratch: Path, *, state: str | None = None
) -> list[str]:
    """Check a trace as a reader finds it: in a read-only folder, where it is, then with SQLite."""
    wrong = [f"read-only: {each}" for each in _judge_copy(path, told, scratch, state)]
    wrong += _outcome(run_child(lambda tell: _tell_all(tell, check(path, told, state=state))))
    try:
        with closing(sqlite3.connect(path)) as db:
            found = db.execute("PRAGMA integrity_check").fetchone()[0]
    except sqlite3.DatabaseError as error:
        found = str(error)
    return wrong if found == "ok" else [*wrong, f"integrity: {found}"]


def _judge_copy(path: Path, told: tuple[str, ...], scratch: Path, state: str | None) -> list[str]:
    folder = scratch / "read-only"
    folder.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        copy = Path(shutil.copy(file, folder))
        if os.getuid() == 0:
            os.chown(copy, NOBODY, NOBODY)
        copy.chmod(0o400)
    folder.chmod(0o555)

    def body(tell: Tell) -> None:
        become_nobody()
        _tell_all(tell, check(folder / path.name, told, state=state))

    try:
        return _outcome(run_child(body))
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def _tell_all(tell: Tell, wrong: list[str]) -> None:
    for line in wrong:
        tell(line)


def _outcome(done: Outcome) -> list[str]:
    ends = [done.end] if done.end and done.end not in done.lines else []
    return [*done.lines, *ends]


def is_refused(path: Path) -> str | None:
    """Return the sentence with which a file is refused, None if it opens."""
    try:
        open_trace(path).close()
    except FlexInspectError as error:
        return error.sentence()
    return None
