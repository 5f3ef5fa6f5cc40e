"""Which traces of a folder are the ranks of one run, and how each of them ended."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.environment import command_path, is_recorder_alive
from flexinspect.core.errors import TraceError, UsageError
from flexinspect.core.rank_environment import RANK_SUFFIX
from flexinspect.core.text import did_you_mean, plural
from flexinspect.rules.attention.kernel_failures import CRASHED_EVENT, NOT_RETURNED_EVENT
from flexinspect.rules.run_failures import ERROR_EVENT
from flexinspect.trace.reader import TraceReader, open_trace

TRACE_SUFFIX = ".flextrace"
_TIME = re.compile(r"-\d{8}-\d{6}(-\d+)?$")
"""The end of a default name: ranks that start in different seconds have different ones."""

_MAX_LISTED = 5  # traces of single processes that are named at most

STOPPED = "stopped"
"""The state of a trace whose process has gone without finishing it."""


class RankTrace(Struct, frozen=True):
    """The trace of one rank.

    `state` is that of the trace, or `STOPPED`. `last` is the newest generation and its last step,
    None without any step; `error` is the exception that the rank recorded last.
    """

    rank: int
    path: Path
    state: str
    last: tuple[int, int] | None = None
    local_rank: int | None = None
    hostname: str = ""
    started_at: float = 0.0
    error: str = ""


class RankRun(Struct, frozen=True):
    """The traces of one run, by rank. `missing` are ranks without a trace in the folder."""

    name: str
    world_size: int
    traces: tuple[RankTrace, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without a trace."""
        known = {one.rank for one in self.traces}
        return tuple(rank for rank in range(self.world_size) if rank not in known)

    @property
    def stopped(self) -> tuple[RankTrace, ...]:
        """Ranks that ended without finishing, those with the fewest steps first."""
        ended = [one for one in self.traces if one.state not in ("finished", "recording")]
        return tuple(sorted(ended, key=lambda one: (one.last or (-1, -1), one.state, one.rank)))

    @property
    def hostnames(self) -> tuple[str, ...]:
        """The machines of the ranks, each once."""
        return tuple(dict.fromkeys(one.hostname for one in self.traces))


def find_run(path: Path, name: str | None = None) -> tuple[RankRun, list[str]]:
    """Return the run of a folder, or that of a trace of a rank, and remarks on what was left out.

    Of several runs in a folder the newest is taken, or the one of this name. Raises `UsageError`
    for a path without traces of ranks, and for an unknown name.
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        what = f"{path} does not exist."
        raise UsageError(what, hint="Name a folder with the traces of the ranks.")
    runs, notes = find_runs(folder)
    if path != folder:
        runs = [run for run in runs if any(one.path.samefile(path) for one in run.traces)]
    if not runs:
        raise _without_ranks(path, notes)
    if name is not None:
        return _named(runs, name), notes
    if others := [run.name for run in runs[1:]]:
        notes.append(f"Also in {folder}, shown with --run: {', '.join(others)}.")
    return runs[0], notes


def _without_ranks(path: Path, notes: Sequence[str]) -> UsageError:
    """Return what to say of a path without traces of ranks; `notes` are of damaged traces."""
    if not path.is_dir():
        what = f"{path} is not the trace of a rank of a distributed run."
        opened = f"flexinspect open {command_path(path)} shows what it is."
        return UsageError(what, hint=" ".join(notes) or opened)
    what = f"{path} holds no trace of a rank of a distributed run."
    if newest := [*islice(_single_traces(path), _MAX_LISTED)]:
        n = len([*path.glob(f"*{TRACE_SUFFIX}")]) - len(notes)
        names = ", ".join(one.name for one in newest)
        listed = f", the newest: {names}" if n > 1 else ""
        opened = f"flexinspect open {command_path(newest[0])} shows one."
        found = f"It has {plural(n, 'trace')} of single processes{listed}."
        return UsageError(what, hint="\n".join([f"{found} {opened}", *notes]))
    if notes:
        return UsageError(what, hint=" ".join(notes))
    hint = "Record one: torchrun --nproc-per-node 2 -m flexinspect run script.py"
    return UsageError(what, hint=hint)


def _single_traces(folder: Path) -> Iterator[Path]:
    """Yield the traces of a folder that can be read, the newest first."""
    files = folder.glob(f"*{TRACE_SUFFIX}")
    for path in sorted(files, key=lambda file: file.lstat().st_mtime, reverse=True):
        with suppress(TraceError):
            open_trace(path).close()
            yield path


def _named(runs: Sequence[RankRun], name: str) -> RankRun:
    names = [run.name for run in runs]
    if name not in names:
        hint = did_you_mean(name, names, f"There are: {', '.join(names)}.")
        raise UsageError(f"There is no run {name!r}.", hint=hint)
    return runs[names.index(name)]


def find_runs(folder: Path) -> tuple[list[RankRun], list[str]]:
    """Return the runs of ranks in a folder, the newest first, and which traces cannot be read."""
    groups: dict[tuple[str, int, str], dict[int, list[RankTrace]]] = {}
    notes = []
    for path in sorted(folder.glob(f"*{TRACE_SUFFIX}")):
        try:
            with open_trace(path) as reader:
                facts, trace = reader.run(), _read_trace(reader)
        except TraceError as error:
            notes.append(f"Left out: {error.message}")
            continue
        if trace is not None:
            key = (_run_name(path), int(facts["world_size"]), str(facts.get("launch", "")))
            groups.setdefault(key, {}).setdefault(trace.rank, []).append(trace)
    runs = [
        _judge_states(RankRun(name, size, traces))
        for (name, size, _), by_rank in groups.items()
        for traces in _split(by_rank)
    ]
    newest_first = sorted(runs, key=lambda run: -max(one.started_at for one in run.traces))
    return _with_unique_names(newest_first), notes


def _with_unique_names(runs: Sequence[RankRun]) -> list[RankRun]:
    """Number runs of the same name: the newest keeps it."""
    counts: dict[str, int] = {}
    named = []
    for run in runs:
        counts[run.name] = n = counts.get(run.name, 0) + 1
        named.append(run if n == 1 else replace(run, name=f"{run.name}~{n}"))
    return named


def _run_name(path: Path) -> str:
    """Return the name that all ranks of a run share: "train" of "train-rank1.flextrace"."""
    stem = path.stem
    number = re.search(r"-rank\d+(-\d+)$", stem)  # a training that began again
    again = number[1] if number else ""
    stem = RANK_SUFFIX.sub("", stem.removesuffix(again) if again else stem)
    return _TIME.sub("", stem) + again


def _split(by_rank: Mapping[int, list[RankTrace]]) -> Iterator[tuple[RankTrace, ...]]:
    """Yield the runs of one name: the newest trace of each rank, then the ones before."""
    ordered = {
        rank: sorted(traces, key=lambda one: -one.started_at) for rank, traces in by_rank.items()
    }
    for index in range(max(map(len, ordered.values()))):
        chosen = (traces[index] for traces in ordered.values() if index < len(traces))
        yield tuple(sorted(chosen, key=lambda one: one.rank))


_ERROR_EVENTS = (ERROR_EVENT, CRASHED_EVENT, NOT_RETURNED_EVENT)
"""Kinds of the events that say why a process ended: an exception, or a signal."""


def _read_trace(reader: TraceReader) -> RankTrace | None:
    """Return the facts of a trace, None if it is not of a rank."""
    run = reader.run()
    rank, size = run.get("rank"), run.get("world_size")
    if not isinstance(rank, int) or not isinstance(size, int) or not 0 <= rank < size:
        return None
    started, local, host = (run.get(name) for name in ("started_at", "local_rank", "hostname"))
    errors = [row.event.text for row in reader.events() if row.event.kind in _ERROR_EVENTS]
    trace = RankTrace(
        rank=rank,
        path=reader.path,
        state=reader.state,
        last=_last_step(reader),
        local_rank=local if isinstance(local, int) else None,
        hostname=host if isinstance(host, str) else "",
        started_at=float(started) if isinstance(started, int | float) else 0.0,
        error=errors[-1] if errors else _stop_reason(reader),
    )
    is_here = trace.hostname in ("", socket.gethostname())
    is_gone = trace.state == "recording" and is_here and not is_recorder_alive(run)
    return replace(trace, state=STOPPED) if is_gone else trace


def _stop_reason(reader: TraceReader) -> str:
    """Return why the last generation or training failed; empty if it did not."""
    rows = reader.generations()
    return rows[-1].stop_reason if rows and rows[-1].state == "failed" else ""


def _last_step(reader: TraceReader) -> tuple[int, int] | None:
    for row in reversed(reader.generations()):
        last = reader.last_step(row.generation)
        if last is not None:
            return row.generation, last
    return None


def _judge_states(run: RankRun) -> RankRun:
    """Let a rank of another machine that never ended count as stopped, once another rank ended."""
    if all(one.state == "recording" for one in run.traces):
        return run
    here = ("", socket.gethostname())
    traces = tuple(
        replace(one, state=STOPPED)
        if one.state == "recording" and one.hostname not in here
        else one
        for one in run.traces
    )
    return replace(run, traces=traces)


@contextmanager
def open_ranks(run: RankRun) -> Iterator[tuple[TraceReader, ...]]:
    """Open the traces of a run, each as it is now, and close them at the end."""
    with ExitStack() as opened:
        readers = tuple(opened.enter_context(open_trace(one.path)) for one in run.traces)
        for reader in readers:
            opened.enter_context(reader.snapshot())
        yield readers


def split_sizes(readers: Sequence[TraceReader]) -> tuple[int, int]:
    """Return how many ranks share each layer (tensor parallel) and each parameter; 1 for none."""
    facts: list[Mapping[str, Any]] = [reader.run().get("model") or {} for reader in readers]
    sizes = []
    for name in ("tp_size", "shards"):
        found = [n for one in facts if isinstance(n := one.get(name), int)]
        sizes.append(max(found, default=1))
    return sizes[0], sizes[1]
