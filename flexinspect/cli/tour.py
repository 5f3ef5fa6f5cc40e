"""`flexinspect tour`: seven steps through the interface, on a run with one planted bug."""

from __future__ import annotations

import argparse
import sys

DESCRIPTION = """Learn the interface in two minutes: a run with one planted bug is built (a few
seconds, no network) and opened, and seven steps wait for the key that they name."""

EXAMPLES = """examples:
  flexinspect tour
  flexinspect museum            (more runs with one bug each)

exit codes: 0 success, 2 there is no terminal
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the tour has one trace and no options."""


def run(args: argparse.Namespace) -> int:
    """Build the run of the tour and open it. Raises `UsageError` without a terminal."""
    from flexinspect.analysis.broken_run_check import build_exhibit
    from flexinspect.cli.interface import check_terminal, open_trace_file
    from flexinspect.inputs.broken_run_catalog import exhibit_path, find_broken_run
    from flexinspect.tui.guided_tour import EXHIBIT

    check_terminal("flexinspect museum lists runs that can be looked at without one.")
    broken_run = find_broken_run(EXHIBIT)
    path = exhibit_path(broken_run)
    build_exhibit(broken_run, path, lambda stage: print(f"{stage} …", file=sys.stderr, flush=True))
    return open_trace_file(path, {"step": broken_run.step}, has_tour=True)
