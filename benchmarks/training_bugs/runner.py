"""Silent training errors that others reported, and trainings without an error.

Each is a program that knows nothing of flexinspect, run as `flexinspect run` runs it, in a child of
a process that has imported torch already. An error counts as named if the finding that stands for
it appears, as hinted if another finding of a training does, else as silent. A training without an
error, or with its error fixed, counts as a false alarm if it gets an error or a warning.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common import markdown
from benchmarks.forked_runs import fork_capture, wait
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.job import ScriptJob
from flexinspect.trace.reader import open_trace

T = TypeVar("T")
FOLDER = Path(__file__).parent
SEEDS = 3
PATIENCE_S = 120


def measure(*, seeds: int = SEEDS, names: Sequence[str] = ()) -> dict[str, Any]:
    """Run every program with each seed; return what was found."""
    from benchmarks.training_bugs.clean import PROGRAMS

    import_all()
    bugs, further = (_measure_bugs(script, seeds, names) for script in ("bugs.py", "further.py"))
    clean = {}
    for name in PROGRAMS:
        if names and name not in names:
            continue
        runs = [found_in("clean.py", name, str(seed)) for seed in range(seeds)]
        clean[name] = {
            "false_alarms": [one for run in runs for one in _alarms(run)],
            "notes": sorted({one.id for run in runs for one in run if _is_note(one)}),
        }
        print(name, *clean[name].values(), file=sys.stderr, flush=True)
    return {"seeds": seeds, "bugs": bugs, "further": further, "clean": clean}


def _measure_bugs(script: str, seeds: int, names: Sequence[str]) -> dict[str, Any]:
    """Run the programs of a script with and without their errors."""
    module = importlib.import_module(f"benchmarks.training_bugs.{Path(script).stem}")
    bugs = {}
    for name, (_, wanted, *check) in module.BUGS.items():
        if names and name not in names:
            continue
        n_ranks = 2 if name in module.RANKED else 1
        runs, twins = (
            [found_in(script, name, variant, str(n), n_ranks=n_ranks) for n in range(seeds)]
            for variant in ("bug", "fixed")
        )
        begins = module.BEGINS.get(name, lambda seed: 0)
        named = [
            (n, one) for n, run in enumerate(runs) for one in run if _names(one, wanted, *check)
        ]
        bugs[name] = {
            "finding": wanted,
            "score": min((_score(run, wanted, *check) for run in runs), key=_SCORES.index),
            "step": max((_step(one) for _, one in named), default=None),
            "steps_after": max((_step(one) - begins(n) for n, one in named), default=None),
            "sentence": next((one.sentence for _, one in named), ""),
            "false_alarms": [one for run in twins for one in _alarms(run)],
            "named_when_fixed": sum(_names(o, wanted, *check) for run in twins for o in run),
        }
        facts = bugs[name]
        shown = ("score", "step", "steps_after", "false_alarms", "named_when_fixed")
        print(name, *(facts[one] for one in shown), file=sys.stderr, flush=True)
    return bugs


def import_all() -> None:
    """Import what each child needs, so that it has it already."""
    import torch._dynamo
    import torch.distributed.tensor
    import torch.testing
    import transformers.trainer  # noqa: F401

    from flexinspect_hooks.training import training_finder  # noqa: F401
    from flexinspect_hooks.user_code import model_discovery  # noqa: F401

    torch.set_num_threads(1)


_SCORES = ("silent", "hinted", "named")


def _names(one: Finding, wanted: str, check: str = "") -> bool:
    """Whether a finding is the wanted one, by the wanted check if one is given."""
    return one.id == wanted and check in ("", one.evidence.get("check"))


def _score(found: Sequence[Finding], wanted: str, check: str = "") -> str:
    if any(_names(one, wanted, check) for one in found):
        return "named"
    return "hinted" if any(one.id.startswith("training.") for one in found) else "silent"


def _step(one: Finding) -> int:
    """The step of a finding; of ranks, the first in which they parted."""
    return int(one.evidence.get("first_step", one.step or 0))


def _alarms(found: Sequence[Finding]) -> list[str]:
    loud = (one for one in found if one.severity in (Severity.ERROR, Severity.WARNING))
    # Models with random weights say nothing sensible, which is no error of their training.
    return [f"{one.id}: {one.sentence}" for one in loud if one.id.startswith("training.")]


def _is_note(one: Finding) -> bool:
    return one.severity is Severity.NOTE and one.id.startswith("training.")


def found_in(script: str, *args: str, n_ranks: int = 1) -> list[Finding]:
    """Run a program, in one process for each rank; return the findings of all."""

    def findings(folder: Path) -> list[Finding]:
        return [one for trace in sorted(folder.glob("*.flextrace")) for one in _read(trace)]

    return recorded(findings, script, *args, n_ranks=n_ranks)


def recorded(use: Callable[[Path], T], script: str, *args: str, n_ranks: int = 1) -> T:
    """Run a program, in one process for each rank; return what `use` makes of its traces' folder.

    The folder has the trace `t.flextrace`, or one for each rank, until `use` returns.
    """
    # Not a TemporaryDirectory, which a child would remove at its end.
    folder = Path(tempfile.mkdtemp())
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        out = folder / "t.flextrace"
        if n_ranks == 1:
            job = ScriptJob(out=str(out), program=str(FOLDER / script), args=args, control=False)
            wait(fork_capture(job), PATIENCE_S)
            return use(folder)
        # Processes of their own, each with a trace of its own.
        command = [sys.executable, "-m", "flexinspect", "run", "--no-ui", "--no-control"]
        command += ["--out", str(out), str(FOLDER / script), *args]
        ranks = []
        for rank in range(n_ranks):
            facts = {"RANK": str(rank), "WORLD_SIZE": str(n_ranks), "LOCAL_RANK": str(rank)}
            own = {**os.environ, **address, **facts, "OMP_NUM_THREADS": "1"}
            quiet = subprocess.DEVNULL
            ranks.append(subprocess.Popen(command, env=own, stdout=quiet, stderr=quiet))
        _wait_for_ranks(ranks)
        return use(folder)
    finally:
        shutil.rmtree(folder)


def _wait_for_ranks(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all ranks; raises `RuntimeError` if one fails, or hangs, and ends the others.

    A rank that ends without joining its group leaves the others waiting for it.
    """
    deadline = time.monotonic() + PATIENCE_S
    try:
        while any(one.poll() is None for one in ranks):
            if any(one.poll() not in (None, 0) for one in ranks):
                raise RuntimeError(f"a rank ended with exit code {[o.poll() for o in ranks]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks hang: exit codes {[one.poll() for one in ranks]}")
            time.sleep(0.05)
    finally:
        for one in ranks:
            one.kill()
            one.wait()


def _read(trace: Path) -> list[Finding]:
    with open_trace(trace) as reader:
        if reader.state != "finished":
            raise RuntimeError(f"{reader.run().get('program')} ended as {reader.state}")
        return reader.findings()


def table(facts: dict[str, Any]) -> str:
    """Return the results as tables in Markdown, and write them into the page if all were run."""
    from benchmarks.training_bugs import bugs as artifact
    from benchmarks.training_bugs import clean as correct
    from benchmarks.training_bugs import further, page

    known: dict[str, Collection[str]] = {
        "bugs": artifact.BUGS,
        "further": further.BUGS,
        "clean": correct.PROGRAMS,
    }
    if all([*facts[group]] == [*names] for group, names in known.items()):
        text = page.PAGE.read_text(encoding="utf-8")
        page.PAGE.write_text(page.filled(text, facts), encoding="utf-8")
    bugs = {**facts["bugs"], **facts["further"]}
    rows = [
        [
            *(name, one["score"], f"`{one['finding']}`", str(one["step"])),
            *(str(one["steps_after"]), str(len(one["false_alarms"]))),
        ]
        for name, one in bugs.items()
    ]
    head = ["error", "result", "finding", "latest step", "steps after the error", "when fixed"]
    clean = [
        [name, str(len(one["false_alarms"])), ", ".join(one["notes"])]
        for name, one in facts["clean"].items()
    ]
    programs = markdown(["program", "false alarms", "notes"], clean)
    return f"{markdown(head, rows)}\n\n{programs}"
