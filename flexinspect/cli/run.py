"""`flexinspect run`: our own generation or a program of the user's, captured in its own process."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from flexinspect.cli.flags import (
    DEBUG_FLAGS,
    add_break_flags,
    add_control_flags,
    add_debugger_flags,
    breakpoints_of,
    debugger_of,
    n_threads,
    on_break,
    positive_int,
    print_serve_address,
    serve_options,
)
from flexinspect.core.environment import git_state
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.records.job import (
    Declaration,
    Job,
    PromptTexts,
    SamplingOptions,
    ScriptJob,
    parse_layers,
    parse_steps,
)

EXAMPLES = """\
examples:
  flexinspect run --model demo --dataset demo --max-samples 2 --no-ui --out run.flextrace
  flexinspect run --prompt "What is the capital of France?" --prompt "France's capital city?"
  flexinspect run --model llama3.2_3b_it --mask shared-prefix --instruction "Answer briefly."
  flexinspect run --model llama3.2_3b_it --weights random --device cuda --level extreme --layers 0-3
  flexinspect run --debugpy 5678 --wait-for-client --no-ui      # then attach from VSCode
  flexinspect run --mask my_masks:window --temperature 0.8 --top-p 0.9 --seed 7
  flexinspect run --grads --grads-steps 0-3             # which paraphrase made each token
  flexinspect run --break 'entropy > 3 and step > 2' --break 'finding mask.* [once]'
  flexinspect run --no-ui --hold --serve 127.0.0.1:8421      # then: flexinspect ctl --help
  flexinspect run train_or_generate.py                 # your own program, unchanged
  flexinspect run script.py -- --its-own flags         # what follows the script is for it
  flexinspect run --no-ui --out t.flextrace script.py < questions.txt > answers.txt
  flexinspect run --declare prompt.toml -m package.module 3
"""

SCRIPT_FLAGS = (
    *("--declare", "--level", "--layers", "--out", "--overwrite"),
    *("--no-ui", "--json", "--verbose", "--threads", "--serve", "--no-control"),
    *("--break", "--wait"),
    *DEBUG_FLAGS,
)
"""Flags that go with a program of the user's."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Set the description and the arguments of this command."""
    parser.usage = (
        "%(prog)s [options]\n       %(prog)s [options] SCRIPT.py [--] [its arguments]\n"
        "       %(prog)s [options] -m MODULE [--] [its arguments]"
    )
    parser.description = (
        "Run a paraphrase-ensemble generation under FlexAttention, or a program of "
        "your own as Python would run it, in a process of its own, and record every step of every "
        "model in a trace. The exit code of a program is passed on."
    )
    parser.argument_default = argparse.SUPPRESS
    parser.epilog = EXAMPLES
    add_program_flags(parser)
    add_model_flags(parser)
    add_data_flags(parser)
    add_attention_flags(parser)
    _add_decoding_flags(parser)
    _add_gradient_flags(parser)
    _add_capture_flags(parser)
    add_debugger_flags(parser)
    add_break_flags(parser)
    add_control_flags(parser)
    parser.set_defaults(run=run)


def add_program_flags(parser: argparse.ArgumentParser) -> None:
    """Add the program, with what is declared of it."""
    group = parser.add_argument_group(
        "a program of your own", "with it go only the flags of this group and of the last one"
    )
    # A positional of this kind takes whatever follows it, flags too; but it is not required.
    program = group.add_argument(
        "program", nargs=argparse.PARSER, metavar="SCRIPT.py", help="run this file, unchanged"
    )
    program.required = False
    group.add_argument(
        "-m", dest="module", nargs=argparse.PARSER, metavar="MODULE", help="run this module"
    )
    group.add_argument(
        "--declare",
        metavar="FILE",
        help="TOML or JSON: the segments of its prompts and the mask that is meant",
    )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which model runs, and where."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", help="demo, an alias, a hub id or a folder (default: demo)")
    group.add_argument("--weights", choices=("pretrained", "random"))
    group.add_argument("--device", help="auto, cuda, cuda:N, cpu or mps")
    group.add_argument("--dtype", help="auto, float32, bfloat16 or float16")
    group.add_argument("--seed", type=int, help="of random weights and of sampling")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what is asked."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        metavar="NAME",
        help="demo, webqa, myriadlama, FILE.jsonl or package.module:Class "
        "(default: demo, unless --prompt is given)",
    )
    group.add_argument("--prompt", action="append", help="a paraphrase; repeat it for each one")
    group.add_argument("--max-samples", type=positive_int, help="default: 1")
    group.add_argument(
        *("--num-paraphrases", "--num_paraphrases"),
        type=positive_int,
        help="default: the first five, or all that --indices names",
    )
    group.add_argument(
        "--indices", "--indexs", metavar="0,1,2", help="which paraphrases of each sample"
    )
    group.add_argument("--instruction", help="shared text before the paraphrases")
    group.add_argument("--separator", help="after each paraphrase (default: \\n)")
    group.add_argument("--cue", help="before the answer (default: Answer:)")


def add_attention_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how the paraphrases see each other."""
    from flexinspect.masks.algebra import PRESETS, SEPARATOR_MODES
    from flexinspect.records.prompt import POSITION_MODES

    group = parser.add_argument_group("attention")
    group.add_argument(
        "--mask",
        metavar="MASK",
        help=f"{', '.join(PRESETS)}, or package.module:function (default: segment-isolation)",
    )
    group.add_argument("--separators", choices=SEPARATOR_MODES)
    group.add_argument("--positions", choices=POSITION_MODES)
    group.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile FlexAttention (default: on CUDA only)",
    )


def _add_decoding_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding (greedy unless a sampling flag is given)")
    group.add_argument("--max-new-tokens", type=positive_int, help="default: 32")
    group.add_argument("--stop", choices=("newline", "eos"), help="where an answer ends")
    group.add_argument("--sample", action="store_true", help="sample instead of greedy decoding")
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-k", type=int)
    group.add_argument("--top-p", type=float)


def _add_gradient_flags(parser: argparse.ArgumentParser) -> None:
    from flexinspect.records.token_gradients import GRADIENT_TARGETS

    group = parser.add_argument_group("gradients (taken when a generation is over)")
    group.add_argument(
        "--grads",
        nargs="?",
        const="logprob",
        choices=GRADIENT_TARGETS,
        help="of each generated token's log-probability (default), or of its margin to the next "
        "best one; a forward and a backward of the whole sequence per token",
    )
    group.add_argument("--grads-steps", metavar="0,5-7", help="of these steps (default: all)")
    group.add_argument(
        "--detect-anomaly",
        action="store_true",
        help="name the line of the forward whose backward makes a NaN; twice as slow",
    )


def _add_capture_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("capture and output")
    group.add_argument("--level", default="advanced", choices=("basic", "advanced", "extreme"))
    group.add_argument(
        "--layers",
        default=None,
        metavar="0,3,5-7",
        help="whose activations level extreme stores (default: all)",
    )
    group.add_argument(
        "--out", default=None, metavar="FILE", help="the trace (default: a name made from the run)"
    )
    group.add_argument(
        "--threads",
        default=None,
        type=n_threads,
        help="CPU threads (default: cores less one; of your own program: as it sets them)",
    )
    switches = {
        "--overwrite": "replace an existing trace",
        "--no-ui": "plain output, no interface",
        "--json": "print a summary as JSON on stdout",
        "--verbose": "no interface; print lengths, path and candidates of each step",
    }
    for name, text in switches.items():
        group.add_argument(name, default=False, action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Run the job that the flags describe."""
    try:
        job = checked_job(args)
        print_serve_address(job.serving)
    except FlexInspectError as error:
        if args.json:
            said = {"exit_code": error.exit_code, "error": error.message, "hint": error.hint}
            print(json.dumps({"trace": None, "generations": [], **said}, indent=2))
        raise
    if not (args.no_ui or args.json or args.verbose) and _is_interactive():
        from flexinspect.cli.interface import inspect_run

        return inspect_run(job)
    if isinstance(job, ScriptJob):
        return _run_script(job, as_json=args.json, verbose=args.verbose)
    from flexinspect.cli.live_run import show_run

    return show_run(job, as_json=args.json, verbose=args.verbose)


def _run_script(job: ScriptJob, *, as_json: bool, verbose: bool) -> int:
    """Run a program with our own streams; with `as_json` what it prints goes to stderr."""
    from flexinspect.launch.child_process import OutputRelay, ScriptProcess, forward_signals

    process = ScriptProcess(job, OutputRelay(hold=False, stdout=2 if as_json else 1))
    forward_signals(process)
    # The program runs by now: what shows its end may load meanwhile.
    from flexinspect.cli.live_run import show_script

    return show_script(process, as_json=as_json, verbose=verbose)


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()


def job_from_argv(argv: Sequence[str]) -> Job | ScriptJob:
    """Return the job of a command line ("run", "--model", ...). Raises `FlexInspectError`."""
    command, *arguments = argv
    parser = argparse.ArgumentParser(f"flexinspect {command}")
    configure(parser)
    return replace(checked_job(parser.parse_args(arguments)), argv=("flexinspect", *argv))


def checked_job(args: argparse.Namespace) -> Job | ScriptJob:
    """Return the job that parsed flags describe, with all that can be seen wrong now refused."""
    if hasattr(args, "program") or hasattr(args, "module"):
        return script_job(args, _generation_flags(args))
    if hasattr(args, "declare"):
        raise UsageError(
            "--declare goes with a program of your own.",
            hint="Name a script, or use --mask and --prompt.",
        )
    job = job_of(args)
    check_job(job)
    check_trace(job)
    return replace(job, debugger=debugger_of(args))


_GENERATION_ARGS = (
    *("model", "weights", "device", "dtype", "seed", "trust_remote_code", "dataset"),
    *("max_samples", "num_paraphrases", "indices", "mask", "separators", "positions", "compile"),
    *("max_new_tokens", "stop", "grads", "grads_steps", "detect_anomaly"),
)
_TEXT_ARGS = ("instruction", "separator", "cue")
_SAMPLING_ARGS = ("sample", "temperature", "top_k", "top_p")


def _generation_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of our own generation that were given, as they are written."""
    names = [
        name
        for name in (*_GENERATION_ARGS, "prompt", *_TEXT_ARGS, *_SAMPLING_ARGS)
        if hasattr(args, name)
    ]
    return [f"--{name.replace('_', '-')}" for name in names]


def job_of(args: argparse.Namespace) -> Job:
    """Return the job that parsed flags describe. Raises `UsageError`."""
    said = vars(args)
    texts = {name: _unescape(said[name]) for name in _TEXT_ARGS if name in said}
    _check_prompt_source(said)
    job = Job(
        out=args.out or "",
        **{name: said[name] for name in _GENERATION_ARGS if name in said},
        prompts=tuple(said.get("prompt", ())),
        level=args.level,
        layers=args.layers,
        threads=args.threads,
        overwrite=args.overwrite,
        breakpoints=breakpoints_of(args),
        on_break=on_break(args),
        hold=args.hold,
        control=args.control,
        serving=serve_options(args),
        texts=PromptTexts(**texts),
        sampling=_sampling({name: said[name] for name in _SAMPLING_ARGS if name in said}),
        argv=tuple(sys.argv),
    )
    if args.out is None:
        return replace(
            job, out=default_trace_name(f"{Path(job.model).name}-{job.mask}", Path.cwd())
        )
    return job


def _check_prompt_source(said: dict[str, Any]) -> None:
    if "dataset" in said and "prompt" in said:
        raise UsageError(
            "--prompt and --dataset exclude each other: both name what is asked.",
            hint="Leave one of them out.",
        )
    if "max_samples" in said and "prompt" in said:
        raise UsageError(
            "--max-samples counts the samples of a dataset, and --prompt is one by itself.",
            hint="Leave one of them out.",
        )


def _sampling(given: dict[str, Any]) -> SamplingOptions:
    """Return how tokens are chosen; any flag of sampling asks for it."""
    if not given:
        return SamplingOptions()
    given.pop("sample", None)
    options = SamplingOptions(do_sample=True, **given)
    options.check()
    return options


def _unescape(text: str) -> str:
    """Let \\n and \\t be written on a command line."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def default_trace_name(stem: str, folder: Path) -> str:
    """Return a readable name, from `stem` and the time, for a trace that is not in `folder` yet."""
    stem = re.sub(r"[^\w.-]+", "-", stem).strip("-")
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while (path := folder / f"{name}{f'-{number}' if number > 1 else ''}.flextrace").exists():
        number += 1
    return str(path)


def check_job(job: Job) -> None:
    """Refuse at once what needs no model to see: an unknown one, a preset, a dtype, a seed."""
    from flexinspect.inputs import declarations, model_names
    from flexinspect.inputs.config import load_config
    from flexinspect.inputs.model_sizes import check_dtype
    from flexinspect.masks import algebra

    if not 0 <= job.seed < 1 << 63:
        raise UsageError("--seed must lie between 0 and 2^63 - 1.")
    for text in (*job.prompts, *astuple(job.texts)):
        if not text.isascii() and text.encode("utf-8", "ignore").decode() != text:
            raise UsageError(f"The text {text!a} is not valid UTF-8.")
    check_dtype(job.dtype)
    _check_gradients(job)
    model_names.resolve(job.model, load_config())
    if ":" in job.mask:
        declarations.check_mask_mod_spec(job.mask)
    else:
        algebra.check_preset(job.mask)


def _check_gradients(job: Job) -> None:
    parse_steps(job.grads_steps)
    said = [("--grads-steps", job.grads_steps != "all"), ("--detect-anomaly", job.detect_anomaly)]
    for flag, is_given in said:
        if is_given and job.grads is None:
            raise UsageError(
                f"{flag} is about gradients, and none are asked for.", hint="Add --grads."
            )


def check_trace(job: Job | ScriptJob) -> None:
    """Refuse flags of the trace that cannot be: layers that are not stored, a file in the way."""
    if job.layers and job.level != "extreme":
        raise UsageError(
            "--layers chooses whose activations are stored, which only level extreme does.",
            hint="Add --level extreme, or leave --layers out.",
        )
    if not job.out:
        raise UsageError("--out is empty.", hint="Give a file name, or leave --out out.")
    if Path(job.out).exists() and not job.overwrite:
        raise UsageError(
            f"The trace {job.out} exists already.",
            hint="Choose another --out, or add --overwrite.",
        )


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
    from flexinspect.inputs.declarations import read_declaration

    return read_declaration(Path(args.declare))
