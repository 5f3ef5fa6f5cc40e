"""Compare two traces: all generations of a model, or all steps of a training."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator, Mapping
from typing import Any, cast

from msgspec import Struct, to_builtins

from flexinspect.analysis.run_diff import alignment, quantities
from flexinspect.analysis.run_diff.alignment import GenerationPair
from flexinspect.analysis.run_diff.generations import (
    DIFFERENT,
    NOTHING,
    ROUNDING,
    SAME,
    GenerationDifference,
    Side,
    Walk,
    compare_generations,
)
from flexinspect.analysis.run_diff.quantities import Noise
from flexinspect.analysis.run_diff.training import TrainingDifference, compare_trainings
from flexinspect.core.errors import UsageError
from flexinspect.trace.query_results import GenerationRow
from flexinspect.trace.reader import TraceReader

JSON_VERSION = 2
TRAINING = "training"
MAX_REPEATS = 4
"""Repeats of a generation that are compared for its noise."""


class Comparison(Struct, frozen=True):
    """The comparison of two traces; `identical` is whether the files are equal byte for byte."""

    a: str
    b: str
    identical: bool
    generations: tuple[GenerationDifference, ...] = ()
    trainings: tuple[TrainingDifference, ...] = ()

    @property
    def verdict(self) -> str:
        """The worst verdict of the generations and trainings."""
        verdicts = {one.verdict for one in self.generations}
        verdicts |= {one.verdict for one in self.trainings}
        return next((name for name in (DIFFERENT, ROUNDING) if name in verdicts), SAME)

    def as_json(self) -> dict[str, Any]:
        """Return the whole comparison as plain values for scripts, with verdicts."""
        fields = to_builtins(self)
        for entry, generation in zip(fields["generations"], self.generations, strict=True):
            divergence, first = generation.divergence, generation.first_difference
            entry["verdict"] = generation.verdict
            entry["first_difference"] = None if first is None else first.step
            entry["parted_at"] = None if divergence is None else divergence.step
            entry["jump"] = generation.jump
        for entry, training in zip(fields["trainings"], self.trainings, strict=True):
            entry["verdict"] = training.verdict
        return {"version": JSON_VERSION, "verdict": self.verdict, **fields}


def kinds_of_parts(reader: TraceReader) -> frozenset[str]:
    """Return what the parts of a trace are: "training", "generation", or both."""
    return frozenset(_kind(row) for row in reader.generations())


def _kind(row: GenerationRow) -> str:
    return TRAINING if "training" in row.declared else "generation"


def is_training(reader: TraceReader) -> bool:
    """Tell whether a trace holds trainings alone."""
    return kinds_of_parts(reader) == {TRAINING}


def check_same_kind(a: TraceReader, b: TraceReader) -> None:
    """Raise `UsageError` for a training and a generation of tokens."""
    kinds = [kinds_of_parts(reader) for reader in (a, b)]
    if all(kinds) and kinds[0].isdisjoint(kinds[1]):
        what = f"A is a {min(kinds[0])} and B a {min(kinds[1])}, so they cannot be compared."
        raise UsageError(what, hint="Name two traces of the same kind.")


def compare_traces(
    a: TraceReader,
    b: TraceReader,
    *,
    generation: int | None = None,
    repeat: TraceReader | None = None,
    own: Mapping[str, str] = NOTHING,
) -> Comparison:
    """Compare two traces, or one generation of A with that of B which has the same prompt.

    `repeat` is another recording of A's run, whose differences from A are noise. Quantities of
    `own` are not compared, for the reason that it gives. Raises
    `UsageError` for a generation that neither trace has, for traces without generations, for a
    training and a generation, and for a `repeat` of something else; `TraceError` for a damaged
    trace.
    """
    for other in (b, *([repeat] if repeat else ())):
        check_same_kind(a, other)
    if repeat is not None and a.path.samefile(repeat.path):
        what = f"--noise {repeat.path} is A itself, which shows no noise."
        raise UsageError(what, hint="--noise takes another recording of the same run as A.")
    names = (str(a.path), str(b.path))
    identical = filecmp.cmp(a.path, b.path, shallow=False)
    pairs = alignment.align_generations(a, b, generation)
    if not pairs:
        which = "" if generation is None else f" {generation}"
        raise UsageError(f"Neither {names[0]} nor {names[1]} has a generation{which} of a model.")
    trained = [pair for pair in pairs if _kind(pair[0] or cast(GenerationRow, pair[1])) == TRAINING]
    trainings = tuple(
        compare_trainings((a, one), (b, other), repeat, own) for one, other in trained
    )
    found = tuple(_compare_pair(a, b, pair, repeat, own) for pair in pairs if pair not in trained)
    if (
        repeat is not None
        and found
        and not any(one.noise and one.noise.is_measured for one in found)
    ):
        what = f"{repeat.path} repeats none of the compared generations of {a.path}."
        raise UsageError(what, hint="--noise takes another recording of the same run as A.")
    return Comparison(*names, identical, found, trainings)


def _compare_pair(
    a: TraceReader,
    b: TraceReader,
    pair: GenerationPair,
    repeat: TraceReader | None,
    own: Mapping[str, str],
) -> GenerationDifference:
    one, other = pair
    if one is None or other is None:
        present = one or other
        assert present is not None
        missing = f"only {(b if one is None else a).path} has it"
        return GenerationDifference(generation=present.generation, missing=missing)
    sides = (a, one.generation), (b, other.generation)
    same = _conditions(sides[0]) == _conditions(sides[1])
    noise = _repeats_noise(*sides, repeat)
    return compare_generations(*sides, noise, own, same_conditions=same)


# -- the noise of repeats -------------------------------------------------------------------------


def _repeats_noise(a: Side, b: Side, repeat: TraceReader | None) -> Noise | None:
    """Return the noise between repeats of a generation, None without any that count.

    A `repeat` that the user names counts always; where A and B have other dtypes, the limits are at
    least those of the dtypes. Generations of the same prompt in one trace count where A and B ran
    under the same conditions.
    """
    if repeat is not None:
        pairs = [(a, (repeat, number)) for number in _with_prompt(repeat, a)]
        where = f"differences between A and {repeat.path}"
    elif _conditions(a) == _conditions(b):
        pairs = [
            (side, (side[0], number))
            for side in (a, b)
            for number in _with_prompt(side[0], side)
            if number != side[1]
        ]
        where = "differences between generations of the same prompt"
    else:
        return None
    largest: dict[str, float] = {}
    n_used = 0
    for one, other in pairs[:MAX_REPEATS]:
        walk = Walk(one, other, None)
        walk.run()
        if _is_repeat(walk):
            n_used += 1
            for key, value in walk.largest.items():
                largest[key] = max(largest.get(key, 0.0), value)
    if not n_used:
        return None
    return quantities.noise_of_repeats(largest, where, _least(a, b))


def _with_prompt(reader: TraceReader, side: Side) -> Iterator[int]:
    prompt = alignment.prompt_ids(*side)
    for row in reader.generations():
        if alignment.prompt_ids(reader, row.generation) == prompt:
            yield row.generation


def _is_repeat(walk: Walk) -> bool:
    """Tell whether two generations ran the same masks, rows and kernels."""
    if not walk.steps or not walk.layers.is_plain:
        return False
    inputs = (one.lengths or one.positions or one.masks or one.paths for one in walk.steps)
    return not any(inputs)


def _conditions(side: Side) -> tuple[object, ...]:
    """Return the conditions of a run on which its rounding depends."""
    reader, generation = side
    run, model = reader.run(), reader.model(generation)
    facts = (run.get(name) for name in ("compiled", "threads", "versions"))
    step = reader.last_step(generation)
    calls = [] if step is None else reader.calls(generation, step)
    kernels = tuple((call.layer, call.path, call.dtype) for call in calls)
    return (*facts, model.get("device"), model.get("dtype"), kernels)


def _least(a: Side, b: Side) -> float:
    """Return the limit of the dtypes if those of A and B differ, else 0."""
    firsts = [reader.record(number, 0) for reader, number in (a, b)]
    if firsts[0] is None or firsts[1] is None:
        return 0.0
    dtypes = [{call.dtype for call in step.calls} for step in firsts if step is not None]
    is_same = dtypes[0] == dtypes[1]
    return 0.0 if is_same else quantities.noise_of_dtypes(firsts[0], firsts[1]).floor
