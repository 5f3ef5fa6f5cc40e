"""Generations with an error that only unseen programs had, and generations without one.

Each is a program that knows nothing of flexinspect, with a twin in which the error is repaired, run
as `flexinspect run` runs it, in a child of a process that has imported torch already. The findings
of this one run are scored: 2 if a finding names the place or the mechanism, 1 if one is of the
error's class, 0 otherwise. Any error or warning about a twin is a false alarm.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import markdown
from benchmarks.forked_runs import fork_capture, wait
from benchmarks.generation_bugs.cases import CASES, CORRECT, Case, Named
from benchmarks.generation_bugs.first_list import FIRST_LIST
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.job import Declaration, ScriptJob
from flexinspect.trace.reader import open_trace

PROGRAM = Path(__file__).parent / "program.py"
ROOT = Path(__file__).parents[2]
CASES_FOLDER = ROOT / "tests" / "cases"
PATIENCE_S = 120
PAGE = ROOT / "docs" / "diagnosis.md"
BEGIN, END = "<!-- generation-bugs -->", "<!-- end of generation-bugs -->"
IGNORED = ("text.", "path.needless-builds")
"""Beginnings of findings that do not count: random weights say nothing sensible, and the programs
do build masks in each layer, which is a warning if the machine is slow."""


def measure(*, names: Sequence[str] = ()) -> dict[str, Any]:
    """Run every program once; return scores, sentences and false alarms."""
    load_libraries()
    bugs = {}
    for name, case in CASES.items():
        if names and name not in names:
            continue
        bugs[name] = judge(name, case)
        print(name, bugs[name]["score"], bugs[name]["false_alarms"], file=sys.stderr)
    clean = {}
    for name, declaration in CORRECT.items():
        if names and name not in names:
            continue
        clean[name] = {"false_alarms": alarms(run(name, "fixed", declaration))}
        print(name, clean[name]["false_alarms"], file=sys.stderr)
    first = {}
    for name, (script, case) in FIRST_LIST.items():
        if names and name not in names:
            continue
        found = run_file(CASES_FOLDER / f"{script}.py", (), case.declaration)
        points, best = score(found, case)
        first[name] = {
            "planted": case.planted,
            "score": points,
            "finding": best.id if best is not None else "",
            "sentence": _sentence(best),
            "is_declared": bool(case.declaration.segments),
        }
        print(name, points, file=sys.stderr)
    return {"bugs": bugs, "clean": clean, "first": first}


def load_libraries() -> None:
    """Import what the programs need, so that each child has it already."""
    import torch
    import torch._dynamo
    import transformers.models.auto.tokenization_auto
    import transformers.models.gemma2.modeling_gemma2
    import transformers.models.gpt_oss.modeling_gpt_oss
    import transformers.models.llama.modeling_llama  # noqa: F401

    from flexinspect_hooks.user_code import model_discovery  # noqa: F401

    torch.set_num_threads(1)


def run(name: str, variant: str, declaration: Declaration) -> list[Finding]:
    """Return the findings of one program."""
    return run_file(PROGRAM, (name, variant), declaration)


def run_file(program: Path, args: tuple[str, ...], declaration: Declaration) -> list[Finding]:
    """Return the findings of a script, which may fail."""
    # Not a TemporaryDirectory, which a child would remove at its end.
    folder = Path(tempfile.mkdtemp())
    try:
        out = folder / "t.flextrace"
        job = ScriptJob(
            out=str(out),
            program=str(program),
            args=args,
            control=False,
            declaration=declaration,
        )
        wait(fork_capture(job), PATIENCE_S)
        with open_trace(out) as reader:
            return reader.findings()
    finally:
        shutil.rmtree(folder)


def judge(name: str, case: Case) -> dict[str, Any]:
    """Run a program with and without its error; return what was found."""
    found = run(name, "bug", case.declaration)
    points, best = score(found, case)
    return {
        "planted": case.planted,
        "thread": case.thread,
        "score": points,
        "finding": best.id if best is not None else "",
        "sentence": _sentence(best),
        "false_alarms": alarms(run(name, "fixed", case.declaration)),
    }


def _sentence(best: Finding | None) -> str:
    """Return the sentence of a finding without folders of this machine."""
    text = "" if best is None else best.sentence
    return text.replace(f"{ROOT}/", "").replace(f"{tempfile.gettempdir()}/", "")


def score(found: Sequence[Finding], case: Case) -> tuple[int, Finding | None]:
    """Return the points of a case, and the finding that they are for."""
    loud = [one for one in found if case.notes_count or one.severity is not Severity.NOTE]
    for one in loud:
        if any(_names(one, named) for named in case.named):
            return 2, one
    for one in loud:
        if one.id in case.hints or one.id in {named.id for named in case.named}:
            return 1, one
    return 0, None


def _names(one: Finding, named: Named) -> bool:
    return named.id in ("", one.id) and all(word in one.sentence for word in named.words)


def alarms(found: Sequence[Finding]) -> list[str]:
    """Return the errors and warnings, as text."""
    return list(_alarms(found))


def _alarms(found: Sequence[Finding]) -> Iterator[str]:
    for one in found:
        if one.severity is not Severity.NOTE and not one.id.startswith(IGNORED):
            yield f"{one.id}: {one.sentence}"


def table(facts: dict[str, Any]) -> str:
    """Return the results as tables in Markdown, and write them into the page if all were run."""
    text = section(facts)
    if [*facts["bugs"]] == [*CASES] and [*facts["first"]] == [*FIRST_LIST]:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{text}{after}", encoding="utf-8")
    return text


def section(facts: dict[str, Any]) -> str:
    """Return the generated part of the page, with its markers."""
    rows = []
    for name, one in facts["bugs"].items():
        alarm = str(len(one["false_alarms"]))
        thread = one["thread"] or "—"
        points = str(one["score"])
        rows.append([name, one["planted"], thread, points, _link(one["finding"]), alarm])
    head = ["case", "error", "reported in", "score", "finding", "false alarms when repaired"]
    clean = [[name, str(len(one["false_alarms"]))] for name, one in facts["clean"].items()]
    first = []
    for name, one in facts["first"].items():
        declared = "yes" if one["is_declared"] else "—"
        first.append([name, one["planted"], declared, str(one["score"]), _link(one["finding"])])
    parts = (
        markdown(head, rows),
        _mean(facts["bugs"]),
        markdown(["correct program", "false alarms"], clean),
        "The first list, which are the scripts of `tests/cases`:",
        markdown(["case", "error", "declared", "score", "finding"], first),
        _mean(facts["first"]),
    )
    return "\n\n".join((BEGIN, *parts, END))


def _link(finding: str) -> str:
    return f"[`{finding}`](findings/{finding}.md)" if finding else "—"


def _mean(results: dict[str, Any]) -> str:
    points = [one["score"] for one in results.values()]
    return f"Mean: {sum(points) / len(points):.2f} of 2, {len(points)} errors."
