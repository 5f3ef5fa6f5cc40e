"""What a report contains: columns of numbers and texts, one set for each branch of a generation.

The names of the fields are those that the scripts in `assets` read. Arrays are numpy arrays; see
`packing` for how they get into the page. A part is None if the trace has no such data; `missing`
of the branch then says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from flexinspect.analysis.reports.collect import PositionTexts
from flexinspect.records.finding import Finding

Bytes: TypeAlias = npt.NDArray[np.uint8]
Shares: TypeAlias = npt.NDArray[np.uint16]
Ints: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]

SHARE_ONE = 65535
"""The number that stands for a share of 1: shares are stored as 16-bit integers."""

NO_NUMBER = -1
"""Stands for a number that is not known, in columns of integers."""


def int_column(values: Iterable[int]) -> Ints:
    """Return a column of integers; those beyond 32 bits, which only damage causes, are unknown."""
    limits = np.iinfo(np.int32)
    kept = (value if limits.min <= value <= limits.max else NO_NUMBER for value in values)
    return np.fromiter(kept, np.int32)


class TokenColumns(Struct, frozen=True):
    """The tokens of a sequence, one entry each, in order of their positions.

    `step` is the step that chose a token, `NO_NUMBER` in the prompt. `kind` is 1 for special
    tokens, 2 for tokens without visible text, else 0.
    """

    pos: Ints
    text: list[str]
    step: Ints
    kind: Bytes
    id: Ints


class SegmentPart(Struct, frozen=True):
    """A segment: positions `start <= pos < stop`. `color` counts segments without separators."""

    start: int
    stop: int
    label: str
    kind: str
    owner: int
    color: int


class StepColumns(Struct, frozen=True):
    """The scalar facts of the own steps of a branch, one entry each; NaN where not recorded."""

    step: Ints
    phase: list[str]
    q_len: Ints
    kv_before: Ints
    kv_after: Ints
    wall_ms: Floats
    capture_ms: Floats
    entropy: Floats
    margin: Floats
    chosen_logprob: Floats
    chosen_rank: Ints
    chosen_id: Ints
    pos: Ints


class CandidateColumns(Struct, frozen=True):
    """The most likely tokens of steps, (steps, ranks); `NO_NUMBER` where a step has fewer.

    Of several steps the report holds one: every n-th, as `every` says here and elsewhere.
    `score_logprob` is after the logits processors: -Inf if they removed the token, NaN if unknown.
    """

    step: Ints
    id: Ints
    logprob: Floats
    score_logprob: Floats
    text: Mapping[str, str]
    every: int = 1


class PathColumns(Struct, frozen=True):
    """The kernel of each (step, layer): an index of `names`, 255 for no call.

    `check` is the error of the LSE check, NaN without one; `failed` marks those above tolerance.
    """

    step: Ints
    layers: list[int]
    names: list[str]
    path: Bytes
    check: Floats
    failed: Bytes
    notes: Mapping[str, list[str]]


class MemoryColumns(Struct, frozen=True):
    """Memory in bytes at the end of steps, by the name of the figure; NaN where unknown."""

    step: Ints
    figures: Mapping[str, Doubles]


class SegmentAttention(Struct, frozen=True):
    """The newest row's attention by segment: `share` is (steps, layers, heads, segments).

    `entropy`, (steps, layers, heads), is in nats and NaN where not recorded. `failed`, (steps,
    layers), marks layers whose check failed: their shares are not what ran.
    """

    step: Ints
    layers: list[int]
    labels: list[str]
    share: Shares
    entropy: Floats
    failed: Bytes
    every: int = 1


class TokenAttention(Struct, frozen=True):
    """The newest row's attention by token: one array (layers, heads, keys) for each of `step`.

    Key 0 of step n is at position `first_pos[n]`. `failed` is (steps, layers).
    """

    step: Ints
    layers: list[int]
    first_pos: Ints
    share: list[Shares]
    failed: Bytes
    every: int = 1


class MaskViews(Struct, frozen=True):
    """The planes of one head of some layers, as indices of `MaskColumns.planes` by view."""

    layers: list[int]
    head: int
    heads: int
    planes: Mapping[str, int]
    notes: list[str]


class MaskColumns(Struct, frozen=True):
    """The masks of a branch. Row n of a plane holds the rows of the sequence from n x `scale` on.

    A plane is uint8 (rows, keys) of the states in `flexinspect.masks.viewport`. `pos` and `step`
    are those of each row of the sequence; `spec` is the name of the declared mask.
    """

    scale: int
    n_keys: int
    pos: Ints
    step: Ints
    spec: str
    planes: list[Bytes]
    views: list[MaskViews]


class TrainingColumns(Struct, frozen=True):
    """The steps of a training run, or, of a long one, points of some consecutive steps each.

    Each value is the highest of the steps of its point; `bad` is 1 for a non-finite loss, 2 for a
    non-finite gradient, 3 for both. `group_norm` is (points, groups). `facts` are the facts of each
    step in words, empty for points of several steps.
    """

    step: Ints
    loss: Floats
    norm: Floats
    rate: Floats
    bad: Bytes
    groups: list[str]
    group_norm: Floats
    facts: list[list[tuple[str, str]]]


class BranchContents(Struct, frozen=True):
    """All that the page shows of a branch from its first own step on."""

    tokens: TokenColumns
    segments: list[SegmentPart]
    steps: StepColumns
    candidates: CandidateColumns | None = None
    paths: PathColumns | None = None
    memory: MemoryColumns | None = None
    attention: SegmentAttention | None = None
    token_attention: TokenAttention | None = None
    masks: MaskColumns | None = None
    training: TrainingColumns | None = None
    missing: dict[str, str] = field(default_factory=dict)


class BranchHead(Struct, frozen=True):
    """What the page knows of a branch before its contents are unpacked."""

    branch: int
    parent: int | None
    fork_step: int | None
    change: str
    state: str
    answer: str
    is_correct: bool | None


class GenerationHead(Struct, frozen=True):
    """A generation in words; `prompt` are (segment, first position, text of the segment)."""

    generation: int
    sample_id: str
    model: str
    mask: str
    is_training: bool
    expected: tuple[str, ...]
    prompt: tuple[tuple[str, int, str], ...]
    branches: tuple[BranchHead, ...]


class FindingEntry(Struct, frozen=True):
    """The findings of one kind: the first in full, and the places of all of them."""

    extent: str
    findings: tuple[Finding, ...]
    tokens: PositionTexts


class ReportContents(Struct, frozen=True):
    """A whole report. `branches` maps (generation, branch) to contents.

    `verdict` counts the findings. Without any, `verified` are sentences about what was checked,
    each with whether it is a detail. `left_out` are sentences about what the trace holds and the
    report does not.
    """

    title: str
    trace: str
    subtitle: str
    verdict: str
    findings: tuple[FindingEntry, ...]
    verified: tuple[tuple[str, bool], ...]
    manifest: tuple[tuple[str, str], ...]
    generations: tuple[GenerationHead, ...]
    branches: Mapping[tuple[int, int], BranchContents]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
