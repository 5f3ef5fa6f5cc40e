"""`flexinspect vscode`: write debug configurations for VS Code into a folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flexinspect.cli.flags import add_switches

DESCRIPTION = (
    "Add configurations to .vscode/launch.json: run under the debugger, attach to a\n"
    "run, attach by process id, run the tests. The existing content of the file is kept,\n"
    "including comments and configurations of the same name."
)
EXAMPLES = """\
examples:
  flexinspect vscode                      # .vscode/launch.json of this folder
  flexinspect vscode --folder ~/project
  flexinspect vscode --dry-run            # print what would be written
"""


def configure(parser: argparse.ArgumentParser) -> None:
    folder = "the folder that VS Code opens (default: here)"
    parser.add_argument("--folder", type=Path, default=Path(), help=folder)
    add_switches(parser, dry_run="print the file instead of writing it")


def run(args: argparse.Namespace) -> int:
    """Write the file, or print it with --dry-run."""
    from flexinspect.launch.vscode_config import attach_notes, write_launch

    path, merged = write_launch(args.folder, dry_run=args.dry_run)
    if args.dry_run:
        sys.stdout.write(merged.text)
    lines = [f"added  {name}" for name in merged.added] + [f"kept   {name}" for name in merged.kept]
    end = "nothing to add" if not merged.added else "not written" if args.dry_run else "written"
    out = sys.stderr if args.dry_run else sys.stdout
    print("\n".join([*lines, f"{path}: {end}"]), file=out)
    for note in attach_notes() if merged.added else ():
        print(f"flexinspect: {note}", file=sys.stderr)
    return 0
