"""The open step: its generation, number, phase and lengths; and the clock that numbers steps.

This module may be imported before torch, so it does not import torch itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec import field

from flexinspect_hooks.step_writer.step_draft import StepFacts

if TYPE_CHECKING:
    from torch import Tensor


class StepContext(StepFacts):
    """One step while it is open. The writer thread gets its plain facts, not its tensors."""

    started: float = field(default_factory=time.perf_counter)
    logits: Tensor | None = None
    scores: Tensor | None = None
    processed: tuple[tuple[str, Tensor], ...] = ()
    """The scores after each logits processor, with its name."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The forward's arguments by name; only set while hooks open."""
    output: Any = None
    """The forward's return value."""
    read_positions: tuple[Tensor | None, list[int]] = (None, [])
    """A table of position ids that the forward got, and its first row, where it was read."""
    off_cpu_before: float = 0.0
    """`off_cpu_s()` when the forward began."""
    writes_before: int = 0
    """`Recorder.n_writes` when the forward began."""

    def drop_references(self) -> None:
        """Drop every tensor, so that capture does not keep a step's memory alive."""
        self.logits = self.scores = self.output = None
        self.read_positions = (None, [])
        self.processed = ()


def off_cpu_s() -> float:
    """Return a clock of this thread's seconds off a core: mostly, the writer holds the GIL."""
    return time.perf_counter() - time.thread_time()


class StepClock:
    """Counts steps within a generation and reads the lengths from a root forward's arguments."""

    def __init__(self) -> None:
        self.generation = 0
        self.branch = 0
        self.next_step = 0

    def set_next_step(self, generation: int, step: int = 0, branch: int = 0) -> None:
        """Set the generation, number and branch of the next step."""
        self.generation, self.branch, self.next_step = generation, branch, step

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any], level: str) -> StepContext:
        """Open the next step: prefill while the cache is empty, decode afterwards."""
        cached = cached_length(kwargs.get("past_key_values"))
        return self.open_of(query_length(args, kwargs), cached, level)

    def open_of(self, q_len: int, kv_before: int, level: str) -> StepContext:
        """Open the next step, of a forward of `q_len` rows after `kv_before` cached keys."""
        step, self.next_step = self.next_step, self.next_step + 1
        phase, number = "decode" if kv_before else "prefill", self.generation
        return StepContext(number, step, phase, q_len, kv_before, level, branch=self.branch)


def query_length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of input rows of a root forward, 0 if its arguments do not show it."""
    tensor = _tensor_type()
    for value in (kwargs.get("input_ids"), *args[:1], kwargs.get("inputs_embeds")):
        if isinstance(value, tensor) and value.dim() >= 2:
            return int(value.shape[1])
    return 0


@cache
def _tensor_type() -> Any:
    from torch import Tensor

    return Tensor


def cached_length(cache: Any) -> int:
    """Return the keys in a cache, 0 without one: those of the first layer that has any."""
    if cache is None:
        return 0
    length = int(cache.get_seq_length())
    if length:
        return length
    getters = (getattr(layer, "get_seq_length", None) for layer in getattr(cache, "layers", ()))
    return next((n for get in getters if get is not None and (n := int(get()))), 0)
