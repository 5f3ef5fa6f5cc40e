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

from flexinspect.errors import FlexInspectError
from flexinspect.findings import Severity
from flexinspect.museum import EXHIBITS, Exhibit
from flexinspect.records import EventRecord
from flexinspect.review import review
from flexinspect.rules.catalogue import catalogue
from flexinspect.trace.append import annotate, statements
from flexinspect.trace.reader import open_trace

AT_ONCE = 2
"""Processes that build at the same time; each takes a core."""

_LAST_LINES = 5

Told = Callable[[str], None]


def built(wanted: Mapping[str, Path], told: Told | None = None) -> None:
    """Build exhibits (of a name that begins with "!", the repaired twin) as traces.

    `told` hears each name when it is done. Raises `FlexInspectError` for the first that failed.
    """
    errors = dict(_build(wanted, told or (lambda name: None)))
    for name, error in errors.items():
        raise FlexInspectError(f"The exhibit {name} could not be built: {error}.")


def _build(wanted: Mapping[str, Path], told: Told) -> Iterator[tuple[str, str]]:
    """Yield the names that could not be built, with the reason."""
    with tempfile.TemporaryDirectory(prefix="flexinspect-museum-") as folder:
        parts = {name: Path(folder) / f"{n}.flextrace" for n, name in enumerate(wanted)}
        words = [f"{name}={part}" for name, part in parts.items()]
        with (
            subprocess.Popen(
                [sys.executable, "-m", "flexinspect_hooks.museum", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as process,
            ThreadPoolExecutor(1) as pool,
        ):
            heard = pool.submit(_last_lines, process)
            yield from _results(process, wanted, parts, told)
            last = heard.result()
    if process.returncode:
        raise FlexInspectError(
            "The process that builds exhibits failed.", hint="\n".join(last) or None
        )


def _last_lines(process: subprocess.Popen[str]) -> list[str]:
    assert process.stderr is not None
    return process.stderr.read().splitlines()[-_LAST_LINES:]


def _results(
    process: subprocess.Popen[str],
    wanted: Mapping[str, Path],
    parts: Mapping[str, Path],
    told: Told,
) -> Iterator[tuple[str, str]]:
    assert process.stdout is not None
    for line in process.stdout:
        said = json.loads(line)
        name = said["name"]
        if said["error"]:
            yield name, said["error"]
        else:
            wanted[name].parent.mkdir(parents=True, exist_ok=True)
            shutil.move(parts[name], wanted[name])  # whole or not at all
        told(name)


def say_in_trace(path: Path, about: Exhibit, *, repaired: bool) -> None:
    """Put the story into the trace, where the run panel and the events tell it."""
    facts = {**asdict(about), "repaired": repaired}
    text = " ".join(about.lines())
    annotate(path, {"exhibit": facts}, EventRecord("exhibit", text, time.time()))


# -- checking --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
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

    def words(self) -> str:
        """Return the verdict in one line."""
        if self.error:
            return f"not built: {self.error}"
        parts = [f"found {', '.join(self.found)}" if self.found else "missed"]
        if not self.found:
            parts.append(f"expected {' or '.join(self.expected)}")
        parts += [f"also {', '.join(self.also)}"] if self.also else []
        parts += [f"false alarm {', '.join(self.false)}"] if self.false else []
        return "; ".join(parts)


def check(told: Told | None = None, exhibits: Iterable[Exhibit] = EXHIBITS) -> list[Verdict]:
    """Build all exhibits with their twins, let every rule look, and judge."""
    exhibits = list(exhibits)
    with tempfile.TemporaryDirectory(prefix="flexinspect-check-") as name:
        folder = Path(name)
        # A peak of memory is seen only above all earlier ones of its process: those come first.
        order = sorted(exhibits, key=lambda one: not any("memory." in i for i in one.expected))
        shares = [order[n::AT_ONCE] for n in range(AT_ONCE)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            hear = told or (lambda name: None)
            failed = pool.map(lambda part: list(_build(_paths(folder, part), hear)), shares)
            errors = dict(chain.from_iterable(failed))
        return [_verdict(one, folder, errors) for one in exhibits]


def _paths(folder: Path, exhibits: Iterable[Exhibit]) -> dict[str, Path]:
    names = (name for one in exhibits for name in (one.name, f"!{one.name}"))
    return {name: folder / f"{name}.flextrace" for name in names}


def _verdict(about: Exhibit, folder: Path, errors: Mapping[str, str]) -> Verdict:
    broken, repaired = _paths(folder, [about])
    error = errors.get(broken) or errors.get(repaired)
    if error:
        return Verdict(about.name, about.expected, error=error)
    said = _said(folder / f"{broken}.flextrace")
    bad = {id_ for id_, severity in said if severity is not Severity.NOTE}
    twin = _said(folder / f"{repaired}.flextrace")
    ids = {id_ for id_, _ in said}
    return Verdict(
        about.name,
        about.expected,
        found=tuple(id_ for id_ in about.expected if id_ in ids),
        also=tuple(sorted(bad - {*about.expected})),
        false=tuple(sorted({id_ for id_, severity in twin if severity is not Severity.NOTE})),
    )


def _said(path: Path) -> set[tuple[str, Severity]]:
    with open_trace(path) as reader:
        done = review(reader, catalogue().rules)
        if done.unstored:
            reader.add(statements(done.unstored))
        return {(finding.id, finding.severity) for finding in reader.findings()}
