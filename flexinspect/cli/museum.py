"""`flexinspect museum`: broken runs to learn on, and the proof that each fault is found."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexinspect.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from flexinspect.analysis.broken_run_check import BrokenRunCheck
    from flexinspect.inputs.broken_run_catalog import BrokenRun

_DESCRIPTION = """Without a name, list the museum: runs with one fault each, of the kind
that was reported in public. With a name, build that run (a few seconds, no
network), tell its story and question, and open its trace. --check builds all
of them and their repaired twins, and says of each fault whether it is found,
and of each twin whether something is found that is not there."""

_EPILOG = """examples:
  flexinspect museum
  flexinspect museum silent-fallback
  flexinspect museum silent-fallback --repaired
  flexinspect museum decode-without-offset --no-ui --out wrong.flextrace
  flexinspect museum --check

exit codes: 0 done, 1 --check has missed a fault or has a false alarm,
            2 there is no such exhibit, or it cannot be built as asked
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Set the description and the arguments of this command."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help="the exhibit")
    add("--repaired", action="store_true", help="its twin in which the fault is mended")
    add("--no-ui", action="store_true", help="build and tell only; open nothing")
    add("--out", metavar="FILE", type=Path, help="the trace (default: in the user's cache)")
    add("--check", action="store_true", help="build all, and say what was found and missed")
    add("--json", action="store_true", help="print the list or the verdicts as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List, open or check. Raises `UsageError` for what does not go together."""
    if args.check:
        if args.name or args.out or args.repaired:
            raise UsageError("--check builds all exhibits.", hint="Give it alone, or with --json.")
        return _check(as_json=args.json)
    if args.name is None:
        if args.out or args.repaired:
            raise UsageError("No exhibit is named.", hint="'flexinspect museum' lists them.")
        return _list(as_json=args.json)
    if args.json:
        raise UsageError("--json goes with the list and with --check.")
    return _open(args)


def _list(*, as_json: bool) -> int:
    from dataclasses import asdict

    from flexinspect.inputs.broken_run_catalog import BROKEN_RUNS

    if as_json:
        print(json.dumps([asdict(one) for one in BROKEN_RUNS], indent=2))
        return 0
    console = _console()
    width = max(len(one.name) for one in BROKEN_RUNS)
    for one in BROKEN_RUNS:
        console.print(f"{one.name:{width}}  {one.title}")
    console.print(f"\n{len(BROKEN_RUNS)} exhibits; flexinspect museum NAME opens one.")
    return 0


def _console() -> Console:
    from flexinspect.cli.output import Output

    return Output()


def _open(args: argparse.Namespace) -> int:
    from flexinspect.analysis.broken_run_check import annotate_trace, build_broken_runs
    from flexinspect.inputs.broken_run_catalog import cache_folder, find_broken_run

    about = find_broken_run(args.name)
    if args.out is not None and args.out.exists():
        raise UsageError(f"{args.out} exists already.", hint="Choose another --out.")
    twin = "-repaired" if args.repaired else ""
    path = args.out or cache_folder() / f"{about.name}{twin}.flextrace"
    _print_description(about)
    if not path.exists():
        print("building it …", file=sys.stderr)
        build_broken_runs({("!" if args.repaired else "") + about.name: path})
        annotate_trace(path, about, repaired=args.repaired)
    if args.no_ui or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(f"\ntrace {path}\nnext  flexinspect open {path} --step {about.step}")
        return 0
    try:
        input("\nEnter opens it ('?' shows the keys). ")
    except EOFError:
        return 0
    from flexinspect.cli.interface import open_trace_file
    from flexinspect.panels.base import TracePlace

    return open_trace_file(path, TracePlace(step=about.step))


def _print_description(about: BrokenRun) -> None:
    console = _console()
    for number, line in enumerate(about.tutorial_lines()):
        console.print(line, style="bold" if number == 0 else None)


def _check(*, as_json: bool) -> int:
    from dataclasses import asdict

    from flexinspect.analysis.broken_run_check import check_broken_runs

    progress = None if as_json or not sys.stderr.isatty() else _print_progress
    verdicts = check_broken_runs(progress)
    if as_json:
        good = [one.is_good for one in verdicts]
        facts = [{**asdict(one), "good": ok} for one, ok in zip(verdicts, good, strict=True)]
        print(json.dumps({"exhibits": facts, "good": all(good)}, indent=2))
    else:
        _print_verdicts(verdicts)
    return 0 if all(one.is_good for one in verdicts) else 1


def _print_progress(name: str) -> None:
    print(f"built {name}", file=sys.stderr)


def _print_verdicts(verdicts: Sequence[BrokenRunCheck]) -> None:
    console = _console()
    width = max(len(one.name) for one in verdicts)
    for one in verdicts:
        style = None if one.is_good else "bold red"
        console.print(f"{one.name:{width}}  {one.to_line()}", style=style)
    n_found = sum(bool(one.found) for one in verdicts)
    n_false = sum(bool(one.false) for one in verdicts)
    n_failed = sum(bool(one.error) for one in verdicts)
    said = f"{n_found} of {len(verdicts)} found, {n_false} false alarms"
    console.print(said + (f", {n_failed} could not be built" if n_failed else ""))
