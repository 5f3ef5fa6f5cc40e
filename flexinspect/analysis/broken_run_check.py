"""Building exhibits in the capture process, and checking what the rules say of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from flexinspect.analysis.offline_rules import review
from flexinspect.core.errors import FlexInspectError
from flexinspect.inputs.broken_run_catalog import BROKEN_RUNS, BrokenRun
from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import load_rules
from flexinspect.trace.file.writer import add_run_facts, review_statements
from flexinspect.trace.reader import open_trace

MAX_PROCESSES = 2
"""Processes that build at the same time; each takes a core."""

_MAX_STDERR_LINES = 5

BuiltCallback = Callable[[str], None]


def build_broken_runs(paths: Mapping[str, Path], on_built: BuiltCallback | None = None) -> None:
    """Build exhibits (of a name that begins with "!", the repaired twin) as traces.

    `told` hears each name when it is done. Raises `FlexInspectError` for the first that failed.
    """
    errors = dict(_build_in_process(paths, on_built or (lambda name: None)))
    for name, error in errors.items():
        raise FlexInspectError(f"The exhibit {name} could not be built: {error}.")


def _build_in_process(
    paths: Mapping[str, Path], on_built: BuiltCallback
) -> Iterator[tuple[str, str]]:
    """Yield the names that could not be built, with the reason."""
    with tempfile.TemporaryDirectory(prefix="flexinspect-museum-") as folder:
        parts = {name: Path(folder) / f"{n}.flextrace" for n, name in enumerate(paths)}
        words = [f"{name}={part}" for name, part in parts.items()]
        with (
            subprocess.Popen(
                [sys.executable, "-m", "flexinspect_hooks.broken_runs", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as process,
            ThreadPoolExecutor(1) as pool,
        ):
            heard = pool.submit(_read_stderr_tail, process)
            yield from _move_results(process, paths, parts, on_built)
            last = heard.result()
    if process.returncode:
        raise FlexInspectError(
            "The process that builds exhibits failed.", hint="\n".join(last) or None
        )


def _read_stderr_tail(process: subprocess.Popen[str]) -> list[str]:
    assert process.stderr is not None
    return process.stderr.read().splitlines()[-_MAX_STDERR_LINES:]


def _move_results(
    process: subprocess.Popen[str],
    paths: Mapping[str, Path],
    parts: Mapping[str, Path],
    on_built: BuiltCallback,
) -> Iterator[tuple[str, str]]:
    assert process.stdout is not None
    for line in process.stdout:
        said = json.loads(line)
        name = said["name"]
        if said["error"]:
            yield name, said["error"]
        else:
            paths[name].parent.mkdir(parents=True, exist_ok=True)
            shutil.move(parts[name], paths[name])  # whole or not at all
        on_built(name)


def annotate_trace(path: Path, run: BrokenRun, *, repaired: bool) -> None:
    """Put the story into the trace, where the run panel and the events tell it."""
    facts = {**asdict(run), "repaired": repaired}
    text = " ".join(run.tutorial_lines())
    add_run_facts(path, {"exhibit": facts}, EventRecord("exhibit", text, time.time()))


# -- checking --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BrokenRunCheck:
    """What the rules said of an exhibit and its repaired twin, as ids.

    `found` are expected ids; `also` other errors and warnings of the broken run; `false` errors
    and warnings of the repaired one. `error` says why one of the two could not be built.
    """

    name: str
    expected: tuple[str, ...]
    found: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    false: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the fault was found and nothing else was made up."""
        return bool(self.found) and not self.false and not self.error

    def to_line(self) -> str:
        """Return the verdict in one line."""
        if self.error:
            return f"not built: {self.error}"
        parts = [f"found {', '.join(self.found)}" if self.found else "missed"]
        if not self.found:
            parts.append(f"expected {' or '.join(self.expected)}")
        parts += [f"also {', '.join(self.also)}"] if self.also else []
        parts += [f"false alarm {', '.join(self.false)}"] if self.false else []
        return "; ".join(parts)


def check_broken_runs(
    on_built: BuiltCallback | None = None, runs: Iterable[BrokenRun] = BROKEN_RUNS
) -> list[BrokenRunCheck]:
    """Build all exhibits with their twins, let every rule look, and judge."""
    runs = list(runs)
    with tempfile.TemporaryDirectory(prefix="flexinspect-check-") as name:
        folder = Path(name)
        # A peak of memory is seen only above all earlier ones of its process: those come first.
        order = sorted(runs, key=lambda one: not any("memory." in i for i in one.expected))
        shares = [order[n::MAX_PROCESSES] for n in range(MAX_PROCESSES)]
        with ThreadPoolExecutor(MAX_PROCESSES) as pool:
            hear = on_built or (lambda name: None)
            failed = pool.map(
                lambda part: list(_build_in_process(_trace_paths(folder, part), hear)), shares
            )
            errors = dict(chain.from_iterable(failed))
        return [_check_broken_run(one, folder, errors) for one in runs]


def _trace_paths(folder: Path, runs: Iterable[BrokenRun]) -> dict[str, Path]:
    names = (name for one in runs for name in (one.name, f"!{one.name}"))
    return {name: folder / f"{name}.flextrace" for name in names}


def _check_broken_run(run: BrokenRun, folder: Path, errors: Mapping[str, str]) -> BrokenRunCheck:
    broken, repaired = _trace_paths(folder, [run])
    error = errors.get(broken) or errors.get(repaired)
    if error:
        return BrokenRunCheck(run.name, run.expected, error=error)
    said = _reviewed_findings(folder / f"{broken}.flextrace")
    bad = {id_ for id_, severity in said if severity is not Severity.NOTE}
    twin = _reviewed_findings(folder / f"{repaired}.flextrace")
    ids = {id_ for id_, _ in said}
    return BrokenRunCheck(
        run.name,
        run.expected,
        found=tuple(id_ for id_ in run.expected if id_ in ids),
        also=tuple(sorted(bad - {*run.expected})),
        false=tuple(sorted({id_ for id_, severity in twin if severity is not Severity.NOTE})),
    )


def _reviewed_findings(path: Path) -> set[tuple[str, Severity]]:
    with open_trace(path) as reader:
        done = review(reader, load_rules().rules)
        if done.unstored:
            reader.add_reviews(review_statements(done.unstored))
        return {(finding.id, finding.severity) for finding in reader.findings()}
