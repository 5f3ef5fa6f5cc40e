"""The job of `flexinspect run SCRIPT`: a program of the user's, with what was said of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flexinspect.commands.breakflags import breakpoints_of, on_break
from flexinspect.commands.debugflags import debugger_of
from flexinspect.commands.run import SCRIPT_FLAGS, check_trace, default_trace_name
from flexinspect.commands.serving import serve_options
from flexinspect.errors import UsageError
from flexinspect.job import Declaration, ScriptJob, parse_layers
from flexinspect.provenance import git_state

_MAX_LAYERS = 1 << 20


def script_job(args: argparse.Namespace, generation_flags: Sequence[str]) -> ScriptJob:
    """Return the job of a program; `given` are flags of our own generation that were given too.

    Raises `UsageError` for those, a program that is not there, and a bad declaration.
    """
    if args.hold:
        generation_flags = [*generation_flags, "--hold"]
    is_module = hasattr(args, "module")
    words = [*getattr(args, "module", ()), *getattr(args, "program", ())]
    program, rest = _split_program_args(words)
    if generation_flags:
        raise UsageError(
            f"{generation_flags[0]} is for our own generation, and {program} brings its own.",
            hint=f"With a program go {', '.join(SCRIPT_FLAGS)}; its own flags come after it.",
        )
    if not is_module:
        _check_file(program)
    job = ScriptJob(
        out=default_trace_name(Path(program).stem, Path.cwd()) if args.out is None else args.out,
        program=program,
        is_module=is_module,
        args=tuple(rest),
        level=args.level,
        layers=args.layers,
        threads=args.threads,
        overwrite=args.overwrite,
        breakpoints=breakpoints_of(args),
        on_break=on_break(args),
        control=args.control,
        serving=serve_options(args),
        declaration=_declaration(args),
        debugger=debugger_of(args),
        argv=tuple(sys.argv),
        git=git_state(Path.cwd()),
    )
    parse_layers(job.layers, _MAX_LAYERS)
    check_trace(job)
    return job


def _split_program_args(words: list[str]) -> tuple[str, list[str]]:
    """Return the program and its arguments, without the "--" between them."""
    program, *rest = words[1:] if words[0] == "--" else words
    return program, rest[1:] if rest[:1] == ["--"] else rest


def _check_file(program: str) -> None:
    path = Path(program)
    if path.is_dir():
        raise UsageError(
            f"{program} is a folder, not a script.", hint=f"For a package: -m {path.name}."
        )
    if not path.is_file():
        raise UsageError(
            f"There is no script {program}.",
            hint="Give a Python file, -m MODULE, or flags alone for our own generation.",
        )


def _declaration(args: argparse.Namespace) -> Declaration:
    if not hasattr(args, "declare"):
        return Declaration()
    from flexinspect.declare import read_declaration

    return read_declaration(Path(args.declare))
