"""`flexinspect kernels`: compare attention kernels with float64, explain differences, time them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.cli.flags import n_threads, non_negative_int, positive_int
from flexinspect.cli.output import errors_as_json, print_json, print_lines
from flexinspect.cli.progress import ProgressLine
from flexinspect.core.errors import UsageError
from flexinspect.core.text import plural, print_message

if TYPE_CHECKING:
    from flexinspect.analysis.kernel_report import KernelEvaluation
    from flexinspect.drawing.theme import Theme
    from flexinspect.inputs.kernel_configs import KernelRequest

DESCRIPTION = """Compare an attention kernel with eager attention in float64 on a table of
configurations. The error of a reference in the same dtype sets the tolerance. The report has the
errors, which keys the kernel used (by the identity-V probe), whether runs are bit-equal, and the
class of a fault where the oracle with that fault gives the kernel's numbers."""

EXAMPLES = """examples:
  flexinspect kernels --kernel flex --kernel sdpa --config all
  flexinspect kernels --kernel my_kernel:attention --config gqa-bfloat16 --picture
  flexinspect kernels --kernel my_kernel:attention --range token   # which key was read
  flexinspect kernels --kernel mine --table kernels.toml --save baseline.json
  flexinspect kernels --kernel mine --table kernels.toml --check baseline.json
  flexinspect kernels --kernel sdpa --inputs captured --trace run.flextrace --step 3 --layer 2
  flexinspect kernels --kernel flex-compiled --kernel-option BLOCK_M=64 --bench --lengths 512,1024
  flexinspect kernels --list
docs/kernels.md describes kernels, tables, inputs and classes.

exit codes: 0 within tolerance, 1 a kernel differs, its runs differ, or it got worse,
            2 invalid request or nothing could be compared, 130 interrupted
"""
_MAX_DETAILED = 3
_PICTURE_WIDTH, _PICTURE_HEIGHT = 100, 16
_PICTURE_ENDINGS = (".svg", ".png", ".html")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    kernel = "a name of --list, module:function, or all (default: flex; may be repeated)"
    add("--kernel", metavar="NAME", action="append", help=kernel)
    reference = "the kernel whose error sets the tolerance (default: eager, in the same dtype)"
    add("--reference", metavar="NAME", default="eager", help=reference)
    configs = "a configuration of --list, or all (default: causal-float32; may be repeated)"
    add("--config", metavar="NAME", action="append", help=configs)
    add("--table", metavar="FILE", default="", help="TOML with configurations and kernels")
    add("--list", action="store_true", help="list the kernels and the configurations")
    add("--device", default="auto", help="cpu, cuda, or auto (default: CUDA where there is one)")
    add("--seed", metavar="N", type=non_negative_int, default=0, help="of random inputs")
    runs = "runs whose outputs must be bit-equal (default: 3; 1: not tested)"
    add("--runs", metavar="N", type=positive_int, default=3, help=runs)
    add("--no-grads", action="store_true", help="do not compare gradients")
    option = "for flex-compiled and flex-decode, such as BLOCK_M=64 (may be repeated)"
    add("--kernel-option", metavar="KEY=VALUE", action="append", default=[], help=option)
    add("--threads", default=None, type=n_threads, help="CPU threads")
    add("--json", action="store_true", help="print the result as JSON")
    _add_input_flags(parser)
    _add_result_flags(parser)


def _add_input_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("inputs").add_argument
    kinds = ("normal", "range", "captured")
    add("--inputs", choices=kinds, help="q, k, v: random (default), a range, or from a trace")
    ranges = "raw: q counts up, k = -q, v = q (default); unit: the same from 0 to 1; token: each "
    ranges += "row attends to one key, and v encodes its position"
    add("--range", nargs="?", const="raw", choices=("raw", "unit", "token"), help=ranges)
    add("--trace", metavar="TRACE", default="", help="with captured: a trace of level extreme")
    for name in ("generation", "branch", "step", "layer"):
        text = f"with captured: the {name} (default: 0)"
        add(f"--{name}", metavar="N", type=non_negative_int, default=None, help=text)


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    details = f"with more than {_MAX_DETAILED} evaluations: details of those within tolerance too"
    add("--details", action="store_true", help=details)
    add("--picture", action="store_true", help="print heat maps of the differences too")
    output = "save the picture as FILE.svg, FILE.png or FILE.html"
    add("-o", "--output", metavar="FILE", type=Path, help=output)
    add("--save", metavar="FILE", type=Path, help="save the numbers as a baseline")
    add("--check", metavar="FILE", type=Path, help="fail if a number got worse than the baseline")
    add("--bench", action="store_true", help="time the kernels, beside SDPA")
    lengths = "with --bench: numbers of keys, such as 512,1024,2048"
    add("--lengths", metavar="N,N", default="", help=lengths)
    repeats = "with --bench: samples of each kernel (default: 20)"
    add("--repeats", metavar="N", type=positive_int, default=20, help=repeats)


def run(args: argparse.Namespace) -> int:
    """Compare, check or time kernels, and return the exit code. Raises `UsageError`."""
    with errors_as_json(args.json, evaluations=[]):
        if args.list:
            return _list(args)
        request = _request(args)
        _check(args)
        return _bench(args, request) if args.bench else _compare(args, request)


def _request(args: argparse.Namespace) -> KernelRequest:
    from flexinspect.inputs.kernel_configs import KernelRequest, TracePoint

    inputs = args.inputs or ("range" if args.range else "captured" if args.trace else "normal")
    if args.range and inputs != "range":
        raise UsageError(f"--range does not go with --inputs {inputs}.")
    place = {name: getattr(args, name) for name in ("generation", "branch", "step", "layer")}
    given = {name: number for name, number in place.items() if number is not None}
    if inputs == "captured" and not args.trace:
        raise UsageError("--inputs captured needs a trace.", hint="Name it: --trace run.flextrace")
    if inputs != "captured" and (args.trace or given):
        names = ", ".join(["--trace"] * bool(args.trace) + [f"--{name}" for name in given])
        raise UsageError(f"{names} goes with --inputs captured.")
    if inputs == "captured" and args.config:
        raise UsageError("--config does not go with --inputs captured: the trace has the shapes.")
    return KernelRequest(
        kernels=tuple(args.kernel or ("flex",)),
        reference=args.reference,
        configs=tuple(args.config or ("causal-float32",)),
        table=args.table,
        inputs=(args.range or "raw") if inputs == "range" else inputs,
        seed=args.seed,
        device=args.device,
        n_runs=args.runs,
        gradients=not args.no_grads,
        kernel_options=tuple(args.kernel_option),
        point=TracePoint(args.trace, **given) if inputs == "captured" else None,
        lengths=_lengths(args.lengths),
        repeats=args.repeats,
        threads=args.threads,
    )


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--lengths {text} is not a list of numbers such as 512,1024.")
    return tuple(map(int, parts))


def _check(args: argparse.Namespace) -> None:
    if args.output is not None and args.output.suffix.lower() not in _PICTURE_ENDINGS:
        raise UsageError(f"-o {args.output} is not .svg, .png or .html.")
    if args.bench and (args.save or args.check or args.output or args.picture):
        raise UsageError("--bench goes without --save, --check, --picture and -o.")
    if args.bench and len(args.config or ()) > 1:
        raise UsageError("--bench times one configuration at several lengths.")
    if (args.lengths or args.repeats != 20) and not args.bench:
        raise UsageError("--lengths and --repeats go with --bench.")
    if args.picture and args.json:
        raise UsageError("--picture and --json exclude each other.")
    for flag, file in (("-o", args.output), ("--save", args.save)):
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"{flag} {file}: there is no folder {file.parent}.")
    optional = {"flex-compiled", "flex-decode", "all"}
    if args.kernel_option and optional.isdisjoint((*(args.kernel or ()), args.reference)):
        raise UsageError("--kernel-option goes with --kernel flex-compiled or flex-decode.")
    if args.check is not None:
        from flexinspect.analysis.kernel_baseline import load_baseline

        load_baseline(args.check)  # a wrong file is reported before any kernel runs


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show what is done on stderr: one line that changes, or only the import of torch.

    A user's kernel may print; with --json its text must not be in the result.
    """
    with ProgressLine() as line, redirect_stdout(sys.stderr):
        if line.is_shown:
            line.show("importing torch")
        else:
            print("importing torch …")
        yield line.show


def _comparison(request: KernelRequest) -> Any:
    from flexinspect.core import plugins

    return plugins.load(plugins.CAPTURE, "kernels").KernelComparison(request)


def _compare(args: argparse.Namespace, request: KernelRequest) -> int:
    done: list[KernelEvaluation] = []
    with _progress() as report:
        done += _comparison(request).evaluations(report)
    worse = _worse(args, done)
    exit_code = _exit_code(args, done, worse)
    if args.json:
        facts: dict[str, Any] = {"evaluations": [one.as_json() for one in done]}
        print_json({**facts, "worse": worse, "exit_code": exit_code})
    else:
        _print(args, done, worse)
    if args.output is not None:
        _save_picture(args.output, done)
    if args.save is not None:
        _save_baseline(args.save, done)
    return exit_code


def _is_compared(done: Sequence[KernelEvaluation]) -> bool:
    """Tell whether any kernel could be compared."""
    return any(one.status != "not compared" for one in done)


def _save_baseline(file: Path, done: Sequence[KernelEvaluation]) -> None:
    """Save a baseline, unless it would have no number: an earlier one may be in the file."""
    from flexinspect.analysis.kernel_baseline import save_baseline

    if not _is_compared(done):
        print_message(f"{file} was not saved: nothing could be compared")
        return
    save_baseline(file, done)
    print_message(f"saved {file}")


def _worse(args: argparse.Namespace, done: Sequence[KernelEvaluation]) -> list[str]:
    if args.check is None:
        return []
    from flexinspect.analysis.kernel_baseline import load_baseline, regressions

    return [*regressions(load_baseline(args.check), done)]


def _exit_code(
    args: argparse.Namespace, done: Sequence[KernelEvaluation], worse: Sequence[str]
) -> int:
    """1 if a kernel fails; with a baseline, only where it did not fail already."""
    failing = [one for one in done if one.status in ("differs", "varies")]
    if args.check is not None:
        from flexinspect.analysis.kernel_baseline import is_new_fault, load_baseline

        baseline = load_baseline(args.check)
        failing = [one for one in failing if is_new_fault(baseline, one)]
    if worse or failing:
        return 1
    return 0 if _is_compared(done) else 2


def _print(
    args: argparse.Namespace, done: Sequence[KernelEvaluation], worse: Sequence[str]
) -> None:
    from flexinspect.analysis.kernel_report import evaluation_lines, summary_lines

    is_brief = len(done) > _MAX_DETAILED and not (args.details or args.picture)
    for one in done:
        if is_brief and one.is_same and not one.diagnoses:
            continue
        print_lines(evaluation_lines(one))
        if args.picture and one.maps:
            _print_picture(one)
    if len(done) > 1:
        print_lines(summary_lines(done))
    if args.check is not None:
        unknown = f"not checked against {args.check}: nothing could be compared"
        text = f"nothing got worse than {args.check}" if _is_compared(done) else unknown
        print_lines(worse or [text])


# -- pictures --------------------------------------------------------------------------------------


def _strips(one: KernelEvaluation, theme: Theme) -> list[Any]:
    from flexinspect.drawing.difference_maps import difference_picture

    size = {"width": _PICTURE_WIDTH, "height": _PICTURE_HEIGHT}
    bar = one.tolerance.max_abs if one.tolerance is not None else 0.0
    return difference_picture(one.maps, bar, theme, **size)


def _print_picture(one: KernelEvaluation) -> None:
    from flexinspect.cli.output import print_strips, terminal_theme

    print_strips(_strips(one, terminal_theme()))


def _save_picture(file: Path, done: Sequence[KernelEvaluation]) -> None:
    """Save the picture of the worst evaluation, or a page with all of them as HTML."""
    from flexinspect.analysis.kernel_report import evaluation_lines
    from flexinspect.drawing.picture_files import PagePart, save, save_page
    from flexinspect.drawing.theme import Theme

    drawn = [one for one in done if one.maps]
    if not drawn:
        raise UsageError("There is no picture: no kernel could be compared.")
    theme = Theme()
    if file.suffix.lower() == ".html":
        parts = [
            PagePart(_title(one), _strips(one, theme), [*evaluation_lines(one)]) for one in drawn
        ]
        save_page(file, parts, title="Attention kernels", theme=theme)
        print_message(f"saved {file}")
        return
    worst = max(drawn, key=_badness)
    save(file, _strips(worst, theme), title=_title(worst), theme=theme, note=worst.shape)
    others = f", the worst of {plural(len(drawn), 'evaluation')}" if len(drawn) > 1 else ""
    print_message(f"saved {file}: {_title(worst)}{others}")


def _title(one: KernelEvaluation) -> str:
    return f"{one.kernel} on {one.config}: errors against float64"


def _badness(one: KernelEvaluation) -> tuple[bool, float]:
    assert one.error is not None
    assert one.tolerance is not None
    is_bad = not one.is_same
    return is_bad, one.error.max_abs / one.tolerance.max_abs if one.tolerance.max_abs else 0.0


# -- times and lists -------------------------------------------------------------------------------


def _bench(args: argparse.Namespace, request: KernelRequest) -> int:
    from flexinspect.analysis.kernel_speed import speed_lines

    with _progress() as report:
        result = _comparison(request).speed(report)
    if args.json:
        print_json(result.as_json())
    else:
        print_lines(speed_lines(result))
    named = [one for one in result.timings if one.kernel in request.kernels]
    return 2 if named and not any(one.samples for one in named) else 0


def _list(args: argparse.Namespace) -> int:
    from flexinspect.core import plugins
    from flexinspect.inputs.kernel_configs import read_table

    table = read_table(Path(args.table) if args.table else None)
    with _progress():
        module = plugins.load(plugins.CAPTURE, "kernels")
        kernels = module.list_kernels(args.table, args.device)
    if args.json:
        names = ("name", "description", "missing")
        rows = [dict(zip(names, row, strict=True)) for row in kernels]
        print_json({"kernels": rows, "configurations": list(table.config)})
        return 0
    print("kernels")
    for name, text, missing in kernels:
        print_lines([f"  {name:<15} {text}{f'. {missing}' if missing else ''}"])
    print("configurations")
    print_lines(f"  {each.name:<17} {each.describe()}" for each in table.config)
    return 0
