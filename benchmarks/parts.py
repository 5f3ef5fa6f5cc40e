"""Where the cost of `watch` is: decode steps with parts of it left out, in blocks in turns.

Two copies of a model share their weights, and one of them is bare. Each decodes with a cache of its
own. A block of steps of the recorded one lies between two blocks of the bare one, and is compared
with their mean, so that both see the machine in the same state.

The writer thread works up to `LINGER_S` behind the model. So a block begins untimed, until the
thread has steps of the block to write, and the bare copy waits until it has written all.

The last column is the cost that the run itself states, per step, and how far that is from what was
measured here, in percent of a step without capture.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import flexinspect
from benchmarks.common import bench_prompt, markdown
from benchmarks.smallest_recorder import SmallestRecorder
from flexinspect.core.errors import FlexInspectError
from flexinspect.records.step import LEVELS
from flexinspect_hooks.capture.hook import Hook
from flexinspect_hooks.capture.new_trace import create_trace
from flexinspect_hooks.capture.recorder import LINGER_S, FinishedStep, Recorder
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.loading.tokenizers import IdAdapter
from flexinspect_hooks.observers.attention.attention_hook import AttentionHook
from flexinspect_hooks.observers.modules_hook import ModuleHook
from flexinspect_hooks.user_code.generation_builder import DeclaredPrompt
from flexinspect_hooks.user_code.watch_session import WatchSession

BLOCK, UNTIMED = 48, 16
"""Timed steps of a block, and those before, which find the caches filled by the other copy."""

BLOCKS_OF_A_TEXT = 3
"""After so many blocks both copies begin again, so that the cache stays short."""

IN_LAYERS, WITHOUT_HOOKS = "hooks in the layers alone", "steps without any hook"
IDLE_WRITER, ALL = "a writer that does nothing", "all"

Times = tuple[float, float]
"""Wall clock and CPU of the model's thread, in milliseconds per step."""

Watched = Callable[[Any, Path], AbstractContextManager[Any]]
"""Records a model into a new file while entered."""


class GreedyLoop:
    """Decodes one token after the other, in blocks."""

    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        self._model, self._ids = model, torch.tensor([ids])

    def begin(self) -> None:
        """Begin again after the prompt."""
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)
        self._step(self._ids)

    def run_block(self) -> Times:
        """Run a block, and return its times."""
        for _ in range(UNTIMED):
            self._step(self._token)
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(BLOCK):
            self._step(self._token)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        return wall / BLOCK * 1e3, cpu / BLOCK * 1e3

    def _step(self, ids: torch.Tensor) -> None:
        logits = self._model(ids, past_key_values=self._cache, use_cache=True).logits
        self._token = logits[:, -1:].argmax(-1)


class _OnlyInLayers(WatchSession):
    """Records no step: its hooks in the layers run, and what they keep is dropped."""

    def _on_forward_start(self, module: Any, args: Any, kwargs: Any) -> None:
        self._drop()
        self.context.is_open = True

    def _on_forward_end(self, module: Any, args: Any, output: Any, **_: Any) -> None:
        self.context.is_open = False
        self._drop()

    def _drop(self) -> None:
        step = StepContext(0, 0, "decode", 1, 1, self.level)
        for hook in self._hooks:
            if isinstance(hook, AttentionHook | ModuleHook):
                hook.open(step)


class _DroppingRecorder(Recorder):
    """A recorder whose thread drops steps: neither records, nor rules, nor SQLite."""

    def _write_steps(self, items: Sequence[FinishedStep]) -> None:
        pass


@contextmanager
def _session(
    model: Any,
    path: Path,
    level: str,
    kind: type[WatchSession] = WatchSession,
    recorder: type[Recorder] = Recorder,
    hooks: Sequence[Hook] | None = None,
) -> Iterator[None]:
    with closing(create_trace(path, [], level, None)) as writer:
        thread = recorder(writer)
        thread.start()
        prompt = DeclaredPrompt(IdAdapter(), (), None)
        session = kind(model, writer, prompt, level=level, recorder=thread, hooks=hooks)
        session.prints = False
        try:
            with session:
                yield
                session.close("finished", None)
        finally:
            thread.stop()


def cases() -> dict[tuple[str, str], Watched]:
    """Return by level and name what is measured. The first ones do not depend on the level."""
    found: dict[tuple[str, str], Watched] = {
        ("", "the smallest recorder"): lambda m, p: SmallestRecorder(m, p).recording(),
        ("", IN_LAYERS): lambda m, p: _session(m, p, "advanced", _OnlyInLayers),
        ("", WITHOUT_HOOKS): lambda m, p: _session(m, p, "advanced", hooks=()),
    }
    for level in LEVELS:
        found[level, IDLE_WRITER] = partial(_session, level=level, recorder=_DroppingRecorder)
        found[level, ALL] = partial(_watch, level)
    return found


@contextmanager
def _watch(level: str, model: Any, path: Path) -> Iterator[None]:
    with flexinspect.watch(model, out=path, level=level):
        yield


def measure(model: Any, seconds: float) -> dict[str, Any]:
    """Return what decode steps take more with each part, in milliseconds; decoding alone, too."""
    parts = cases()
    bare: list[float] = []
    rows = []
    for (level, name), watched in parts.items():
        found, alone = _measure_one(model, watched, seconds / len(parts))
        rows.append({"level": level, "part": name, **found})
        bare.append(alone)
    return {"ms_without": round(statistics.median(bare), 2), "parts": rows}


def _measure_one(model: Any, watched: Watched, seconds: float) -> tuple[dict[str, Any], float]:
    shared = {id(one): one for one in (*model.parameters(), *model.buffers())}
    other, ids = copy.deepcopy(model, dict(shared)), bench_prompt().ids
    bare, recorded = GreedyLoop(model, ids), GreedyLoop(other, ids)
    found: list[tuple[Times, Times]] = []  # the mean of the two bare blocks, and the one between
    stated: dict[str, float] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        with watched(other, Path(folder) / "parts.flextrace"):
            before, until = _begin(bare, recorded), time.monotonic() + seconds
            while time.monotonic() < until or len(found) < 3:
                between = recorded.run_block()
                time.sleep(2 * LINGER_S)  # until the writer thread has nothing to do
                after = bare.run_block()
                mean = (before[0] + after[0]) / 2, (before[1] + after[1]) / 2
                found.append((mean, between))
                before = after
                if len(found) % BLOCKS_OF_A_TEXT == 0:
                    before = _begin(bare, recorded)
        stated = _stated(Path(folder) / "parts.flextrace")
    return {
        "wall_ms": _difference([between[0] - mean[0] for mean, between in found]),
        "cpu_ms": _difference([between[1] - mean[1] for mean, between in found]),
        "blocks": len(found),
        **stated,
    }, statistics.median(mean[0] for mean, _ in found)


def _stated(path: Path) -> dict[str, float]:
    """Return what a run states that capture takes, in milliseconds per step; {} if it does not."""
    with suppress(FlexInspectError), flexinspect.open_trace(path) as reader:
        if cost := reader.run().get("cost"):
            capture_s = cost["total_s"] * cost["ratio"] / (1 + cost["ratio"])
            return {"stated_ms": round(1e3 * capture_s / cost["steps"], 3)}
    return {}


def _begin(bare: GreedyLoop, recorded: GreedyLoop) -> Times:
    """Begin a text in both; returns the times of the first bare block."""
    recorded.begin()
    recorded.run_block()
    time.sleep(2 * LINGER_S)
    bare.begin()
    return bare.run_block()


def _difference(values: Sequence[float]) -> dict[str, float]:
    """Return the mean without the outer eighths, which stalls of the machine are in, and its error.

    The error is the standard error of the mean of what is left.
    """
    cut = len(values) // 8
    kept = sorted(values)[cut : len(values) - cut]
    error = statistics.stdev(kept) / len(kept) ** 0.5 if len(kept) > 1 else 0.0
    return {"mean": round(statistics.mean(kept), 3), "error": round(error, 3)}


def table(facts: dict[str, Any]) -> str:
    """Return the figures as a table in Markdown."""
    head = ["level", "part", "ms more per step", "CPU of the model's thread, ms", "blocks"]
    head.append("stated by the run, ms")
    rows = [
        [
            *(one["level"], one["part"], _cell(one["wall_ms"]), _cell(one["cpu_ms"])),
            *(str(one["blocks"]), _stated_cell(one, facts["ms_without"])),
        ]
        for one in facts["parts"]
    ]
    return f"{facts['ms_without']:.1f} ms per token without\n\n{markdown(head, rows)}"


def _stated_cell(part: dict[str, Any], ms_without: float) -> str:
    if "stated_ms" not in part:
        return ""
    points = 100 * (part["stated_ms"] - part["wall_ms"]["mean"]) / ms_without
    return f"{part['stated_ms']:.2f} ({points:+.1f} points)"


def _cell(found: dict[str, float]) -> str:
    return f"{found['mean']:.2f} ± {found['error']:.2f}"
