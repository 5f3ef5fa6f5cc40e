"""Two branches at one place, of one trace or of two: tokens, candidates, KL and masks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from flexinspect.analysis import branch_comparison
from flexinspect.analysis.run_diff import quantities
from flexinspect.analysis.run_diff.alignment import LayerAlignment, align_pair, have_same_segments
from flexinspect.analysis.run_diff.quantities import Noise, QuantityDifference
from flexinspect.core.errors import FlexInspectError
from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.mask.cells_around import CellsAround
from flexinspect.panels.mask.mask_pair import load_mask_pair
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import StepWindow, step_window
from flexinspect.panels.token_window import TokenWindow, load_token_window
from flexinspect.records.step import UNKNOWN, Candidate
from flexinspect.rules.step_diff import compare_steps, real_positions
from flexinspect.trace import queries
from flexinspect.trace.reader import TraceReader, load_steps

TOKEN_RADIUS = 96
MAX_SEARCHED_STEPS = 100_000
"""Steps in which differences are searched."""


class Side(Struct, frozen=True):
    """One of the two: a branch of a trace, and the name that it has on the screen.

    `generation` is the number of the compared generation in this trace, None for that of the place.
    `layers` maps the layers of the place to this side's, if they are aligned otherwise.
    """

    source: Source
    branch: int
    name: str
    generation: int | None = None
    layers: Mapping[int, int] = {}

    def number(self, generation: int) -> int:
        """Return the number that a generation of the place has in this trace."""
        return generation if self.generation is None else self.generation

    def place(self, place: TracePlace) -> TracePlace:
        """Return a place of the pair in this side's branch."""
        layer = self.layers.get(place.layer, place.layer)
        number = self.number(place.generation)
        return replace(place, branch=self.branch, generation=number, layer=layer)


class SideData(Struct, frozen=True):
    """The tokens around the place, the candidates of its step, and the token that it chose.

    They are None and () without any. The chosen token is not always one of the candidates.
    """

    window: TokenWindow | None
    candidates: Sequence[Candidate]
    chosen: Candidate | None


class PairData(Struct, frozen=True):
    """Both sides at a place.

    `kl` is (KL in nats, whether it is a lower bound) by step of `steps`, `differences` the steps
    whose tokens differ, in the whole branches. `cells` are around the first cell that differs;
    `n_only` counts the cells that are open in one side only, first and second. `numbers` are the
    differences of this step's quantities, with the noise that they are compared with; None without.
    """

    place: TracePlace
    sides: tuple[SideData, SideData]
    steps: StepWindow
    kl: Mapping[int, tuple[float, bool]]
    differences: tuple[int, ...]
    cells: CellsAround | None
    n_only: tuple[int, int]
    numbers: StepNumbers | None = None


class StepNumbers(Struct, frozen=True):
    """How far the quantities of a step are apart, in the order of computation."""

    differences: Sequence[QuantityDifference]
    noise: Noise

    def is_beyond(self, one: QuantityDifference) -> bool:
        """Whether a difference is more than noise."""
        return one.difference > self.noise.limit(one.quantity, one.layer)

    def worst(self, layer: int) -> QuantityDifference | None:
        """Return the first difference of a layer beyond noise, else its largest one."""
        own = [one for one in self.differences if one.layer == layer]
        beyond = next(filter(self.is_beyond, own), None)
        return beyond or max(own, key=lambda one: one.difference, default=None)


def load_pair(
    sides: tuple[Side, Side],
    place: TracePlace,
    n_columns: int,
    cells: tuple[int, int],
    noise: Noise | None = None,
    layers: LayerAlignment | None = None,
    skipped: Collection[str] = (),
) -> PairData:
    """Read both sides at a place, with `cells` (rows, keys) around the difference of the masks.

    Numbers are compared with `noise`, by default with that of the dtypes, and under the alignment
    `layers` of the runs, by default that of the step; quantities that are `skipped` are not. Raises
    `Missing` if a side has no steps, and `TraceError`.
    """
    bounds = [step_bounds_of(side, place.generation) for side in sides]
    first, last = max(low for low, _ in bounds), max(high for _, high in bounds)
    steps = step_window(place.step, first, last, n_columns)
    found = load_mask_pair(*((side.source, side.place(place)) for side in sides), size=cells)
    around, *n_only = found if found is not None else (None, 0, 0)
    return PairData(
        place=place,
        sides=(_load_side(sides[0], place), _load_side(sides[1], place)),
        steps=steps,
        kl=_load_kl(sides, place.generation, steps),
        differences=find_differences(sides, place.generation),
        cells=around,
        n_only=(n_only[0], n_only[1]),
        numbers=_load_numbers(sides, place, noise, layers, skipped),
    )


def _load_numbers(
    sides: tuple[Side, Side],
    place: TracePlace,
    noise: Noise | None,
    layers: LayerAlignment | None,
    skipped: Collection[str],
) -> StepNumbers | None:
    """Compare the quantities of a step; None where a side does not have it."""
    steps = []
    for side in sides:
        reader, number = side.source.reader, side.number(place.generation)
        branch = queries.branch_of_step(reader, number, place.step, side.branch)
        one = (number, branch, place.step, place.step + 1)
        steps += load_steps(reader, *one, streams=quantities.STREAMS)
    if len(steps) < 2:
        return None
    finds = sides[0].source.reader.mask, sides[1].source.reader.mask
    pair, real = align_pair(steps[0], steps[1], finds, layers), real_positions(steps[0])
    found = compare_steps(pair.a, pair.b, pair.finds, real=real)
    owners = [(side.source.reader, side.number(place.generation)) for side in sides]
    same = have_same_segments(owners[0], owners[1])
    every = quantities.compare_quantities(pair, found, real, same_segments=same)
    differences = [one for one in every if one.quantity not in skipped]
    return StepNumbers(differences, noise or quantities.noise_of_dtypes(pair.a, pair.b))


def step_bounds_of(side: Side, generation: int) -> tuple[int, int]:
    """Return the first and the last step of a side. Raises `Missing` without any."""
    number = side.number(generation)
    bounds = queries.step_bounds(side.source.reader, number, side.branch)
    if bounds is None:
        raise Missing(f"{side.name} has no step of generation {generation}.")
    return bounds


def find_differences(sides: tuple[Side, Side], generation: int) -> tuple[int, ...]:
    """Return the steps that chose different tokens, or that one side does not have."""
    left, right = (
        queries.chosen_tokens(
            side.source.reader, side.number(generation), 0, MAX_SEARCHED_STEPS, side.branch
        )
        for side in sides
    )
    steps = sorted(left.keys() | right.keys())
    return tuple(step for step in steps if left.get(step) != right.get(step))


def next_difference(
    sides: tuple[Side, Side], generation: int, here: int, direction: int
) -> tuple[int, int | None] | None:
    """Return the next (1) or the previous (-1) step that differs, wrapping around; None for none.

    It has another token. If all tokens are the same, it has another mask: then the first layer with
    one is returned too. Takes long where the masks of many steps are compared. Raises `TraceError`.
    """
    if steps := find_differences(sides, generation):
        return min(steps, key=lambda step: _distance(step, here, direction)), None
    left, right = (
        queries.step_masks(
            side.source.reader, side.number(generation), 0, MAX_SEARCHED_STEPS, side.branch
        )
        for side in sides
    )
    layer_of = {own: layer for layer, own in sides[1].layers.items()}
    right = {(step, layer_of.get(layer, layer)): name for (step, layer), name in right.items()}
    pairs = {at: (left[at], right[at]) for at in left.keys() & right.keys()}
    order = sorted(pairs, key=lambda at: (_distance(at[0], here, direction), at[1]))
    is_other = cache(lambda *names: _have_other_cells(sides, names))
    return next((at for at in order if is_other(*pairs[at])), None)


def _distance(step: int, here: int, direction: int) -> tuple[bool, int]:
    """Return a key by which steps are sorted as they are visited from `here` on."""
    ahead = (step - here) * direction
    return ahead <= 0, ahead


def _have_other_cells(sides: tuple[Side, Side], names: tuple[str, str]) -> bool:
    """Return whether the recorded cells of two masks differ: their fingerprints may, by a name."""
    if names[0] == names[1]:
        return False
    masks = [side.source.reader.mask(name) for side, name in zip(sides, names, strict=True)]
    cells = [mask.cells for mask in masks if mask is not None and mask.cells is not None]
    if len(cells) < len(masks):
        return False
    try:
        return bool((cells[0] != cells[1]).any())
    except ValueError:  # of other sizes
        return True


def _load_side(side: Side, place: TracePlace) -> SideData:
    reader, own = side.source.reader, side.place(place)
    try:
        window = load_token_window(side.source, own, TOKEN_RADIUS)
    except (Missing, FlexInspectError):
        window = None
    branch = queries.branch_of_step(reader, own.generation, place.step, side.branch)
    step = (own.generation, place.step, branch)
    return SideData(window, reader.candidates(*step), _load_chosen(reader, step))


def _load_chosen(reader: TraceReader, step: tuple[int, int, int]) -> Candidate | None:
    """Return the token that a step chose, with its probability; None if it is unknown."""
    logits = reader.logits(*step)
    if logits is None or logits.chosen_id == UNKNOWN:
        return None
    text = next((one.text for one in reader.step_tokens(*step) if one.text), "")
    nan, chance = math.nan, logits.chosen_logprob
    return Candidate(logits.chosen_rank, logits.chosen_id, text, nan, chance, nan, nan)


def _load_kl(
    sides: tuple[Side, Side], generation: int, steps: StepWindow
) -> dict[int, tuple[float, bool]]:
    left, right = ((side.source.reader, side.number(generation), side.branch) for side in sides)
    found = {}
    for step in steps.steps:
        change = branch_comparison.side_change(step, left, right)
        if change is not None:
            found[step] = (change.kl, change.basis == "candidates")
    return found
