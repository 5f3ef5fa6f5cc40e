"""Read damaged traces with every command, in a process that may die of it."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tools.torture.trace_mutations import mutate

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


def run_seed(whole: Path, folder: Path, seed: int) -> list[dict[str, Any]]:
    """Damage a copy of the trace `whole`, and return what went wrong with each command."""
    path, failures = folder / "mutant.flextrace", []
    for old in folder.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    shutil.copyfile(whole, path)
    how = mutate(path, seed)
    for argv in random.Random(seed).sample(commands(path, folder), COMMANDS_PER_SEED):
        if (problem := _problem(argv)) is not None:
            failures.append(
                {"seed": seed, "trace": whole.name, "argv": argv, "how": how, **problem}
            )
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


def main() -> None:
    """Run seeds on the traces of a folder; print a line of JSON for each seed."""
    folder, first, n_seeds, until = sys.argv[1:]
    traces = sorted(Path(folder).glob("*.flextrace"))
    with tempfile.TemporaryDirectory(prefix="flexinspect-torture-") as scratch:
        for trace in traces:
            for argv in commands(trace, Path(scratch)):
                _problem(argv)  # everything is imported once before memory is measured
        base = _peak_mib()
        for seed in range(int(first), int(first) + int(n_seeds)):
            if time.time() > float(until):
                return
            failures = run_seed(traces[seed % len(traces)], Path(scratch), seed)
            grown = _peak_mib() - base
            if grown > MAX_MIB:
                failures.append({"seed": seed, "kind": "memory", "detail": f"{grown} MiB more"})
            print(json.dumps({"seed": seed, "failures": failures}), flush=True)
            if grown > MAX_MIB:
                return  # the peak of a process never falls: go on in a new one


if __name__ == "__main__":
    main()
