"""What the reader returns where a record of the contract does not fit what is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord, OutputRecord


@dataclass(frozen=True, slots=True)
class GenerationRow:
    """A generation with how its first branch stands.

    `state` is one of recording, finished, interrupted, failed; `answer` and `stop_reason` are
    empty until it ended, `ended_at` None.
    """

    generation: int
    sample_id: str
    mask: str
    positions: str
    expected: tuple[str, ...]
    declared: Mapping[str, Any]
    started_at: float
    model: str
    state: str
    answer: str
    stop_reason: str
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class BranchRow:
    """A line of decoding: `parent` and `fork_step` (its first own step) are None for branch 0.

    `change` says what made it differ from its parent, as `BranchRecord` has it.
    """

    generation: int
    branch: int
    parent: int | None
    fork_step: int | None
    state: str
    answer: str
    stop_reason: str
    started_at: float
    ended_at: float | None
    change: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepRow:
    """The narrow facts of a step, from one table, so that thousands can be listed.

    `first_pos` and `last_pos` bound the positions it chose. The fields from `entropy` on are None
    when no logits were captured; the histogram and the candidates come from `TraceReader.logits`.
    """

    generation: int
    branch: int
    step: int
    phase: str
    q_len: int
    kv_before: int
    kv_after: int
    started_at: float
    wall_ms: float
    capture_ms: float
    first_pos: int | None
    last_pos: int | None
    entropy: float | None
    margin: float | None
    chosen_id: int | None
    chosen_rank: int | None
    chosen_logprob: float | None
    n_nan: int | None
    n_inf: int | None


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An array of a step without its data: `n_bytes` is what it takes in the file."""

    number: int
    stream: str
    layer: int | None
    dtype: str
    shape: tuple[int, ...]
    codec: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event with its number, for asking only for later ones, and its branch."""

    id: int
    branch: int | None
    event: EventRecord


@dataclass(frozen=True, slots=True)
class OutputRow:
    """A piece of what the program printed with its number, for asking only for later ones."""

    id: int
    output: OutputRecord


@dataclass(frozen=True, slots=True)
class FindingRow:
    """A finding with its number, for asking only for later ones."""

    id: int
    finding: Finding
