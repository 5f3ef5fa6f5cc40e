"""`flexinspect explain`: what the id of a finding stands for, and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from flexinspect.cli.output import print_json, print_lines, stdout_console
from flexinspect.core.errors import UsageError
from flexinspect.core.text import capitalize, did_you_mean

if TYPE_CHECKING:
    from flexinspect.rules.engine import FindingKind

DESCRIPTION = """Explain a finding: what its id stands for, why it matters, how to confirm it by
hand, and the usual fix. Without an id, list all of them."""

EXAMPLES = """examples:
  flexinspect explain segments.shifted
  flexinspect explain 'mask.*'
  flexinspect explain --json | jq 'keys'

exit codes: 0 success, 2 unknown id
"""
_SECTIONS = {"why": "Why it matters", "confirm": "How to confirm", "fix": "Likely fix"}


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("id", metavar="ID", nargs="?", help="the id of a finding; * matches any text")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the kinds of findings. Raises `UsageError` for an unknown id."""
    from flexinspect.analysis.proof_results import PROOF_FINDINGS
    from flexinspect.rules.engine import load_rules

    kinds = dict(sorted({**load_rules().finding_kinds, **PROOF_FINDINGS}.items()))
    chosen = {id_: kind for id_, kind in kinds.items() if args.id is None or fnmatch(id_, args.id)}
    if not chosen:
        hint = did_you_mean(args.id, kinds, "flexinspect explain lists all ids.")
        raise UsageError(f"There is no finding '{args.id}'.", hint=hint)
    if args.json:
        print_json(chosen)
    elif args.id is None:
        width = max(map(len, chosen))
        print_lines(f"{id_:<{width}}  {kind.meaning}" for id_, kind in chosen.items())
    else:
        _print_kinds(chosen)
    return 0


def _print_kinds(kinds: Mapping[str, FindingKind]) -> None:
    from rich.text import Text

    console = stdout_console()
    for number, (id_, kind) in enumerate(kinds.items()):
        if number:
            console.print()
        console.print(Text.assemble((id_, "bold"), f"  ({kind.severities})"))
        console.print(f"{capitalize(kind.meaning)}.")
        for field, heading in _SECTIONS.items():
            if text := " ".join(getattr(kind, field).split()):
                console.print(Text.assemble("\n", (f"{heading}. ", "cyan"), text))
