"""`python -m benchmarks.gpu`: every CUDA path in one run of 8 minutes at most.

Kernels beside an oracle, then capture: whether it is right and what it costs (`gpu_capture`). It
stops starting new work when its time is over, says what it left out, and saves each result at once.
Standard output has tables and, at the end, one line of JSON. `--small` runs the same code on any
device in seconds; the tests do that on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks import gpu_capture
from benchmarks.common import RESULTS, machine
from benchmarks.gpu_capture import Facts
from flexinspect.analysis.kernel_report import KernelEvaluation, evaluation_lines, summary_lines
from flexinspect.analysis.kernel_speed import SpeedReport, speed_lines
from flexinspect.core.environment import replace_file
from flexinspect.core.errors import UsageError, summarize_error
from flexinspect.inputs.kernel_configs import KernelRequest
from flexinspect_hooks.kernels.builtin_kernels import NAMES
from flexinspect_hooks.kernels.comparison import KernelComparison
from flexinspect_hooks.kernels.problem import choose_device

SECONDS = 480
_COMPARE_SHARE = 0.6  # of the time; the rest is for the timings
_LARGE = """
[[config]]
name = "head-128-bfloat16"
dtype = "bfloat16"
batch = 2
q_heads = 8
kv_heads = 2
q_len = 512
kv_len = 512
head_dim = 128
mask = "causal"

[[config]]
name = "decode-bfloat16"
dtype = "bfloat16"
q_heads = 8
kv_heads = 2
q_len = 1
kv_len = 1024
head_dim = 128
mask = "causal"
"""
"""Sizes of real models, which the built-in table leaves to machines with a GPU."""

_SMALL_CONFIGS = ("causal-float32", "decode-float32")
_TIMED = ("sdpa", "sdpa-flash", "sdpa-cudnn", "flash-attn", "flex-compiled")
_SMALL_TIMED = ("sdpa", "flex")


def measure_kernels(
    *, seconds: float, small: bool, device: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Compare all kernels on all configurations and time them; return the numbers for JSON."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "kernels.toml")
        table.write_text(_LARGE, "utf-8")
        return _measure(start, table, seconds=seconds, small=small, device=device, say=say)


def _measure(
    start: float,
    table: Path,
    *,
    seconds: float,
    small: bool,
    device: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    request = KernelRequest(kernels=("all",), table=str(table), device=device, n_runs=3)
    done: list[KernelEvaluation] = []
    left_out: list[str] = []
    for part in _requests(request, small=small):
        if time.monotonic() - start > seconds * _COMPARE_SHARE:
            left_out.append(f"{part.configs[0]} with {part.inputs} inputs")
            continue
        name = f"{part.configs[0]} with {part.inputs} inputs"
        try:
            for one in KernelComparison(part).evaluations(say):
                done.append(one)
                if time.monotonic() - start > seconds:
                    left_out.append(f"kernels after {one.kernel} on {name}")
                    break
        except Exception as error:  # an error of CUDA ends the process: keep what is done
            left_out.append(f"{name}: {summarize_error(error)}")
    speeds: list[SpeedReport] = []
    for part in _timed_requests(request, small=small):
        name = f"times of {part.configs[0]} at {part.lengths[0]} keys"
        if time.monotonic() - start > seconds:
            left_out.append(name)
            continue
        try:
            speeds.append(KernelComparison(part).speed(say))
        except Exception as error:
            left_out.append(f"{name}: {summarize_error(error)}")
    differing = [one for one in done if one.status in ("differs", "varies")]
    for one in differing:
        print("\n".join(evaluation_lines(one)))
    if done:
        print("\n".join(summary_lines(done)))
    print("\n".join(f"left out: {text}" for text in left_out))
    for report in speeds:
        print("\n".join(speed_lines(report)))
    return {
        "seconds": round(time.monotonic() - start, 1),
        "left_out": left_out,
        "evaluations": [one.as_json() for one in done],
        "speed": [report.as_json() for report in speeds],
    }


def _requests(request: KernelRequest, *, small: bool) -> Iterator[KernelRequest]:
    """One request per configuration, so that the time is checked between them."""
    configs: tuple[str, ...] = _SMALL_CONFIGS
    if small:
        kernels = tuple(name for name in NAMES if name != "flex-compiled")
        request = replace(request, kernels=kernels)
    else:
        configs = tuple(config.name for config in KernelComparison(request).table.config)
    for name in configs:
        yield replace(request, configs=(name,))
    for inputs in ("unit", "token"):
        yield replace(request, configs=("causal-float32",), inputs=inputs)


def _timed_requests(request: KernelRequest, *, small: bool) -> Iterator[KernelRequest]:
    lengths = (64,) if small else (1024, 2048, 4096)
    config = "causal-float32" if small else "head-128-bfloat16"
    for length in lengths:
        yield replace(
            request,
            kernels=_SMALL_TIMED if small else _TIMED,
            configs=(config,),
            inputs="unit",
            lengths=(length,),
            repeats=3 if small else 30,
        )


CASES = {"kernels": (), "checks": ("checks",), "costs": ("costs",), "capture": ("checks", "costs")}
"""The cases, with what each measures of capture; `all` is the kernels, the checks and the costs."""
_KERNEL_SHARE = 0.35  # of the time, where all cases run


def main(arguments: list[str] | None = None) -> int:
    """Run the cases and save their numbers; return 1 if a kernel differs or a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("case", nargs="?", choices=("all", *CASES), default="all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit (%(default)s)")
    text = "default: cuda; with --small, the CPU where there is none"
    parser.add_argument("--device", default="", help=text)
    parser.add_argument("--small", action="store_true", help="a few seconds, on any device")
    parser.add_argument("--tokens", type=int, default=64, help="of the costs (%(default)s)")
    parser.add_argument("--out", type=Path, help="default: gpu-CASE.json in benchmarks/results")
    args = parser.parse_args(arguments)
    try:
        device = choose_device(args.device or ("auto" if args.small else "cuda")).type
    except UsageError as error:
        parser.error(error.message)
    out = args.out or RESULTS / f"gpu-{args.case}.json"

    def save(facts: Facts) -> Facts:
        """Write what is measured so far: a run that is killed leaves it."""
        result = {"case": f"gpu-{args.case}", "machine": machine(device), **facts}
        text = json.dumps(result, indent=1, default=str) + "\n"
        replace_file(out, text.encode())
        return result

    facts = _run(args, device, save=save)
    print(json.dumps(save(facts), default=str))
    return int(_has_failed(facts))


def _run(args: argparse.Namespace, device: str, *, save: Callable[[Facts], Any]) -> Facts:
    """Run a case, or all, and print their tables; the facts of capture have a key of their own."""
    case, seconds, small = args.case, args.seconds, args.small
    until, facts = time.monotonic() + seconds, Facts()
    if case in ("all", "kernels"):
        share = seconds * (_KERNEL_SHARE if case == "all" else 1)
        facts = measure_kernels(seconds=share, small=small, device=device, say=_say)
        save(facts)
    parts = CASES["capture" if case == "all" else case]
    if parts:
        facts["capture"] = gpu_capture.measure(
            *(device, parts),
            seconds=max(0.0, until - time.monotonic()),
            small=small,
            tokens=4 if small else args.tokens,
            say=_say,
            save=lambda found: save(facts | {"capture": found}),
        )
        print(gpu_capture.table(facts["capture"]))
    return facts


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _has_failed(facts: dict[str, Any]) -> bool:
    kernels = any(one["status"] in ("differs", "varies") for one in facts.get("evaluations", ()))
    found = facts.get("capture", {}).get("checks", ())
    return kernels or any(one["passed"] is False for one in found)


if __name__ == "__main__":
    sys.exit(main())
