"""A process with a model that is recorded: killed at crash points and at random, and under faults.

The process is a fork of one that has torch loaded and a tiny random Llama built. It acknowledges a
step when `TraceWriter` has returned from writing it, and a token when the model has returned it.
"""

from __future__ import annotations

import errno
import itertools
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from flexinspect.core.errors import FlexInspectError, TraceWriteError
from flexinspect.records.step import StepRecord
from flexinspect.trace import codec
from flexinspect.trace.file import connections
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from tools.torture import faults, forks, recordings
from tools.torture.faults import Fault
from tools.torture.forks import Child, Tell, run_child
from tools.torture.recordings import NAME
from tools.torture.results import Failure

N_TOKENS = 10
N_PROMPT = 5


class Prepared(Struct, frozen=True):
    """The model, its answer without a recording, the seconds it takes, and the crash points."""

    model: Any
    answers: tuple[str, ...]
    seconds: float
    points: tuple[Fault, ...]


def prepare(folder: Path) -> Prepared:
    """Build the model and run it once without a fault."""
    import torch

    torch.set_num_threads(1)
    model = _tiny_model()
    recordings.import_all(folder)
    generate(model, folder / f"imports-model-{NAME}", lambda line: None)
    answers: list[str] = []
    generate(model, None, answers.append)
    place = folder / "healthy"
    place.mkdir()
    started = time.monotonic()
    done = run_child(partial(_counted, model, place))
    seconds = time.monotonic() - started
    told = tuple(line for line in done.lines if not line.startswith("count"))
    if done.end or (wrong := problems(place / NAME, told)):
        raise RuntimeError(f"the model fails without a fault: {done.end} {wrong}")
    points = []
    for line in done.lines:
        if line.startswith("count "):
            _, op, role, n_calls = line.split()
            kills = faults.KILLS if op == "write" else faults.KILLS[:2]
            numbers = range(1, int(n_calls) + 1)
            points += [Fault(kill, op, role, n, n) for n in numbers for kill in kills]
    random.Random(0).shuffle(points)
    return Prepared(
        model, tuple(a for a in answers if a.startswith("token")), seconds, tuple(points)
    )


def _tiny_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def generate(model: Any, path: Path | None, tell: Tell) -> None:
    """Choose `N_TOKENS` tokens with a loop like that of a user; record them at `path`, if any."""
    import torch

    import flexinspect

    def loop() -> None:
        ids = torch.arange(3, 3 + N_PROMPT)[None]
        cache = None
        for number in range(N_TOKENS):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            tell(f"token {number} {int(ids)}")

    if path is None:
        loop()
        return
    TraceWriter.write_steps = _telling(TraceWriter.write_steps, tell)  # type: ignore[method-assign]
    watch = flexinspect.watch(model, out=path, level="advanced")
    with watch:
        tell("created")
        loop()
    tell("closed")


def _telling(write: Callable[..., None], tell: Tell) -> Callable[..., None]:
    """Return `write_steps` that tells of each step once it has been written."""

    def write_steps(self: TraceWriter, records: Sequence[StepRecord]) -> None:
        try:
            write(self, records)
            stored = range(0 if self.failed else len(records))
        except TraceWriteError as error:
            tell(f"says {' '.join(error.sentence().split())}")
            stored = error.stored  # type: ignore[assignment]
            raise
        finally:
            for index in stored:
                tell(f"step {records[index].generation} {records[index].step}")

    return write_steps


def _counted(model: Any, folder: Path, tell: Tell) -> None:
    faults.disarm()
    generate(model, folder / NAME, tell)
    for (op, role), n_calls in faults.counts().items():
        tell(f"count {op} {role} {n_calls}")


def problems(path: Path, told: Sequence[str]) -> list[str]:
    """Return what of the acknowledged steps is not in the trace."""
    if "created" not in told and (not path.exists() or not path.stat().st_size):
        return []
    with open_trace(path) as reader, reader.snapshot():
        found = {
            (row.generation, one.step)
            for row in reader.generations()
            for one in reader.steps(row.generation)
            if reader.record(row.generation, one.step) is not None
        }
        steps = [line.split()[1:] for line in told if line.startswith("step ")]
        wrong = [f"step {of} {n} is lost" for of, n in steps if (int(of), int(n)) not in found]
        is_silent = not any(line.startswith("says ") for line in told)  # of an end not written
        if "closed" in told and is_silent and reader.state not in ("finished", "failed"):
            wrong.append(f"the state is {reader.state}")
    return wrong


def _tell_problems(path: Path, told: Sequence[str], tell: Tell) -> None:
    for each in problems(path, told):
        tell(each)


def _judge(prepared: Prepared, folder: Path, child: Child, end: str, how: str) -> list[Failure]:
    """Check the trace, and the tokens that the model has chosen up to its end."""
    wrong = [] if end in ("killed", "") else [f"ended with {end}"]
    found = run_child(partial(_tell_problems, folder / NAME, child.lines))
    wrong += [*found.lines, *([found.end] if found.end and found.end not in found.lines else [])]
    tokens = tuple(line for line in child.lines if line.startswith("token "))
    if tokens != prepared.answers[: len(tokens)]:
        wrong.append("the model chose other tokens")
    if not end and len(tokens) < N_TOKENS:
        wrong.append("the model did not go on")
    return [Failure(kind="model process", detail=each, how=how) for each in wrong]


def attempt_kill(prepared: Prepared, seed: int, folder: Path) -> list[Failure]:
    """Kill the process at a crash point (even seeds) or at a random moment (odd seeds)."""
    rng = random.Random(seed)
    fault = prepared.points[seed // 2 % len(prepared.points)] if seed % 2 == 0 else None

    def body(tell: Tell) -> None:
        if fault is not None:
            fault.arm()
        generate(prepared.model, folder / NAME, tell)

    child = Child(body)
    moment = rng.uniform(0, 1.1 * prepared.seconds)
    if fault is None:
        time.sleep(moment)
        child.send(signal.SIGKILL)
    end = child.finish()
    how = f"after {1000 * moment:.1f} ms" if fault is None else fault.words()
    return _judge(prepared, folder, child, end, how)


# -- faults that it must survive -------------------------------------------------------------------


def _no_memory(rng: random.Random) -> None:
    """Memory fails for a moment while a record is encoded or written."""
    place, name = rng.choice(((codec, "encode_step"), (connections, "execute_all")))
    real, calls = getattr(place, name), itertools.count()
    first = rng.randint(0, 8)

    def fail(*args: Any) -> Any:
        if first <= next(calls) < first + 2:
            raise MemoryError
        return real(*args)

    setattr(place, name, fail)


def _failing_calls(rng: random.Random) -> None:
    """A call fails for good."""
    role = rng.choice(("trace", "wal", "shm"))
    op = rng.choice(("write", "sync", "lock", "open"))
    code = rng.choice((errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT))
    Fault("fail", op, role, rng.randint(1, 30), faults.EVER, code).arm()


def _slow_disk(rng: random.Random) -> None:
    """Each call takes 20 ms."""
    Fault("slow", None, None, rng.randint(1, 60), faults.EVER, 20).arm()


def _few_files(rng: random.Random) -> None:
    """No more descriptors can be opened (RLIMIT_NOFILE)."""
    n_open = forks.highest_descriptor() + rng.randint(2, 6)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_open, n_open))


def _small_files(rng: random.Random) -> None:
    """Files may not grow beyond a size (RLIMIT_FSIZE)."""
    size = rng.randint(1, 300_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _clock_back(rng: random.Random) -> None:
    """The clock goes back each time that it is read."""
    faults.turn_clock_back(rng.choice((1, 3600)))


def _stopped(rng: random.Random) -> None:
    """The process is stopped and continued (SIGSTOP), several times."""


INNER = (_no_memory, _failing_calls, _slow_disk, _few_files, _small_files, _clock_back, _stopped)


def attempt_fault(prepared: Prepared, seed: int, folder: Path) -> list[Failure]:
    """Let a fault happen within the process: the model goes on, and chooses the same tokens."""
    rng = random.Random(seed)
    inner = INNER[seed % len(INNER)]

    def body(tell: Tell) -> None:
        sys.stderr = _Told(tell)
        inner(rng)
        try:
            generate(prepared.model, folder / NAME, tell)
        except FlexInspectError as error:  # the trace could not be created
            tell(recordings.said(error))
            generate(prepared.model, None, tell)

    child = Child(body)
    if inner is _stopped:
        for _ in range(3):
            time.sleep(rng.uniform(0, prepared.seconds / 3))
            child.send(signal.SIGSTOP)
            time.sleep(0.02)
            child.send(signal.SIGCONT)
    end = child.finish()
    how = " ".join((inner.__doc__ or "").split())
    failures = _judge(prepared, folder, child, end, how)
    steps = {line for line in child.lines if line.startswith("step ")}
    said = [line for line in child.lines if line.startswith("says ")]
    if len(steps) < N_TOKENS and not said:
        failures.append(Failure("model process", "nothing was said of what is lost", how))
    return failures


class _Told:
    """Takes what a process prints on stderr, and tells it."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def write(self, text: str) -> int:
        if text.strip():
            self._tell(f"says {' '.join(text.split())}")
        return len(text)

    def flush(self) -> None:
        """Do nothing."""

    def isatty(self) -> bool:
        return False
