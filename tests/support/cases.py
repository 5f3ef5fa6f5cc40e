"""Runs a case script as a user does, once for all tests, and returns what is in its trace."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from flexinspect.records.finding import Finding
from flexinspect.trace.reader import open_trace
from support.captures import capture
from support.paths import CASES, SHARED
from support.warm_python import Ran, run_alone

COMPILES = ("b02_stale_tables", "l01_compiled_crash", "l01_compiled_does_not_build")

CRASHES = "l01_compiled_crash"


def ran_case(name: str, declare: str = "") -> tuple[Ran, Path]:
    """Capture a case as `flexinspect run` does, as declared; return how it went, and its trace.

    The first test that needs it runs it; tests only read the trace.
    """
    key = f"{name}-{hashlib.sha256(declare.encode()).hexdigest()[:12]}"
    folder = Path(os.environ[SHARED])
    trace, result = folder / f"{key}.flextrace", folder / f"{key}.ran"
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            # What a broken heap does, depends on what the process has loaded.
            run = _captured_alone if name == CRASHES else capture
            result.write_text(json.dumps(asdict(run(CASES / f"{name}.py", trace, declare=declare))))
    return Ran(**json.loads(result.read_text())), trace


def _captured_alone(script: Path, out: Path, *, declare: str) -> Ran:
    assert not declare
    return run_alone(["-m", "flexinspect", "run", "--no-ui", "--out", str(out), str(script)])


def found_in_case(name: str, declare: str = "") -> list[Finding]:
    """Return what is found in a case that ends well."""
    ran, trace = ran_case(name, declare)
    assert ran.code == 0, ran
    return found_in_trace(trace)


def found_in_trace(trace: Path) -> list[Finding]:
    """Return the findings of a trace in which no rule or hook failed."""
    with open_trace(trace) as reader:
        off = [row.event.text for row in reader.events() if row.event.kind.endswith("-off")]
        assert off == []
        return reader.findings()


def segments(*spans: tuple[int, int], mask: str = "", label: str = "paraphrase") -> str:
    """Return the declaration of spans, numbered from 1."""
    tables = [
        f'[[segments]]\nstart = {start}\nstop = {stop}\nlabel = "{label} {number}"\n'
        for number, (start, stop) in enumerate(spans, start=1)
    ]
    return (f'mask = "{mask}"\n' if mask else "") + "\n".join(tables)
