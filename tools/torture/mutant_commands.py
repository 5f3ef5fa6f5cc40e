"""Read damaged traces with every command, in a process that may die of it."""

from __future__ import annotations

import random
import resource
import shutil
from pathlib import Path

import zstandard
from msgspec import Struct

from tools.torture.judged import Problem, problem_of
from tools.torture.results import Failure
from tools.torture.trace_mutations import mutate

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures" / "traces"
MAX_MIB = 500
"""Memory that the process may take beyond what it takes for a sound trace."""
COMMANDS_PER_SEED = 5


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
            place = tuple(argv[:1]), whole.name
            failures.append(Failure(problem.kind, problem.detail, how, *place))
    return failures


def _problem(argv: list[str]) -> Problem | None:
    from flexinspect.cli.main import main

    return problem_of(lambda: main(argv))


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
