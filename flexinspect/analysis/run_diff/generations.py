"""Walk through one generation of two runs, step by step, to the first place beyond noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.analysis.run_diff import alignment, quantities
from flexinspect.analysis.run_diff.alignment import LayerAlignment
from flexinspect.analysis.run_diff.quantities import Noise, QuantityDifference
from flexinspect.core.text import format_ranges
from flexinspect.records.step import StepRecord, TokenRecord
from flexinspect.rules import step_diff
from flexinspect.rules.step_diff import StepDifference
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.replay import replay_steps

SAME, ROUNDING, DIFFERENT = "same", "rounding", "different"


class Place(Struct, frozen=True):
    """A place where two runs differ beyond noise, and why it counts.

    `reason` is "value", "shape", "dtype", "missing", "order" or "mask"; `difference` and `limit`
    are relative, None where there is no number. `text` describes both sides, `before` what was
    compared before this place in the same layer, and is within noise.
    """

    step: int
    layer: int | None
    quantity: str
    reason: str
    difference: float | None = None
    limit: float | None = None
    text: str = ""
    before: tuple[str, ...] = ()


class Compared(Struct):
    """One quantity over all steps: in how many places it was compared, and the largest difference.

    `n_exact` of the `n` places have arrays on both sides, the others statistics or candidates.
    """

    n: int = 0
    n_exact: int = 0
    difference: float = 0.0
    step: int = 0
    layer: int | None = None

    def add(self, step: int, one: QuantityDifference) -> None:
        """Count one place."""
        self.n, self.n_exact = self.n + 1, self.n_exact + one.exact
        if one.difference > self.difference:
            self.difference, self.step, self.layer = one.difference, step, one.layer


class PromptDifference(Struct, frozen=True):
    """The first position where two prompts differ, and both texts there (empty past the end)."""

    position: int
    a: str
    b: str


class GenerationDifference(step_diff.RunDifference, frozen=True):
    """One generation of two traces, compared.

    `generation` is its number in A, `partner` that in B. `prompt` is the first difference of the
    prompts, None if they are the same; if they differ, no step is compared. `n_steps` counts the
    steps of each trace. `words` are the texts of both tokens where the runs diverge, `texts` those
    of the tokens that are named, by position. `padding` are positions that were left out. `alike`
    are, for A and for B, the steps whose layer statistics equal those of the step before: they were
    not computed again (a replayed graph, a stale buffer). `missing` says which trace alone has the
    generation. `begins` is the first place where a number differs at all, `first` the first one
    beyond `noise`, `compared` and `not_compared` (with the
    reason) are the quantities, `left_out` the steps of A and of B without a partner. `beyond` has
    what differs first in each step of A that differs beyond noise.
    """

    generation: int = 0
    partner: int = 0
    prompt: PromptDifference | None = None
    n_steps: tuple[int, int] = (0, 0)
    words: tuple[str, str] = ("", "")
    texts: Mapping[int, str] = {}
    padding: tuple[int, ...] = ()
    alike: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    missing: str = ""
    begins: Place | None = None
    first: Place | None = None
    noise: Noise | None = None
    layers: LayerAlignment = LayerAlignment()
    left_out: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    compared: Mapping[str, Compared] = {}
    not_compared: Mapping[str, str] = {}
    beyond: Mapping[int, str] = {}

    @property
    def verdict(self) -> str:
        """`same`, `rounding` (all within noise) or `different`."""
        if self.missing or self.prompt is not None or self.first is not None:
            return DIFFERENT
        numbers = any(one.difference for one in self.compared.values())
        return SAME if self.first_difference is None and not numbers else ROUNDING


Side = tuple[TraceReader, int]
"""A generation of a trace."""


NOTHING: Mapping[str, str] = MappingProxyType({})


def compare_generations(
    a: Side,
    b: Side,
    noise: Noise | None = None,
    own: Mapping[str, str] = NOTHING,
    *,
    same_conditions: bool = False,
) -> GenerationDifference:
    """Compare a generation of A with one of B; by default the noise is that of their dtypes.

    Quantities of `own` are not compared, for the reason that it gives. `same_conditions` tells that
    they ran with the same versions, device, threads and kernels.
    """
    prompts = [[t for t in reader.tokens(number) if t.step is None] for reader, number in (a, b)]
    result = GenerationDifference(
        generation=a[1],
        partner=b[1],
        prompt=_compare_prompts(*prompts),
        n_steps=(a[0].n_steps(a[1]), b[0].n_steps(b[1])),
    )
    if result.prompt is not None:
        return result
    walk = Walk(a, b, noise, own, same_conditions=same_conditions)
    walk.run()
    return replace(result, texts=_read_texts(a, walk.steps), **walk.fields())


def _compare_prompts(a: Sequence[TokenRecord], b: Sequence[TokenRecord]) -> PromptDifference | None:
    for position, (one, other) in enumerate(zip_longest(a, b)):
        if one is None or other is None or one.token_id != other.token_id:
            words = ("" if token is None else token.text or token.token for token in (one, other))
            return PromptDifference(position, *words)
    return None


def _read_texts(side: Side, steps: Sequence[StepDifference]) -> dict[int, str]:
    """Return the texts of the tokens of the first cells that differ, by position."""
    masks = [mask for step in steps for mask in step.masks]
    sides = [side for mask in masks for side in (mask.only_a, mask.only_b) if side is not None]
    positions = {position for side in sides for position in side.first}
    tokens = (t for p in positions for t in side[0].tokens(side[1], 0, p, p + 1))
    return {token.pos: token.text or token.token for token in tokens}


class _WatchedSteps:
    """Iterates over the steps of a generation, and notes what a comparison reports besides.

    `stale` are the steps whose layer statistics equal those of the step before, `real` the
    positions that are not padding, and `last_text` the text of the last step's tokens.
    """

    def __init__(self, side: Side) -> None:
        self._steps = replay_steps(*side, 0, quantities.STREAMS)
        self.stale: list[int] = []
        self.real: step_diff.RealPositions = None
        self.last_text = ""

    def __iter__(self) -> Iterator[StepRecord]:
        before: tuple[object, ...] = ()
        for index, step in enumerate(self._steps):
            if index == 0:
                self.real = step_diff.real_positions(step)
            now = tuple((stat.layer, stat.norm, stat.min, stat.max) for stat in step.layer_stats)
            if now and now == before:
                self.stale.append(step.step)
            before = now
            yield step


class Walk:
    """Compares the steps of two generations of one prompt, as long as both received one text.

    `noise` None stands for that of the dtypes of the first pair of steps. After `run`, `largest`
    has the largest finite difference of each quantity and layer.
    """

    def __init__(
        self,
        a: Side,
        b: Side,
        noise: Noise | None,
        own: Mapping[str, str] = NOTHING,
        *,
        same_conditions: bool = False,
    ) -> None:
        self._sides, self._own = (a, b), own
        self._beyond: dict[int, str] = {}
        self._same_conditions = same_conditions
        self._watched = (_WatchedSteps(a), _WatchedSteps(b))
        self._same_segments = alignment.have_same_segments(a, b)
        self.noise = noise
        self.first: Place | None = None
        self._begins: Place | None = None
        self._n_equal, self._has_differed = 0, False
        self._equal_in_step: set[str] = set()
        self._first_number: QuantityDifference | None = None
        self.steps: list[StepDifference] = []
        self.layers = LayerAlignment()
        self.compared: dict[str, Compared] = {}
        self.largest: dict[str, float] = {}
        self._left_out: tuple[list[int], list[int]] = ([], [])
        self._recorded: tuple[set[str], set[str]] = (set(), set())
        self._words = ("", "")

    def run(self) -> None:
        """Compare the steps."""
        for one, other in alignment.align_steps(*self._watched):
            if one is None or other is None:
                self._leave_out(one, other)
            elif self._compare_pair(one, other):
                break
        self._check_ends()

    def fields(self) -> dict[str, object]:
        """Return the fields of `GenerationDifference` that the walk found."""
        noise = self.noise or Noise("no step was compared", 0.0)
        real = self._watched[0].real
        return {
            "steps": tuple(self.steps),
            "limit": noise.first if noise.first_key else noise.limit("hidden", None),
            "words": self._words,
            "padding": () if real is None else tuple(np.flatnonzero(~real).tolist()),
            "alike": tuple(tuple(one.stale) for one in self._watched),
            "begins": self._begins,
            "first": self.first,
            "noise": noise,
            "layers": self.layers,
            "left_out": tuple(map(tuple, self._left_out)),
            "compared": self.compared,
            "not_compared": self._not_compared(),
            "beyond": self._beyond,
        }

    def _leave_out(self, one: StepRecord | None, other: StepRecord | None) -> None:
        for step, left_out in zip((one, other), self._left_out, strict=True):
            if step is not None:
                left_out.append(step.step)

    def _compare_pair(self, one: StepRecord, other: StepRecord) -> bool:
        """Compare two steps; return whether the runs receive different tokens from here on."""
        real = self._watched[0].real
        for own, step in zip(self._recorded, (one, other), strict=True):
            own |= quantities.recorded_quantities(step)
        finds = self._sides[0][0].mask, self._sides[1][0].mask
        pair = alignment.align_pair(one, other, finds, self.layers if self.steps else None)
        self.layers = pair.layers
        if self.noise is None:
            self.noise = quantities.noise_of_dtypes(pair.a, pair.b, has_first=self.layers.is_plain)
        found = step_diff.compare_steps(pair.a, pair.b, pair.finds, real=real)
        found = replace(found, rows=pair.rows)
        self.steps.append(found)
        every = quantities.compare_quantities(pair, found, real, same_segments=self._same_segments)
        differences = [one for one in every if one.quantity not in self._own]
        self._count(found.step, differences)
        place = self._find_place(found, differences, pair.a, pair.b)
        self.first = self.first or place
        if place is not None:
            layer = "" if place.layer is None else f"layer {place.layer}: "
            self._beyond[found.step] = f"{layer}{place.quantity}"
        if found.is_diverged:
            texts = ("".join(t.text or t.token for t in step.tokens) for step in (one, other))
            self._words = (next(texts), next(texts))
        return found.is_diverged

    def _count(self, step: int, differences: Sequence[QuantityDifference]) -> None:
        self._equal_in_step.clear()
        for one in differences:
            if one.difference and self._begins is None:
                size = one.difference if math.isfinite(one.difference) else None
                self._begins = Place(step, one.layer, one.quantity, one.reason, size)
            self._watch_for_first_number(one)
            self.compared.setdefault(one.quantity, Compared()).add(step, one)
            if math.isfinite(one.difference):
                key = quantities.noise_key(one.quantity, one.layer)
                self.largest[key] = max(self.largest.get(key, 0.0), one.difference)

    def _watch_for_first_number(self, one: QuantityDifference) -> None:
        """Note the first number of the model that differs, if others show that both round alike.

        These are equal bit by bit: any number before it under the same conditions, else the same
        quantity of a layer before it in this step, which the same code computes.
        """
        if self._has_differed or not one.exact or one.quantity not in quantities.EXACT:
            return
        if not one.difference:
            self._n_equal += 1
            self._equal_in_step.add(one.quantity)
            return
        self._has_differed = True
        if one.quantity in self._equal_in_step or (self._same_conditions and self._n_equal):
            self._first_number = one

    # -- the first place -------------------------------------------------------------------------

    def _find_place(
        self,
        found: StepDifference,
        differences: Sequence[QuantityDifference],
        one: StepRecord,
        other: StepRecord,
    ) -> Place | None:
        """Return the first place of a step beyond noise: inputs and structure before numbers."""
        at = found.step
        if found.lengths:
            return Place(at, None, "rows", "shape", text=found.lengths)
        if found.positions:
            return Place(at, None, "position ids", "value", text=found.positions)
        orders = [[call.layer for call in step.calls] for step in (one, other)]
        if orders[0] != orders[1]:
            missing = sorted(set(orders[0]) ^ set(orders[1]))
            if not missing:
                texts = " against ".join(", ".join(map(str, order[:12])) for order in orders)
                return Place(at, orders[0][0], "attention calls", "order", text=texts)
            name = "B" if missing[0] in orders[0] else "A"
            text = f"{name} has no attention call in layers {format_ranges(missing)}"
            return Place(at, missing[0], "attention calls", "missing", text=text)
        return self._first_beyond(found, differences, quantities.odd_dtypes(one, other))

    def _first_beyond(
        self,
        found: StepDifference,
        differences: Sequence[QuantityDifference],
        odd: Mapping[int, tuple[str, str]],
    ) -> Place | None:
        assert self.noise is not None
        for one in differences:
            if one.layer is not None and one.layer in odd:
                a, b = odd[one.layer]
                return Place(found.step, one.layer, "dtype", "dtype", text=f"{a} against {b}")
            first = self.noise.first
            if first is not None and one is self._first_number and one.difference > first:
                key = quantities.noise_key(one.quantity, one.layer)
                self.noise = replace(self.noise, first_key=key)
            limit = self.noise.limit(one.quantity, one.layer)
            if one.difference > limit:
                return self._place(found, one, limit, differences)
        return None

    def _place(
        self,
        found: StepDifference,
        one: QuantityDifference,
        limit: float,
        differences: Sequence[QuantityDifference],
    ) -> Place:
        number = one.difference if math.isfinite(one.difference) else None
        place = Place(found.step, one.layer, one.quantity, one.reason, number, limit, one.text)
        if one.quantity == "token":
            return replace(place, limit=None, text=_describe_margins(found))
        gap = self._unpartnered_before(one.layer)
        if gap:
            place = replace(place, reason="missing", text=gap)
        own = [each for each in differences if each.layer == one.layer]
        before = tuple(each.quantity for each in own[: own.index(one)])
        return replace(place, before=before)

    def _unpartnered_before(self, layer: int | None) -> str:
        """Return which layers without a partner come just before an aligned one, in words."""
        pairs = self.layers.pairs
        at = next((i for i, pair in enumerate(pairs) if pair[0] == layer), None)
        if at is None:
            return ""
        for side, (name, other) in enumerate((("A", "B"), ("B", "A"))):
            low = pairs[at - 1][side] if at else -1
            between = [n for n in self.layers.left_out[side] if low < n < pairs[at][side]]
            if between:
                which = format_ranges(between)
                return f"layer {which} of {name}, which {other} does not have, comes before it"
        return ""

    def _check_ends(self) -> None:
        """Let tokens that only one run has be a place, if the texts are the same before."""
        if self.first is not None or (self.steps and self.steps[-1].is_diverged):
            return
        last = [own.last_step(number) for own, number in self._sides]
        compared = self.steps[-1].step if self.steps else -1
        for side, name in enumerate("AB"):
            late = [step for step in self._left_out[side] if step > compared or not self.steps]
            if late:
                ends = ", ".join(
                    f"{one} ends with step {step}" for one, step in zip("AB", last, strict=True)
                )
                which = "step" if len(late) == 1 else "steps"
                text = f"{name} alone has {which} {format_ranges(late)} ({ends})"
                self.first = Place(late[0], None, "step", "missing", text=text)
                return

    def _not_compared(self) -> dict[str, str]:
        """Return why quantities were not compared."""
        reasons = {}
        for name in quantities.QUANTITIES:
            if name in self.compared:
                continue
            if name in self._own:
                reasons[name] = self._own[name]
                continue
            has = [name in own for own in self._recorded]
            which = {(True, False): "only A has it", (False, True): "only B has it"}
            both = "no place has it in both runs" if all(has) else "recorded in neither run"
            if name == "attention" and all(has) and not self._same_segments:
                both = "the segments differ"
            if name == "mask" and all(has):
                both = "their cells are not recorded at level basic"
            reasons[name] = which.get((has[0], has[1]), both)
        return reasons | {"attention output": "no level records it"}


def _describe_margins(found: StepDifference) -> str:
    """Return both margins, and whether the difference of the logits can have turned the choice."""
    if found.margins is None:
        return ""
    text = "margins of {:.3g} and {:.3g}".format(*found.margins)
    if found.logits is not None and min(found.margins) <= 2 * found.logits:
        text += f", which a change of the logits by {found.logits:.3g} can turn"
    return text
