"""The catalogue of broken runs (`flexinspect museum`): the fault of each, a question, its answer.

The programs themselves are in `flexinspect_hooks.broken_runs`, a function for each name (with "_"
for "-"); nothing here needs torch. The texts are in `broken_runs.toml`.
"""

from __future__ import annotations

import hashlib
import tomllib
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

from flexinspect.core import __version__
from flexinspect.core.environment import user_folder
from flexinspect.core.errors import UsageError
from flexinspect.core.text import did_you_mean


class BrokenRun(Struct, frozen=True):
    """A run with one fault, and its tutorial.

    A correct run reports at least one of the finding ids `expected`; `panel` and `step` show the
    answer. `case` names the public report or code that it imitates.
    """

    name: str
    title: str
    case: str
    story: str
    question: str
    answer: str
    panel: str
    expected: tuple[str, ...]
    step: int = 0

    def tutorial_lines(self) -> list[str]:
        """Return the paragraphs of the tutorial, without the answer."""
        return [self.title, self.story, f"Question: {self.question}"]

    def answer_lines(self) -> list[str]:
        """Return the answer, where it is shown, and which public case the run imitates."""
        where = f"The {self.panel} panel shows it at step {self.step}."
        return [f"Answer: {self.answer} {where}", f"Imitates: {self.case}."]


_CATALOGUE = tomllib.loads(Path(__file__).with_name("broken_runs.toml").read_text(encoding="utf-8"))
BROKEN_RUNS = tuple(msgspec.convert({"name": n, **run}, BrokenRun) for n, run in _CATALOGUE.items())


def find_broken_run(name: str) -> BrokenRun:
    """Return a broken run by name. Raises `UsageError` with the nearest name."""
    runs = {run.name: run for run in BROKEN_RUNS}
    if name in runs:
        return runs[name]
    hint = did_you_mean(name, runs, "'flexinspect museum' lists all of them.")
    raise UsageError(f"The museum has no exhibit '{name}'.", hint=hint)


def cache_folder() -> Path:
    """Return the folder of generated traces in the user's cache, one per version of the code.

    Raises `UsageError` without a home folder.
    """
    root = user_folder("XDG_CACHE_HOME", "LOCALAPPDATA", ".cache")
    if root is None:
        raise UsageError("There is no home folder for the cache.", hint="Add --out FILE.")
    return root / "flexinspect" / "museum" / f"{__version__}-{_code_fingerprint()}"


def exhibit_path(run: BrokenRun, *, repaired: bool = False) -> Path:
    """Return the path of the trace of a broken run in the cache. Raises `UsageError`."""
    return cache_folder() / f"{run.name}{'-repaired' if repaired else ''}.flextrace"


@cache
def _code_fingerprint() -> str:
    """Return a hash of the source files, so that traces of other versions are not used."""
    here = Path(__file__).parents[1]
    files = sorted([*here.rglob("*.py"), *(here.parent / "hooks").rglob("*.py")])
    versions = [(file.name, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(versions).encode()).hexdigest()[:12]
