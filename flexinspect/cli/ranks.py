"""`flexinspect ranks`: the traces of the ranks of one run as one: what differs, and who is late."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flexinspect.cli.output import print_json, print_lines
from flexinspect.cli.progress import progress_bar
from flexinspect.core.errors import UsageError
from flexinspect.core.text import print_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexinspect.analysis.ranks.rank_comparison import RankComparison
    from flexinspect.analysis.ranks.side_by_side import SideBySide
    from flexinspect.trace.reader import TraceReader

DESCRIPTION = """Compare the ranks of one distributed run, of which each wrote a trace into a folder
under torchrun. The report names the first step, layer and quantity in which ranks differ that must
be equal, the rank that the others wait for in collective calls, and ranks that stopped. What each
rank has of its own is not compared: its batch under data parallel, its heads under tensor
parallel."""

EXAMPLES = """examples:
  mkdir -p traces
  torchrun --nproc-per-node 2 -m flexinspect run --no-ui --out traces/run.flextrace script.py
  flexinspect ranks traces
  flexinspect ranks traces/run-rank1.flextrace --step 12
  flexinspect ranks traces --json | jq '.first'
  flexinspect findings traces              # the findings of all ranks, each once
  flexinspect open traces                  # the ranks side by side

exit codes: 0 equal within noise, 1 ranks differ or one stopped,
            2 the traces could not be read or the request is invalid
"""

AROUND = 5
"""Steps that are printed before and after the one of interest."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="DIR", type=Path, help="a folder of traces, or the trace of a rank")
    newest = "this run, if the folder has several (default: the newest)"
    add("--run", dest="name", metavar="NAME", help=newest)
    add("--generation", metavar="N", type=int, help="print the steps of this generation")
    around = "print the steps around this one (default: around the first place that differs)"
    add("--step", metavar="N", type=int, help=around)
    add("--json", action="store_true", help="print one JSON object, with all steps")


def run(args: argparse.Namespace) -> int:
    """Print the comparison; return 1 when ranks differ or one stopped.

    Raises `UsageError` for a folder without ranks, and for a step or generation that no rank has;
    `TraceError`.
    """
    from flexinspect.analysis.ranks.rank_comparison import compare_ranks
    from flexinspect.analysis.ranks.rank_run import find_run, open_ranks
    from flexinspect.analysis.ranks.rank_text import comparison_json, comparison_lines
    from flexinspect.analysis.run_diff.generations import DIFFERENT

    chosen, notes = find_run(args.path, args.name)
    with open_ranks(chosen) as readers:
        if not any(one.last is not None for one in chosen.traces):
            raise UsageError(f"No rank of {chosen.name} has recorded a step.")
        with progress_bar("comparing the ranks") as update:
            found = compare_ranks(chosen, readers, update)
        rows = _rows(args, found, readers)
    if args.json:
        print_json({**comparison_json(found, rows), "notes": notes})
    else:
        print_lines(comparison_lines(found, rows))
        for note in notes:
            print_message(note)
    return int(found.verdict == DIFFERENT or bool(chosen.stopped))


def _rows(
    args: argparse.Namespace, found: RankComparison, readers: Sequence[TraceReader]
) -> list[SideBySide]:
    """Return the steps to print. Raises `UsageError` for one that no rank has."""
    from flexinspect.analysis.ranks.side_by_side import generation_steps, load_steps_of_ranks

    first, known = found.first, {row.generation for one in readers for row in one.generations()}
    numbers = sorted(known) if args.json else [first.generation if first is not None else 0]
    if args.generation is not None:
        if args.generation not in known:
            raise UsageError(f"No rank has a generation {args.generation}.")
        numbers = [args.generation]
    rows: list[SideBySide] = []
    for generation in numbers:
        n_steps = generation_steps(readers, generation)
        if args.step is not None and not 0 <= args.step < n_steps:
            hint = f"The steps of generation {generation} are 0 to {n_steps - 1}."
            raise UsageError(f"No rank has a step {args.step}.", hint=hint)
        bounds = (0, n_steps)
        if args.step is not None or not args.json:
            at = first.place.step if first is not None and args.step is None else args.step or 0
            bounds = (max(at - AROUND, 0), min(at + AROUND + 1, n_steps))
        rows += load_steps_of_ranks(found, readers, generation, *bounds)
    return rows
