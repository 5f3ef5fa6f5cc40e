"""Whether capture is right on a device, and what it costs: part of `python -m benchmarks.gpu`.

Checks on a small Llama, per dtype and uncompiled and compiled: the executed and the received mask
against the declared one, the LSE of each call, memory against the allocator's own figures, forwards
without synchronization, restore and fork. Then the cost of each level around the generation of
flexinspect, and around transformers' own with a static cache, which it compiles on CUDA.
"""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from benchmarks import capture, own
from benchmarks.common import Timing, bench_prompt, markdown, random_llama, real_model, time_flex
from benchmarks.engine import time_generate
from benchmarks.rewind import WARM, NullRecorder
from flexinspect.core.errors import summarize_error
from flexinspect.masks import key_blocks, mask_presets
from flexinspect.records.finding import Severity
from flexinspect.records.prompt import Prompt
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.generation.decoding import Decoder, StopCriteria
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import SpecMaskSource
from flexinspect_hooks.rewind.branching_decoder import BranchingDecoder

CHECK_TOKENS = 8
MODEL = "llama3.2_3b_it"
LSE_TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest absolute difference of a recomputed log-sum-exp, by the dtype of the model."""
MEMORY_TOLERANCE = 64 << 20
"""Bytes by which a step's figure may differ from the allocator's at the end of its forward."""
_SYNCHRONIZES = "synchroniz"
"""In the warning of `torch.cuda.set_sync_debug_mode`."""

Facts = dict[str, Any]
Say = Callable[[str], None]
Save = Callable[[Facts], None]


class Check(Struct, frozen=True):
    """A property that was checked. `passed` is None where it could not be, and `text` says why."""

    name: str
    passed: bool | None
    text: str


class Left:
    """The time that is left, and what was left out for lack of it."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self.left_out: list[str] = []

    @property
    def seconds(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._until - time.monotonic())

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """Run `work` unless time is over; None, with a sentence, if it did not run or failed."""
        if not self.seconds:
            self.left_out.append(f"{name}: no time was left")
            return None
        try:
            return work()
        except Exception as error:  # an error of CUDA ends the process: keep what is done
            self.left_out.append(f"{name}: {summarize_error(error)}")
            return None


def check_model(device: str, dtype: torch.dtype) -> Any:
    """Return a random Llama of 2 layers with heads of 64, as GPU kernels want them."""
    return random_llama(
        device,
        dtype,
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


# -- correctness ----------------------------------------------------------------------------------


def check_generation(device: str, dtype: torch.dtype, *, compiled: bool) -> list[Check]:
    """Record a generation at level advanced, and compare the trace with what must be in it."""
    model, prompt = check_model(device, dtype), bench_prompt(CHECK_TOKENS)
    allocated: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "check.flextrace"
        run = capture.CapturedRun(model, prompt, "advanced", compiled=compiled, tokens=CHECK_TOKENS)
        with TraceWriter.create(path, {}) as writer, _allocated(model, device, allocated):
            run._run(writer)
        with open_trace(path) as reader:
            kind = f"{_name(dtype)}, {'compiled' if compiled else 'uncompiled'}"
            return [
                _check_masks(reader, prompt, kind),
                _check_paths(reader, kind, compiled=compiled),
                _check_lse(reader, kind, _name(dtype)),
                _check_findings(reader, kind),
                _check_memory(reader, kind, allocated),
            ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_masks(reader: TraceReader, prompt: Prompt, kind: str) -> Check:
    n = len(prompt.ids)
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    mask = reader.mask(reader.calls(0, 0)[0].mask or "")
    if mask is None or mask.cells is None or mask.partial is None:
        return Check(f"masks, {kind}", False, "the prefill has no mask with cells and tables")
    tables = key_blocks.block_tables(spec, n, n)
    full = np.zeros_like(tables.full) if mask.full is None else mask.full[0]
    wrong = int(np.count_nonzero(mask.cells != spec.dense(n)[None]))
    blocks = np.count_nonzero(mask.partial[0] != tables.partial)
    blocks += np.count_nonzero(full != tables.full)
    text = f"{wrong} of {n * n:,} executed cells and {blocks} received blocks differ"
    return Check(f"masks, {kind}", not wrong and not blocks, text)


def _check_paths(reader: TraceReader, kind: str, *, compiled: bool) -> Check:
    wanted = "flex compiled" if compiled else "flex uncompiled"
    paths = [call.path for step in range(CHECK_TOKENS) for call in reader.calls(0, step)]
    other = sum(path != wanted for path in paths)
    text = f"{len(paths)} calls, {other} of them on another path than {wanted}"
    return Check(f"kernel path, {kind}", bool(paths) and not other, text)


def _check_lse(reader: TraceReader, kind: str, dtype: str) -> Check:
    found = {
        phase: [call.lse_error for step in steps for call in reader.calls(0, step)]
        for phase, steps in (("prefill", (0,)), ("decode", range(1, CHECK_TOKENS)))
    }
    errors = [one for each in found.values() for one in each]
    known = [one for one in errors if one is not None]
    if len(known) < len(errors) or not known:
        return Check(f"LSE, {kind}", False, f"{len(errors) - len(known)} calls were not checked")
    worst = {name: max(one for one in each if one is not None) for name, each in found.items()}
    tolerance = LSE_TOLERANCE[dtype]
    is_close = all(math.isfinite(one) and one <= tolerance for one in worst.values())
    parts = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    return Check(f"LSE, {kind}", is_close, f"largest error: {parts} (tolerance {tolerance:.0e})")


def _check_findings(reader: TraceReader, kind: str) -> Check:
    errors = [one for one in reader.findings() if one.severity is Severity.ERROR]
    text = errors[0].sentence if errors else "no error is reported"
    return Check(f"findings, {kind}", not errors, text)


@contextmanager
def _allocated(model: Any, device: str, found: list[int]) -> Iterator[None]:
    """Append what the allocator of CUDA holds at the end of each forward; nothing elsewhere."""
    if not device.startswith("cuda"):
        yield
        return

    def read(*_: Any) -> None:
        found.append(torch.cuda.memory_stats()["allocated_bytes.all.current"])

    handle = model.register_forward_hook(read)
    try:
        yield
    finally:
        handle.remove()


def _check_memory(reader: TraceReader, kind: str, allocated: list[int]) -> Check:
    name = f"memory, {kind}"
    if not allocated:
        return Check(name, None, "torch.cuda.memory_stats needs CUDA")
    recorded = [reader.memory(0, step) for step in range(len(allocated))]
    apart = [
        abs((one.cuda_allocated if one and one.cuda_allocated else 0) - wanted)
        for one, wanted in zip(recorded, allocated, strict=True)
    ]
    text = f"at most {max(apart) / (1 << 20):.1f} MiB from torch.cuda.memory_stats"
    return Check(name, max(apart) <= MEMORY_TOLERANCE, text)


def check_synchronization(device: str, dtype: torch.dtype, *, compiled: bool) -> Check:
    """Count what synchronizes in forwards with capture, beyond those of the bare generation.

    The reduction of a step is part of it: it runs when the forward ends.
    """
    name = f"no synchronization, {_name(dtype)}, {'compiled' if compiled else 'uncompiled'}"
    if not device.startswith("cuda"):
        return Check(name, None, "torch.cuda.set_sync_debug_mode needs CUDA")
    model, prompt = check_model(device, dtype), bench_prompt(CHECK_TOKENS)

    def bare() -> None:
        time_flex(model, prompt, compiled=compiled, new_tokens=CHECK_TOKENS)

    run = capture.CapturedRun(model, prompt, "advanced", compiled=compiled, tokens=CHECK_TOKENS)
    counts = []
    for work in (bare, run):
        work()  # compiles, and allocates what later steps reuse
        with _watched_forwards(model) as seen:
            work()
        counts.append(len(seen))
    text = f"{counts[1]} synchronizing calls in {CHECK_TOKENS} forwards, {counts[0]} of them bare"
    return Check(name, counts[1] <= counts[0], text)


@contextmanager
def _watched_forwards(model: Any) -> Iterator[list[str]]:
    """Collect the warnings about synchronizing calls between begin and end of each forward."""
    seen: list[str] = []

    def begin(*_: Any) -> None:
        torch.cuda.set_sync_debug_mode("warn")

    def end(*_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    handles = [model.register_forward_pre_hook(begin, prepend=True)]
    handles.append(model.register_forward_hook(end, always_call=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield seen
        finally:
            end()
            for handle in handles:
                handle.remove()
            seen += [str(one.message) for one in caught if _SYNCHRONIZES in str(one.message)]


def check_rewind(device: str, dtype: torch.dtype) -> Check:
    """Restore a step, go on, and fork: the same tokens again, and another one where forced."""
    model, prompt = check_model(device, dtype), bench_prompt(CHECK_TOKENS)
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    length = prompt.segments[-1].stop
    source = SpecMaskSource(spec, length=length, device=torch.device(device), compiled=False)
    recorder: Any = NullRecorder()
    with FlexPatch(model, source, compiled=False) as patch:
        decoder = BranchingDecoder(
            *(model, Decoder(model, prompt, sampling=WARM), patch, recorder),
            StopCriteria(CHECK_TOKENS),
        )
        for _ in range(CHECK_TOKENS - 1):
            decoder.advance()
        first = decoder._decoder.token_ids[:]
        decoder.restore(0, 2)
        while len(decoder._decoder.token_ids) < len(first):
            decoder.advance()
        again = decoder._decoder.token_ids[:]
        forced = (first[3] + 1) % model.config.vocab_size
        decoder.fork(0, 3, [forced])
        decoder.advance()
        forked = decoder._decoder.token_ids[:4]
    is_right = again == first and forked == [*first[:3], forced]
    n_differ = sum(a != b for a, b in zip(first, again, strict=True))
    text = f"{n_differ} of {len(first)} tokens differ after a restore; a fork begins {forked[3:]}"
    return Check(f"restore and fork, {_name(dtype)}", is_right, text)


def checks(device: str, left: Left, *, small: bool, say: Say) -> Iterator[Check]:
    """Yield the checks of correctness, as many as there is time for."""
    is_cuda = device.startswith("cuda")
    dtypes = (torch.bfloat16, torch.float16) if is_cuda else (torch.float32,)
    for dtype in dtypes:
        for compiled in (False,) if small else (False, True):
            kind = f"{_name(dtype)}, {'compiled' if compiled else 'uncompiled'}"
            say(f"checks, {kind}")
            generation = partial(check_generation, device, dtype, compiled=compiled)
            yield from left.run(kind, generation) or ()
            synchronization = partial(check_synchronization, device, dtype, compiled=compiled)
            one = left.run(f"synchronization, {kind}", synchronization)
            yield from filter(None, [one])
        one = left.run(f"restore, {_name(dtype)}", partial(check_rewind, device, dtype))
        yield from filter(None, [one])


# -- cost -----------------------------------------------------------------------------------------


def time_static(model: Any, prompt: Prompt, new_tokens: int) -> Timing:
    """Time transformers' `generate` with a static cache, for which it compiles the forward."""
    before = model.generation_config.cache_implementation
    model.generation_config.cache_implementation = "static"
    try:
        return time_generate(model, prompt, new_tokens)
    finally:
        model.generation_config.cache_implementation = before


def costs(device: str, left: Left, *, small: bool, tokens: int, say: Say) -> Iterator[Facts]:
    """Yield the ratios of each level to the same generation without capture, case by case."""
    model = check_model(device, torch.float32) if small else real_model(MODEL, device)
    weights = sum(one.nbytes for one in model.parameters())
    bandwidth = memory_bandwidth(device, small=small)
    cases: dict[str, Callable[[float], Facts]] = {
        "watch, eager generate": lambda s: own._measure(time_generate, model, s, tokens),
        "flex, uncompiled": lambda s: capture.measure(model, s, tokens, compiled=False),
    }
    if not small:  # last, because compiling may take longer than the time that is left
        cases["watch, static cache"] = lambda s: own._measure(time_static, model, s, tokens)
        cases["flex, compiled"] = lambda s: capture.measure(model, s, tokens, compiled=True)
    name = "the small Llama" if small else f"{MODEL}, random weights"
    found: Facts = {}
    facts = {"model": name, "weights_bytes": weights, "bandwidth": bandwidth, "cases": found}
    for number, (case, measured) in enumerate(cases.items()):
        share = 0.0 if small else left.seconds / (len(cases) - number) / 2  # warming up takes half
        say(f"cost, {case}")
        one = left.run(f"cost, {case}", partial(measured, share))
        if one:
            read_ms = 1e3 * weights / bandwidth
            one["bandwidth_share"] = round(read_ms / one["decode_ms_without"], 3)
            found[case] = one
        yield facts


def memory_bandwidth(device: str, *, small: bool) -> float:
    """Return the bytes a second of a copy within the device's memory, read and written."""
    n = (1 << 24) if small else (1 << 30)
    source = torch.ones(n, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = math.inf
    for _ in range(5):
        _wait(device)
        started = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return 2 * n / best


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def measure(
    device: str,
    parts: Collection[str],
    *,
    seconds: float,
    small: bool,
    tokens: int,
    say: Say,
    save: Save,
) -> Facts:
    """Return checks and costs, as `parts` says, and what was left out; `save` gets each result."""
    left = Left(seconds)
    facts: Facts = {"checks": [], "costs": None, "left_out": left.left_out}
    if "checks" in parts:
        for one in checks(device, left, small=small, say=say):
            facts["checks"].append({"name": one.name, "passed": one.passed, "text": one.text})
            save(facts)

    def measure_costs() -> None:
        for found in costs(device, left, small=small, tokens=tokens, say=say):
            facts["costs"] = found
            save(facts)

    if "costs" in parts:
        left.run("costs", measure_costs)
    return facts


def table(facts: dict[str, Any]) -> str:
    """Return the checks, the costs and what was left out as Markdown."""
    marks = {True: "yes", False: "**no**", None: "not checked"}
    rows = [[one["name"], marks[one["passed"]], one["text"]] for one in facts["checks"]]
    parts = [markdown(["check", "right", ""], rows)] if rows else []
    if facts["costs"]:
        parts.append(f"{facts['costs']['model']}:")
        for name, case in facts["costs"]["cases"].items():
            share = case.get("bandwidth_share")
            at = "" if share is None else f", {share:.0%} of the memory's bandwidth"
            parts.append(f"{name}{at}. {capture.table(case)}")
    parts += [f"Left out: {text}" for text in facts["left_out"]]
    return "\n\n".join(parts)
