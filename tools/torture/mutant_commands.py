"""Read damaged traces with every command, in a process that may die of it."""

from __future__ import annotations

import contextlib
import io
import random
import re
import resource
import shutil
import signal
import traceback
from pathlib import Path

import zstandard
from msgspec import Struct

from tools.torture.results import Failure
from tools.torture.trace_mutations import mutate

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures" / "traces"
MAX_S = 5.0
"""Seconds of CPU time that a command may take."""
MAX_MIB = 500
"""Memory that the process may take beyond what it takes for a sound trace."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class TooSlow(BaseException):
    """A command took longer than `MAX_S`."""


COMMANDS_PER_SEED = 5
OWN_FAULT = "This is a bug in the panel"
"""What the program says of an error that no decoder has refused."""


def commands(path: Path, out: Path) -> list[list[str]]:
    """Return the commands that read a trace; what they write goes into the folder `out`."""
    trace = str(path)
    views = ("executed", "received", "difference")
    return [
        *([command, trace, *flag] for command in ("dump", "findings") for flag in ([], ["--json"])),
        *(["show", trace, f"--step={step}"] for step in (0, 1, 3)),
        ["show", trace, "--json"],
        *(["mask", "--trace", trace, "--view", view, "--plain", "--analysis"] for view in views),
        ["mask", "--trace", trace, "--verify"],
        ["flowchart", "--trace", trace],
        ["diff", trace, trace],
        *(["export", trace, "--to", to, "-o", str(out / to)] for to in ("csv", "perfetto")),
        ["report", trace, "-o", str(out / "report.html")],
    ]


class Sound(Struct, frozen=True):
    """The undamaged traces, and the memory in MiB that the process takes for them."""

    traces: list[Path]
    base: int


def unpack(folder: Path) -> None:
    """Write the recorded traces of the test suite into a folder."""
    for packed in sorted(FIXTURES.glob("*.flextrace.zst")):
        whole = zstandard.ZstdDecompressor().decompress(packed.read_bytes())
        (folder / packed.name.removesuffix(".zst")).write_bytes(whole)


def prepare(folder: Path) -> Sound:
    """Read sound traces with every command: everything is imported before memory is measured."""
    unpack(folder)
    traces = sorted(folder.glob("*.flextrace"))
    out = folder / "out"
    out.mkdir()
    for trace in traces:
        for argv in commands(trace, out):
            _problem(argv)
    return Sound(traces, _peak_mib())


def attempt(sound: Sound, seed: int, folder: Path) -> list[Failure]:
    """Damage a copy of a trace, and return what went wrong with each command."""
    whole = sound.traces[seed % len(sound.traces)]
    failures = _run_commands(whole, folder, seed)
    grown = _peak_mib() - sound.base
    if grown > MAX_MIB:
        failures.append(Failure(kind="memory", detail=f"{grown} MiB more"))
    return failures


def _run_commands(whole: Path, folder: Path, seed: int) -> list[Failure]:
    path, failures = folder / "mutant.flextrace", []
    shutil.copyfile(whole, path)
    how = mutate(path, seed)
    for argv in random.Random(seed).sample(commands(path, folder), COMMANDS_PER_SEED):
        if (problem := _problem(argv)) is not None:
            kind, detail = problem["kind"], problem["detail"]
            failures.append(Failure(kind, detail, how, tuple(argv[:1]), whole.name))
    return failures


def _problem(argv: list[str]) -> dict[str, str] | None:
    """Run a command in this process; return what is wrong with how it ended, None if nothing."""
    from flexinspect.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
    except TooSlow:
        return {"kind": "slow", "detail": f"more than {MAX_S} s"}
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 2
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "flexinspect" in frame.filename][-1:]
        place = "".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in own)
        return {"kind": "traceback", "detail": f"{type(error).__name__}: {error!s:.200} at {place}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if code not in (0, 1, 2):
        return {"kind": "exit code", "detail": str(code)}
    if found := CONTROL.search(out.getvalue() + err.getvalue()):
        return {"kind": "control character", "detail": ascii(found[0])}
    if "Traceback (most recent" in err.getvalue():
        return {"kind": "traceback", "detail": "printed"}
    if OWN_FAULT in (said := out.getvalue() + err.getvalue()):
        at = said.index(OWN_FAULT)
        return {"kind": "own fault", "detail": said[:at].rsplit("The panel", 1)[-1].strip()[:200]}
    return None


def _stop(*_: object) -> None:
    raise TooSlow


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
