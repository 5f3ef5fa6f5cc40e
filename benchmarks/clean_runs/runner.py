"""Records correct generations that are drawn by seeds; each error or warning is a false alarm.

`python -m benchmarks.clean_runs` runs 1 000 of them as `flexinspect run SCRIPT` does, in children
of a process that has imported torch already, and lists what fired with the command that shows it
again. Results are appended to a log, one line of JSON per seed, and seeds that it has are not run
again. A program that raises without capture too is one that transformers refuses: its seed draws
another one. A program that raises under capture only counts as a false alarm.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.clean_runs.cases import AXES, BY_FLEX, Case, draw
from benchmarks.common import markdown
from benchmarks.forked_runs import fork_capture, fork_plainly, wait
from flexinspect.analysis.offline_rules import review
from flexinspect.core import plugins
from flexinspect.core.errors import FlexInspectError
from flexinspect.inputs.declarations import read_declaration
from flexinspect.records.finding import Severity
from flexinspect.records.job import Declaration, ScriptJob
from flexinspect.trace.reader import open_trace

FOLDER = Path(__file__).parent
PROGRAM = FOLDER / "program.py"
_MODELS = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "gpt2"),
    *("gpt_neox", "falcon", "gpt_oss", "mixtral", "bamba", "t5", "bart"),
)
IMPORTS = (
    "accelerate",
    "benchmarks.clean_runs.program",
    "flexinspect_hooks.audit.session_audit",
    "flexinspect_hooks.audit.hypotheses",
    "flexinspect_hooks.user_code.model_discovery",
    "flexinspect_hooks.user_code.script.script_run",
    "hqq.core.quantize",
    "optimum.quanto",
    "peft",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.nn.attention.flex_attention",
    "transformers.generation.candidate_generator",
    "transformers.generation.continuous_batching",
    "transformers.generation.utils",
    "transformers.integrations.flex_attention",
    *(f"transformers.models.{name}.modeling_{name}" for name in _MODELS),
)
PATIENCE_S = 300
MAX_ATTEMPTS = 200
"""Cases that a seed draws before it is given up."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of a seed: `alarms` are errors and warnings, as "id: sentence".

    `failed` says what the program raised under capture, if it raises nothing alone. `judged` and
    `unjudged` are the steps that the audit compared, and its reasons for what it did not.
    `seconds` are CPU time.
    """

    seed: int
    attempt: int
    case: Case
    alarms: tuple[str, ...] = ()
    failed: str = ""
    judged: int = 0
    unjudged: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing fired."""
        return not self.alarms and not self.failed

    @property
    def command(self) -> str:
        """The command that shows it again."""
        declare = f"--declare {_declaration_file(self.case)} " if _is_declared(self.case) else ""
        program = "benchmarks/clean_runs/program.py"
        return f"flexinspect run --no-ui {declare}{program} {self.seed} {self.attempt}"


def warm_up() -> None:
    """Import what each child needs; what is not installed is left out."""
    import torch

    torch.set_num_threads(1)
    for name in IMPORTS:
        with suppress(ImportError):
            importlib.import_module(name)
    for group in (plugins.HOOKS, plugins.RULES):
        plugins.load_all(group)
    from flexinspect_hooks.audit.reference.clean_classes import import_again

    for name in _MODELS:
        import_again(_modeling(name))
    gc.collect()
    gc.freeze()  # children need not search what they were forked with


def _modeling(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


def run_seeds(seeds: Iterable[int], log: Path, *, jobs: int = 1) -> list[Outcome]:
    """Run the cases of seeds, `jobs` at a time; return the outcomes in the log for these seeds."""
    wanted = list(seeds)
    known = {one.seed for one in read_log(log)}
    left = [seed for seed in wanted if seed not in known]
    running: set[int] = set()
    started = time.monotonic()
    for n, seed in enumerate(left, 1):
        if len(running) >= jobs:
            running.discard(os.wait()[0])
        running.add(_fork_seed(seed, log))
        if n % 10 == 0 or n == len(left):
            spent = time.monotonic() - started
            print(f"clean runs: {n} of {len(left)}, {spent:.0f} s", file=sys.stderr, flush=True)
    for child in running:
        os.waitpid(child, 0)
    return [one for one in read_log(log) if one.seed in set(wanted)]


def read_log(log: Path) -> list[Outcome]:
    """Return the outcomes in a log; a line that was cut off is left out."""
    outcomes = {}
    for line in log.read_bytes().splitlines() if log.is_file() else ():
        try:
            one = msgspec.json.decode(line, type=Outcome)
        except msgspec.MsgspecError:
            continue
        outcomes[one.seed] = one
    return [outcomes[seed] for seed in sorted(outcomes)]


def _fork_seed(seed: int, log: Path) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 0
    try:
        with log.open("ab") as file:
            file.write(msgspec.json.encode(run_seed(seed)) + b"\n")
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    os._exit(code)


def run_seed(seed: int, *, first_attempt: int = 0) -> Outcome:
    """Run the first case of a seed that transformers does not refuse."""
    for attempt in range(first_attempt, MAX_ATTEMPTS):
        outcome = run_case(seed, attempt)
        if outcome is not None:
            return outcome
    raise RuntimeError(f"seed {seed} drew {MAX_ATTEMPTS} cases that transformers refuses")


def run_case(seed: int, attempt: int) -> Outcome | None:
    """Run a case under capture; return None if transformers refuses it."""
    folder, case = Path(tempfile.mkdtemp()), draw(seed, attempt)
    try:
        out, errors = folder / "t.flextrace", folder / "stderr"
        job = ScriptJob(
            out=str(out),
            program=str(PROGRAM),
            args=(str(seed), str(attempt)),
            declaration=_declaration(case),
            control=False,
        )
        before = _cpu_seconds()
        with errors.open("wb") as file:
            code = wait(fork_capture(job, errors=file.fileno()), PATIENCE_S)
        outcome = _judge(Outcome(seed=seed, attempt=attempt, case=case), out)
        if outcome.failed:
            if wait(fork_plainly(job), PATIENCE_S) != 0:
                return None
            last = errors.read_text("utf-8", "replace").strip().splitlines()[-1:]
            why = " ".join((outcome.failed, *_what_killed(code), *last))
            outcome = msgspec.structs.replace(outcome, failed=why)
        seconds = round(_cpu_seconds() - before, 2)
        return msgspec.structs.replace(outcome, seconds=seconds)
    finally:
        shutil.rmtree(folder)


def _what_killed(code: int | None) -> tuple[str, ...]:
    """Say what ended a run that did not end itself, by the exit code that `wait` returned."""
    if code is None:
        return (f"it was killed after {PATIENCE_S} s;",)
    if code >= 0:
        return ()
    name = signal.Signals(-code).name
    hint = ", as the kernel does when no memory is left" if name == "SIGKILL" else ""
    return (f"{name} ended it{hint};",)


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


def _judge(outcome: Outcome, out: Path) -> Outcome:
    try:
        with open_trace(out) as reader:
            if reader.state != "finished":
                return msgspec.structs.replace(outcome, failed=f"the run ended as {reader.state};")
            review(reader)
        with open_trace(out) as reader:
            found, events = reader.findings(), [row.event for row in reader.events()]
    except FlexInspectError as error:
        return msgspec.structs.replace(outcome, failed=error.message)
    loud = (one for one in found if one.severity in (Severity.ERROR, Severity.WARNING))
    audits = [event for event in events if event.kind.startswith("audit")]
    reasons = dict.fromkeys(
        reason
        for event in audits
        for reason in (*event.data.get("not_judged", ()), event.data.get("reason", ""))
        if reason
    )
    return msgspec.structs.replace(
        outcome,
        alarms=tuple(f"{one.id}: {one.sentence}" for one in loud),
        judged=sum(int(event.data.get("steps", 0)) for event in audits),
        unjudged=tuple(reasons),
    )


def _is_declared(case: Case) -> bool:
    return case.mask in BY_FLEX and case.declared == "yes"


def _declaration_file(case: Case) -> str:
    return f"benchmarks/clean_runs/{case.mask}.toml"


def _declaration(case: Case) -> Declaration:
    if not _is_declared(case):
        return Declaration()
    return read_declaration(FOLDER / Path(_declaration_file(case)).name)


# -- results --------------------------------------------------------------------------------------


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the counts by axis and value, and everything that fired."""
    axes = {
        name: {str(value): _counts(outcomes, name, value) for value in values}
        for name, values in AXES.items()
    }
    return {
        "runs": len(outcomes),
        "false_alarms": sum(not one.is_clean for one in outcomes),
        "refused": sum(one.attempt for one in outcomes),
        "steps_compared": sum(one.judged for one in outcomes),
        "runs_without_compared_step": sum(not one.judged for one in outcomes),
        "seconds": round(sum(one.seconds for one in outcomes)),
        "axes": axes,
        "alarms": [
            {"seed": one.seed, "command": one.command, "alarms": one.alarms, "failed": one.failed}
            for one in outcomes
            if not one.is_clean
        ],
        "unjudged": dict(Counter(why for one in outcomes for why in one.unjudged).most_common(30)),
    }


def _counts(outcomes: Sequence[Outcome], axis: str, value: str | int) -> dict[str, int]:
    those = [one for one in outcomes if getattr(one.case, axis) == value]
    return {
        "runs": len(those),
        "false_alarms": sum(not one.is_clean for one in those),
        "compared": sum(one.judged > 0 for one in those),
    }


def table(facts: dict[str, Any]) -> str:
    """Return the summary as a table in Markdown: runs, of which compared, and false alarms."""
    rows = [
        [axis, value, str(one["runs"]), str(one["compared"]), str(one["false_alarms"])]
        for axis, values in facts["axes"].items()
        for value, one in values.items()
    ]
    head = ["axis", "value", "runs", "compared by the audit", "false alarms"]
    return markdown(head, rows)
