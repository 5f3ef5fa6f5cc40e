"""`flexinspect declare`: write down what a recorded run did not declare."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from flexinspect.cli.output import print_json, print_lines
from flexinspect.core.errors import UsageError
from flexinspect.core.text import plural

DESCRIPTION = """Write the segments of a recorded prompt to a declaration file. They are those into
which the executed mask cuts the prompt. With the file, the next run is compared with what you
meant, cell by cell."""

EXAMPLES = """examples:
  flexinspect declare run.flextrace                    (writes run.toml)
  flexinspect declare run.flextrace --move 1           (every border one token later)
  flexinspect declare run.flextrace --border 9=10      (only this border)
  flexinspect declare run.flextrace --out segments.toml --generation 1
  flexinspect run --declare run.toml my_script.py

exit codes: 0 success, 2 invalid request or unwritable file, the trace has no segments to declare,
            or their borders are suspect and --move is missing
"""

NO_PRESET = """The executed mask is no preset, so the file declares no mask: the next run compares
the borders, not the cells. Add a line like mask = "segment-isolation" for the cells."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path, help="the trace file")
    add("--generation", metavar="N", type=int, default=0, help="the generation (default: 0)")
    add("--move", metavar="N", type=int, help="move every border by N tokens, 0: as they ran")
    add(
        *("--border", "-b"),
        metavar="OLD=NEW",
        type=_parse_border,
        action="append",
        default=[],
        help="move the border at position OLD to NEW; may be given several times",
    )
    add("--out", metavar="FILE", type=Path, help="the file (default: that of the trace, .toml)")
    add("--overwrite", action="store_true", help="replace an existing file")
    add("--json", action="store_true", help="print the segments as JSON")


def _parse_border(text: str) -> tuple[int, int]:
    old, equals, new = text.partition("=")
    if not (equals and old.isdecimal() and new.isdecimal()):
        raise argparse.ArgumentTypeError(f"'{text}' is not OLD=NEW, for example 9=10")
    return int(old), int(new)


def run(args: argparse.Namespace) -> int:
    """Write the file and print its segments.

    Raises `UsageError` if there is nothing to declare, or the borders are suspect and it was not
    said how to move them, and `TraceError`.
    """
    from flexinspect.analysis.inferred_declaration import UndeclaredMask
    from flexinspect.core.environment import check_free, save_file
    from flexinspect.trace.reader import open_trace

    out = args.out or Path(args.trace.with_suffix(".toml").name)
    check_free(out, overwrite=args.overwrite)
    with open_trace(args.trace) as reader, reader.snapshot():
        mask = UndeclaredMask(reader, args.generation)
        if args.move is None and not args.border and (odd := mask.describe_oddity()):
            hint = f"Say what you meant: {_describe_moves(mask.inferred.shift)}."
            raise UsageError(odd, hint=hint)
        declaration = mask.declare(args.move or 0, dict(args.border))
    save_file(out, declaration.toml(args.trace.name).encode())
    if args.json:
        print_json({"file": str(out), "declaration": declaration.as_json()})
        return 0
    preset = f", preset {declaration.preset}" if declaration.preset else ""
    print_lines(
        [
            f"{out}: {len(declaration.segments)} segments{preset}",
            *(f"  {entry.describe()}" for entry in declaration.segments),
            *([] if declaration.preset else NO_PRESET.splitlines()),
            f"next  flexinspect run --declare {shlex.quote(str(out))} …",
        ]
    )
    return 0


def _describe_moves(shift: int) -> str:
    """Return what the flags do with suspect borders, 0: no move of all puts them right."""
    fit = "--border OLD=NEW moves one border"
    if shift:
        side = "later" if shift > 0 else "earlier"
        fit = f"--move {shift} puts every border {plural(abs(shift), 'token')} {side}"
    return f"{fit}, --move 0 leaves them as they ran"
