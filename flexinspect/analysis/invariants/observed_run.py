"""What a run shows to the invariants: numbers, settings and calls of each step.

A training is one part of a run, and so is a generation. Under several ranks, each rank has its own
record of a part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from flexinspect.core.errors import UsageError
from flexinspect.records.collectives import ALL_WEIGHTS_STREAM, WEIGHTS_STREAM
from flexinspect.records.finding import Severity
from flexinspect.records.step import TRAIN, EventRecord
from flexinspect.records.training_step import CALLS_EVENT, PARAMETERS_EVENT, TrainingStepRecord
from flexinspect.trace.query_results import EventRow, GenerationRow, StepRow
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect.trace.stream_ranges import arrays_by_step

Numbers: TypeAlias = NDArray[np.float64]

LOSS, RATE, LIMIT, SCALE = "loss", "learning rate of group", "clip limit", "loss scale"
TOTAL_NORM, NORM_BEFORE = "total gradient norm", "norm before clipping"
GROUP_NORM, RATIO, TIME = "gradient norm of", "update ratio of", "step time (ms)"
EVALUATION_RATIO = "evaluation loss over training loss"
ROWS, EVALUATION_LOSS, TOKENS = "rows of input", "evaluation loss", "generated tokens"
COUNTS = (
    *("backward passes", "parameters with a gradient", "parameters whose gradient is 0"),
    *("parameters with NaN or Inf", "skipped step", "repeated batches"),
    "share of evaluation passes in evaluation mode",
)
BACKWARD, N_GRADIENTS, N_DEAD, N_NONFINITE, SKIPPED, REPEATED, IN_EVALUATION = COUNTS
MIN_DEAD_SIZE = 8  # values of a parameter whose gradient is not 0 by chance
MODE, AUTOCAST = "mode of the model", "autocast"


class LoopCalls(Struct, frozen=True):
    """The facts of a `step-calls` event."""

    calls: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    repeated_batches: int = 0
    inputs: Mapping[str, tuple[str | int, ...]] | None = None


class ParameterFacts(Struct, frozen=True):
    """A parameter as the `parameters` event describes it; `group` is None if it is frozen."""

    dtype: str = ""
    size: tuple[int, ...] = ()
    group: int | None = None

    def describe(self) -> str:
        """Return the facts in words, such as `float32 [8, 16], trained in group 0`."""
        trained = "frozen" if self.group is None else "trainable, in no optimizer"
        if self.group is not None and self.group >= 0:
            trained = f"trained in group {self.group}"
        return f"{self.dtype} {list(self.size)}, {trained}"


class _Parameters(Struct, frozen=True):
    parameters: Mapping[str, ParameterFacts] = {}
    outputs: Mapping[str, str] = {}


class _Evaluation(Struct, frozen=True):
    n: int = 0
    n_in_evaluation_mode: int = 0
    loss: float | None = None


class Observed(Struct, frozen=True, eq=False):
    """A training or a generation, as one process recorded it.

    Each of `channels` and `digests` has a number for each of `steps`, NaN where there is none.
    `digests` only say whether two ranks are equal. `settings` has a word for each step, `calls` its
    calls in order, `inputs` the dtype and size of each input, all empty or None where unknown.
    `parameters` describes each parameter, `outputs` has the dtype of the output of each module.
    """

    name: str
    steps: NDArray[np.int64]
    channels: Mapping[str, Numbers]
    digests: Mapping[str, Numbers] = {}
    settings: Mapping[str, Sequence[str]] = {}
    calls: Sequence[tuple[str, ...]] = ()
    inputs: Sequence[Mapping[str, tuple[str | int, ...]] | None] = ()
    parameters: Mapping[str, str] = {}
    outputs: Mapping[str, str] = {}
    totals: Mapping[str, float] = {}
    rank: int | None = None
    generation: int = 0


Part: TypeAlias = tuple[Observed, ...]
"""A training or a generation of one run: the record of each rank."""


class ObservedRun(Struct, frozen=True, eq=False):
    """A run: its parts by name, and `doubts` whether it is a good one."""

    label: str
    parts: Mapping[str, Part]
    doubts: tuple[str, ...] = ()


def observe_run(path: Path) -> ObservedRun:
    """Read a trace, or a folder with the traces of the ranks of one run.

    Raises `UsageError` if it has neither a training nor a generation with a step, and `TraceError`.
    """
    parts: dict[str, list[Observed]] = {}
    doubts: list[str] = []
    for reader in _open(path):
        with reader, reader.snapshot():
            doubts += _doubts(reader)
            for observed in observe_trace(reader):
                parts.setdefault(observed.name, []).append(observed)
    if not parts:
        raise UsageError(
            f"{path} has no step of a training or a generation.",
            hint="Record one: flexinspect run train.py",
        )
    by_name = {name: tuple(ranks) for name, ranks in parts.items()}
    return ObservedRun(path.name, by_name, tuple(doubts))


def _doubts(reader: TraceReader) -> Iterator[str]:
    """Yield why a trace may not be that of a good run."""
    if reader.state != "finished":
        yield f"{reader.path.name} did not end well: its state is {reader.state}"
    errors = dict.fromkeys(o.id for o in reader.findings() if o.severity is Severity.ERROR)
    if errors:
        yield f"{reader.path.name} has findings that are errors: {', '.join(errors)}"


def _open(path: Path) -> Iterator[TraceReader]:
    if not path.is_dir():
        yield open_trace(path)
        return
    from flexinspect.analysis.ranks.rank_run import find_run

    for one in find_run(path)[0].traces:
        yield open_trace(one.path)


def observe_trace(reader: TraceReader) -> Iterator[Observed]:
    """Yield each training and each generation of a trace that has a step."""
    rank = reader.run().get("rank")
    rank = rank if isinstance(rank, int) else None
    names: set[str] = set()
    for row in reader.generations():
        steps = reader.steps(row.generation)
        if not steps:
            continue
        is_training = steps[0].phase == TRAIN
        plain = row.sample_id if is_training else f"generation {row.sample_id}"
        plain = plain.strip() or "training"  # of a redacted trace
        numbered = (plain if n == 1 else f"{plain} ({n})" for n in count(1))
        name = next(one for one in numbered if one not in names)
        names.add(name)
        observed: Observed | None
        if is_training:
            observed = _training(reader, row, steps, name, rank)
        else:
            observed = _generation(steps, name, rank)
        if observed is not None:
            yield replace(observed, generation=row.generation)


def _generation(steps: Sequence[StepRow], name: str, rank: int | None) -> Observed:
    of_step: dict[str, Sequence[float | None]] = {
        "entropy": [one.entropy for one in steps],
        "margin": [one.margin for one in steps],
        TIME: [one.wall_ms for one in steps],
        "tokens of the forward pass": [one.q_len for one in steps[1:]],
    }
    first, last = ([getattr(one, name) for one in steps] for name in ("first_pos", "last_pos"))
    chosen = sum(
        b - a + 1 for a, b in zip(first, last, strict=True) if a is not None and b is not None
    )
    channels = {key: _numbers(values, len(steps)) for key, values in of_step.items()}
    numbers = np.array([one.step for one in steps], np.int64)
    return Observed(name, numbers, channels, totals={TOKENS: float(chosen)}, rank=rank)


def _numbers(values: Sequence[float | None], n: int) -> Numbers:
    """Return values as numbers, not finite ones as NaN; missing ones at the start too."""
    found = np.array([math.nan if one is None else one for one in values], np.float64)
    found[~np.isfinite(found)] = math.nan
    return np.concatenate([np.full(n - len(found), math.nan), found])


def _training(
    reader: TraceReader, row: GenerationRow, steps: Sequence[StepRow], name: str, rank: int | None
) -> Observed | None:
    trained = reader.training_steps(row.generation)
    numbers = [one.step for one in steps if one.step in trained]
    if not numbers:
        return None
    events = _EventFacts(reader.events(generation=row.generation), numbers)
    records = [trained[n] for n in numbers]
    groups = reader.parameter_groups(row.generation)
    columns = _Columns(len(numbers))
    wall = {one.step: one.wall_ms for one in steps}
    for at, (number, step) in enumerate(zip(numbers, records, strict=True)):
        for key, value in (*_values(step, groups), *events.values(number)):
            columns.set(key, at, value)
        columns.set(EVALUATION_RATIO, at, _evaluation_ratio(events, records, at, number))
        columns.set(TIME, at, wall[number])
        columns.set(N_DEAD, at, _count_dead(reader, row.generation, number, step, events.sizes))
    return Observed(
        name,
        np.array(numbers, np.int64),
        columns.arrays,
        digests=_digests(reader, row.generation, groups, numbers),
        settings={
            MODE: [" and ".join(events.calls(n).modes) for n in numbers],
            AUTOCAST: [one.autocast or "off" for one in records],
        },
        calls=[events.calls(n).calls for n in numbers],
        inputs=[events.calls(n).inputs for n in numbers],
        parameters=events.parameters,
        outputs=events.outputs,
        rank=rank,
    )


class _Columns:
    """Arrays by name, made as values come."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.arrays: dict[str, Numbers] = {}

    def set(self, key: str, at: int, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            if key not in self.arrays:
                self.arrays[key] = np.full(self._n, math.nan)
            self.arrays[key][at] = value


def _values(step: TrainingStepRecord, groups: Sequence[str]) -> Iterator[tuple[str, float | None]]:
    yield LOSS, step.loss if step.has_loss else None
    yield LIMIT, step.max_norm
    yield SCALE, step.scale
    yield SKIPPED, float(step.is_skipped)
    yield BACKWARD, step.n_backward
    for number, rate in enumerate(step.learning_rates):
        yield f"{RATE} {number}", rate
    if step.total_norm is None or step.is_skipped:
        return  # not measured, or of gradients that the optimizer did not use
    yield TOTAL_NORM, step.total_norm
    yield NORM_BEFORE, step.norm_before_clip
    yield N_GRADIENTS, step.n_parameters
    yield N_NONFINITE, step.n_nonfinite
    for group, norm in zip(groups, step.group_norms, strict=False):
        yield f"{GROUP_NORM} {group}", norm
    for group, ratio in zip(groups, step.group_ratios, strict=False):
        yield f"{RATIO} {group}", ratio


def _evaluation_ratio(
    events: _EventFacts, records: Sequence[TrainingStepRecord], at: int, number: int
) -> float | None:
    """The loss of the evaluation before a step, over the training loss just before it."""
    loss = events.evaluation_loss(number)
    trained = records[max(at - 1, 0)].loss
    return loss / trained if loss is not None and trained > 0 else None


def _count_dead(
    reader: TraceReader,
    generation: int,
    number: int,
    step: TrainingStepRecord,
    sizes: Mapping[str, int],
) -> float | None:
    """The parameters of a step whose gradient is 0, None if it was not measured by parameter.

    Parameters of few values do not count: their gradient may be 0 because values cancel out.
    """
    if step.total_norm is None or step.is_skipped:
        return None
    if not step.n_dead:
        return 0.0
    rows = reader.training_gradients(generation, number)
    if not rows:
        return None
    return float(sum(one.is_dead and sizes.get(one.name, 0) >= MIN_DEAD_SIZE for one in rows))


class _EventFacts:
    """What the events of a training say of its steps."""

    def __init__(self, rows: Sequence[EventRow], numbers: Sequence[int]) -> None:
        self.parameters: dict[str, str] = {}
        self.outputs: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        """The number of values of each parameter."""
        self._evaluations: dict[int, _Evaluation] = {}
        changes = calls_by_step(rows)
        for event in (row.event for row in rows):
            if event.step is None:
                continue
            if event.kind == "evaluation" and (one := _facts(_Evaluation, event)) is not None:
                # One after the last step is of the weights that this has made.
                self._evaluations[min(event.step, numbers[-1])] = one
            elif event.kind == PARAMETERS_EVENT and (all_ := _facts(_Parameters, event)):
                self.parameters |= {n: one.describe() for n, one in all_.parameters.items()}
                self.outputs |= all_.outputs
                self.sizes |= {n: math.prod(one.size) for n, one in all_.parameters.items()}
        self._calls: dict[int, LoopCalls] = {}
        current = LoopCalls()
        for number in numbers:
            current = changes.get(number, current)
            self._calls[number] = current

    def calls(self, number: int) -> LoopCalls:
        """Return what the event of a step says, or of the last step before that has one."""
        return self._calls[number]

    def evaluation_loss(self, number: int) -> float | None:
        """Return the mean loss of the evaluation before a step."""
        evaluation = self._evaluations.get(number)
        return None if evaluation is None else evaluation.loss

    def values(self, number: int) -> Iterator[tuple[str, float | None]]:
        """Yield the numbers of a step that events have."""
        calls = self.calls(number)
        if calls.calls:
            yield REPEATED, calls.repeated_batches
        for name, (_, *size) in ((n, one) for n, one in (calls.inputs or {}).items() if one):
            if size and isinstance(size[0], int):
                yield f"{ROWS} {name}", size[0]
        evaluation = self._evaluations.get(number)
        if evaluation is not None:
            yield EVALUATION_LOSS, evaluation.loss
            yield IN_EVALUATION, evaluation.n_in_evaluation_mode / max(evaluation.n, 1)


def calls_by_step(rows: Sequence[EventRow]) -> dict[int, LoopCalls]:
    """Return the facts of the `step-calls` events among events, by step."""
    events = (row.event for row in rows if row.event.kind == CALLS_EVENT)
    each = ((event.step, _facts(LoopCalls, event)) for event in events)
    return {step: facts for step, facts in each if step is not None and facts is not None}


def _facts(kind: Any, event: EventRecord) -> Any:
    """Return the facts of an event, None if they have another form."""
    try:
        return msgspec.convert(dict(event.data), kind)
    except (msgspec.ValidationError, TypeError, ValueError):
        return None


def _digests(
    reader: TraceReader, generation: int, groups: Sequence[str], numbers: Sequence[int]
) -> dict[str, Numbers]:
    columns = _Columns(len(numbers))
    place = {number: at for at, number in enumerate(numbers)}
    kinds = {WEIGHTS_STREAM: "sampled weights of", ALL_WEIGHTS_STREAM: "weights of"}
    for number, sums in arrays_by_step(reader, generation, [*kinds]).items():
        for stream, array in sums.items():
            for group, total in zip(groups, np.ravel(array).tolist(), strict=False):
                if number in place:
                    columns.set(f"{kinds[stream]} {group}", place[number], total % (1 << 53))
    return columns.arrays
