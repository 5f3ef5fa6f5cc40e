"""The flags of `flexinspect run`; `flexinspect prove` shares those of programs and generations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flexinspect.cli.flags import (
    add_low_bandwidth_flag,
    add_switches,
    n_threads,
    positive_int,
    trace_size,
)
from flexinspect.cli.ray_options import add_ray_flags
from flexinspect.core.addresses import parse_address


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [options]\n       %(prog)s [options] SCRIPT.py [--] [its arguments]\n"
        "       %(prog)s [options] -m MODULE [--] [its arguments]"
    )
    groups = "the groups capture and output, debugger, breakpoints and control (without --hold)"
    add_program_flags(parser, groups)
    add_generation_flags(parser)
    _add_decoding_flags(parser)
    _add_capture_flags(parser)
    add_ray_flags(parser)
    _add_debugger_flags(parser)
    _add_control_flags(parser)


def _add_group(parser: argparse.ArgumentParser, title: str, text: str | None = None) -> Any:
    """Return a new group, whose flags are missing from the result unless they were given."""
    return parser.add_argument_group(title, text, argument_default=argparse.SUPPRESS)


def add_program_flags(parser: argparse.ArgumentParser, groups: str) -> None:
    """Add the arguments that name the user's program, and its declaration.

    `groups` names the other groups of the command whose flags apply to a program.
    """
    add = _add_group(
        parser,
        "a program of your own",
        f"only the flags of this group and of {groups} apply to it",
    ).add_argument
    # PARSER consumes all following arguments, flags included; it is required by default.
    own = {"nargs": argparse.PARSER}
    add("program", **own, metavar="SCRIPT.py", help="run this file, unchanged").required = False
    add("-m", dest="module", **own, metavar="MODULE", help="run this module")
    declare = "TOML or JSON: the segments of its prompts and the declared mask"
    add("--declare", metavar="FILE", help=declare)


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of our own generation: its model, prompts and attention."""
    add_model_flags(parser)
    group = _add_group(parser, "data")
    add = group.add_argument
    add_dataset_flags(group, "demo, unless --prompt is given")
    add("--prompt", action="append", help="a paraphrase (may be repeated)")
    add("--max-samples", type=positive_int, help="default: 1")
    n_paraphrases = "default: the first five, or all of --indices"
    add("--num-paraphrases", "--num_paraphrases", type=positive_int, help=n_paraphrases)
    add_text_flags(group)
    add_attention_flags(parser)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the model, its weights and its device."""
    add = (group := _add_group(parser, "model")).add_argument
    add("--model", help="demo, an alias, a hub id or a folder (default: demo)")
    add("--weights", choices=("pretrained", "random"), help="default: pretrained")
    add("--device", help="auto, cuda, cuda:N, cpu or mps")
    add("--dtype", help="auto, float32, bfloat16 or float16")
    add("--seed", type=int, help="seed of random weights and of sampling (default: 0)")
    add_switches(group, trust_remote_code="allow code that comes with the model to run")


def add_dataset_flags(group: Any, default: str) -> None:
    """Add the flags that select a dataset and more wordings of its questions.

    `default` is the help about the default dataset.
    """
    add = group.add_argument
    names = "demo, webqa, myriadlama, FILE.jsonl or package.module:Class"
    add("--dataset", metavar="NAME", help=f"{names} (default: {default})")
    more = "more wordings of each question: templates, FILE.txt with {question} in each line, or "
    more += "FILE.jsonl with prepared ones"
    add("--paraphrases", metavar="SOURCE", help=more)


def add_text_flags(group: Any) -> None:
    """Add the flags that choose paraphrases by number, and the texts around them."""
    add = group.add_argument
    add("--indices", metavar="0,1,2", help="which paraphrases of each sample")
    add("--indexs", dest="indices", help=argparse.SUPPRESS)  # as scripts of self-ensemble spell it
    add("--instruction", help="shared text before the paraphrases")
    add("--separator", help="after each paraphrase (default: \\n)")
    add("--cue", help="before the answer (default: Answer:)")


def add_attention_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the mask, the position ids and the compilation."""
    from flexinspect.masks.mask_presets import PRESETS, SEPARATOR_MODES
    from flexinspect.records.prompt import POSITION_MODES

    add = _add_group(parser, "attention").add_argument
    masks = f"{', '.join(PRESETS)}, or package.module:function (default: segment-isolation)"
    add("--mask", metavar="MASK", help=masks)
    rows = "attached to the segment before (default), or isolated: their rows attend to nothing"
    add("--separators", choices=SEPARATOR_MODES, help=rows)
    ids = "position ids; reset: every paraphrase starts at the same one (default: contiguous)"
    add("--positions", choices=POSITION_MODES, help=ids)
    compiles = "compile FlexAttention (default: on CUDA only)"
    add("--compile", action=argparse.BooleanOptionalAction, help=compiles)


def _add_decoding_flags(parser: argparse.ArgumentParser) -> None:
    from flexinspect.records.step import GRADIENT_TARGETS

    group = _add_group(parser, "decoding (greedy unless a sampling flag is given)")
    add = group.add_argument
    add("--max-new-tokens", type=positive_int, help="default: 32")
    add("--stop", choices=("newline", "eos"), help="where an answer ends (default: newline)")
    add_switches(group, sample="sample instead of greedy decoding")
    add("--temperature", type=float, help="divides the logits; enables sampling (default: 1.0)")
    add("--top-k", type=int, help="best tokens to keep; enables sampling (default: 0, all)")
    add("--top-p", type=float, help="probability to keep; enables sampling (default: 1.0, all)")
    add = (group := _add_group(parser, "gradients (computed after a generation)")).add_argument
    target = "gradients of each generated token's log-probability (default), or of its margin to "
    target += "the next best token; one forward and backward of the whole sequence per token"
    add("--grads", nargs="?", const="logprob", choices=GRADIENT_TARGETS, help=target)
    add("--grads-steps", metavar="0,5-7", help="only of these steps (default: all)")
    anomaly = "report the line of the forward whose backward produces NaN; twice as slow"
    add_switches(group, detect_anomaly=anomaly)
    add = _add_group(parser, "equivalence (checked while generating)").add_argument
    check = (
        "recompute the whole sequence every N steps, without a cache and by another kernel, and "
    )
    check += "report layers that differ; each costs a forward over the sequence"
    add("--check-every", type=positive_int, metavar="N", help=check)


def _add_capture_flags(parser: argparse.ArgumentParser) -> None:
    add = (group := parser.add_argument_group("capture and output")).add_argument
    levels = "how much to record (default: advanced)"
    add("--level", default="advanced", choices=("basic", "advanced", "extreme"), help=levels)
    layers = "the layers whose activations level extreme stores (default: all)"
    add("--layers", metavar="0,3,5-7", help=layers)
    select = "level extreme also stores the outputs of these modules, by name, class and dtype: "
    select += "'module=mlp.* op=Linear dtype=bfloat16' (may be repeated)"
    add("--select", action="append", metavar="SELECTOR", default=[], help=select)
    add("--out", metavar="FILE", help="the trace file (default: named after the run)")
    size = "keep the trace below this, such as 500MB: less detail first, then fewer steps"
    add("--max-size", type=trace_size, metavar="SIZE", help=size)
    log = "append what happens to this file, as lines of Python's logging"
    add("--log-file", metavar="FILE", help=log)
    audit = (
        "of a program: at its end, compare its steps with an untouched copy of the model, for up "
    )
    audit += "to S seconds or a fifth of the run (default: 10; 0: not at all)"
    add("--audit-seconds", type=float, default=10.0, metavar="S", help=audit)
    invariants = "judge the run at its end by the invariants that flexinspect infer has learnt"
    add("--invariants", type=Path, metavar="FILE", help=invariants)
    threads = "CPU threads (default: one less than cores; for your own program: unchanged)"
    add("--threads", type=n_threads, help=threads)
    add_switches(
        group,
        overwrite="replace an existing trace",
        share="let other users of this machine read the trace (default: only you can)",
        no_ui="print plain output instead of opening the interface",
        json="print a summary as JSON on stdout",
        verbose="print the mask, its isolation, and the shapes, kernel path and candidates of each "
        "step; no interface",
    )
    add_low_bandwidth_flag(group)


def _add_debugger_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "debugger",
        "an uncompiled FlexAttention then runs each mask_mod as plain Python, so that breakpoints "
        "in it are hit; the values stay the same",
    )
    address = "let VS Code attach to the capture process at this address (0: any free port)"
    group.add_argument("--debugpy", type=_address, metavar="[HOST:]PORT", help=address)
    expose = "allow a HOST that other machines can reach"
    first = "wait for a client before anything runs"
    add_switches(group, wait_for_client=first, debugpy_expose=expose)
    pdb = "start pdb on this terminal at a breakpoint() or an exception"
    group.add_argument("--pdb", action="store_true", help=pdb)
    group = parser.add_argument_group("breakpoints", "docs/breakpoints.md describes the language")
    condition = "stop when this holds: 'entropy > 3 and step > 2', 'nan @ layers.*.self_attn', "
    condition += "'finding mask.* [once]' (may be repeated)"
    many: dict[str, Any] = {"dest": "breakpoints", "action": "append", "default": []}
    group.add_argument("--break", **many, metavar="EXPR", help=condition)
    wait = "pause at a breakpoint even without a terminal, instead of ending with exit code 3"
    add_switches(group, wait=wait)


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_control_flags(parser: argparse.ArgumentParser) -> None:
    title = "flexinspect ctl and flexinspect attach control a run while it is running"
    add = (group := parser.add_argument_group("control", title)).add_argument
    serve = "accept commands over TCP too; every request needs the token that is printed"
    add("--serve", metavar="HOST:PORT", help=serve)
    hold = "keep the model alive after the last generation, until ctl continue or Ctrl-C"
    stepping = "stop before the first step and after each one, and read commands (docs/control.md)"
    insecure = "let --serve listen on an address that other machines can reach, unencrypted"
    add_switches(group, interactive=stepping, hold=hold, insecure_bind=insecure)
    add("--no-control", dest="control", action="store_false", help="accept no commands")
    remote = "print the command lines to use this run from another machine, and exit"
    add_switches(group, remote_help=remote)
