"""Two branches at one place, of one trace or of two: tokens, candidates, KL and masks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from flexinspect.analysis import branch_comparison
from flexinspect.core.errors import FlexInspectError
from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.mask.cells_around import CellsAround
from flexinspect.panels.mask.mask_pair import load_mask_pair
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import StepWindow, step_window
from flexinspect.panels.token_window import TokenWindow, load_token_window
from flexinspect.records.step import UNKNOWN, Candidate
from flexinspect.trace import queries
from flexinspect.trace.reader import TraceReader

TOKEN_RADIUS = 96
MAX_SEARCHED_STEPS = 100_000
"""Steps in which differences are searched."""


class Side(Struct, frozen=True):
    """One of the two: a branch of a trace, and the name that it has on the screen."""

    source: Source
    branch: int
    name: str

    def place(self, place: TracePlace) -> TracePlace:
        """Return a place of the pair in this side's branch."""
        return replace(place, branch=self.branch)


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
    `n_only` counts the cells that are open in one side only, first and second.
    """

    place: TracePlace
    sides: tuple[SideData, SideData]
    steps: StepWindow
    kl: Mapping[int, tuple[float, bool]]
    differences: tuple[int, ...]
    cells: CellsAround | None
    n_only: tuple[int, int]


def load_pair(
    sides: tuple[Side, Side], place: TracePlace, n_columns: int, cells: tuple[int, int]
) -> PairData:
    """Read both sides at a place, with `cells` (rows, keys) around the difference of the masks.

    Raises `Missing` if a side has no steps, and `TraceError`.
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
    )


def step_bounds_of(side: Side, generation: int) -> tuple[int, int]:
    """Return the first and the last step of a side. Raises `Missing` without any."""
    bounds = queries.step_bounds(side.source.reader, generation, side.branch)
    if bounds is None:
        raise Missing(f"{side.name} has no step of generation {generation}.")
    return bounds


def find_differences(sides: tuple[Side, Side], generation: int) -> tuple[int, ...]:
    """Return the steps that chose different tokens, or that one side does not have."""
    left, right = (
        queries.chosen_tokens(side.source.reader, generation, 0, MAX_SEARCHED_STEPS, side.branch)
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
        queries.step_masks(side.source.reader, generation, 0, MAX_SEARCHED_STEPS, side.branch)
        for side in sides
    )
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
    branch = queries.branch_of_step(reader, place.generation, place.step, side.branch)
    step = (place.generation, place.step, branch)
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
    left, right = ((side.source.reader, generation, side.branch) for side in sides)
    found = {}
    for step in steps.steps:
        change = branch_comparison.side_change(step, left, right)
        if change is not None:
            found[step] = (change.kl, change.basis == "candidates")
    return found
