"""What a session around a loop that is not ours is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flexinspect.records import TokenRecord
from flexinspect_hooks.buffer import StepBuffer
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import Hook
from flexinspect_hooks.recorder import Recorder


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose forward is over and whose token is not known yet."""

    step: StepContext
    buffer: StepBuffer
    kept: list[tuple[Hook, Any]]
    row: Tensor | None
    input_tokens: Callable[[], tuple[TokenRecord, ...]]
    ended: float


@dataclass(frozen=True, slots=True)
class SharedRecording:
    """What models that are recorded into one trace share, and the `name` of one of them."""

    recorder: Recorder
    generation_numbers: Iterator[int]
    name: str
