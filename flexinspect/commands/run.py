"""`flexinspect run`: a paraphrase-ensemble generation, captured in a process of its own."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

from flexinspect.errors import FlexInspectError, UsageError
from flexinspect.job import Job, SamplingOptions, Texts

EXAMPLES = """\
examples:
  flexinspect run --model demo --dataset demo --max-samples 2 --no-ui --out run.flextrace
  flexinspect run --prompt "What is the capital of France?" --prompt "France's capital city?"
  flexinspect run --model llama3.2_3b_it --mask shared-prefix --instruction "Answer briefly."
  flexinspect run --model llama3.2_3b_it --weights random --device cuda --level extreme --layers 0-3
  flexinspect run --mask my_masks:window --temperature 0.8 --top-p 0.9 --seed 7
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="run a generation under FlexAttention and record every step",
        description="Run a paraphrase-ensemble generation under FlexAttention, in a process of its "
        "own, and record every step in a trace.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model_flags(parser)
    _add_data_flags(parser)
    _add_attention_flags(parser)
    _add_decoding_flags(parser)
    _add_capture_flags(parser)
    parser.set_defaults(run=run)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", default="demo", help="demo, an alias, a hub id or a folder (default: demo)"
    )
    group.add_argument("--weights", default="pretrained", choices=("pretrained", "random"))
    group.add_argument("--device", default="auto", help="auto, cuda, cuda:N, cpu or mps")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    group.add_argument("--seed", type=int, default=0, help="of random weights and of sampling")
    group.add_argument("--threads", type=_positive, help="CPU threads (default: cores less one)")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        metavar="NAME",
        help="demo, webqa, myriadlama, FILE.jsonl or package.module:Class "
        "(default: demo, unless --prompt is given)",
    )
    group.add_argument(
        "--prompt", action="append", default=[], help="a paraphrase; repeat it for each one"
    )
    group.add_argument("--max-samples", type=_positive, default=1, help="default: 1")
    group.add_argument(
        *("--num-paraphrases", "--num_paraphrases"),
        type=_positive,
        help="default: the first five, or all that --indices names",
    )
    group.add_argument(
        "--indices", "--indexs", metavar="0,1,2", help="which paraphrases of each sample"
    )
    group.add_argument("--instruction", default="", help="shared text before the paraphrases")
    group.add_argument("--separator", default="\\n", help="after each paraphrase (default: \\n)")
    group.add_argument("--cue", default="Answer:", help="before the answer (default: Answer:)")


def _add_attention_flags(parser: argparse.ArgumentParser) -> None:
    from flexinspect.masks import PRESETS, SEPARATORS
    from flexinspect.prompts import POSITIONS

    group = parser.add_argument_group("attention")
    group.add_argument(
        "--mask",
        default="segment-isolation",
        metavar="MASK",
        help=f"{', '.join(PRESETS)}, or package.module:function (default: segment-isolation)",
    )
    group.add_argument("--separators", default="attached", choices=SEPARATORS)
    group.add_argument("--positions", default="contiguous", choices=POSITIONS)
    group.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compile FlexAttention (default: on CUDA only)",
    )


def _add_decoding_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding (greedy unless a sampling flag is given)")
    group.add_argument("--max-new-tokens", type=_positive, default=32, help="default: 32")
    group.add_argument(
        "--stop", default="newline", choices=("newline", "eos"), help="where an answer ends"
    )
    group.add_argument("--sample", action="store_true", help="sample instead of greedy decoding")
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-k", type=int)
    group.add_argument("--top-p", type=float)


def _add_capture_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("capture and output")
    group.add_argument("--level", default="advanced", choices=("basic", "advanced", "extreme"))
    group.add_argument(
        "--layers", metavar="0,3,5-7", help="whose activations level extreme stores (default: all)"
    )
    group.add_argument(
        "--out", metavar="FILE", help="the trace (default: a name made from the run)"
    )
    group.add_argument("--overwrite", action="store_true", help="replace an existing trace")
    group.add_argument("--no-ui", action="store_true", help="plain output, no interface")
    group.add_argument("--json", action="store_true", help="print a summary as JSON on stdout")
    group.add_argument(
        "--verbose",
        action="store_true",
        help="no interface; print lengths, path and candidates of each step",
    )


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the job that the flags describe."""
    from flexinspect.commands.live import show_run

    try:
        job = job_of(args)
        _check_early(job)
    except FlexInspectError as error:
        if args.json:
            said = {"exit_code": error.exit_code, "error": error.message, "hint": error.hint}
            print(json.dumps({"trace": None, "generations": [], **said}, indent=2))
        raise
    if not (args.no_ui or args.json or args.verbose) and _on_a_terminal():
        from flexinspect.commands.open import inspect_run

        return inspect_run(job)
    return show_run(job, as_json=args.json, verbose=args.verbose)


def _on_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()


def job_from_words(words: Sequence[str]) -> Job:
    """Return the job of a command line ("run", "--model", ...). Raises `FlexInspectError`."""
    from flexinspect.commands import build_parser

    job = job_of(build_parser().parse_args(words))
    _check_early(job)
    return replace(job, argv=("flexinspect", *words))


def job_of(args: argparse.Namespace) -> Job:
    """Return the job that parsed flags describe. Raises `UsageError`."""
    return Job(
        out=default_name(args.model, args.mask, Path.cwd()) if args.out is None else args.out,
        model=args.model,
        dataset=_dataset(args),
        prompts=tuple(args.prompt),
        max_samples=args.max_samples,
        num_paraphrases=args.num_paraphrases,
        indices=args.indices,
        device=args.device,
        dtype=args.dtype,
        weights=args.weights,
        seed=args.seed,
        mask=args.mask,
        separators=args.separators,
        positions=args.positions,
        max_new_tokens=args.max_new_tokens,
        stop=args.stop,
        level=args.level,
        layers=args.layers,
        compile=args.compile,
        threads=args.threads,
        trust_remote_code=args.trust_remote_code,
        overwrite=args.overwrite,
        texts=Texts(*map(_unescaped, (args.instruction, args.separator, args.cue))),
        sampling=_sampling(args),
        argv=tuple(sys.argv),
    )


def _dataset(args: argparse.Namespace) -> str:
    if args.dataset is not None and args.prompt:
        raise UsageError(
            "--prompt and --dataset exclude each other: both name what is asked.",
            hint="Leave one of them out.",
        )
    return "demo" if args.dataset is None else str(args.dataset)


def _sampling(args: argparse.Namespace) -> SamplingOptions:
    given = (args.temperature, args.top_k, args.top_p)
    if not args.sample and given == (None, None, None):
        return SamplingOptions()
    options = SamplingOptions(
        do_sample=True,
        temperature=1.0 if args.temperature is None else args.temperature,
        top_k=args.top_k or 0,
        top_p=1.0 if args.top_p is None else args.top_p,
    )
    options.check()
    return options


def _unescaped(text: str) -> str:
    """Let \\n and \\t be written on a command line."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def default_name(model: str, mask: str, folder: Path) -> str:
    """Return a readable name for a trace that does not exist yet in `folder`."""
    stem = re.sub(r"[^\w.-]+", "-", f"{Path(model).name}-{mask}").strip("-")
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while (path := folder / f"{name}{f'-{number}' if number > 1 else ''}.flextrace").exists():
        number += 1
    return str(path)


def _check_early(job: Job) -> None:
    """Refuse at once what needs no process to see: unknown model, preset, existing trace."""
    from flexinspect import masks, models
    from flexinspect.config import load_config

    if not 0 <= job.seed < 1 << 63:
        raise UsageError("--seed must lie between 0 and 2^63 - 1.")
    if job.layers and job.level != "extreme":
        raise UsageError(
            "--layers chooses whose activations are stored, which only level extreme does.",
            hint="Add --level extreme, or leave --layers out.",
        )
    for text in (*job.prompts, *astuple(job.texts)):
        if not text.isascii() and text.encode("utf-8", "ignore").decode() != text:
            raise UsageError(f"The text {text!a} is not valid UTF-8.")
    models.resolve(job.model, load_config())
    if ":" not in job.mask:
        masks.check_preset(job.mask)
    if not job.out:
        raise UsageError("--out is empty.", hint="Give a file name, or leave --out out.")
    if Path(job.out).exists() and not job.overwrite:
        raise UsageError(
            f"The trace {job.out} exists already.",
            hint="Choose another --out, or add --overwrite.",
        )
