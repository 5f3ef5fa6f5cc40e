"""Silent training errors that others reported, and trainings without an error.

Each is a program that knows nothing of flexinspect, run as `flexinspect run` runs it, in a child of
a process that has imported torch already. An error counts as named if the finding that stands for
it appears, as hinted if another finding of a training does, else as silent. A training without an
error, or with its error fixed, counts as a false alarm if it gets an error or a warning.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import markdown
from benchmarks.forked_runs import fork_capture, wait
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.job import ScriptJob
from flexinspect.trace.reader import open_trace

FOLDER = Path(__file__).parent
SEEDS = 3
PATIENCE_S = 120


def measure(*, seeds: int = SEEDS, names: Sequence[str] = ()) -> dict[str, Any]:
    """Run every program with each seed; return what was found."""
    # So that each child has them already.
    import torch._dynamo
    import torch.distributed.tensor
    import torch.testing
    import transformers.trainer  # noqa: F401

    from benchmarks.training_bugs.bugs import BUGS, LEFT_OUT, RANKED
    from benchmarks.training_bugs.clean import PROGRAMS
    from flexinspect_hooks.training import training_finder  # noqa: F401
    from flexinspect_hooks.user_code import model_discovery  # noqa: F401

    torch.set_num_threads(1)
    bugs = {}
    for name, (_, wanted) in BUGS.items():
        if names and name not in names:
            continue
        n_ranks = 2 if name in RANKED else 1
        runs = [found_in("bugs.py", name, "bug", str(n), n_ranks=n_ranks) for n in range(seeds)]
        twins = [found_in("bugs.py", name, "fixed", str(n), n_ranks=n_ranks) for n in range(seeds)]
        bugs[name] = {
            "finding": wanted,
            "score": min((_score(run, wanted) for run in runs), key=_SCORES.index),
            "step": max((_step(o) for run in runs for o in run if o.id == wanted), default=None),
            "sentence": next((one.sentence for one in runs[0] if one.id == wanted), ""),
            "false_alarms": [one for run in twins for one in _alarms(run)],
        }
        print(name, bugs[name]["score"], bugs[name]["false_alarms"], file=sys.stderr)
    clean = {}
    for name in PROGRAMS:
        if names and name not in names:
            continue
        runs = [found_in("clean.py", name, str(seed)) for seed in range(seeds)]
        clean[name] = {"false_alarms": [one for run in runs for one in _alarms(run)]}
        print(name, clean[name]["false_alarms"], file=sys.stderr)
    return {"seeds": seeds, "bugs": bugs, "clean": clean, "left_out": LEFT_OUT}


_SCORES = ("silent", "hinted", "named")


def _score(found: Sequence[Finding], wanted: str) -> str:
    if any(one.id == wanted for one in found):
        return "named"
    return "hinted" if any(one.id.startswith("training.") for one in found) else "silent"


def _step(one: Finding) -> int:
    """The step of a finding; of ranks, the first in which they parted."""
    return int(one.evidence.get("first_step", one.step or 0))


def _alarms(found: Sequence[Finding]) -> list[str]:
    loud = (one for one in found if one.severity in (Severity.ERROR, Severity.WARNING))
    # Models with random weights say nothing sensible, which is no error of their training.
    return [f"{one.id}: {one.sentence}" for one in loud if one.id.startswith("training.")]


def found_in(script: str, *args: str, n_ranks: int = 1) -> list[Finding]:
    """Run a program, in one process for each rank; return the findings of all."""
    # Not a TemporaryDirectory, which a child would remove at its end.
    folder = tempfile.mkdtemp()
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        out = Path(folder) / "t.flextrace"
        if n_ranks == 1:
            job = ScriptJob(out=str(out), program=str(FOLDER / script), args=args, control=False)
            wait(fork_capture(job), PATIENCE_S)
            return _read(out)
        # Processes of their own: a group of processes that were forked may hang when it ends.
        command = [sys.executable, "-m", "flexinspect", "run", "--no-ui", "--no-control"]
        command += ["--out", str(out), str(FOLDER / script), *args]
        ranks = []
        for rank in range(n_ranks):
            facts = {"RANK": str(rank), "WORLD_SIZE": str(n_ranks), "LOCAL_RANK": str(rank)}
            own = {**os.environ, **address, **facts, "OMP_NUM_THREADS": "1"}
            quiet = subprocess.DEVNULL
            ranks.append(subprocess.Popen(command, env=own, stdout=quiet, stderr=quiet))
        for process in ranks:
            process.wait(PATIENCE_S)
        return [one for n in range(n_ranks) for one in _read(out.with_stem(f"t-rank{n}"))]
    finally:
        shutil.rmtree(folder)


def _read(trace: Path) -> list[Finding]:
    with open_trace(trace) as reader:
        if reader.state != "finished":
            raise RuntimeError(f"{reader.run().get('program')} ended as {reader.state}")
        return reader.findings()


def table(facts: dict[str, Any]) -> str:
    """Return the results as tables in Markdown."""
    rows = [
        [name, one["score"], f"`{one['finding']}`", str(one["step"]), str(len(one["false_alarms"]))]
        for name, one in facts["bugs"].items()
    ]
    head = ["error", "result", "finding", "latest step", "false alarms when fixed"]
    clean = [[name, str(len(one["false_alarms"]))] for name, one in facts["clean"].items()]
    programs = markdown(["program", "false alarms"], clean)
    return f"{markdown(head, rows)}\n\n{programs}"
