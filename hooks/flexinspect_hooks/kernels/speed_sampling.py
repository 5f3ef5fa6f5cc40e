"""Times of kernels: interleaved, so that drift of the machine meets all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from msgspec.structs import replace

from flexinspect.analysis.kernel_speed import SpeedReport, Timing, input_effect
from flexinspect.core.errors import UsageError, summarize_error
from flexinspect.inputs.kernel_configs import KernelConfig, check_config
from flexinspect_hooks.kernels.builtin_kernels import built_in
from flexinspect_hooks.kernels.calling import ContractError, Kernel, check_contract, options_of
from flexinspect_hooks.kernels.inputs import make_problem
from flexinspect_hooks.kernels.problem import Problem

BASELINE = "sdpa"
_MIN_SAMPLE_MS = 1.0  # a sample of a faster kernel is the mean of several calls
_MAX_CALLS = 200
_WARM_UPS = 3
_FLUSH_BYTES = 256_000_000  # as triton.testing.do_bench

Sampler = Callable[[], float]


def measure_speed(
    kernels: Sequence[Kernel],
    config: KernelConfig,
    lengths: Sequence[int],
    *,
    kinds: Sequence[str],
    repeats: int,
    device: torch.device,
    report: Callable[[str], None],
) -> SpeedReport:
    """Time kernels on a configuration with these numbers of keys, `repeats` samples each.

    The rows grow with the keys, except in a decode step of one row. SDPA is added as the baseline.
    `kinds` are the inputs; each is timed in the same round, so that samples are paired. On CUDA
    the L2 cache is overwritten before each sample.
    """
    if all(kernel.name != BASELINE for kernel in kernels):
        kernels = [built_in(BASELINE, device), *kernels]
    timings: list[Timing] = []
    for length in lengths:
        q_len = 1 if config.q_len == 1 else length
        sized = replace(config, q_len=q_len, kv_len=length)
        check_config(sized)
        problems = {kind: make_problem(sized, kind, 0, device) for kind in kinds}
        samplers: dict[tuple[str, str], Sampler] = {}
        refused: dict[str, str] = {}
        for kernel in kernels:
            report(f"{length} keys: warming {kernel.name} up")
            try:
                for kind, problem in problems.items():
                    samplers[kernel.name, kind] = _sampler(kernel, problem)
            except ContractError as error:
                refused[kernel.name] = error.message
        samples = _sample(samplers, repeats, partial(_report_round, report, length))
        for kernel in kernels:
            for kind in kinds:
                reason = refused.get(kernel.name, "")
                times = samples.get((kernel.name, kind), ()) if not reason else ()
                timings.append(_timing(kernel, kind, problems[kind], times, reason))
    effects = [input_effect(timings, kind) for kind in kinds[1:]]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    where = f"{name}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads"
    return SpeedReport(
        f"{config.describe()}; rows and keys as below",
        where,
        tuple(timings),
        tuple(filter(None, effects)),
    )


def _report_round(report: Callable[[str], None], length: int, number: int, total: int) -> None:
    report(f"{length} keys: round {number + 1} of {total}")


def _sample(
    samplers: dict[tuple[str, str], Sampler], repeats: int, on_round: Callable[[int, int], None]
) -> dict[tuple[str, str], list[float]]:
    """Take samples in turns, each round beginning with another kernel.

    Every second round runs backwards, because a sample after one of the same kernel finds its code
    and its memory warm.
    """
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in samplers}
    order = list(samplers)
    for number in range(repeats if order else 0):
        on_round(number, repeats)
        start = number % len(order)
        turn = [*order[start:], *order[:start]]
        for key in turn if number % 2 else reversed(turn):
            samples[key].append(samplers[key]())
    return samples


def _sampler(kernel: Kernel, problem: Problem) -> Sampler:
    """Return a function that gives milliseconds per call; the options are built beforehand."""
    check_contract(kernel, problem)
    tensors = [problem.q, problem.k, problem.v]
    if kernel.layout == "bshd":
        tensors = [each.transpose(1, 2).contiguous() for each in tensors]
    call = partial(kernel.function, *tensors, **options_of(kernel, problem))
    time_calls: Callable[[int], float] = partial(_cpu_time, call)
    if problem.device.type == "cuda":
        time_calls = _cuda_timer(call, problem.device)
    try:
        with torch.no_grad():
            fastest = min(time_calls(1) for _ in range(_WARM_UPS))
    except Exception as error:
        raise ContractError(f"It failed: {summarize_error(error)}") from error
    n_calls = min(max(math.ceil(_MIN_SAMPLE_MS / max(fastest, 1e-6)), 1), _MAX_CALLS)
    if problem.device.type == "cuda":
        n_calls = 1  # each call begins with a cold cache

    def sample() -> float:
        with torch.no_grad():
            return time_calls(n_calls)

    return sample


def _cpu_time(call: Callable[[], object], n_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(n_calls):
        call()
    return (time.perf_counter() - start) / n_calls * 1000


def _cuda_timer(call: Callable[[], object], device: torch.device) -> Callable[[int], float]:
    """Return a function that times calls by events on the device, each with a cold L2 cache.

    The cache is overwritten by `_FLUSH_BYTES`, or twice its size. That takes about 0.1 ms, in which
    Python launches the kernel, so that its launch is not part of the time.
    """
    size = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    flushed = torch.empty(max(size, _FLUSH_BYTES), dtype=torch.int8, device=device)

    def time_calls(n_calls: int) -> float:
        total = 0.0
        with torch.cuda.device(device):  # events are recorded on the streams of this device
            for _ in range(n_calls):
                start, end = (_event() for _ in range(2))
                torch.cuda.synchronize()
                flushed.zero_()
                start.record()
                call()
                end.record()
                torch.cuda.synchronize()
                total += start.elapsed_time(end)
        return total / n_calls

    return time_calls


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _timing(
    kernel: Kernel, kind: str, problem: Problem, samples: Sequence[float], reason: str
) -> Timing:
    config = problem.config
    n_cells = config.batch * config.q_heads * config.q_len * config.kv_len
    n_open = int(problem.cells.expand(config.batch, config.q_heads, -1, -1).sum())
    if not samples and not reason:
        raise UsageError("--repeats must be above 0.")
    return Timing(
        kernel=kernel.name,
        length=config.kv_len,
        inputs=kind,
        samples=tuple(samples),
        flops=4 * config.head_dim * n_cells,
        open_share=n_open / n_cells,
        reason=reason,
    )
