"""Long runs: memory, descriptors and threads stay flat, and programs do not disturb each other.

Seeds below 10 are the short form of a kind, later ones the long form: 100,000 steps in 1,000
generations, and an hour of an interface that looks for changes five times a second.
"""

from __future__ import annotations

import gc
import io
import random
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path

import psutil
from msgspec import Struct

from flexinspect.panels.base import Missing, Request, TracePlace
from flexinspect.panels.panel_registry import load_panel
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import GenerationEnd
from flexinspect.trace.file.connections import wal_bytes
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from tools.torture import recordings
from tools.torture.forks import Child, Tell, run_child
from tools.torture.live_faults import follow
from tools.torture.recordings import NAME
from tools.torture.results import Failure

N_GENERATIONS = (50, 1000)
STEPS_EACH = 100
BATCH = 10
N_LOOKS = (600, 18_000)
LOOKS_PER_STEP = 4
PANELS = ("tokens", "logits", "memory", "findings", "run")
MAX_GROWTH_MIB = 24
"""Growth of the memory between the first fifth of a run and its end."""
MAX_WAL_MIB = 80
"""The WAL is folded in at 64 MiB, or between generations."""
SOAK_S = 3000.0
Kind = Callable[[bool, int, Path], list[str]]


class Usage(Struct, frozen=True):
    """What a process uses: memory in MiB, descriptors, threads."""

    memory: float
    files: int
    threads: int


def usage() -> Usage:
    """Return what this process uses now."""
    gc.collect()
    me = psutil.Process()
    return Usage(me.memory_info().rss / 2**20, me.num_fds(), threading.active_count())


def growth(first: Usage, last: Usage) -> list[str]:
    """Return what has grown."""
    grown = [f"memory: {first.memory:.0f} to {last.memory:.0f} MiB"]
    found = grown if last.memory - first.memory > MAX_GROWTH_MIB else []
    if last.files > first.files:
        found.append(f"descriptors: {first.files} to {last.files}")
    if last.threads > first.threads:
        found.append(f"threads: {first.threads} to {last.threads}")
    return found


def prepare(folder: Path) -> None:
    """Import what is needed."""
    recordings.import_all(folder)


def attempt(_: None, seed: int, folder: Path) -> list[Failure]:
    """Run one kind."""
    kind, is_long = KINDS[seed % len(KINDS)], seed >= 10
    how = f"{(kind.__doc__ or '').strip()} {'long' if is_long else 'short'}"

    def body(tell: Tell) -> None:
        for each in kind(is_long, seed, folder):
            tell(each)

    done = run_child(body, SOAK_S)
    wrong = [*done.lines, *([done.end] if done.end and done.end not in done.lines else [])]
    return [Failure("soak", each, how) for each in wrong]


def many_steps(is_long: bool, seed: int, folder: Path) -> list[str]:
    """Record many generations, beside a reader."""
    path, first = folder / NAME, None
    n_generations, biggest = N_GENERATIONS[is_long], 0
    with TraceWriter.create(path, {"model": "torture"}) as writer, open_trace(path) as reader:
        for number in range(n_generations):
            writer.begin_generation(recordings.generation(number))
            for start in range(0, STEPS_EACH, BATCH):
                steps = range(start, start + BATCH)
                writer.write_steps([recordings.step(each, number) for each in steps])
            writer.end_generation(GenerationEnd(number, "finished", "text", (), "eos", 1010.0))
            reader.changed()
            reader.record(number, STEPS_EACH - 1)
            biggest = max(biggest, wal_bytes(path))
            if number == n_generations // 5:
                first = usage()
        last = usage()
    assert first is not None
    wrong = growth(first, last)
    if biggest > MAX_WAL_MIB << 20:
        wrong.append(f"the WAL grew to {biggest >> 20} MiB")
    with open_trace(path) as reader:
        n_steps = sum(reader.n_steps(row.generation) for row in reader.generations())
    if n_steps != n_generations * STEPS_EACH:
        wrong.append(f"{n_steps} steps of {n_generations * STEPS_EACH} are in the trace")
    return wrong


def long_look(is_long: bool, seed: int, folder: Path) -> list[str]:
    """An interface follows a recording: it looks for changes, and loads panels after each."""
    path, first, step = folder / NAME, None, 0
    n_looks = N_LOOKS[is_long]
    panels = [load_panel(name) for name in PANELS]
    with TraceWriter.create(path, {"model": "torture"}) as writer, open_trace(path) as reader:
        writer.begin_generation(recordings.generation(0))
        source = Source(reader)
        for look in range(n_looks):
            if look % LOOKS_PER_STEP == 0:
                writer.write_step(recordings.step(step, 0))
                step += 1
            if reader.changed():
                panel = panels[step % len(panels)]
                place = TracePlace(0, 0, step - 1, 0, 0)
                with suppress(Missing):
                    panel.describe(panel.load(source, Request(place, panel.initial_options, 80)))
            if look == n_looks // 5:
                first = usage()
        last = usage()
    assert first is not None
    return growth(first, last)


COMMANDS = (
    *(["dump"], ["findings"], ["show"], ["show", "--json"], ["findings", "--json"]),
    *(["dump", "--json"], ["show", "--panel", "logits"], ["show", "--panel", "run"]),
    *(["show", "--panel", "tokens"], ["export", "--to", "csv", "-o"]),
)


def many_programs(is_long: bool, seed: int, folder: Path) -> list[str]:
    """Two viewers and ten commands read a trace at once while it is recorded."""
    writer = Child(partial(_record, folder, seed, 20 if is_long else 4))
    writer.wait_for("step 0 2")
    viewers = [Child(partial(follow, folder)) for _ in range(2)]
    commands = [Child(partial(_command, folder, words)) for words in COMMANDS]
    ends = [one.finish() for one in commands]
    wrong = [f"{words}: {end}" for words, end in zip(COMMANDS, ends, strict=True) if end]
    wrong += [line for one in commands for line in one.lines if line.startswith("code ")]
    wrong += [f"the writer ended with {end}" for end in [writer.finish()] if end]
    wrong += [f"a viewer ended with {end}" for one in viewers if (end := one.finish())]
    if "closed" not in writer.lines:
        wrong.append("the writer did not close the trace")
    told = tuple(line for line in writer.lines if not line.startswith(("says ", "raised ")))
    return wrong + recordings.judge(folder / NAME, told, folder)


def _record(folder: Path, seed: int, n_generations: int, tell: Tell) -> None:
    recordings.write(folder / NAME, tell, seed, n_generations, 40, pause_s=0.01)


def _command(folder: Path, words: list[str], tell: Tell) -> None:
    from flexinspect.cli.main import main

    name, *flags = words
    out = [str(folder / f"out-{random.random()}")] if flags[-1:] == ["-o"] else []
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main([name, str(folder / NAME), *flags, *out])
    if code not in (0, 1) or "Traceback" in said.getvalue():
        tell(f"code {code} of {' '.join(words)}: {said.getvalue()[-200:]!a}")


KINDS: tuple[Kind, ...] = (many_steps, long_look, many_programs)
