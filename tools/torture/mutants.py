"""Damaged traces, read by commands, panels, exports and the interface, in a process that lives on.

One process reads thousands of mutants, so a mutant costs milliseconds. It may die of one: a limit
on its memory and a clock that ends it are set, and the run goes on with the next mutant.
"""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import shutil
from functools import cache
from pathlib import Path

import psutil
import zstandard
from msgspec import Struct

from flexinspect.cli import main
from tools.torture.results import Failure
from tools.torture.trace_mutations import mutate
from tools.torture.trace_readers import Reader, choose, readers

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures" / "traces"
MAX_MIB = 500
"""Memory that the process may take beyond what it takes for a sound trace."""
ROOM = 2 << 30
"""Bytes of addresses that it may take beyond that; an allocation above them fails."""
HANG_S = 60.0
"""Seconds after which a mutant that never comes back from C ends the process."""
READERS_PER_SEED = 1


class Sound(Struct, frozen=True):
    """The undamaged traces, what reads them, and the memory in MiB that this takes."""

    traces: list[Path]
    readers: list[Reader]
    base: int


def unpack(folder: Path) -> None:
    """Write the recorded traces of the test suite into a folder."""
    for packed in sorted(FIXTURES.glob("*.flextrace.zst")):
        whole = zstandard.ZstdDecompressor().decompress(packed.read_bytes())
        (folder / packed.name.removesuffix(".zst")).write_bytes(whole)


def prepare(folder: Path) -> Sound:
    """Read a sound trace in every way: everything is imported before memory is measured."""
    os.environ["XDG_STATE_HOME"] = os.environ["XDG_CONFIG_HOME"] = str(folder)
    # The arguments of a command are the same each time, and a quarter of what a mutant costs.
    vars(main)["build_parser"] = cache(main.build_parser)
    unpack(folder)
    traces, sound = sorted(folder.glob("*.flextrace")), folder / "generation.flextrace"
    found = readers(sound)
    for at, reader in enumerate(found):
        out = folder / f"out-{at}"
        out.mkdir()
        if (problem := _read(reader, sound, out, at)) is not None:
            raise RuntimeError(f"{reader.name} does not read a sound trace: {problem}")
    limit = psutil.Process().memory_info().vms + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return Sound(traces, found, _peak_mib())


def attempt(sound: Sound, seed: int, folder: Path) -> list[Failure]:
    """Damage a copy of a trace, and return what went wrong with each reader."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        failures = _read_mutant(sound, seed, folder)
    finally:
        faulthandler.cancel_dump_traceback_later()
    grown = _peak_mib() - sound.base
    if grown > MAX_MIB:
        failures.append(Failure(kind="memory", detail=f"{grown} MiB more"))
    return failures


def _read_mutant(sound: Sound, seed: int, folder: Path) -> list[Failure]:
    rng = random.Random(seed)
    whole = rng.choice(sound.traces)
    path, failures = folder / "mutant.flextrace", []
    shutil.copyfile(whole, path)
    how = mutate(path, seed)
    for at, reader in enumerate(choose(sound.readers, seed, READERS_PER_SEED, rng)):
        out = folder / f"out-{at}"
        out.mkdir()
        if (problem := _read(reader, path, out, seed)) is not None:
            failures.append(Failure(*problem, how, (reader.name,), whole.name))
    return failures


def _read(reader: Reader, trace: Path, out: Path, seed: int) -> tuple[str, str] | None:
    before = Path.cwd()
    os.chdir(out)  # the interface saves files in the current folder
    try:
        found = reader.problem(trace, out, seed)
    finally:
        os.chdir(before)
    return None if found is None else (found.kind, found.detail)


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
