"""`flexinspect import`: a run that another tool has dumped becomes a trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from flexinspect.cli.output import errors_as_json, print_json, print_lines
from flexinspect.cli.progress import open_bar
from flexinspect.core.text import plural

DESCRIPTION = """Make a trace of a run that another tool has dumped: the tree of transformers'
model_addition_debugger, the tensor dumps of SGLang, or a folder of safetensors files with a
description (docs/import.md). The format is found by the content of the folder. What the dump does
not hold is shown as not recorded, and rules that need it do not run. No file of the dump is
executed: of .pt files only tensors and plain data are read."""

EXAMPLES = """examples:
  flexinspect import debug_tree/ -o run.flextrace
  flexinspect import dumps/TP0_PP0_Rank0_pid123 -o run.flextrace --tokenizer ./Llama-3.2-1B
  flexinspect import my_dump/ --format described -o run.flextrace --overwrite
  flexinspect import my_dump/ -o run.flextrace --json | jq -r '.lacks[]'
  flexinspect open run.flextrace

exit codes: 0 success, 2 the dump or the request is invalid, or the trace cannot be written
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=Path, help="the folder that the other tool has written")
    add("-o", "--out", metavar="TRACE", type=Path, help="the trace (default: FOLDER.flextrace)")
    formats = "described, sglang-dumper, sglang-passes, transformers-debugger or of a plug-in"
    add("--format", metavar="NAME", help=f"the format, if it is not found: {formats}")
    words = "gives the tokens their words: a folder with tokenizer.json, or a model on this machine"
    add("--tokenizer", metavar="MODEL_OR_FOLDER", help=words)
    add("--overwrite", action="store_true", help="replace an older trace")
    add("--json", action="store_true", help="print what was imported as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the trace and say what it holds.

    Raises `UsageError` for a dump that cannot be read, and `TraceWriteError`.
    """
    with errors_as_json(args.json, trace=None):
        return _import(args)


def _import(args: argparse.Namespace) -> int:
    from flexinspect.core.environment import command_path
    from flexinspect.importers.importer import find_importer
    from flexinspect.importers.trace_builder import write_trace
    from flexinspect.importers.vocabulary import load_vocabulary

    importer = find_importer(args.folder, args.format)
    target = args.out or Path(f"{args.folder.resolve().name}.flextrace")
    vocabulary = load_vocabulary(args.tokenizer)
    with open_bar("importing") as bar:

        def tick() -> None:
            bar.update()

        dump = importer.open(args.folder, tick)
        bar.total = dump.n_parts
        made = write_trace(dump, importer.name, target, vocabulary, overwrite=args.overwrite)
    if args.json:
        print_json(made)
        return 0
    counts = f"{plural(made.n_generations, 'generation')}, {plural(made.n_steps, 'step')}"
    lines = [
        f"{target}: imported from {made.source}, {counts}",
        f"holds {', '.join(made.holds) or 'no records'}",
        f"not in the dump: {', '.join(made.lacks)}",
        *made.notes,
        f"next  flexinspect open {command_path(target.absolute())}",
    ]
    print_lines(lines)
    return 0
