"""Compare the ranks of one run: what must be equal on all of them, and the first place that is not.

Which quantities must be equal follows from how the model is split. Under data parallel each rank
has its own batch, and gradients and weights are the same after the reduction. Under tensor parallel
each rank has its own heads, and what follows an all-reduce is the same: the output of each layer,
the logits and the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from flexinspect.analysis.ranks.rank_run import RankRun, split_sizes
from flexinspect.analysis.ranks.waiting import Waiting, measure_waiting
from flexinspect.analysis.run_diff.generations import (
    DIFFERENT,
    ROUNDING,
    SAME,
    GenerationDifference,
    Place,
)
from flexinspect.analysis.run_diff.quantities import QUANTITIES
from flexinspect.analysis.run_diff.traces import (
    TRAINING,
    Comparison,
    compare_traces,
    kinds_of_parts,
)
from flexinspect.analysis.run_diff.training import CALLS, INPUTS, WEIGHTS, TrainingDifference
from flexinspect.core.errors import UsageError
from flexinspect.trace.reader import TraceReader

OWN_HEADS = "each rank has its own heads"
OWN_BATCH = "each rank has its own batch"
OWN_CALLS = "a rank may evaluate alone"
OWN_PART = "each rank has a part of each weight"
_OF_HEADS = ("q", "k", "v", "scores", "attention")
_OF_WEIGHTS = ("gradient norm", "total gradient norm", "update ratio", *WEIGHTS)

Progress = Callable[[int, int], None]
ComparedPart = GenerationDifference | TrainingDifference


class RankPlace(Struct, frozen=True):
    """The first place where ranks differ: which ones, from which rank, and what."""

    generation: int
    ranks: tuple[int, ...]
    reference: int
    place: Place


class RankComparison(Struct, frozen=True):
    """The ranks of a run, compared with one of them, the `reference`.

    With several groups of tensor parallel ranks, each rank is compared with the first of its group.
    `tp_size` ranks share each layer, `shards` ranks each parameter (1: none). `pairs` has the
    comparison of the reference with each other rank, `own_inputs` the ranks with other prompts than
    the reference, which data parallel gives them. `first` is None if nothing differs beyond noise.
    """

    run: RankRun
    is_training: bool
    tp_size: int
    shards: int
    reference: int
    pairs: Mapping[int, Comparison]
    first: RankPlace | None = None
    own_inputs: tuple[int, ...] = ()
    waiting: Waiting = Waiting()

    @property
    def dp_size(self) -> int:
        """The number of groups that have a batch or a prompt of their own."""
        return max(self.run.world_size // self.tp_size, 1)

    def reference_of(self, rank: int) -> int:
        """Return the rank that a rank is compared with; itself for a reference."""
        ranks = [one.rank for one in self.run.traces]
        row = _reference_row(self.run, ranks.index(rank), ranks.index(self.reference), self.tp_size)
        return ranks[row]

    @property
    def verdict(self) -> str:
        """`same`, `rounding` (all within noise) or `different`."""
        if self.first is not None:
            return DIFFERENT
        comparable = [one for rank, one in self.pairs.items() if rank not in self.own_inputs]
        has_rounding = any(each.verdict == ROUNDING for one in comparable for each in _parts(one))
        return ROUNDING if has_rounding else SAME

    def differing_steps(self, rank: int, generation: int) -> Mapping[int, str]:
        """Return the steps in which a rank differs from the reference beyond noise, with what."""
        if rank not in self.pairs:
            return {}
        parts = _parts(self.pairs[rank])
        return next((one.beyond for one in parts if one.generation == generation), {})


def compare_ranks(
    run: RankRun, readers: Sequence[TraceReader], progress: Progress = lambda n, total: None
) -> RankComparison:
    """Compare all ranks of a run; `progress` is called with the number of ranks that are done.

    Raises `UsageError` for traces without steps and for a training beside a generation, and
    `TraceError`.
    """
    kinds = {kinds_of_parts(reader) for reader in readers}
    if len(kinds) > 1:
        what = f"Some ranks of {run.name} recorded a training, and others a generation."
        raise UsageError(what, hint="Record the same code on each rank.")
    tp_size, shards = split_sizes(readers)
    own: dict[str, str] = {}
    for kind in kinds.pop():
        is_training = kind == TRAINING
        is_other = is_training and _trains_another_model(readers[0])
        sizes = (1, 1) if is_other else (tp_size, shards)
        own |= own_quantities(*sizes, is_training=is_training)
    references = [_reference_row(run, row, 0, tp_size) for row in range(len(readers))]
    pairs = _compare_with(run, readers, references, own, progress)
    reference, first = 0, _first_place(run, references, pairs, tp_size)
    if first is not None and len(first.ranks) == len(readers) - 1 > 1:
        # All differ from the first rank: do they differ from each other?
        references = [1] * len(readers)
        again = _compare_with(run, readers, references, own, progress)
        other = _first_place(run, references, again, tp_size)
        if other is not None and other.ranks == (run.traces[0].rank,):
            reference, first, pairs = 1, other, again
    return RankComparison(
        run=run,
        is_training=kinds_of_parts(readers[0]) == {TRAINING},
        tp_size=tp_size,
        shards=shards,
        reference=run.traces[reference].rank,
        pairs=pairs,
        first=first,
        own_inputs=_own_inputs(pairs) if tp_size == 1 else (),
        waiting=measure_waiting(run, readers),
    )


def _trains_another_model(reader: TraceReader) -> bool:
    """Tell whether a program that generated with one model also trained another."""
    name = (reader.run().get("model") or {}).get("name")
    return any("training" in row.declared and row.model != name for row in reader.generations())


def own_quantities(tp_size: int, shards: int, *, is_training: bool) -> dict[str, str]:
    """Return which quantities each rank has of its own, and why, by how the model is split."""
    if not is_training:
        return dict.fromkeys(_OF_HEADS, OWN_HEADS) if tp_size > 1 else {}
    own = {CALLS: OWN_CALLS}
    own |= {"loss": OWN_BATCH, INPUTS: OWN_BATCH} if tp_size == 1 else {}
    return own | (dict.fromkeys(_OF_WEIGHTS, OWN_PART) if shards > 1 else {})


def _reference_row(run: RankRun, row: int, reference: int, tp_size: int) -> int:
    """Return the place of the rank that a rank is compared with.

    Ranks that share layers have neighbouring numbers: a device mesh has them in its last dimension.
    """
    if not 1 < tp_size < run.world_size:
        return reference
    group = run.traces[row].rank // tp_size
    own = (at for at, one in enumerate(run.traces) if one.rank // tp_size == group)
    return next(own)


def _compare_with(
    run: RankRun,
    readers: Sequence[TraceReader],
    references: Sequence[int],
    own: Mapping[str, str],
    progress: Progress,
) -> dict[int, Comparison]:
    """Compare each rank that has steps with its reference, both by place; the result is by rank."""
    others = [(row, reference) for row, reference in enumerate(references) if row != reference]
    pairs = {}
    for n_done, (row, reference) in enumerate(others):
        progress(n_done, len(others))
        if run.traces[row].last is not None and run.traces[reference].last is not None:
            pairs[run.traces[row].rank] = compare_traces(readers[reference], readers[row], own=own)
    progress(len(others), len(others))
    return pairs


def _parts(one: Comparison) -> Sequence[ComparedPart]:
    return [*one.generations, *one.trainings]


def _own_inputs(pairs: Mapping[int, Comparison]) -> tuple[int, ...]:
    return tuple(
        rank
        for rank, pair in pairs.items()
        if any(one.prompt is not None for one in pair.generations)
    )


def _first_place(
    run: RankRun, references: Sequence[int], pairs: Mapping[int, Comparison], tp_size: int
) -> RankPlace | None:
    """Return the first place in which ranks differ, with all ranks of a group that differ in it."""
    places: dict[tuple[float, ...], list[tuple[int, int, Place]]] = {}
    unfinished = {one.rank for one in run.traces if one.state != "finished"}
    ranks = [one.rank for one in run.traces]
    reference_of = {rank: ranks[row] for rank, row in zip(ranks, references, strict=True)}
    for rank, pair in pairs.items():
        own = reference_of[rank]
        is_cut = bool(unfinished & {rank, own})
        for part in _parts(pair):
            place = _place_of(part, tp_size, is_cut=is_cut)
            if place is not None:
                found = (rank, part.generation, place)
                order = (*_order(part.generation, place), own)
                places.setdefault(order, []).append(found)
    if not places:
        return None
    first = places[min(places)]
    rank, generation, place = first[0]
    differing = tuple(rank for rank, _, _ in first)
    return RankPlace(generation, differing, reference_of[rank], place)


def _place_of(part: ComparedPart, tp_size: int, *, is_cut: bool) -> Place | None:
    """Return where a generation or training differs; not where a rank stopped or has its prompt."""
    prompt = getattr(part, "prompt", None)
    if prompt is not None:
        text = f"{prompt.a!r} against {prompt.b!r} at position {prompt.position}"
        return Place(0, None, "prompt", "value", text=text) if tp_size > 1 else None
    if part.missing:
        is_own = is_cut or tp_size == 1
        return None if is_own else Place(0, None, "generation", "missing", text=part.missing)
    place = part.first
    if place is None or (is_cut and place.quantity == "step" and place.reason == "missing"):
        return None
    return place


def _order(generation: int, place: Place) -> tuple[float, ...]:
    """Return a key that sorts places as a run reaches them."""
    layer = float("inf") if place.layer is None else place.layer
    names = [*QUANTITIES]
    at = names.index(place.quantity) if place.quantity in names else -1
    return (generation, place.step, layer, at)
