"""Compare the steps of two trainings: losses, gradients by group, learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from zlib import crc32

from msgspec import Struct

from flexinspect.analysis.invariants.observed_run import LoopCalls, calls_by_step
from flexinspect.analysis.run_diff.generations import (
    DIFFERENT,
    NOTHING,
    ROUNDING,
    SAME,
    Compared,
    Place,
)
from flexinspect.analysis.run_diff.quantities import (
    FLOORS,
    NOISE_FACTOR,
    Noise,
    QuantityDifference,
)
from flexinspect.core.errors import UsageError
from flexinspect.core.text import format_ranges
from flexinspect.records.collectives import ALL_WEIGHTS_STREAM, WEIGHTS_STREAM
from flexinspect.records.step import Array
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect.trace.codec import to_json
from flexinspect.trace.query_results import GenerationRow
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.stream_ranges import arrays_by_step

STEPS_PER_READ = 512
WEIGHTS = {"weights": WEIGHTS_STREAM, "all weights": ALL_WEIGHTS_STREAM}
"""Sums of the bits of weights: of a sample of each parameter, and of all of it."""
CALLS, INPUTS = "calls of the step", "sizes of inputs"
EXACT = (*WEIGHTS, CALLS, INPUTS)
"""Quantities whose numbers only say whether two steps are equal."""
QUANTITIES = (
    *(INPUTS, CALLS, "backward passes"),
    *("loss", "gradient norm", "total gradient norm", "norm before clipping", "clip limit"),
    *("learning rate", "update ratio", "loss scale", "skipped step", *WEIGHTS),
)
"""What is compared of a step, in the order in which it is computed."""
CONFIGURED = (
    "learning rate",
    "loss scale",
    "skipped step",
    "backward passes",
    "clip limit",
    *EXACT,
)
"""Quantities that follow from the program and the step's number, not from tensors."""
UNRECORDED = {"activations": "no level records them"}

EXACT_INTEGERS = 1 << 53
"""Up to here floats hold each integer."""

Values = dict[tuple[str, str], float]
"""Of one step, by quantity and group of parameters (empty: of the step)."""


class TrainingDifference(Struct, frozen=True):
    """Two trainings, compared step by step.

    `first` is the first place beyond `noise`, `first_difference` the first step in which anything
    differs, `worst` the largest difference by quantity and group. `groups` are those that only A
    and only B has, `left_out` the steps likewise. `missing` says which trace alone has it. `beyond`
    has what differs first in each step that differs beyond noise.
    """

    generation: int = 0
    partner: int = 0
    n_steps: tuple[int, int] = (0, 0)
    n_compared: int = 0
    first: Place | None = None
    first_difference: int | None = None
    noise: Noise | None = None
    compared: Mapping[str, Compared] = {}
    not_compared: Mapping[str, str] = {}
    groups: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    left_out: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    missing: str = ""
    beyond: Mapping[int, str] = {}

    @property
    def verdict(self) -> str:
        """`same`, `rounding` (all within noise) or `different`."""
        if self.missing or self.first is not None:
            return DIFFERENT
        return SAME if self.first_difference is None else ROUNDING


Side = tuple[TraceReader, GenerationRow | None]


def compare_trainings(
    a: Side, b: Side, repeat: TraceReader | None = None, own: Mapping[str, str] = NOTHING
) -> TrainingDifference:
    """Compare two trainings; `repeat` is another recording of A's, whose differences are noise.

    Quantities of `own` are not compared, for the reason that it gives.

    Noise that is measured grows with the steps: the limit of a step is `NOISE_FACTOR` times the
    largest difference between A and the repeat up to it. Raises `UsageError` for a repeat without
    steps of A.
    """
    (reader, one), (other_reader, other) = a, b
    if one is None or other is None:
        present, path = (other, other_reader.path) if one is None else (one, reader.path)
        assert present is not None
        return TrainingDifference(present.generation, missing=f"only {path} has it")
    walk = _TrainingWalk(_steps(reader, one), _steps(other_reader, other), _noise(a, b), own)
    if repeat is not None:
        walk.limits = dict(_measured(reader, one, repeat))
        source = f"differences between A and {repeat.path}, times {NOISE_FACTOR:g}"
        walk.noise = Noise(source, walk.noise.floor, is_measured=True)
    return walk.run(one.generation, other.generation)


def _noise(a: Side, b: Side) -> Noise:
    dtypes = set()
    for reader, row in (a, b):
        assert row is not None
        first = next(iter(reader.training_steps(row.generation, 0, 0, 1).values()), None)
        dtype = reader.model(row.generation).get("dtype")
        name = (first.autocast if first else "") or (dtype if isinstance(dtype, str) else "")
        dtypes.add(name.removeprefix("torch.") or "float32")
    limit = max(FLOORS.get(name, 0.1) for name in dtypes)
    return Noise(f"rounding in {' and '.join(sorted(dtypes))}", limit)


def _steps(reader: TraceReader, row: GenerationRow) -> Iterator[tuple[int, Values]]:
    """Yield the recorded values of each step, in order."""
    names = reader.parameter_groups(row.generation)
    changes, current = calls_by_step(reader.events(generation=row.generation)), None
    last = reader.last_step(row.generation)
    for start in range(0, 0 if last is None else last + 1, STEPS_PER_READ):
        bounds = (start, start + STEPS_PER_READ)
        steps = reader.training_steps(row.generation, 0, *bounds)
        sums = arrays_by_step(reader, row.generation, [*WEIGHTS.values()], *bounds)
        for number, step in sorted(steps.items()):
            current = changes.get(number, current)
            values = _values(step, names, sums.get(number, {}))
            yield number, {**dict(values), **_call_values(current)}


def _call_values(calls: LoopCalls | None) -> Values:
    """Numbers that are equal for steps with equal calls and inputs, none where unknown."""
    if calls is None:
        return {}
    of = {CALLS: (calls.calls, calls.modes), INPUTS: calls.inputs}
    known = {name: value for name, value in of.items() if value is not None}
    return {(name, ""): float(crc32(to_json(value).encode())) for name, value in known.items()}


def _values(
    step: TrainingStepRecord, groups: tuple[str, ...], sums: Mapping[str, Array]
) -> Iterator[tuple[tuple[str, str], float]]:
    if step.has_loss:
        yield ("loss", ""), step.loss
    of_group = {"gradient norm": step.group_norms, "update ratio": step.group_ratios}
    for name, values in of_group.items():
        for group, value in zip(groups, values, strict=False):
            yield (name, group), value
    for name, stream in WEIGHTS.items():
        for group, total in zip(
            groups, sums[stream].tolist() if stream in sums else (), strict=False
        ):
            yield (name, group), float(total % EXACT_INTEGERS)
    of_step = {
        "total gradient norm": step.total_norm,
        "norm before clipping": step.norm_before_clip,
        "loss scale": step.scale,
        "skipped step": float(step.is_skipped),
        "backward passes": float(step.n_backward),
        "clip limit": step.max_norm,
    }
    yield from (((name, ""), value) for name, value in of_step.items() if value is not None)
    for number, rate in enumerate(step.learning_rates):
        yield ("learning rate", f"optimizer group {number}"), rate


def _measured(
    reader: TraceReader, row: GenerationRow, repeat: TraceReader
) -> Iterator[tuple[int, Mapping[tuple[str, str], float]]]:
    """Yield for each step the largest differences of the repeat up to it."""
    other = next((one for one in repeat.generations() if "training" in one.declared), None)
    second = {} if other is None else dict(_steps(repeat, other))
    largest: Values = {}
    n = 0
    for number, values in _steps(reader, row):
        for key in values.keys() & second.get(number, {}).keys():
            change = _relative_change(values[key], second[number][key])
            largest[key] = max(largest.get(key, 0.0), change)
            n += 1
        yield number, dict(largest)
    if not n:
        what = f"{repeat.path} has no step of the training in {reader.path}."
        raise UsageError(what, hint="--noise takes another recording of the same run as A.")


def _relative_change(one: float, other: float) -> float:
    """Return |one - other| / |one|; 0 for equal values and for NaN in both."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    change = abs(one - other) / (abs(one) or 1.0)
    return change if math.isfinite(change) else math.inf


class _TrainingWalk:
    """Compares the steps that both trainings have, by number."""

    def __init__(
        self,
        a: Iterator[tuple[int, Values]],
        b: Iterator[tuple[int, Values]],
        noise: Noise,
        own: Mapping[str, str],
    ) -> None:
        self._sides = a, b
        self.noise = noise
        self._own = own
        self._beyond: dict[int, str] = {}
        self.limits: dict[int, Mapping[tuple[str, str], float]] = {}
        self._first: Place | None = None
        self._first_step: int | None = None
        self._compared: dict[str, Compared] = {}
        self._keys: tuple[set[tuple[str, str]], set[tuple[str, str]]] = (set(), set())

    def run(self, generation: int, partner: int) -> TrainingDifference:
        """Compare all steps."""
        n_steps, n_shared = [0, 0], 0
        alone: tuple[list[int], list[int]] = ([], [])
        for number, pair in _by_number(*self._sides):
            for side, values in enumerate(pair):
                if values is not None:
                    n_steps[side] += 1
                    self._keys[side].update(values)
            if pair[0] is not None and pair[1] is not None:
                n_shared += 1
                self._compare_step(number, pair[0], pair[1])
            else:
                alone[pair[0] is None].append(number)
        self._find_missing_step(alone)
        groups = [
            tuple(sorted({group for name, group in own - other if name == "gradient norm"}))
            for own, other in (self._keys, self._keys[::-1])
        ]
        return TrainingDifference(
            generation=generation,
            partner=partner,
            n_steps=(n_steps[0], n_steps[1]),
            n_compared=n_shared,
            first=self._first,
            first_difference=self._first_step,
            noise=self.noise,
            compared=self._compared,
            not_compared=self._not_compared(),
            groups=(groups[0], groups[1]),
            left_out=(tuple(alone[0]), tuple(alone[1])),
            beyond=self._beyond,
        )

    def _compare_step(self, number: int, one: Values, other: Values) -> None:
        rank = {name: n for n, name in enumerate(QUANTITIES)}
        for key in sorted(one.keys() & other.keys(), key=lambda key: (rank[key[0]], key[1])):
            name, group = key
            if name in self._own:
                continue
            change = _relative_change(one[key], other[key])
            if name in EXACT and change:
                change = math.inf
            compared = self._compared.setdefault(name, Compared())
            compared.add(number, QuantityDifference(None, name, change))
            if change and self._first_step is None:
                self._first_step = number
            limit = self._limit(number, key)
            if change > limit:
                self._beyond.setdefault(number, f"{name} of {group}" if group else name)
            if change > limit and self._first is None:
                values = f"{one[key]:.6g} against {other[key]:.6g}" if name not in EXACT else ""
                text = ", ".join(filter(None, (values, group)))
                finite = change if math.isfinite(change) else None
                self._first = Place(number, None, name, "value", finite, limit, text)

    def _limit(self, number: int, key: tuple[str, str]) -> float:
        if key[0] in CONFIGURED:
            return 1e-12
        if self.noise.is_measured:
            return NOISE_FACTOR * self.limits.get(number, {}).get(key, 0.0)
        return self.noise.floor

    def _find_missing_step(self, alone: tuple[list[int], list[int]]) -> None:
        """Let a step that only one training has be the first place, if nothing differs before."""
        first = min((step for steps in alone for step in steps), default=None)
        if first is None or (self._first is not None and self._first.step < first):
            return
        name = "A" if first in alone[0] else "B"
        steps = format_ranges(alone[0] if name == "A" else alone[1])
        self._first = Place(first, None, "step", "missing", text=f"{name} alone has steps {steps}")

    def _not_compared(self) -> dict[str, str]:
        reasons = {}
        for name in QUANTITIES:
            if name in self._own and any(name in (key[0] for key in own) for own in self._keys):
                reasons[name] = self._own[name]
            elif name not in self._compared:
                has = [any(key[0] == name for key in own) for own in self._keys]
                which = {(True, False): "only A has it", (False, True): "only B has it"}
                reasons[name] = which.get((has[0], has[1]), "recorded in neither run")
        return reasons | UNRECORDED


def _by_number(
    a: Iterator[tuple[int, Values]], b: Iterator[tuple[int, Values]]
) -> Iterator[tuple[int, tuple[Values | None, Values | None]]]:
    """Merge the steps of two trainings, both in order, by their numbers."""
    one, other = next(a, None), next(b, None)
    while one is not None or other is not None:
        number = min(step[0] for step in (one, other) if step is not None)
        left = one[1] if one is not None and one[0] == number else None
        right = other[1] if other is not None and other[0] == number else None
        yield number, (left, right)
        one = one if left is None else next(a, None)
        other = other if right is None else next(b, None)
