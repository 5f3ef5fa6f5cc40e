"""`flexinspect redact`: a copy of a trace that can be shown to strangers."""

from __future__ import annotations

import argparse
from pathlib import Path

from flexinspect.cli.flags import add_switches
from flexinspect.cli.output import print_json, print_lines
from flexinspect.core.environment import check_free
from flexinspect.core.text import ensure_printable, plural

DESCRIPTION = """Write a copy of a trace without what the prompt and the answer say, for instance
to attach to a bug report. Token ids, words, paths, arguments and program output become
placeholders or are left out; masks, shapes, kernel paths, attention shares, times and findings
stay. Activations are left out, because a model can compute the prompt from them."""

EXAMPLES = """examples:
  flexinspect redact run.flextrace                    (writes run-redacted.flextrace)
  flexinspect redact run.flextrace -o report.flextrace --overwrite
  flexinspect redact run.flextrace --keep-tensors     (only if the prompt may be known)

Names of Python functions, modules and parameters stay. Look at the copy before you send it:
  flexinspect dump run-redacted.flextrace

exit codes: 0 success, 2 invalid request or unreadable trace
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", type=Path, help="the trace file")
    out = "the copy (default: NAME-redacted.flextrace in the current folder)"
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help=out)
    add_switches(
        parser,
        keep_tensors="keep queries, keys, values, hidden states and whole rows of logits",
        overwrite="replace an existing file",
        json="print what was replaced as JSON",
    )


def run(args: argparse.Namespace) -> int:
    """Write the copy, and print what it no longer holds. Raises `UsageError` and `TraceError`."""
    from flexinspect.trace.reader import open_trace
    from flexinspect.trace.redaction import redact

    out = args.out or Path(f"{args.trace.stem}-redacted.flextrace")
    open_trace(args.trace).close()  # a sentence for what is not a trace
    check_free(out, overwrite=args.overwrite)
    found = redact(args.trace, out, keep_tensors=args.keep_tensors)
    if args.json:
        facts = {"tokens": found.n_tokens, "words": found.n_words, "output": found.n_outputs}
        print_json({"path": str(out), **facts, "dropped_arrays": found.dropped_arrays})
        return 0
    dropped = ", ".join(found.dropped_arrays) or "none"
    ids, words = plural(found.n_tokens, "token id"), plural(found.n_words, "word")
    print_lines(
        [
            ensure_printable(f"{out}: a copy with placeholders"),
            f"  replaced: {ids}, and {words} wherever they are quoted",
            ensure_printable(f"  left out: the program's output; arrays: {dropped}"),
        ]
    )
    return 0
