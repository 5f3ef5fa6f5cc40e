"""`flexinspect museum`: broken runs to learn from, and the check that each fault is found."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from msgspec.structs import asdict
from rich.table import Table

from flexinspect.cli.output import print_json, stdout_console
from flexinspect.core.errors import UsageError

DESCRIPTION = """Without a name, list the museum: runs with one fault each, after faults
that were reported in public. With a name, build that run (a few seconds, no
network), print its description and a question, open its trace, and print the
answer when the interface closes. --check builds all runs and their repaired
versions, and reports for each fault whether it is found, and for each repaired
version whether there is a false alarm."""

EXAMPLES = """examples:
  flexinspect museum
  flexinspect museum silent-fallback
  flexinspect museum silent-fallback --repaired
  flexinspect museum decode-without-offset --no-ui --out wrong.flextrace
  flexinspect museum --check

exit codes: 0 success, 1 --check missed a fault or found a false alarm,
            2 unknown exhibit or invalid request
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help="the exhibit to build and open")
    add("--repaired", action="store_true", help="build the repaired version instead")
    add("--no-ui", action="store_true", help="do not open the interface")
    add("--out", metavar="FILE", type=Path, help="the trace (default: in the user's cache)")
    add("--check", action="store_true", help="build all exhibits and report which faults are found")
    add("--json", action="store_true", help="print the list or the results as JSON")


def run(args: argparse.Namespace) -> int:
    """List, open or check exhibits. Raises `UsageError` for flags that exclude each other."""
    if args.check:
        if args.name or args.out or args.repaired:
            raise UsageError("--check builds all exhibits.", hint="Use it only with --json.")
        return _check(as_json=args.json)
    if args.name is None:
        if args.out or args.repaired:
            raise UsageError("No exhibit is named.", hint="'flexinspect museum' lists them.")
        _list(as_json=args.json)
        return 0
    if args.json:
        raise UsageError("--json needs the list or --check, not a name.")
    return _open(args)


def _list(*, as_json: bool) -> None:
    from flexinspect.inputs.broken_run_catalog import BROKEN_RUNS

    if as_json:
        print_json(BROKEN_RUNS)
        return
    from flexinspect.tui.saved_state import load_state

    solved = [one.name for one in BROKEN_RUNS if one.name in load_state().solved_exhibits]
    width = max(len(one.name) for one in BROKEN_RUNS)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(min_width=width + 1)  # of narrow terminals, only titles are wrapped
    for one in BROKEN_RUNS:
        table.add_row("✓" if one.name in solved else "", one.name, one.title)
    count = f"{len(solved)} of {len(BROKEN_RUNS)} solved"
    stdout_console().print(table, f"\n{count}; flexinspect museum NAME opens one.", sep="\n")


def _open(args: argparse.Namespace) -> int:
    from flexinspect.analysis.broken_run_check import build_exhibit
    from flexinspect.inputs.broken_run_catalog import exhibit_path, find_broken_run

    broken_run = find_broken_run(args.name)
    if args.out is not None and args.out.exists():
        raise UsageError(f"{args.out} exists already.", hint="Choose another --out.")
    path = args.out or exhibit_path(broken_run, repaired=args.repaired)
    console = stdout_console()
    for number, line in enumerate(broken_run.tutorial_lines()):
        console.print(line, style="bold" if number == 0 else None)
    build_exhibit(broken_run, path, _print_stage, repaired=args.repaired)
    if args.no_ui or not (sys.stdin.isatty() and sys.stdout.isatty()):
        console.print("\n".join(broken_run.answer_lines()))
        print(f"\ntrace {path}\nnext  flexinspect open {path} --step {broken_run.step}")
        return 0
    try:
        input("\nPress Enter to open it (A answers the question, ? shows the keys). ")
    except EOFError:
        return 0
    from flexinspect.cli.interface import open_trace_file

    code = open_trace_file(path, {"step": broken_run.step})
    console.print("\n".join(broken_run.answer_lines()))
    return code


def _print_stage(stage: str) -> None:
    print(f"{stage} …", file=sys.stderr, flush=True)


def _check(*, as_json: bool) -> int:
    from flexinspect.analysis.broken_run_check import check_broken_runs

    is_shown = sys.stderr.isatty() and not as_json
    report = (lambda name: print("built", name, file=sys.stderr)) if is_shown else None
    checks = check_broken_runs(report)
    is_good = all(check.is_good for check in checks)
    if as_json:
        facts = [{**asdict(check), "good": check.is_good} for check in checks]
        print_json({"exhibits": facts, "good": is_good})
        return 0 if is_good else 1
    console = stdout_console()
    width = max(len(check.name) for check in checks)
    for check in checks:
        style = None if check.is_good else "bold red"
        console.print(f"{check.name:{width}}  {check.to_line()}", style=style)
    n_found = sum(bool(check.found) for check in checks)
    n_false = sum(bool(check.false) for check in checks)
    n_failed = sum(bool(check.error) for check in checks)
    summary = f"{n_found} of {len(checks)} found, {n_false} false alarms"
    console.print(summary + (f", {n_failed} could not be built" if n_failed else ""))
    return 0 if is_good else 1
