"""Rows that the reader returns where no record of `flexinspect.records` fits what is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord, OutputRecord


class GenerationRow(Struct, frozen=True):
    """A generation with the state of its first branch.

    `state` is one of recording, finished, interrupted, failed. Until it has ended, `answer` and
    `stop_reason` are empty and `ended_at` is None.
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


class BranchRow(Struct, frozen=True):
    """A branch: `parent` and `fork_step` (its first own step) are None for branch 0.

    `change` says how it differs from its parent, see `BranchRecord`.
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


class StepRow(Struct, frozen=True):
    """The scalar facts of a step, from one table, so that thousands can be listed.

    `first_pos` and `last_pos` are the lowest and highest position whose token it chose. The fields
    from `entropy` on are None when no logits were captured; `TraceReader.logits` returns the
    histogram and the candidates.
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


class ArrayInfo(Struct, frozen=True):
    """An array of a step without its data: `n_bytes` is its size in the file."""

    number: int
    stream: str
    layer: int | None
    dtype: str
    shape: tuple[int, ...]
    codec: str
    n_bytes: int


class EventRow(Struct, frozen=True):
    """An event with its branch, and its number, after which later events can be read."""

    id: int
    branch: int | None
    event: EventRecord


class OutputRow(Struct, frozen=True):
    """A piece of printed output with its number, after which later output can be read."""

    id: int
    output: OutputRecord


class FindingRow(Struct, frozen=True):
    """A finding with its number, after which later findings can be read."""

    id: int
    finding: Finding
