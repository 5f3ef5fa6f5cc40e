"""Build broken runs in a capture process, and check which findings the rules report."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from flexinspect.analysis.offline_rules import review
from flexinspect.core.errors import FlexInspectError
from flexinspect.inputs.broken_run_catalog import BROKEN_RUNS, BrokenRun
from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import load_rules
from flexinspect.trace.file.writer import add_run_facts, review_statements
from flexinspect.trace.reader import open_trace

MAX_PROCESSES = 2  # processes that build broken runs at the same time; each uses one core
_MAX_STDERR_LINES = 5

ProgressCallback = Callable[[str], None]
"""Called with what is being done, or with the name of each run that was built or failed."""


def build_exhibit(
    run: BrokenRun, path: Path, on_stage: ProgressCallback, *, repaired: bool = False
) -> None:
    """Build a broken run, or its repaired version, as a trace with its description.

    A trace that exists is left as it is. Raises `FlexInspectError` if the run cannot be built.
    """
    if path.exists():
        return
    name = f"!{run.name}" if repaired else run.name
    for _, error in list(_build_in_process({name: path}, on_stage=on_stage)):
        raise FlexInspectError(f"The broken run {run.name} could not be built: {error}.")
    facts = {**asdict(run), "repaired": repaired}
    text = " ".join([*run.tutorial_lines(), *run.answer_lines()])
    add_run_facts(path, {"exhibit": facts}, EventRecord("exhibit", text, time.time()))


def _ignore(text: str) -> None:
    """Show no progress."""


def _build_in_process(
    paths: Mapping[str, Path],
    on_built: ProgressCallback = _ignore,
    on_stage: ProgressCallback = _ignore,
    on_start: Callable[[subprocess.Popen[str]], None] = lambda _: None,
) -> Iterator[tuple[str, str]]:
    """Build runs by name; one that begins with "!" is repaired. Yield failed names with reasons.

    `on_start` gets the process.
    """
    with tempfile.TemporaryDirectory(prefix="flexinspect-museum-") as folder:
        parts = {name: Path(folder) / f"{n}.flextrace" for n, name in enumerate(paths)}
        command = [sys.executable, "-m", "flexinspect_hooks.broken_runs"]
        command += [f"{name}={part}" for name, part in parts.items()]
        with (
            (Path(folder) / "stderr").open("w+") as stderr,
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True
            ) as process,
            _kill_on_error(process),
        ):
            on_start(process)
            for line in process.stdout or ():
                result = json.loads(line)
                if "stage" in result:
                    on_stage(result["stage"])
                    continue
                name = result["name"]
                if result["error"]:
                    yield name, result["error"]
                else:
                    paths[name].parent.mkdir(parents=True, exist_ok=True)
                    shutil.move(parts[name], paths[name])  # only complete traces
                on_built(name)
            process.wait()
            stderr.seek(0)
            last_lines = stderr.read().splitlines()[-_MAX_STDERR_LINES:]
    if process.returncode:
        message = "The process that builds broken runs failed."
        raise FlexInspectError(message, hint="\n".join(last_lines))


@contextmanager
def _kill_on_error(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        process.kill()
        raise


class BrokenRunCheck(Struct, frozen=True):
    """The finding ids that the rules reported for a broken run and its repaired run.

    `found` are expected ids; `also` other errors and warnings of the broken run; `false` errors
    and warnings of the repaired run. `error` is why one of the two could not be built.
    """

    name: str
    expected: tuple[str, ...]
    found: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    false: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the fault was found, without false alarms in the repaired run."""
        return bool(self.found) and not self.false and not self.error

    def to_line(self) -> str:
        """Return the verdict in one line."""
        if self.error:
            return f"not built: {self.error}"
        missed = ["missed", f"expected {' or '.join(self.expected)}"]
        parts = [f"found {', '.join(self.found)}"] if self.found else missed
        parts += [f"also {', '.join(self.also)}"] if self.also else []
        parts += [f"false alarm {', '.join(self.false)}"] if self.false else []
        return "; ".join(parts)


def check_broken_runs(on_built: ProgressCallback | None = None) -> list[BrokenRunCheck]:
    """Build all broken runs with their repaired runs, run every rule, and check the findings."""
    with tempfile.TemporaryDirectory(prefix="flexinspect-check-") as name:
        folder = Path(name)
        # A memory peak shows only above all earlier ones of its process, so those runs come first.
        order = sorted(
            BROKEN_RUNS, key=lambda run: not any("memory." in id_ for id_ in run.expected)
        )
        shares = [_trace_paths(folder, order[n::MAX_PROCESSES]) for n in range(MAX_PROCESSES)]
        builds = _Builds(on_built or _ignore)
        with ThreadPoolExecutor(MAX_PROCESSES) as pool, builds.killed_on_error():
            errors = dict(chain.from_iterable(pool.map(builds.build, shares)))
        return [_check_broken_run(run, folder, errors) for run in BROKEN_RUNS]


class _Builds:
    """Processes that build runs, each awaited by a thread: threads cannot be interrupted."""

    def __init__(self, on_built: ProgressCallback) -> None:
        self._on_built = on_built
        self._running: list[subprocess.Popen[str]] = []
        self._is_over = False

    def build(self, share: Mapping[str, Path]) -> list[tuple[str, str]]:
        """Build some runs; return failed names with reasons."""
        return list(_build_in_process(share, self._on_built, on_start=self._add))

    def _add(self, process: subprocess.Popen[str]) -> None:
        self._running.append(process)
        if self._is_over:
            process.kill()

    @contextmanager
    def killed_on_error(self) -> Iterator[None]:
        """Kill the processes on an error, or Ctrl-C, in the body."""
        try:
            yield
        except BaseException:
            self._is_over = True
            for process in self._running:
                process.kill()
            raise


def _trace_paths(folder: Path, runs: Iterable[BrokenRun]) -> dict[str, Path]:
    names = (name for run in runs for name in (run.name, f"!{run.name}"))
    return {name: folder / f"{name}.flextrace" for name in names}


def _check_broken_run(run: BrokenRun, folder: Path, errors: Mapping[str, str]) -> BrokenRunCheck:
    broken, repaired = _trace_paths(folder, [run])
    error = errors.get(broken) or errors.get(repaired)
    if error:
        return BrokenRunCheck(run.name, run.expected, error=error)
    notes, serious = _reviewed_ids(folder / f"{broken}.flextrace")
    return BrokenRunCheck(
        run.name,
        run.expected,
        found=tuple(id_ for id_ in run.expected if id_ in notes | serious),
        also=tuple(sorted(serious - {*run.expected})),
        false=tuple(sorted(_reviewed_ids(folder / f"{repaired}.flextrace")[1])),
    )


def _reviewed_ids(path: Path) -> tuple[set[str], set[str]]:
    """Return the ids of a trace's notes, and of its other findings, after all rules have run."""
    with open_trace(path) as reader:
        if unstored := review(reader, load_rules().rules).unstored:
            reader.add_reviews(review_statements(unstored))
        found = reader.findings()
    notes = {finding.id for finding in found if finding.severity is Severity.NOTE}
    return notes, {finding.id for finding in found if finding.severity is not Severity.NOTE}
