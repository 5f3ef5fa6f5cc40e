"""`flexinspect infer`: learn invariants from good runs, and judge a run by them."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.cli.output import errors_as_json, print_json, print_lines
from flexinspect.cli.progress import progress_bar
from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable, plural, print_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexinspect.analysis.invariants.invariant import Invariant, Violation
    from flexinspect.analysis.invariants.learning import Learnt
    from flexinspect.analysis.invariants.observed_run import ObservedRun

DESCRIPTION = """Learn what held in each step of good runs of a program: ranges of losses and norms,
relations between numbers, the order of calls, modes, sizes of inputs, parameters, and what is equal
on all ranks. With --check, judge a run by them. Each run is a trace, or a folder with the traces of
the ranks of one run. Ranges need two good runs, better three with different seeds."""

EXAMPLES = """examples:
  flexinspect infer good-0.flextrace good-1.flextrace good-2.flextrace -o invariants.json
  flexinspect infer --check invariants.json new.flextrace
  flexinspect infer good-*.flextrace --leave-one-out      # how often would it be wrong?
  flexinspect infer --check invariants.json new.flextrace --json | jq '.violations[].sentence'
  flexinspect run --invariants invariants.json train.py   # judge at the end of a run

exit codes: 0 learnt, or no violation; 1 the run breaks an invariant (with --leave-one-out: a good
            run does); 2 a file could not be read or written, or the request is invalid
"""

DEFAULT_FILE = Path("invariants.json")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", metavar="RUN", type=Path, nargs="+", help="traces, or folders of ranks")
    add("--check", metavar="FILE", type=Path, help="judge the runs by these invariants")
    out = f"the file of the invariants, which is replaced (default: {DEFAULT_FILE})"
    add("-o", "--out", metavar="FILE", type=Path, help=out)
    left_out = "judge each good run by the invariants of the others; write no file"
    add("--leave-one-out", action="store_true", help=left_out)
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Learn or judge; return 1 if a run breaks an invariant.

    Raises `UsageError`, `TraceError` and `OutputFileError`.
    """
    if args.check is not None and (args.out is not None or args.leave_one_out):
        wrong = "--out" if args.out is not None else "--leave-one-out"
        raise UsageError(f"--check and {wrong} exclude each other.")
    with errors_as_json(args.json):
        return _check(args) if args.check is not None else _learn(args)


def _read_runs(paths: Sequence[Path]) -> list[ObservedRun]:
    from flexinspect.analysis.invariants.observed_run import observe_run

    runs = []
    with progress_bar("reading traces") as update:
        for n, path in enumerate(paths, 1):
            runs.append(observe_run(path))
            update(n, len(paths))
    return runs


# -- learning --------------------------------------------------------------------------------------


def _learn(args: argparse.Namespace) -> int:
    from flexinspect.analysis.invariants.invariant import write_invariants
    from flexinspect.analysis.invariants.learning import learn

    _check_distinct(args.runs)
    if args.leave_one_out and len(args.runs) < 3:
        raise UsageError("--leave-one-out needs three good runs: two to learn from.")
    runs = _read_runs(args.runs)
    with progress_bar("learning") as update:
        found = learn(runs, update)
    for doubt in (doubt for one in runs for doubt in one.doubts):
        print_message(f"note: {escape_unprintable(doubt)}. Learn from good runs only.")
    if args.leave_one_out:
        return _print_left_out(found, args)
    if not found.invariants:
        raise UsageError(
            "The runs share no training and no generation, so nothing holds in all of them.",
            hint="Give runs of the same program.",
        )
    out = args.out or DEFAULT_FILE
    write_invariants(out, found.invariants, [one.label for one in runs])
    if args.json:
        facts = {"invariants": found.invariants, "dropped": found.dropped}
        print_json({"file": str(out), "runs": [one.label for one in runs], **facts})
        return 0
    print_lines(_summary(found, out, len(runs)))
    if len(runs) < 2:
        text = "note: One run teaches no ranges, and nothing was tested by a run left out: "
        print_message(f"{text}give two or more good runs.")
    return 0


def _check_distinct(paths: Sequence[Path]) -> None:
    for path, n in Counter(one.resolve() for one in paths).items():
        if n > 1:
            raise UsageError(f"{path} is given {n} times: each good run counts once.")


def _summary(found: Learnt, out: Path, n_runs: int) -> list[str]:
    by_part: dict[str, Counter[str]] = {}
    for one in found.invariants:
        by_part.setdefault(one.part, Counter())[one.kind] += 1
    lines = [f"{plural(len(found.invariants), 'invariant')} of {plural(n_runs, 'run')}: {out}"]
    for part, kinds in by_part.items():
        counts = ", ".join(f"{kind} {n}" for kind, n in kinds.most_common())
        lines.append(f"  {part}: {counts}")
    if found.dropped:
        names = ", ".join(map(_describe, found.dropped[:5]))
        more = f" and {len(found.dropped) - 5} more" if len(found.dropped) > 5 else ""
        lines.append(f"dropped, because a run left out broke them: {names}{more}")
    return [*lines, f"next  flexinspect infer --check {out} NEW_RUN"]


def _print_left_out(found: Learnt, args: argparse.Namespace) -> int:
    is_broken = any(violations for _, violations in found.left_out)
    if args.json:
        rows = [{"run": label, "violations": _rows(each)} for label, each in found.left_out]
        print_json({"invariants": len(found.invariants), "left_out": rows})
        return int(is_broken)
    lines = []
    for label, violations in found.left_out:
        lines.append(f"{label}: {plural(len(violations), 'violation')} of what the others teach")
        lines += [f"  {one.sentence}" for one in violations]
    kept = plural(len(found.invariants), "invariant")
    print_lines([*lines, f"{kept} hold in all runs; those that were broken here are dropped."])
    return int(is_broken)


# -- judging ---------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    from flexinspect.analysis.invariants.invariant import read_invariants
    from flexinspect.analysis.invariants.learning import judge, unjudged, without_numbers

    contents = read_invariants(args.check)
    if not contents.invariants:
        raise UsageError(f"{args.check} has no invariants.", hint="Learn them from good runs.")
    results: list[dict[str, Any]] = []
    lines: list[str] = []
    is_broken = False
    for run in _read_runs(args.runs):
        violations = judge(contents.invariants, run)
        notes = [f"No invariant is about {one}." for one in unjudged(contents.invariants, run)]
        silent = without_numbers(contents.invariants, run)
        notes += _notes_of(silent)
        is_broken |= bool(violations)
        results.append({"run": run.label, "violations": _rows(violations), "notes": notes})
        n_judged = sum(o.part in run.parts or o.kind == "part" for o in contents.invariants)
        n_judged -= len(silent)
        total = f"{plural(len(violations), 'violation')} of {plural(n_judged, 'invariant')}"
        lines.append(f"{run.label}: {total}")
        lines += [f"  {one}" for one in violation_lines(violations, "--json has all")]
        lines += notes
    if args.json:
        print_json({"file": str(args.check), "violated": is_broken, "runs": results})
    else:
        print_lines(lines)
    return int(is_broken)


def _rows(violations: Sequence[Violation]) -> list[dict[str, Any]]:
    names = ("part", "kind", "subject", "other", "low", "high", "value", "runs", "samples")
    return [
        {
            **{name: getattr(one.invariant, name) for name in names},
            **{name: getattr(one, name) for name in ("step", "rank", "n_steps", "sentence")},
        }
        for one in violations
    ]


def _notes_of(silent: Sequence[Invariant]) -> list[str]:
    """Return a sentence about invariants that could not be judged."""
    if not silent:
        return []
    names = ", ".join(map(_describe, silent[:MAX_OF_A_KIND]))
    more = f" and {len(silent) - MAX_OF_A_KIND} more" if len(silent) > MAX_OF_A_KIND else ""
    return [f"Not judged, because the run does not have the number: {names}{more}."]


def _describe(one: Invariant) -> str:
    """Return the kind and the numbers of an invariant, with its steps if it has bounds."""
    other = f" and {one.other}" if one.other else ""
    steps = f" in steps {one.first} to {one.last}" if one.last is not None else ""
    return escape_unprintable(f"{one.kind} of {one.subject}{other}{steps}")


MAX_OF_A_KIND = 3
"""Violations of one kind and training that are printed."""


def violation_lines(violations: Sequence[Violation], all_of_them: str) -> list[str]:
    """Return a line for each violation; of many of one kind, such as of parameters, the first.

    `all_of_them` says what has the others.
    """
    lines, counts = [], Counter[tuple[str, str]]()
    parts = {one.invariant.part for one in violations}
    for one in violations:
        key = one.invariant.part, one.invariant.kind
        counts[key] += 1
        if counts[key] <= MAX_OF_A_KIND:
            where = f"{one.invariant.part}: " if len(parts) > 1 else ""
            lines.append(escape_unprintable(f"{where}{one.sentence}"))
    for (part, kind), n in counts.items():
        if n > MAX_OF_A_KIND:
            left = f"{plural(n - MAX_OF_A_KIND, 'more violation')} of {kind!r}"
            lines.append(f"{escape_unprintable(part)}: {left} ({all_of_them})")
    return lines
