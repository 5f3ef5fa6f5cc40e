"""`flexinspect doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexinspect.cli.output import print_json, stdout_console
from flexinspect.cli.progress import ProgressLine
from flexinspect.core.text import escape_unprintable, plural

if TYPE_CHECKING:
    from flexinspect.doctor.check import Check

DESCRIPTION = """Check this machine: Python, the packages and their versions, torch, FlexAttention,
the GPU, memory, disk, the hub, the terminal and the debuggers. ✓ works, ! may cause trouble,
✗ prevents a run, · is a fact, or optional and absent."""

EXAMPLES = """examples:
  flexinspect doctor
  flexinspect doctor --test-flex-attention
  flexinspect doctor --model llama3.2_3b_it --dataset webqa --dtype bfloat16
  flexinspect doctor --json | jq '.checks[] | select(.status == "error")'

exit codes: 0 nothing prevents a run, 1 something does, 2 invalid request
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--verbose", "-v", action="store_true", help="print more facts about each check")
    test = "run a small mask through every form of FlexAttention, and compare with float64"
    add("--test-flex-attention", action="store_true", help=test)
    add("--model", metavar="NAME", help="also check whether this model is here, and fits")
    add("--dataset", metavar="NAME", help="also check whether this dataset can be read")
    add("--dtype", default="bfloat16", help="the dtype that the model is to run in (bfloat16)")
    add("--out", metavar="FOLDER", type=Path, default=Path(), help="the folder of the traces (.)")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print a line per check; return 1 if one of them prevents a run.

    Raises `UsageError` for an unknown dtype.
    """
    from flexinspect.doctor.check import Status
    from flexinspect.doctor.checklist import CheckRequest, checklist
    from flexinspect.inputs.model_sizes import canonical_dtype

    request = CheckRequest(
        args.out,
        model=args.model,
        dataset=args.dataset,
        dtype=canonical_dtype(args.dtype),
        test_flex_attention=args.test_flex_attention,
    )
    progress = ProgressLine(is_shown=not args.json)
    printer = None if args.json else _Printer(is_verbose=args.verbose)
    checks = []
    for check in checklist(request, progress.show):
        progress.clear()
        checks.append(check)
        if printer is not None:
            printer.add(check)
    progress.clear()
    n_errors = sum(check.status is Status.ERROR for check in checks)
    if printer is None:
        print_json({"version": 1, "ok": not n_errors, "checks": checks})
    else:
        printer.end(_summary(checks))
    return int(n_errors > 0)


class _Printer:
    """Prints checks as they come; passed ones of a group are printed together, in one line."""

    def __init__(self, *, is_verbose: bool) -> None:
        self._console = stdout_console()
        self._is_verbose = is_verbose
        self._together: list[Check] = []

    def add(self, check: Check) -> None:
        """Print a check, or keep it for the line of its group."""
        if check.group and not self._is_verbose:
            self._together.append(check)
        else:
            self._print_together()
            self._print(check)

    def end(self, text: str) -> None:
        """Print what is left, and a last line."""
        self._print_together()
        self._console.print(f"\n{text}")

    def _print_together(self) -> None:
        from flexinspect.doctor.check import ok

        if self._together:
            found = ", ".join(f"{check.name} {check.found}" for check in self._together)
            self._print(ok(self._together[0].group, found))
            self._together = []

    def _print(self, check: Check) -> None:
        from rich.text import Text

        from flexinspect.doctor.check import SIGNS, STYLES, Status

        name = f"{SIGNS[check.status]} ", STYLES[check.status]
        line = Text.assemble(name, (check.name, "bold"), f": {escape_unprintable(check.found)}")
        self._console.print(line, soft_wrap=True)
        is_bad = check.status in (Status.WARNING, Status.ERROR)
        lines = [f"→ {check.fix}"] if check.fix and (is_bad or self._is_verbose) else []
        lines += check.details if self._is_verbose else ()
        for text in lines:
            self._console.print(f"    {escape_unprintable(text)}", soft_wrap=True)


def _summary(checks: Sequence[Check]) -> str:
    n_errors = sum(check.status == "error" for check in checks)
    n_warnings = sum(check.status == "warning" for check in checks)
    if n_errors:
        which = ", ".join(check.name for check in checks if check.status == "error")
        return f"{plural(n_errors, 'problem')} to solve before a run: {which}."
    if n_warnings:
        return f"Runs work here; {plural(n_warnings, 'warning')} above."
    return "Everything works."
